"""Where the time of a step goes: phases and operators of a few steps, phases of the whole run."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import numpy as np
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.profilers import PyTorchProfiler
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from dflash_lightning.callbacks.ledger import Ledger
from dflash_lightning.callbacks.rate import FIRST_STEPS
from dflash_lightning.callbacks.run import callbacks_of, parts, run_folder, say
from dflash_lightning.data.store import write_json
from dflash_lightning.diagnosis import Run, read_run
from dflash_lightning.phases import PHASES
from dflash_lightning.table import Table, wrapped

FIRST = 10  # steps of a process before operators are recorded
COUNT = 6  # of them are recorded
MOST_OPERATORS = 10
MOST_BYTES = 20_000_000  # of a trace that is kept
NAMES = {"wait": "waiting for data", **PHASES, "rest": "rest"}
REMEDIES = {
    "wait": "raise data.num_workers",
    "target": "for data that fits on the disk as features, set data.cache_features",
    "optimizer": "raise trainer.accumulate_grad_batches, if the schedule allows fewer updates",
    "rest": "it is the host's own work: give a step more rows, or log less often",
}


class Operator(NamedTuple):
    """What an operator took by itself, without those that it called.

    Args:
        name: Torch's.
        calls: Per step.
        seconds: Per step, on the GPU where there is one.
    """

    name: str
    calls: float
    seconds: float


@dataclass(frozen=True, kw_only=True)
class StepProfile:
    """Where the time of a few steps went.

    Args:
        steps: Whose phases these are.
        recorded: Steps whose operators these are; recording them makes a step slower.
        recorded_seconds: Of a recorded step.
        seconds: Of a step.
        tokens_per_second: Real tokens of all ranks.
        phases: Seconds of each phase in a step, by the names of ``NAMES``.
        operators: The dearest ones.
    """

    steps: list[int]
    recorded: list[int]
    recorded_seconds: float
    seconds: float
    tokens_per_second: float
    phases: Mapping[str, float]
    operators: Sequence[Operator]

    def __str__(self) -> str:
        """Two tables and a sentence, at most 100 columns."""
        whole = max(self.seconds, 1e-9)
        phases = [
            [NAMES[phase], f"{1000 * x:,.1f}", percent(x / whole)]
            for phase, x in self.phases.items()
        ]
        total = ["a step", f"{1000 * self.seconds:,.1f}", f"{self.tokens_per_second:,.0f} tokens/s"]
        recorded = max(self.recorded_seconds, 1e-9)
        operators = [
            [
                x.name[:60],
                f"{x.calls:,.0f}",
                f"{1000 * x.seconds:,.1f}",
                percent(x.seconds / recorded),
            ]
            for x in self.operators
        ]
        tables = [
            Table(f"Steps {few(self.steps)}", ["phase", "ms", "share"], [*phases, total]),
            Table(
                f"Operators of steps {few(self.recorded)}, without what they call",
                ["operator", "calls a step", "ms", "share"],
                operators,
            ),
        ]
        return "\n\n".join([*(table.text() for table in tables), wrapped(self.dominates())])

    def dominates(self) -> str:
        """What takes most of a step, and what helps where something does."""
        phase = max(self.phases, key=lambda name: self.phases[name])
        share = percent(self.phases[phase] / max(self.seconds, 1e-9))
        dearest = f"; the dearest operator is {self.operators[0].name}" if self.operators else ""
        remedy = f". What helps: {REMEDIES[phase]}" if phase in REMEDIES else ""
        return f"Most of a step is {NAMES[phase]}, {share}{dearest}{remedy}."


class Profile(Callback):
    """Tells where the time goes, on rank 0.

    With ``enabled`` the operators of a few steps are recorded, after those in which kernels are
    chosen and workers start; what validation and saving take is no part of it. The tables go to
    the terminal, to ``profile.txt`` and ``profile.json``, and the last recorded batch as a Chrome
    trace to ``trace.json.gz``. A run that is too short for that is recorded in its second half.
    In any case the end of a run says how its time divides into phases.

    Args:
        enabled: False records no operators.
    """

    def __init__(self, enabled: bool = False) -> None:
        self.enabled = enabled
        self.found: StepProfile | None = None  # on rank 0
        self._first = self._end = 0
        self._folder = Path()
        self._rows: list[dict[str, Any]] = []
        self._operators: dict[str, tuple[int, float]] = {}
        self._recorder: profile | None = None

    # -- the run --------------------------------------------------------------------------------

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Refuse a second recorder, and to stand alone."""
        if not self.enabled or stage != "fit":
            return
        if not callbacks_of(trainer, Ledger):
            raise ValueError(
                "Profile must stand beside a Ledger, whose clock it reads, and the trainer has "
                "none. Add Ledger() to its callbacks before Profile, or leave Profile out."
            )
        if isinstance(vars(trainer)["profiler"], PyTorchProfiler):
            raise ValueError(
                "--profile must be the only recorder of operators, and trainer.profiler is one, "
                "too. Leave one of them out."
            )

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Choose the steps."""
        begin, total = trainer.global_step, parts(trainer)[0].total_steps()
        left = total - begin if self.enabled and trainer.is_global_zero else 0
        count = min(COUNT, (left + 1) // 2)
        self._first = begin + min(FIRST, left - count)
        self._end = self._first + count
        self.found, self._rows, self._operators = None, [], {}
        self._folder = run_folder(trainer)

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Record a batch; not what lies between batches."""
        if not self._first <= trainer.global_step < self._end:
            return
        clock = callbacks_of(trainer, Ledger)[0].clock
        clock.pause()
        kinds = [ProfilerActivity.CPU]
        kinds += [ProfilerActivity.CUDA] if pl_module.device.type == "cuda" else []
        self._recorder = profile(activities=kinds)
        self._recorder.start()
        clock.start()

    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Count the operators; report once all steps are there. It is no part of a step."""
        if self._first == self._end or self.found is not None:
            return
        ledger = callbacks_of(trainer, Ledger)[0]
        ledger.clock.pause()
        if self._recorder is not None:
            self._recorder.stop()
            add_operators(self._operators, self._recorder)
        if not trainer.fit_loop._should_accumulate():
            self._rows.append(ledger.row)
            if self._rows[-1]["step"] == self._end - 1:
                self._report(self._folder)
        self._recorder = None
        ledger.clock.start()

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Say where the time of the whole run went."""
        path = self._folder / "ledger.csv"
        if not trainer.is_global_zero or not callbacks_of(trainer, Ledger) or not path.is_file():
            return
        try:
            shares = shares_of(read_run(path))
        except (ValueError, OSError) as error:
            say(f"time of the steps: {error}")
            return
        if shares:
            words = ", ".join(f"{NAMES[name]} {percent(x)}" for name, x in shares.items())
            say(f"time of the steps: {words}")

    # -- a report -------------------------------------------------------------------------------

    def _report(self, folder: Path) -> None:
        """Say and write what was found."""
        recorded = [row for row in self._rows if row["step"] >= self._first]
        before = [row for row in self._rows[FIRST_STEPS:] if row["step"] < self._first]
        self.found = profile_of(before or recorded, recorded, self._operators)
        say(f"\n{self.found}\n")
        try:
            (folder / "profile.txt").write_text(f"{self.found}\n")
            write_json(folder / "profile.json", as_json(self.found))
            trace = folder / "trace.json.gz"
            assert self._recorder is not None
            self._recorder.export_chrome_trace(str(trace))
            if trace.stat().st_size > MOST_BYTES:
                trace.unlink()
        except OSError as error:
            say(f"the profile could not be written to {folder}: {error}")


# -- numbers ---------------------------------------------------------------------------------------


def add_operators(operators: dict[str, tuple[int, float]], recorder: profile) -> None:
    """Add calls and own seconds of each operator; of kernels through the operator that starts them.

    Args:
        operators: By name; changed.
        recorder: Stopped.
    """
    on_gpu = ProfilerActivity.CUDA in recorder.activities
    for event in recorder.key_averages():
        if event.device_type != DeviceType.CPU or event.is_user_annotation:
            continue
        spent = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        calls, seconds = operators.get(event.key, (0, 0.0))
        operators[event.key] = calls + event.count, seconds + spent / 1e6


def profile_of(
    rows: Sequence[Mapping[str, Any]],
    recorded: Sequence[Mapping[str, Any]],
    operators: Mapping[str, tuple[int, float]],
) -> StepProfile:
    """Work out means of steps.

    Args:
        rows: Of the ledger, for the phases.
        recorded: Of the ledger, in which operators were recorded.
        operators: Their calls and seconds in all recorded steps.
    """
    total = {name: sum(row[name] for row in rows) for name in ("seconds", "tokens")}
    spent = {"wait": sum(row["wait_seconds"] for row in rows)}
    spent |= {phase: sum(row[f"{phase}_seconds"] for row in rows) for phase in PHASES}
    spent["rest"] = max(0.0, total["seconds"] - sum(spent.values()))
    dearest = sorted(operators.items(), key=lambda item: -item[1][1])[:MOST_OPERATORS]
    return StepProfile(
        steps=[row["step"] for row in rows],
        recorded=[row["step"] for row in recorded],
        recorded_seconds=sum(row["seconds"] for row in recorded) / len(recorded),
        seconds=total["seconds"] / len(rows),
        tokens_per_second=total["tokens"] / max(total["seconds"], 1e-9),
        phases={name: x / len(rows) for name, x in spent.items()},
        operators=[
            Operator(name, calls / len(recorded), seconds / len(recorded))
            for name, (calls, seconds) in dearest
        ],
    )


def shares_of(run: Run) -> dict[str, float]:
    """Part of each phase in the time of a run's steps; none where no step knows its phases."""
    known = np.isfinite(run.column("target_seconds"))
    whole = float(run.column("seconds")[known].sum())
    if not whole:
        return {}
    columns = {"wait": "wait_seconds", **{phase: f"{phase}_seconds" for phase in PHASES}}
    shares = {name: float(run.column(x)[known].sum()) / whole for name, x in columns.items()}
    return {**shares, "rest": max(0.0, 1 - sum(shares.values()))}


# -- words -----------------------------------------------------------------------------------------


def as_json(found: StepProfile) -> dict[str, Any]:
    """Plain types, times in seconds."""
    return {**asdict(found), "operators": [x._asdict() for x in found.operators]}


def percent(share: float) -> str:
    """A share in words."""
    return f"{100 * share:.1f} %"


def few(steps: Sequence[int]) -> str:
    """Steps in a row."""
    return f"{steps[0]:,} to {steps[-1]:,}" if len(steps) > 1 else f"{steps[0]:,}"
