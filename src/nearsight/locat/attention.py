"""timm's attentions with a local bias (S2 Eq. 4): the same modules with the same weights, and `gaug` beside them.

An attention becomes local by changing its class, so that whatever holds it, hooks it or resizes it goes on as before.

Shape suffixes: B images (or windows), H heads, N tokens, d head size, C channels.
"""

from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import Attention, AttentionRope, apply_rot_embed_cat
from timm.models.eva import EvaAttention
from timm.models.swin_transformer import WindowAttention
from torch import Tensor, nn

from nearsight.errors import InputError
from nearsight.locat.attend import attend
from nearsight.locat.gaussian import GaussianHeads
from nearsight.locat.grid import Grid, GridRecord


class _Local:
    """What they share."""

    gaug: GaussianHeads
    scale: float
    training: bool
    attn_drop: nn.Dropout

    def _attend(
        self,
        heads: tuple[Tensor, Tensor, Tensor],
        gaussians: tuple[Tensor, Tensor],
        grid: Grid,
        mask: Tensor | None,
    ) -> Tensor:
        """[B, N, H·d], from queries, keys and values and the variances and strengths of the queries."""
        variance_BHP2, strength_BHP = gaussians
        attended_BHNd = attend(
            *heads,
            0.5 / (variance_BHP2 + self.gaug.eps),
            strength_BHP,
            grid,
            scale=self.scale,
            kernel=self.gaug.config.kernel,
            largest_half_square=self.gaug.largest_half_square(grid),
            mask=mask,
            dropout_p=self.attn_drop.p if self.training else 0.0,
        )
        return attended_BHNd.transpose(1, 2).flatten(2)


class _LocalTokens(_Local):
    """Over all tokens of an image."""

    grids: GridRecord
    num_heads: int

    def _attended(self: Any, x: Tensor, rope: Tensor | None, attn_mask: Tensor | None, is_causal: bool) -> Tensor:
        """What the module returns."""
        if is_causal:
            raise InputError("attention with a local bias is between all patches of an image: it cannot be causal")
        gate = None if self.gate is None else self.gate(x).sigmoid()
        query, key, value = self._project(x)
        # Two heads and the attention read the queries: let them lie so that none needs a copy.
        query, key = self.q_norm(query).contiguous(), self.k_norm(key)
        grid = self.grids.grid(x.shape[1])
        gaussians = self.gaug(query, key, x, grid, self.scale)
        if rope is not None:
            query, key = (self._rotated(tokens, rope).type_as(value) for tokens in (query, key))
        attended_BNC = self.norm(self._attend((query, key, value), gaussians, grid, attn_mask))
        if gate is not None:
            attended_BNC = attended_BNC * gate
        output_BNC: Tensor = self.proj_drop(self.proj(attended_BNC))
        return output_BNC

    def _project(self: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, [B, H, N, d]."""
        if self.qkv is not None:
            return _unpacked(self.qkv(x), self.num_heads)
        query, key, value = (
            projection(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        if (groups := query.shape[1] // key.shape[1]) > 1:  # several query heads to one of keys and values
            key, value = (tokens.repeat_interleave(groups, dim=1) for tokens in (key, value))
        return query, key, value

    def _rotated(self: Any, tokens_BHNd: Tensor, rope: Tensor) -> Tensor:
        prefix, patches = tokens_BHNd.tensor_split([self.num_prefix_tokens], dim=2)
        return torch.cat([prefix, apply_rot_embed_cat(patches, rope, half=self.rotate_half)], dim=2)


class LocalAttention(_LocalTokens, Attention):  # type: ignore[misc]  # timm carries no types
    """That of `VisionTransformer`."""

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        return self._attended(x, None, attn_mask, is_causal)


class _LocalRotatedTokens(_LocalTokens):
    """Those whose queries and keys may be rotated."""

    def forward(
        self, x: Tensor, rope: Tensor | None = None, attn_mask: Tensor | None = None, is_causal: bool = False
    ) -> Tensor:
        return self._attended(x, rope, attn_mask, is_causal)


class LocalAttentionRope(_LocalRotatedTokens, AttentionRope):  # type: ignore[misc]
    """That of `Eva`, as RoPE-ViTs have it."""


class LocalEvaAttention(_LocalRotatedTokens, EvaAttention):  # type: ignore[misc]
    """That of `Eva` whose keys have no offsets."""

    def _project(self: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if self.qkv is None or self.q_bias is None:
            return super()._project(x)
        qkv_BNC = F.linear(x, self.qkv.weight, torch.cat([self.q_bias, self.k_bias, self.v_bias]))
        return _unpacked(qkv_BNC, self.num_heads)


class LocalWindowAttention(_Local, WindowAttention):  # type: ignore[misc]
    """That of `SwinTransformer`: the grid is the window, whose every token is a patch."""

    def forward(self: Any, x: Tensor, mask: Tensor | None = None) -> Tensor:
        heads = _unpacked(self.qkv(x), self.num_heads)
        rows, cols = self.window_size
        grid = Grid(rows, cols, 0)
        gaussians = self.gaug(heads[0], heads[1], x, grid, self.scale)
        bias = self._get_rel_pos_bias()
        if mask is not None:  # [windows, N, N], while x has the windows of all images
            bias = (bias + mask.unsqueeze(1)).repeat(len(x) // len(mask), 1, 1, 1)
        output_BNC: Tensor = self.proj_drop(self.proj(self._attend(heads, gaussians, grid, bias)))
        return output_BNC


def _unpacked(qkv_BNC: Tensor, num_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values, [B, H, N, d]."""
    query, key, value = qkv_BNC.unflatten(-1, (3, num_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
    return query, key, value


LOCAL_CLASSES: dict[type[nn.Module], type[nn.Module]] = {
    Attention: LocalAttention,
    AttentionRope: LocalAttentionRope,
    EvaAttention: LocalEvaAttention,
    WindowAttention: LocalWindowAttention,
}
