"""The kernels of received attention and of shares against a dense float64 computation, on cases of the other one:
interpreted, and compiled on a GPU, there larger."""

import inspect
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from guarded_memory import Memory
from test_extras import images, pyramid, sharpened, vit
from test_kernels import CASES, Inputs, Size
from test_token_measures import SINKS, with_sinks
from timm.models.swin_transformer import SwinTransformer
from torch import Tensor

from nearsight.lens import columns, kinds, measure, shares, sinks, stream
from nearsight.lens.attention import FusedAttention
from nearsight.lens.columns import (
    OF_WHOLE,
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
    of_whole, again = fused_attention_shares(query, key, scale=scale, cells=cells, only_of_whole=True)
    torch.testing.assert_close(of_whole, found[-len(OF_WHOLE) :], rtol=1e-6, atol=1e-7, equal_nan=True)
    torch.testing.assert_close(again, log_sums, rtol=1e-6, atol=1e-6, equal_nan=True)
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


LARGE = Size(batch=2, heads=5, grid=(28, 37), width=64)


@pytest.mark.gpu
@pytest.mark.parametrize("name", sorted(CASES.keys() - _OTHER))
def test_compiled_columns_are_those_of_the_maps(name: str) -> None:
    check_columns(name, LARGE, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*_UNMASKED, "windows_of_different_places"])
def test_compiled_shares_are_those_of_the_maps(name: str) -> None:
    check_shares(name, LARGE, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("width", [16, 48, 64, 65, 96, 128, 192, 256])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_heads_of_every_size_fit_the_registers(dtype: str, width: int) -> None:
    """Programs of wide heads have fewer queries and keys; none may spill into wrong numbers, nor fail to launch."""
    size = Size(batch=1, heads=2, grid=(9, 15), width=width)
    check_columns(dtype, size, "cuda")
    check_shares(dtype, size, "cuda")


def tokens(memory: Memory, count: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Cells]:
    """Queries and keys [2, 1, 3, 1 + count, 24], a class token first, and the cells of a column of patches."""
    query, key = (memory.normal(2, 1, 3, count + 1, 24, dtype=dtype) for _ in range(2))
    places = torch.full((1, count + 1, 2), math.nan, device=memory.device)
    places[0, 1:] = torch.stack([torch.arange(count), torch.zeros(count)], dim=-1)
    kinds = torch.zeros(3, 1, count + 1, device=memory.device)
    kinds[0, 0, [1, -1]] = kinds[1, 0, 0] = 1
    return query, key, Cells(places, places, kinds)


@pytest.mark.parametrize("count", [1, 63, 64, 130])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nothing_is_read_or_written_beside_the_tokens(memory: Memory, count: int, dtype: torch.dtype) -> None:
    """In memory whose margins are NaN: at the last tile, of keys and of queries, nothing beyond counts."""
    query, key, cells = tokens(memory, count, dtype)
    sets = torch.stack([cells.queries_WN2[..., 0].isfinite(), cells.queries_WN2[..., 0].isnan()]).float()
    shares, log_sums = fused_attention_shares(query, key, scale=0.3, cells=cells)
    received = fused_attention_columns(query, key, scale=0.3, sets_XWN=sets, log_sums_BWHN=log_sums)
    share = (query.double() @ key.double().mT * 0.3).softmax(-1)
    expected = torch.einsum("bwhnm,xwn->xbwhm", share, sets.double())
    torch.testing.assert_close(received.double(), expected, rtol=2e-5, atol=2e-6)
    assert shares.isfinite().all()
    whole = shares[SHARES.index("self") :].double().sum((0, -1)) if count == 1 else None
    if whole is not None:  # one patch gives all it has to itself and CLS
        torch.testing.assert_close(whole, torch.ones_like(whole), rtol=2e-5, atol=2e-6)
    assert sinks_by_kernel(received[0], slice(1, count + 1), 10.0).shape == (2, 1, 3, count)


@pytest.mark.gpu
@pytest.mark.parametrize("shift", [0, 1, 2, 8])
def test_launches_are_remembered_but_neither_their_numbers_nor_their_addresses(shift: int) -> None:
    """Triton compiles again for addresses that are not multiples of 16 bytes: here each comes after others."""
    for sharpness in (1, 2):
        whole = torch.randn(2, 1, 3, 197 * 64 + 8, device="cuda", dtype=torch.bfloat16) * sharpness
        query = whole[..., shift : shift + 197 * 64].unflatten(-1, (197, 64))
        key, sets = query.flip(0), torch.ones(1, 1, 197, device="cuda")
        found = fused_attention_columns(query, key, scale=0.125, sets_XWN=sets)
        expected = (query.double() @ key.double().mT * 0.125).softmax(-1).sum(-2)
        torch.testing.assert_close(found[0].double(), expected, rtol=5e-5, atol=1e-5)


@pytest.mark.gpu
def test_columns_and_shares_need_no_map_in_memory() -> None:
    batch, heads, count = 4, 12, 4096
    query, key = torch.randn(2, batch, 1, heads, count + 1, 64, device="cuda", dtype=torch.bfloat16)
    places = torch.full((1, count + 1, 2), math.nan, device="cuda")
    places[0, 1:] = torch.cartesian_prod(torch.arange(64.0), torch.arange(64.0))
    cells = Cells(places, places, torch.zeros(3, 1, count + 1, device="cuda"))
    sets = places[None, ..., 0].isfinite().float()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    _, log_sums = fused_attention_shares(query, key, scale=0.125, cells=cells)
    received = fused_attention_columns(query, key, scale=0.125, sets_XWN=sets, log_sums_BWHN=log_sums)
    maps = batch * heads * (count + 1) ** 2 * 4
    assert torch.cuda.max_memory_allocated() - before < 0.01 * maps
    torch.testing.assert_close(received.sum(-1), torch.full_like(received[..., 0], count), rtol=1e-4, atol=0)


@pytest.mark.gpu
def test_the_same_bits_each_time() -> None:
    """Sums have one order: nothing is added by whoever comes first."""
    query, key = torch.randn(2, 2, 1, 3, 261, 64, device="cuda", dtype=torch.bfloat16)
    sets = torch.ones(1, 1, 261, device="cuda")
    first, second = (fused_attention_columns(query, key, scale=0.125, sets_XWN=sets) for _ in range(2))
    assert torch.equal(first, second)


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED, reason="needs Triton's compiler")
def test_rows_go_through_the_compiler_and_shares_alone_do_less() -> None:
    """For a Hopper GPU, which need not be there: the interpreter takes more than the compiler does."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    pointers = dict.fromkeys(("log_sums", "query_cells", "key_cells", "key_kinds", "shares"), "*fp32")
    pointers |= {"query": "*bf16", "key": "*bf16", "scale": "fp32"}
    sizes = {
        "WIDTH": 64,
        "WIDTH_BLOCK": 64,
        "SIDE": 64,
        "BIAS": "none",
        "PRECISION": "ieee",
        "LOW": -1e30,
        "bias": None,
    }
    num_sums = []
    for has_cells, has_places in ((False, False), (True, False), (True, True)):
        constants = sizes | {"CELLS": has_cells, "PLACES": has_places}
        if not has_cells:
            constants |= dict.fromkeys(("query_cells", "key_cells", "key_kinds", "shares"))
        names = inspect.signature(columns._rows.fn).parameters
        types = {name: "constexpr" if name in constants else pointers.get(name, "i32") for name in names}
        source = ASTSource(fn=columns._rows, signature=types, constexprs=constants)
        code = compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4}).asm["ptx"]
        num_sums.append(code.count("shfl.sync"))
    assert num_sums == sorted(set(num_sums))
