"""Box plots over seeds: attention from positions alone beside the usual one, and the paper's accuracies."""

from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from nearsight.errors import InputError
from nearsight.report.figures.style import INK, MUTED, ModelStyle, house_style, light_grid, model_style
from nearsight.report.study.drawing import Drawing
from nearsight.report.study.notes import add_footnote, missing_notes, scale_notes, seeds_in_words
from nearsight.report.study.positions import paper as s3
from nearsight.report.study.positions.positional import (
    MEASURES,
    MODELS,
    WHAT_ASSOCIATION_IS,
    accuracy_differences,
    named_runs,
)
from nearsight.study.results import StudyResults
from nearsight.study.statistics import mean_interval
from nearsight.study.statistics.intervals import ACCURACY_MARGIN

TITLES = {
    "test_acc": "test accuracy, %",
    "min_mad": "MAD, most local head",
    "mean_mad": "mean MAD, all heads",
    "position_association": "position association",
}
WIDTH, INSET, MEAN = 0.5, 0.36, 0.2
# Of the height that the seeds take up: the space around them.
AROUND = 0.12
# Seeds that lie closer together than this, in points or as fractions, are not drawn apart any further.
NARROWEST = {"test_acc": 1.0, "min_mad": 0.01, "mean_mad": 0.01, "position_association": 0.01}


def seeds_of_both(results: StudyResults) -> Drawing:
    """A panel per measure with a box and the seeds of each model, and one of the difference in accuracy within seeds;
    where the paper has a number, it is marked."""
    runs = named_runs(results).assign(test_acc=lambda table: 100 * table["test_acc"])
    here = [model for model in MODELS if model in set(runs["condition"])]
    if not here:
        raise InputError("none of its models has a run yet")
    columns = [column for column in MEASURES if runs[column].notna().any()]
    published = s3.PAIRS[results.name]
    has_both = accuracy_differences(results).size > 0
    with house_style():
        figure = Figure(figsize=(1.9 * (len(columns) + has_both) + 0.4, 3.2), layout="constrained")
        panels = list(figure.subplots(1, len(columns) + has_both, squeeze=False)[0])
        if has_both:  # beside the accuracies
            _draw_difference(panels.pop(1), results, 100 * published.difference)
        for panel, column in zip(panels, columns, strict=True):
            marked = {model: 100 * published.accuracy[model] for model in here} if column == "test_acc" else {}
            for place, model in enumerate(here):
                values = runs.loc[runs["condition"] == model, column].dropna().tolist()
                _draw_box(panel, values, place, model_style(MODELS.index(model)), f"{column}-{model}")
                if model in marked:
                    _mark_paper(panel, place, marked[model], model)
            panel.set_title(TITLES[column], fontsize=8.5)
            panel.set_xticks(range(len(here)), [model.replace(" ", "\n") for model in here])
            panel.set_xlim(-0.6, len(here) - 0.4)
            _set_heights(panel, [*runs[column].dropna(), *marked.values()], NARROWEST[column])
    seeds = seeds_in_words(results.runs.groupby("model")["seed"].nunique())
    words = f"Boxes: quartiles and range of {seeds}, the thick line is the median; points: single seeds."
    if has_both:
        words += " Difference: within seeds, with the 95 % interval of the mean; grey: what counts as on par."
    papers = f"Hollow: the paper's, on {published.dataset}, read off box plots."
    add_footnote(figure, [words, papers, *missing_notes(results), *scale_notes(results)])
    return Drawing(
        figure=figure,
        caption="A ViT and one whose attention sees positions alone: test accuracy and its difference, how far the "
        "most local head and all heads look (fractions of the grid's diagonal), and the association of learned "
        f"positions. {words} "
        f"{papers} {WHAT_ASSOCIATION_IS}",
    )


def _set_heights(panel: Axes, values: list[float], narrowest: float) -> None:
    middle, height = (min(values) + max(values)) / 2, max(max(values) - min(values), narrowest)
    panel.set_ylim(middle - (0.5 + AROUND) * height, middle + (0.5 + AROUND) * height)
    panel.ticklabel_format(axis="y", useOffset=False)
    light_grid(panel, "y")


def _draw_difference(panel: Axes, results: StudyResults, papers: float) -> None:
    """That of accuracy: every seed, their mean with its interval, the paper's, and the margin of the rule."""
    values = (100 * accuracy_differences(results)).tolist()
    mean, margin, style = mean_interval(values), 100 * ACCURACY_MARGIN, model_style(len(MODELS))
    panel.axhspan(-margin, margin, color=MUTED, alpha=0.15, linewidth=0, zorder=0)
    panel.axhline(0.0, color=MUTED, linewidth=0.9, zorder=1)
    if mean.has_interval:
        panel.errorbar([0], [mean.mean], yerr=[mean.half_width], color=style.colour, linewidth=1.6, capsize=5)
    panel.plot([-MEAN, MEAN], [mean.mean] * 2, color=style.colour, linewidth=2.2, gid="mean-difference")
    _draw_seeds(panel, values, 0, style, "difference")
    panel.plot([1], [papers], **_hollow(style), gid="paper-difference")
    ends = [mean.low, mean.high] if mean.has_interval else []
    _set_heights(panel, [*values, *ends, papers, -margin, margin], NARROWEST["test_acc"])
    panel.set_title("difference, points", fontsize=8.5)
    panel.set_xticks([0, 1], ["ours", "the\npaper's"])
    panel.set_xlim(-0.6, 1.6)


def _mark_paper(panel: Axes, place: int, value: float, model: str) -> None:
    panel.plot([place], [value], **_hollow(model_style(MODELS.index(model))), gid=f"paper-{model}")
    panel.annotate(
        f"{value:.1f}",
        (place, value),
        xytext=(6, 0),
        textcoords="offset points",
        va="center",
        fontsize=7.5,
        color=MUTED,
    )


def _hollow(style: ModelStyle) -> dict[str, Any]:
    return {
        **{"color": style.colour, "marker": style.marker, "markersize": 7, "linestyle": "none"},
        **{"markerfacecolor": "white", "markeredgewidth": 1.3},
    }


def _draw_box(panel: Axes, values: list[float], place: int, style: ModelStyle, name: str) -> None:
    if len(values) > 1:
        box = panel.boxplot(
            [values],
            positions=[place],
            widths=WIDTH,
            whis=(0, 100),
            patch_artist=True,
            boxprops={"facecolor": style.colour, "alpha": 0.25, "edgecolor": style.colour},
            whiskerprops={"color": style.colour},
            capprops={"color": style.colour},
            medianprops={"color": style.colour, "linewidth": 2.2},
            manage_ticks=False,
        )
        box["medians"][0].set_gid(f"median-{name}")
    _draw_seeds(panel, values, place, style, name)


def _draw_seeds(panel: Axes, values: list[float], place: int, style: ModelStyle, name: str) -> None:
    # Side by side in the order of the seeds: equal values do not hide one another.
    num_gaps = max(len(values) - 1, 1)
    places = [place + INSET * (number / num_gaps - 0.5) * (len(values) > 1) for number in range(len(values))]
    panel.plot(
        places,
        values,
        color=style.colour,
        marker=style.marker,
        markersize=4.5,
        linestyle="none",
        markeredgecolor=INK,
        markeredgewidth=0.4,
        gid=f"seeds-{name}",
    )
