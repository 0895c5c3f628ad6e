"""Where association is found: one setting at a time."""

import math

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, NullLocator, PercentFormatter

from nearsight.report.figures.style import MUTED, add_legend, house_style, light_grid, model_style
from nearsight.report.structure.numbers import patches_of, share_interval
from nearsight.report.structure.sweep import BASE, FACTORS, SweepLine, sweep_line
from nearsight.report.study.drawing import Drawing
from nearsight.report.study.notes import add_footnote, seeds_in_words
from nearsight.study.simulation_folder import SimulationResults
from nearsight.study.statistics import mean_interval

TITLES = {
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
            panel.set_title(TITLES[line.setting])
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
    return Drawing(figure=figure, caption=f"Where association is found. {words}{_beyond_s3(results, lines)}")


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
