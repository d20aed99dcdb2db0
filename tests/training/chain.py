"""A run that is stopped and taken up again, process by process: a fresh fit for each link.

The driver imports the heavy packages once and forks every rank from itself, as an outside launcher
would start them: real processes, real signals, the real command line.

usage: chain.py SPEC.json, whose "links" are {recipe, options, world_size, accumulate, kill}
"""

import atexit
import faulthandler
import json
import os
import signal
import sys
import traceback
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback

from dflash_lightning.__main__ import main
from dflash_lightning.callbacks import run_folder

LIMIT = 240  # seconds until a link that hangs is killed; shortly before, it tells where it hangs


class RecordRows(Callback):
    """Appends a line for each trained batch to ``rows-RANK.jsonl`` beside the checkpoints."""

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        folder = run_folder(trainer)
        self.file = (folder / f"rows-{trainer.global_rank}.jsonl").open("a")

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        self.step = trainer.global_step

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        anchors = batch.anchors[batch.anchor_valid].tolist()
        line = {
            "step": self.step,
            "epoch": trainer.datamodule.epoch,
            "micro": batch_idx % trainer.accumulate_grad_batches,
            "restart": pl_module.progress["restarts"],
            "rows": batch.rows.tolist(),
            "width": batch.input_ids.shape[1],
            "anchors": anchors,
        }
        self.file.write(json.dumps(line) + "\n")
        self.file.flush()


class KillAt(Callback):
    """Sends a signal to this process, or to its whole group, at a hook of a step.

    Args:
        step: Optimizer step, counted over the whole run.
        name: Of the signal.
        rank: Which rank sends it; -1 sends it from rank 0 to the group.
        hook: ``start`` or ``end`` of the step's first batch, or ``update``.
    """

    def __init__(self, step: int, name: str = "SIGTERM", rank: int = 0, hook: str = "start"):
        self.step, self.rank, self.hook = step, rank, hook
        self.signal = signal.Signals[name]

    def _at(self, trainer: L.Trainer, hook: str) -> None:
        if (trainer.global_step, hook) != (self.step, self.hook):
            return
        if trainer.global_rank == max(self.rank, 0):
            self.step = -1
            (os.killpg if self.rank < 0 else os.kill)(
                os.getpgid(0) if self.rank < 0 else os.getpid(), self.signal
            )

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        self._at(trainer, "start")

    def on_before_optimizer_step(self, trainer, pl_module, optimizer) -> None:
        self._at(trainer, "update")

    def on_validation_batch_start(self, trainer, *_args, **_more) -> None:
        self._at(trainer, "validation")


def rank_process(link: dict, rank: int, port: int, log: Path) -> None:
    """Become one rank of a fit; never returns."""
    layout = {"LOCAL_RANK": rank, "NODE_RANK": 0, "WORLD_SIZE": link["world_size"]}
    os.environ.update({key: str(value) for key, value in layout.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(out, 1)
    os.dup2(out, 2)
    faulthandler.dump_traceback_later(LIMIT - 10)
    options = ["--trainer.devices", str(link["world_size"])]
    if link["world_size"] > 1:
        options += ["--trainer.strategy", "ddp"]
    options += ["--trainer.accumulate_grad_batches", str(link.get("accumulate", 1))]
    if kill := link.get("kill"):
        callback = {"class_path": "training.chain.KillAt", "init_args": kill}
        options += ["--trainer.callbacks+", json.dumps(callback)]
    sys.argv = ["dflash-lightning", "fit", "--config", link["recipe"], *options, *link["options"]]
    sys.argv += link.get("rank_options", {}).get(str(rank), [])
    code = 1
    try:
        main()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
        if isinstance(end.code, str):
            print(end.code)  # noqa: T201 - what the interpreter would print
    except BaseException:  # noqa: BLE001
        traceback.print_exc()
    atexit._run_exitfuncs()  # as an interpreter does that ends by itself
    sys.stdout.flush()
    os._exit(code)


def run_link(link: dict, port: int, log: Path) -> list[int]:
    """Start all ranks of a fit in a process group of its own, and wait for their exit codes."""
    pids: list[int] = []
    for rank in range(link["world_size"]):
        pid = os.fork()
        if not pid:
            os.setpgid(0, pids[0] if pids else 0)
            rank_process(link, rank, port, log)
        os.setpgid(pid, pids[0] if pids else pid)
        pids.append(pid)

    def give_up(*_: object) -> None:
        os.killpg(pids[0], signal.SIGKILL)
        raise TimeoutError(f"a link ran for {LIMIT} seconds; its log ends with\n{_end(log)}")

    signal.signal(signal.SIGALRM, give_up)
    signal.alarm(LIMIT)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    signal.alarm(0)
    return codes


def _end(log: Path) -> str:
    return log.read_text()[-8000:] if log.exists() else "nothing"


def run_chain(spec: Path) -> None:
    """Run every link, and write down exit codes."""
    torch.set_num_threads(1)
    what = json.loads(spec.read_text())
    codes = []
    for number, link in enumerate(what["links"]):
        codes.append(run_link(link, what["port"] + number, spec.with_name(f"log-{number}.txt")))
    spec.with_name("codes.json").write_text(json.dumps(codes))


if __name__ == "__main__":
    run_chain(Path(sys.argv[1]))
