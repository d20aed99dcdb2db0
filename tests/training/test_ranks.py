"""Several real processes: each rank is given its rows of the plan, epoch by epoch."""

import json
from pathlib import Path

import pytest
from training.test_kill import VAL_FRACTION, final, link, recipe, run_links

from dflash_lightning import Batching, plan_epoch
from dflash_lightning.data.store import RowStore, split_rows

BATCHING = {"token_budget": 400, "max_rows": 6, "num_buckets": 3, "sort_window": 4}
EPOCHS = 2
LAYOUTS = [(2, 0, 1), (2, 2, 1), (3, 0, 1), (3, 2, 1), (2, 0, 2)]  # ranks, workers, accumulated


def name_of(layout: tuple[int, int, int]) -> str:
    return "-".join(map(str, layout))


@pytest.fixture(scope="module")
def runs(store: RowStore, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of two epochs under each layout, in a folder of its own."""
    folder = tmp_path_factory.mktemp("ranks")
    links = []
    for ranks, workers, accumulate in LAYOUTS:
        path = recipe(store, folder / name_of((ranks, workers, accumulate)), max_epochs=EPOCHS)
        more = ("--data.num_workers", str(workers), "--data.batching", json.dumps(BATCHING))
        links.append(link(path, ranks, accumulate, more))
    assert run_links(folder, links) == [[0] * ranks for ranks, _, _ in LAYOUTS]
    return folder


@pytest.mark.ddp
@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS, ids=name_of)
def test_each_rank_is_given_its_rows_of_the_plan_in_both_epochs(
    store: RowStore, runs: Path, layout: tuple[int, int, int]
) -> None:
    ranks, _, accumulate = layout
    train, _ = split_rows(store.column("conversation"), VAL_FRACTION)
    run = runs / name_of(layout) / "runs" / "version_0"
    received = [
        [json.loads(line) for line in (run / f"rows-{rank}.jsonl").read_text().splitlines()]
        for rank in range(ranks)
    ]
    steps, given = 0, []
    for epoch in range(EPOCHS):
        plan = plan_epoch(
            store.lengths[train],
            Batching(**BATCHING),
            seed=1,
            epoch=epoch,
            world_size=ranks,
            accumulate=accumulate,
        )
        for rank, lines in enumerate(received):
            expected = [
                (
                    train[plan.rows(step, rank, micro)].tolist(),
                    plan.width(step, rank, micro),
                    steps + step,
                )
                for step in range(plan.num_steps)
                for micro in range(accumulate)
            ]
            found = [
                (line["rows"], line["width"], line["step"])
                for line in lines
                if line["epoch"] == epoch
            ]
            assert found == expected
        steps += plan.num_steps
        rows = [x for lines in received for x in lines if x["epoch"] == epoch]
        given.append(sorted(row for line in rows for row in line["rows"]))
    assert given == [train.tolist()] * EPOCHS
    end = final(runs / name_of(layout))
    assert end["global_step"] == end["dflash"]["settings"]["optimizer steps in all"] == steps
    epochs = [[x["rows"] for x in received[0] if x["epoch"] == epoch] for epoch in range(EPOCHS)]
    assert epochs[0] != epochs[1]
