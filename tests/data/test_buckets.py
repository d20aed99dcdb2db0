"""The buckets command: what it prints and writes, what it reads, what it refuses."""

import csv
import json
import re
from collections.abc import Callable
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest

from dflash_lightning.__main__ import main
from dflash_lightning.batching import Batching, EpochPlan, plan_epoch
from dflash_lightning.batching.compare import compare
from dflash_lightning.data.buckets import read_lengths
from dflash_lightning.data.datamodule import DFlashDataModule
from dflash_lightning.data.store import RowStore

SETTINGS = {"token_budget": 9000, "max_rows": 12, "sort_window": 4, "num_buckets": 3}
SMALL = [f"--{name}={value}" for name, value in SETTINGS.items()]
LENGTHS = [30 + (i * 7919) % 1970 for i in range(1200)]


@pytest.fixture
def run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, tmp_path: Path
) -> Callable[..., str]:
    """Run the command as the console script does, in a folder of its own; returns what it says."""
    monkeypatch.chdir(tmp_path)

    def call(*args: object) -> str:
        monkeypatch.setattr("sys.argv", ["dflash-lightning", "buckets", *map(str, args)])
        main()
        return capsys.readouterr().out

    return call


@pytest.fixture
def refused(run, capsys: pytest.CaptureFixture) -> Callable[..., str]:
    """Run a command that must fail; returns the one line that it says."""

    def call(*args: object) -> str:
        with pytest.raises(SystemExit) as stopped:
            run(*args)
        line = stopped.value.code  # a text makes the exit status 1
        assert isinstance(line, str)
        assert "\n" not in line
        assert capsys.readouterr().out == ""
        assert line.startswith("dflash-lightning buckets: ")
        return line.removeprefix("dflash-lightning buckets: ")

    return call


@pytest.fixture
def lengths(tmp_path: Path) -> Path:
    np.save(tmp_path / "lengths.npy", np.array(LENGTHS))
    return tmp_path / "lengths.npy"


# -- what it says ----------------------------------------------------------------------------------


def test_it_prints_the_comparison_of_these_settings(run, lengths: Path) -> None:
    said = run(lengths, *SMALL, "--seed=5", "--world_size=2", "--accumulate=3")
    layout = {"seed": 5, "world_size": 2, "accumulate": 3}
    assert said == f"{compare(LENGTHS, Batching(**SETTINGS), **layout)!r}\n"


@pytest.mark.parametrize(
    ("options", "changes", "layout"),
    [
        (["--order=sorted"], {"order": "sorted"}, {}),
        (["--deal=aligned", "--pad_to=64"], {"deal": "aligned", "pad_to": 64}, {}),
        (["--boundaries=[0,500,2048]"], {"boundaries": (0, 500, 2048)}, {}),
        (
            ["--cost_budget=9000", "--cost_knee=1000"],
            {"cost_budget": 9000.0, "cost_knee": 1000.0},
            {},
        ),
        (["--world_size=1"], {}, {"world_size": 1}),
    ],
)
def test_every_option_reaches_the_plan(
    run, lengths: Path, tmp_path: Path, options: list[str], changes: dict, layout: dict
) -> None:
    said = run(lengths, *SMALL, *options, "--json", tmp_path / "numbers.json")
    expected = compare(LENGTHS, Batching(**SETTINGS | changes), **{"world_size": 8} | layout)
    assert said == f"{expected!r}\n"
    numbers = json.loads((tmp_path / "numbers.json").read_text())
    assert numbers == json.loads(json.dumps(expected.to_dict()))


def test_given_boundaries_are_those_of_all_strategies(run, lengths: Path) -> None:
    said = run(lengths, *SMALL, "--boundaries=[0,500,1200,2048]")
    assert re.findall(r"^\((\d+), (\d+)\]", said, re.MULTILINE) == [
        ("0", "500"),
        ("500", "1200"),
        ("1200", "2048"),
    ]


@pytest.mark.parametrize("val_fraction", [0.0, 0.2, 0.5])
def test_a_stores_rows_are_the_training_rows_of_the_data_module(
    run, store: RowStore, tmp_path: Path, val_fraction: float
) -> None:
    data = DFlashDataModule(str(store.path), val_fraction=val_fraction)
    data.setup("fit")
    expected = store.lengths[data.train_rows]
    found = read_lengths(store.path, val_fraction)
    assert found.dtype == np.int32
    assert found.tolist() == expected.tolist()
    options = ["--world_size=1", "--max_rows=8", f"--val_fraction={val_fraction}"]
    said = run(store.path, *options, "--json", tmp_path / "numbers.json")
    assert f"Epoch 0: {len(expected)} rows in " in said
    numbers = json.loads((tmp_path / "numbers.json").read_text())
    assert numbers["strategies"]["random"]["tokens"] == expected.sum()


def test_numbers_and_picture_are_written_where_asked(run, lengths: Path, tmp_path: Path) -> None:
    paths = {"json": tmp_path / "made" / "numbers.json", "plot": tmp_path / "picture.png"}
    said = run(lengths, *SMALL, *(f"--{name}={path}" for name, path in paths.items()))
    numbers = json.loads(paths["json"].read_text())
    assert set(numbers) == {
        "batching",
        "boundaries",
        "strategies",
        "efficiency",
        "recommended",
        "recommendation",
    }
    assert set(numbers["strategies"]) == {
        "sorted",
        "random",
        *(f"bucketed, window {window}" for window in (0, 4, 32, 64)),
    }
    assert numbers["recommendation"] in " ".join(said.split())
    assert list(numbers["efficiency"]["optimal"]) == [str(count) for count in range(1, 17)]
    assert matplotlib.image.imread(paths["plot"]).std() > 0.05


def test_the_picture_gets_the_folder_it_goes_to(run, lengths: Path, tmp_path: Path) -> None:
    run(lengths, *SMALL, "--plot", tmp_path / "made" / "picture.png")
    assert (tmp_path / "made" / "picture.png").is_file()


# -- timings ---------------------------------------------------------------------------------------


def write_csv(path: Path, columns: dict[str, list]) -> Path:
    with path.open("w", newline="") as file:
        file.write("# made by a test\n")
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows(zip(*columns.values(), strict=True))
    return path


def ledger_of(path: Path, plans: list[EpochPlan], *, knee: float) -> Path:
    """What a run of these epochs would note down, and two lines that it did not time."""
    columns: dict[str, list] = {
        name: [] for name in ("step", "epoch", "loss", "seconds", "rows", "padded_tokens")
    }
    step = 0
    for plan in plans:
        for own in range(plan.num_steps):
            ranks = np.zeros(plan.world_size)
            rows = padded = 0
            for rank in range(plan.world_size):
                for micro in range(plan.accumulate):
                    size, width = plan.rows(own, rank, micro).size, plan.width(own, rank, micro)
                    rows, padded = rows + size, padded + size * width
                    ranks[rank] += size * width * (1 + width / knee)
            seconds = "" if own in (2, 5) else 0.01 + 1e-5 * ranks.max()
            line = (step, plan.epoch, 3.5, seconds, rows, padded)
            for name, value in zip(columns, line, strict=True):
                columns[name].append(value)
            step += 1
    return write_csv(path, columns)


def knee_of(said: str) -> float:
    (line,) = [line for line in said.splitlines() if line.startswith("cost_knee")]
    return float(re.match(r"cost_knee ([\d,]+) tokens, 95 % interval ", line)[1].replace(",", ""))


def test_timed_batches_give_the_knee(run, lengths: Path, tmp_path: Path) -> None:
    width = np.tile(np.arange(100, 2000, 100), 2)
    rows = np.repeat([2, 3], 19)
    seconds = 1e-6 * rows * width * (1 + width / 700) + 0.02
    columns = {"seconds": seconds, "rows": rows, "width": width}
    path = write_csv(tmp_path / "t.csv", {n: values.tolist() for n, values in columns.items()})
    said = run(lengths, *SMALL, "--timings", path, "--json", tmp_path / "numbers.json")
    assert knee_of(said) == pytest.approx(700, rel=0.02)
    assert said.splitlines()[-2].startswith("cost_knee ")
    cost = json.loads((tmp_path / "numbers.json").read_text())["cost"]
    assert cost["knee"] == pytest.approx(700, rel=0.02)
    assert cost["timings"] == 38


def test_linear_timings_are_no_number_in_json(run, lengths: Path, tmp_path: Path) -> None:
    width = np.arange(100, 2000, 50)
    columns = {"seconds": 1e-6 * 3 * width, "rows": 3 + 0 * width, "width": width}
    path = write_csv(tmp_path / "t.csv", {n: values.tolist() for n, values in columns.items()})
    run(lengths, *SMALL, "--timings", path, "--json", tmp_path / "numbers.json")
    cost = json.loads((tmp_path / "numbers.json").read_text())["cost"]
    assert cost["knee"] is None
    assert cost["high"] is None


LAYOUT = {"seed": 4, "world_size": 2, "accumulate": 2}
LAYOUT_OPTIONS = [f"--{name}={value}" for name, value in LAYOUT.items()]


def plans_of(*epochs: int) -> list[EpochPlan]:
    return [plan_epoch(LENGTHS, Batching(**SETTINGS), epoch=epoch, **LAYOUT) for epoch in epochs]


@pytest.mark.parametrize("epochs", [(0,), (0, 1)])
def test_a_runs_ledger_gives_the_knee(
    run, lengths: Path, tmp_path: Path, epochs: tuple[int, ...]
) -> None:
    plans = plans_of(*epochs)
    path = ledger_of(tmp_path / "ledger.csv", plans, knee=1500)
    said = run(lengths, *SMALL, *LAYOUT_OPTIONS, "--timings", path)
    assert knee_of(said) == pytest.approx(1500, rel=0.02)
    assert f"from {plans[0].num_steps - 2} timings" in said


def test_the_ledger_of_a_later_epoch_counts_on_from_the_steps_before(
    run, lengths: Path, tmp_path: Path
) -> None:
    path = ledger_of(tmp_path / "ledger.csv", plans_of(0, 1), knee=1500)
    head, names, *lines = path.read_text().splitlines()
    later = [line for line in lines if line.split(",")[1] == "1"]
    path.write_text("\n".join([head, names, *later]) + "\n")
    assert 0 < len(later) < len(lines)
    said = run(lengths, *SMALL, *LAYOUT_OPTIONS, "--timings", path)
    assert knee_of(said) == pytest.approx(1500, rel=0.02)


@pytest.mark.parametrize(
    "other", ["--seed=5", "--accumulate=1", "--max_rows=11", "--sort_window=0", "--pad_to=64"]
)
def test_a_ledger_of_other_settings_is_refused(
    refused, lengths: Path, tmp_path: Path, other: str
) -> None:
    path = ledger_of(tmp_path / "ledger.csv", plans_of(0), knee=1500)
    line = refused(lengths, *SMALL, *LAYOUT_OPTIONS, "--timings", path, other)
    pattern = (
        r"timings .*ledger\.csv must come from a run with these lengths and settings, not "
        r"restarted under another layout: rows and padded_tokens of epoch 0 differ from the plan\. "
        r"Give the run's seed, world_size, accumulate, val_fraction and batching\."
    )
    assert re.fullmatch(pattern, line)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rows,width\n1,2\n", "must have a column seconds, got rows, width"),
        ("seconds,rows,width\n1,few,2\n", "must hold numbers: could not convert string to float"),
        ("seconds,rows,width\n1,1,2\n", "timings must be 8 or more and finite, got 1 of"),
        (
            "seconds,rows,step\n1,1,2\n",
            (
                "must have rows and width, or be a ledger with step, epoch, rows and "
                "padded_tokens; epoch, padded_tokens not found. Add the columns."
            ),
        ),
    ],
)
def test_timings_that_lack_something_are_refused(
    refused, lengths: Path, tmp_path: Path, text: str, message: str
) -> None:
    path = tmp_path / "timings.csv"
    path.write_text(text)
    assert message in refused(lengths, *SMALL, "--timings", path)


def test_a_ledger_without_a_timed_step_is_refused(refused, lengths: Path, tmp_path: Path) -> None:
    path = tmp_path / "ledger.csv"
    path.write_text("step,epoch,seconds,rows,padded_tokens\n0,0,,5,6\n")
    line = refused(lengths, *SMALL, "--timings", path)
    assert line == f"timings {path} must hold timed steps, got none. Let the run go on."


# -- files that hold no lengths --------------------------------------------------------------------


def saved(values: object) -> Callable[[Path], None]:
    return lambda path: np.save(path, np.asarray(values), allow_pickle=True)


FLAT = "lengths must be a flat, non-empty array of integers, got shape "


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (saved([1.5, 2.5]), FLAT + "(2,) and dtype float64. Pass one token count per row."),
        (saved([[1, 2], [3, 4]]), FLAT + "(2, 2) and dtype int64"),
        (saved(np.array([], np.int64)), FLAT + "(0,) and dtype int64"),
        (saved([3, 0, -1]), "lengths must lie in 1..2147483647, got 0 at row 1 (2 such rows)"),
        (saved(np.array([1, "a"], object)), "rows.npy must be a .npy file: Object arrays cannot"),
        (lambda path: path.write_text("12 13 14"), "rows.npy must be a .npy file: "),
        (lambda path: path.write_bytes(b""), "rows.npy must be a .npy file: "),
        (lambda path: path.write_bytes(b"\x93NUMPY\x01\x00"), "rows.npy must be a .npy file: "),
    ],
    ids=["floats", "2-D", "no rows", "below 1", "pickled", "text", "empty file", "cut off"],
)
def test_a_file_without_lengths_is_refused(
    refused, tmp_path: Path, write: Callable[[Path], None], message: str
) -> None:
    write(tmp_path / "rows.npy")
    assert message in refused(tmp_path / "rows.npy")


def test_a_file_that_is_not_there_is_refused(refused, lengths: Path, tmp_path: Path) -> None:
    assert refused(tmp_path / "none.npy") == (
        "lengths must be a .npy file of row lengths or a folder written by prepare; there is none "
        f"at {tmp_path / 'none.npy'}."
    )
    assert f"{tmp_path} holds no finished store" in refused(tmp_path)
    assert "there is none at " in refused(lengths, *SMALL, "--timings", tmp_path / "none.csv")


def test_a_picture_of_no_known_format_is_refused(refused, lengths: Path, tmp_path: Path) -> None:
    assert "zebra" in refused(lengths, *SMALL, "--plot", tmp_path / "picture.zebra")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--token_budget=100"], "token_budget must hold every row: "),
        (["--boundaries=[0,100]"], "boundaries must end at the longest row ("),
        (["--boundaries=[5,3000]"], "boundaries must start at 0 and rise strictly, got (5, 3000)"),
        (["--world_size=5000"], "world_size * accumulate must not exceed the number of rows (1200"),
        (["--deal=fair"], "deal"),
        (["--cost_budget=0"], "cost_budget must be a finite number above 0, got 0"),
    ],
)
def test_settings_that_no_plan_can_follow_are_refused(
    refused, lengths: Path, options: list[str], message: str
) -> None:
    assert message in refused(lengths, *options)


@pytest.mark.parametrize(
    ("options", "start"),
    [
        (("--timings", "missing.csv"), "timings must be a CSV file; there is none at missing.csv"),
        (("--plot", "picture.xyz"), "plot must end in one of "),
        (("--boundaries", "[]"), "boundaries must be a list of two or more integers"),
        (("--val_fraction", "0.1"), "val_fraction is for a store, got 0.1 with the file "),
    ],
)
def test_what_cannot_be_done_is_refused_before_anything_is_planned(
    refused, monkeypatch, lengths: Path, options: tuple[str, str], start: str
) -> None:
    def never(*_: object, **__: object) -> None:
        raise AssertionError("planned before the check")

    monkeypatch.setattr("dflash_lightning.data.buckets.compare", never)
    assert refused(lengths, *SMALL, *options).startswith(start)


@pytest.mark.parametrize("share", ["-0.1", "1.0", "1.5"])
def test_a_share_that_leaves_no_rows_is_refused(refused, store, share: str) -> None:
    line = refused(store.path, "--val_fraction", share)
    assert line.startswith(f"val_fraction must be at least 0 and below 1, got {share}. ")
