"""What S2 claims about where heads look and what the tokens of each layer are like (App. F, without numbers)."""

from collections.abc import Callable, Sequence

import pandas as pd

from nearsight.errors import InputError
from nearsight.report.study.claim import Claim
from nearsight.report.study.claims_of_heads import ORDERED
from nearsight.report.study.locat import paper as s2
from nearsight.report.study.locat.measures import OF_LAYERS, OF_RUNS, by_layer, by_seed, layer_measures, run_measures
from nearsight.report.study.locat.rules import ORDER, judge_order
from nearsight.report.study.rules import EVERY_SEED, Finding, judge_every_seed
from nearsight.report.study.table import rounded, span, with_interval
from nearsight.study.results import StudyResults
from nearsight.study.statistics import mean_interval

IN_A_FIGURE = "shown in a figure, no number"
IN_WORDS = "no number"
# S2: "after the third layer".
AFTER = 3
# The share of the layers that are the final ones: the last two of eight.
FINAL = 0.25


def _nearer(what: str, column: str) -> Claim:
    def judge(results: StudyResults) -> Finding:
        values = by_seed(run_measures(results), column, (s2.VIT, s2.GAUG))
        differences = values[s2.GAUG] - values[s2.VIT]
        ours = mean_interval(differences)
        before, after = (rounded(float(values[label].mean())) for label in (s2.VIT, s2.GAUG))
        words = f"{before} to {after}: {OF_RUNS[column].told(ours, signed=True)}"
        return judge_order(differences.tolist(), ours, sign=-1, words=words)

    return Claim(
        id=f"gaug-{column}",
        text=f"GAug makes attention local: {what}",
        source="S2 §4.1",
        paper=IN_WORDS,
        rule=ORDER,
        needs=(s2.VIT, s2.GAUG),
        judge=judge,
    )


def _shifted(
    column: str, reference: str, condition: str, *, sign: int, after: int = 0
) -> Callable[[StudyResults], Finding]:
    """Strict: in every layer from `after` on; weak: in their mean."""

    def judge(results: StudyResults) -> Finding:
        values = by_layer(layer_measures(results), column, (reference, condition))
        values = values[values.index.get_level_values("layer") >= after]
        if values.empty:
            raise InputError(f"the models have no layer after L{after}")
        shift = values[condition] - values[reference]
        means = shift.groupby("seed").mean()
        right = (shift * sign > 0).groupby("seed")
        counts = right.sum().tolist()
        before, afterwards = (rounded(float(values[label].mean())) for label in (reference, condition))
        told = OF_LAYERS[column].told(mean_interval(means), signed=True)
        num_layers = values.index.get_level_values("layer").nunique()
        words = (
            f"mean over layers {before} to {afterwards}: {told}; {'higher' if sign > 0 else 'lower'} in "
            f"{_range(counts, digits=0)} of {num_layers} layers"
        )
        return judge_every_seed(right.all().tolist(), (means * sign > 0).tolist(), words)

    return judge


def _drawn_to_cls(results: StudyResults) -> Finding:
    values = by_layer(layer_measures(results), "patch_cls_similarity", (s2.VIT,))[s2.VIT]
    profiles = [of_seed.droplevel("seed").sort_index() for _, of_seed in values.groupby("seed")]
    orders = [float(profile.corr(pd.Series(profile.index, profile.index), method="spearman")) for profile in profiles]
    peaks = [int(profile.argmax()) for profile in profiles]
    rises = [float(profile.iloc[-1] - profile.iloc[0]) for profile in profiles]
    final = len(profiles[0]) - max(1, round(FINAL * len(profiles[0])))
    words = (
        f"rank correlation with depth {_range(orders)}, highest in "
        f"{', '.join(f'L{peak + 1}' for peak in peaks)}, last minus first layer "
        f"{with_interval(mean_interval(rises), signed=True)}"
    )
    strict = [order >= ORDERED and peak >= final for order, peak in zip(orders, peaks, strict=True)]
    return judge_every_seed(strict, [rise > 0 for rise in rises], words)


def _range(values: Sequence[float], digits: int = 2) -> str:
    """Over seeds."""
    low, high = (rounded(end, digits) for end in (min(values), max(values)))
    return low if low == high else span(low, high)


def layer_claims() -> tuple[Claim, ...]:
    """In the studies that have ViT, GAug and LocAt."""
    gaug, locat = (s2.VIT, s2.GAUG), (s2.VIT, s2.LOCAT)
    return (
        _nearer("the most local head looks nearer", "min_mad"),
        _nearer("heads look nearer on average", "mean_mad"),
        Claim(
            id="gaug-every-layer",
            text="GAug makes attention local in every layer",
            source="S2 §4.1",
            paper=IN_WORDS,
            rule=EVERY_SEED,
            readings=(
                "the mean distance of the layer's heads is smaller than ViT's in every layer",
                "it is on average over the layers",
            ),
            needs=gaug,
            judge=_shifted("mean_mad", *gaug, sign=-1),
        ),
        Claim(
            id="patches-like-neighbours",
            text="LocAt's patches are more like their neighbours than ViT's, after the third layer",
            source="S2 App. F, Figure 5a",
            paper=IN_A_FIGURE,
            rule=EVERY_SEED,
            readings=(
                f"the locality score is higher than ViT's in every layer after L{AFTER}",
                "it is on average over these layers",
            ),
            needs=locat,
            judge=_shifted("locality_score", *locat, sign=1, after=AFTER),
        ),
        Claim(
            id="patches-unlike-cls",
            text="LocAt's patches are less like CLS than ViT's, in all layers",
            source="S2 App. F, Figure 5b",
            paper=IN_A_FIGURE,
            rule=EVERY_SEED,
            readings=(
                "the patch–CLS similarity is lower than ViT's in every layer",
                "it is on average over the layers",
            ),
            needs=locat,
            judge=_shifted("patch_cls_similarity", *locat, sign=-1),
        ),
        Claim(
            id="patches-drawn-to-cls",
            text="In ViT patches become more like CLS with depth, most of all in the final layers",
            source="S2 App. F, Figure 5b",
            paper=IN_A_FIGURE,
            rule=EVERY_SEED,
            readings=(
                f"the rank correlation of depth and patch–CLS similarity is at least {ORDERED}, and the similarity is "
                "highest in the last quarter of the layers",
                "the similarity is higher in the last layer than in the first",
            ),
            needs=(s2.VIT,),
            judge=_drawn_to_cls,
        ),
    )
