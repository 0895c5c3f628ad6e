"""Figure 4: the most local head of every condition (S1, Figure 4)."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from nearsight.report.conditions import condition_looks, key_factor, level_in_words, missing_notes, scale_notes
from nearsight.report.figures.looks import ModelStyle, level_markers
from nearsight.report.figures.style import (
    DISTANCE_LABEL_ONE_LINE,
    GRID,
    INK,
    MUTED,
    add_legend,
    house_style,
    light_grid,
)
from nearsight.report.inputs import shorten
from nearsight.report.marks import (
    FEWEST,
    Drawing,
    add_footnote,
    distances_from_zero,
    dots_and_bars,
    legend_columns,
    seeds_in_row,
)
from nearsight.report.studies import report_of
from nearsight.report.tables import seeds_in_words
from nearsight.study.results import StudyResults
from nearsight.study.statistics import Estimate, mean_interval

_LABEL_LIMIT, _LINE = 44, 28
"""Characters of a line beside a row, and of a name that needs but one."""
_ONE_LINE = 6.0
"""Inches from which on the words of the scale fit into a line."""
_MOST_LEVELS = 4
# Of a row's height: ours above its middle and the paper's, where there is one, below, so that neither hides the other.
_ABOVE, _BELOW = -0.13, 0.22
_HOLLOW: dict[str, Any] = {"markerfacecolor": "none", "markeredgecolor": INK, "markeredgewidth": 0.9, "markersize": 6}


def minimum(results: StudyResults, *, width: float = 7.2) -> Drawing:
    """The smallest mean attention distance of each condition, sorted, marked by the key factor; with the paper's."""
    values = {str(label): group["min_mad"].tolist() for label, group in results.runs.groupby("condition", sort=False)}
    means = {label: mean_interval(numbers) for label, numbers in values.items()}
    labels = sorted(means, key=lambda label: means[label].value)
    source, paper = _published(results)
    styles, words = _styles(results)
    with house_style():
        figure = Figure(figsize=(width, 1.5 + 0.42 * len(labels)), layout="constrained")
        axes = figure.subplots()
        _draw_gap(axes, results)
        above = _ABOVE if paper else 0.0
        for place, label in enumerate(labels):
            _draw_ours(axes, place + above, label, means[label], values[label], styles[label])
            if label in paper:
                look = {**_HOLLOW, "marker": styles[label].marker, "linestyle": "none"}
                axes.plot(paper[label], place + _BELOW, **look, gid=f"paper-{label}")
        axes.set_yticks(range(len(labels)), [_in_lines(label) for label in labels], parse_math=False)
        axes.set_ylim(len(labels) - 0.45, -0.75)
        ends = [interval.high for interval in means.values() if interval.n >= FEWEST]
        distances_from_zero(axes, max(*ends, *results.runs["min_mad"], *paper.values(), 0.0))
        _write_column(axes, 40, "ours", {place: means[label].value for place, label in enumerate(labels)}, INK)
        of_paper = {place: paper[label] for place, label in enumerate(labels) if label in paper}
        if of_paper:
            _write_column(axes, 80, "paper", of_paper, MUTED)
        light_grid(axes, "x")
        axes.tick_params(axis="y", length=0)
        unit = "\n" if width < _ONE_LINE else " "
        axes.set_xlabel(DISTANCE_LABEL_ONE_LINE.replace(" (", f" of the most local head{unit}("))
        _add_legend(figure, words, with_paper=bool(of_paper))
    counts = [interval.n for interval in means.values()]
    ours = "Filled: 1 seed, so no interval."
    if max(counts) > 1:
        ours = f"Filled: mean over {seeds_in_words(counts)}{dots_and_bars(counts)}."
    add_footnote(figure, [ours, *missing_notes(results), *scale_notes(results)])
    hollow = f" Hollow: the paper ({source}, one seed)." if of_paper else ""
    return Drawing(
        figure=figure,
        caption=f"The smallest mean attention distance of each condition, sorted. {ours}{hollow} "
        "Shaded: the gap between the two groups of runs, where there is one.",
    )


def _in_lines(label: str) -> str:
    """A long name in two lines, broken before the part that is nearest to its middle."""
    ends = [place for place, letter in enumerate(label) if letter == "+" and place > 0]
    if len(label) <= _LINE or not ends:
        return shorten(label, _LABEL_LIMIT)
    middle = min(ends, key=lambda place: abs(place - len(label) / 2))
    return "\n".join(shorten(line, _LABEL_LIMIT) for line in (label[:middle], label[middle:]))


def _published(results: StudyResults) -> tuple[str, dict[str, float]]:
    """Where the paper has it, and by condition."""
    published = report_of(results.name).published
    if published is None:
        return "", {}
    rows = published.conditions.items()
    return published.source, {label: row.min_mad for label, row in rows if row.min_mad is not None}


def _styles(results: StudyResults) -> tuple[dict[str, ModelStyle], dict[str, ModelStyle]]:
    """A look per condition, whose marker is that of its level of the key factor; and the levels in the legend."""
    key, styles = key_factor(results), condition_looks(results)
    # Of one factor with many levels the rows say enough.
    if key is None or (len(results.factors) == 1 and len(results.factors[key]) > _MOST_LEVELS):
        return styles, {}
    marker_of = level_markers(results.factors[key])
    levels_of = zip(results.runs["condition"], results.runs[key], strict=True)
    styles |= {str(label): replace(styles[str(label)], marker=marker_of[str(level)]) for label, level in levels_of}
    legend = {
        level_in_words(key, results.factors[key], level): ModelStyle(colour=INK, dash="solid", marker=marker)
        for level, marker in marker_of.items()
    }
    return styles, legend


def _draw_ours(
    axes: Axes, height: float, label: str, interval: Estimate, values: list[float], style: ModelStyle
) -> None:
    if interval.n >= FEWEST:
        axes.plot(
            [max(0.0, interval.low), interval.high],  # no distance is negative
            [height, height],
            color=style.colour,
            linewidth=5,
            alpha=0.35,
            solid_capstyle="butt",
            gid=f"interval-{label}",
        )
    seeds_in_row(axes, values, height, style.colour, f"seeds-{label}")
    axes.plot(interval.value, height, **style.look_with(linestyle="none", markersize=7.5), gid=f"mean-{label}")


def _write_column(axes: Axes, offset: float, title: str, values: Mapping[int, float], colour: str) -> None:
    """Numbers at the right of their rows, under a title."""
    for place, text in ((-0.5, title), *((place, f"{value:.3f}") for place, value in values.items())):
        axes.annotate(
            text,
            (1.0, place),
            xycoords=("axes fraction", "data"),
            xytext=(offset, 0),
            textcoords="offset points",
            ha="right",
            va="center",
            color=colour,
            fontsize=8.5,
            annotation_clip=False,
        )


def _draw_gap(axes: Axes, results: StudyResults) -> None:
    """The space between the runs with the key factor and those without, where no run lies."""
    key = key_factor(results)
    if key is None or len(results.factors[key]) != 2:
        return
    groups = [group["min_mad"] for _, group in results.runs.groupby(key)]
    if len(groups) != 2:
        return
    lower, upper = sorted(groups, key=lambda group: float(group.mean()))
    low, high = float(lower.max()), float(upper.min())
    if low >= high:
        return
    axes.axvspan(low, high, facecolor=GRID, alpha=0.55, linewidth=0, zorder=0, gid="gap")
    axes.annotate(
        f"gap {high - low:.3f}",
        ((low + high) / 2, 1.0),
        xycoords=("data", "axes fraction"),
        xytext=(0, -3),
        textcoords="offset points",
        ha="center",
        va="top",
        color=INK,
    )


def _add_legend(figure: Figure, words: Mapping[str, ModelStyle], *, with_paper: bool) -> None:
    handles = [style.handle(markersize=7, linestyle="none") for style in words.values()]
    labels = [shorten(label, _LABEL_LIMIT) for label in words]
    if with_paper:
        handles.append(Line2D([], [], marker="o", linestyle="none", **_HOLLOW))
        labels.append("hollow: the paper, one seed")
    if handles:
        num_columns = legend_columns(figure, labels, len(labels))
        add_legend(figure, handles, labels, loc="outside upper left", ncols=num_columns, handlelength=1)
