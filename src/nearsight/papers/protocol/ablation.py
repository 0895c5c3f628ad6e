"""S1's two protocols on each of its data sets (Table 1), and which part of the modern one does it (Table 2).

The paper takes its Modern protocol apart on CIFAR-100 alone; the other two data sets are the replication it asks for.

What the paper does not report is a field with a conventional value, and is marked assumed wherever it is shown. bf16 is
one of these: the runs are to take minutes on a GPU.
"""

import dataclasses
from collections.abc import Mapping

from nearsight.augment import Augmentation, AutoAugment, ColorJitter, CutMix
from nearsight.papers.protocol import numbers as s1
from nearsight.papers.protocol.heads import HEAD_CLAIMS, PLANE, HeadClaim
from nearsight.papers.protocol.length import LENGTH_CLAIMS, length_and_distance, length_table
from nearsight.papers.protocol.own_patch import every_head, own_patch_questions, own_patch_table
from nearsight.papers.structure.learned_positions import association_and_distance, association_table
from nearsight.report.claims import Claim
from nearsight.report.conditions import pair_columns
from nearsight.report.rules import (
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
from nearsight.report.studies import report_on
from nearsight.report.tables import percent, rounded, share
from nearsight.study import OFF, Study
from nearsight.study.recipes import RunRecipe, recipe
from nearsight.study.results import StudyResults
from nearsight.study.statistics import mean_interval, paired_difference, separation
from nearsight.train import RunConfig
from nearsight.train.recipes import compact_cifar10, compact_cifar100, compact_tiny_imagenet


@recipe("ablation-cifar100")
def ablation_cifar100(*, seeds: int = 3) -> Study:
    """Which part of the Modern protocol makes attention local? CutMix, AutoAugment, LabelSmoothing (S1, Table 2)

    Run     nearsight study run ablation-cifar100
    Cost    24 cells of at most 600 epochs of 40,000 images (576 M; early stopping made it 131 M); 28 minutes of an H200
    Result  accuracies and the direction reproduce, the clean gap does not: see results/ablation-cifar100
    """
    return ablation(_in_bf16(compact_cifar100("baseline")), colour=AutoAugment(), seeds=seeds)


@recipe("ablation-cifar10")
def ablation_cifar10(*, seeds: int = 1) -> Study:
    """Is it CutMix on CIFAR-10 too? The eight conditions of Table 2 on another data set (S1 §7, future work ii)

    Run     nearsight study run ablation-cifar10
    Cost    8 cells of at most 600 epochs of 40,000 images (192 M; early stopping made it 42 M); needs a GPU
    Result  one seed: CutMix does not part the conditions by the smallest distance, see results/ablation-cifar10
    """
    return ablation(_in_bf16(compact_cifar10("baseline")), colour=AutoAugment(), seeds=seeds)


@recipe("ablation-tiny-imagenet")
def ablation_tiny_imagenet(*, seeds: int = 1) -> Study:
    """Is it CutMix on Tiny-ImageNet too? ColorJitter in the place of AutoAugment (S1 §7, future work ii)

    Run     nearsight study run ablation-tiny-imagenet
    Cost    8 cells of at most 400 epochs of 80,000 images (256 M; early stopping made it 44 M); needs a GPU
    Result  one seed: CutMix parts the conditions, by a hair, see results/ablation-tiny-imagenet
    """
    return ablation(_in_bf16(compact_tiny_imagenet("baseline")), colour=ColorJitter(), seeds=seeds)


@recipe("protocol-cifar10")
def protocol_cifar10(*, seeds: int = 3) -> Study:
    """Accuracy and locality by the Baseline and the Modern protocol on CIFAR-10 (S1, Table 1)

    Run     nearsight study run protocol-cifar10
    Cost    6 cells of at most 600 epochs of 40,000 images (144 M); needs a GPU
    Result  two seeds: Modern raises accuracy and looks nearer, see results/protocol-cifar10
    """
    return _both_protocols(compact_cifar10, seeds)


@recipe("protocol-cifar100")
def protocol_cifar100(*, seeds: int = 3) -> Study:
    """Accuracy and locality by the Baseline and the Modern protocol on CIFAR-100 (S1, Table 1)

    Run     nearsight study run protocol-cifar100
    Cost    6 cells of at most 600 epochs of 40,000 images (144 M); needs a GPU
    Result  see results/protocol-cifar100
    """
    return _both_protocols(compact_cifar100, seeds)


@recipe("protocol-tiny-imagenet")
def protocol_tiny_imagenet(*, seeds: int = 3) -> Study:
    """Accuracy and locality by the Baseline and the Modern protocol on Tiny-ImageNet (S1, Table 1)

    Run     nearsight study run protocol-tiny-imagenet
    Cost    6 cells of at most 400 epochs of 80,000 images (192 M); needs a GPU
    Result  two seeds: Modern raises accuracy; it looks nearer in both, see results/protocol-tiny-imagenet
    """
    return _both_protocols(compact_tiny_imagenet, seeds)


def ablation(base: RunConfig, *, colour: Augmentation, cutmix: CutMix | None = None, seeds: int) -> Study:
    """All combinations of the Modern protocol's three parts, on top of any Baseline."""
    factors = {"cutmix": (OFF, cutmix or CutMix(p=0.5)), colour.name: (OFF, colour), "smoothing": (0.0, 0.1)}
    return Study(base, factors=factors, seeds=seeds, ends=("Baseline", "Modern"))


def _both_protocols(run: RunRecipe, seeds: int) -> Study:
    base = _in_bf16(run("baseline"))
    protocols = {"Baseline": base.protocol, "Modern": run("modern").protocol}
    return Study(base, factors={"protocol": protocols}, seeds=seeds)


def _in_bf16(run: RunConfig) -> RunConfig:
    return dataclasses.replace(run, precision="bf16")


# What the paper claims, each with its numbers, its place in the text and the rule that judges it.
#
# Its numbers come from paper.py, ours from the runs: nothing here is typed in twice.


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


def _report_on_protocols() -> None:
    for name, claims in _claims().items():
        # Those with runs enough to ask beside what the paper says.
        more = name in ABLATIONS
        report_on(
            name,
            paper=s1.PAPER,
            published=s1.PUBLISHED[name],
            claims=(*claims, *(LENGTH_CLAIMS if more else ()), *(own_patch_questions(ABLATIONS[name]) if more else ())),
            tables=(*((length_table, own_patch_table) if more else ()), association_table),
            figures={
                **({"training-length": length_and_distance, "own-patch": every_head} if more else {}),
                "position-association": association_and_distance,
            },
            is_about_locality=True,
        )


_report_on_protocols()
