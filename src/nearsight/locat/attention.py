"""timm's attentions with a local bias (S2 Eq. 4): the same modules with the same weights, and `gaug` beside them.

An attention becomes local by changing its class, so that whatever holds it, hooks it or resizes it goes on as before.

Shape suffixes: B images (or windows), H heads, N tokens, d head size, C channels.
"""

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import Attention, AttentionRope, apply_rot_embed_cat
from timm.models.eva import EvaAttention
from timm.models.gcvit import WindowAttentionGlobal
from timm.models.swin_transformer import WindowAttention
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function

from nearsight.errors import InputError
from nearsight.locat.attend import attend
from nearsight.locat.gaussian import GaussianHeads, Grid

_MARK = "_nearsight_grid"
"""Attribute of tokens that have come to a block."""


class GridRecord:
    """Which grid a number of tokens makes up. An attention sees only how many there are; images come in all shapes.

    A hook on the patch embedding notes it whenever images are cut into patches. Under activation checkpointing a block
    runs again after other images have passed, so the first time the tokens that came to it are marked with their grid.
    """

    def __init__(self, patch_embed: Any, blocks: Iterable[nn.Module], num_prefix: int) -> None:
        self._num_prefix = num_prefix
        rows, cols = patch_embed.grid_size
        # Known from the start, so that code compiled for this grid does not see it come.
        self._by_size: dict[int, tuple[int, int]] = {rows * cols: (rows, cols)}
        self._ambiguous: set[int] = set()
        patch_embed.register_forward_pre_hook(self._note)
        for block in dict.fromkeys(blocks):
            block.register_forward_pre_hook(self._recall)

    def _note(self, patch_embed: Any, inputs: tuple[Tensor, ...]) -> None:
        height, width = map(int, inputs[0].shape[-2:])  # while a model is traced they are tensors
        sides = patch_embed.dynamic_feat_size((height, width))
        size = sides[0] * sides[1]
        if self._by_size.get(size, sides) != sides and not torch.compiler.is_compiling():
            self._ambiguous.add(size)
        self._by_size[size] = sides

    def _recall(self, block: nn.Module, inputs: tuple[Any, ...]) -> None:
        # A compiler repeats nothing by running this code again.
        if torch.compiler.is_compiling() or not inputs or type(inputs[0]) is not Tensor:
            return
        tokens, size = inputs[0], int(inputs[0].shape[1]) - self._num_prefix
        if (marked := getattr(tokens, _MARK, None)) is not None:
            self._by_size[size] = marked
        elif size in self._by_size:
            if size in self._ambiguous and tokens.is_leaf and _in_backward():
                raise InputError(
                    f"a block runs again on a copy of its {size} patches, and images of several shapes had as many, so "
                    "theirs is not known; with LocAt use activation checkpointing that is not reentrant "
                    "(timm.layers.set_reentrant_ckpt(False), use_reentrant=False)"
                )
            setattr(tokens, _MARK, self._by_size[size])

    def grid(self, num_tokens: int) -> Grid:
        sides = self._by_size.get(int(num_tokens) - self._num_prefix)
        if sides is None:
            raise InputError(
                f"{num_tokens} tokens came to an attention, {self._num_prefix} of them not patches, but no image was "
                "cut into as many: LocAt needs all patches of an image"
            )
        return Grid(*sides, self._num_prefix)


def _in_backward() -> bool:
    running: int = torch._C._current_graph_task_id()
    return running != -1


def attend_locally(qkv_BNC: Tensor, gaug: GaussianHeads, grid: Grid, *, scale: float) -> Tensor:
    """[B, N, H·d]: all that lies between the packed projection to queries, keys and values and the joined heads.

    To tensor subclasses (`torch.overrides`) it is one function. A mode that watches all of torch's functions
    does not see it, but the `attend` in it.
    """
    if type(qkv_BNC) is not Tensor and has_torch_function((qkv_BNC,)):
        made: Tensor = handle_torch_function(attend_locally, (qkv_BNC,), qkv_BNC, gaug, grid, scale=scale)
        return made
    query, key, value = _unpacked(qkv_BNC, gaug.num_heads)
    # Two heads and the attention read the queries: let them lie so that none needs a copy.
    query = query.contiguous()
    assert gaug.config.width != "input"  # that of the projection, which is not here
    gaussians = gaug(query, key, qkv_BNC, grid, scale)
    return _attend((query, key, value), gaug, gaussians, grid, scale=scale)


def _attend(
    heads: tuple[Tensor, Tensor, Tensor],
    gaug: GaussianHeads,
    gaussians: tuple[Tensor, Tensor],
    grid: Grid,
    *,
    scale: float,
    mask: Tensor | None = None,
    dropout_p: float = 0.0,
) -> Tensor:
    """[B, N, H·d], from queries, keys and values and the variances and strengths of the queries."""
    variance_BHP2, strength_BHP = gaussians
    attended_BHNd = attend(
        *heads,
        0.5 / (variance_BHP2 + gaug.eps),
        strength_BHP,
        grid,
        scale=scale,
        kernel=gaug.config.kernel,
        largest_half_square=gaug.largest_half_square(grid),
        mask=mask,
        dropout_p=dropout_p,
    )
    return attended_BHNd.transpose(1, 2).flatten(2)


class _Local:
    """What they share."""

    gaug: GaussianHeads
    scale: float
    training: bool
    attn_drop: nn.Dropout

    @property
    def _dropout_p(self) -> float:
        return self.attn_drop.p if self.training else 0.0


class _LocalTokens(_Local):
    """Over all tokens of an image."""

    grids: GridRecord
    num_heads: int

    def _attended(self: Any, x: Tensor, rope: Tensor | None, attn_mask: Tensor | None, is_causal: bool) -> Tensor:
        """What the module returns."""
        if is_causal:
            raise InputError("attention with a local bias is between all patches of an image: it cannot be causal")
        gate = None if self.gate is None else self.gate(x).sigmoid()
        if rope is None and attn_mask is None and self._is_plain():
            attended_BNC = attend_locally(self.qkv(x), self.gaug, self.grids.grid(x.shape[1]), scale=self.scale)
        else:
            attended_BNC = self._attended_by_steps(x, rope, attn_mask)
        attended_BNC = self.norm(attended_BNC)
        if gate is not None:
            attended_BNC = attended_BNC * gate
        output_BNC: Tensor = self.proj_drop(self.proj(attended_BNC))
        return output_BNC

    def _is_plain(self) -> bool:
        """Whether `attend_locally` does all that happens between the projections."""
        return False

    def _attended_by_steps(self: Any, x: Tensor, rope: Tensor | None, attn_mask: Tensor | None) -> Tensor:
        query, key, value = self._project(x)
        # As in `attend_locally`.
        query, key = self.q_norm(query).contiguous(), self.k_norm(key)
        grid = self.grids.grid(x.shape[1])
        gaussians = self.gaug(query, key, x, grid, self.scale)
        if rope is not None:
            query, key = (self._rotated(tokens, rope).type_as(value) for tokens in (query, key))
        heads = query, key, value
        return _attend(heads, self.gaug, gaussians, grid, scale=self.scale, mask=attn_mask, dropout_p=self._dropout_p)

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

    def _is_plain(self: Any) -> bool:
        norms = (self.q_norm, self.k_norm)
        return (
            self.gaug.config.width != "input"
            and self.gaug.gate is None
            and all(isinstance(norm, nn.Identity) for norm in norms)
            and self._dropout_p == 0
        )


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
            bias = (bias + mask.unsqueeze(1)).repeat(x.shape[0] // mask.shape[0], 1, 1, 1)
        attended_BNC = _attend(
            heads, self.gaug, gaussians, grid, scale=self.scale, mask=bias, dropout_p=self._dropout_p
        )
        output_BNC: Tensor = self.proj_drop(self.proj(attended_BNC))
        return output_BNC


class LocalWindowAttentionGlobal(_Local, WindowAttentionGlobal):  # type: ignore[misc]
    """That of `GlobalContextVit`: in windows, or of queries that are made of the whole image. The latter have places
    only where one window is the whole map; queries and keys then share its grid."""

    def forward(self: Any, x: Tensor, q_global: Tensor | None = None) -> Tensor:
        if self.use_global and q_global is not None:
            if q_global.shape[0] != x.shape[0]:
                raise InputError(
                    f"{x.shape[0]} windows of {q_global.shape[0]} images came to an attention whose queries are of the "
                    "whole image, which have no places in one of several windows; add LocAt to the other blocks alone"
                )
            query = q_global.reshape(*x.shape[:2], self.num_heads, -1).transpose(1, 2)
            key, value = self.qkv(x).unflatten(-1, (2, self.num_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        else:
            query, key, value = _unpacked(self.qkv(x), self.num_heads)
        rows, cols = self.window_size
        grid = Grid(rows, cols, 0)
        gaussians = self.gaug(query, key, x, grid, self.scale)
        attended_BNC = _attend(
            (query, key, value),
            self.gaug,
            gaussians,
            grid,
            scale=self.scale,
            mask=self.rel_pos.get_bias(),
            dropout_p=self._dropout_p,
        )
        output_BNC: Tensor = self.proj_drop(self.proj(attended_BNC))
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
    WindowAttentionGlobal: LocalWindowAttentionGlobal,
}
