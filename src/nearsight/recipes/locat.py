"""S2's ablations at the size of S1's compact ViT, where each takes minutes; and what CutMix does beside LocAt.

The augmentations and the schedule's form are S2's; model, batch, learning rate and crop are S1's (assumed: S2 has no
model of this size). All epochs are trained, without early stopping, so that every cell sees the same images.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from nearsight.augment import CutMix, RandomCrop
from nearsight.recipes.registry import recipe
from nearsight.study import OFF, Study
from nearsight.train import RunConfig, locat
from nearsight.train.recipes import compact_cifar100, compact_tiny_imagenet, trained_for

_EPOCHS = 100
_TINY_EPOCHS = 40  # of twice as many images
_FACTORIAL_EPOCHS = 50
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
    base = _trained_as_in_s2(compact_cifar100("baseline"), _EPOCHS)
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
    base = _trained_as_in_s2(compact_tiny_imagenet("baseline"), _TINY_EPOCHS)
    return Study(base, factors={"model": _CORE}, seeds=seeds)


@recipe("locat-cutmix-cifar100")
def locat_cutmix_cifar100(*, seeds: int = 3) -> Study:
    """Does CutMix still make attention local where LocAt already does? CutMix × GAug × PRR (S1 meets S2)

    Run     nearsight study run locat-cutmix-cifar100
    Cost    24 cells of at most 50 epochs of 40,000 images (48 M); needs a GPU
    Result  see results/locat-cutmix-cifar100
    """
    base = trained_for(compact_cifar100("baseline"), _FACTORIAL_EPOCHS)
    factors: dict[str, Any] = {
        "cutmix": (OFF, CutMix(p=0.5)),
        "GAug": {"off": OFF, "on": {"gaug": True}},
        "PRR": {"off": OFF, "on": {"prr": True}},
    }
    return Study(base, factors=factors, seeds=seeds, ends=("Baseline", "CutMix + LocAt"))


def _trained_as_in_s2(run: RunConfig, epochs: int) -> RunConfig:
    """With S2's augmentations, clipping and schedule, whose warm-up is a fifth of the epochs as on its small sets.

    Not with its stochastic depth: S2 drops less in smaller models, and this one is smaller than any of them.
    """
    theirs = locat().without("resizedcrop").with_(RandomCrop())
    protocol = dataclasses.replace(
        theirs, lr=run.protocol.lr, batch_size=run.protocol.batch_size, warmup_epochs=epochs // 5, drop_path=0.0
    )
    return trained_for(dataclasses.replace(run, protocol=protocol), epochs)
