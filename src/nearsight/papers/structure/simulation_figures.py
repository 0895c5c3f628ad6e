"""The attention before and after: what of the sets can be seen in it."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator, PercentFormatter
from numpy.typing import NDArray

from nearsight.errors import InputError
from nearsight.papers.structure.simulation_numbers import (
    BASE,
    FACTORS,
    KEPT,
    KEPT_LONG,
    KEPT_NOISY,
    SCRATCH,
    SCRATCH_NOISY,
    WAYS,
    SweepLine,
    accuracies,
    noise_of,
    samples_needed,
    sweep_line,
    target_accuracy,
)
from nearsight.papers.structure.simulation_rules import chance_of_association
from nearsight.report.figures.style import (
    GRID,
    INK,
    MUTED,
    PAPER,
    ModelStyle,
    add_legend,
    house_style,
    light_grid,
    model_style,
)
from nearsight.report.marks import Drawing, add_footnote
from nearsight.report.simulations import (
    attention_of,
    conditions_of,
    curves_of,
    median_or_none,
    patches_of,
    runs_of,
    share_interval,
)
from nearsight.report.tables import seeds_in_words
from nearsight.study.simulation_folder import SimulationResults
from nearsight.study.statistics import mean_interval
from nearsight.train.structure.descent import MOVED, NEAR

TITLES = ("before", "after", "after, by sets", "by sets, mean over seeds")
PANEL = 1.85
"""Inches."""


def attention_matrices(results: SimulationResults) -> Drawing:
    """A of the first seed before and after, as it is and with the patches of a set side by side; and its mean."""
    conditions = conditions_of(results)
    rows = {condition: _matrices(results, condition) for condition in conditions}
    everything = np.concatenate([matrix.ravel() for matrices in rows.values() for matrix in matrices])
    low, high = float(np.nanmin(everything)), float(np.nanmax(everything))
    with house_style():
        size = (len(TITLES) * PANEL + 1.2, len(conditions) * PANEL + 0.5)
        figure = Figure(figsize=size, layout="constrained")
        panels = figure.subplots(len(conditions), len(TITLES), squeeze=False)
        for line, (condition, matrices) in zip(panels, rows.items(), strict=True):
            order, borders = _order(results, condition)
            orders = (range(len(order)), range(len(order)), order, order)
            for place, (panel, matrix, shown) in enumerate(zip(line, matrices, orders, strict=True)):
                image = panel.imshow(
                    matrix[np.ix_(shown, shown)],
                    cmap="viridis",
                    vmin=low,
                    vmax=high,
                    interpolation="none",
                    aspect="auto",
                )
                image.set_gid(f"attention-{condition}-{place}")
                _name_patches(panel, list(shown))
                if place >= 2:
                    _outline(panel, borders)
            line[0].set_ylabel(condition)
        for panel, title in zip(panels[0], TITLES, strict=True):
            panel.set_title(title, fontsize=8.5)
        bar = figure.colorbar(image, ax=list(panels.ravel()), aspect=10 * len(conditions), pad=0.015)
        bar.outline.set_visible(False)
        bar.ax.tick_params(length=0)
        bar.set_label("entry of A (logit of attention)", fontsize=8.5)
    counts = [len(runs_of(results, condition)) for condition in conditions]
    first = min(int(runs_of(results, condition).index.min()) for condition in conditions)
    words = (
        f"The attention logits A; rows and columns are patches. First three: seed {first}; last: the mean over "
        f"{seeds_in_words(counts)}. Framed: the sets. The diagonal is fixed."
    )
    add_footnote(figure, [words])
    return Drawing(figure=figure, with_round_places=True, caption=words)


def _matrices(results: SimulationResults, condition: str) -> tuple[NDArray[np.float64], ...]:
    seeds = [int(seed) for seed in runs_of(results, condition).index]
    before, after = attention_of(results, condition, min(seeds))
    mean = np.mean([attention_of(results, condition, seed)[1] for seed in seeds], axis=0)
    return before, after, after, mean


def _order(results: SimulationResults, condition: str) -> tuple[list[int], int]:
    """The patches, set by set, and the size of a set."""
    sets = patches_of(results, condition).sets().numpy()
    return [int(patch) for patch in np.argsort(sets, kind="stable")], int(np.bincount(sets)[0])


def _name_patches(panel: Axes, shown: list[int]) -> None:
    panel.set_xticks(range(len(shown)), [str(patch + 1) for patch in shown], fontsize=6)
    panel.set_yticks(range(len(shown)), [str(patch + 1) for patch in shown], fontsize=6)
    panel.tick_params(length=0, pad=1.5)
    panel.spines[:].set_visible(False)


def _outline(panel: Axes, size: int) -> None:
    num_patches = len(panel.get_xticks())
    for first in range(0, num_patches, size):
        for colour, width in ((INK, 2.2), (PAPER, 1.0)):  # stands out from light and dark cells
            frame = Rectangle((first - 0.5, first - 0.5), size, size, fill=False, edgecolor=colour, linewidth=width)
            panel.add_patch(frame)


@dataclass(frozen=True, kw_only=True)
class Panel:
    title: str
    quantities: Mapping[str, str]
    """Column of the curves → its name in the legend."""
    best: str | None = None
    """Column of the runs with the best value there is."""
    percent: bool = False


PHASE_PANELS = (
    Panel(title="v: the feature", quantities={"alpha": "α, along the feature", "across": "across it"}),
    Panel(title="A: the sets", quantities={"gamma": "γ, within sets", "rho": "ρ, between sets"}),
    Panel(title="risk", quantities={"test_risk": "test", "train_risk": "training"}, best="best_risk"),
    Panel(
        title="accuracy, association",
        quantities={"test_acc": "test accuracy", "associated": "patches associated"},
        best="best_acc",
        percent=True,
    ),
)
NUMERALS = ("I", "II", "III")


def phase_curves(results: SimulationResults) -> Drawing:
    """Feature alignment, attention within and between sets, risk and accuracy, over steps."""
    conditions = conditions_of(results)
    with house_style():
        figure = Figure(figsize=(1.2 + 3.4 * len(conditions), 8.2), layout="constrained")
        panels = figure.subplots(len(PHASE_PANELS), len(conditions), squeeze=False, sharex="col", sharey="row")
        for column, condition in enumerate(conditions):
            curves, runs = curves_of(results, condition), runs_of(results, condition)
            borders = [median_or_none(runs[name]) for name in ("phase_2", "phase_3")]
            last = float(max(curve["step"].max() for curve in curves.values()))
            for row, panel in enumerate(PHASE_PANELS):
                axes = panels[row, column]
                _draw_borders(axes, borders, last, with_numerals=row == 0)
                for index, name in enumerate(panel.quantities):
                    draw_band(axes, list(curves.values()), name, model_style(index), gid=f"{name}-{condition}")
                if panel.best is not None:
                    axes.axhline(float(runs[panel.best].iloc[0]), color=MUTED, linewidth=0.9, linestyle=(0, (1, 2)))
                light_grid(axes, "y")
            panels[0, column].set_title(condition, pad=18)
            panels[-1, column].set_xlabel("step")
            panels[-1, column].xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
        for row, panel in enumerate(PHASE_PANELS):
            panels[row, 0].set_ylabel(panel.title)
            if panel.percent:
                panels[row, 0].yaxis.set_major_formatter(PercentFormatter(xmax=1.0, decimals=0))
            _add_legend(panels[row, -1], panel)
    seeds = seeds_in_words(len(runs_of(results, condition)) for condition in conditions)
    words = (
        f"Lines: mean over {seeds}; bands: from the least to the largest. Vertical lines: median step at which a phase "
        f"begins. II: γ − ρ reaches {MOVED}. III: all patches are associated and the test accuracy is within "
        f"{100 * NEAR:.0f} point of the best possible. Dotted: the best possible."
    )
    add_footnote(figure, [words])
    return Drawing(figure=figure, with_round_places=True, caption=f"How v and A learn. {words}")


def draw_band(axes: Axes, curves: Sequence[pd.DataFrame], name: str, style: ModelStyle, *, gid: str) -> None:
    """The mean of a quantity over seeds, and its range."""
    steps = curves[0]["step"].to_numpy()
    values = np.stack([curve[name].to_numpy(dtype=np.float64) for curve in curves])
    axes.fill_between(steps, values.min(0), values.max(0), color=style.colour, alpha=0.22, linewidth=0)
    axes.plot(steps, values.mean(0), color=style.colour, linestyle=style.dash, linewidth=1.6, gid=gid)


def _draw_borders(axes: Axes, borders: Sequence[float], last: float, *, with_numerals: bool) -> None:
    """A line where a phase begins, and above the first panel the phases' numerals."""
    ends = [0.0, *(border for border in borders if np.isfinite(border)), last]
    for border in ends[1:-1]:
        axes.axvline(border, color=INK, linewidth=0.8, zorder=1)
    for number, (low, high) in enumerate(pairwise(ends)):
        if number % 2:
            axes.axvspan(low, high, facecolor=GRID, alpha=0.35, linewidth=0, zorder=0)
        if with_numerals:
            axes.annotate(
                NUMERALS[number],
                ((low + high) / 2, 1.0),
                xycoords=("data", "axes fraction"),
                xytext=(0, 3),
                textcoords="offset points",
                ha="center",
                va="bottom",
                fontsize=9,
                fontweight="bold",
                color=INK,
            )


def _add_legend(axes: Axes, panel: Panel) -> None:
    styles = [model_style(index) for index in range(len(panel.quantities))]
    handles = [Line2D([], [], color=style.colour, linestyle=style.dash, linewidth=1.6) for style in styles]
    add_legend(axes, handles, list(panel.quantities.values()), loc="center left", bbox_to_anchor=(1.0, 0.5))


CONTROL_PANELS = {"associated": "patches associated with their sets", "test_acc": "test accuracy"}


def control_curves(results: SimulationResults) -> Drawing:
    """Over steps: the share of patches that are associated, and the test accuracy, of every condition."""
    conditions = conditions_of(results)
    with house_style():
        figure = Figure(figsize=(7.6, 3.3), layout="constrained")
        panels = dict(zip(CONTROL_PANELS, figure.subplots(1, 2, sharex=True, sharey=True), strict=True))
        for index, condition in enumerate(conditions):
            curves = list(curves_of(results, condition).values())
            for name, panel in panels.items():
                draw_band(panel, curves, name, model_style(index), gid=f"{name}-{condition}")
        chance = chance_of_association(patches_of(results, conditions[0]))
        panels["associated"].axhline(chance, color=MUTED, linewidth=0.9, linestyle=(0, (1, 2)), gid="chance")
        panels["associated"].annotate(
            "by chance",
            (1.0, chance),
            xycoords=("axes fraction", "data"),
            xytext=(0, 3),
            textcoords="offset points",
            ha="right",
            fontsize=7.5,
            color=MUTED,
        )
        for name, panel in panels.items():
            panel.set_title(CONTROL_PANELS[name])
            panel.set_xlabel("step")
            panel.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
            light_grid(panel, "y")
        panels["associated"].set_ylim(-0.02, 1.03)
        panels["associated"].yaxis.set_major_formatter(PercentFormatter(xmax=1.0, decimals=0))
        styles = [model_style(index) for index in range(len(conditions))]
        handles = [Line2D([], [], color=style.colour, linestyle=style.dash, linewidth=1.6) for style in styles]
        add_legend(figure, handles, conditions, loc="outside upper left", ncols=len(conditions))
    seeds = seeds_in_words(len(runs_of(results, condition)) for condition in conditions)
    words = f"Lines: mean over {seeds}; bands: from the least to the largest."
    add_footnote(figure, [words])
    return Drawing(figure=figure, with_round_places=True, caption=f"Association and accuracy over steps. {words}")


SWEEP_TITLES = {
    "data.num_sets": "sets, L",
    "data.set_size": "patches of a set, C",
    "data.probability": "chance features, q",
    "data.noise": "noise, σ",
    "descent.num_samples": "samples, N",
}
LOGARITHMIC = ("data.noise", "descent.num_samples")


def sweep_panels(results: SimulationResults) -> Drawing:
    """The share of seeds with all patches associated, and the mean share of patches, over each setting."""
    lines = [sweep_line(results, setting) for setting in FACTORS]
    with house_style():
        figure = Figure(figsize=(8.4, 5.0), layout="constrained")
        panels = figure.subplots(2, 3, sharey=True).ravel()
        for panel, line in zip(panels, lines, strict=False):
            panel.axvline(line.base, color=MUTED, linewidth=0.9, linestyle=(0, (1, 2)), zorder=1)
            values = list(line.points)
            exact = [share_interval(runs["exact"]) for runs in line.points.values()]
            partial = [mean_interval(runs["associated"]) for runs in line.points.values()]
            for index, (name, found) in enumerate({"associated": partial, "exact": exact}.items()):
                style = model_style(1 - index)
                # A share lies between 0 and 1, whatever Student's t says of its mean.
                below = [interval.mean - min(interval.mean, max(interval.low, 0.0)) for interval in found]
                above = [max(interval.mean, min(interval.high, 1.0)) - interval.mean for interval in found]
                panel.errorbar(
                    values,
                    [interval.mean for interval in found],
                    yerr=[below, above],
                    color=style.colour,
                    linestyle=style.dash,
                    marker=style.marker,
                    markersize=4.5,
                    linewidth=1.4,
                    elinewidth=0.9,
                    capsize=2.5,
                    gid=f"{name}-{line.setting}",
                )
            _scale(panel, line)
            panel.set_title(SWEEP_TITLES[line.setting])
            light_grid(panel, "y")
        panels[0].yaxis.set_major_formatter(PercentFormatter(xmax=1.0, decimals=0))
        panels[0].set_ylim(-0.04, 1.06)
        panels[-1].set_axis_off()
        styles = (model_style(0), model_style(1))
        handles = [Line2D([], [], color=s.colour, linestyle=s.dash, marker=s.marker, markersize=4.5) for s in styles]
        handles.append(Line2D([], [], color=MUTED, linewidth=0.9, linestyle=(0, (1, 2))))
        labels = ["seeds with all patches associated", "patches associated, mean", "the base"]
        add_legend(panels[-1], handles, labels, loc="center left")
    seeds = seeds_in_words(len(runs) for line in lines for runs in line.points.values())
    words = (
        f"One setting is varied at a time, with {seeds} each. Bars: 95 % intervals (Clopper and Pearson's of the share "
        "of seeds, Student's t of the mean)."
    )
    add_footnote(figure, [words])
    return Drawing(
        figure=figure,
        with_round_places=True,
        caption=f"Where association is found. {words}{_beyond_s3(results, lines)}",
    )


def _beyond_s3(results: SimulationResults, lines: list[SweepLine]) -> str:
    """Where q, which is held while there are more or fewer patches, is above S3's ln(d)/D."""
    bases, data = {line.setting: line.base for line in lines}, patches_of(results, BASE)
    q, other = bases["data.probability"], {"data.num_sets": data.set_size, "data.set_size": data.num_sets}
    found = [
        f"{FACTORS[line.setting]} = {value:g}"
        for line in lines
        if line.setting in other
        for value in line.points
        if q > math.log(data.dim) / (value * other[line.setting])
    ]
    return f" With {', '.join(found)}, q stays {q:g}, which is above S3's ln(d)/D there." if found else ""


def _scale(panel: Axes, line: SweepLine) -> None:
    if line.setting in LOGARITHMIC:
        panel.set_xscale("log")
    panel.set_xticks(list(line.points))
    panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    panel.xaxis.set_minor_locator(NullLocator())


TRANSFER_PANELS = ((SCRATCH, KEPT, KEPT_LONG), (SCRATCH_NOISY, KEPT_NOISY))
"""The ways of each panel, in the order of their looks."""
LIMITS = (0.7, 8000.0)


def transfer_curves(results: SimulationResults) -> Drawing:
    """Test accuracy over samples, and the samples that the stated accuracy takes, for each way to learn."""
    there = {name.rpartition(" ")[0] for name in conditions_of(results)}
    shown = [[way for way in ways if way in there] for ways in TRANSFER_PANELS]
    if not all(shown):
        raise InputError("not every noise has a condition that is done")
    target, best = target_accuracy(results), float(results.runs["best_acc"].iloc[0])
    looks = {way: model_style(place) for ways in TRANSFER_PANELS for place, way in enumerate(ways)}
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
        figure=figure,
        with_round_places=True,
        caption=f"Test accuracy on a new feature, with the sets known and from scratch. {words}",
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
