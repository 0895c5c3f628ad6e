"""Attention from positions alone compared with the usual one (S3): is it as good, and as local?

How S3 trained its networks is assumed. Here both are trained in the same way, for a fixed number of epochs that takes
minutes on a GPU, so that accuracies lie below the paper's: what is compared is how they differ. The two do not train as
one stack, but their seeds do.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from statistics import fmean
from typing import Any, NamedTuple

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from nearsight.errors import InputError
from nearsight.papers.structure import PAPER
from nearsight.report.claims import OURS, Claim
from nearsight.report.conditions import missing_notes, scale_notes
from nearsight.report.figures.looks import ModelStyle, looks, model_style
from nearsight.report.figures.style import INK, MUTED, house_style, light_grid
from nearsight.report.marks import FEWEST, Drawing, add_footnote, with_room
from nearsight.report.responses import OF_RUNS, Measure, interval_of, measures_of, run_measures, share_notes
from nearsight.report.rules import COMPARABLE_RULE, SIGN, Finding, change_in_words, judge_comparable, judge_sign
from nearsight.report.studies import report_on
from nearsight.report.study_tables import INTERVALS
from nearsight.report.tables import Row, Table, rounded, seeds_in_words
from nearsight.study import OFF, Study
from nearsight.study.recipes import recipe
from nearsight.study.results import StudyResults
from nearsight.study.statistics import Estimate, mean_interval, paired_difference
from nearsight.study.statistics.intervals import ACCURACY_MARGIN, by_seed
from nearsight.train import DataConfig, RunConfig, modern
from nearsight.train.recipes import compact_cifar10, compact_cifar100, compact_tiny_imagenet, trained_for

_EPOCHS = 60
VIT, POSITIONAL_VIT = "ViT", "Positional ViT"
_MODELS = (VIT, POSITIONAL_VIT)
POSITIONAL: Mapping[str, Any] = {"model.name": "compact_vit_positional"}
"""What makes a ViT positional, in a recipe."""


@recipe("positional-cifar10")
def positional_cifar10(*, seeds: int = 5) -> Study:
    """Is attention from positions alone as good on CIFAR-10? (S3, positional attention; the paper: 90.2 and 90.5 %)

    Run     nearsight study run positional-cifar10
    Cost    10 cells of at most 60 epochs of 40,000 images (24 M); needs a GPU
    Result  see results/spatial-structure/positional-cifar10
    """
    return _both(compact_cifar10("modern"), seeds)


@recipe("positional-cifar100")
def positional_cifar100(*, seeds: int = 5) -> Study:
    """Is attention from positions alone as good on CIFAR-100? (S3, positional attention; the paper: 68 and 68 %)

    Run     nearsight study run positional-cifar100
    Cost    10 cells of at most 60 epochs of 40,000 images (24 M); needs a GPU
    Result  see results/spatial-structure/positional-cifar100
    """
    return _both(compact_cifar100("modern"), seeds)


@recipe("positional-svhn")
def positional_svhn(*, seeds: int = 5) -> Study:
    """Is attention from positions alone as good on SVHN? (S3, positional attention; the paper: 98.2 and 97.3 %)

    Without flips, since digits do not come mirrored, and without AutoAugment, whose policy is that of CIFAR.

    Run     nearsight study run positional-svhn
    Cost    10 cells of at most 60 epochs of 58,606 images (35 M); needs a GPU
    Result  not run yet
    """
    protocol = modern().without("flip").without("autoaugment")
    return _both(RunConfig(data=DataConfig(name="svhn"), protocol=protocol), seeds)


@recipe("positional-tiny-imagenet")
def positional_tiny_imagenet(*, seeds: int = 3) -> Study:
    """Is attention from positions alone as good on ImageNet, at our scale? (S3, the paper: 71.9 and 68.9 %)

    The paper's ViT-Tiny on ImageNet is here the compact ViT on Tiny-ImageNet.

    Run     nearsight study run positional-tiny-imagenet
    Cost    6 cells of 40 epochs of 80,000 images (19 M); needs a GPU
    Result  not run yet; its plan is in results/positional-tiny-imagenet
    """
    return _both(compact_tiny_imagenet("modern"), seeds, epochs=40)


def _both(run: RunConfig, seeds: int, epochs: int = _EPOCHS) -> Study:
    return Study(trained_for(run, epochs), factors={"model": {VIT: OFF, POSITIONAL_VIT: POSITIONAL}}, seeds=seeds)


class _Pair(NamedTuple):
    """The paper's accuracies; fractions."""

    dataset: str
    vit: float
    positional: float
    runs: str = "10 seeds, patches of 4"
    known: str = "read off box plots"

    @property
    def accuracy(self) -> dict[str, float]:
        return {VIT: self.vit, POSITIONAL_VIT: self.positional}

    @property
    def difference(self) -> float:
        return self.positional - self.vit


PAIRS: Mapping[str, _Pair] = {
    "positional-cifar10": _Pair("CIFAR-10", 0.902, 0.905),
    "positional-cifar100": _Pair("CIFAR-100", 0.68, 0.68),
    "positional-svhn": _Pair("SVHN", 0.982, 0.973),
    "positional-tiny-imagenet": _Pair("ImageNet", 0.719, 0.689, "ViT-Tiny, 300 epochs", "as it states them"),
}
"""By the name of the study."""
ASSOCIATION = "position_association"
WHAT_ASSOCIATION_IS = (
    "Position association: the share of a patch's neighbours in the image (up to 8) that are among as many patches "
    "whose learned positions are most similar to its own, mean over patches."
)
_MEASURES: Mapping[str, Measure] = {
    **{column: OF_RUNS[column] for column in ("test_acc", "min_mad", "mean_mad")},
    ASSOCIATION: Measure(title="position association"),
}
"""Column → what it is, of a run."""


def _measured_runs(results: StudyResults) -> pd.DataFrame:
    """The runs with every column of `_MEASURES`, their model as condition; NaN where a run was not measured so."""
    runs = run_measures(results)
    runs = runs.assign(condition=runs["model"])
    return runs.reindex(columns=list(dict.fromkeys([*runs.columns, *_MEASURES]))).astype({ASSOCIATION: "float64"})


def _models_with_runs(runs: pd.DataFrame) -> list[str]:
    here = [model for model in _MODELS if model in set(runs["condition"])]
    if not here:
        raise InputError("none of its models has a run yet")
    return here


def _paired(results: StudyResults, column: str) -> pd.DataFrame:
    """A column per model, a row per seed that has both."""
    return by_seed(_measured_runs(results), column).reindex(columns=list(_MODELS)).dropna()


def _difference(results: StudyResults, column: str) -> tuple[Estimate, str]:
    """Positional minus vanilla within seeds, and in words with the means of the seeds that have both."""
    values = _paired(results, column)
    if values.empty:
        raise InputError(f"no seed has runs of both {VIT} and {POSITIONAL_VIT} with a {_MEASURES[column].title}")
    ours = mean_interval(values[POSITIONAL_VIT] - values[VIT])
    before, after = (mean_interval(values[model]) for model in _MODELS)
    return ours, change_in_words(before, after, ours, accuracy=_MEASURES[column].is_share)


def _judge_on_par(results: StudyResults) -> Finding:
    ours, words = _difference(results, "test_acc")
    return judge_comparable(ours, words=words)


def _judge_sign(column: str, sign: int, results: StudyResults) -> Finding:
    ours, words = _difference(results, column)
    return judge_sign(ours, sign=sign, words=words)


def _claims(published: _Pair) -> tuple[Claim, ...]:
    before, after, change = map(mean_interval, (published.vit, published.positional, published.difference))
    questions = {
        "min_mad": ("Does a positional ViT have a more local head than a ViT (lower min MAD)?", -1),
        "mean_mad": ("Are a positional ViT's heads more local on average (lower mean MAD)?", -1),
        ASSOCIATION: ("Are a positional ViT's learned positions more associated with neighbours than a ViT's?", 1),
    }
    return (
        Claim(
            id="on-par",
            text="Attention from positions alone is on par with the usual one",
            source="S3, positional attention",
            paper=change_in_words(before, after, change, accuracy=True),
            rule=COMPARABLE_RULE,
            judge=_judge_on_par,
        ),
        *(
            Claim(id=column, text=text, source=OURS, rule=SIGN, judge=partial(_judge_sign, column, sign))
            for column, (text, sign) in questions.items()
        ),
    )


def positional_table(results: StudyResults) -> Table:
    """A row per model, and their difference within seeds."""
    runs, published, measures = _measured_runs(results), PAIRS[results.name], measures_of(results, _MEASURES)
    ours = {
        model: {column: interval_of(runs, model, column) for column in measures} for model in _models_with_runs(runs)
    }
    papers = published.accuracy
    difference = {column: paired_difference(runs, POSITIONAL_VIT, VIT, column) for column in measures}
    in_both = f"{POSITIONAL_VIT} minus {VIT}"
    if difference["test_acc"].n:
        ours[in_both], papers[in_both] = difference, published.difference
    rows = []
    for name, numbers in ours.items():
        signed = name == in_both
        row = Row(model=name, seeds=numbers["test_acc"].n).keep(scale=results.scale)
        for column, measure in measures.items():
            measure.put(row, column, numbers[column], signed=signed)
            if column == "test_acc":
                row.show("paper's accuracy", rounded(100 * papers[name], 1, signed=signed))
        rows.append(row.keep(paper_test_acc=papers[name]))
    notes = (
        INTERVALS,
        "The difference is taken within seeds, that of per cent in points. MAD: over all heads of a run.",
        *share_notes(results),
        WHAT_ASSOCIATION_IS,
        f"The paper's accuracies ({published.dataset}, {published.runs}) are {published.known}.",
        *missing_notes(results),
    )
    title = f"{results.name}: attention from positions alone compared with the usual one"
    return Table.of("positional", title, rows, notes=notes)


_TITLES = {
    "test_acc": "test accuracy, %",
    "min_mad": "MAD, most local head",
    "mean_mad": "mean MAD, all heads",
    ASSOCIATION: "position association",
}
_WIDTH, _INSET, _MEAN = 0.5, 0.36, 0.2
# Of the height that the seeds take up: the space around them.
_AROUND = 0.12
# Seeds that lie closer together than this, in points or as fractions, are not drawn apart any further.
_NARROWEST = {"test_acc": 1.0, "min_mad": 0.01, "mean_mad": 0.01, ASSOCIATION: 0.01}


def seeds_of_both(results: StudyResults) -> Drawing:
    """A panel per measure with a box and the seeds of each model, and one of the difference in accuracy within seeds;
    where the paper has a number, it is marked."""
    runs = _measured_runs(results).assign(test_acc=lambda table: 100 * table["test_acc"])
    here = _models_with_runs(runs)
    columns = [column for column in _MEASURES if runs[column].notna().any()]
    published, pairs = PAIRS[results.name], _paired(results, "test_acc")
    has_both = len(pairs) > 0
    with house_style():
        figure = Figure(figsize=(1.9 * (len(columns) + has_both) + 0.4, 3.2), layout="constrained")
        panels = list(figure.subplots(1, len(columns) + has_both, squeeze=False)[0])
        if has_both:  # next to the accuracies
            differences = 100 * (pairs[POSITIONAL_VIT] - pairs[VIT])
            _draw_difference(panels.pop(1), differences.tolist(), 100 * published.difference)
        for panel, column in zip(panels, columns, strict=True):
            marked = {model: 100 * published.accuracy[model] for model in here} if column == "test_acc" else {}
            for place, model in enumerate(here):
                values = runs.loc[runs["condition"] == model, column].dropna().tolist()
                style = looks(_MODELS)[model]
                _draw_box(panel, values, place, style, f"{column}-{model}")
                if model in marked:
                    _mark_paper(panel, place, marked[model], style, f"paper-{model}")
            panel.set_title(_TITLES[column], fontsize=8.5)
            panel.set_xticks(range(len(here)), [model.replace(" ", "\n") for model in here])
            panel.set_xlim(-0.6, len(here) - 0.4)
            _set_heights(panel, [*runs[column].dropna(), *marked.values()], column)
    counts = results.runs.groupby("model")["seed"].nunique()
    words = f"Points: {seeds_in_words(counts)}" + ("; thick lines: their means." if counts.max() > 1 else ".")
    if counts.max() >= FEWEST:
        words = f"Boxes: quartiles and range of {seeds_in_words(counts)}, the thick line is the median; points: seeds."
    if has_both:
        interval = " with the 95 % interval of the mean;" if len(pairs) >= FEWEST else ""
        words += f" Difference: within seeds,{interval} grey: what counts as on par."
    papers = f"Hollow: the paper's, on {published.dataset}, {published.known}."
    add_footnote(figure, [words, papers, *missing_notes(results), *scale_notes(results)])
    return Drawing(
        figure=figure,
        caption="A ViT and one whose attention sees positions alone: test accuracy and its difference, how far the "
        "most local head and all heads look (fractions of the grid's diagonal), and the association of learned "
        f"positions. {words} "
        f"{papers} {WHAT_ASSOCIATION_IS}",
    )


def _set_heights(panel: Axes, values: Sequence[float], column: str) -> None:
    panel.set_ylim(*with_room(values, _AROUND, _NARROWEST[column]))
    panel.ticklabel_format(axis="y", useOffset=False)
    light_grid(panel, "y")


def _draw_difference(panel: Axes, values: list[float], papers: float) -> None:
    """That of accuracy: every seed, their mean with its interval, the paper's, and the margin of the rule."""
    mean, margin, style = mean_interval(values), 100 * ACCURACY_MARGIN, model_style(len(_MODELS))
    panel.axhspan(-margin, margin, color=MUTED, alpha=0.15, linewidth=0, zorder=0)
    panel.axhline(0.0, color=MUTED, linewidth=0.9, zorder=1)
    if mean.n >= FEWEST:
        panel.errorbar([0], [mean.value], yerr=[mean.half_width], color=style.colour, linewidth=1.6, capsize=5)
    panel.plot([-_MEAN, _MEAN], [mean.value] * 2, color=style.colour, linewidth=2.2, gid="mean-difference")
    _draw_seeds(panel, values, 0, style, "difference")
    panel.plot([1], [papers], **_hollow(style), gid="paper-difference")
    ends = [mean.low, mean.high] if mean.n >= FEWEST else []
    _set_heights(panel, [*values, *ends, papers, -margin, margin], "test_acc")
    panel.set_title("difference, points", fontsize=8.5)
    panel.set_xticks([0, 1], ["ours", "the\npaper's"])
    panel.set_xlim(-0.6, 1.6)


def _mark_paper(panel: Axes, place: int, value: float, style: ModelStyle, gid: str) -> None:
    panel.plot([place], [value], **_hollow(style), gid=gid)
    next_to: dict[str, Any] = {"xytext": (6, 0), "textcoords": "offset points", "va": "center"}
    panel.annotate(f"{value:.1f}", (place, value), **next_to, fontsize=7.5, color=MUTED)


def _hollow(style: ModelStyle) -> dict[str, Any]:
    return style.look_with(linestyle="none", markersize=7, markerfacecolor="white", markeredgewidth=1.3)


def _draw_box(panel: Axes, values: list[float], place: int, style: ModelStyle, name: str) -> None:
    if len(values) >= FEWEST:
        box = panel.boxplot(
            [values],
            positions=[place],
            widths=_WIDTH,
            whis=(0, 100),
            patch_artist=True,
            boxprops={"facecolor": style.colour, "alpha": 0.25, "edgecolor": style.colour},
            whiskerprops={"color": style.colour},
            capprops={"color": style.colour},
            medianprops={"color": style.colour, "linewidth": 2.2},
            manage_ticks=False,
        )
        box["medians"][0].set_gid(f"median-{name}")
    elif len(values) > 1:
        panel.plot([place - _MEAN, place + _MEAN], [fmean(values)] * 2, color=style.colour, linewidth=2.2)
    _draw_seeds(panel, values, place, style, name)


def _draw_seeds(panel: Axes, values: list[float], place: int, style: ModelStyle, name: str) -> None:
    # Side by side in the order of the seeds: equal values do not hide one another.
    num_gaps = max(len(values) - 1, 1)
    places = [place + _INSET * (number / num_gaps - 0.5) * (len(values) > 1) for number in range(len(values))]
    seeds = style.look_with(linestyle="none", markersize=4.5, markeredgecolor=INK, markeredgewidth=0.4)
    panel.plot(places, values, **seeds, gid=f"seeds-{name}")


OF_PROTOCOLS = frozenset({"gain", "effects", "effects-by-layer", "separation", "dissociation", "correlation"})
"""Tables of which parts of a protocol make heads local, which studies that choose among networks do not ask."""
# Of two conditions, it would be Figure 2 once more.
_OF_FOUR = frozenset({"figure-5-key-conditions"})
for _name, _pair in PAIRS.items():
    report_on(
        _name,
        paper=PAPER,
        claims=_claims(_pair),
        without=OF_PROTOCOLS | _OF_FOUR,
        tables=(positional_table,),
        figures={"positional-seeds": seeds_of_both},
    )
