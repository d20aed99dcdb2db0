"""Asks the command, in this process, and keeps runs that it is asked about."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from diagnosis.asking import Ask, Folder, Told
from diagnosis.simulate import simulate
from diagnosis.write_ledger import run_on, strict_json, write_ledger

from dflash_lightning.data.diagnose import main
from dflash_lightning.data.store import RowStore
from dflash_lightning.diagnosis.run import Run


@pytest.fixture
def ask(capsys: pytest.CaptureFixture) -> Ask:
    """What the command prints; it must fit the terminal, and say nothing elsewhere."""

    def call(*words: object) -> str:
        capsys.readouterr()
        main([str(word) for word in words])
        said = capsys.readouterr()
        assert said.err == ""
        assert max(map(len, said.out.splitlines())) <= 100
        return said.out

    return call


@pytest.fixture
def told(ask: Ask, tmp_path: Path) -> Told:
    """What the command writes as JSON."""

    def call(*words: object) -> dict[str, Any]:
        file = tmp_path / "told" / "numbers.json"
        ask(*words, "--json", file)
        return dict(strict_json(file.read_text()))

    return call


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """Folders of simulated runs, each written once."""
    root = tmp_path_factory.mktemp("runs")

    def call(name: str, run: Run | None = None) -> Path:
        if not (root / name).is_dir():
            write_ledger(simulate(1, fault=name)[0] if run is None else run, root / name)
        return root / name

    return call


@pytest.fixture(scope="module")
def healthy(folder_of: Folder) -> Path:
    return folder_of("healthy", simulate(1)[0])


@pytest.fixture(scope="module")
def trained(folder_of: Folder, store: RowStore) -> Path:
    """A run on a store that is still there, whose row 17 costs more than others."""
    return folder_of("trained", run_on(store, epochs=12, harder=6.0 * (np.arange(40) == 17)))
