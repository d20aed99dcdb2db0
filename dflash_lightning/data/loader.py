"""The loader of batches: it times the waiting for it, and its workers outlive no one."""

import atexit
import multiprocessing
import signal
import time
from collections.abc import Iterator

from torch.utils.data import DataLoader

from dflash_lightning.data.collate import Batch


class TimedLoader(DataLoader):
    """Adds up, in ``waited``, the seconds that its user waits for batches.

    Measured here and not between steps, where a GPU that still computes would look like a wait.
    """

    waited = 0.0

    def __iter__(self) -> Iterator[Batch]:  # pyrefly: ignore[bad-override]
        return self._timed(super().__iter__())

    def _timed(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        while True:
            start = time.perf_counter()
            try:
                batch = next(batches)
            except StopIteration:
                return
            self.waited += time.perf_counter() - start
            yield batch


def ignore_signals(_worker: int) -> None:
    """A signal to the process group is for the main process; workers end when it does."""
    for name in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(name, signal.SIG_IGN)


@atexit.register
def _end_workers() -> None:
    """End workers that are left: Python would wait for ever, since they ignore its signal."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # the loader's handler would call it a failure
    for child in multiprocessing.active_children():
        if child.daemon:
            child.kill()
