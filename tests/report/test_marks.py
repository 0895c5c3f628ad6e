"""Marks that figures share: every seed is seen, and nothing is drawn around a mean of two."""

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from nearsight.report.figures.looks import model_style, shade
from nearsight.report.marks import (
    FEWEST,
    ForestRow,
    dots_and_bars,
    draw_courses,
    draw_seeds,
    forest,
    seeds_in_row,
)
from nearsight.study.statistics import Estimate, mean_interval

COLOUR = model_style(0).colour


@pytest.fixture
def axes() -> Axes:
    return Figure().subplots()


def test_every_seed_is_a_light_dot_behind_the_means_and_a_single_one_is_none(axes: Axes) -> None:
    draw_seeds(axes, [1.0, 2.0, 3.0], [[0.1, 0.4], [0.7], [0.2, 0.3, 0.9]], COLOUR, "seeds")
    axes.plot([1.0, 2.0, 3.0], [0.25, 0.7, 0.5], color=COLOUR)
    dots, means = axes.lines
    assert list(zip(*dots.get_data(), strict=True)) == [(1, 0.1), (1, 0.4), (3, 0.2), (3, 0.3), (3, 0.9)]
    assert dots.get_zorder() < means.get_zorder()
    assert dots.get_color() != COLOUR
    assert dots.get_color() > shade(COLOUR, 0.7)  # lighter: its red, green and blue are larger
    assert dots.get_linestyle() == "None"
    draw_seeds(axes, [1.0], [[0.5]], COLOUR, "one")
    assert len(axes.lines) == 2


def test_dots_of_a_row_stand_above_its_mean_and_within_the_frame(axes: Axes) -> None:
    seeds_in_row(axes, [-3.0, 0.5, 8.0], 1.0, COLOUR, "seeds")
    axes.plot(0.0, 1.0, marker="o")
    axes.set_ylim(1.5, 0.5)
    axes.figure.draw_without_rendering()
    low, high = axes.get_xlim()
    assert low < -3.0
    assert high > 8.0
    dots, mean = (line.get_transform().transform(line.get_xydata()) for line in axes.lines)
    apart = (dots[:, 1] - mean[0, 1]) * 72 / axes.figure.dpi
    assert apart == pytest.approx([6.5] * 3)
    np.testing.assert_allclose(dots[:, 0], axes.transData.transform([(x, 1.0) for x in (-3.0, 0.5, 8.0)])[:, 0])
    seeds_in_row(axes, [1.0], 0.0, COLOUR, "one")
    assert len(axes.lines) == 2


def test_courses_of_seeds_are_thin_lines_of_which_one_is_none(axes: Axes) -> None:
    steps, seeds = np.arange(4.0), np.arange(8.0).reshape(2, 4)
    draw_courses(axes, steps, list(seeds), COLOUR, "course")
    for line, seed in zip(axes.lines, seeds, strict=True):
        np.testing.assert_array_equal(line.get_data(), [steps, seed])
        assert line.get_linewidth() < 1
    draw_courses(axes, steps, [seeds[0]], COLOUR, "one")
    assert len(axes.lines) == 2


@pytest.mark.parametrize(
    ("counts", "words"),
    [
        ([1, 1], ""),
        ([2, 2], "; dots: seeds"),
        ([1, 2], "; dots: seeds"),
        ([3, 10], "; dots: seeds; bars: 95 % intervals"),
        ([2, 3], "; dots: seeds; bars: 95 % intervals (of 3 seeds or more)"),
    ],
)
def test_words_name_the_marks_that_are_drawn(counts: list[int], words: str) -> None:
    assert dots_and_bars(counts) == words
    assert dots_and_bars(counts, "bands: their range") == words.replace("bars: 95 % intervals", "bands: their range")


def test_a_forest_has_every_seed_and_no_bar_of_two() -> None:
    values = {"three": [0.1, 0.2, 0.6], "two": [0.1, 0.2], "one": [0.3]}
    rows = [ForestRow(label=label, estimate=mean_interval(found), seeds=found) for label, found in values.items()]
    fitted = Estimate(value=0.4, low=0.3, high=0.5)
    (axes,) = forest([*rows, ForestRow(label="a fit", estimate=fitted)], "change").axes
    drawn = {line.get_gid(): list(map(float, np.atleast_1d(line.get_xdata()))) for line in axes.lines}
    assert {name for name in drawn if str(name).startswith("interval")} == {"interval-three", "interval-a fit"}
    assert {name for name in drawn if str(name).startswith("seeds")} == {"seeds-three", "seeds-two"}
    for label in ("three", "two"):
        assert drawn[f"seeds-{label}"] == values[label]
    assert drawn["interval-three"] == [rows[0].estimate.low, rows[0].estimate.high]
    assert drawn["interval-a fit"] == [0.3, 0.5]
    for label, found in values.items():
        assert drawn[f"value-{label}"] == [pytest.approx(sum(found) / len(found))]
    assert len(values["two"]) < FEWEST <= len(values["three"])
