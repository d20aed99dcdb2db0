"""The rehearsal of a run: two steps, a save, a third step after a restart, an export; then gone."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

import torch
import yaml

from dflash_lightning.assets import cache_folder
from dflash_lightning.callbacks.memory import gigabytes
from dflash_lightning.checkpoints import run_root
from dflash_lightning.data.datamodule import QUICKSTART
from dflash_lightning.drafter.checkpoint import export, load_drafter
from dflash_lightning.planning.job import build_target

STEPS = 2  # before the save; one more follows the restart
VALIDATION_BATCHES = 2
LOGGERS = "lightning.pytorch.loggers"


def rehearse(arguments: list[str]) -> None:
    """Do in small what a fit will do, beside its run folder, and say what the whole will take.

    Args:
        arguments: Command line of ``fit`` without the word itself.

    Raises:
        ValueError: A stage failed, or the disk is too small; in one line.
    """
    ranks = max(int(os.environ.get(name, 1)) for name in ("WORLD_SIZE", "SLURM_NTASKS"))
    if ranks > 1:
        raise ValueError(
            f"--rehearse must be started once, and starts its ranks itself; {ranks} were started. "
            "Call it without torchrun or srun."
        )
    with stage("configuration"):
        config = yaml.safe_load(command("fit", *arguments, "--print_config"))
        beside = first_existing(run_root(config["trainer"]).absolute())
    with tempfile.TemporaryDirectory(prefix=".rehearsal-", dir=beside) as folder:
        scratch = Path(folder)
        run = scratch / "run"
        options = [*arguments, *moved_to(scratch, config["trainer"]["logger"])]
        with stage(f"{STEPS} steps and a save"):
            fit(*options, "--ckpt_path=null", f"--trainer.max_steps={STEPS}")
            saved = newest(run)
        with stage("a restart and one more step"):
            fit(*options, f"--ckpt_path={saved}", f"--trainer.max_steps={STEPS + 1}")
        with stage("export"):
            last = check_steps(newest(run))
            check_export(last, scratch / "exported")
        with stage("plan"):
            measured = read_preflight(run)
            plan = plan_of(arguments, config, last, measured, scratch / "plan.json")
        needed = disk_needed(config, run, scratch / "exported", plan)
        free = shutil.disk_usage(beside).free + size_of(scratch)
    with stage("disk"):
        if needed > free:
            raise ValueError(
                f"the run needs about {gigabytes(needed)} in {beside}, where {gigabytes(free)} are "
                "free. Free some, lower checkpoint.save_top_k, or set another folder."
            )
    sys.stdout.write(summary(plan, measured, needed, free, beside))


# -- stages ----------------------------------------------------------------------------------------


@contextmanager
def stage(name: str) -> Generator[None]:
    """Name the stage in which something is refused."""
    sys.stdout.write(f"rehearsal: {name}\n")
    sys.stdout.flush()
    try:
        yield
    except (ValueError, OSError) as error:
        refuse(name, " ".join(str(error).split()))


def refuse(name: str, line: str) -> NoReturn:
    """End the rehearsal.

    Raises:
        ValueError: Always.
    """
    raise ValueError(f"the rehearsal failed at stage '{name}': {line}")


def command(*words: str, stdout: int | None = subprocess.PIPE) -> str:
    """Run a command of this package as the user would, and return what it prints.

    Raises:
        ValueError: It failed; its last line.
    """
    line = [sys.executable, "-m", "dflash_lightning", *words]
    pipe = subprocess.PIPE
    # A session of its own: Ctrl-C reaches this process alone, which then ends all ranks.
    child = subprocess.Popen(line, stdout=stdout, stderr=pipe, text=True, start_new_session=True)
    try:
        printed, complaints = child.communicate()
    except BaseException:
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        raise
    if child.returncode:
        lines = [line for line in complaints.splitlines() if line.strip()] or ["no message"]
        prefix = f"dflash-lightning {words[0]}: "
        own = [line for line in lines if line.startswith(prefix)]
        raise ValueError((own or lines)[-1].removeprefix(prefix))
    return printed or ""


def fit(*options: str) -> None:
    """Run ``fit``, whose lines the user sees."""
    command("fit", *options, stdout=None)


def moved_to(scratch: Path, loggers: Any) -> list[str]:
    """Options that keep everything inside a folder, and validation short.

    Args:
        scratch: The folder.
        loggers: Of the configuration; W&B is rehearsed too, offline.
    """
    place: dict[str, Any] = {"save_dir": str(scratch)}
    kinds = {"CSVLogger": {**place, "name": "", "version": "run"}}
    if "WandbLogger" in json.dumps(loggers):
        kinds["WandbLogger"] = {**place, "offline": True}
    ours = [{"class_path": f"{LOGGERS}.{k}", "init_args": given} for k, given in kinds.items()]
    return [
        f"--trainer.logger={json.dumps(ours)}",
        f"--trainer.default_root_dir={scratch}",
        f"--checkpoint.dirpath={scratch / 'run' / 'checkpoints'}",
        f"--trainer.limit_val_batches={VALIDATION_BATCHES}",
        "--trainer.enable_progress_bar=false",
    ]


def newest(run: Path) -> Path:
    """The checkpoint that was written last.

    Raises:
        ValueError: There is none.
    """
    files = sorted(run.rglob("*.ckpt"), key=lambda file: file.stat().st_mtime_ns)
    if not files:
        raise ValueError("fit ended without a checkpoint")
    by_name = [file for file in files if file.stem == "last"]
    return (by_name or files)[-1]


def check_steps(path: Path) -> dict[str, Any]:
    """Read the checkpoint of the restarted run.

    Raises:
        ValueError: It did not go on where the first one stopped.
    """
    saved = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    if saved["global_step"] != STEPS + 1:
        raise ValueError(
            f"the restarted run must end at step {STEPS + 1}, got {saved['global_step']}"
        )
    return {**saved, "path": path}


def check_export(saved: dict[str, Any], folder: Path) -> None:
    """Export a checkpoint and read it back.

    Raises:
        ValueError: Names or shapes differ.
    """
    export(saved["path"], folder)
    found = {name: w.shape for name, w in load_drafter(folder).state_dict().items()}
    weights = saved["state_dict"].items()
    expected = {name.removeprefix("drafter."): w.shape for name, w in weights}
    if found != expected:
        differing = sorted(
            name for name in {*found, *expected} if found.get(name) != expected.get(name)
        )
        raise ValueError(f"the exported drafter differs from the trained one in {differing[:3]}")


# -- what the whole will take ----------------------------------------------------------------------


def read_preflight(run: Path) -> dict[str, Any] | None:
    """What the preflight measured; None where it is switched off."""
    path = run / "preflight.json"
    return json.loads(path.read_text()) if path.exists() else None


def plan_of(
    arguments: list[str],
    config: dict[str, Any],
    saved: dict[str, Any],
    measured: dict[str, Any] | None,
    path: Path,
) -> dict[str, Any]:
    """The plan of the whole run, for the ranks and at the speed of the rehearsal."""
    nodes = int(config["trainer"]["num_nodes"])
    ranks = int(saved["dflash"]["settings"]["trainer.world_size"])
    options = [f"--json={path}", "--ckpt_path=null", f"--trainer.devices={ranks // nodes}"]
    if config["data"]["store"] == QUICKSTART:
        key = build_target(config["model"]["target"]).tokenizer_fingerprint
        options.append(f"--data.store={cache_folder() / f'quickstart-{key}'}")
    if measured is not None:
        options.append(f"--tokens_per_second={measured['tokens_per_second']}")
    command("plan", *arguments, *options)
    return json.loads(path.read_text())


def disk_needed(config: dict[str, Any], run: Path, exported: Path, plan: dict[str, Any]) -> int:
    """Bytes that the run will leave, the largest checkpoint for each that is kept.

    Args:
        config: The configuration.
        run: Run folder of the rehearsal.
        exported: The exported drafter.
        plan: The plan of the whole run.
    """
    checkpoint = max(file.stat().st_size for file in run.rglob("*.ckpt"))
    top = int(config["checkpoint"]["save_top_k"])
    best = len(plan["steps_per_epoch"]) if top == -1 else top
    # beside the best ones: the last, the one before it, and the one that is being written
    lines = sum(file.stat().st_size for file in run.glob("*.csv"))
    return checkpoint * (best + 3) + size_of(exported) + lines * plan["steps"] // (STEPS + 1)


def summary(
    plan: dict[str, Any], measured: dict[str, Any] | None, needed: int, free: int, place: Path
) -> str:
    """What the user wants to know, a line each."""
    ranks = f"{plan['gpus']} ranks" if plan["gpus"] > 1 else "1 rank"
    lines = [f"{plan['steps']:,} optimizer steps on {ranks}"]
    if measured is None:
        lines.append("hours and memory: unknown without the preflight")
    else:
        speed = f"{plan['hours']:.1f} hours at {measured['tokens_per_second']:,.0f} tokens/s"
        how = "measured on the heaviest batches, without loading and waiting for other ranks"
        lines += [f"{speed}, {how}", f"peak memory {gigabytes(measured['peak'])}"]
    lines.append(f"disk {gigabytes(needed)} of {gigabytes(free)} free in {place}")
    return "".join(f"rehearsal: {line}\n" for line in lines) + "rehearsal: passed\n"


def first_existing(path: Path) -> Path:
    """A folder, or the closest one above it that is there: on the same disk."""
    return next(folder for folder in (path, *path.parents) if folder.is_dir())


def size_of(folder: Path) -> int:
    """Bytes of all files in a folder."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
