"""Figure 5: four key conditions in the plane of distance and entropy (S1, Figure 5)."""

from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from nearsight.errors import InputError
from nearsight.report.figures.plane import MOST_OUTLINES
from nearsight.report.figures.style import (
    DISTANCE_LABEL_ONE_LINE,
    ENTROPY_LABEL,
    MODEL_COLOURS,
    ModelStyle,
    add_legend,
    house_style,
    light_grid,
)
from nearsight.report.inputs import shorten
from nearsight.report.study.conditions import num_seeds, roles
from nearsight.report.study.drawing import Drawing, distances_from_zero
from nearsight.report.study.notes import add_footnote, beside_the_paper, legend_columns, scale_notes, seeds_in_words
from nearsight.study.results import StudyResults

# The paper's markers: circles, crosses, squares and triangles. Conditions with the key factor are filled.
STYLES = {
    "full": ModelStyle(colour=MODEL_COLOURS[0], dash="solid", marker="o"),
    "only_key": ModelStyle(colour=MODEL_COLOURS[5], dash="solid", marker="X"),
    "without_key": ModelStyle(colour=MODEL_COLOURS[4], dash="solid", marker="s"),
    "base": ModelStyle(colour=MODEL_COLOURS[1], dash="solid", marker="^"),
}
HOLLOW = ("without_key", "base")
LABEL_LIMIT = 30


def key_conditions(results: StudyResults) -> Drawing:
    """All heads of all seeds: everything on, only the key factor, all but the key factor, nothing."""
    if len(results.factors) < 2:
        raise InputError("it needs two factors or more; with one, Figure 2 shows the same conditions")
    found = roles(results)
    labels = {role: getattr(found, role) for role in STYLES}
    present = {role: label for role, label in labels.items() if label is not None}
    if not present:
        raise InputError("none of its four conditions has a run yet")
    with house_style():
        figure = Figure(figsize=(6.6, 4.8), layout="constrained")
        axes = figure.subplots()
        light_grid(axes)
        handles, largest = [], 0.0
        for role, label in present.items():
            style, hollow = STYLES[role], role in HOLLOW
            runs = results.runs.loc[results.runs["condition"] == label, "run"]
            heads = results.heads[results.heads["run"].isin(runs)]
            largest = max(largest, float(heads["mad"].max()))
            axes.scatter(
                heads["mad"],
                heads["entropy"],
                s=24,
                marker=style.marker,
                linewidths=0.8 if hollow else 0.4,
                alpha=0.85,
                facecolors="none" if hollow else style.colour,
                edgecolors=style.colour if hollow else "white",
                zorder=2 if hollow else 3,
                rasterized=len(heads) > MOST_OUTLINES,
                gid=f"heads-{label}",
            )
            handles.append(
                Line2D(
                    [],
                    [],
                    marker=style.marker,
                    markerfacecolor="none" if hollow else style.colour,
                    markeredgecolor=style.colour,
                    linestyle="none",
                )
            )
        distances_from_zero(axes, largest)
        axes.set_ylim(-0.03, 1.05)
        axes.set_xlabel(DISTANCE_LABEL_ONE_LINE)
        axes.set_ylabel(ENTROPY_LABEL)
        names = [shorten(label, LABEL_LIMIT) for label in present.values()]
        num_columns = legend_columns(figure, names, len(names))
        add_legend(figure, handles, names, loc="outside upper left", ncols=num_columns, handlelength=1)
    seeds = seeds_in_words(num_seeds(results, label) for label in present.values())
    absent = "" if len(present) == len(STYLES) else " A condition that has no complete run yet is not shown."
    add_footnote(figure, [f"One point per head; the heads of {seeds}.{absent}", *scale_notes(results)])
    return Drawing(
        figure=figure,
        caption=f"Mean attention distance and entropy of every head of {', '.join(present.values())}. The heads of "
        f"{seeds} are shown.{absent}" + beside_the_paper(results, "The paper's Figure 5 shows one seed."),
    )
