"""S3 on real images: do networks mind where pixels are, and does attention need to see more than positions?

How S3 trained its networks is assumed. Here all networks of a study are trained alike, for a fixed number of epochs
that fits into minutes on a GPU, so that accuracies lie below the paper's: what is compared is how they change. Networks
of different shapes do not train as one stack, but their seeds do: hence `--stack-by all`.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from nearsight.recipes.registry import recipe
from nearsight.study import OFF, Study
from nearsight.train import DataConfig, RunConfig, modern
from nearsight.train.recipes import compact_cifar10, compact_cifar100, trained_for

_PERMUTED_EPOCHS = 12
_POSITIONAL_EPOCHS = 60
_POSITIONAL: Mapping[str, Any] = {"model.name": "compact_vit_positional"}


@recipe("permuted-cifar100")
def permuted_cifar100(*, seeds: int = 2) -> Study:
    """Which networks mind that the tiles of all images are shuffled in one fixed way? (S3, permuted CIFAR-100)

    The paper: a ViT with patches of 2 pixels stays near 64 %, a ResNet falls from 80 % to 57 %. To a ViT, 4×4 tiles are
    no change: its patches come in another order. 32×32 tiles are single pixels, which also takes its patches apart.

    Run     nearsight study run permuted-cifar100 --stack-by all
    Cost    18 cells of at most 12 epochs of 40,000 images (8 M); needs a GPU
    Result  a ViT minds pixels, not tiles; a ResNet both, more: see results/spatial-structure/permuted-cifar100
    """
    # Larger batches than S1's: patches of 2 are four times as many, and convolutions run one cell at a time.
    protocol = dataclasses.replace(compact_cifar100("baseline").protocol, batch_size=256, warmup_epochs=2)
    base = dataclasses.replace(compact_cifar100("baseline"), protocol=protocol, num_measured=1000)
    factors: dict[str, Any] = {
        "model": {
            "ViT": {"patch_size": 2},
            "Positional ViT": {"patch_size": 2, **_POSITIONAL},
            "ResNet-18": {"model.name": "compact_resnet18"},
        },
        "tiles": {"1×1": OFF, "4×4": {"shuffled_tiles": 4}, "32×32": {"shuffled_tiles": 32}},
    }
    ends = ("ViT", "ResNet-18, tiles 32×32")
    return Study(trained_for(base, _PERMUTED_EPOCHS), factors=factors, seeds=seeds, ends=ends)


@recipe("positional-cifar10")
def positional_cifar10(*, seeds: int = 5) -> Study:
    """Is attention from positions alone as good on CIFAR-10? (S3, positional attention; the paper: 90.2 and 90.5 %)

    Run     nearsight study run positional-cifar10 --stack-by all
    Cost    10 cells of at most 60 epochs of 40,000 images (24 M); needs a GPU
    Result  see results/spatial-structure/positional-cifar10
    """
    return _against_positional(compact_cifar10("modern"), seeds)


@recipe("positional-cifar100")
def positional_cifar100(*, seeds: int = 5) -> Study:
    """Is attention from positions alone as good on CIFAR-100? (S3, positional attention; the paper: 68 and 68 %)

    Run     nearsight study run positional-cifar100 --stack-by all
    Cost    10 cells of at most 60 epochs of 40,000 images (24 M); needs a GPU
    Result  see results/spatial-structure/positional-cifar100
    """
    return _against_positional(compact_cifar100("modern"), seeds)


@recipe("positional-svhn")
def positional_svhn(*, seeds: int = 5) -> Study:
    """Is attention from positions alone as good on SVHN? (S3, positional attention; the paper: 98.2 and 97.3 %)

    Without flips, since digits do not come mirrored, and without AutoAugment, whose policy is that of CIFAR.

    Run     nearsight study run positional-svhn --stack-by all
    Cost    10 cells of at most 60 epochs of 58,606 images (35 M); needs a GPU
    Result  not run yet
    """
    protocol = modern().without("flip").without("autoaugment")
    return _against_positional(RunConfig(data=DataConfig(name="svhn"), protocol=protocol), seeds)


def _against_positional(run: RunConfig, seeds: int) -> Study:
    models = {"ViT": OFF, "Positional ViT": _POSITIONAL}
    return Study(trained_for(run, _POSITIONAL_EPOCHS), factors={"model": models}, seeds=seeds)
