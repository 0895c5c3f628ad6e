"""What of CutMix makes attention local: the cut, the mix, or the label?

Its box without the other image, the other image without a box, its label without its image and its image without its
label. All are applied with the same probability, the boxes drawn by the same law. CutMix, its relatives and Mixup draw
once per mini-batch, as in S1; what hides or shuffles without mixing draws for every image, as its authors do.
"""

from collections.abc import Mapping
from typing import Any

from nearsight.augment import CutFill, CutMix, CutOut, Mixup, RandomErasing, TileShuffle
from nearsight.recipes.compact import compact_cifar100
from nearsight.recipes.fixed import trained_for
from nearsight.recipes.registry import recipe
from nearsight.study import OFF, Study

_EPOCHS = 60
_P = 0.5
_MIXING: Mapping[str, Any] = {
    "None": OFF,
    # λ as CutMix draws it.
    "Mixup": Mixup(p=_P, alpha=1.0),
    "CutOut": CutOut(p=_P, size=16),
    "Random erasing": RandomErasing(p=_P),
    "Noise box": CutFill(p=_P, noise=1.0),
    "Noise box, mixed labels": CutFill(p=_P, noise=1.0, mix_labels=True),
    "Mean box": CutFill(p=_P, noise=0.0),
    "Mean box, mixed labels": CutFill(p=_P, noise=0.0, mix_labels=True),
    "CutMix, own labels": CutMix(p=_P, mix_labels=False),
    # The model's patches: boxes of whole tokens.
    "Patch-aligned CutMix": CutMix(p=_P, patch=4),
    "Feathered CutMix": CutMix(p=_P, feather=2.0),
    "Tile shuffle": TileShuffle(p=_P, tile=8),
    # Last, since figures compare the last level with the first.
    "CutMix": CutMix(p=_P),
}


@recipe("mixing-cifar100")
def mixing_cifar100(*, seeds: int = 2) -> Study:
    """Is it the cut, the mix, or the label? Thirteen ways to hide and mix (S1 §7, future work v)

    Run     nearsight study run mixing-cifar100
    Cost    26 cells of 60 epochs of 40,000 images (62 M); needs a GPU
    Result  the cut and the label, not the other image: see results/mixing-cifar100
    """
    return Study(trained_for(compact_cifar100("baseline"), _EPOCHS), factors={"mixing": _MIXING}, seeds=seeds)
