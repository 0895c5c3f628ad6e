"""The compact ViT of the protocol study (S1 §4.1), and the ResNet-18 for small images that S3 compares with.

The ViT has depth 8, width 192, 8 heads, MLP 384, about 2.4 M parameters. It is timm's `VisionTransformer` at that size,
so whatever works on a timm ViT works on it. Only the initialisation is ours, and it is a choice: the paper does not
report its own.
"""

import math
from typing import Any, get_args

import torch
from timm.layers import PatchEmbed, to_2tuple
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from timm.models.resnet import BasicBlock, ResNet
from timm.models.vision_transformer import VisionTransformer, checkpoint_filter_fn
from torch import Tensor, nn

from nearsight.errors import InputError, check_at_least, unknown_name
from nearsight.models.factory import Initialization
from nearsight.models.reach import Reach, limit_reach
from nearsight.models.zoo import pretrained_cfgs

COMPACT_SETTINGS = {
    "img_size": 32,
    "patch_size": 4,
    "embed_dim": 192,
    "depth": 8,
    "num_heads": 8,
    "mlp_ratio": 2.0,
    "num_classes": 100,
}
"""S1's model, for 32-pixel images in patches of 4."""
COMPACT_IMAGES = {
    "num_classes": 100,
    "input_size": (3, 32, 32),
    "fixed_input_size": True,
    "interpolation": "bicubic",
    "crop_pct": 1.0,
    "mean": (0.5071, 0.4865, 0.4409),  # CIFAR-100, its reference data set
    "std": (0.2673, 0.2564, 0.2762),
    "first_conv": "patch_embed.proj",
    "classifier": "head",
    "license": "apache-2.0",
}
"""Their configs for timm."""


class NormedPatchEmbed(PatchEmbed):  # type: ignore[misc]  # timm carries no types
    """A patch embedding between two layer norms, of a patch's pixels and of its token, as vit-pytorch has it."""

    def __init__(self, *, patch_size: Any, in_chans: int = 3, dynamic_img_pad: bool = False, **kwargs: Any) -> None:
        if dynamic_img_pad:
            raise InputError(
                "dynamic_img_pad does not go with embed_norm: patches of padding have nothing to normalise"
            )
        super().__init__(patch_size=patch_size, in_chans=in_chans, norm_layer=nn.LayerNorm, **kwargs)
        placed = {name: kwargs[name] for name in ("device", "dtype") if name in kwargs}
        self.norm_pixels = nn.LayerNorm(in_chans * math.prod(self.patch_size), **placed)

    def set_input_size(self, img_size: Any = None, patch_size: Any = None) -> None:
        if patch_size is not None and to_2tuple(patch_size) != self.patch_size:
            raise InputError("embed_norm is of patches of one size: another patch_size needs another model")
        super().set_input_size(img_size)

    def forward(self, images_BCHW: Tensor) -> Tensor:
        rows, cols = (side // patch for side, patch in zip(images_BCHW.shape[-2:], self.patch_size, strict=True))
        by_patch = images_BCHW.unflatten(3, (cols, -1)).unflatten(2, (rows, -1)).permute(0, 2, 4, 1, 3, 5)
        normal = self.norm_pixels(by_patch.flatten(3).flatten(1, 2)).unflatten(1, (rows, cols))
        whole = normal.unflatten(3, by_patch.shape[3:]).permute(0, 3, 1, 4, 2, 5).flatten(4).flatten(2, 3)
        tokens: Tensor = super().forward(whole)
        return tokens


class CompactViT(VisionTransformer):  # type: ignore[misc]  # timm carries no types
    """A Pre-LN ViT with learned positions and a CLS head, without dropout, on any grid.

    Args:
        init: "trunc_normal" draws every projection from a normal of deviation 0.02 with zero biases (the ViT and DeiT
            habit); "pytorch" keeps each layer's PyTorch default (uniform, scaled by fan-in).
        position_std: deviation of the normal from which positions and the CLS and register tokens are drawn.
        qk_std: deviation of the normal from which the weights of queries and keys are drawn; None: as `init`
            says. All others start as they do without it.
        head_size: channels of a head; None: the width over the number of heads.
        embed_norm: layer norms before and after the patch embedding, as in vit-pytorch.
        reach: how many patches far a patch attends, in all blocks or in each (`nearsight.models.reach`).
    """

    def __init__(
        self,
        *,
        init: Initialization = "trunc_normal",
        position_std: float = 0.02,
        qk_std: float | None = None,
        head_size: int | None = None,
        embed_norm: bool = False,
        reach: float | Reach = (),
        **kwargs: Any,
    ) -> None:
        _check_shape(**kwargs)
        if init not in get_args(Initialization):
            raise unknown_name("initialisation", init, get_args(Initialization))
        check_at_least("position_std", position_std, 0.0)
        if qk_std is not None:
            check_at_least("qk_std", qk_std, 0.0)
        if embed_norm:
            kwargs["embed_layer"] = NormedPatchEmbed
        super().__init__(weight_init="skip", **kwargs)
        if head_size is not None:
            check_at_least("head_size", head_size, 1)
            for block in self.blocks:
                _resize_heads(block.attn, head_size)
        self._drawn = init, position_std, qk_std
        self.init_weights()
        limit_reach(self, reach)

    def init_weights(self, mode: str = "", needs_reset: bool = True) -> None:
        """Draw all weights again; timm's modes are not ours, and `init` alone says how."""
        init, position_std, qk_std = self._drawn
        draw_weights(self, init)
        for learned in (self.cls_token, self.reg_token, self.pos_embed):
            if learned is not None:
                nn.init.normal_(learned, std=position_std)
        if qk_std is not None:  # last, so that it changes no other weight
            for block in self.blocks:
                nn.init.normal_(block.attn.qkv.weight[: 2 * block.attn.attn_dim], std=qk_std)


def _resize_heads(attention: Any, head_size: int) -> None:
    """Give an attention heads of another size: timm's own can have them, but its blocks do not pass that on."""
    if not all(isinstance(norm, nn.Identity) for norm in (attention.q_norm, attention.k_norm, attention.norm)):
        raise InputError("head_size does not go with qk_norm or scale_attn_norm, whose norms are of the usual size")
    width, inner = attention.qkv.in_features, attention.num_heads * head_size
    biases = (attention.qkv.bias is not None, attention.proj.bias is not None)
    place = {"device": attention.qkv.weight.device, "dtype": attention.qkv.weight.dtype}
    attention.head_dim, attention.attn_dim, attention.scale = head_size, inner, head_size**-0.5
    attention.qkv = nn.Linear(width, 3 * inner, bias=biases[0], **place)
    attention.proj = nn.Linear(inner, width, bias=biases[1], **place)


@torch.no_grad()
def draw_weights(module: nn.Module, init: Initialization) -> None:
    """Fresh weights for every projection in a module."""
    for part in module.modules():
        if isinstance(part, nn.Linear | nn.Conv2d):
            if init == "pytorch":
                part.reset_parameters()
                continue
            nn.init.trunc_normal_(part.weight, std=0.02)
            if part.bias is not None:
                nn.init.zeros_(part.bias)


def _check_shape(
    *,
    img_size: int | tuple[int, int],
    patch_size: int | tuple[int, int],
    embed_dim: int,
    num_heads: int,
    depth: int,
    **_: Any,
) -> None:
    for name, value in (("embed_dim", embed_dim), ("num_heads", num_heads), ("depth", depth)):
        check_at_least(name, value, 1)
    for side, patch in zip(to_2tuple(img_size), to_2tuple(patch_size), strict=True):
        check_at_least("patch_size", patch, 1)
        if side % patch:
            raise InputError(f"patch size {patch} does not divide an image side of {side} pixels")
    if embed_dim % num_heads:
        raise InputError(f"{num_heads} heads do not divide a width of {embed_dim}")


_OF_RESNETS = {"fixed_input_size": False, "pool_size": (4, 4), "first_conv": "conv1", "classifier": "fc"}
default_cfgs = generate_default_cfgs(
    {**pretrained_cfgs("compact_vit", COMPACT_IMAGES), "compact_resnet18": {**COMPACT_IMAGES, **_OF_RESNETS}}
)


@register_model  # type: ignore[untyped-decorator]
def compact_vit(pretrained: bool = False, **kwargs: Any) -> VisionTransformer:
    """S1's compact ViT for 32-pixel images in patches of 4 (2,417,956 parameters with 100 classes)."""
    return build_model_with_cfg(
        CompactViT,
        "compact_vit",
        pretrained,
        pretrained_filter_fn=checkpoint_filter_fn,
        feature_cfg={"out_indices": 3, "feature_cls": "getter"},
        **{**COMPACT_SETTINGS, **kwargs},
    )


class CompactResNet(ResNet):  # type: ignore[misc]
    """timm's ResNet of basic blocks (He et al. 2016) with a stem that keeps a small image's pixels: one 3×3 convolution
    of stride 1 and no pooling. The last stage of a 32-pixel image then has 4×4 places, not 1.

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
            stage["reduction"] //= 4  # the stride of the usual stem


@register_model  # type: ignore[untyped-decorator]
def compact_resnet18(pretrained: bool = False, *, img_size: Any = None, **kwargs: Any) -> CompactResNet:
    """ResNet-18 for images of about 32 pixels (11,220,132 parameters with 100 classes).

    `img_size` may be given, as to other models, and changes nothing: it takes images of any size.
    """
    model: CompactResNet = build_model_with_cfg(
        CompactResNet, "compact_resnet18", pretrained, **{"num_classes": 100, **kwargs}
    )
    return model
