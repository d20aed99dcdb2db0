"""One fit at a time in a run folder that can be written."""

import fcntl
import tempfile
import time
from pathlib import Path
from typing import TextIO

import lightning as L

PATIENCE = 15.0  # seconds until the workers of a killed fit have noticed


class RunLock:
    """Keeps a second fit out of a run folder for as long as this process lives."""

    def __init__(self) -> None:
        self._file: TextIO | None = None

    def take(self, trainer: L.Trainer, folder: Path) -> None:
        """Take the lock on rank 0; call it on all ranks.

        Raises:
            ValueError: Another fit is at work there; on all ranks.
        """
        taken = trainer.is_global_zero and not self._lock(folder)
        if trainer.strategy.broadcast(taken):
            raise ValueError(
                f"run folder {folder} must belong to one fit at a time; another one is writing "
                "there. Stop it first, or start a new run without ckpt_path."
            )

    def release(self) -> None:
        """Let another fit in."""
        if self._file is not None:
            fcntl.flock(self._file, fcntl.LOCK_UN)  # loader workers hold the open file as well
            self._file.close()
            self._file = None

    def _lock(self, folder: Path) -> bool:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = (folder / ".lock").open("w")
        patience = time.monotonic() + PATIENCE
        while True:
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > patience:
                    return False
                time.sleep(0.2)
            except OSError:  # a disk without locks keeps nobody out
                return True
            else:
                return True


def check_writable(folder: Path) -> None:
    """Refuse a folder that cannot be written, or made; nothing is left there.

    Raises:
        ValueError: Nothing can be written there.
    """
    there = next(
        place for place in (folder.absolute(), *folder.absolute().parents) if place.exists()
    )
    try:
        with tempfile.TemporaryFile(dir=there) as probe:
            probe.write(b"checkpoints come here")
    except OSError as error:
        raise ValueError(
            f"run folder {folder} must be writable, got: {error.strerror} at {there}. Give another "
            "place as save_dir of the logger, or change its permissions."
        ) from error
