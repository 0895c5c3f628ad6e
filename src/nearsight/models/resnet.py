"""A ResNet-18 for small images (He et al. 2016, as trained on CIFAR): what S3 compares its transformers with.

It is timm's, with a stem that keeps a small image's pixels: one 3×3 convolution of stride 1 and no pooling. The last
stage of a 32-pixel image then has 4×4 places, not 1.
"""

from typing import Any

from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from timm.models.resnet import BasicBlock, ResNet
from torch import nn

from nearsight.errors import InputError, check_at_least
from nearsight.models.compact import COMPACT_IMAGES

RESNET_MODELS = ("compact_resnet18",)
"""Registered models that take this file's settings."""
_STRIDE_OF_USUAL_STEM = 4


class CompactResNet(ResNet):  # type: ignore[misc]  # timm carries no types
    """timm's ResNet of basic blocks with a stem for small images.

    Args:
        channels: of the stem and the first stage; every later stage has twice as many as the one before.
        layers: blocks of each stage.
    """

    def __init__(self, *, channels: int = 64, layers: tuple[int, ...] = (2, 2, 2, 2), **kwargs: Any) -> None:
        check_at_least("channels", channels, 2)
        if channels % 2:
            raise InputError(f"channels is {channels}, but must be even")
        super().__init__(
            BasicBlock,
            layers,
            channels=[channels * 2**stage for stage in range(len(layers))],
            # Only of a deep stem does timm let the width be chosen, which is twice this; the stem itself is replaced.
            stem_type="deep",
            stem_width=channels // 2,
            **kwargs,
        )
        placed = {name: kwargs[name] for name in ("device", "dtype") if name in kwargs}
        self.conv1 = nn.Conv2d(self.in_chans, channels, 3, padding=1, bias=False, **placed)
        nn.init.kaiming_normal_(self.conv1.weight, mode="fan_out", nonlinearity="relu")
        self.maxpool = nn.Identity()
        stem, *stages = self.feature_info
        stem["reduction"] = 1
        for stage in stages:
            stage["reduction"] //= _STRIDE_OF_USUAL_STEM


default_cfgs = generate_default_cfgs(
    {
        "compact_resnet18": {
            **COMPACT_IMAGES,
            "fixed_input_size": False,
            "pool_size": (4, 4),
            "first_conv": "conv1",
            "classifier": "fc",
        }
    }
)


@register_model  # type: ignore[untyped-decorator]
def compact_resnet18(pretrained: bool = False, *, img_size: Any = None, **kwargs: Any) -> CompactResNet:
    """ResNet-18 for images of about 32 pixels (11,220,132 parameters with 100 classes).

    `img_size` may be given, as to other models, and changes nothing: it takes images of any size.
    """
    model: CompactResNet = build_model_with_cfg(
        CompactResNet, "compact_resnet18", pretrained, **{"num_classes": 100, **kwargs}
    )
    return model
