"""Chains of branches and their backward against float64 and its autograd."""

import math
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from nearsight.locat.gaussian import Grid
from nearsight.train.fused.branches import AttentionBranch, Branch, MlpBranch, Weights, run_chain, sum_of_products
from nearsight.train.fused.local_bias import LocalBias
from nearsight.train.fused.local_branch import LocalAttentionBranch
from nearsight.train.fused.positional_branch import PositionalBranch
from nearsight.train.optimizer import Arrangement

bias_of = runpy.run_path(str(Path(__file__).with_name("test_local_attention.py")))["bias_of"]

CASES = {
    "MLP": ("m", (2, 3, 17, 48, 2), True),
    "MLP without biases": ("m", (1, 2, 5, 16, 1), False),
    "attention": ("a", (2, 2, 17, 48, 2), True),
    "attention without biases": ("a", (1, 1, 65, 16, 1), False),
    "two blocks": ("amam", (2, 1, 5, 32, 2), True),
    "out of turn": ("mma", (3, 1, 5, 16, 1), False),
    "local attention": ("l", (2, 2, 17, 48, 2), True),
    "local attention without biases": ("l", (3, 1, 17, 96, 3), False),
    "local attention of one width": ("i", (1, 2, 17, 32, 2), True),
    "local attention of a fixed width": ("f", (2, 1, 17, 32, 4), True),
    "two blocks, one of them local": ("lmam", (2, 1, 17, 32, 2), True),
    "attention by positions": ("p", (2, 3, 17, 48, 2), True),
    "attention by positions without biases": ("pm", (3, 1, 5, 32, 4), False),
}
"""Branches; cells, images of a cell, tokens, channels, heads; whether projections have biases."""


def make_branch(kind: str, tokens: int, width: int, heads: int) -> Branch:
    if kind == "m":
        return MlpBranch(0.1)
    if kind == "p":
        return PositionalBranch(1e-3, tokens, heads)
    attention = 1e-3, tokens, heads, 0.7 * (width // heads) ** -0.5
    if kind == "a":
        return AttentionBranch(*attention)
    axes, learned = {"l": (2, True), "i": (1, False), "f": (0, True)}[kind]
    local = LocalBias(Grid(2, (tokens - 1) // 2, 1), "gaussian", axes, learned, 9.0, math.log(8), 0.1, 4.0)
    return LocalAttentionBranch(*attention, local)


def draw(branch: Branch, cells: int, width: int, device: torch.device) -> list[Tensor]:
    """Weights of a branch as parts of a row of all parameters. Matrices give numbers as large as they get."""
    hidden, inner = 2 * width, 2 * width
    if isinstance(branch, AttentionBranch | PositionalBranch):
        hidden, inner = 3 * width if isinstance(branch, AttentionBranch) else width, width
    shapes: list[tuple[int, ...]] = [(width,), (width,), (hidden, width), (hidden,), (width, inner), (width,)]
    if isinstance(branch, LocalAttentionBranch):
        for numbers in (branch.local.num_axes, int(branch.local.learns_strength)):
            shapes += [(numbers, width // branch.num_heads), (numbers,)] if numbers else []
    if isinstance(branch, PositionalBranch):
        shapes.append((branch.num_heads, branch.num_tokens, branch.num_tokens))
    arrangement = Arrangement({str(n): shape for n, shape in enumerate(shapes)})
    flat = torch.cat([torch.randn(cells, *shape).div(shape[-1] ** 0.5).flatten(1) for shape in shapes], 1)
    return list(arrangement.views(flat.to(device)).values())


def linear(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return rows @ weight.mT + (0 if bias is None else bias[:, None])


def reference(rows: Tensor, branch: Branch, weights: list[Any]) -> Tensor:
    """The stream after a branch."""
    scale, shift, first, bias1, second, bias2, *further = weights
    normal = F.layer_norm(rows, rows.shape[-1:], eps=branch.eps) * scale[:, None] + shift[:, None]
    middle = linear(normal, first, bias1)
    if isinstance(branch, AttentionBranch):
        packed = middle.view(-1, branch.num_tokens, 3, branch.num_heads, rows.shape[2] // branch.num_heads)
        query, key, value = packed.permute(2, 0, 3, 1, 4)
        logits = query @ key.mT * branch.scale
        if isinstance(branch, LocalAttentionBranch):
            of_image = [weight.repeat_interleave(len(query) // len(weight), 0)[:, None] for weight in further]
            pairs = zip(of_image[::2], of_image[1::2], strict=True)
            parts = [query @ matrix.mT + offset[:, None] for matrix, offset in pairs]
            logits = logits + bias_of(torch.cat(parts, -1), branch.local)
        attended = logits.softmax(-1) @ value
        middle = attended.transpose(1, 2).reshape(rows.shape)
    elif isinstance(branch, PositionalBranch):
        values = middle.view(len(rows), -1, branch.num_tokens, branch.num_heads, rows.shape[2] // branch.num_heads)
        middle = torch.einsum("khnm,kbmhd->kbnhd", further[0], values).reshape(rows.shape)
    else:
        middle = F.gelu(middle)
    return rows + linear(middle, second, bias2)


@pytest.mark.parametrize("name", CASES)
def test_result_and_gradients(device: torch.device, near: Any, dtype: torch.dtype, name: str) -> None:
    kinds, (cells, images, tokens, width, heads), has_biases = CASES[name]
    chain = [make_branch(kind, tokens, width, heads) for kind in kinds]
    rows = torch.randn(cells, images * tokens, width).to(device) + 2
    weights: list[list[Any]] = [draw(branch, cells, width, device) for branch in chain]
    if not has_biases:
        weights = [[*given[:3], None, given[4], None, *given[6:]] for given in weights]
    flat = [tensor for tensor in (rows, *(tensor for given in weights for tensor in given)) if tensor is not None]
    for tensor in flat:
        tensor.requires_grad_()

    exact = {tensor: tensor.detach().double().requires_grad_() for tensor in flat}
    expected = exact[rows]
    for branch, given in zip(chain, weights, strict=True):
        expected = reference(expected, branch, [None if tensor is None else exact[tensor] for tensor in given])
    of_branches = [Weights._make([*given[:6], tuple(given[6:])]) for given in weights]
    found = run_chain(rows, chain, of_branches, dtype)
    assert found.dtype == torch.float32
    near(found, expected, dtype)
    gradient = torch.randn(found.shape).to(device)
    one = torch.autograd.grad(found, flat, gradient)
    other = torch.autograd.grad(expected, list(exact.values()), gradient.double())
    for n, (mine, wanted) in enumerate(zip(one, other, strict=True)):
        near(mine, wanted, dtype, f"gradient {n}")
    if dtype != torch.float32:
        return
    with torch.no_grad():
        assert torch.equal(run_chain(rows, chain, of_branches, dtype), found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_products_are_summed_in_float32(device: torch.device, dtype: torch.dtype) -> None:
    one, other = torch.randn(2, 300, 5).to(device, dtype) + 1, torch.randn(2, 300, 4).to(device, dtype)
    found = sum_of_products(one, other)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), one.double().mT @ other.double(), rtol=1e-4, atol=1e-3)
