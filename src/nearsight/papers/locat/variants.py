"""S2's ablations at the size of S1's compact ViT, where each takes minutes: every part of LocAt, every way to make it.

The augmentations and the schedule's form are S2's; model, batch, learning rate and crop are S1's (assumed: S2 has no
model of this size). All epochs are trained, without early stopping, so that every cell sees the same images.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import pandas as pd

from nearsight.augment import RandomCrop
from nearsight.errors import InputError
from nearsight.papers.locat import numbers as s2
from nearsight.papers.locat.measured import differences_to, layer_profiles, layers_table, locality_table
from nearsight.papers.locat.numbers import above
from nearsight.papers.locat.plane import accuracy_and_locality
from nearsight.report.claims import Claim
from nearsight.report.responses import OF_LAYERS, OF_RUNS, layer_measures, of_shared_seeds, run_measures
from nearsight.report.rules import (
    COMPARABLE_RULE,
    EVERY_SEED,
    NOT_WORSE,
    Finding,
    judge_comparable,
    judge_every_seed,
    judge_not_worse,
    judge_sign,
    order_rule,
)
from nearsight.report.studies import report_on
from nearsight.report.tables import percent, rounded, span, with_interval
from nearsight.study import OFF, Study
from nearsight.study.recipes import recipe
from nearsight.study.results import StudyResults
from nearsight.study.statistics import Estimate, mean_interval
from nearsight.train import RunConfig, locat
from nearsight.train.recipes import compact_cifar100, compact_tiny_imagenet, trained_for

_EPOCHS = 100
_TINY_EPOCHS = 40  # of twice as many images
_LOCAT = {"gaug": True, "prr": True}
_CORE: Mapping[str, Any] = {
    "ViT": OFF,
    "ViT + GAug": {"gaug": True},
    "ViT + PRR": {"prr": True},
    "LocAt": _LOCAT,
}
_VARIANTS: Mapping[str, Any] = {
    "ViT - PE": {"positions": False},
    "LocAt - PE": {**_LOCAT, "positions": False},
    "ViT + GAP": {"pool": "avg"},
    # Of the Euclidean distance (App. E), so with one width for both axes.
    "Laplace kernel": {**_LOCAT, "locat_kernel": "laplace", "locat_isotropic": True},
    "Inverse distance": {**_LOCAT, "locat_kernel": "inverse", "locat_isotropic": True},
    "Width from input": {**_LOCAT, "locat_width": "input"},
    "Isotropic width": {**_LOCAT, "locat_isotropic": True},
    # S2's three fixed widths are not known; on its 14×14 grid or on this 8×8 one these are narrow, middling and wide.
    "Fixed width 1": {**_LOCAT, "locat_width": 1.0},
    "Fixed width 2": {**_LOCAT, "locat_width": 2.0},
    "Fixed width 4": {**_LOCAT, "locat_width": 4.0},
    "No scale": {**_LOCAT, "locat_scale": "none"},
    "Auto scale": {**_LOCAT, "locat_scale": "auto"},
}


@recipe("locat-cifar100")
def locat_cifar100(*, seeds: int = 2) -> Study:
    """What each part of LocAt gives, and each way to make it, on CIFAR-100 (S2, Tables 3, 5, 7 and 8)

    Run     nearsight study run locat-cifar100
    Cost    32 cells of at most 100 epochs of 40,000 images (128 M); needs a GPU
    Result  see results/locat-cifar100
    """
    base = trained_as_in_s2(compact_cifar100("baseline"), _EPOCHS)
    # LocAt last: what compares a study's ends compares it with ViT.
    parts = {name: level for name, level in _CORE.items() if name != "LocAt"}
    return Study(base, factors={"model": {**parts, **_VARIANTS, "LocAt": _LOCAT}}, seeds=seeds)


@recipe("locat-tiny-imagenet")
def locat_tiny_imagenet(*, seeds: int = 2) -> Study:
    """What each part of LocAt gives on Tiny-ImageNet (S2, Table 5)

    Run     nearsight study run locat-tiny-imagenet
    Cost    8 cells of at most 40 epochs of 80,000 images (25 M); needs a GPU
    Result  see results/locat-tiny-imagenet
    """
    base = trained_as_in_s2(compact_tiny_imagenet("baseline"), _TINY_EPOCHS)
    return Study(base, factors={"model": _CORE}, seeds=seeds)


def trained_as_in_s2(run: RunConfig, epochs: int) -> RunConfig:
    """With S2's augmentations, clipping and schedule, whose warm-up is a fifth of the epochs as on its small sets.

    Not with its stochastic depth: S2 drops less in smaller models, and this one is smaller than any of them.
    """
    theirs = locat().without("resizedcrop").with_(RandomCrop())
    protocol = dataclasses.replace(
        theirs, lr=run.protocol.lr, batch_size=run.protocol.batch_size, warmup_epochs=epochs // 5, drop_path=0.0
    )
    return trained_for(dataclasses.replace(run, protocol=protocol), epochs)


_ORDER = order_rule(s2.LARGER)
Rule = Literal["higher", "lower", "comparable", "not worse"]
_RULES: Mapping[Rule, tuple[str, Callable[[Estimate], Finding]]] = {
    "higher": (_ORDER, partial(judge_sign, sign=1, words="")),
    "lower": (_ORDER, partial(judge_sign, sign=-1, words="")),
    "comparable": (COMPARABLE_RULE, partial(judge_comparable, words="")),
    "not worse": (NOT_WORSE, partial(judge_not_worse, words="")),
}
"""In words, and what judges a difference."""


def of_accuracy(
    id: str,
    text: str,
    contrast: s2.Contrast,
    *,
    source: str,
    published: Sequence[s2.PublishedTable],
    family: str,
    rule: Rule = "higher",
) -> Claim:
    """One comparison, of the paper's tables and of our runs. A family: what one table of the paper says."""
    rule_in_words, judge_difference = _RULES[rule]

    def judge(results: StudyResults) -> Finding:
        values = of_shared_seeds(results.runs, "test_acc", contrast.needs, OF_RUNS["test_acc"].title)
        ours = mean_interval(contrast.of(values))
        words = f"{with_interval(ours, scale=100, digits=2, signed=True)} points"
        if len(contrast.needs) == 2:
            before, after = (percent(float(values[label].mean())) for label in contrast.needs)
            words = f"{before} to {after} %: {words}"
        return s2.judge_contrast(contrast, values, judge_difference, words=words)

    return Claim(
        id=id,
        text=text,
        source=source,
        paper="; ".join(f"{table.in_words(contrast)} points ({table.dataset}, {table.source})" for table in published),
        rule=f"{rule_in_words} {s2.EACH}" if contrast.parts else rule_in_words,
        needs=contrast.needs,
        family=family,
        judge=judge,
    )


_PARTS, _ATTENTION, _TOKENS = "parts (Table 5)", "attention (§4.1)", "tokens (App. F)"
_of_parts = partial(of_accuracy, source="S2 §5.4, Table 5", published=[s2.TABLE_5], family=_PARTS)
_of_kernels = partial(of_accuracy, source="S2 App. E, Table 8", published=[s2.TABLE_8], family="kernels (Table 8)")
_of_widths = partial(of_accuracy, source="S2 App. D, Table 7", published=[s2.TABLE_7], family="widths (Table 7)")


def _core_claims(small_set: s2.PublishedTable) -> tuple[Claim, ...]:
    """Of ViT, GAug, PRR and LocAt; `small_set`: the part of Table 3 that is closest to our data."""
    return (
        of_accuracy(
            "locat",
            "LocAt raises accuracy, also on a small data set",
            above(s2.LOCAT, s2.VIT),
            source="S2 §5.2, Tables 3 and 5",
            published=[small_set, s2.TABLE_5],
            family=_PARTS,
        ),
        _of_parts("gaug", "GAug alone raises accuracy", above(s2.GAUG, s2.VIT)),
        _of_parts("prr", "PRR alone raises accuracy", above(s2.PRR, s2.VIT)),
        _of_parts("together", "Together they raise it further than the better of the two alone", s2.TOGETHER),
    )


def _loses_less(accuracy: pd.DataFrame) -> "pd.Series[float]":
    with_locat = accuracy[s2.LOCAT_WITHOUT_POSITIONS] - accuracy[s2.LOCAT]
    return with_locat - (accuracy[s2.VIT_WITHOUT_POSITIONS] - accuracy[s2.VIT])


_VARIANT_CLAIMS = (
    _of_parts(
        "without-positions",
        "Without positions LocAt is better than ViT",
        above(s2.LOCAT_WITHOUT_POSITIONS, s2.VIT_WITHOUT_POSITIONS),
    ),
    _of_parts(
        "without-positions-beats-vit",
        "LocAt without positions is better than ViT with them",
        above(s2.LOCAT_WITHOUT_POSITIONS, s2.VIT),
    ),
    _of_parts(
        "loses-less-without-positions",
        "LocAt loses less without positions than ViT does",
        s2.Contrast((s2.VIT, s2.LOCAT, s2.VIT_WITHOUT_POSITIONS, s2.LOCAT_WITHOUT_POSITIONS), _loses_less),
    ),
    _of_parts("gap", "Average pooling (GAP) raises ViT's accuracy", above(s2.GAP, s2.VIT)),
    _of_parts("prr-beats-gap", "PRR raises it more than GAP", above(s2.PRR, s2.GAP)),
    _of_kernels(
        "every-kernel",
        "With every kernel, Gaussian, Laplace or inverse distance, LocAt is better than ViT",
        s2.EVERY_KERNEL,
    ),
    _of_kernels(
        "gaussian-competitive",
        "The Gaussian kernel stays competitive with the other two in accuracy",
        s2.GAUSSIAN,
        rule="not worse",
    ),
    _of_widths(
        "width-from-input",
        "A width from the input is better than one from the query",
        above(s2.FROM_INPUT, s2.LOCAT),
    ),
    _of_widths(
        "isotropic",
        "One width for both axes performs comparably",
        above(s2.ISOTROPIC, s2.LOCAT),
        rule="comparable",
    ),
    _of_widths(
        "fixed-width",
        "A fixed width, even the best of three, is worse than one from the query",
        s2.BEST_FIXED,
        rule="lower",
    ),
    _of_widths("no-scale", "Without a scale LocAt is worse", above(s2.NO_SCALE, s2.LOCAT), rule="lower"),
    _of_widths(
        "auto-scale",
        "The automatic scale performs close to the learned one",
        above(s2.AUTO_SCALE, s2.LOCAT),
        rule="comparable",
    ),
)


# What S2 claims about where heads look and what the tokens of each layer are like (§4.1, App. F), without numbers.
_IN_WORDS, _IN_A_FIGURE = "no number", "shown in a figure, no number"
# S2: "after the third layer".
_AFTER = 3
# The rank correlation from which on something grows with depth.
_ORDERED = 0.5
# The share of the layers that are the final ones: the last two of eight.
_FINAL = 0.25


_GAUG_ALONE = above(s2.GAUG, s2.VIT)


def more_local(what: str, column: str, *, id: str | None = None, contrast: s2.Contrast = _GAUG_ALONE) -> Claim:
    """That the second condition of a contrast has a smaller distance than the first."""

    def judge(results: StudyResults) -> Finding:
        values = of_shared_seeds(run_measures(results), column, contrast.needs, OF_RUNS[column].title)
        ours = mean_interval(contrast.of(values))
        before, after = (rounded(float(values[label].mean())) for label in contrast.needs)
        words = f"{before} to {after}: {OF_RUNS[column].in_words(ours, signed=True)}"
        return judge_sign(ours, sign=-1, words=words)

    return Claim(
        id=id or f"gaug-{column}",
        text=f"GAug makes attention local: {what}",
        source="S2 §4.1",
        paper=_IN_WORDS,
        rule=_ORDER,
        needs=contrast.needs,
        family=_ATTENTION,
        judge=judge,
    )


def _by_layer(results: StudyResults, column: str, *conditions: str) -> pd.DataFrame:
    """A column per condition, a row per seed and layer, of the seeds that have it in all layers of all conditions."""
    layers = layer_measures(results)
    wanted = layers[layers["condition"].isin(conditions)]
    values = wanted.pivot_table(index=["seed", "layer"], columns="condition", values=column, dropna=False)
    values = values.reindex(columns=list(conditions))
    shared = values[values.notna().all(axis=1).groupby("seed").transform("all")]
    if shared.empty:
        title = OF_LAYERS[column].title
        raise InputError(f"no seed of which all have a {title} in every layer: {', '.join(conditions)}")
    return shared


def _judge_shifted(
    column: str, reference: str, condition: str, sign: int, after: int, results: StudyResults
) -> Finding:
    """Strict: in every layer from `after` on; weak: in their mean."""
    values = _by_layer(results, column, reference, condition)
    values = values[values.index.get_level_values("layer") >= after]
    if values.empty:
        raise InputError(f"the models have no layer after L{after}")
    shift = values[condition] - values[reference]
    means = shift.groupby("seed").mean()
    right = (shift * sign > 0).groupby("seed")
    before, afterwards = (rounded(float(values[label].mean())) for label in (reference, condition))
    words = (
        f"mean over layers {before} to {afterwards}: {OF_LAYERS[column].in_words(mean_interval(means), signed=True)}; "
        f"{'higher' if sign > 0 else 'lower'} in {_range(right.sum().tolist(), digits=0)} of "
        f"{values.index.get_level_values('layer').nunique()} layers"
    )
    return judge_every_seed(right.all().tolist(), (means * sign > 0).tolist(), words)


def _judge_drawn_to_cls(results: StudyResults) -> Finding:
    values = _by_layer(results, "patch_cls_similarity", s2.VIT)[s2.VIT]
    profiles = [of_seed.droplevel("seed").sort_index() for _, of_seed in values.groupby("seed")]
    orders = [float(profile.corr(pd.Series(profile.index, profile.index), method="spearman")) for profile in profiles]
    peaks = [int(profile.argmax()) for profile in profiles]
    rises = [float(profile.iloc[-1] - profile.iloc[0]) for profile in profiles]
    final = len(profiles[0]) - max(1, round(_FINAL * len(profiles[0])))
    words = (
        f"rank correlation with depth {_range(orders)}, highest in "
        f"{', '.join(f'L{peak}' for peak in peaks)}, last minus first layer "
        f"{with_interval(mean_interval(rises), signed=True)}"
    )
    strict = [order >= _ORDERED and peak >= final for order, peak in zip(orders, peaks, strict=True)]
    return judge_every_seed(strict, [rise > 0 for rise in rises], words)


def _range(values: Sequence[float], digits: int = 2) -> str:
    """Over seeds."""
    low, high = (rounded(end, digits) for end in (min(values), max(values)))
    return low if low == high else span(low, high)


_LAYER_CLAIMS = (
    more_local("the most local head is more local", "min_mad"),
    more_local("heads are more local on average", "mean_mad"),
    Claim(
        id="gaug-every-layer",
        text="GAug makes attention local in every layer",
        source="S2 §4.1",
        paper=_IN_WORDS,
        rule=EVERY_SEED,
        readings=(
            "the mean distance of the layer's heads is smaller than ViT's in every layer",
            "it is on average over the layers",
        ),
        needs=(s2.VIT, s2.GAUG),
        family=_ATTENTION,
        judge=partial(_judge_shifted, "mean_mad", s2.VIT, s2.GAUG, -1, 0),
    ),
    Claim(
        id="patches-like-neighbours",
        text="LocAt's patches are more like their neighbours than ViT's, after the third layer",
        source="S2 App. F, Figure 5a",
        paper=_IN_A_FIGURE,
        rule=EVERY_SEED,
        readings=(
            f"the locality score is higher than ViT's in every layer after L{_AFTER}",
            "it is on average over these layers",
        ),
        needs=(s2.VIT, s2.LOCAT),
        family=_TOKENS,
        judge=partial(_judge_shifted, "locality_score", s2.VIT, s2.LOCAT, 1, _AFTER),
    ),
    Claim(
        id="patches-unlike-cls",
        text="LocAt's patches are less like CLS than ViT's, in all layers",
        source="S2 App. F, Figure 5b",
        paper=_IN_A_FIGURE,
        rule=EVERY_SEED,
        readings=(
            "the patch–CLS similarity is lower than ViT's in every layer",
            "it is on average over the layers",
        ),
        needs=(s2.VIT, s2.LOCAT),
        family=_TOKENS,
        judge=partial(_judge_shifted, "patch_cls_similarity", s2.VIT, s2.LOCAT, -1, 0),
    ),
    Claim(
        id="patches-drawn-to-cls",
        text="In ViT patches become more like CLS with depth, most of all in the final layers",
        source="S2 App. F, Figure 5b",
        paper=_IN_A_FIGURE,
        rule=EVERY_SEED,
        readings=(
            f"the rank correlation of depth and patch–CLS similarity is at least {_ORDERED}, and the similarity is "
            "highest in the last quarter of the layers",
            "the similarity is higher in the last layer than in the first",
        ),
        needs=(s2.VIT,),
        family=_TOKENS,
        judge=_judge_drawn_to_cls,
    ),
)

for _name, _claims in {
    "locat-cifar100": (*_core_claims(s2.TABLE_3_CIFAR100), *_VARIANT_CLAIMS, *_LAYER_CLAIMS),
    "locat-tiny-imagenet": (*_core_claims(s2.TABLE_3_MINI_IMAGENET), *_LAYER_CLAIMS),
}.items():
    report_on(
        _name,
        paper=s2.PAPER,
        claims=_claims,
        tables=(locality_table, layers_table, differences_to(s2.VIT), differences_to(s2.LOCAT, of=s2.OTHER_LOCATS)),
        figures={
            "figure-6-accuracy-and-locality": accuracy_and_locality,
            "figure-7-layers": layer_profiles({label: label for label in s2.CORE}),
        },
    )
