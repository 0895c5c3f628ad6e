"""What the sets are worth: accuracy on a new feature over the number of samples."""

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, NullLocator, PercentFormatter

from nearsight.errors import InputError
from nearsight.report.figures.style import MUTED, ModelStyle, add_legend, house_style, light_grid, model_style
from nearsight.report.structure.numbers import conditions_of
from nearsight.report.structure.transfer import (
    KEPT,
    KEPT_LONG,
    KEPT_NOISY,
    SCRATCH,
    SCRATCH_NOISY,
    WAYS,
    accuracies,
    noise_of,
    samples_needed,
    target_accuracy,
)
from nearsight.report.study.drawing import Drawing
from nearsight.report.study.notes import add_footnote, seeds_in_words
from nearsight.study.simulation_folder import SimulationResults
from nearsight.study.statistics import mean_interval

PANELS = ((SCRATCH, KEPT, KEPT_LONG), (SCRATCH_NOISY, KEPT_NOISY))
"""The ways of each panel, in the order of their looks."""
LIMITS = (0.7, 8000.0)


def transfer_curves(results: SimulationResults) -> Drawing:
    """Test accuracy over samples, and the samples that the stated accuracy takes, for each way to learn."""
    there = {name.rpartition(" ")[0] for name in conditions_of(results)}
    shown = [[way for way in ways if way in there] for ways in PANELS]
    if not all(shown):
        raise InputError("not every noise has a condition that is done")
    target, best = target_accuracy(results), float(results.runs["best_acc"].iloc[0])
    looks = {way: model_style(place) for ways in PANELS for place, way in enumerate(ways)}
    with house_style():
        figure = Figure(figsize=(9.2, 3.8), layout="constrained")
        quiet, noisy, needed = figure.subplots(1, 3, sharex=True, width_ratios=(1.25, 1.25, 1))
        for panel, ways in zip((quiet, noisy), shown, strict=True):
            for height, dash in ((best, (0, (1, 2))), (target, (0, (4, 2)))):
                panel.axhline(height, color=MUTED, linewidth=0.9, linestyle=dash, zorder=1)
            for way in ways:
                _draw_accuracy(panel, results, way, looks[way])
            panel.yaxis.set_major_formatter(PercentFormatter(xmax=1.0, decimals=0))
            panel.set_title(f"test accuracy, σ = {noise_of(results, ways[0]):g}")
            light_grid(panel, "y")
        _draw_all_needed(needed, results, shown, looks, target)
        quiet.set_xscale("log")
        quiet.set_xlim(LIMITS)
        for panel in (quiet, noisy, needed):
            panel.set_xticks([1, 10, 100, 1000])
            panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
            panel.xaxis.set_minor_locator(NullLocator())
            panel.set_xlabel("training samples")
        handles = [
            Line2D([], [], color=looks[way].colour, linestyle=looks[way].dash, marker=looks[way].marker, markersize=4.5)
            for way in shown[0]
        ]
        add_legend(figure, handles, [WAYS[way] for way in shown[0]], loc="outside upper left", ncols=len(shown[0]))
    seeds = seeds_in_words(accuracies(results, way).shape[1] for ways in shown for way in ways)
    words = (
        f"Mean over {seeds} with its 95 % interval; dotted: the best possible accuracy; dashed: a point below. Right: "
        "small marks are seeds, large ones the geometric mean with its 95 % interval; an arrow: more than was tried."
    )
    add_footnote(figure, [words])
    return Drawing(
        figure=figure, caption=f"Test accuracy on a new feature, with the sets known and from scratch. {words}"
    )


def _draw_accuracy(axes: Axes, results: SimulationResults, way: str, style: ModelStyle) -> None:
    table = accuracies(results, way)
    found = [mean_interval(row.dropna()) for _, row in table.iterrows()]
    axes.errorbar(
        table.index.to_numpy(),
        [interval.mean for interval in found],
        yerr=[interval.half_width if interval.has_interval else 0.0 for interval in found],
        color=style.colour,
        linestyle=style.dash,
        marker=style.marker,
        markersize=4.5,
        linewidth=1.4,
        elinewidth=0.9,
        capsize=2.5,
        gid=f"accuracy-{way}",
    )


def _draw_all_needed(
    axes: Axes, results: SimulationResults, shown: list[list[str]], looks: dict[str, ModelStyle], target: float
) -> None:
    """A line per way, the noises apart."""
    height = 0.0
    for ways in shown:
        axes.annotate(
            f"σ = {noise_of(results, ways[0]):g}",
            (0.0, height - 0.55),
            xycoords=("axes fraction", "data"),
            fontsize=8.0,
            color=MUTED,
        )
        for way in ways:
            _draw_needed(axes, results, way, looks[way], target, height)
            height += 1.0
        height += 0.5
    axes.set_ylim(height - 0.9, -1.0)
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    axes.set_title(f"samples needed for {100 * target:.1f} %")
    light_grid(axes, "x")


def _draw_needed(
    axes: Axes, results: SimulationResults, way: str, style: ModelStyle, target: float, height: float
) -> None:
    needed = samples_needed(results, way, target)
    reached = needed.samples[np.isfinite(needed.samples)].to_numpy()
    spread = np.linspace(0.14, 0.34, len(reached)) if len(reached) > 1 else np.full(len(reached), 0.24)
    look: dict[str, Any] = {"marker": style.marker, "color": style.colour, "linestyle": "none"}
    axes.plot(reached, height + spread, **look, markersize=3, alpha=0.6, gid=f"seeds-{way}")
    mean = needed.mean
    if np.isfinite(mean.mean):
        if mean.has_interval:
            axes.plot([mean.low, mean.high], [height] * 2, color=style.colour, linewidth=5, alpha=0.35)
        axes.plot(mean.mean, height, **look, markersize=7.5, gid=f"mean-{way}")
        words, place = f"{mean.mean:,.0f}", mean.mean
    else:
        axes.plot(needed.most, height, **{**look, "marker": ">"}, markersize=7.5, gid=f"beyond-{way}")
        words, place = f"> {needed.most:,}", float(needed.most)
    is_far = place > 100
    axes.annotate(
        words,
        (place, height),
        xytext=(-12 if is_far else 10, 7),
        textcoords="offset points",
        ha="right" if is_far else "left",
        va="center",
        fontsize=8.5,
        fontweight="bold",
    )
