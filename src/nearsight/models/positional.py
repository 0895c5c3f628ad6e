"""A ViT whose attention comes from positions alone (S3 Def. 3.2): `A = (PᵀW_Q)(PᵀW_K)ᵀ`, `S = softmax(A / √d)`.

S3 is "Vision Transformers provably learn spatial structure" (arXiv 2210.09221). Which token attends to which is learned
and is then the same for every image; content is only what is passed on: values come from tokens to which no positions
were added. It is the compact ViT otherwise, with the same parameters under the same names, used in another way: a model
of one kind starts like one of the other, and takes its weights.

Where the definition leaves a choice:
- There is one P for all blocks, as it has one. Each block has its own W_Q and W_K, and each head its part of them.
- CLS, and registers, have positions of their own and attend and are attended to like any token.
- P meets W_Q and W_K as it is, without the norm that tokens pass on their way into a block.
- W_Q, W_K and W_V have biases where a ViT has them (`qkv_bias`). √d is that of a head.

Shape suffixes: B images, N tokens, C channels, H heads, d head size; 1 stands for all images.
"""

from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import Attention
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from torch import Tensor
from torch.overrides import has_torch_function

from nearsight.errors import InputError
from nearsight.models.compact import COMPACT_IMAGES, COMPACT_SETTINGS, CompactViT


class PositionalAttention(Attention):  # type: ignore[misc]  # timm carries no types
    """Queries and keys from the positions of the model it is part of, values from its input."""

    _owner: tuple["PositionalViT", ...] = ()

    def belong_to(self, model: "PositionalViT") -> None:
        """Take the positions of this model, whichever they are at the time: they may be replaced, as by resampling."""
        self._owner = (model,)  # in a tuple, where a module does not become a child

    def forward(self, x_BNC: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        (model,) = self._owner
        weight, bias = self.qkv.weight, self.qkv.bias
        values = 2 * self.attn_dim  # where those of queries and keys end
        value_BNC = F.linear(x_BNC, weight[values:], None if bias is None else bias[values:])
        both_1NC = F.linear(model.pos_embed, weight[:values], None if bias is None else bias[:values])
        # Weights of a tensor subclass are those of several models; what looks into these follows all functions.
        unwatched = self.training or (type(both_1NC) is not Tensor and not _functions_are_followed())
        drops = self.training and self.attn_drop.p > 0
        if unwatched and attn_mask is None and not is_causal and not drops:
            attended_BNC = self._weighed_once(both_1NC, value_BNC)
        else:
            attended_BNC = self._weighed_by_image(both_1NC, value_BNC, attn_mask, is_causal)
        output_BNC: Tensor = self.proj_drop(self.proj(self.norm(attended_BNC)))
        return output_BNC

    def _weighed_once(self, both_1NC: Tensor, value_BNC: Tensor) -> Tensor:
        """By one map for all images: per head one product with the values of the whole batch."""
        exact = torch.promote_types(both_1NC.dtype, torch.float32)
        query_1HNd, key_1HNd = (tokens.transpose(1, 2).to(exact) for tokens in self._queries_and_keys(both_1NC))
        with torch.autocast(value_BNC.device.type, enabled=False):  # logits as exact as those of fused attention
            map_1HNM = torch.softmax(torch.matmul(query_1HNd * self.scale, key_1HNd.transpose(-2, -1)), -1)
        value_BMHd = value_BNC.unflatten(-1, (self.num_heads, self.head_dim))
        return torch.einsum("hnm,bmhd->bnhd", map_1HNM[0].to(value_BNC.dtype), value_BMHd).flatten(2)

    def _weighed_by_image(
        self, both_1NC: Tensor, value_BNC: Tensor, attn_mask: Tensor | None, is_causal: bool
    ) -> Tensor:
        """By the map of each image, though all are equal: what looks into attention finds it in its usual place."""
        # Each token times 0 rather than `expand`, since it says which token a position belongs to: a trace
        # of where things come from on the image then sees where attention goes.
        query_BNHd, key_BNHd = self._queries_and_keys(both_1NC + value_BNC[..., :1] * 0)
        attended_BHNd = F.scaled_dot_product_attention(
            query_BNHd.transpose(1, 2),
            key_BNHd.transpose(1, 2),
            value_BNC.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2),
            attn_mask=attn_mask,
            dropout_p=self.attn_drop.p if self.training else 0.0,
            is_causal=is_causal,
        )
        attended_BNC: Tensor = attended_BHNd.transpose(1, 2).flatten(2)
        return attended_BNC

    def _queries_and_keys(self, both_BNC: Tensor) -> tuple[Tensor, Tensor]:
        """Each [B, N, H, d]; B may be 1, for all images."""
        both_BN2Hd = both_BNC.unflatten(-1, (2, self.num_heads, self.head_dim))
        return self.q_norm(both_BN2Hd[:, :, 0]), self.k_norm(both_BN2Hd[:, :, 1])


class PositionalViT(CompactViT):
    """The compact ViT with positional attention in every block.

    It takes images of one size; `set_input_size` resamples its positions for another.
    """

    def __init__(self, *, pos_embed: str = "learn", no_embed_class: bool = False, **kwargs: Any) -> None:
        if pos_embed != "learn":
            raise InputError(
                f"pos_embed is {pos_embed!r}, but positional attention is made of learned positions; without them use "
                "compact_vit"
            )
        if no_embed_class:
            raise InputError("no_embed_class leaves CLS without a position, and so without positional attention")
        for option, reason in _IMPOSSIBLE.items():
            if kwargs.pop(option, None):
                raise InputError(f"{option} does not go with positional attention: {reason}")
        super().__init__(attn_layer=PositionalAttention, **kwargs)
        for block in self.blocks:
            block.attn.belong_to(self)

    def _pos_embed(self, x_BNC: Tensor) -> Tensor:
        """All tokens of the images, without their positions."""
        others = [
            token.expand(x_BNC.shape[0], -1, -1) for token in (self.cls_token, self.reg_token) if token is not None
        ]
        tokens_BNC: Tensor = self.pos_drop(torch.cat([*others, x_BNC], dim=1))
        return tokens_BNC


_PLAIN = torch.empty(0)


def _functions_are_followed() -> bool:
    """Whether a mode sees what is done to any tensor, as that of the lens does."""
    return has_torch_function((_PLAIN,))


_IMPOSSIBLE = {
    "dynamic_img_size": "its positions are those of one grid; set_input_size resamples them",
    "patch_drop_rate": "a patch left out would leave its position behind",
    "gaug": "LocAt reads its Gaussians off the content of queries, which have none",
}
"""Options of a ViT that would not do what they say."""

default_cfgs = generate_default_cfgs({"compact_vit_positional": COMPACT_IMAGES})


@register_model  # type: ignore[untyped-decorator]
def compact_vit_positional(pretrained: bool = False, **kwargs: Any) -> PositionalViT:
    """S1's compact ViT with S3's positional attention (2,417,956 parameters with 100 classes, as many as without)."""
    model: PositionalViT = build_model_with_cfg(
        PositionalViT,
        "compact_vit_positional",
        pretrained,
        feature_cfg={"out_indices": 3, "feature_cls": "getter"},
        **{**COMPACT_SETTINGS, **kwargs},
    )
    return model
