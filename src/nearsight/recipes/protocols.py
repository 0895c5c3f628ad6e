"""S1's two protocols on each of its data sets (Table 1), and which part of the modern one does it (Table 2).

The paper takes its Modern protocol apart on CIFAR-100 alone; the other two data sets are the replication it asks for.

What the paper does not report is a field with a conventional value, and is marked assumed wherever it is shown. bf16 is
one of these: the runs are to take minutes on a GPU.
"""

import dataclasses

from nearsight.augment import Augmentation, AutoAugment, ColorJitter, CutMix
from nearsight.recipes.registry import recipe
from nearsight.study import OFF, Study
from nearsight.train import RunConfig
from nearsight.train.recipes import RunRecipe, compact_cifar10, compact_cifar100, compact_tiny_imagenet


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
