"""What W&B wrote to disk, for tests: every value, where the reader of runs takes some."""

from pathlib import Path
from typing import Any

from dflash_lightning.diagnosis.tracker import OfflineFile


def history(folder: Path) -> tuple[set[str], list[dict[str, Any]]]:
    """Run ids and logged rows of all offline runs in a folder, oldest first."""
    ids, rows = set(), []
    for path in sorted((folder / "wandb").glob("offline-run-*/run-*.wandb")):
        file = OfflineFile(path)
        rows += file.rows()
        ids.add(file.run_id)
    return ids, rows
