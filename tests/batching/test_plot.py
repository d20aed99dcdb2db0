"""The picture of a comparison: a file that is not blank, and bars that hold the rows' tokens."""

import functools
import sys
from pathlib import Path

import matplotlib.figure
import matplotlib.image
import numpy as np
import pytest
from batching.plans import family

from dflash_lightning.batching import Batching
from dflash_lightning.batching.compare import Comparison, compare
from dflash_lightning.batching.plot import plot_comparison


@functools.cache
def comparison(**changes: object) -> Comparison:
    batching = Batching(**{"token_budget": 9000, "max_rows": 12, "sort_window": 4} | changes)
    return compare(family("uniform", 1000), batching, world_size=2)


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[matplotlib.figure.Figure]:
    """Figures that are drawn, instead of files: each is kept where it would be written."""
    kept: list[matplotlib.figure.Figure] = []
    monkeypatch.setattr(
        matplotlib.figure.Figure, "savefig", lambda self, path, **options: kept.append(self)
    )
    return kept


def test_a_picture_is_written_and_is_not_blank(tmp_path: Path) -> None:
    path = tmp_path / "batching.png"
    plot_comparison(comparison(), path)
    pixels = matplotlib.image.imread(path)[..., :3]
    height, width, _ = pixels.shape
    assert width > 1500
    assert height > 500
    ink = (pixels < 0.95).any(-1)
    assert 0.02 < ink.mean() < 0.9
    for half in (ink[:, : width // 2], ink[:, width // 2 :]):
        assert half.mean() > 0.005


def test_the_endings_of_vector_graphics_are_known(tmp_path: Path) -> None:
    plot_comparison(comparison(), tmp_path / "batching.svg")
    assert "<svg" in (tmp_path / "batching.svg").read_text()


def legends(figure: matplotlib.figure.Figure) -> list[list[str]]:
    return [[text.get_text() for text in axes.get_legend().get_texts()] for axes in figure.axes]


@pytest.mark.parametrize("changes", [{}, {"pad_to": 64}, {"order": "sorted"}])
def test_bars_hold_all_tokens_and_all_padding(figures: list, changes: dict) -> None:
    found = comparison(**changes)
    plot_comparison(found, Path("unwritten.png"))
    (figure,) = figures
    left = figure.axes[0]
    real, unsorted, own = (
        sum(bar.get_height() for bar in container) * 1e6 for container in left.containers
    )
    report = found.own
    assert real == pytest.approx(report.tokens)
    assert own == pytest.approx(report.padded_tokens - report.tokens)
    plain = found.reports["bucketed, window 0"]
    assert unsorted == pytest.approx(plain.padded_tokens - plain.tokens)
    # Padding stands on top of the tokens of the same rows.
    for bars in left.containers[1:]:
        assert [bar.get_y() for bar in bars] == [bar.get_height() for bar in left.containers[0]]
    assert legends(figure)[0] == [
        "real",
        f"padding, unsorted buckets: {100 * (1 - plain.efficiency):.1f}%",
        f"padding, this plan: {100 * (1 - report.efficiency):.1f}%",
    ]


def test_bars_place_each_rows_padding_at_its_own_length(figures: list) -> None:
    # Batches of one short and one long row: only the short row is padded, by 90 tokens.
    batching = Batching(order="random", num_buckets=1, token_budget=200, max_rows=2)
    found = compare([10, 100], batching)
    plot_comparison(found, Path("unwritten.png"))
    own = {
        round(bar.get_x() + bar.get_width() / 2): bar.get_height() * 1e6
        for bar in figures[0].axes[0].containers[-1]
        if bar.get_height()
    }
    ((place, padding),) = own.items()
    assert padding == pytest.approx(90)
    assert place == pytest.approx(10, abs=1)


def test_inner_boundaries_are_drawn_and_named(figures: list) -> None:
    found = comparison(boundaries=(0, 500, 1200, 2048))
    plot_comparison(found, Path("unwritten.png"))
    left = figures[0].axes[0]
    assert [line.get_xdata()[0] for line in left.lines] == [500, 1200]
    assert [note.get_text() for note in left.texts] == ["500", "1,200"]


def test_curves_are_those_of_the_comparison_and_the_plan_is_marked(figures: list) -> None:
    found = comparison()
    plot_comparison(found, Path("unwritten.png"))
    right = figures[0].axes[1]
    windows, optimal, mass, own = right.lines
    for line, name in ((windows, "windows"), (optimal, "optimal"), (mass, "equal_mass")):
        assert dict(zip(*line.get_data(), strict=True)) == found.efficiency[name]
    assert own.get_xydata().tolist() == [[6, pytest.approx(found.own.efficiency)]]


def test_without_sort_windows_nothing_is_drawn_twice(figures: list, tmp_path: Path) -> None:
    plot_comparison(comparison(sort_window=0), tmp_path / "plain.png")
    left, right = figures[0].axes
    assert len(left.containers) == 2
    assert len(right.lines) == 3
    assert [text for text in legends(figures[0])[0] if "unsorted" in text] == []
    assert all(np.isfinite(bar.get_height()) for bars in left.containers for bar in bars)


@pytest.mark.parametrize("lengths", [[5], [7] * 30, [1, 2, 3]])
def test_little_data_is_drawn(figures: list, lengths: list[int]) -> None:
    plot_comparison(compare(lengths, Batching(max_rows=4)), Path("unwritten.png"))
    assert len(figures) == 1


def test_a_missing_matplotlib_is_said_in_one_line(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    message = (
        r"plot .*batching\.png needs matplotlib, which is not installed: pip install "
        r"'dflash-lightning\[plot\]'\."
    )
    with pytest.raises(ValueError, match=message) as caught:
        plot_comparison(comparison(), tmp_path / "batching.png")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "batching.png").exists()
