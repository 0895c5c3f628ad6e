"""torchvision's ViT and Swin, and DINO's ViT, against attention computed again from what their modules were given."""

import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.models.swin_transformer import (
    PatchMergingV2,
    ShiftedWindowAttention,
    ShiftedWindowAttentionV2,
    SwinTransformer,
    SwinTransformerBlockV2,
)
from torchvision.models.vision_transformer import VisionTransformer
from vit_references.checking import unsettle
from vit_references.dense import Layer, head_numbers, with_shuffled_keys
from vit_references.mechanisms import cells

from nearsight import measure


def inputs_of(model: nn.Module, kind: type[nn.Module], images: Tensor) -> list[tuple[str, Any, Tensor]]:
    """(name, module, its first input in float64) for every module of a kind, in the order in which they run."""
    found: list[tuple[str, Any, Tensor]] = []
    for name, module in model.named_modules():
        if isinstance(module, kind):

            def keep(module: nn.Module, inputs: Any, name: str = name) -> None:
                found.append((name, module, inputs[0].double()))

            module.register_forward_pre_hook(keep)
    with torch.no_grad():
        model(images)
    for module in model.modules():
        module._forward_pre_hooks.clear()
    return found


def compare(model: nn.Module, images: Tensor, names: list[str], maps: list[Tensor], layers: list[Layer]) -> None:
    table = measure(model, images)
    assert table.layer_names == tuple(names)
    for number, (attention, layer) in enumerate(zip(maps, layers, strict=True)):
        mad, entropy = (values.mean(0).numpy() for values in head_numbers(attention, layer, len(images)))
        np.testing.assert_allclose(table.mad[number, : len(mad)], mad, rtol=1e-5)
        np.testing.assert_allclose(table.entropy[number, : len(mad)], entropy, rtol=1e-5)
        elsewhere, _ = head_numbers(attention, with_shuffled_keys(layer), len(images))
        assert np.abs(elsewhere.mean(0).numpy() / mad - 1).max() > 1e-3  # wrong places would show


def behind_cls(rows: int, cols: int) -> Layer:
    places = torch.cat([torch.full((1, 2), torch.nan).double(), cells(rows, cols).flatten(0, 1)])[None]
    return Layer((rows, cols), places, places)


def test_vision_transformer() -> None:
    torch.manual_seed(0)
    model = VisionTransformer(64, 16, num_layers=2, num_heads=3, hidden_dim=48, mlp_dim=64).eval()
    unsettle(model, gain=1)
    for layer in model.encoder.layers:
        layer.self_attention.in_proj_weight.data *= 5
    images = torch.randn(3, 3, 64, 64)
    names, maps = [], []
    for name, module, tokens in inputs_of(model, nn.MultiheadAttention, images):
        names.append(name)
        query, key, _ = F.linear(tokens, module.in_proj_weight.double(), module.in_proj_bias.double()).chunk(3, -1)
        query, key = (part.unflatten(-1, (3, 16)).transpose(1, 2) for part in (query, key))
        maps.append((query @ key.transpose(-2, -1) / 4).softmax(-1).detach())
    compare(model, images, names, maps, [behind_cls(4, 4)] * 2)


@pytest.mark.parametrize("version", [1, 2])
def test_swin(version: int) -> None:
    """On a grid that windows of 4 do not divide: 16×18, then 8×9."""
    torch.manual_seed(0)
    second = {"block": SwinTransformerBlockV2, "downsample_layer": PatchMergingV2} if version == 2 else {}
    settings = {"patch_size": [4, 4], "embed_dim": 24, "depths": [2, 2], "num_heads": [2, 3], "window_size": [4, 4]}
    model = SwinTransformer(**settings, **second).eval()
    unsettle(model, gain=4)
    images = torch.randn(2, 3, 64, 72)
    names, maps, layers = [], [], []
    for name, module, tokens in inputs_of(model, ShiftedWindowAttention, images):
        assert isinstance(module, ShiftedWindowAttentionV2) == (version == 2)
        grid = tokens.shape[1], tokens.shape[2]
        shift = module.shift_size[0]
        parts, apart = shifted_windows(cells(*grid)[None], shift, math.nan), seam(grid, shift)
        names.append(name)
        maps.append(windowed_attention(module.double(), shifted_windows(tokens, shift, 0.0), apart))
        module.float()
        layers.append(Layer(grid, parts, parts, "bw h", ~apart))
    assert {module.shift_size[0] for module in model.modules() if hasattr(module, "shift_size")} == {0, 2}
    compare(model, images, names, maps, layers)


def shifted_windows(grid_BHWC: Tensor, shift: int, padding: float) -> Tensor:
    """torchvision pads below and to the right, then rolls, then cuts: [images · windows, 16, channels]."""
    _, rows, cols, channels = grid_BHWC.shape
    padded = F.pad(grid_BHWC, (0, 0, 0, -cols % 4, 0, -rows % 4), value=padding)
    rolled = torch.roll(padded, (-shift, -shift), (1, 2))
    _, rows, cols, _ = rolled.shape
    return rolled.reshape(-1, rows // 4, 4, cols // 4, 4, channels).transpose(2, 3).reshape(-1, 16, channels)


def seam(grid: tuple[int, int], shift: int) -> Tensor:
    """Where query and key of a window lie on different sides of the seam that rolling makes: [windows, 16, 16]."""
    padded = tuple(side + -side % 4 for side in grid)
    beyond = (cells(*padded) >= torch.tensor(padded) - shift) if shift else torch.zeros(*padded, 2, dtype=torch.bool)
    parts = shifted_windows(beyond.double()[None], 0, 0.0)
    return (parts[:, :, None] != parts[:, None]).any(-1)


def windowed_attention(module: Any, windows: Tensor, apart: Tensor) -> Tensor:
    """Shifted window attention by the formulas of the two papers: [images · windows, heads, 16, 16]."""
    heads = module.num_heads
    bias = module.qkv.bias.clone()
    if isinstance(module, ShiftedWindowAttentionV2):
        bias[bias.numel() // 3 : 2 * bias.numel() // 3] = 0  # cosine attention has no bias for keys
    query, key, _ = F.linear(windows, module.qkv.weight, bias).chunk(3, -1)
    query, key = (part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in (query, key))
    if isinstance(module, ShiftedWindowAttentionV2):
        cosine = F.normalize(query, dim=-1) @ F.normalize(key, dim=-1).transpose(-2, -1)
        logits = cosine * module.logit_scale.clamp(max=math.log(100)).exp()
    else:
        logits = query @ key.transpose(-2, -1) / math.sqrt(query.shape[-1])
    logits = logits + module.get_relative_position_bias()
    logits = logits.unflatten(0, (-1, len(apart))) - 100.0 * apart[:, None]
    return logits.flatten(0, 1).softmax(-1).detach()


class DinoAttention(nn.Module):
    """As in facebookresearch/dino: weights in memory, dropout, and a tuple as the result."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads, self.scale = num_heads, (dim // num_heads) ** -0.5
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.attn_drop, self.proj_drop = nn.Dropout(0.1), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        batch, num_tokens, dim = x.shape
        qkv = self.qkv(x).reshape(batch, num_tokens, 3, self.num_heads, dim // self.num_heads).permute(2, 0, 3, 1, 4)
        q, k, v = qkv[0], qkv[1], qkv[2]
        attn = (q @ k.transpose(-2, -1)) * self.scale
        attn = attn.softmax(dim=-1)
        attn = self.attn_drop(attn)
        x = (attn @ v).transpose(1, 2).reshape(batch, num_tokens, dim)
        return self.proj_drop(self.proj(x)), attn


class DinoBlock(nn.Module):
    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn = DinoAttention(dim, num_heads)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))[0]
        return x + self.mlp(self.norm2(x))


class DinoVisionTransformer(nn.Module):
    def __init__(self, dim: int = 48, num_heads: int = 3, grid: tuple[int, int] = (4, 6)) -> None:
        super().__init__()
        self.patch_embed = nn.Conv2d(3, dim, 16, 16)
        self.cls_token = nn.Parameter(torch.randn(1, 1, dim))
        self.pos_embed = nn.Parameter(torch.randn(1, grid[0] * grid[1] + 1, dim))
        self.blocks = nn.ModuleList([DinoBlock(dim, num_heads) for _ in range(2)])
        self.norm = nn.LayerNorm(dim)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch_embed(x).flatten(2).transpose(1, 2)
        x = torch.cat((self.cls_token.expand(x.shape[0], -1, -1), x), dim=1) + self.pos_embed
        for block in self.blocks:
            x = block(x)
        return self.norm(x)[:, 0]


def test_dinos_own_vision_transformer() -> None:
    torch.manual_seed(0)
    model = DinoVisionTransformer().eval()
    unsettle(model, gain=3)
    images = torch.randn(3, 3, 64, 96)
    found = inputs_of(model, DinoAttention, images)
    with torch.no_grad():
        maps = [module.double()(tokens)[1] for _, module, tokens in found]
    model.float()
    compare(model, images, [name for name, _, _ in found], maps, [behind_cls(4, 6)] * 2)
