"""Which sizes of images a model takes, and how whole images are given to it.

A timm ViT takes every multiple of its patch: learned positions are resampled from those it was trained with (bicubic,
timm's `resample_abs_pos_embed`), and rotary ones are computed for the new grid. A Swin keeps its windows and pads the
last of them. Others may have one size; for them there is `square`.
"""

from typing import Any

from timm.layers import Format
from timm.models.swin_transformer import SwinTransformer
from torch import nn

from nearsight.errors import InputError
from nearsight.probe.segmentation.config import SegmentConfig


def size_step(model: nn.Module) -> int:
    """Sides of images have to be multiples of this: the side of a patch in the coarsest map of a timm model.

    1 where a model does not say; such models have one size as a rule.
    """
    infos: Any = getattr(model, "feature_info", None) or ()
    return max([1, *(int(info["reduction"]) for info in infos)])


def whole_size(size: tuple[int, int], config: SegmentConfig, step: int) -> tuple[int, int]:
    """(rows, columns) at which an image of these is tested: at the config's scale, each the nearest multiple of `step`.

    Squeezing by less than half a patch needs no padding, about which a model knows nothing.
    """
    if config.square:
        return config.crop, config.crop
    factor = min(config.longest / max(size), config.shortest / min(size))
    rows, columns = (max(step, round(side * factor / step) * step) for side in size)
    return rows, columns


def check_crop(config: SegmentConfig, step: int) -> None:
    if config.crop % step:
        near = -(-config.crop // step) * step
        raise InputError(f"--crop is {config.crop}, but the model takes multiples of {step}; use --crop {near}")


def take_other_sizes(model: nn.Module, config: SegmentConfig) -> None:
    """Make a timm model take images of the config's sizes. No weight changes, except for one that is resized for good
    because it takes one size at a time and `square` asks for one."""
    part: Any = model
    side = config.crop, config.crop
    patches: Any = getattr(model, "patch_embed", None)
    if isinstance(model, SwinTransformer):
        # Windows stay as they are; in stages that were one window, larger maps have several, and every other block
        # then shifts them.
        part.set_input_size(img_size=side, window_size=part.layers[0].blocks[0].window_size)
        patches.strict_img_size = False
        for stage in part.layers:
            for block in stage.blocks:
                block.dynamic_mask = True
    elif hasattr(model, "dynamic_img_size") and not config.square:
        part.dynamic_img_size = True
        patches.strict_img_size, patches.flatten, patches.output_fmt = False, False, Format.NHWC
    elif hasattr(model, "set_input_size") and tuple(patches.img_size) != side:
        part.set_input_size(img_size=side)
