"""Permutation curves: accuracy against the number of tiles that are shuffled, ours and the paper's."""

from collections.abc import Callable, Sequence
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from nearsight.errors import InputError
from nearsight.report.figures.style import MUTED, ModelStyle, add_legend, house_style, light_grid, model_style
from nearsight.report.study.drawing import Drawing
from nearsight.report.study.notes import add_footnote, missing_notes, scale_notes, seeds_in_words
from nearsight.report.study.positions import paper as s3
from nearsight.report.study.positions.permuted import accuracy_by_seed, change_by_seed, num_tiles
from nearsight.study.results import StudyResults
from nearsight.study.statistics import mean_interval

Values = Callable[[StudyResults, str, str], "pd.Series[float]"]
"""Of a network and a number of tiles: a number per seed."""
NETWORKS = (s3.VIT, s3.POSITIONAL_VIT, s3.RESNET, *(name for name in s3.CURVES if name not in (s3.VIT, s3.RESNET)))
"""In the order of their looks, ours and the paper's."""
# By which factor the curves lie beside each other, so that their intervals do not hide one another.
BESIDE = 1.09
# Of the height that the seeds take up: the space around them. Intervals that need more are cut off.
AROUND = 0.25


def permutation_curves(results: StudyResults) -> Drawing:
    """Three panels: our accuracy and, on its scale, the ends of the paper's curves; then our change within seeds."""
    levels = results.factors["tiles"]
    networks = [name for name in results.factors["model"] if name in set(results.runs["model"])]
    if not networks:
        raise InputError("none of its networks has a run yet")
    with house_style():
        figure = Figure(figsize=(9.4, 3.5), layout="constrained")
        panels = dict(
            zip(("ours", "paper", "change"), figure.subplots(1, 3, width_ratios=(1.3, 0.8, 1.3)), strict=True)
        )
        accuracies = _draw_ours(panels["ours"], results, networks, accuracy_by_seed, "accuracy")
        for network, curve in s3.CURVES.items():
            tiles, ends = [s3.FIRST_TILES, s3.LAST_TILES], [100 * curve.first, 100 * curve.last]
            panels["paper"].plot(tiles, ends, **_line(network), gid=f"paper-{network}")
            accuracies += ends
        for name in ("ours", "paper"):
            panels[name].set_ylim(*_limits(accuracies, lowest=0.0, highest=100.0))
        changes = _draw_ours(panels["change"], results, networks, change_by_seed, "change")
        panels["change"].axhline(0.0, color=MUTED, linewidth=0.9, zorder=1)
        panels["change"].set_ylim(*_limits([0.0, *changes]))
        for name, title in (
            ("ours", "ours: test accuracy, %"),
            ("change", f"ours: change from {s3.UNSHUFFLED}, points"),
        ):
            _finish(panels[name], [num_tiles(level) for level in levels], title)
        _finish(panels["paper"], [s3.FIRST_TILES, s3.LAST_TILES], "the paper's, %")
        shown = [name for name in NETWORKS if name in networks or name in s3.CURVES]
        handles = [Line2D([], [], **_line(name)) for name in shown]
        names = [name if name in networks else f"{name} (the paper's)" for name in shown]
        add_legend(figure, handles, names, loc="outside upper left", ncols=len(shown))
    seeds = seeds_in_words(results.runs.groupby(["model", "tiles"])["seed"].nunique())
    words = (
        f"Ours: mean over {seeds}; bars: 95 % intervals, cut off at the frame; dashes: single seeds. Changes are taken "
        "within seeds."
    )
    about = (
        "The paper's: the ends of its curves, read off. Ours trained for fewer epochs: compare how curves fall, not "
        "how high they lie."
    )
    add_footnote(figure, [words, about, *missing_notes(results), *scale_notes(results)])
    return Drawing(
        figure=figure,
        caption="Test accuracy against the number of tiles along a side that all images are cut into, where one fixed "
        f"permutation shuffles them; 1 is the image itself, {s3.LAST_TILES} its single pixels. Right: the change that "
        f"shuffling makes. {words} {about}",
    )


def _line(network: str) -> dict[str, Any]:
    style = _style(network)
    return {
        **{"color": style.colour, "linestyle": style.dash, "linewidth": 1.6},
        **{"marker": style.marker, "markersize": 6, "markeredgecolor": "white", "markeredgewidth": 0.6},
    }


def _style(network: str) -> ModelStyle:
    return model_style(NETWORKS.index(network) if network in NETWORKS else len(NETWORKS))


def _draw_ours(
    panel: Axes, results: StudyResults, networks: Sequence[str], values_of: Values, name: str
) -> list[float]:
    """A curve per network; the values of all seeds, times 100."""
    drawn: list[float] = []
    for place, network in enumerate(networks):
        beside = BESIDE ** (place - (len(networks) - 1) / 2)
        numbers, means, colour = [], [], _style(network).colour
        for level in results.factors["tiles"]:
            values = _values(results, network, level, values_of)
            if not values:
                continue
            number, interval = num_tiles(level) * beside, mean_interval(values)
            if interval.has_interval:
                panel.plot(
                    [number, number],
                    [interval.low, interval.high],
                    color=colour,
                    linewidth=4,
                    alpha=0.3,
                    solid_capstyle="butt",
                    gid=f"interval-{name}-{network}-{level}",
                )
            panel.plot([number] * len(values), values, color=colour, marker="_", markersize=11, linestyle="none")
            numbers.append(number)
            means.append(interval.mean)
            drawn += values
        panel.plot(numbers, means, **_line(network), zorder=3, gid=f"{name}-{network}")
    return drawn


def _values(results: StudyResults, network: str, level: str, values_of: Values) -> list[float]:
    """In per cent, or points; none where there is no such run."""
    try:
        return [100 * float(value) for value in values_of(results, network, level)]
    except InputError:
        return []


def _limits(
    values: Sequence[float], *, lowest: float | None = None, highest: float | None = None
) -> tuple[float, float]:
    around = AROUND * max(max(values) - min(values), 1.0)
    low, high = min(values) - around, max(values) + around
    return low if lowest is None else max(low, lowest), high if highest is None else min(high, highest)


def _finish(panel: Axes, numbers: Sequence[int], title: str) -> None:
    light_grid(panel, "y")
    panel.set_xscale("log", base=2)
    panel.set_xticks(numbers, [str(number) for number in numbers])
    panel.minorticks_off()
    panel.set_xlim(min(numbers) / 1.5, max(numbers) * 1.5)
    panel.set_xlabel("tiles along a side")
    panel.set_title(title)
