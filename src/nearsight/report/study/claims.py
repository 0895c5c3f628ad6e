"""What the paper claims, each with its numbers, its place in the text and the rule that judges it.

Its numbers come from paper.py, ours from the runs: nothing here is typed in twice.
"""

import dataclasses
from collections.abc import Mapping

from nearsight.report.study import paper as s1
from nearsight.report.study.claim import Claim
from nearsight.report.study.claims_of_heads import HEAD_CLAIMS, PLANE, HeadClaim
from nearsight.report.study.conditions import pair_columns
from nearsight.report.study.rules import (
    DISSOCIATION,
    EVERY_SEED,
    GROUPS,
    NO_EFFECT_RULE,
    SIZE,
    Finding,
    change_in_words,
    judge_dissociation,
    judge_groups,
    judge_no_effect,
    judge_size,
)
from nearsight.report.study.table import percent, rounded, share
from nearsight.study.results import StudyResults
from nearsight.study.statistics import mean_interval, paired_difference, separation

UNKNOWN = "not known"
ABLATIONS: Mapping[str, str] = {
    "ablation-cifar100": s1.AUTOAUGMENT,
    "ablation-fitted-cifar100": s1.AUTOAUGMENT,
    "ablation-cifar10": s1.AUTOAUGMENT,
    "ablation-tiny-imagenet": s1.COLORJITTER,
}
"""The studies that take the Modern protocol apart, with what each has for AutoAugment."""


def _value(study: str, condition: str, response: str) -> float | None:
    value = getattr(s1.PUBLISHED[study].conditions.get(condition), response, None)
    return None if value is None else float(value)


def _change(study: str, condition: str, reference: str, response: str) -> float | None:
    after, before = _value(study, condition, response), _value(study, reference, response)
    return None if after is None or before is None else after - before


def _size(
    study: str, id: str, text: str, source: str, condition: str, reference: str, response: str, *, sign: int
) -> Claim:
    """A difference between two conditions."""
    paper = _change(study, condition, reference, response)
    accuracy = response == "test_acc"

    def judge(results: StudyResults) -> Finding:
        ours = paired_difference(results.runs, condition, reference, response)
        before, after = (
            mean_interval(results.runs.loc[results.runs["condition"] == label, response])
            for label in (reference, condition)
        )
        return judge_size(ours, paper, sign=sign, words=change_in_words(before, after, ours, accuracy=accuracy))

    before, after = (mean_interval([_value(study, label, response) or 0.0]) for label in (reference, condition))
    published = UNKNOWN if paper is None else change_in_words(before, after, mean_interval([paper]), accuracy=accuracy)
    return Claim(id=id, text=text, source=source, paper=published, rule=SIZE, needs=(reference, condition), judge=judge)


def _no_effect(
    study: str, id: str, text: str, condition: str, key_condition: str, reference: str, *, key_sign: int
) -> Claim:
    """A condition that should differ from the reference as little as the key factor's differs much."""
    paper, key = (_change(study, label, reference, "min_mad") for label in (condition, key_condition))
    published = UNKNOWN
    if paper is not None and key is not None:
        published = f"{rounded(paper, signed=True)}, CutMix's {rounded(key, signed=True)} ({share(abs(paper / key))})"

    def judge(results: StudyResults) -> Finding:
        ours, of_key = (
            paired_difference(results.runs, label, reference, "min_mad") for label in (condition, key_condition)
        )
        return judge_no_effect(ours, of_key, key_sign=key_sign)

    return Claim(
        id=id,
        text=text,
        source="S1 §6.2",
        paper=published,
        rule=NO_EFFECT_RULE,
        needs=(reference, condition, key_condition),
        judge=judge,
    )


def _groups(study: str, colour: str, id: str, text: str, source: str, response: str) -> Claim:
    """All conditions with CutMix on one side of a gap, all without on the other."""
    groups = [[_value(study, label, response) for label in labels] for labels in _both_groups(colour)]
    above, below = ([value for value in values if value is not None] for values in groups)
    bounds, published = None, UNKNOWN
    if above and below:
        bounds = (max(above), min(below))
        published = (
            f"with ≤ {rounded(bounds[0])}, without ≥ {rounded(bounds[1])}; "
            f"margin {rounded(bounds[1] - bounds[0], signed=True)}"
        )
    key = s1.PUBLISHED[study].key_factor
    assert key is not None

    def judge(results: StudyResults) -> Finding:
        found = separation(results.runs, key, results.factors[key], response, blocks=pair_columns(results, key))
        return judge_groups(found, bounds, n=int(results.runs["seed"].nunique()))

    needs = tuple(label for labels in _both_groups(colour) for label in labels)
    return Claim(id=id, text=text, source=source, paper=published, rule=GROUPS, needs=needs, judge=judge)


def _both_groups(colour: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    return s1.with_cutmix(colour), s1.without_cutmix(colour)


def _dissociation(study: str, colour: str) -> Claim:
    labels = (s1.ONLY_CUTMIX, s1.only(colour))
    gains = [_change(study, label, s1.BASELINE, "test_acc") for label in labels]
    changes = [_change(study, label, s1.BASELINE, "min_mad") for label in labels]
    published = UNKNOWN
    if None not in (*gains, *changes):
        published = (
            f"accuracy {' and '.join(f'+{percent(gain)}' for gain in gains)} points; min MAD "
            f"{' and '.join(rounded(change, signed=True) for change in changes)}"
        )

    def judge(results: StudyResults) -> Finding:
        return judge_dissociation(
            *(paired_difference(results.runs, label, s1.BASELINE, "test_acc") for label in labels),
            *(paired_difference(results.runs, label, s1.BASELINE, "min_mad") for label in labels),
        )

    return Claim(
        id="dissociation",
        text=f"CutMix and {colour} alone raise accuracy alike, yet only CutMix makes heads local",
        source="S1 §6.2, §7",
        paper=published,
        rule=DISSOCIATION,
        needs=(s1.BASELINE, *labels),
        judge=judge,
    )


def _of_heads(claim: HeadClaim) -> Claim:
    return Claim(
        id=claim.id,
        text=claim.text,
        source=claim.source,
        paper=claim.paper,
        rule=EVERY_SEED,
        readings=(claim.strict, claim.weak),
        needs=claim.needs,
        judge=claim.judge,
    )


def _of_protocols(study: str) -> list[Claim]:
    """Baseline against Modern, on any data set."""
    accuracy = "The Modern protocol raises test accuracy"
    locality = "Under the Modern protocol the most local head looks nearer"
    return [
        _size(study, "accuracy", accuracy, "S1 §4.4, Table 1", s1.MODERN, s1.BASELINE, "test_acc", sign=1),
        _size(study, "most-local-head", locality, "S1 abstract, §5.1", s1.MODERN, s1.BASELINE, "min_mad", sign=-1),
    ]


def _of_ablation(study: str, colour: str) -> list[Claim]:
    """Which component does it."""
    removed, added = "Removing CutMix from Modern", "Adding CutMix alone to Baseline"
    both_ways = {
        "removing-cutmix": (f"{removed} undoes the locality", s1.WITHOUT_CUTMIX, s1.MODERN, 1),
        "adding-cutmix": (f"{added} makes heads local", s1.ONLY_CUTMIX, s1.BASELINE, -1),
    }
    none = {
        "colour-alone": (
            f"{colour} alone has no effect on locality",
            s1.only(colour),
            s1.ONLY_CUTMIX,
            s1.BASELINE,
            -1,
        ),
        "smoothing-alone": (
            "Label smoothing alone has no effect on locality",
            s1.ONLY_SMOOTHING,
            s1.ONLY_CUTMIX,
            s1.BASELINE,
            -1,
        ),
        "removing-colour": (
            f"Removing {colour} from Modern leaves it local",
            s1.without(colour),
            s1.WITHOUT_CUTMIX,
            s1.MODERN,
            1,
        ),
        "removing-smoothing": (
            "Removing label smoothing from Modern leaves it local",
            s1.WITHOUT_SMOOTHING,
            s1.WITHOUT_CUTMIX,
            s1.MODERN,
            1,
        ),
    }
    gap = "CutMix parts the conditions: the most local head of all with it looks nearer than that of any without"
    focus = "The effect is not limited to one metric: the smallest entropy parts them too"
    return [
        _groups(study, colour, "cutmix-separates", gap, "S1 abstract, §6.2, Figure 4", "min_mad"),
        _groups(study, colour, "entropy-separates", focus, "S1 §6.2, Table 2", "min_entropy"),
        *(
            _size(study, id, text, "S1 §6.2", condition, reference, "min_mad", sign=sign)
            for id, (text, condition, reference, sign) in both_ways.items()
        ),
        *(
            _no_effect(study, id, text, condition, key_condition, reference, key_sign=sign)
            for id, (text, condition, key_condition, reference, sign) in none.items()
        ),
        _of_heads(PLANE),
        _dissociation(study, colour),
    ]


def _claims() -> dict[str, tuple[Claim, ...]]:
    everywhere = [_of_heads(claim) for claim in HEAD_CLAIMS if claim.every_dataset]
    cifar100 = [_of_heads(claim) for claim in HEAD_CLAIMS]
    claims = {}
    for name, colour in ABLATIONS.items():
        of_heads, of_parts = cifar100, _of_ablation(name, colour)
        if s1.PUBLISHED[name].dataset != "CIFAR-100":
            # The paper's ablation is on CIFAR-100: here its claims are put to data that it has not seen.
            of_heads, of_parts = everywhere, [_elsewhere(claim) for claim in of_parts]
        claims[name] = [*_of_protocols(name), *of_heads, *of_parts]
    for name, of_heads in (("cifar10", everywhere), ("cifar100", cifar100), ("tiny-imagenet", everywhere)):
        claims[f"protocol-{name}"] = [*_of_protocols(f"protocol-{name}"), *of_heads]
    return {name: tuple(each) for name, each in claims.items()}


def _elsewhere(claim: Claim) -> Claim:
    return dataclasses.replace(claim, source=f"{claim.source}, there on CIFAR-100")


CLAIMS: Mapping[str, tuple[Claim, ...]] = _claims()
"""By the name of the study that tests them."""
