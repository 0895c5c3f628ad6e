"""A model whose features are probed: how its images are prepared, what identifies it, and which sizes it takes.

A timm ViT takes every multiple of its patch: learned positions are resampled from those it was trained with (bicubic,
timm's `resample_abs_pos_embed`), and rotary ones are computed for the new grid. A Swin keeps its windows and pads the
last of them. Others may have one size.

Shape suffixes: N images, C channels, H rows, W columns.
"""

import copy
import hashlib
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cached_property
from math import floor
from typing import Any

import torch
from timm.layers import Format
from timm.models.swin_transformer import SwinTransformer
from torch import Tensor, nn

from nearsight.augment import grey_levels, normalize
from nearsight.errors import InputError
from nearsight.models.sourced import one_line
from nearsight.probe.features import reading
from nearsight.probe.settings import FeatureSpec


@dataclass(frozen=True, kw_only=True)
class Preparation:
    """What is done to uint8 images before a model sees them; all of it identifies cached features."""

    size: tuple[int, int]
    """Rows and columns that the model takes."""
    mean: tuple[float, ...]
    """Per channel, of images in [0, 1]."""
    std: tuple[float, ...]
    """The same."""
    crop_pct: float = 1.0
    """Share of the resized image's side that is cut out of its centre. Images of the right size are left alone."""

    def __post_init__(self) -> None:
        if not 0.0 < self.crop_pct <= 1.0:
            raise InputError(f"crop_pct is {self.crop_pct}, but must be greater than 0 and at most 1")

    def __call__(self, images_NCHW: Tensor, device: torch.device) -> Tensor:
        """Normalised float32 on the device, from uint8."""
        from torchvision.transforms.v2.functional import center_crop  # here: the import takes a quarter of a second

        images = images_NCHW.to(device)
        if tuple(images.shape[-2:]) != self.size:
            # As timm does it: the short side is resized, and the centre is cut out.
            target = [floor(side / self.crop_pct) for side in self.size]
            square = target[0] == target[1]
            images = _resized(images, target[:1] if square else target)
            images = center_crop(images, list(self.size))
        return self.normalized(images)

    def whole(self, image_CHW: Tensor, device: torch.device) -> Tensor:
        """A whole image, squeezed to the size the model takes, as a batch of one: nothing of it is cut off."""
        return self.normalized(_resized(image_CHW.to(device), list(self.size)).unsqueeze(0))

    def normalized(self, images_NCHW: Tensor) -> Tensor:
        device = images_NCHW.device
        return normalize(images_NCHW, grey_levels(self.mean, device), grey_levels(self.std, device))


def _resized(images: Tensor, size: list[int]) -> Tensor:
    from torchvision.transforms.v2.functional import InterpolationMode, resize  # here for the same reason

    resized: Tensor = resize(images, size, interpolation=InterpolationMode.BICUBIC, antialias=True)
    return resized


# Neither says anything about what an evaluated model computes.
_NOT_SETTINGS = ("training", "fused_attn")


def weights_hash(model: nn.Module) -> str:
    """The sha256 of a model's class and of all its weights and buffers by name."""
    digest = hashlib.sha256(type(model).__qualname__.encode())
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name}:{tensor.dtype}:{list(tensor.shape)};".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def model_identity(model: nn.Module) -> str:
    """A digest of a model's weights and of its modules' kinds and settings: the number of heads and the kernel of a
    local attention change what a model computes, but no weight. Two models of one digest compute the same, as far as
    these show."""
    digest = hashlib.sha256(weights_hash(model).encode())
    for name, module in sorted(model.named_modules()):
        digest.update(f"{name}:{type(module).__qualname__};".encode())
        for setting, value in sorted(vars(module).items()):
            if _is_simple(value) and not setting.startswith("_") and setting not in _NOT_SETTINGS:
                digest.update(f"{setting}={value!r};".encode())
    return digest.hexdigest()


def _is_simple(value: object) -> bool:
    """Whether it reads the same in every process."""
    if isinstance(value, tuple):
        return all(map(_is_simple, value))
    if is_dataclass(value) and not isinstance(value, type):
        of_fields = [getattr(value, field.name) for field in fields(value)]
        return all(each is None or _is_simple(each) for each in of_fields)
    return isinstance(value, bool | int | float | str)


@dataclass(frozen=True, kw_only=True)
class FrozenModel:
    """A model, and how its images are prepared."""

    label: str
    """Its name for people."""
    model: nn.Module
    preparation: Preparation
    """Of its images: which size it was made for, and how their channels are normalised."""

    @cached_property
    def identity(self) -> str:
        """Its `model_identity`, computed once: all its weights are read for that."""
        return model_identity(self.model)


def size_step(model: nn.Module) -> int:
    """Sides of images have to be multiples of this: the side of a patch in the coarsest map of a timm model.

    1 where a model does not say; such models have one size as a rule.
    """
    infos: Any = getattr(model, "feature_info", None) or ()
    return max([1, *(int(info["reduction"]) for info in infos)])


def check_side(option: str, side: int, step: int) -> None:
    """Refuse a side that is not a multiple."""
    if side % step:
        near = -(-side // step) * step
        raise InputError(f"{option} is {side}, but the model takes multiples of {step}; use {option} {near}")


def take_other_sizes(model: nn.Module, side: int, *, only: bool = False) -> None:
    """Make a timm model take square images of this side, and others too unless it is the `only` one. No weight changes,
    except in a model that takes one size at a time, whose positions are then resized for good."""
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
"""Errors of models that do not take a size."""


def at_size(frozen: FrozenModel, side: int, spec: FeatureSpec, *, option: str, device: torch.device) -> FrozenModel:
    """The same model for square images of this side; the one that is given stays as it is.

    Args:
        spec: features that are seen to be there.
        option: the option that set the size, for error messages.
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
