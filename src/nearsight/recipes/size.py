"""Does a larger model need more data, or more CutMix, to become local? (Raghu et al. 2021, S1 §1 and §7)

Heads keep their 24 dimensions, so a wider model has more of them. The cells are a cross, not a grid, since a model of
width 384 and depth 12 alone would cost as much as six of S1's: widths at S1's depth, depths at S1's width, each without
CutMix and with it; and the widths with more CutMix, and on a quarter of the images for as many steps.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from nearsight.augment import CutMix
from nearsight.recipes.registry import recipe
from nearsight.study import OFF, Study
from nearsight.train.recipes import compact_cifar100, trained_for

_EPOCHS = 60
_HEAD_WIDTH = 24
_DEPTHS = (8, 4, 12)
_PARTS = 4
_NUM_IMAGES = 50_000


def _wide(width: int) -> dict[str, int]:
    return {"model.width": width, "num_heads": width // _HEAD_WIDTH, "mlp_width": 2 * width}


_WIDTHS: Mapping[str, Any] = {"192": OFF, "96": _wide(96), "384": _wide(384)}


@recipe("size-cifar100")
def size_cifar100(*, seeds: int = 1) -> Study:
    """Does a larger model need more data or more CutMix to become local? Width, depth, images, CutMix (S1 §7)

    Run     nearsight study run size-cifar100
    Cost    19 cells of 60 epochs of 40,000 images, or of 240 epochs of 10,000 (45 M; in arithmetic as much as 30 cells
            of S1's size, 73 M), in eight stacks, since sizes and data differ; needs a GPU
    Result  CutMix helps at every size; no interaction is shown: see results/size-cifar100
    """
    base = trained_for(compact_cifar100("baseline"), _EPOCHS)
    # As many steps, and as many of them to warm up.
    longer = trained_for(base, _PARTS * _EPOCHS).protocol
    longer = dataclasses.replace(longer, warmup_epochs=_PARTS * base.protocol.warmup_epochs)
    schedule = {name: getattr(longer, name) for name in ("max_epochs", "warmup_epochs", "patience")}
    factors: dict[str, Any] = {
        "width": _WIDTHS,
        "depth": _DEPTHS,
        "images": {"all": OFF, "25 %": {"num_train": _NUM_IMAGES // _PARTS, **schedule}},
        "cutmix": {"off": OFF, "p=0.5": CutMix(p=0.5), "p=1": CutMix(p=1.0)},
    }
    study = Study(base, factors=factors, seeds=seeds, ends=("Baseline", "all"))
    models = [{"width": width, "images": images} for width in _WIDTHS for images in study.labels["images"]]
    models += [{"depth": depth} for depth in study.labels["depth"][1:]]
    cells = [{**model, "cutmix": level} for model in models for level in ("off", "p=0.5")]
    return study.only([*cells, *({"width": width, "cutmix": "p=1"} for width in _WIDTHS)])
