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
from nearsight.report.study.positions import shuffling
from nearsight.report.study.positions.shuffling import accuracy_by_seed, change_by_seed, num_tiles
from nearsight.study.results import StudyResults
from nearsight.study.statistics import MeanInterval

Values = Callable[[StudyResults, str, str], "pd.Series[float]"]
"""Of a network and a number of tiles: a number per seed."""
Means = Callable[[StudyResults, str, str], MeanInterval]
"""Likewise: their mean."""
NETWORKS = (s3.VIT, s3.POSITIONAL_VIT, s3.RESNET, *(name for name in s3.CURVES if name not in (s3.VIT, s3.RESNET)))
"""In the order of their looks, ours and the paper's."""
# By which factor the curves lie beside each other, so that their intervals do not hide one another.
BESIDE = 1.09
# Of the height that the seeds take up: the space around them. Intervals that need more are cut off.
AROUND = 0.12


def permutation_curves(results: StudyResults) -> Drawing:
    """Three panels: our accuracy; on its scale the ends of the paper's curves; and the change within seeds of both."""
    levels = results.factors["tiles"]
    networks = [name for name in results.factors["model"] if name in set(results.runs["model"])]
    if not networks:
        raise InputError("none of its networks has a run yet")
    with house_style():
        figure = Figure(figsize=(9.4, 3.5), layout="constrained")
        ours, papers, changes = figure.subplots(1, 3, width_ratios=(1.3, 0.8, 1.3))
        heights = _draw_ours(ours, results, networks, accuracy_by_seed, shuffling.accuracy, "accuracy")
        for network, curve in s3.CURVES.items():
            heights += [100 * curve.first, 100 * curve.last]
            papers.plot(
                [s3.FIRST_TILES, s3.LAST_TILES], heights[-2:], **_line(network, is_ours=False), gid=f"paper-{network}"
            )
        for panel in (ours, papers):
            panel.set_ylim(*_limits(heights, lowest=0.0, highest=100.0))
        drops = _draw_ours(changes, results, networks, change_by_seed, shuffling.change, "change")
        for network, curve in s3.CURVES.items():
            look = {**_line(network, is_ours=False), "linestyle": "none"}
            # Beside the intervals, where it hides none.
            changes.plot([s3.LAST_TILES * BESIDE**4], [100 * curve.change], **look, gid=f"paper-change-{network}")
            drops.append(100 * curve.change)
        changes.axhline(0.0, color=MUTED, linewidth=0.9, zorder=1)
        changes.set_ylim(*_limits([0.0, *drops]))
        numbers = [num_tiles(level) for level in levels]
        _finish(ours, numbers, "ours: test accuracy, %")
        _finish(papers, [s3.FIRST_TILES, s3.LAST_TILES], "the paper's, %")
        _finish(changes, numbers, f"change from {s3.UNSHUFFLED}, points")
        shown = [name for name in NETWORKS if name in networks or name in s3.CURVES]
        handles = [Line2D([], [], **_line(name, is_ours=name in networks)) for name in shown]
        names = [name if name in networks else f"{name} (the paper's)" for name in shown]
        add_legend(figure, handles, names, loc="outside upper left", ncols=len(shown))
    seeds = seeds_in_words(results.runs.groupby(["model", "tiles"])["seed"].nunique())
    words = (
        f"Filled: ours, mean over {seeds}; bands: the range of seeds; bars: 95 % intervals, with the spread over seeds "
        "learned from all conditions. Changes are taken within seeds."
    )
    about = (
        f"Hollow: the paper's, the ends of its curves, read off; its changes are from {s3.FIRST_TILES} tiles along a "
        "side. Ours trained for few epochs: compare how curves fall, not how high they lie."
    )
    add_footnote(figure, [words, about, *missing_notes(results), *scale_notes(results)])
    return Drawing(
        figure=figure,
        caption="Test accuracy against the number of tiles along a side that all images are cut into, where one fixed "
        f"permutation shuffles them; 1 is the image itself, {s3.LAST_TILES} its single pixels. Right: the change that "
        f"shuffling makes. {words} {about}",
    )


def _line(network: str, *, is_ours: bool) -> dict[str, Any]:
    style = _style(network)
    hollow = {"markerfacecolor": "white", "markeredgecolor": style.colour, "markeredgewidth": 1.3, "linewidth": 1.0}
    filled = {"markeredgecolor": "white", "markeredgewidth": 0.6, "linewidth": 1.6}
    return {
        **{"color": style.colour, "linestyle": style.dash, "marker": style.marker, "markersize": 6},
        **(filled if is_ours else hollow),
    }


def _style(network: str) -> ModelStyle:
    return model_style(NETWORKS.index(network) if network in NETWORKS else len(NETWORKS))


def _draw_ours(
    panel: Axes, results: StudyResults, networks: Sequence[str], values_of: Values, mean_of: Means, name: str
) -> list[float]:
    """A curve per network with the band of its seeds and an interval at each point; the values of all seeds, times
    100."""
    drawn: list[float] = []
    for place, network in enumerate(networks):
        beside = BESIDE ** (place - (len(networks) - 1) / 2)
        numbers, means, lowest, highest, colour = [], [], [], [], _style(network).colour
        for level in results.factors["tiles"]:
            values = _values(results, network, level, values_of)
            if not values:
                continue
            mean = mean_of(results, network, level)
            numbers.append(num_tiles(level) * beside)
            means.append(100 * mean.mean)
            lowest.append(min(values))
            highest.append(max(values))
            drawn += values
            if mean.has_interval and any(values):  # the change from nothing to nothing is sure
                panel.plot(
                    [numbers[-1]] * 2,
                    [100 * mean.low, 100 * mean.high],
                    color=colour,
                    linewidth=1.2,
                    gid=f"interval-{name}-{network}-{level}",
                )
        panel.fill_between(numbers, lowest, highest, color=colour, alpha=0.2, linewidth=0, gid=f"band-{name}-{network}")
        panel.plot(numbers, means, **_line(network, is_ours=True), zorder=3, gid=f"{name}-{network}")
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
    panel.set_xlim(min(numbers) / 1.5, max(numbers) * 1.7)
    panel.set_xlabel("tiles along a side")
    panel.set_title(title)
