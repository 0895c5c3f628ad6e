"""What the sets are worth: accuracy on a new feature over the number of samples."""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, NullLocator, PercentFormatter

from nearsight.errors import InputError
from nearsight.report.figures.style import MUTED, add_legend, house_style, light_grid, model_style
from nearsight.report.structure.numbers import conditions_of
from nearsight.report.structure.transfer import WAYS, accuracies, samples_needed, target_accuracy
from nearsight.report.study.drawing import Drawing
from nearsight.report.study.notes import add_footnote, seeds_in_words
from nearsight.study.simulation_folder import SimulationResults
from nearsight.study.statistics import mean_interval


def transfer_curves(results: SimulationResults) -> Drawing:
    """Test accuracy over samples, and the samples that the stated accuracy takes, for each way to learn."""
    ways = [way for way in WAYS if any(name.rpartition(" ")[0] == way for name in conditions_of(results))]
    if not ways:
        raise InputError("no condition is done")
    target, best = target_accuracy(results), float(results.runs["best_acc"].iloc[0])
    with house_style():
        figure = Figure(figsize=(8.2, 3.7), layout="constrained")
        left, right = figure.subplots(1, 2, sharex=True, width_ratios=(1.7, 1))
        for height, style in ((best, (0, (1, 2))), (target, (0, (4, 2)))):
            left.axhline(height, color=MUTED, linewidth=0.9, linestyle=style, zorder=1)
        for index, way in enumerate(ways):
            _draw_accuracy(left, results, way, index)
            _draw_needed(right, results, way, index, target)
        left.set_xscale("log")
        samples = [int(number) for number in accuracies(results, ways[0]).index]
        for panel in (left, right):
            panel.set_xticks(samples[::3] if len(samples) > 6 else samples)
            panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
            panel.xaxis.set_minor_locator(NullLocator())
            panel.set_xlabel("training samples")
        left.yaxis.set_major_formatter(PercentFormatter(xmax=1.0, decimals=0))
        left.set_title("test accuracy, new feature")
        right.set_title(f"samples needed for {100 * target:.1f} %")
        right.set_yticks([])
        right.set_ylim(len(ways) - 0.4, -0.6)
        right.spines["left"].set_visible(False)
        light_grid(left, "y")
        light_grid(right, "x")
        styles = [model_style(index) for index in range(len(ways))]
        handles = [Line2D([], [], color=s.colour, linestyle=s.dash, marker=s.marker, markersize=4.5) for s in styles]
        add_legend(figure, handles, [WAYS[way] for way in ways], loc="outside upper left", ncols=2)
    seeds = seeds_in_words(accuracies(results, way).shape[1] for way in ways)
    words = (
        f"Left: mean over {seeds} with its 95 % interval; dotted: the best possible accuracy; dashed: a point below. "
        "Right: small marks are seeds, large ones the geometric mean with its 95 % interval; an arrow: more than was "
        "tried."
    )
    add_footnote(figure, [words])
    return Drawing(
        figure=figure, caption=f"Test accuracy on a new feature, with the sets known and from scratch. {words}"
    )


def _draw_accuracy(axes: Axes, results: SimulationResults, way: str, index: int) -> None:
    style, table = model_style(index), accuracies(results, way)
    found = [mean_interval(row.dropna()) for _, row in table.iterrows()]
    means = np.array([interval.mean for interval in found])
    half = np.array([interval.half_width if interval.has_interval else 0.0 for interval in found])
    axes.errorbar(
        table.index.to_numpy(),
        means,
        yerr=half,
        color=style.colour,
        linestyle=style.dash,
        marker=style.marker,
        markersize=4.5,
        linewidth=1.4,
        elinewidth=0.9,
        capsize=2.5,
        gid=f"accuracy-{way}",
    )


def _draw_needed(axes: Axes, results: SimulationResults, way: str, index: int, target: float) -> None:
    style, needed = model_style(index), samples_needed(results, way, target)
    reached = needed.samples[np.isfinite(needed.samples)]
    spread = np.linspace(-0.16, 0.16, len(needed.samples)) if len(needed.samples) > 1 else np.zeros(1)
    heights = index + 0.18 + spread[: len(reached)] * 0.5
    axes.plot(
        reached,
        heights,
        linestyle="none",
        marker=style.marker,
        markersize=3,
        color=style.colour,
        alpha=0.6,
        gid=f"seeds-{way}",
    )
    mean = needed.mean
    if np.isfinite(mean.mean):
        if mean.has_interval:
            axes.plot([mean.low, mean.high], [index - 0.12] * 2, color=style.colour, linewidth=5, alpha=0.35)
        axes.plot(mean.mean, index - 0.12, marker=style.marker, markersize=7.5, color=style.colour, gid=f"mean-{way}")
        words, place = f"{mean.mean:,.0f}", mean.mean
    else:
        axes.plot(needed.most, index - 0.12, marker=">", markersize=7.5, color=style.colour, gid=f"beyond-{way}")
        words, place = f"> {needed.most:,}", float(needed.most)
    near_right = place > 100
    axes.annotate(
        words,
        (place, index - 0.12),
        xytext=(-9 if near_right else 9, 9),
        textcoords="offset points",
        ha="right" if near_right else "left",
        va="center",
        fontsize=8.5,
        fontweight="bold",
    )
