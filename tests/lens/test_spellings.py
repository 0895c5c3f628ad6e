"""However a model spells its attention: the map in use, what the values are multiplied by, is measured, or refused.

Every spelling gives its own map beside its output, and the numbers must be those of that map, by `nearsight.metrics`.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nearsight.errors import InputError
from nearsight.lens import attention_maps, checks, measure
from nearsight.lens.checks import AdapterError, check_vit_adapter
from nearsight.metrics import attention_distance, attention_entropy

GRID, HEADS, HEAD_DIM = (4, 6), 3, 8
TOKENS = GRID[0] * GRID[1]
Attended = tuple[Tensor, Tensor]
"""The output, and the map [B, H, N, N] that the values were multiplied by."""
Spelling = Callable[[Tensor, Tensor, Tensor, nn.Module], Attended]


class Spelled(nn.Module):
    """One attention over patches of four pixels, spelled in some way."""

    def __init__(self, spelling: Spelling) -> None:
        super().__init__()
        torch.manual_seed(0)
        width = HEADS * HEAD_DIM
        self.embed = nn.Conv2d(3, width, 4, 4)
        self.qkv = nn.Linear(width, 3 * width)
        self.position = nn.Parameter(torch.randn(TOKENS, width))
        self.mix = nn.Linear(HEADS, HEADS, bias=False)
        self.convolution = nn.Conv2d(HEADS, HEADS, 1, bias=False)
        self.drop = nn.Dropout(0.5)
        self.stochastic = nn.Parameter(torch.randn(HEADS, HEADS).softmax(0))  # columns sum to 1: maps stay maps
        self.blur = nn.Parameter((2 * torch.randn(TOKENS, TOKENS)).softmax(-1))
        self.mask = torch.rand(TOKENS, TOKENS) < 0.7
        self.mask.fill_diagonal_(True)
        self.spelling = spelling
        self.map: Tensor | None = None
        """The one in use when it ran last."""
        with torch.no_grad():
            self.qkv.weight.mul_(3)
            self.mix.weight.copy_(self.stochastic.T)
            self.convolution.weight.copy_(self.stochastic.T[..., None, None])

    def forward(self, images: Tensor) -> Tensor:
        x = self.embed(images).flatten(2).transpose(1, 2) + self.position
        query, key, value = self.qkv(x).unflatten(-1, (3, HEADS, HEAD_DIM)).permute(2, 0, 3, 1, 4)
        output, attention = self.spelling(query, key, value, self)
        self.__dict__["map"] = attention
        return output


def softmax(query: Tensor, key: Tensor) -> Tensor:
    return (query @ key.transpose(-2, -1) / math.sqrt(HEAD_DIM)).softmax(-1)


def times(attention: Tensor, value: Tensor) -> Attended:
    return attention @ value, attention


def plain(q: Tensor, k: Tensor, v: Tensor, m: nn.Module) -> Attended:
    return times(softmax(q, k), v)


def fused(q: Tensor, k: Tensor, v: Tensor, m: nn.Module) -> Attended:
    return F.scaled_dot_product_attention(q, k, v), softmax(q, k)


def heads_by_einsum(q: Tensor, k: Tensor, v: Tensor, m: nn.Module) -> Attended:
    return times(torch.einsum("bhij,hg->bgij", softmax(q, k), m.stochastic), v)


def heads_by_matmul(q: Tensor, k: Tensor, v: Tensor, m: nn.Module) -> Attended:
    return times((softmax(q, k).movedim(1, -1) @ m.stochastic).movedim(-1, 1), v)


def heads_by_tensordot(q: Tensor, k: Tensor, v: Tensor, m: nn.Module) -> Attended:
    return times(torch.tensordot(softmax(q, k), m.stochastic, dims=([1], [0])).movedim(-1, 1), v)


def heads_by_linear(q: Tensor, k: Tensor, v: Tensor, m: nn.Module) -> Attended:
    return times(m.mix(softmax(q, k).permute(0, 2, 3, 1)).permute(0, 3, 1, 2), v)


def heads_by_convolution(q: Tensor, k: Tensor, v: Tensor, m: nn.Module) -> Attended:
    return times(m.convolution(softmax(q, k)), v)


def heads_by_the_image(q: Tensor, k: Tensor, v: Tensor, m: nn.Module) -> Attended:
    """Mixing weights that depend on the image."""
    mixing = v.mean((2, 3))[:, :, None].add(m.stochastic).softmax(1)
    return times(torch.einsum("bhij,bhg->bgij", softmax(q, k), mixing), v)


def heads_before_the_softmax(q: Tensor, k: Tensor, v: Tensor, m: nn.Module) -> Attended:
    logits = torch.einsum("bhij,hg->bgij", q @ k.transpose(-2, -1), m.mix.weight)
    return times(logits.softmax(-1), v)


def mean_of_heads(q: Tensor, k: Tensor, v: Tensor, m: nn.Module) -> Attended:
    attention = softmax(q, k).mean(1, keepdim=True)
    return times(attention, v.flatten(1, 1).mean(1, keepdim=True))


def blurred(q: Tensor, k: Tensor, v: Tensor, m: nn.Module) -> Attended:
    return times(softmax(q, k) @ m.blur, v)


def squared(q: Tensor, k: Tensor, v: Tensor, m: nn.Module) -> Attended:
    attention = softmax(q, k)
    return times(attention @ attention, v)


def dropped(q: Tensor, k: Tensor, v: Tensor, m: nn.Module) -> Attended:
    return times(m.drop(softmax(q, k)), v)


def masked_before(q: Tensor, k: Tensor, v: Tensor, m: nn.Module) -> Attended:
    logits = (q @ k.transpose(-2, -1)).masked_fill(~m.mask, -math.inf)
    return times(logits.softmax(-1), v)


def masked_behind(q: Tensor, k: Tensor, v: Tensor, m: nn.Module) -> Attended:
    attention = softmax(q, k) * m.mask
    return times(attention / attention.sum(-1, keepdim=True), v)


def filled_behind(q: Tensor, k: Tensor, v: Tensor, m: nn.Module) -> Attended:
    attention = softmax(q, k).masked_fill(~m.mask, 0.0)
    return times(F.normalize(attention, p=1, dim=-1), v)


def by_hand(q: Tensor, k: Tensor, v: Tensor, m: nn.Module) -> Attended:
    raised = (q @ k.transpose(-2, -1) / math.sqrt(HEAD_DIM)).exp()
    return times(raised / raised.sum(-1, keepdim=True), v)


def gated_by_position(q: Tensor, k: Tensor, v: Tensor, m: nn.Module) -> Attended:
    return times(0.3 * softmax(q, k) + 0.7 * m.blur, v)


def entmax(q: Tensor, k: Tensor, v: Tensor, m: nn.Module) -> Attended:
    """1.5-entmax by sorting (Peters, Niculae and Martins 2019)."""
    logits = (q @ k.transpose(-2, -1) / math.sqrt(HEAD_DIM)) / 2
    ordered = logits.sort(dim=-1, descending=True).values
    rank = torch.arange(1, TOKENS + 1, dtype=logits.dtype)
    mean, square = ordered.cumsum(-1) / rank, (ordered**2).cumsum(-1) / rank
    tau = mean - ((1 - rank * (square - mean**2)) / rank).clamp(min=0).sqrt()
    support = (tau <= ordered).sum(-1, keepdim=True)
    return times((logits - tau.gather(-1, support - 1)).clamp(min=0) ** 2, v)


def topk_sparse(q: Tensor, k: Tensor, v: Tensor, m: nn.Module) -> Attended:
    logits = q @ k.transpose(-2, -1)
    lowest = logits.topk(6, dim=-1).values[..., -1:]
    return times(logits.masked_fill(logits < lowest, -math.inf).softmax(-1), v)


FOLLOWED = {
    spelling.__name__: spelling
    for spelling in (
        plain, fused, heads_by_einsum, heads_by_matmul, heads_by_tensordot, heads_by_linear, heads_by_convolution,
        heads_by_the_image, heads_before_the_softmax, mean_of_heads, blurred, squared, dropped, masked_before,
        masked_behind, filled_behind, by_hand, gated_by_position, entmax, topk_sparse,
    )
}  # fmt: skip


@pytest.mark.parametrize("spelling", FOLLOWED)
def test_the_map_in_use_is_measured(spelling: str) -> None:
    model = Spelled(FOLLOWED[spelling]).eval()
    images = torch.randn(3, 3, 16, 24)
    table = measure(model, images)
    assert not table.skipped
    with torch.no_grad():
        model(images)
    assert model.map is not None
    attention = model.map.double()
    mad = attention_distance(attention, GRID, num_prefix_tokens=0).mean(0)
    entropy = attention_entropy(attention, num_prefix_tokens=0, eps=0.0)
    if "masked" in spelling or "filled" in spelling:  # relative to the keys that a query may attend to
        rows = -torch.special.xlogy(attention, attention).sum(-1) / model.mask.sum(-1).double().log()
        entropy = rows.mean(-1)
    np.testing.assert_allclose(table.mad[0], mad, rtol=2e-5)
    np.testing.assert_allclose(table.entropy[0], entropy.nan_to_num(0.0).mean(0), rtol=2e-5)


@pytest.mark.parametrize("spelling", FOLLOWED)
def test_the_checks_pass_on_what_is_followed(spelling: str) -> None:
    assert check_vit_adapter(Spelled(FOLLOWED[spelling]), (16, 24)).layers


@pytest.mark.parametrize("spelling", ["plain", "heads_by_einsum", "blurred", "squared", "heads_by_linear"])
def test_maps_are_those_in_use(spelling: str) -> None:
    model = Spelled(FOLLOWED[spelling]).eval()
    images = torch.randn(2, 3, 16, 24)
    (layer,) = attention_maps(model, images)
    with torch.no_grad():
        model(images)
    assert model.map is not None
    torch.testing.assert_close(layer.weights_BHQK.float(), model.map.float(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("spelling", "axes", "said"),
    [
        (heads_by_einsum, (2, 3), "does not change with the image"),
        (heads_by_matmul, (1, 2), "does not change with the image"),
        (blurred, (2, 3), "does not change with the image"),
        (squared, (2, 3), "multiply weights, not values"),
        (masked_behind, (2, 3), None),
    ],
)
def test_the_checks_notice_a_map_that_is_not_in_use(
    spelling: Spelling, axes: tuple[int, int], said: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if the lens took the first product that a softmax enters for the one with the values."""
    right = checks.survey
    (taken,) = right(Spelled(plain).eval(), torch.randn(3, 16, 24)).sites.items()

    def wrong(*args: Any) -> checks.Survey:
        call, site = taken
        return dataclasses.replace(right(*args), sites={call: dataclasses.replace(site, axes=axes)})

    monkeypatch.setattr(checks, "survey", wrong)
    if said is None:  # there it is the right one
        assert check_vit_adapter(Spelled(spelling), (16, 24))
        return
    with pytest.raises(AdapterError, match=said):
        check_vit_adapter(Spelled(spelling), (16, 24))


def reattention(q: Tensor, k: Tensor, v: Tensor, m: nn.Module) -> Attended:
    """DeepViT's: heads mixed, then normalised over heads."""
    attention = torch.einsum("bhij,hg->bgij", softmax(q, k), torch.randn(HEADS, HEADS))
    return times(F.layer_norm(attention.movedim(1, -1), (HEADS,)).movedim(-1, 1), v)


def talking(q: Tensor, k: Tensor, v: Tensor, m: nn.Module) -> Attended:
    return times(torch.einsum("bhij,hg->bgij", softmax(q, k), torch.randn(HEADS, HEADS)), v)


def sigmoid(q: Tensor, k: Tensor, v: Tensor, m: nn.Module) -> Attended:
    return times((q @ k.transpose(-2, -1)).sigmoid(), v)


def unnormalised(q: Tensor, k: Tensor, v: Tensor, m: nn.Module) -> Attended:
    return times(softmax(q, k) * m.mask, v)


def scaled(q: Tensor, k: Tensor, v: Tensor, m: nn.Module) -> Attended:
    return times(2 * softmax(q, k), v)


def difference(q: Tensor, k: Tensor, v: Tensor, m: nn.Module) -> Attended:
    return times(1.5 * softmax(q, k) - 0.5 * softmax(k, q), v)


def over_the_queries(q: Tensor, k: Tensor, v: Tensor, m: nn.Module) -> Attended:
    return times((q @ k.transpose(-2, -1)).softmax(-2), v)


def keys_in_two_parts(q: Tensor, k: Tensor, v: Tensor, m: nn.Module) -> Attended:
    """One softmax over two sets of keys: no part of it is a distribution."""
    attention = softmax(q, k)
    return attention[..., :12] @ v[:, :, :12] + attention[..., 12:] @ v[:, :, 12:], attention


def always_dropped(q: Tensor, k: Tensor, v: Tensor, m: nn.Module) -> Attended:
    return times(F.dropout(softmax(q, k), 0.5, training=True), v)


def three_factors(q: Tensor, k: Tensor, v: Tensor, m: nn.Module) -> Attended:
    """Heads are mixed and meet the values within one call."""
    return torch.einsum("bhij,hg,bgjd->bgid", softmax(q, k), m.stochastic, v), q


def sums_of_products(q: Tensor, k: Tensor, v: Tensor, m: nn.Module) -> Attended:
    attention = softmax(q, k)
    return (attention[..., None] * v[:, :, None]).sum(3), attention


def queries_blurred(q: Tensor, k: Tensor, v: Tensor, m: nn.Module) -> Attended:
    return times(m.blur @ softmax(q, k), v)


def keys_shuffled(q: Tensor, k: Tensor, v: Tensor, m: nn.Module) -> Attended:
    """A matrix that puts the keys in another order, and values in that order."""
    order = torch.randperm(TOKENS, generator=torch.Generator().manual_seed(1))
    return times(softmax(q, k) @ torch.eye(TOKENS)[:, order], v[:, :, order])


REFUSED = {
    reattention: "not a distribution",
    talking: "not a distribution",
    sigmoid: "not a distribution",
    unnormalised: "they sum to",
    scaled: "they sum to 2 … 2, not 1",
    difference: "some are negative",
    over_the_queries: "not a distribution",
    keys_in_two_parts: "not a distribution",
    always_dropped: "not a distribution",
    three_factors: "cannot be looked into",
    sums_of_products: "do not multiply values",
    queries_blurred: "do not multiply values",
    keys_shuffled: "moved to other keys",
}


@pytest.mark.parametrize(("spelling", "reason"), REFUSED.items(), ids=[spelling.__name__ for spelling in REFUSED])
def test_what_is_no_map_is_refused(spelling: Spelling, reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        measure(Spelled(spelling), torch.randn(3, 3, 16, 24))


def test_weights_that_stop_being_a_distribution_on_later_images_are_refused() -> None:
    def bright_is_scaled(q: Tensor, k: Tensor, v: Tensor, m: nn.Module) -> Attended:
        return times(softmax(q, k) * (1 + (v.mean((1, 2, 3), keepdim=True) > 5)), v)

    images = torch.randn(2, 3, 16, 24)
    model = Spelled(bright_is_scaled)
    assert measure(model, images).num_images == 2
    with pytest.raises(InputError, match="sum to 1 … 2, not 1, for some of the images"):
        measure(model, [images, torch.cat([images, images + 200])])
