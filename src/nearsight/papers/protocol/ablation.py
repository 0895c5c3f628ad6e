"""S1's two protocols on each of its data sets (Table 1), and which part of Modern makes attention local (Table 2).

The paper takes its Modern protocol apart on CIFAR-100 alone; the other two data sets are the replication it asks for.

What the paper does not report is a field with a conventional value, and is marked assumed wherever it is shown. bf16 is
one of these: the runs are to take minutes on a GPU.
"""

import dataclasses
from collections.abc import Mapping

from nearsight.augment import Augmentation, AutoAugment, ColorJitter, CutMix
from nearsight.papers.protocol import numbers as s1
from nearsight.papers.protocol.conditions import of_ablation, of_protocols
from nearsight.papers.protocol.heads import ON_ALL_DATA_SETS, ON_CIFAR100
from nearsight.papers.protocol.links import LENGTH_QUESTIONS, length_and_distance, length_table
from nearsight.papers.protocol.own_patch import every_head, own_patch_questions, own_patch_table
from nearsight.papers.protocol.own_patch_model import entropy_by_distance, own_patch_model
from nearsight.papers.structure.learned_positions import association_and_distance, association_table
from nearsight.report.claims import Claim
from nearsight.report.studies import report_on
from nearsight.study import OFF, Study
from nearsight.study.recipes import recipe
from nearsight.train import RunConfig
from nearsight.train.recipes import RunRecipe, compact_cifar10, compact_cifar100, compact_tiny_imagenet


@recipe("ablation-cifar100")
def ablation_cifar100(*, seeds: int = 3) -> Study:
    """Which part of the Modern protocol makes attention local? CutMix, AutoAugment, LabelSmoothing (S1, Table 2)

    Run     nearsight study run ablation-cifar100
    Cost    24 cells of at most 600 epochs of 40,000 images (576 M; early stopping made it 131 M); 28 minutes of an H200
    Result  accuracies reproduce, locality in direction at most, and far smaller: see results/ablation-cifar100
    """
    return ablation(_in_bf16(compact_cifar100("baseline")), colour=AutoAugment(), seeds=seeds)


@recipe("ablation-cifar10")
def ablation_cifar10(*, seeds: int = 1) -> Study:
    """Is it CutMix on CIFAR-10 too? The eight conditions of Table 2 on another data set (S1 §7, future work ii)

    Run     nearsight study run ablation-cifar10
    Cost    8 cells of at most 600 epochs of 40,000 images (192 M; early stopping made it 42 M); needs a GPU
    Result  one seed: CutMix does not separate the conditions by min MAD, see results/ablation-cifar10
    """
    return ablation(_in_bf16(compact_cifar10("baseline")), colour=AutoAugment(), seeds=seeds)


@recipe("ablation-tiny-imagenet")
def ablation_tiny_imagenet(*, seeds: int = 1) -> Study:
    """Is it CutMix on Tiny-ImageNet too? ColorJitter instead of AutoAugment (S1 §7, future work ii)

    Run     nearsight study run ablation-tiny-imagenet
    Cost    8 cells of at most 400 epochs of 80,000 images (256 M; early stopping made it 44 M); needs a GPU
    Result  one seed: CutMix separates the conditions, barely: see results/ablation-tiny-imagenet
    """
    return ablation(_in_bf16(compact_tiny_imagenet("baseline")), colour=ColorJitter(), seeds=seeds)


@recipe("protocol-cifar10")
def protocol_cifar10(*, seeds: int = 3) -> Study:
    """Accuracy and locality by the Baseline and the Modern protocol on CIFAR-10 (S1, Table 1)

    Run     nearsight study run protocol-cifar10
    Cost    6 cells of at most 600 epochs of 40,000 images (144 M); needs a GPU
    Result  two seeds: more accurate and more local, both in direction, see results/protocol-cifar10
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
    Result  two seeds: accuracy reproduces, locality in direction, see results/protocol-tiny-imagenet
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


ABLATIONS: Mapping[str, str] = {
    "ablation-cifar100": s1.AUTOAUGMENT,
    "ablation-fitted-cifar100": s1.AUTOAUGMENT,
    "ablation-cifar10": s1.AUTOAUGMENT,
    "ablation-tiny-imagenet": s1.COLORJITTER,
}
"""The studies that take the Modern protocol apart, with what each has for AutoAugment."""


def _report_on(name: str) -> None:
    is_seen = s1.PUBLISHED[name].dataset == "CIFAR-100"
    claims: list[Claim] = [*of_protocols(name), *(ON_CIFAR100 if is_seen else ON_ALL_DATA_SETS)]
    tables, figures = [association_table], {"position-association": association_and_distance}
    if name in ABLATIONS:
        of_parts = of_ablation(name, ABLATIONS[name])
        if not is_seen:  # the paper's ablation is on CIFAR-100
            of_parts = [dataclasses.replace(claim, source=f"{claim.source}, there on CIFAR-100") for claim in of_parts]
        # These have enough runs for questions of our own.
        claims += [*of_parts, *LENGTH_QUESTIONS, *own_patch_questions(ABLATIONS[name])]
        tables = [length_table, own_patch_table, own_patch_model, *tables]
        own_patch = {"own-patch": every_head, "own-patch-model": entropy_by_distance}
        figures = {"training-length": length_and_distance, **own_patch, **figures}
    report_on(
        name,
        paper=s1.PAPER,
        published=s1.PUBLISHED[name],
        claims=claims,
        tables=tables,
        figures=figures,
        is_about_locality=True,
    )


for _name in s1.PUBLISHED:
    _report_on(_name)
