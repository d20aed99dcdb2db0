"""The diagnosis while a run trains: for its loggers, and for the terminal where it matters."""

import math
import shlex
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import WandbLogger

from dflash_lightning.callbacks.ledger import Ledger
from dflash_lightning.callbacks.rate import Stopwatch
from dflash_lightning.callbacks.run import callbacks_of, run_folder, say
from dflash_lightning.diagnosis import Deviator, Diagnosis, deviators, diagnose, read_run, tops_of

VERDICTS = {"ON TRACK": 0, "WATCH": 1, "INVESTIGATE": 2}
FIRST_SECONDS = 0.1  # that the first diagnosis is expected to take
ROWS = 20  # of the table
TABLE = ("row", "times", "distance", "pull", "far", "last steps")


class RunDiagnosis(Callback):
    """Says while a run trains why its loss jumps, and whether it is on track.

    Rank 0 reads the ledger so far and gives every logger ``diagnosis/mix``, ``diagnosis/noise`` and
    ``diagnosis/rest`` (shares of the variance from step to step), ``diagnosis/std`` (its root, in
    nats), ``diagnosis/mix_adjusted`` (the loss of the last 50 steps under the data set's mix, in
    nats) and ``diagnosis/verdict``: 0 on track, 1 watch, 2 investigate. Values are of the last step
    that was read; one that cannot be told yet is NaN. W&B also gets the rows that moved the loss
    most, as the table ``diagnosis/rows``: how many steps each was on top of, its distance from its
    like in deviations of a row, its mean pull on the loss in nats, whether that is far beyond the
    usual top row, and the last steps. The terminal is told where the verdict changes to WATCH or
    INVESTIGATE, and at the end, but not that it is too early for one. Training goes on where a
    diagnosis fails.

    Args:
        every_n_steps: Optimizer steps between diagnoses; 0 or null for none, also at the end.
        time_share: Largest part of the time of steps that may go into diagnoses. One that would
            take more, by what the last one took, is left out.
    """

    def __init__(self, every_n_steps: int | None = 200, time_share: float = 0.01) -> None:
        if (every_n_steps or 0) < 0 or not time_share > 0:
            raise ValueError(
                "every_n_steps must be at least 1, or 0 or null for no diagnosis, and time_share "
                f"positive, got {every_n_steps} and {time_share}."
            )
        self.every_n_steps = every_n_steps
        self.time_share = time_share
        self.found: Diagnosis | None = None  # the last diagnosis, on rank 0
        self.verdict = "ON TRACK"  # the last that rests on enough steps
        self.seconds = FIRST_SECONDS  # that the last one took
        self._since = 0.0  # seconds of steps before it
        self._last_step = -1
        self._folder = Path()
        self._told = False

    # -- the run --------------------------------------------------------------------------------

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Refuse to stand alone, and ask where the ledger is; Lightning broadcasts the answer."""
        if stage != "fit" or not self.every_n_steps:
            return
        if not callbacks_of(trainer, Ledger):
            raise ValueError(
                "RunDiagnosis must stand beside a Ledger, which writes what it reads, and the "
                "trainer has none. Add Ledger() to its callbacks, or leave RunDiagnosis out."
            )
        self._folder = run_folder(trainer)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """The ledger counts the seconds of a process, so they begin anew."""
        self.found, self._since, self._last_step, self._told = None, 0.0, -1, False

    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Diagnose where the steps since the last time have paid for it; no part of a step."""
        if trainer.fit_loop._should_accumulate() or not self._is_due(trainer):
            return
        ledger = callbacks_of(trainer, Ledger)[0]
        if self.time_share * (ledger.trained_seconds - self._since) < self.seconds:
            return
        ledger.clock.pause()
        self._look(trainer)
        ledger.clock.start()
        self._since = ledger.trained_seconds
        if self.found is not None and is_judged(self.found):
            before, self.verdict = self.verdict, self.found.verdict
            if self.verdict not in (before, "ON TRACK"):
                line = f"step {trainer.global_step}: {self.verdict}, {because(self.found)}"
                say(f"{line}; more: {self._command}")

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Say how the whole run is judged, and how to read more; nothing of a run of few steps."""
        if not self.every_n_steps or not trainer.is_global_zero:
            return
        if self._last_step != trainer.global_step:
            self._look(trainer)
        found = self.found
        if found is not None and is_judged(found):
            words = (f"verdict {found.verdict}.", found.state, found.remedy)
            say(" ".join(word for word in words if word))
            say(f"why the loss jumps: {self._command}")

    def state_dict(self) -> dict[str, Any]:
        """What was said and what it took, so that a restart neither repeats nor forgets it."""
        return {"verdict": self.verdict, "seconds": self.seconds}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""
        self.verdict, self.seconds = state_dict["verdict"], state_dict["seconds"]

    # -- a diagnosis ----------------------------------------------------------------------------

    @property
    def _command(self) -> str:
        return f"dflash-lightning diagnose {shlex.quote(str(self._folder))}"

    def _is_due(self, trainer: L.Trainer) -> bool:
        if not self.every_n_steps or not trainer.is_global_zero:
            return False
        return trainer.global_step % self.every_n_steps == 0

    def _look(self, trainer: L.Trainer) -> None:
        """Diagnose the run so far and log it; told once where that fails."""
        watch = Stopwatch()
        watch.start()
        self._last_step, self.found = trainer.global_step, None
        try:
            run = read_run(self._folder / "ledger.csv")
            found = diagnose(run)
            tops = tops_of(run)
            rows = [] if tops is None else deviators(tops)[:ROWS]
            step, tokens = int(run.step[-1]), float(run.column("tokens_seen")[-1])
            self._log(trainer, {**values_of(found), "tokens_seen": tokens}, rows, step)
            self.found = found
        except (ValueError, OSError) as error:
            if not self._told:
                say(f"step {trainer.global_step}: no diagnosis, training goes on: {error}")
            self._told = True
        self.seconds = watch.take()

    @staticmethod
    def _log(trainer: L.Trainer, values: dict[str, float], rows: list[Deviator], step: int) -> None:
        """Give loggers values and rows on the axis that a step's own values have.

        Not through the module's ``log``: it would keep them only at steps that Lightning logs.
        """
        cells = [
            [d.row, d.times, d.size, d.pull, d.far, ", ".join(map(str, d.steps))] for d in rows
        ]
        for logger in trainer.loggers:
            logger.log_metrics(values, step)
            if isinstance(logger, WandbLogger):
                logger.log_table("diagnosis/rows", list(TABLE), cells, step=step)


def values_of(found: Diagnosis) -> dict[str, float]:
    """A diagnosis for loggers: the same keys whatever was found, NaN where it is not known."""
    shares = {name: math.nan if x is None else x.share for name, x in found.shares.items()}
    last = found.mix_adjusted
    values = {
        **shares,
        "std": found.std,
        "mix_adjusted": math.nan if last is None else last.value,
        "verdict": float(VERDICTS[found.verdict]),
    }
    return {f"diagnosis/{name}": value for name, value in values.items()}


def is_judged(found: Diagnosis) -> bool:
    """Whether a verdict says more than that it is too early for one."""
    return found.random is not None or found.verdict == "INVESTIGATE"


def because(found: Diagnosis) -> str:
    """What decided a verdict other than ON TRACK, in a few words."""
    rest = found.shares["rest"]
    if found.because == "rest" and rest is not None:
        return f"{100 * rest.share:.0f} % of the variance is unexplained"
    return next(cause.says for cause in found.causes if cause.cause == found.because)
