"""Does a larger model need more data, or more CutMix, to become local? (Raghu et al. 2021, S1 §1 and §7)

Heads keep their 24 dimensions, so a wider model has more of them. The cells are a cross, not a grid, since a model of
width 384 and depth 12 alone would cost as much as six of S1's: widths at S1's depth, depths at S1's width, each without
CutMix and with it; and the widths with more CutMix, and on a quarter of the images for as many steps.
"""

import dataclasses
import math
from collections.abc import Mapping
from itertools import product
from typing import Any

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D

from nearsight.augment import CutMix
from nearsight.report.conditions import level_looks, noted
from nearsight.report.contrasts import Contrast, contrast_table, sign_questions
from nearsight.report.figures.looks import model_style
from nearsight.report.figures.style import add_legend, house_style, light_grid
from nearsight.report.marks import Drawing, draw_seeds
from nearsight.report.responses import EARLY, EARLY_LAYERS, known_shares, share_notes, with_early_layers
from nearsight.report.studies import report_on
from nearsight.report.tables import Table, seeds_in_words
from nearsight.study import OFF, Study
from nearsight.study.recipes import recipe
from nearsight.study.results import StudyResults
from nearsight.study.statistics import LeastSquares, least_squares
from nearsight.train.recipes import compact_cifar100, trained_for

_EPOCHS = 60
_HEAD_WIDTH = 24
_DEPTHS = (8, 4, 12)
_PARTS = 4
_NUM_IMAGES = 50_000


def _wide(width: int) -> dict[str, int]:
    return {"model.width": width, "num_heads": width // _HEAD_WIDTH, "mlp_width": 2 * width}


_WIDTHS: Mapping[str, Any] = {"192": OFF, "96": _wide(96), "384": _wide(384)}


@recipe("size-cifar100")
def size_cifar100(*, seeds: int = 1) -> Study:
    """Does a larger model need more data or more CutMix to become local? Width, depth, images, CutMix (S1 §7)

    Run     nearsight study run size-cifar100
    Cost    19 cells of 60 epochs of 40,000 images, or of 240 epochs of 10,000 (45 M; in arithmetic as much as 30 cells
            of S1's size, 73 M), in eight stacks, since sizes and data differ; needs a GPU
    Result  CutMix helps at every size; no interaction is shown: see results/size-cifar100
    """
    base = trained_for(compact_cifar100("baseline"), _EPOCHS)
    # As many steps, and as many of them to warm up.
    longer = trained_for(base, _PARTS * _EPOCHS).protocol
    longer = dataclasses.replace(longer, warmup_epochs=_PARTS * base.protocol.warmup_epochs)
    schedule = {name: getattr(longer, name) for name in ("max_epochs", "warmup_epochs", "patience")}
    factors: dict[str, Any] = {
        "width": _WIDTHS,
        "depth": _DEPTHS,
        "images": {"all": OFF, "25 %": {"num_train": _NUM_IMAGES // _PARTS, **schedule}},
        "cutmix": {"off": OFF, "p=0.5": CutMix(p=0.5), "p=1": CutMix(p=1.0)},
    }
    study = Study(base, factors=factors, seeds=seeds, ends=("Baseline", "all"))
    models = [{"width": width, "images": images} for width in _WIDTHS for images in study.labels["images"]]
    models += [{"depth": depth} for depth in study.labels["depth"][1:]]
    cells = [{**model, "cutmix": level} for model in models for level in ("off", "p=0.5")]
    return study.only([*cells, *({"width": width, "cutmix": "p=1"} for width in _WIDTHS)])


TIMES = " × "
DOUBLINGS = ("width", "depth")
"""Factors whose levels are numbers; they count in doublings of the base."""


def predictors(results: StudyResults) -> pd.DataFrame:
    """A row per run. Width and depth count in doublings, CutMix and images are −½ and ½, more CutMix is 0 and 1."""
    runs = results.runs
    columns = {"mean": pd.Series(1.0, index=runs.index)}
    for name in DOUBLINGS:
        base = float(results.factors[name][0])
        columns[name] = runs[name].astype(float).div(base).map(math.log2)
    off, _, *more = results.factors["cutmix"]
    columns["cutmix"] = (runs["cutmix"] != off) - 0.5
    columns["more"] = runs["cutmix"].isin(more).astype(float)
    columns["fewer"] = (runs["images"] != results.factors["images"][0]) - 0.5
    for first, second in (
        *(("width", "cutmix"), ("depth", "cutmix"), ("width", "fewer")),
        *(("fewer", "cutmix"), ("width", "more")),
    ):
        columns[f"{first}{TIMES}{second}"] = columns[first] * columns[second]
    return pd.DataFrame(columns)


def fit_of(results: StudyResults, response: str) -> LeastSquares:
    """The mean, and all effects whose factors vary among the runs there are."""
    columns = predictors(results)
    varying = [
        name
        for name in columns
        if name == "mean" or all(columns[part].nunique() > 1 for part in str(name).split(TIMES))
    ]
    return least_squares(columns[varying], with_early_layers(results)[response])


def _interaction(name: str, text: str, effect: str) -> Contrast:
    """Whether one factor changes what another does: a difference of differences, since CutMix and fewer images, one of
    which each such effect has, are a unit apart."""
    return Contrast(name=name, text=text, weights={effect: 1.0}, sign=1)


CONTRASTS = (
    Contrast(
        name="width doubled, without CutMix, all images",
        text="Without CutMix, is a wider model less local in its early layers?",
        weights={"width": 1.0, "width × cutmix": -0.5, "width × fewer": -0.5},
        sign=1,
    ),
    Contrast(
        name="CutMix, at S1's size",
        text="At S1's size, does CutMix make the early layers more local?",
        weights={"cutmix": 1.0, "fewer × cutmix": -0.5},
    ),
    _interaction(
        "width doubled: change of what CutMix does",
        "Does CutMix have less effect in a wider model, so that it needs more of it?",
        "width × cutmix",
    ),
    _interaction(
        "depth doubled: change of what CutMix does", "Does CutMix have less effect in a deeper model?", "depth × cutmix"
    ),
    _interaction(
        "width doubled: change of what a quarter of the images does",
        "With fewer images, does a wider model become less local than a narrow one does?",
        "width × fewer",
    ),
    _interaction(
        "a quarter of the images: change of what CutMix does",
        "Does CutMix have less effect where there are fewer images?",
        "fewer × cutmix",
    ),
    Contrast(
        name="CutMix in every batch rather than in half, at twice the width",
        text="Does more CutMix make the widest model more local?",
        weights={"more": 1.0, "width × more": 1.0},
    ),
)


def size_table(results: StudyResults) -> Table:
    """What size, images and CutMix change in each response."""
    more = " and their largest shares larger" if known_shares(results) else ""
    return contrast_table(
        results,
        CONTRASTS,
        title="size, images and CutMix",
        fit=fit_of,
        name="size",
        notes=(
            "Ordinary least squares on all runs: width and depth in doublings of S1's, CutMix and images as two "
            f"levels, and these interactions; {len(results.runs)} runs, {fit_of(results, EARLY).residual_df} of them "
            "left over to estimate the noise. ± is half the 95 % interval.",
            f"Early layers: the mean over the heads of the first {EARLY_LAYERS}. Wider models have more heads, which "
            f"by itself makes their smallest distance smaller{more}.",
            *share_notes(results),
        ),
    )


ROWS = {EARLY: "MAD of the early layers,\nmean over heads", "min_mad": "MAD of the\nmost local head"}


def distance_by_size(results: StudyResults) -> Drawing:
    """Two rows (early layers, most local head), a column per way to grow."""
    runs, factors = with_early_layers(results), results.factors
    found = set(zip(runs["cutmix"], runs["images"], strict=True))
    combinations = product(factors["images"], factors["cutmix"])
    lines = [(cutmix, images) for images, cutmix in combinations if (cutmix, images) in found]
    looks = [_look(results, *line) for line in lines]
    with house_style():
        figure = Figure(figsize=(7.2, 5.2), layout=ConstrainedLayoutEngine(wspace=0.05, hspace=0.05))
        panels = figure.subplots(len(ROWS), len(DOUBLINGS), sharey="row", sharex="col", squeeze=False)
        for (response, title), row in zip(ROWS.items(), panels, strict=True):
            for growing, panel in zip(DOUBLINGS, row, strict=True):
                others = [name for name in DOUBLINGS if name != growing]
                at_base = runs[(runs[others] == [factors[name][0] for name in others]).all(axis=1)]
                for (cutmix, images), look in zip(lines, looks, strict=True):
                    here = at_base[(at_base["cutmix"] == cutmix) & (at_base["images"] == images)]
                    if not here.empty:
                        by_size = here.assign(size=here[growing].astype(float)).groupby("size")[response]
                        means, name = by_size.mean(), f"{response}-{growing}-{cutmix}-{images}"
                        draw_seeds(panel, means.index, by_size.agg(list), look["color"], f"seeds-{name}")
                        panel.plot(means.index, means, **look, gid=name)
                light_grid(panel)
                sizes = sorted(int(level) for level in factors[growing])
                panel.set_xscale("log", base=2)
                panel.set_xticks(sizes, [str(size) for size in sizes])
                panel.minorticks_off()
            row[0].set_ylabel(title)
        for growing, panel in zip(DOUBLINGS, panels[-1], strict=True):
            panel.set_xlabel(growing)
        names = [
            f"{'without CutMix' if cutmix == factors['cutmix'][0] else f'CutMix {cutmix}'}, images: {images}"
            for cutmix, images in lines
        ]
        handles = [Line2D([], [], **look) for look in looks]
        add_legend(figure, handles, names, loc="outside upper left", ncols=len(factors["images"]))
    counts = runs.groupby("condition")["seed"].nunique()
    seeds, dots = seeds_in_words(counts), "; dots: seeds" if counts.max() > 1 else ""
    caption = (
        "Mean attention distance of the early layers' heads (top) and of the most local head (bottom) against width at "
        "S1's depth (left) and depth at S1's width (right), by CutMix and by the number of training images."
    )
    return noted(figure, results, caption, f"{seeds[0].upper()}{seeds[1:]} per point{dots}.")


def _look(results: StudyResults, cutmix: str, images: str) -> dict[str, Any]:
    """Colour and marker by CutMix, dash and filling by images."""
    style = level_looks("cutmix", results.factors["cutmix"])[cutmix]
    is_all = images == results.factors["images"][0]
    return {
        "color": style.colour,
        "linestyle": model_style(0 if is_all else 1).dash,
        "marker": style.marker,
        "markersize": 6,
        "linewidth": 1.5,
        "markerfacecolor": style.colour if is_all else "white",
    }


report_on(
    "size-cifar100",
    claims=sign_questions(CONTRASTS, EARLY, source="MAD of the early layers", fit=fit_of),
    tables=[size_table],
    figures={"distance-by-size": distance_by_size},
)
