"""Runs that several files of tests go on from."""

from pathlib import Path

import pytest
from training.chain import KillAt
from training.restarts import (
    Run,
    last,
    run,
)

from dflash_lightning.callbacks import (
    Stopped,
)
from dflash_lightning.data.store import RowStore


@pytest.fixture(scope="session")
def whole(store: RowStore, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Three epochs without a stop; the state after step 8 is kept."""
    return run(store, tmp_path_factory.mktemp("whole"), snapshot=8)


@pytest.fixture(scope="session")
def at_seven(store: RowStore, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that a signal stopped after seven steps: in mid-epoch, past the warm-up."""
    folder = tmp_path_factory.mktemp("seven")
    stopped = run(store, folder, KillAt(6)).error
    assert isinstance(stopped, Stopped)
    assert stopped.code == 75
    return last(folder)


@pytest.fixture(scope="session")
def at_epoch_end(
    store: RowStore, whole: Run, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Run]:
    """A run that was stopped in the last step of its first epoch, before the validation."""
    folder = tmp_path_factory.mktemp("end")
    first = run(store, folder, KillAt(whole.steps_of_epochs[0] - 1))
    assert isinstance(first.error, Stopped)
    return last(folder), first
