"""Which sizes of images a model takes.

A timm ViT takes every multiple of its patch: learned positions are resampled from those it was trained with (bicubic,
timm's `resample_abs_pos_embed`), and rotary ones are computed for the new grid. A Swin keeps its windows and pads the
last of them. Others may have one size.
"""

import copy
from dataclasses import replace
from typing import Any

import torch
from timm.layers import Format
from timm.models.swin_transformer import SwinTransformer
from torch import nn

from nearsight.errors import InputError
from nearsight.models.sourced import one_line
from nearsight.probe.features import FeatureSpec, reading
from nearsight.probe.frozen import FrozenModel


def size_step(model: nn.Module) -> int:
    """Sides of images have to be multiples of this: the side of a patch in the coarsest map of a timm model.

    1 where a model does not say; such models have one size as a rule.
    """
    infos: Any = getattr(model, "feature_info", None) or ()
    return max([1, *(int(info["reduction"]) for info in infos)])


def check_side(option: str, side: int, step: int) -> None:
    """Complain of a side that is no multiple."""
    if side % step:
        near = -(-side // step) * step
        raise InputError(f"{option} is {side}, but the model takes multiples of {step}; use {option} {near}")


def take_other_sizes(model: nn.Module, side: int, *, only: bool = False) -> None:
    """Make a timm model take square images of this side, and others too unless it is the `only` one. No weight changes,
    except for one that is resized for good because it takes one size at a time and one is asked for."""
    part: Any = model
    patches: Any = getattr(model, "patch_embed", None)
    if isinstance(model, SwinTransformer):
        # Windows stay as they are; in stages that were one window, larger maps have several, and every other block
        # then shifts them.
        part.set_input_size(img_size=(side, side), window_size=part.layers[0].blocks[0].window_size)
        patches.strict_img_size = False
        for stage in part.layers:
            for block in stage.blocks:
                block.dynamic_mask = True
    elif hasattr(model, "dynamic_img_size") and not only:
        part.dynamic_img_size = True
        patches.strict_img_size, patches.flatten, patches.output_fmt = False, False, Format.NHWC
    elif hasattr(model, "set_input_size") and tuple(patches.img_size) != (side, side):
        part.set_input_size(img_size=(side, side))


FAILURES = (AssertionError, IndexError, KeyError, RuntimeError, TypeError, ValueError)
"""What models raise that do not take a size."""


def at_size(frozen: FrozenModel, side: int, spec: FeatureSpec, *, option: str, device: torch.device) -> FrozenModel:
    """The same model for square images of this side; the one that is given stays as it is.

    Args:
        spec: features that are seen to be there.
        option: what asked for the size, for complaints.
    """
    check_side(option, side, size_step(frozen.model))
    model = copy.deepcopy(frozen.model)
    try:
        take_other_sizes(model, side)
        with reading(model, spec, image_size=(side, side), device=device) as reader:
            reader(torch.zeros(1, 3, side, side))
    except FAILURES as error:
        raise InputError(
            f"{frozen.label} cannot be read at {side}×{side} pixels: {one_line(error)}; if it takes one size only, "
            f"leave out {option}"
        ) from error
    return replace(frozen, model=model, preparation=replace(frozen.preparation, size=(side, side)))
