"""What S1 claims about its conditions: Baseline against Modern (Table 1), and the parts of Modern (Table 2)."""

import dataclasses
from typing import Any

from nearsight.papers.protocol import numbers as s1
from nearsight.papers.protocol.heads import OF_ABLATION, PARTS, PROTOCOL
from nearsight.report import rules
from nearsight.report.claims import Claim, asked
from nearsight.report.tables import difference_in_words, percent, probability, rounded, share
from nearsight.study.results import StudyResults
from nearsight.study.statistics import mean_interval, paired_difference
from nearsight.study.statistics.intervals import by_seed

_UNKNOWN = "not known"


def _value(study: str, condition: str, response: str) -> float | None:
    value = getattr(s1.PUBLISHED[study].conditions.get(condition), response, None)
    return None if value is None else float(value)


def _change(study: str, condition: str, reference: str, response: str) -> float | None:
    after, before = _value(study, condition, response), _value(study, reference, response)
    return None if after is None or before is None else after - before


def _size(
    study: str,
    id: str,
    text: str,
    source: str,
    condition: str,
    reference: str,
    response: str,
    *,
    sign: int,
    family: str = PARTS,
) -> Claim:
    """A difference between two conditions."""
    paper, published = _change(study, condition, reference, response), _UNKNOWN
    if paper is not None:
        numbers = (_value(study, reference, response), _value(study, condition, response), paper)
        before, after, change = (mean_interval([number or 0.0]) for number in numbers)
        published = rules.change_in_words(before, after, change, accuracy=response == "test_acc")

    @asked(id, text, source=source, paper=published, rule=rules.SIZE, needs=(reference, condition), family=family)
    def claim(results: StudyResults) -> rules.Finding:
        ours, words = rules.paired_change(results.runs, condition, reference, response)
        return rules.judge_sign(ours, sign=sign, words=words, paper=paper)

    return claim


def _no_effect(study: str, id: str, text: str, condition: str, reference: str) -> Claim:
    """A condition that should differ from the reference as little as that with CutMix changed differs much."""
    of_cutmix, sign = (s1.ONLY_CUTMIX, -1) if reference == s1.BASELINE else (s1.WITHOUT_CUTMIX, 1)
    paper, key = (_change(study, label, reference, "min_mad") for label in (condition, of_cutmix))
    published = _UNKNOWN
    if paper is not None and key is not None:
        published = f"{rounded(paper, signed=True)}, CutMix's {rounded(key, signed=True)} ({share(abs(paper / key))})"
    needs = (reference, condition, of_cutmix)

    @asked(id, text, source="S1 §6.2", paper=published, rule=rules.NO_EFFECT_RULE, needs=needs, family=PARTS)
    def claim(results: StudyResults) -> rules.Finding:
        ours, theirs = (
            paired_difference(results.runs, label, reference, "min_mad") for label in (condition, of_cutmix)
        )
        return rules.judge_no_effect(ours, theirs, key_sign=sign)

    return claim


def _groups(study: str, colour: str, id: str, text: str, source: str, response: str) -> Claim:
    """All conditions with CutMix on one side of a gap, all without on the other."""
    both = (s1.with_cutmix(colour), s1.without_cutmix(colour))
    values = ([_value(study, label, response) for label in labels] for labels in both)
    near, far = ([value for value in some if value is not None] for some in values)
    paper, published = None, _UNKNOWN
    if len(near) == len(far) == len(both[0]):
        paper = mean_interval(near).value - mean_interval(far).value
        published = f"{rounded(paper, signed=True)}; with ≤ {rounded(max(near))}, without ≥ {rounded(min(far))}"
    key = s1.PUBLISHED[study].key_factor
    assert key is not None

    @asked(id, text, source=source, paper=published, rule=rules.GROUPS, needs=(*both[0], *both[1]), family=PARTS)
    def claim(results: StudyResults) -> rules.Finding:
        return rules.judge_groups(results.runs, key, results.factors[key], response, paper)

    return claim


_INTERACTION = (
    "*Interaction.* What CutMix changes in min MAD with the other part minus what it changes without it, within every "
    "seed (both are means over the third part, on and off). "
    f"{rules.within_rule(f'{share(rules.NO_EFFECT)} of what CutMix changes on average, up or down')} Where that change "
    "is not shown to be downwards with p ≤ 0.05, there is nothing to compare with: inconclusive."
)


def _interaction(study: str, colour: str, id: str, part: str) -> Claim:
    """Whether another part of Modern changes what CutMix does; `part`: as conditions call it."""
    without_cutmix = (s1.WITHOUT_CUTMIX, s1.ONLY_SMOOTHING, s1.only(colour), s1.BASELINE)
    pairs = dict(zip(s1.with_cutmix(colour), without_cutmix, strict=True))
    having = (s1.MODERN, s1.WITHOUT_SMOOTHING if part == colour else s1.without(colour))
    lacking = tuple(label for label in pairs if label not in having)

    def effects(values: Any) -> list[Any]:
        """Of CutMix: without the part, with it, their difference, their mean; `values`: numbers or columns."""
        changes = {label: values[label] - values[pairs[label]] for label in pairs}
        without, with_it = ((changes[first] + changes[second]) / 2 for first, second in (lacking, having))
        return [without, with_it, with_it - without, (without + with_it) / 2]

    words = "CutMix's {} without it, {} with it: {}{}; {} on average"
    labels, published = (*pairs, *pairs.values()), _UNKNOWN
    values = {label: _value(study, label, "min_mad") for label in labels}
    if None not in values.values():
        without, with_it, apart, whole = (rounded(number, signed=True) for number in effects(values))
        published = words.format(without, with_it, apart, "", whole)

    @asked(
        id,
        f"{part if part == colour else 'Label smoothing'} does not change what CutMix does to locality",
        source="S1 §6.3",
        paper=published,
        rule=_INTERACTION,
        needs=labels,
        family=PARTS,
    )
    def claim(results: StudyResults) -> rules.Finding:
        of_seeds = by_seed(results.runs, "min_mad").reindex(columns=list(labels)).dropna()
        found = [mean_interval(of_seed) for of_seed in effects(of_seeds)]
        without, with_it, apart, whole = map(difference_in_words, found)
        p = f" (p = {probability(found[2].p)})" if found[2].n > 1 else ""
        judged = rules.judge_no_effect(found[2], found[3], key_sign=-1)
        return dataclasses.replace(judged, ours=words.format(without, with_it, apart, p, whole))

    return claim


def _dissociation(study: str, colour: str) -> Claim:
    labels = (s1.ONLY_CUTMIX, s1.only(colour))
    gains, changes = (
        [_change(study, label, s1.BASELINE, response) for label in labels] for response in ("test_acc", "min_mad")
    )
    published = _UNKNOWN
    if None not in (*gains, *changes):
        published = (
            f"accuracy {' and '.join(f'+{percent(gain)}' for gain in gains)} points; min MAD "
            f"{' and '.join(rounded(change, signed=True) for change in changes)}"
        )

    text = f"CutMix and {colour} alone raise accuracy by similar amounts, but only CutMix makes heads local"
    needs = (s1.BASELINE, *labels)

    @asked(
        "dissociation",
        text,
        source="S1 §6.2, §7",
        paper=published,
        rule=rules.DISSOCIATION,
        needs=needs,
        family=PARTS,
    )
    def claim(results: StudyResults) -> rules.Finding:
        (key_gain, other_gain), (key_change, other_change) = (
            [paired_difference(results.runs, label, s1.BASELINE, response) for label in labels]
            for response in ("test_acc", "min_mad")
        )
        apart = paired_difference(results.runs, *labels, "test_acc")
        return rules.judge_dissociation(key_gain, other_gain, apart, key_change, other_change)

    return claim


def of_protocols(study: str) -> list[Claim]:
    """Baseline against Modern, on any data set."""
    accuracy = "The Modern protocol raises test accuracy"
    locality = "Under the Modern protocol the most local head is more local (lower MAD)"
    both, family = (s1.MODERN, s1.BASELINE), PROTOCOL
    return [
        _size(study, "accuracy", accuracy, "S1 §4.4, Table 1", *both, "test_acc", sign=1, family=family),
        _size(study, "most-local-head", locality, "S1 abstract, §5.1", *both, "min_mad", sign=-1, family=family),
    ]


def of_ablation(study: str, colour: str) -> list[Claim]:
    """Which component makes attention local."""
    gap = "CutMix separates the conditions: with it, every most local head has a lower MAD than any without"
    focus = "The effect is not limited to one metric: the smallest entropy separates them too"
    removed, added = (
        "Removing CutMix from Modern undoes the locality",
        "Adding CutMix alone to Baseline makes heads local",
    )
    alone, leaves = "alone has no effect on locality", "from Modern leaves it local"
    return [
        _groups(study, colour, "cutmix-separates", gap, "S1 abstract, §6.2, Figure 4", "min_mad"),
        _groups(study, colour, "entropy-separates", focus, "S1 §6.2, Table 2", "min_entropy"),
        _size(study, "removing-cutmix", removed, "S1 §6.2", s1.WITHOUT_CUTMIX, s1.MODERN, "min_mad", sign=1),
        _size(study, "adding-cutmix", added, "S1 §6.2", s1.ONLY_CUTMIX, s1.BASELINE, "min_mad", sign=-1),
        _no_effect(study, "colour-alone", f"{colour} {alone}", s1.only(colour), s1.BASELINE),
        _no_effect(study, "smoothing-alone", f"Label smoothing {alone}", s1.ONLY_SMOOTHING, s1.BASELINE),
        _no_effect(study, "removing-colour", f"Removing {colour} {leaves}", s1.without(colour), s1.MODERN),
        _no_effect(study, "removing-smoothing", f"Removing label smoothing {leaves}", s1.WITHOUT_SMOOTHING, s1.MODERN),
        OF_ABLATION,
        _dissociation(study, colour),
        _interaction(study, colour, "colour-and-cutmix", colour),
        _interaction(study, colour, "smoothing-and-cutmix", s1.SMOOTHING),
    ]
