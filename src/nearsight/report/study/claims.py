"""What the paper claims, each with its numbers, its place in the text and the rule that judges it.

Its numbers come from paper.py, ours from the runs: nothing here is typed in twice.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from nearsight.report.study import paper as s1
from nearsight.report.study.claims_of_heads import HEAD_CLAIMS, PLANE, HeadClaim
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


@dataclass(frozen=True, kw_only=True)
class Claim:
    text: str
    source: str
    """Where the paper makes it."""
    paper: str
    """The paper's numbers, in words."""
    rule: str
    """What judges it, in words."""
    readings: tuple[str, str] | None = None
    """The strict and the weak reading, where the rule is that of every seed."""
    needs: tuple[str, ...]
    """Conditions without which it cannot be judged."""
    judge: Callable[[StudyResults], Finding]


def _value(study: str, condition: str, response: str) -> float | None:
    value = getattr(s1.PUBLISHED[study].conditions[condition], response)
    return None if value is None else float(value)


def _change(study: str, condition: str, reference: str, response: str) -> float | None:
    after, before = _value(study, condition, response), _value(study, reference, response)
    return None if after is None or before is None else after - before


def _size(study: str, text: str, source: str, condition: str, reference: str, response: str, *, sign: int) -> Claim:
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
    return Claim(text=text, source=source, paper=published, rule=SIZE, needs=(reference, condition), judge=judge)


def _no_effect(study: str, text: str, condition: str, key_condition: str, reference: str, *, key_sign: int) -> Claim:
    """A condition that should differ from the reference as little as the key factor's differs much."""
    paper, key = (_change(study, label, reference, "min_mad") for label in (condition, key_condition))
    assert paper is not None
    assert key is not None

    def judge(results: StudyResults) -> Finding:
        ours, of_key = (
            paired_difference(results.runs, label, reference, "min_mad") for label in (condition, key_condition)
        )
        return judge_no_effect(ours, of_key, key_sign=key_sign)

    return Claim(
        text=text,
        source="S1 §6.2",
        paper=f"{rounded(paper, signed=True)}, CutMix's {rounded(key, signed=True)} ({share(abs(paper / key))})",
        rule=NO_EFFECT_RULE,
        needs=(reference, condition, key_condition),
        judge=judge,
    )


def _groups(study: str, text: str, source: str, response: str) -> Claim:
    """All conditions with CutMix on one side of a gap, all without on the other."""
    values = {label: _value(study, label, response) or 0.0 for label in s1.PUBLISHED[study].conditions}
    highest = max(value for label, value in values.items() if label in s1.WITH_CUTMIX)
    lowest = min(value for label, value in values.items() if label not in s1.WITH_CUTMIX)
    key = s1.PUBLISHED[study].key_factor
    assert key is not None

    def judge(results: StudyResults) -> Finding:
        pairs = ["seed", *(name for name in results.factors if name != key)]
        found = separation(results.runs, key, results.factors[key], response, blocks=pairs)
        return judge_groups(found, (highest, lowest), n=int(results.runs["seed"].nunique()))

    return Claim(
        text=text,
        source=source,
        paper=f"with ≤ {rounded(highest)}, without ≥ {rounded(lowest)}; "
        f"margin {rounded(lowest - highest, signed=True)}",
        rule=GROUPS,
        needs=tuple(values),
        judge=judge,
    )


def _dissociation(study: str) -> Claim:
    labels = (s1.ONLY_CUTMIX, s1.ONLY_AUTOAUGMENT)
    gains = [_change(study, label, s1.BASELINE, "test_acc") for label in labels]
    changes = [_change(study, label, s1.BASELINE, "min_mad") for label in labels]

    def judge(results: StudyResults) -> Finding:
        return judge_dissociation(
            *(paired_difference(results.runs, label, s1.BASELINE, "test_acc") for label in labels),
            *(paired_difference(results.runs, label, s1.BASELINE, "min_mad") for label in labels),
        )

    return Claim(
        text="CutMix and AutoAugment alone raise accuracy alike, yet only CutMix makes heads local",
        source="S1 §6.2, §7",
        paper=f"accuracy {' and '.join(f'+{percent(gain)}' for gain in gains)} points; min MAD "
        f"{' and '.join(rounded(change, signed=True) for change in changes)}",
        rule=DISSOCIATION,
        needs=(s1.BASELINE, *labels),
        judge=judge,
    )


def _of_heads(claim: HeadClaim) -> Claim:
    return Claim(
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
        _size(study, accuracy, "S1 §4.4, Table 1", s1.MODERN, s1.BASELINE, "test_acc", sign=1),
        _size(study, locality, "S1 abstract, §5.1", s1.MODERN, s1.BASELINE, "min_mad", sign=-1),
    ]


def _of_ablation(study: str) -> list[Claim]:
    """Which component does it."""
    removed, added = "Removing CutMix from Modern", "Adding CutMix alone to Baseline"
    both_ways = {
        f"{removed} undoes the locality": (s1.WITHOUT_CUTMIX, s1.MODERN, 1),
        f"{added} makes heads local": (s1.ONLY_CUTMIX, s1.BASELINE, -1),
    }
    none = {
        "AutoAugment alone has no effect on locality": (s1.ONLY_AUTOAUGMENT, s1.ONLY_CUTMIX, s1.BASELINE, -1),
        "Label smoothing alone has no effect on locality": (s1.ONLY_SMOOTHING, s1.ONLY_CUTMIX, s1.BASELINE, -1),
        "Removing AutoAugment from Modern leaves it local": (s1.WITHOUT_AUTOAUGMENT, s1.WITHOUT_CUTMIX, s1.MODERN, 1),
        "Removing label smoothing from Modern leaves it local": (s1.WITHOUT_SMOOTHING, s1.WITHOUT_CUTMIX, s1.MODERN, 1),
    }
    gap = "CutMix parts the conditions: the most local head of all with it looks nearer than that of any without"
    focus = "The effect is not limited to one metric: the smallest entropy parts them too"
    return [
        _groups(study, gap, "S1 abstract, §6.2, Figure 4", "min_mad"),
        _groups(study, focus, "S1 §6.2, Table 2", "min_entropy"),
        *(
            _size(study, text, "S1 §6.2", condition, reference, "min_mad", sign=sign)
            for text, (condition, reference, sign) in both_ways.items()
        ),
        *(
            _no_effect(study, text, condition, key_condition, reference, key_sign=sign)
            for text, (condition, key_condition, reference, sign) in none.items()
        ),
        _of_heads(PLANE),
        _dissociation(study),
    ]


def _claims() -> dict[str, tuple[Claim, ...]]:
    everywhere = [_of_heads(claim) for claim in HEAD_CLAIMS if claim.every_dataset]
    cifar100 = [_of_heads(claim) for claim in HEAD_CLAIMS]
    return {
        "ablation-cifar100": (
            *_of_protocols("ablation-cifar100"),
            *cifar100,
            *_of_ablation("ablation-cifar100"),
        ),
        "protocol-cifar10": (*_of_protocols("protocol-cifar10"), *everywhere),
        "protocol-cifar100": (*_of_protocols("protocol-cifar100"), *cifar100),
        "protocol-tiny-imagenet": (*_of_protocols("protocol-tiny-imagenet"), *everywhere),
    }


CLAIMS: Mapping[str, tuple[Claim, ...]] = _claims()
"""By the name of the study that tests them."""
