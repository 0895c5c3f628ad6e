"""What inducers of locality mean, in float64: tables made by loops over pairs of tokens, and whole maps, in the
attentions that `changed_attention` writes down by hand.

Shape suffixes: B images, W windows, H heads, N queries, M keys, d head size, K logits of a row.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
from changed_attention import Family, Place, Places
from torch import Tensor, nn

from nearsight.lens.induced import Locality
from nearsight.locat.inducers import Inducer

Extent = Callable[[int], tuple[int, int]]
"""(rows, columns) of what a query can attend to, by layer."""


def between(places: tuple[Places, Places], value: Callable[[Any, Any], float], other: float = 0.0) -> Tensor:
    """A number for each pair of patches, [W, N, M]; another one where one of the two is none."""

    def of_pair(query: Place, key: Place) -> float:
        return other if query is None or key is None else value(query, key)

    return torch.tensor(
        [[[of_pair(query, key) for key in keys] for query in queries] for queries, keys in zip(*places, strict=True)],
        dtype=torch.float64,
    )


def bisected(logits_K: Tensor) -> Tensor:
    """1.5-entmax by halving an interval that holds τ, and one step of Newton's, which has the gradient."""
    half_K = logits_K / 2
    low = half_K.detach().amax(-1, keepdim=True) - 1
    high = low + 1
    for _ in range(80):
        middle = (low + high) / 2
        too_much = (half_K.detach() - middle).clamp(min=0).square().sum(-1, keepdim=True) > 1
        low, high = torch.where(too_much, middle, low), torch.where(too_much, high, middle)
    above_K = (half_K - low).clamp(min=0)
    tau = low + (above_K.square().sum(-1, keepdim=True) - 1) / (2 * above_K.detach().sum(-1, keepdim=True))
    return (half_K - tau).clamp(min=0).square()


def softmax(logits_K: Tensor) -> Tensor:
    powers_K = (logits_K - logits_K.detach().amax(-1, keepdim=True)).exp()
    return powers_K / powers_K.sum(-1, keepdim=True)


def local_weights(
    config: Any,
    own: Any,
    logits_BWHNM: Tensor,
    query_BWHNd: Tensor,
    places: tuple[Places, Places],
    now: tuple[int, int],
    made: tuple[int, int],
    layer: int,
) -> Tensor:
    """The map of an attention with an inducer."""
    growth = min(now) / min(made)
    heads = logits_BWHNM.shape[2]

    def by_head(numbers_H: Tensor) -> Tensor:
        return numbers_H.reshape(heads, 1, 1)

    distance_W1NM = between(places, math.dist)[:, None]
    if config.name == "alibi2d":
        slopes_H = torch.tensor([2 ** (-8 * (head + 1) / heads) for head in range(heads)], dtype=torch.float64)
        return softmax(logits_BWHNM - by_head(own.gate * slopes_H) * distance_W1NM / growth)
    if config.name == "gaussian":
        width = config.width * growth
        kernel_WNM = between(places, lambda query, key: math.exp(-0.5 * math.dist(query, key) ** 2 / width**2))
        return softmax(logits_BWHNM + by_head(own.gate) * kernel_WNM[:, None])
    if config.name == "relpos":
        return softmax(logits_BWHNM + interpolated(own.table, places, now, made))
    if config.name == "neighborhood":
        radii = config.radius if isinstance(config.radius, tuple) else (config.radius,)
        of_heads = list(radii) if config.by == "head" else [radii[layer % len(radii)]] * heads
        near = [between(places, lambda q, k, r=r: float(math.dist(q, k) <= r * growth + 1e-6), 1.0) for r in of_heads]
        return softmax(logits_BWHNM.masked_fill(torch.stack(near, 1) == 0, -math.inf))
    if config.name == "lsa":
        itself_WNM = between(places, lambda query, key: float(math.dist(query, key) < 1e-6))
        hidden = (itself_WNM[:, None] == 1) | (logits_BWHNM == -math.inf)
        tempered = logits_BWHNM.masked_fill(hidden, 0.0) * by_head(own.temperature.exp())
        return softmax(tempered.masked_fill(hidden, -math.inf))
    if config.name == "entmax15":
        return bisected(logits_BWHNM)
    if config.name == "gpsa":
        return gated(own, logits_BWHNM, places, growth)
    assert config.name == "gaug"
    return softmax(logits_BWHNM + gaussian(config, own, query_BWHNd, places, now, made))


def interpolated(table_HRC: Tensor, places: tuple[Places, Places], now: Any, made: Any) -> Tensor:
    """[W, H, N, M]: by hats around each entry of the table."""
    hats = []
    for axis in (0, 1):
        stretch = (made[axis] - 1) / (now[axis] - 1) if now[axis] > 1 else 1.0
        last = 2 * (made[axis] - 1)

        def at(query: Any, key: Any, axis: int = axis, stretch: float = stretch, last: int = last) -> float:
            return min(max((key[axis] - query[axis]) * stretch + last / 2, 0.0), float(last))

        position_WNM1 = between(places, at).round(decimals=9).unsqueeze(-1)
        hats.append((1 - (position_WNM1 - torch.arange(last + 1)).abs()).clamp(min=0))
    are_patches_WNM = between(places, lambda query, key: 1.0)
    return torch.einsum("wnmr,wnmc,hrc->whnm", *hats, table_HRC) * are_patches_WNM[:, None]


def gated(own: Any, logits_BWHNM: Tensor, places: tuple[Places, Places], growth: float) -> Tensor:
    rows_WNM, cols_WNM = (between(places, lambda q, k, a=axis: (k[a] - q[a]) / growth) for axis in (0, 1))
    features = rows_WNM, cols_WNM, rows_WNM**2 + cols_WNM**2
    scores = sum(own.positions[:, at].reshape(-1, 1, 1) * each[:, None] for at, each in enumerate(features))
    assert isinstance(scores, Tensor)
    are_patches_W1NM = between(places, lambda query, key: 1.0)[:, None] == 1
    shown = are_patches_W1NM & (logits_BWHNM > -math.inf)
    powers = torch.where(shown, scores.exp(), 0.0)
    total = powers.sum(-1, keepdim=True)
    share = 1 / (1 + torch.exp(-own.gate.reshape(-1, 1, 1))) * (total > 0)
    return (1 - share) * softmax(logits_BWHNM) + share * powers / torch.where(total > 0, total, 1.0)


def gaussian(config: Any, own: Any, query_BWHNd: Tensor, places: tuple[Places, Places], now: Any, made: Any) -> Tensor:
    """S2, Eq. 5-9, for a query of any place."""
    heads, longest = own.gaug, max(made)
    variance = longest**2 / (1 + torch.exp(math.log(longest**2 - 1) - heads.log_var(query_BWHNd)))
    variance = variance * min(now) / min(made)
    most = (longest - 1) ** 2
    squares = [between(places, lambda q, k, a=axis: min((q[a] - k[a]) ** 2, most))[:, None] for axis in (0, 1)]
    exponent = sum(0.5 * each / (variance[..., axis].unsqueeze(-1) + 0.1) for axis, each in enumerate(squares))
    strength = torch.log1p(torch.exp(heads.log_alpha(query_BWHNd)))
    are_patches_W1NM = between(places, lambda query, key: 1.0)[:, None]
    assert isinstance(exponent, Tensor)
    return own.gate.reshape(-1, 1, 1) * strength * torch.exp(-exponent) * are_patches_W1NM


@contextmanager
def local_by_hand(
    family: Family, model: nn.Module, config: Inducer, now: Extent, made: Extent, *, scales_first: bool = False
) -> Iterator[None]:
    """While active, attention modules are hand-written ones with an inducer, with the parameters that the model has.

    `scales_first`: whether its own code scales the queries before they meet the keys.
    """

    def attend(
        query: Tensor, key: Tensor, value: Tensor, bias: Tensor | float = 0.0, *, number: int, own: Any
    ) -> Tensor:
        logits = query @ key.transpose(-2, -1) / math.sqrt(query.shape[-1]) + bias
        windows = len(family.places(number)[0])
        scale = query.shape[-1] ** -0.5 if scales_first else 1.0
        in_windows = (each.unflatten(0, (-1, windows)) for each in (logits, scale * query))
        weights = local_weights(config, own, *in_windows, family.places(number), now(number), made(number), number)
        return weights.flatten(0, 1) @ value

    with ExitStack() as undo:
        for number, module in enumerate(filter(family.is_attention, model.modules())):
            own = getattr(next(part for part in module.modules() if isinstance(part, Locality)), config.name)
            forward = partial(family.forward, module, partial(attend, number=number, own=own))
            undo.enter_context(mock.patch.object(module, "forward", forward))
        yield


def unsettle_inducers(model: nn.Module) -> None:
    """What they learn is anything."""
    generator = torch.Generator().manual_seed(7)
    for part in model.modules():
        if isinstance(part, Locality):
            for weight in part.parameters():
                weight.data += 0.5 * torch.randn(weight.shape, generator=generator).to(weight)
