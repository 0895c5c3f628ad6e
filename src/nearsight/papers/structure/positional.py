"""Attention from positions alone beside the usual one: the table and the claims of the `positional-*` studies."""

from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from nearsight.errors import InputError
from nearsight.papers.locat.measures import OF_RUNS, Measure, measures_of, run_measures
from nearsight.papers.locat.rules import COMPARABLE, judge_comparable
from nearsight.papers.structure import numbers as s3
from nearsight.papers.structure.rules import WHICH, judge_which
from nearsight.report.claims import OURS, Claim
from nearsight.report.conditions import missing_notes, scale_notes
from nearsight.report.figures.style import INK, MUTED, ModelStyle, house_style, light_grid, model_style
from nearsight.report.marks import Drawing, add_footnote
from nearsight.report.responses import share_notes
from nearsight.report.rules import Finding, change_in_words
from nearsight.report.study_tables import INTERVALS
from nearsight.report.tables import MISSING, Table, rounded, seeds_in_words
from nearsight.study.results import StudyResults
from nearsight.study.statistics import MeanInterval, mean_interval, paired_difference
from nearsight.study.statistics.intervals import ACCURACY_MARGIN, by_seed

ASSOCIATION = "position_association"
MEASURES: Mapping[str, Measure] = {
    **{column: OF_RUNS[column] for column in ("test_acc", "min_mad", "mean_mad")},
    ASSOCIATION: Measure(title="position association"),
}
"""Column → what it is, of a run."""
WHAT_ASSOCIATION_IS = (
    "Position association: the share of a patch's neighbours in the image (up to 8) that are among as many patches "
    "whose learned positions are most alike to its own, mean over patches."
)
DIFFERENCE = f"{s3.POSITIONAL_VIT} minus {s3.VIT}"
MODELS = (s3.VIT, s3.POSITIONAL_VIT)


def named_runs(results: StudyResults) -> pd.DataFrame:
    """The runs with every column of `MEASURES`, their model as condition; NaN where a run was not measured so."""
    runs = run_measures(results)
    runs = runs.assign(condition=runs["model"])
    return runs.reindex(columns=list(dict.fromkeys([*runs.columns, *MEASURES]))).astype({ASSOCIATION: "float64"})


def accuracy_differences(results: StudyResults) -> "pd.Series[float]":
    """Positional minus vanilla, of the seeds that have both."""
    wide = by_seed(named_runs(results), "test_acc").reindex(columns=list(MODELS))
    return (wide[s3.POSITIONAL_VIT] - wide[s3.VIT]).dropna()


def of_model(runs: pd.DataFrame, model: str, column: str) -> MeanInterval:
    return mean_interval(runs.loc[runs["condition"] == model, column].dropna())


def positional_table(results: StudyResults) -> Table:
    """A row per model, and their difference within seeds."""
    runs, published = named_runs(results), s3.PAIRS[results.name]
    measures = measures_of(results, MEASURES)
    here = [model for model in MODELS if model in set(runs["condition"])]
    if not here:
        raise InputError("none of its models has a run yet")
    ours = {model: {column: of_model(runs, model, column) for column in measures} for model in here}
    papers = dict(published.accuracy)
    difference = {column: paired_difference(runs, s3.POSITIONAL_VIT, s3.VIT, column) for column in measures}
    if difference["test_acc"].n:
        ours[DIFFERENCE], papers[DIFFERENCE] = difference, published.difference
    rows: list[dict[str, object]] = []
    shown: list[dict[str, object]] = []
    for name, numbers in ours.items():
        signed = name == DIFFERENCE
        named: dict[str, object] = {"model": name, "seeds": numbers["test_acc"].n}
        flat = {f"{column}_{part}": x for column, interval in numbers.items() for part, x in asdict(interval).items()}
        rows.append({**named, "scale": results.scale, **flat, "paper_test_acc": papers.get(name)})
        cells = {_unit(measure): measure.told(numbers[column], signed=signed) for column, measure in measures.items()}
        accuracy = _unit(MEASURES["test_acc"])
        shown.append(
            {
                **named,
                accuracy: cells.pop(accuracy),
                "paper's accuracy": rounded(100 * papers[name], 1, signed=signed) if name in papers else MISSING,
                **cells,
            }
        )
    return Table(
        name="positional",
        title=f"{results.name}: attention from positions alone beside the usual one",
        numbers=pd.DataFrame(rows),
        shown=pd.DataFrame(shown).astype(str),
        notes=(
            INTERVALS,
            "The difference is taken within seeds, that of per cent in points. MAD: over all heads of a run.",
            *share_notes(results),
            WHAT_ASSOCIATION_IS,
            f"The paper's accuracies ({published.dataset}, 10 seeds, patches of 4) are read off box plots.",
            *missing_notes(results),
        ),
    )


def _unit(measure: Measure) -> str:
    return f"{measure.title}, %" if measure.is_share else measure.title


def _difference(results: StudyResults, column: str) -> tuple[MeanInterval, str]:
    """Positional minus vanilla within seeds, and in words with the means of the seeds that have both."""
    runs = named_runs(results).dropna(subset=[column])
    ours = paired_difference(runs, s3.POSITIONAL_VIT, s3.VIT, column)
    if not ours.n:
        title = MEASURES[column].title
        raise InputError(f"no seed of which both {s3.VIT} and {s3.POSITIONAL_VIT} have a {title}")
    paired = runs[runs.groupby("seed")["condition"].transform("nunique") == len(MODELS)]
    before, after = (of_model(paired, model, column) for model in MODELS)
    return ours, change_in_words(before, after, ours, accuracy=MEASURES[column].is_share)


def _judge_on_par(results: StudyResults) -> Finding:
    ours, words = _difference(results, "test_acc")
    return judge_comparable(ours, words=words)


def _judge_which(column: str, larger: str, smaller: str, results: StudyResults) -> Finding:
    ours, words = _difference(results, column)
    return judge_which(ours, larger=larger, smaller=smaller, words=words)


def positional_claims(study: str) -> tuple[Claim, ...]:
    published = s3.PAIRS[study]
    before, after = (mean_interval([published.accuracy[model]]) for model in MODELS)
    questions = {
        "min_mad": ("Which of the two has the more local head, the one that looks nearest?", s3.VIT, s3.POSITIONAL_VIT),
        "mean_mad": ("Whose heads look nearer on average?", s3.VIT, s3.POSITIONAL_VIT),
        ASSOCIATION: ("Whose learned positions are more associated with neighbours?", s3.POSITIONAL_VIT, s3.VIT),
    }
    return (
        Claim(
            id="on-par",
            text="Attention from positions alone is on par with the usual one",
            source=s3.POSITIONAL,
            paper=change_in_words(before, after, mean_interval([published.difference]), accuracy=True),
            rule=COMPARABLE,
            judge=_judge_on_par,
        ),
        *(
            Claim(id=column, text=text, source=OURS, rule=WHICH, judge=partial(_judge_which, column, larger, smaller))
            for column, (text, larger, smaller) in questions.items()
        ),
    )


# Box plots over seeds: attention from positions alone beside the usual one, and the paper's accuracies.


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
