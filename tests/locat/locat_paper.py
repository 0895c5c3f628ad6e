"""S2 written down once more from the paper: whole maps in memory, float64, nothing of `nearsight`.

`written_down` takes a model with LocAt and gives back a timm model without it whose attentions are replaced by these.
"""

import copy
import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import apply_rot_embed_cat
from torch import Tensor, nn


@dataclass(frozen=True)
class Paper:
    """The variant, and the grids."""

    grid: tuple[int, int]
    initial: tuple[int, int]
    prefix: int
    kernel: str = "gaussian"
    width: str | float = "query"
    isotropic: bool = False
    scale: str = "learned"
    resolution: str = "linear"


class PaperAttention(nn.Module):
    def __init__(self, attention: Any, heads: dict[str, Tensor], paper: Paper) -> None:
        super().__init__()
        self.attention, self.heads, self.paper = attention, heads, paper
        self.maps: list[Tensor] = []

    def set_window_size(self, size: tuple[int, int]) -> None:
        raise NotImplementedError

    def forward(
        self,
        x: Tensor,
        rope: Tensor | None = None,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        mask: Tensor | None = None,
    ) -> Tensor:
        attention = self.attention
        query, key, value = self._heads(x)
        head_dim = query.shape[-1]
        bias = self.supplement(query, key, x)
        if rope is not None:
            query, key = self._rotated(query, rope), self._rotated(key, rope)
        logits = query @ key.transpose(-2, -1) / math.sqrt(head_dim) + bias
        if hasattr(attention, "relative_position_bias_table"):
            logits = logits + relative_bias(attention)
        if mask is not None:
            logits = logits + torch.cat([mask[:, None]] * (len(x) // len(mask)))
        weights = logits.exp() / logits.exp().sum(-1, keepdim=True)
        self.maps.append(weights)
        return attention.proj((weights @ value).transpose(1, 2).flatten(2))

    def _heads(self, x: Tensor) -> list[Tensor]:
        attention, num_heads = self.attention, self.attention.num_heads
        if getattr(attention, "qkv", None) is None:
            three = [p(x) for p in (attention.q_proj, attention.k_proj, attention.v_proj)]
        else:
            three = list((x @ attention.qkv.weight.T).chunk(3, dim=-1))
            if attention.qkv.bias is not None:
                three = [part + bias for part, bias in zip(three, attention.qkv.bias.chunk(3), strict=True)]
            elif getattr(attention, "q_bias", None) is not None:
                three = [three[0] + attention.q_bias, three[1], three[2] + attention.v_bias]
        query, key, value = (part.view(*part.shape[:2], num_heads, -1).transpose(1, 2) for part in three)
        if hasattr(attention, "q_norm"):
            query, key = attention.q_norm(query), attention.k_norm(key)
        return [query, key, value]

    def _rotated(self, tokens: Tensor, rope: Tensor) -> Tensor:
        prefix, half = self.paper.prefix, self.attention.rotate_half
        return torch.cat([tokens[:, :, :prefix], apply_rot_embed_cat(tokens[:, :, prefix:], rope, half=half)], dim=2)

    def supplement(self, query: Tensor, key: Tensor, x: Tensor) -> Tensor:
        """The matrix S of Eq. 4, zero for every token that is no patch."""
        paper = self.paper
        rows, cols = paper.grid
        query, key, x = query[:, :, paper.prefix :], key[:, :, paper.prefix :], x[:, paper.prefix :]
        places = torch.tensor([(row, col) for row in range(rows) for col in range(cols)], dtype=query.dtype)
        half_squares = 0.5 * (places[:, None] - places[None, :]) ** 2  # Eq. 7, [P, P, 2]
        longest = max(paper.initial)
        half_squares = half_squares.clamp(max=min(0.5 * (longest - 1) ** 2, 6550.0))
        eps = 0.1
        while 0.5 * (longest - 1) ** 2 / eps**2 > 32500:
            eps *= 2
        variance = self._variance(query, x, longest)
        ratio = min(paper.grid) / min(paper.initial)
        variance = variance * (ratio if paper.resolution == "linear" else ratio**2) + eps
        quotient = (half_squares / variance[..., None, :]).sum(-1)  # [B, H, P, P]
        if paper.kernel == "gaussian":
            kernel = torch.exp(-quotient)  # Eq. 8
        else:
            distance = torch.sqrt(2 * quotient)
            kernel = torch.exp(-distance) if paper.kernel == "laplace" else 1 / (1 + distance)
        bias = self._alpha(query, key) * kernel
        return F.pad(bias, (paper.prefix, 0, paper.prefix, 0))

    def _variance(self, query: Tensor, x: Tensor, longest: int) -> Tensor:
        """Eq. 5, [B, H, P, 2]."""
        paper = self.paper
        if isinstance(paper.width, float):
            return torch.full((1, 1, 1, 2), paper.width**2, dtype=query.dtype)
        source = query if paper.width == "query" else x
        raw = source @ self.heads["log_var.weight"].T + self.heads["log_var.bias"]
        if paper.width == "input":
            raw = torch.stack(raw.chunk(self.attention.num_heads, dim=-1), dim=1)
        largest = longest**2
        shift = math.log(largest - 1) if largest > 2 else 0.0
        return (largest / (1 + torch.exp(shift - raw))).expand(*raw.shape[:-1], 2)

    def _alpha(self, query: Tensor, key: Tensor) -> Tensor:
        """Eq. 9 or App. D, [B, H, P, 1]."""
        if self.paper.scale == "none":
            return torch.ones(1, dtype=query.dtype)
        if self.paper.scale == "auto":
            lengths = [(tokens**2).sum(-1, keepdim=True).sqrt() for tokens in (query, key)]
            return lengths[0] * lengths[1].mean(2, keepdim=True) / math.sqrt(query.shape[-1])
        return torch.log1p(torch.exp(query @ self.heads["log_alpha.weight"].T + self.heads["log_alpha.bias"]))


def relative_bias(attention: Any) -> Tensor:
    """Swin's, by its definition: an entry of the table for each difference of places."""
    rows, cols = attention.window_size
    places = [(row, col) for row in range(rows) for col in range(cols)]
    table = attention.relative_position_bias_table
    entries = [
        table[(one[0] - other[0] + rows - 1) * (2 * cols - 1) + one[1] - other[1] + cols - 1]
        for one in places
        for other in places
    ]
    return torch.stack(entries).view(rows * cols, rows * cols, -1).permute(2, 0, 1)


def refined(tokens: Tensor, num_heads: int) -> Tensor:
    """Eq. 11, head by head."""
    parts = []
    for head in tokens.chunk(num_heads, dim=-1):
        weights = torch.softmax(head @ head.transpose(1, 2) / math.sqrt(head.shape[-1]), dim=-1)
        parts.append(weights @ head)
    return torch.cat(parts, dim=-1)


def written_down(local: nn.Module, plain: nn.Module, papers: dict[str, Paper]) -> nn.Module:
    """`plain`, a model without LocAt, with the weights of `local` and the paper's attentions, by module name."""
    model: Any = copy.deepcopy(plain)
    state = {name: weight for name, weight in local.state_dict().items() if ".gaug." not in name}
    model.load_state_dict(state)
    model = model.double().eval()
    for name, paper in papers.items():
        prefix = f"{name}.gaug."
        heads = {
            full.removeprefix(prefix): weight.double()
            for full, weight in local.state_dict().items()
            if full.startswith(prefix)
        }
        parent, _, child = name.rpartition(".")
        block = model.get_submodule(parent)
        setattr(block, child, PaperAttention(getattr(block, child), heads, paper))
    return model
