"""Signals that ask a run to stop, kept until all ranks have agreed on it."""

import os
import shutil
import signal
import subprocess
import threading
from types import FrameType
from typing import Any

import lightning as L

from dflash_lightning.callbacks.run import say

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class StopSignals:
    """Only remembers a signal: ranks may be anywhere, and must stop at the same step.

    ``asked`` says whether one came, ``requeue`` whether it was Slurm's, who then wants the job put
    back into its queue.
    """

    def __init__(self) -> None:
        self.asked = self.requeue = False
        self._before: Any = signal.SIG_DFL

    def expect(self) -> None:
        """Forget earlier signals; from now on SIGUSR1 ends nothing: a large target loads long."""
        self.asked = self.requeue = False
        self._before = handle(signal.SIGUSR1, self._note)

    def take_over(self, trainer: L.Trainer) -> None:
        """Replace Lightning's handlers; a SIGTERM that they have noted is one to us, too."""
        early: Any = trainer._signal_connector
        if early.received_sigterm:
            early.received_sigterm = False
            self.asked = True
        for number in SIGNALS:
            handle(number, self._note)
        # Lightning's ranks tell each other before every batch whether theirs has noted one, and
        # wait for the device to hear it.
        vars(trainer.fit_loop.epoch_loop)["_broadcast_sigterm_tensor"] = nothing

    def ignore(self) -> None:
        """The answer is under way: a second signal must not cut it off."""
        for number in SIGNALS:
            handle(number, signal.SIG_IGN)

    def give_back(self, trainer: L.Trainer) -> None:
        """Give SIGUSR1 back.

        Lightning gives back what it found, and for this one it found ours: before callbacks are
        torn down at a good end, and after it at any other.
        """
        handle(signal.SIGUSR1, self._before)
        vars(trainer.fit_loop.epoch_loop).pop("_broadcast_sigterm_tensor", None)
        trainer._signal_connector._original_handlers[signal.SIGUSR1] = self._before

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self.asked = True
        self.requeue = self.requeue or number == signal.SIGUSR1


def handle(number: int, handler: Any) -> Any:
    """Set a handler, and return the one before; nothing outside the main thread, as Python asks."""
    if threading.current_thread() is not threading.main_thread():
        return signal.SIG_DFL
    return signal.signal(number, handler)


def nothing() -> None:
    """Do nothing."""


def requeue_job() -> None:
    """Ask Slurm to start this job again, where it is one."""
    job, scontrol = os.environ.get("SLURM_JOB_ID"), shutil.which("scontrol")
    if job and scontrol:
        done = subprocess.run(
            [scontrol, "requeue", job], capture_output=True, text=True, check=False
        )
        say(f"requeued job {job}" if done.returncode == 0 else f"not requeued: {done.stderr}")
