"""The picture of a diagnosis: files that are not blank, and curves that are the diagnosis's own."""

import sys
from dataclasses import replace
from pathlib import Path

import matplotlib.figure
import matplotlib.image
import numpy as np
import pytest
from diagnosis import example

from dflash_lightning.diagnosis.plot import plot
from dflash_lightning.diagnosis.result import Diagnosis, Share
from dflash_lightning.diagnosis.thin import block_means, extremes, robust_limits, spaced

EXAMPLES = (example.orange, example.against_purple, example.troubled, example.bare)


def line(axes, label: str):
    (found,) = [line for line in axes.lines if line.get_label() == label]
    return found


def titles(figure) -> list[str]:
    return [axes.get_title(loc="left") for axes in figure.axes]


def words(axes) -> list[str]:
    return [text.get_text() for text in axes.texts]


@pytest.mark.parametrize("make", EXAMPLES)
def test_a_picture_is_written_at_twice_the_dots_of_a_screen(make, tmp_path: Path) -> None:
    path = tmp_path / "new" / "loss.png"
    figure = make().plot(str(path))
    pixels = matplotlib.image.imread(path)[..., :3]
    assert pixels.shape == (1600, 2400, 3)
    ink = (pixels < 0.95).any(-1)
    for axes in figure.axes:
        x0, y0, x1, y1 = (
            (axes.get_position().extents * [2400, 1600, 2400, 1600]).round().astype(int)
        )
        assert 0.01 < ink[1600 - y1 : 1600 - y0, x0:x1].mean() < 0.999


def test_a_figure_shows_itself_in_a_notebook_without_pyplot(monkeypatch) -> None:
    monkeypatch.delitem(sys.modules, "matplotlib.pyplot", raising=False)
    assert example.bare().plot()._repr_png_().startswith(b"\x89PNG")
    assert "matplotlib.pyplot" not in sys.modules


def test_the_endings_of_vector_graphics_are_known_and_others_refused(tmp_path: Path) -> None:
    plot(example.bare(), tmp_path / "loss.svg")
    assert "<svg" in (tmp_path / "loss.svg").read_text()
    with pytest.raises(ValueError, match=r"plot must end in one of .*png.*, got .*loss\.doc\."):
        plot(example.bare(), tmp_path / "loss.doc")


def test_a_missing_matplotlib_is_said_in_one_line(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    for path, name in ((tmp_path / "loss.png", r"plot .*loss\.png"), (None, "a plot")):
        message = f"^{name} needs matplotlib, which is not installed: pip install '.*plot.*'\\.$"
        with pytest.raises(ValueError, match=message):
            example.orange().plot(path)
    assert not list(tmp_path.iterdir())


def test_the_head_names_run_verdict_and_shares() -> None:
    figure = plot(replace(example.troubled(), name="runs/" + "long" * 20 + "/$x_1$"))
    head = figure.get_suptitle()
    assert head.endswith(r"/\$x_1\$:  INVESTIGATE")
    assert len(head) < 70
    (text,) = figure.texts[1:]
    assert text.get_text() == "40 % length mix, 21 % sampling noise, 39 % unexplained"


def test_the_first_panel_shows_loss_curve_and_band() -> None:
    run = example.orange()
    axes = plot(run).axes[0]
    curves = run.curves
    assert np.array_equal(line(axes, "loss").get_ydata(), curves.loss)
    assert np.array_equal(line(axes, "mix-adjusted curve").get_ydata(), curves.trend)
    assert np.array_equal(line(axes, "mix-adjusted loss").get_ydata(), curves.adjusted[60:])
    for band, times in zip(axes.collections, (2, 1), strict=True):
        # The outline goes along one side and back on the other.
        outline = band.get_paths()[0].vertices
        at_end = outline[outline[:, 0] == 310][:, 1]
        width = 2 * times * curves.noise[-1]
        assert at_end.max() - at_end.min() == pytest.approx(width)
        assert band.get_zorder() < line(axes, "loss").get_zorder()
    assert "left out" in words(axes)


def test_the_first_steps_and_outliers_do_not_squash_the_curve() -> None:
    run = example.orange()
    loss = run.curves.loss.copy()
    loss[:30], loss[200] = 11.0, 400.0
    axes = plot(replace(run, curves=replace(run.curves, loss=loss))).axes[0]
    low, high = axes.get_ylim()
    inside = np.delete(loss, 200)[60:]
    assert low < inside.min()
    assert inside.max() < high < 7


def test_each_cause_has_its_own_line_of_steps() -> None:
    axes = plot(example.troubled()).axes[0]
    marks = {tuple(mark.get_xdata()): mark.get_linestyle() for mark in axes.lines}
    assert marks[(120, 410, 700)] == marks[(555, 556)] == marks[(600,)] == "None"
    assert marks[(300, 399)] == marks[(762, 899)] == "-"
    shown = [text for text in axes.texts if text.get_color() == "#cc3311"]
    assert [text.get_text() for text in shown] == [
        *("rows", "spread", "divergence", "non finite", "restart")
    ]
    heights = [text.xy[1] for text in shown]
    assert np.all(np.diff(heights) > 0.04)
    # They stand below the loss.
    bottom, top = axes.get_ylim()
    assert bottom + heights[-1] * (top - bottom) < np.nanmin(example.troubled().curves.loss)


def test_each_bucket_has_a_curve_with_its_name_at_its_end() -> None:
    run = example.orange()
    axes = plot(run).axes[1]
    assert words(axes) == list(example.NAMES)
    assert len({str(curve.get_color()) for curve in axes.lines}) == 6
    for k, curve in enumerate(axes.lines):
        known = np.isfinite(run.curves.bucket_loss[:, k])
        assert np.array_equal(curve.get_xdata(), run.curves.step[known])
        assert np.ptp(np.diff(curve.get_ydata()[-30:])) < np.ptp(
            np.diff(run.curves.bucket_loss[known, k][-30:])
        )
    heights = [text.xy[1] for text in axes.texts]
    assert np.all(np.diff(heights) > 0.05)


def test_a_bucket_without_rows_is_left_out() -> None:
    run = example.orange()
    losses = run.curves.bucket_loss.copy()
    losses[:, 2] = np.nan
    axes = plot(replace(run, curves=replace(run.curves, bucket_loss=losses))).axes[1]
    assert words(axes) == [*example.NAMES[:2], *example.NAMES[3:]]


def areas(axes) -> np.ndarray:
    """Height of each area in the middle of the picture."""
    found = []
    for area in axes.collections:
        outline = area.get_paths()[0].vertices
        middle = outline[outline[:, 0] == np.median(outline[:, 0])][:, 1]
        found.append(middle.max() - middle.min())
    return np.array(found)


def test_areas_are_the_shares_over_time_and_negative_rest_is_none() -> None:
    run = example.orange()
    shares = np.tile([0.5, 0.3, 0.2], (11, 1))
    curves = replace(run.curves, shares=shares, share_step=np.linspace(80, 290, 11))
    axes = plot(replace(run, curves=curves)).axes[2]
    assert areas(axes) == pytest.approx([50, 30, 20])
    assert words(axes) == [
        *("length mix\n71 % (65 to 77)", "sampling noise\n26 % (22 to 30)"),
        "unexplained\n3 % (-2 to 7)",
    ]
    negative = replace(curves, shares=np.tile([0.8, 0.4, -0.2], (11, 1)))
    axes = plot(replace(run, curves=negative)).axes[2]
    assert areas(axes) == pytest.approx([200 / 3, 100 / 3, 0])


def test_noise_and_rest_are_one_area_where_they_are_one_number() -> None:
    run = example.orange()
    shares = {"mix": Share(0.6, 0.5, 0.7, 0.05), "noise": None, "rest": None}
    curves = replace(
        run.curves, shares=np.tile([0.5, 0.3, 0.2], (11, 1)), share_step=np.linspace(80, 290, 11)
    )
    figure = plot(replace(run, shares=shares, curves=curves))
    assert areas(figure.axes[2]) == pytest.approx([50, 50])
    assert words(figure.axes[2]) == ["length mix\n60 % (50 to 70)", "noise and rest"]
    assert figure.texts[1].get_text() == "60 % length mix"


def test_two_runs_stand_at_equal_tokens_with_their_difference() -> None:
    run = example.against_purple()
    axes = plot(run).axes[3]
    assert run.baseline is not None
    for name, curves in (("orange", run.curves), run.baseline):
        drawn = line(axes, name)
        assert drawn.get_xdata() == pytest.approx(curves.tokens[60:] / 1e6)
        assert np.array_equal(drawn.get_ydata(), curves.trend)
        assert any(np.array_equal(other.get_ydata(), curves.loss) for other in axes.lines)
    assert axes.get_title(loc="left") == "orange less purple: +0.011 [-0.032, 0.054] nats"
    assert axes.get_xlabel() == "real tokens (millions)"
    assert words(axes) == ["compared up to here"]
    assert axes.texts[0].xy[0] == pytest.approx(7.9)


def test_many_tokens_are_billions_and_unknown_ones_steps() -> None:
    run = example.against_purple()
    assert run.baseline is not None
    assert run.comparison is not None
    many = replace(run, curves=replace(run.curves, tokens=1000 * run.curves.tokens))
    assert plot(many).axes[3].get_xlabel() == "real tokens (billions)"
    other = replace(run.baseline[1], tokens=np.full(270, np.nan), trend=np.empty(0))
    unknown = replace(
        run, baseline=("purple", other), comparison=replace(run.comparison, at_tokens=None)
    )
    axes = plot(unknown).axes[3]
    assert axes.get_xlabel() == "step"
    assert axes.texts[0].xy[0] == 272
    assert len(line(axes, "purple").get_xdata()) == 270
    alone = plot(replace(unknown, comparison=None)).axes[3]
    assert alone.get_title(loc="left") == "orange beside purple"
    assert words(alone) == []


def with_residuals(z: np.ndarray) -> Diagnosis:
    run = example.orange(60 + len(z))
    curves = run.curves
    adjusted = curves.adjusted.copy()
    adjusted[60:] = curves.trend + z * curves.noise
    return replace(run, curves=replace(curves, adjusted=adjusted))


def test_bars_count_the_steps_and_red_is_what_chance_does_not_make() -> None:
    z = np.random.default_rng(0).standard_normal(1000)
    for found, is_red in ((z, False), (2 * z, True)):
        axes = plot(with_residuals(found)).axes[3]
        grey, red = (np.array([bar.get_height() for bar in bars]) for bars in axes.containers)
        assert (grey + red).sum() == pytest.approx(1000)
        assert (red.sum() > 0) == is_red
        expected = line(axes, "what noise alone predicts").get_ydata()
        assert expected.max() == pytest.approx(1000 * 0.25 / np.sqrt(2 * np.pi), rel=0.01)


def test_a_bare_curve_has_two_panels_and_a_very_short_one_a_single_one(tmp_path: Path) -> None:
    run = example.bare()
    assert titles(plot(run)) == ["Loss, and what chance allows", "Steps around their curve"]
    empty = np.empty(0)
    for count in (0, 1, 30):
        steps = run.curves.step[:count]
        curves = replace(
            run.curves,
            step=steps,
            loss=run.curves.loss[:count],
            adjusted=steps,
            tokens=steps,
            window=(0, count - 1),
            trend=empty,
            noise=empty,
        )
        figure = plot(replace(run, curves=curves, random=None), tmp_path / f"{count}.png")
        assert titles(figure) == ["Loss"]


def test_unknown_values_leave_gaps(tmp_path: Path) -> None:
    run = example.against_purple()
    curves = run.curves
    columns = [values.copy() for values in (curves.loss, curves.adjusted, curves.tokens)]
    for values in columns:
        values[100:120] = np.nan
    loss, adjusted, tokens = columns
    curves = replace(
        curves,
        loss=loss,
        adjusted=adjusted,
        tokens=tokens,
        noise=np.full_like(curves.noise, np.nan),
        shares=np.full_like(curves.shares, np.nan),
    )
    for baseline in (None, ("purple", curves)):
        figure = plot(replace(run, curves=curves, baseline=baseline), tmp_path / "loss.png")
        assert np.isnan(line(figure.axes[0], "loss").get_ydata()).sum() == 20
        assert not figure.axes[0].collections


def test_a_hundred_thousand_steps_are_thinned_and_keep_their_spikes() -> None:
    run = example.orange(100_000)
    loss = run.curves.loss.copy()
    loss[54_321] = 99.0
    axes = plot(replace(run, curves=replace(run.curves, loss=loss))).axes
    drawn = line(axes[0], "loss")
    assert len(drawn.get_xdata()) <= 3000
    assert drawn.get_xdata()[drawn.get_ydata().argmax()] == 54_321
    for curve in (*axes[0].lines, *axes[1].lines):
        assert len(curve.get_xdata()) <= 3000
    # A line of so many steps is an area: the band is drawn on it.
    assert axes[0].collections[0].get_zorder() > drawn.get_zorder()


def test_extremes_are_the_lowest_and_highest_of_each_block_in_order() -> None:
    y = np.zeros(6000)
    y[1], y[3], y[4], y[5] = 5, -2, 7, np.nan
    y[-4:] = np.nan
    x, kept = extremes(np.arange(6000.0), y)
    assert (len(x), x[:4].tolist(), kept[:4].tolist()) == (3000, [1, 3, 4, 6], [5, -2, 7, 0])
    assert np.isnan(kept[-2:]).all()
    short = np.arange(3.0)
    assert extremes(short, short)[1] is short


def test_block_means_leave_unknown_values_out() -> None:
    values = np.repeat(np.arange(3001.0)[:, None], 2, axis=1)
    values[0, 0] = np.nan
    values[2:4, 1] = np.nan
    means = block_means(values)
    assert means.shape == (1501, 2)
    assert means[:2, 0].tolist() == [1.0, 2.5]
    assert means[0, 1] == 0.5
    assert np.isnan(means[1, 1])
    assert means[-1].tolist() == [3000.0, 3000.0]


def test_labels_keep_their_distance_and_their_order() -> None:
    apart = np.array([0.5, 0.1, 0.9])
    assert spaced(apart, 0.1) == pytest.approx(apart)
    moved = spaced(np.array([0.3, 0.3, 0.3, 0.35]), 0.1)
    assert np.diff(moved) == pytest.approx([0.1, 0.1, 0.1])
    assert moved.mean() == pytest.approx(0.3125)
    assert spaced(np.empty(0), 0.1).size == 0


def test_limits_are_unknown_without_values() -> None:
    nothing = np.array([np.nan, np.inf])
    assert robust_limits(nothing, nothing) is None
    assert robust_limits(nothing, np.array([2.0])) == (1.9, 2.1)
