"""The head that is trained on frozen features, and its learning rate (S2 App. A).

Shape suffixes: B images, C channels of the features, K classes, h rows and w columns of patches, H and W of pixels.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nearsight.probe.segmentation.config import SegmentConfig

_START_DIVISOR, _END_DIVISOR = 25.0, 1e4
"""What the one-cycle schedule starts at, as part of its peak, and ends at, as part of its start; PyTorch's defaults."""


class SegmentationHead(nn.Sequential):
    """1×1 convolution, GroupNorm over all channels, GELU, 1×1 classifier: a class for each patch."""

    def __init__(self, num_features: int, num_classes: int, width: int) -> None:
        super().__init__(
            nn.Conv2d(num_features, width, kernel_size=1),
            nn.GroupNorm(1, width),
            nn.GELU(),
            nn.Conv2d(width, num_classes, kernel_size=1),
        )


def new_head(num_features: int, num_classes: int, config: SegmentConfig) -> SegmentationHead:
    """A head with the first weights of the config's seed, whatever the global generator is at."""
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(config.seed)
        return SegmentationHead(num_features, num_classes, config.width)


def pixel_logits(head: nn.Module, features_BChw: Tensor, size: tuple[int, int]) -> Tensor:
    """[B, K, H, W]: each pixel's logits lie between those of the patches around it."""
    return F.interpolate(head(features_BChw), size=size, mode="bilinear", align_corners=False)


def pixel_loss(logits_BKHW: Tensor, masks_BHW: Tensor, ignore_index: int, num_pixels: Tensor) -> Tensor:
    """Cross-entropy of the pixels with a class, as their part of the mean over `num_pixels` of them.

    Where there is none it is 0, and not the NaN of a mean of nothing.
    """
    total = F.cross_entropy(logits_BKHW, masks_BHW, ignore_index=ignore_index, reduction="sum")
    return total / num_pixels.clamp(min=1)


def one_cycle(step: int, config: SegmentConfig) -> float:
    """The learning rate of a step (from 0): up to the peak and down again in two straight lines.

    `torch.optim.lr_scheduler.OneCycleLR` with its own constants, as a function of the step alone.
    """
    peak_at, last = config.rising * config.iterations - 1, config.iterations - 1
    start = config.lr / _START_DIVISOR
    if step <= peak_at:
        return start + (config.lr - start) * (step / peak_at if peak_at > 0 else 1.0)
    done = (step - peak_at) / (last - peak_at) if last > peak_at else 1.0
    return config.lr + (start / _END_DIVISOR - config.lr) * done
