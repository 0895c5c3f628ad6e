"""The settings of `unreported-cifar100` beside the paper, and what each of them moves."""

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from nearsight.report.figures.style import (
    DISTANCE_LABEL_ONE_LINE,
    INK,
    MUTED,
    add_legend,
    house_style,
    light_grid,
    model_style,
)
from nearsight.report.study.drawing import Drawing
from nearsight.report.study.forest import Row, forest
from nearsight.report.study.notes import add_footnote, scale_notes
from nearsight.report.study.paper import BASELINE, ONLY_CUTMIX
from nearsight.report.study.table import records, rounded
from nearsight.report.study.unreported.effects import changes
from nearsight.report.study.unreported.fit import (
    CUTMIX,
    FITTED,
    best_fitting_levels,
    fits,
    levels_in_words,
    paper_value,
)
from nearsight.study.results import StudyResults


def settings_beside_the_paper(results: StudyResults) -> Drawing:
    """Accuracy and smallest distance of every setting, without and with CutMix, joined by a line; the paper's too."""
    table = fits(results)
    levels = results.factors[CUTMIX]
    with house_style():
        figure = Figure(figsize=(7.2, 4.6), layout="constrained")
        axes = figure.subplots()
        light_grid(axes)
        for place, row in enumerate(records(table)):
            _draw_pair(axes, row, level=levels.index(row[CUTMIX]), is_best=place == 0)
        axes.plot(
            [100 * paper_value(label, "test_acc") for label in FITTED],
            [paper_value(label, "min_mad") for label in FITTED],
            color=INK,
            linewidth=1.4,
            marker="*",
            markersize=13,
            markerfacecolor="white",
            zorder=5,
            gid="paper",
        )
        axes.set_xlabel("test accuracy, %")
        axes.set_ylabel(f"smallest {DISTANCE_LABEL_ONE_LINE.split(' (')[0]}\n(fraction of the grid's diagonal)")
        axes.set_ylim(bottom=0.0)
        _add_legend(figure, levels)
    best = levels_in_words(best_fitting_levels(results))
    told = (
        f"A line joins a setting without CutMix and with it. Thick: nearest to the paper ({best}; "
        f"distance {rounded(table['distance'].iloc[0], 2)})."
    )
    add_footnote(figure, [told, *scale_notes(results)])
    return Drawing(
        figure=figure,
        caption="Test accuracy and the distance of the most local head of every setting, without CutMix and with it, "
        f"beside the paper's {BASELINE} and {ONLY_CUTMIX} (stars, one seed). {told}",
    )


def _draw_pair(axes: Axes, row: dict[str, float], *, level: int, is_best: bool) -> None:
    accuracy = [100 * row[f"test_acc_{label}"] for label in FITTED]
    distance = [row[f"min_mad_{label}"] for label in FITTED]
    off, style = model_style(1), model_style(_place(level))
    axes.plot(accuracy, distance, color=INK if is_best else MUTED, linewidth=2.2 if is_best else 0.6, zorder=2)
    for index, look in enumerate((off, style)):
        axes.plot(accuracy[index], distance[index], marker=look.marker, color=look.colour, markersize=6.5, zorder=3)


def _place(level: int) -> int:
    """Of a level's look in the palette: without CutMix it is the second everywhere."""
    return {0: 1, 1: 0}.get(level, level)


def _add_legend(figure: Figure, levels: tuple[str, ...]) -> None:
    handles = []
    for level in range(len(levels)):
        style = model_style(_place(level))
        handles.append(Line2D([], [], color=style.colour, marker=style.marker, linestyle="none"))
    handles.append(Line2D([], [], color=INK, marker="*", markerfacecolor="white", markersize=11))
    names = ["without CutMix", *(f"CutMix {level}" for level in levels[1:]), "the paper"]
    add_legend(figure, handles, names, loc="outside upper left", ncols=len(names), handlelength=1.6)


def settings_effects(results: StudyResults) -> Drawing:
    """Main effects on the smallest distance, among the runs with CutMix."""
    rows = [Row(label=change.in_words, estimate=change.estimate) for change in changes(results)]
    figure = forest(rows, "change of the smallest mean attention distance (left: more local)")
    add_footnote(figure, ["Main effects among the runs with CutMix; bars: 95 % intervals.", *scale_notes(results)])
    return Drawing(
        figure=figure,
        caption="What each unreported setting changes in the distance of the most local head, over all other settings: "
        "main effects among the runs with CutMix, with their 95 % intervals.",
    )
