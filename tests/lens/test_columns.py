"""The kernel of received attention against a dense float64 computation, without a GPU: on cases of the other one."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from test_extras import images, pyramid, sharpened, vit
from test_kernels import CASES, Inputs, Size
from test_token_measures import SINKS, with_sinks
from timm.models.swin_transformer import SwinTransformer
from torch import Tensor

from nearsight.lens import kinds, measure, shares, sinks, stream
from nearsight.lens.attention import FusedAttention
from nearsight.lens.columns import (
    SHARES,
    Cells,
    fused_attention_columns,
    fused_attention_shares,
    side_of,
    sinks_by_kernel,
)
from nearsight.metrics import sink_patches
from nearsight.triton_language import INTERPRETED, triton

_OTHER = {name for name in CASES if name.startswith(("grouped_heads", "hidden_keys"))}
"""Cases that do not come here: `arrange` gives as many heads of keys as of queries, and nobody hides keys here."""


pytestmark = pytest.mark.skipif(triton is None, reason="Triton is not installed")


@pytest.mark.interpreted
@pytest.mark.parametrize("name", sorted(CASES.keys() - _OTHER))
def test_columns_are_those_of_the_maps(name: str) -> None:
    check_columns(name, Size(), "cpu")


def check_columns(name: str, size: Size, device: str) -> None:
    inputs = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in CASES[name](size).items()}
    query, key, bias = (inputs[part] for part in ("query_BWHNd", "key_BWHMd", "bias"))
    windows, tokens = query.shape[1], query.shape[3]
    sets = torch.zeros(2, windows, tokens, device=device)
    sets[0] = inputs["query_places_WN2"][..., 0].isfinite()
    sets[1, :, 0] = 1
    logits = query.double() @ key.double().mT * inputs["scale"]
    if bias is not None:
        logits = logits.masked_fill(~bias, -math.inf) if bias.dtype == torch.bool else logits + bias.double()
    share = torch.where((logits == -math.inf).all(-1, keepdim=True), 0.0, logits.softmax(-1))
    expected = torch.einsum("bwhnm,xwn->xbwhm", share, sets.double())
    for chosen in (sets, sets[:1]):
        found = fused_attention_columns(query, key, scale=inputs["scale"], sets_XWN=chosen, bias=bias)
        torch.testing.assert_close(
            found.double(),
            expected[: len(chosen)],
            rtol=2e-5,
            atol=2e-6,
            equal_nan=True,
            msg=lambda said: f"{name}: {said}",
        )


@pytest.mark.interpreted
@pytest.mark.parametrize(
    "settings", [{}, {"reg_tokens": 2}, {"class_token": False, "global_pool": "avg"}], ids=["cls", "registers", "none"]
)
def test_what_kernels_measure_is_what_tiles_do(settings: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = with_sinks(vit(img_size=(48, 64), **settings), 3.0), images(2, (48, 64))
    what = ["sinks", "kinds", "shares"]
    by_tiles = measure(model, batch, what=what, batch_size=1)
    for module in (stream, sinks, kinds, shares):
        monkeypatch.setattr(module, "has_kernel", lambda attention, _: isinstance(attention, FusedAttention))
    monkeypatch.setattr(kinds.Kinds, "add", None)
    monkeypatch.setattr(shares.Shares, "add", None)
    by_kernels = measure(model, batch, what=what, batch_size=1)
    assert (by_tiles.extra["share_sinks"] > 0).any()
    assert (by_tiles.extra["mad_without_sinks"] != by_tiles.mad).any()
    for name in (*SINKS, *kinds.Kinds.columns, *shares.Shares.columns):
        np.testing.assert_allclose(by_kernels.extra[name], by_tiles.extra[name], rtol=1e-4, atol=1e-6, err_msg=name)


@pytest.mark.interpreted
def test_kernels_measure_windows_that_are_masked_as_tiles_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """With masks, kinds and shares are left to tiles; sinks are not."""
    torch.manual_seed(0)
    model = SwinTransformer(img_size=24, window_size=4, embed_dim=16, depths=(2,), num_heads=(2,), num_classes=3)
    model, batch = sharpened(model), images(2, (24, 24))
    what = ["sinks", "kinds", "shares"]
    by_tiles = measure(model, batch, what=what)
    for module in (stream, sinks, kinds, shares):
        monkeypatch.setattr(module, "has_kernel", lambda attention, _: isinstance(attention, FusedAttention))
    by_kernels = measure(model, batch, what=what)
    for name in (*SINKS, *kinds.Kinds.columns, *shares.Shares.columns):
        np.testing.assert_allclose(by_kernels.extra[name], by_tiles.extra[name], rtol=1e-4, atol=1e-6, err_msg=name)


@pytest.mark.interpreted
def test_pooled_keys_by_kernels_and_by_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = pyramid(), images(2, (64, 64))
    by_tiles = measure(model, batch, what=["kinds", "shares"])
    for module in (stream, kinds, shares):
        monkeypatch.setattr(module, "has_kernel", lambda attention, _: isinstance(attention, FusedAttention))
    by_kernels = measure(model, batch, what=["kinds", "shares"])
    for name in (*kinds.Kinds.columns, *shares.Shares.columns):
        np.testing.assert_allclose(by_kernels.extra[name], by_tiles.extra[name], rtol=1e-4, atol=1e-6, err_msg=name)


def shares_by_maps(inputs: Inputs, cells: Cells) -> Tensor:
    """`SHARES` in float64, from whole maps: [10, B, W, H, N]."""
    logits = inputs["query_BWHNd"].double() @ inputs["key_BWHMd"].double().mT * inputs["scale"]
    (queries, keys, kinds), whole = (part.double() for part in cells), logits.softmax(-1)
    is_query, is_patch = queries[:, None, :, 0].isfinite(), keys[:, None, None, :, 0].isfinite()
    share = logits.masked_fill(~is_patch, -math.inf).softmax(-1)
    down, right = (queries[:, None, :, None] - keys[:, None, None]).abs().unbind(-1)
    at = {"own": torch.maximum(down, right) == 0, "near": torch.maximum(down, right) <= 1, "row": down == 0}
    at |= {"column": right == 0, "edge": kinds[0][:, None, None].expand(down.shape) > 0}
    count = is_patch.sum(-1)
    breadth = (torch.special.entr(share).sum(-1).exp() - 1) / (count - 1).clamp(min=1)
    found = [*((share * place).sum(-1) for place in at.values()), breadth, (whole * at["own"]).sum(-1)]
    found += [
        (whole * (at["near"] & ~at["own"])).sum(-1),
        *((whole * kind[:, None, None]).sum(-1) for kind in kinds[1:]),
    ]
    return torch.where(is_query, torch.stack(found), 0.0)


def check_shares(name: str, size: Size, device: str) -> None:
    inputs = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in CASES[name](size).items()}
    queries, keys = inputs["query_places_WN2"], inputs["key_places_WM2"]
    others = keys[..., 0].isnan()
    cls = others & (others.cumsum(-1) == 1)
    # The last token that is no patch is padding: it is neither.
    registers = others & ~cls & (others.cumsum(-1) < others.sum(-1, keepdim=True))
    edge = (keys[..., 0] == 0) | (keys[..., 1] == 0)
    cells = Cells(queries, keys, torch.stack([edge, cls, registers]).float())
    query, key, scale = (inputs[part] for part in ("query_BWHNd", "key_BWHMd", "scale"))
    found, log_sums = fused_attention_shares(query, key, scale=scale, cells=cells)
    tiles, side = found.shape[-1], side_of(query.float() if INTERPRETED else query)
    by_query = F.pad(shares_by_maps(inputs, cells), (0, tiles * side - query.shape[-2]))
    expected = by_query.unflatten(-1, (tiles, side)).sum(-1)
    for share, one, other in zip(SHARES, found.double(), expected, strict=True):
        np.testing.assert_allclose(one.cpu(), other.cpu(), rtol=2e-5, atol=2e-6, err_msg=share)
    expected = (query.double() @ key.double().mT * scale).logsumexp(-1) / math.log(2)
    torch.testing.assert_close(log_sums.double(), expected, rtol=2e-5, atol=2e-5, equal_nan=True)
    sets = queries[None, ..., 0].isfinite().float()
    both = (
        fused_attention_columns(query, key, scale=scale, sets_XWN=sets, log_sums_BWHN=sums) for sums in (log_sums, None)
    )
    torch.testing.assert_close(*both, rtol=2e-5, atol=2e-6, equal_nan=True)


_UNMASKED = sorted(name for name in CASES.keys() - _OTHER if CASES[name](Size())["bias"] is None)


@pytest.mark.interpreted
@pytest.mark.parametrize("name", [*_UNMASKED, "windows_of_different_places"])
def test_shares_are_those_of_the_maps(name: str) -> None:
    check_shares(name, Size(), "cpu")


@pytest.mark.parametrize("start", [0, 1, 5])
@pytest.mark.parametrize("count", [9, 196, 700])
def test_sinks_by_the_kernel_are_those_of_the_metric(start: int, count: int, device: torch.device) -> None:
    received = torch.rand(2, 3, 2, count + 6, device=device)
    received[0, ..., 7], received[1, 0, 0, 6:8] = 40.0 * count, 20.0 * count
    patches = slice(start, start + count)
    found = sinks_by_kernel(received, patches, 10.0)
    assert torch.equal(found, sink_patches(received[..., patches]))
    assert found.any() == (count > 10)
