"""Box plots over seeds: attention from positions alone beside the usual one."""

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from nearsight.errors import InputError
from nearsight.report.figures.style import INK, house_style, light_grid, model_style
from nearsight.report.study.drawing import Drawing
from nearsight.report.study.notes import add_footnote, missing_notes, scale_notes, seeds_in_words
from nearsight.report.study.positions import paper as s3
from nearsight.report.study.positions.positional import MEASURES, MODELS, WHAT_ASSOCIATION_IS, named_runs
from nearsight.study.results import StudyResults

TITLES = {
    "test_acc": "test accuracy, %",
    "min_mad": "MAD, most local head",
    "mean_mad": "mean MAD, all heads",
    "position_association": "position association",
}
WIDTH, INSET = 0.5, 0.36
# Of the height that the seeds take up: the space around them.
AROUND = 0.12
# Seeds that lie closer together than this, in points or as fractions, are not drawn apart any further.
NARROWEST = {"test_acc": 1.0, "min_mad": 0.01, "mean_mad": 0.01, "position_association": 0.01}


def seeds_of_both(results: StudyResults) -> Drawing:
    """A panel per measure: a box and the seeds of each model; under that of accuracy, the paper's numbers."""
    runs = named_runs(results).assign(test_acc=lambda table: 100 * table["test_acc"])
    here = [model for model in MODELS if model in set(runs["condition"])]
    if not here:
        raise InputError("none of its models has a run yet")
    columns = [column for column in MEASURES if runs[column].notna().any()]
    published = s3.PAIRS[results.name]
    with house_style():
        figure = Figure(figsize=(2.15 * len(columns) + 0.4, 3.2), layout="constrained")
        panels = figure.subplots(1, len(columns), squeeze=False)[0]
        for panel, column in zip(panels, columns, strict=True):
            for place, model in enumerate(here):
                values = runs.loc[runs["condition"] == model, column].dropna().tolist()
                _draw_box(panel, values, place, MODELS.index(model), f"{column}-{model}")
            panel.set_title(TITLES[column], fontsize=8.5)
            beneath = {model: f"paper: {100 * published.accuracy[model]:.1f}" for model in here}
            labels = [_label(model, beneath[model] if column == "test_acc" else "") for model in here]
            panel.set_xticks(range(len(here)), labels)
            panel.set_xlim(-0.6, len(here) - 0.4)
            _set_heights(panel, runs[column].dropna().tolist(), NARROWEST[column])
            light_grid(panel, "y")
    seeds = seeds_in_words(results.runs.groupby("model")["seed"].nunique())
    words = f"Boxes: quartiles and range of {seeds}, the thick line is the median; points: single seeds."
    papers = f"Paper: its accuracies on {published.dataset}, read off box plots."
    add_footnote(figure, [words, papers, *missing_notes(results), *scale_notes(results)])
    return Drawing(
        figure=figure,
        caption="A ViT and one whose attention sees positions alone: test accuracy, how far the most local head and "
        f"all heads look (fractions of the grid's diagonal), and the association of learned positions. {words} "
        f"{papers} {WHAT_ASSOCIATION_IS}",
    )


def _set_heights(panel: Axes, values: list[float], narrowest: float) -> None:
    middle, height = (min(values) + max(values)) / 2, max(max(values) - min(values), narrowest)
    panel.set_ylim(middle - (0.5 + AROUND) * height, middle + (0.5 + AROUND) * height)
    panel.ticklabel_format(axis="y", useOffset=False)


def _label(model: str, beneath: str) -> str:
    """On as many lines for all models, so that what is beneath stands at one height."""
    first, _, second = model.rpartition(" ")
    return f"{first}\n{second}\n{beneath}" if first else f"{second}\n\n{beneath}"


def _draw_box(panel: Axes, values: list[float], place: int, look: int, name: str) -> None:
    style = model_style(look)
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
