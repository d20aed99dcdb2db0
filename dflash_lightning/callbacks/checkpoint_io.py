"""Checkpoint files that are whole or not there."""

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import TorchCheckpointIO

from dflash_lightning.callbacks.run import say


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes under another name, flushes to the disk and renames; reads without a copy in memory.

    Lightning's own builds the file in memory first and holds it twice. A disk that fails is said
    aloud and ends nothing: ranks that wait for the writer would hang.
    """

    def __init__(self) -> None:
        super().__init__()
        self.failed = False

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None
    ) -> None:
        """Write one file."""
        path = Path(path)
        part = path.with_name(path.name + ".part")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with part.open("wb") as file:
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())
            part.replace(path)
            self.failed = False
        except (OSError, RuntimeError) as error:  # torch reports a full disk as RuntimeError
            self.failed = True
            with suppress(OSError):
                part.unlink(missing_ok=True)
            say(f"NOT SAVED {path}: {error}")

    def remove_checkpoint(self, path: str | Path) -> None:
        """Remove a file that a new one has replaced, if that one is there."""
        if not self.failed:
            super().remove_checkpoint(path)

    def load_checkpoint(
        self, path: str | Path, map_location: Any = None, weights_only: bool | None = True
    ) -> dict[str, Any]:
        """Map one file into memory."""
        return torch.load(path, map_location="cpu", mmap=True, weights_only=weights_only)
