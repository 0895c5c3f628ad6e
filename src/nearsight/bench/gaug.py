"""What GAug costs: attention with the Gaussian bias against plain attention, and a whole training step with LocAt.

Attention, forward and backward, three ways in one process: plain (`scaled_dot_product_attention`); `nearsight`, by its
fused kernels where there are some, else by plain torch a tile at a time; and dense, where the bias of all pairs is made
in memory and given to plain attention as its mask, and autograd finds the gradients of widths and strengths. Queries,
keys and values are as timm packs them. Gradients are by all inputs there are. Then a training step of a whole model by
AdamW in bfloat16 autocast, plain and with LocAt. Ways take turns, and times are medians of their turns.

What to expect on a GPU. Per pair of tokens and head size 64, attention takes 256 FLOP forward and 640 backward; the
backward by two kernels, one for queries and one for keys, computes the weights twice: 896. That bounds it to 1.29 times
plain attention if both were bound by matrix units. The bias adds one multiply-add in each of three passes and two for
its own gradients, beside four to six operations per pair that are there anyway.

    nearsight bench gaug --device cuda
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nearsight.bench.costs import PeakMemory, check_sizes, grid_of
from nearsight.errors import InputError, check_at_least
from nearsight.locat import Grid, add_locat
from nearsight.locat.attend import attend
from nearsight.locat.gaussian import bias_between_tokens
from nearsight.models import create_model

_NUM_TURNS = 5
Step = Callable[[], object]


@dataclass(frozen=True, kw_only=True)
class GaugRow:
    """One way of doing one piece of work."""

    work: str
    """Attention, or a training step of a model."""
    way: str
    """plain, nearsight or dense."""
    device: str
    dtype: str
    num_tokens: int
    batch_size: int
    milliseconds: float | None
    """Forward and backward; None if there was not enough memory."""
    ratio: float | None
    """To plain."""
    extra_bytes: int | None
    """Peak memory beyond what was there before the step; None on a CPU, where it cannot be known."""


def bench_gaug(
    *,
    device: str,
    num_tokens: Sequence[int] | None = None,
    batch_sizes: Sequence[int] | None = None,
    num_heads: int = 12,
    head_size: int = 64,
    num_steps: int | None = None,
    model: str | None = "vit_base_patch16_224",
    model_batch_size: int | None = None,
) -> list[GaugRow]:
    """Rows for square grids of patches and CLS, and for the model unless it is None.

    bfloat16 on CUDA, float32 elsewhere. What is left out depends on the device, too: a CPU gets 197 and 1,025 tokens,
    a GPU 4,097 as well, and both as many images as make a step of some milliseconds or seconds. `num_steps` is the
    length of a turn, of which each way has five.
    """
    on_gpu = torch.device(device).type == "cuda"
    if num_tokens is None:
        num_tokens = (197, 1025, 4097) if on_gpu else (197, 1025)
    if batch_sizes is None:
        batch_sizes = [_default_batch_size(tokens, on_gpu=on_gpu) for tokens in num_tokens]
    num_steps = (10 if on_gpu else 1) if num_steps is None else num_steps
    _check(num_tokens, batch_sizes, num_steps, model)
    rows = []
    for tokens, batch_size in zip(num_tokens, batch_sizes, strict=True):
        ways = _attention_ways(grid_of(tokens), batch_size, num_heads, head_size, device)
        dtype = "bfloat16" if on_gpu else "float32"
        rows += _compare(
            "attention", ways, num_steps, device=device, dtype=dtype, num_tokens=tokens, batch_size=batch_size
        )
    if model is not None:
        batch_size = model_batch_size or (256 if on_gpu else 1)
        ways, tokens = _model_ways(model, batch_size, device)
        rows += _compare(
            model, ways, num_steps, device=device, dtype="bfloat16", num_tokens=tokens, batch_size=batch_size
        )
    return rows


def _default_batch_size(num_tokens: int, *, on_gpu: bool) -> int:
    if not on_gpu:
        return 2 if num_tokens < 1000 else 1
    return 256 if num_tokens < 1000 else 32 if num_tokens < 4000 else 8


def _check(num_tokens: Sequence[int], batch_sizes: Sequence[int], num_steps: int, model: str | None) -> None:
    """All that a user may have got wrong, before anything takes its time."""
    check_sizes(num_tokens, batch_sizes)
    check_at_least("num_steps", num_steps, 1)
    if model is not None:
        with torch.device("meta"):
            local: Any = add_locat(create_model(model))
        if local.num_classes == 0:
            raise InputError(f"{model} has no classifier to train; take vit_base_patch16_224, say")


def _attention_ways(grid: Grid, batch_size: int, num_heads: int, head_size: int, device: str) -> dict[str, Step]:
    """Widths and strengths as at the start of training: variances of 1 and strengths of ln 2, or nearly."""
    dtype = torch.bfloat16 if torch.device(device).type == "cuda" else torch.float32
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, generator=generator)

    packed = normal(batch_size, grid.num_tokens, 3, num_heads, head_size).to(dtype).permute(2, 0, 3, 1, 4)
    query, key, value = (matrix.requires_grad_() for matrix in packed.unbind(0))
    precision = (0.45 * torch.exp(0.1 * normal(batch_size, num_heads, grid.num_patches, 2))).requires_grad_()
    strength = F.softplus(0.1 * normal(batch_size, num_heads, grid.num_patches)).detach().requires_grad_()
    out_grad = normal(batch_size, grid.num_tokens, num_heads, head_size).to(dtype).transpose(1, 2)
    matrices, bumps = (query, key, value), (precision, strength)

    def plain() -> object:
        return torch.autograd.grad(F.scaled_dot_product_attention(*matrices), matrices, out_grad)

    def ours() -> object:
        out = attend(*matrices, *bumps, grid, scale=head_size**-0.5)
        return torch.autograd.grad(out, (*matrices, *bumps), out_grad)

    def dense() -> object:
        bias = bias_between_tokens(*bumps, grid, kernel="gaussian", largest_half_square=torch.inf)
        out = F.scaled_dot_product_attention(*matrices, attn_mask=bias.to(dtype))
        return torch.autograd.grad(out, (*matrices, *bumps), out_grad)

    return {"plain": plain, "nearsight": ours, "dense": dense}


def _model_ways(name: str, batch_size: int, device: str) -> tuple[dict[str, Step], int]:
    """(training steps of the model as it is and with LocAt, its number of tokens)."""
    on_gpu = torch.device(device).type == "cuda"

    def training_step(model: Any) -> Step:
        model = model.to(device).train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=on_gpu)
        images = torch.randn(batch_size, *model.pretrained_cfg["input_size"], device=device)
        labels = torch.arange(batch_size, device=device) % model.num_classes

        def step() -> None:
            with torch.autocast(torch.device(device).type, torch.bfloat16):
                loss = F.cross_entropy(model(images).float(), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    plain: Any = create_model(name)
    local = add_locat(create_model(name))
    num_tokens = plain.patch_embed.num_patches + getattr(plain, "num_prefix_tokens", 0)
    return {"plain": training_step(plain), "nearsight": training_step(local)}, num_tokens


def _compare(work: str, ways: dict[str, Step], num_steps: int, **shared: Any) -> list[GaugRow]:
    device = shared["device"]
    peaks = {way: _peak(step, device) for way, step in ways.items()}
    times: dict[str, list[float]] = {way: [] for way, peak in peaks.items() if peak is not _TOO_LARGE}
    for _ in range(_NUM_TURNS):
        for way, turns in times.items():
            turns.append(_timed(ways[way], num_steps, device))
    medians = {way: statistics.median(turns) for way, turns in times.items()}
    return [
        GaugRow(
            work=work,
            way=way,
            milliseconds=medians.get(way),
            ratio=medians[way] / medians["plain"] if way in medians else None,
            extra_bytes=peaks[way] if way in medians else None,
            **shared,
        )
        for way in ways
    ]


_TOO_LARGE = -1


def _peak(step: Step, device: str) -> int | None:
    """Growth of memory at the peak of a step, after one that compiles what there is to compile."""
    try:
        step()
        memory = PeakMemory(device, exact=True)
        step()
        return memory.growth()
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
        return _TOO_LARGE


def _timed(step: Step, num_steps: int, device: str) -> float:
    """Milliseconds per step."""
    on_gpu = torch.device(device).type == "cuda"
    step()
    if on_gpu:
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(num_steps):
        step()
    if on_gpu:
        torch.cuda.synchronize()
    return (time.perf_counter() - start) * 1e3 / num_steps


def table(rows: Sequence[GaugRow]) -> str:
    def cells(*values: str) -> str:
        work, num_tokens, batch_size, way, dtype, *numbers = values
        return f"{work:<24}{num_tokens:>7}{batch_size:>5}  {way:<11}{dtype:<10}" + "".join(f"{x:>10}" for x in numbers)

    lines = [
        cells(
            row.work,
            str(row.num_tokens),
            str(row.batch_size),
            row.way,
            row.dtype,
            "-" if row.milliseconds is None else f"{row.milliseconds:,.2f}",
            "-" if row.ratio is None else f"{row.ratio:.2f}",
            "-" if row.extra_bytes is None else f"{row.extra_bytes / 1e6:,.0f}",
        )
        for row in rows
    ]
    title = f"forward and backward on {rows[0].device}; models: a whole training step"
    return "\n".join([title, cells("work", "tokens", "B", "way", "dtype", "ms", "ratio", "extra MB"), *lines])
