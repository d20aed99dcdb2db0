"""Several real processes: each rank is given its rows of the plan, epoch by epoch."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from training.record_rows import BATCHING, VAL_FRACTION

from dflash_lightning import plan_epoch
from dflash_lightning.data.store import RowStore, split_rows

SCRIPT = Path(__file__).with_name("record_rows.py")


def received(store: RowStore, folder: Path, devices: int, workers: int, accumulate: int) -> list:
    arguments = [str(store.path), str(folder), *map(str, (devices, workers, accumulate))]
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(devices)]


@pytest.mark.ddp
@pytest.mark.slow
@pytest.mark.parametrize(
    ("devices", "workers", "accumulate"), [(2, 0, 1), (2, 2, 1), (3, 0, 1), (3, 2, 1), (2, 0, 2)]
)
def test_each_rank_is_given_its_rows_of_the_plan_in_both_epochs(
    store: RowStore, tmp_path: Path, devices: int, workers: int, accumulate: int
) -> None:
    ranks = received(store, tmp_path, devices, workers, accumulate)
    train, _ = split_rows(store.column("conversation"), VAL_FRACTION)
    steps = 0
    given: list[list[int]] = []
    for epoch in (0, 1):
        layout = {"world_size": devices, "accumulate": accumulate}
        plan = plan_epoch(store.lengths[train], BATCHING, seed=0, epoch=epoch, **layout)
        steps += plan.num_steps
        for rank, record in enumerate(ranks):
            expected = [
                [train[plan.rows(step, rank, micro)].tolist(), plan.width(step, rank, micro)]
                for step in range(plan.num_steps)
                for micro in range(accumulate)
            ]
            assert record["epochs"][str(epoch)] == expected
            assert record["steps"][epoch] == steps
        given.append(
            sorted(row for r in ranks for rows, _ in r["epochs"][str(epoch)] for row in rows)
        )
    assert given == [train.tolist(), train.tolist()]
    assert {record["planned"] for record in ranks} == {steps}
    assert ranks[0]["epochs"]["0"] != ranks[0]["epochs"]["1"]
