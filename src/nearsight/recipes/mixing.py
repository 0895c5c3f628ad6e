"""What of CutMix makes attention local: the cut, the mix, or the label?

Its box without the other image, the other image without a box, its label without its image and its image without its
label. All are applied with the same probability, the boxes drawn by the same law. CutMix, its relatives and Mixup draw
once per mini-batch, as in S1; what hides or shuffles without mixing draws for every image, as its authors do.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from nearsight.augment import CutFill, CutMix, CutOut, Mixup, RandomErasing, TileShuffle
from nearsight.recipes.compact import compact_cifar100
from nearsight.recipes.fixed import trained_for
from nearsight.recipes.registry import recipe
from nearsight.study import OFF, Study

_EPOCHS, _LONG_EPOCHS = 60, 200
_EPOCHS_BETWEEN = 10
_ASKED_AGAIN = ("None", "Mixup", "CutOut", "Mean box", "Mean box, mixed labels", "CutMix, own labels", "CutMix")


def _mixing(p: float) -> Mapping[str, Any]:
    return {
        "None": OFF,
        # λ as CutMix draws it.
        "Mixup": Mixup(p=p, alpha=1.0),
        "CutOut": CutOut(p=p, size=16),
        "Random erasing": RandomErasing(p=p),
        "Noise box": CutFill(p=p, noise=1.0),
        "Noise box, mixed labels": CutFill(p=p, noise=1.0, mix_labels=True),
        "Mean box": CutFill(p=p, noise=0.0),
        "Mean box, mixed labels": CutFill(p=p, noise=0.0, mix_labels=True),
        "CutMix, own labels": CutMix(p=p, mix_labels=False),
        # The model's patches: boxes of whole tokens.
        "Patch-aligned CutMix": CutMix(p=p, patch=4),
        "Feathered CutMix": CutMix(p=p, feather=2.0),
        "Tile shuffle": TileShuffle(p=p, tile=8),
        # Last, since figures compare the last level with the first.
        "CutMix": CutMix(p=p),
    }


@recipe("mixing-cifar100")
def mixing_cifar100(*, seeds: int = 2) -> Study:
    """Is it the cut, the mix, or the label? Thirteen ways to hide and mix (S1 §7, future work v)

    Run     nearsight study run mixing-cifar100
    Cost    26 cells of 60 epochs of 40,000 images (62 M); needs a GPU
    Result  the cut and the label, not the other image: see results/mixing-cifar100
    """
    return Study(trained_for(compact_cifar100("baseline"), _EPOCHS), factors={"mixing": _mixing(0.5)}, seeds=seeds)


@recipe("mixing-long-cifar100")
def mixing_long_cifar100(*, seeds: int = 6) -> Study:
    """Which part of CutMix, long enough: seven of the thirteen ways, in every batch (S1 §7, future work v)

    At 60 epochs CutMix has done a part of what it will do. Here all train for 200, and every head is measured on 512
    test images at the start and after every tenth epoch.

    Run     nearsight study run mixing-long-cifar100 --reuse results/mixing-long-cifar100
    Cost    42 cells of 200 epochs of 40,000 images (336 M; half of them are reused), and 0.5 M measured; needs a GPU
    Result  all six bring heads nearer, CutMix the most, the cut alone less: see results/mixing-long-cifar100
    """
    base = dataclasses.replace(trained_for(compact_cifar100("baseline"), _LONG_EPOCHS), measure_every=_EPOCHS_BETWEEN)
    levels = _mixing(1.0)
    return Study(base, factors={"mixing": {label: levels[label] for label in _ASKED_AGAIN}}, seeds=seeds)
