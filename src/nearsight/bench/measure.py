"""What looking costs: `measure` against the plain forward, and against holding every attention map in memory.

The same model and batch three ways in one process: the forward alone (fused attention); what `nearsight.measure` does
with each batch (the survey, done once per model and image size, has its own column); and the way of
`output_attentions`: unfused attention with the maps of all layers kept until the forward ends, without
computing anything from them. Further measurements (`what`) are ways of their own, each together with `measure`, whose
times are compared with it. Ways take turns after a batch to warm up, and times are medians of their turns.

What to expect. Looking computes the logits a second time and, per pair of tokens and head, one exponential and one
distance. For ViT-B/16 that is 1.8 % of the forward's multiplications at 197 tokens, 7.8 % at 1,025 and 19 % at 4,097
(2·N²·768 of 24·N·768² + 4·N²·768 per layer); the rest is element-wise work of the size of the softmax that attention
itself does.

    nearsight bench measure --device cuda
    nearsight bench measure --device cuda --num-tokens 197 --what norms lds sinks kinds shares
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from nearsight.bench.costs import PeakMemory, check_sizes, grid_of
from nearsight.errors import InputError, check_at_least
from nearsight.lens import survey
from nearsight.lens.inputs import as_batch
from nearsight.lens.measurement import Measurement
from nearsight.lens.measuring import Look, chosen, finished
from nearsight.models import create_model

_NUM_TURNS = 5
_PATCH = 16
_MOST_MAP_BYTES = {"cuda": 64 * 2**30, "cpu": 4 * 2**30}
"""Maps that would take more than this are not materialised."""
Work = Callable[[int], object]
"""On so many batches."""


@dataclass(frozen=True, kw_only=True)
class MeasureRow:
    """One number of tokens, three ways."""

    model: str
    device: str
    dtype: str
    num_tokens: int
    batch_size: int
    forward_ms: float
    measure_ms: float
    """Per batch."""
    ratio: float
    """measure / forward."""
    survey_ms: float
    """Once per model and image size."""
    maps_ms: float | None
    """A forward that keeps its maps; None if they would be too large."""
    extra_bytes: int | None
    """Peak memory of measuring beyond that of the forward; None on a CPU, where it cannot be known."""
    maps_extra_bytes: int | None
    """Peak memory of keeping the maps beyond that of the forward; None likewise, or if they would be too large."""
    what_ms: dict[str, float] = field(default_factory=dict)
    """Per batch, of measuring together with one further measurement each."""

    @property
    def share_of_maps(self) -> float | None:
        """Extra memory of measuring as a share of that of keeping the maps."""
        if not self.maps_extra_bytes or self.extra_bytes is None:
            return None
        return self.extra_bytes / self.maps_extra_bytes


def bench_measure(
    *,
    device: str,
    model: str = "vit_base_patch16_224",
    num_tokens: Sequence[int] = (197, 1025, 4097),
    batch_sizes: Sequence[int] | None = None,
    num_batches: int | None = None,
    dtype: torch.dtype | None = None,
    what: Sequence[str] = (),
) -> list[MeasureRow]:
    """Rows for square images of as many patches; tokens are patches and CLS. bfloat16 on CUDA, float32 elsewhere.

    `what` are further measurements, each of which is timed. `num_batches` is the length of a turn, of which each way
    has five: 8 by default on a GPU and 2 elsewhere.
    """
    on_gpu = torch.device(device).type == "cuda"
    dtype = dtype or (torch.bfloat16 if on_gpu else torch.float32)
    if batch_sizes is None:
        batch_sizes = [_default_batch_size(tokens, on_gpu=on_gpu) for tokens in num_tokens]
    if num_batches is None:
        num_batches = 8 if on_gpu else 2
    check_sizes(num_tokens, batch_sizes)
    check_at_least("num_batches", num_batches, 1)
    chosen(what)
    _check_model(model)
    return [
        _bench_tokens(model, tokens, batch_size, num_batches, device, dtype, what)
        for tokens, batch_size in zip(num_tokens, batch_sizes, strict=True)
    ]


def _default_batch_size(num_tokens: int, *, on_gpu: bool) -> int:
    if not on_gpu:
        return 8 if num_tokens < 1000 else 2 if num_tokens < 4000 else 1
    return 128 if num_tokens < 1000 else 32 if num_tokens < 4000 else 8


def _check_model(name: str) -> None:
    """Only of such a model is the image's size known from the tokens, and can maps be kept."""
    with torch.device("meta"):
        model: Any = create_model(name)
    patch_size = getattr(getattr(model, "patch_embed", None), "patch_size", None)
    attentions = [getattr(block, "attn", None) for block in getattr(model, "blocks", ())]
    keeps_maps = all(hasattr(attention, "fused_attn") and hasattr(attention, "attn_drop") for attention in attentions)
    if patch_size != (_PATCH, _PATCH) or getattr(model, "num_prefix_tokens", 0) != 1 or not (attentions and keeps_maps):
        raise InputError(
            f"{name} is not a ViT of timm's with CLS, patches of {_PATCH} pixels and attention that can be fused or "
            "not; take vit_base_patch16_224, say"
        )


def _bench_tokens(
    name: str,
    num_tokens: int,
    batch_size: int,
    num_batches: int,
    device: str,
    dtype: torch.dtype,
    what: Sequence[str],
) -> MeasureRow:
    side = _PATCH * grid_of(num_tokens).rows
    model: Any = create_model(name, img_size=side, num_classes=0).to(device, dtype).eval()
    images = torch.randn(batch_size, 3, side, side, device=device, dtype=dtype)

    def forward(count: int) -> None:
        with torch.no_grad():
            for _ in range(count):
                model(images)

    def look(further: Sequence[Measurement], count: int) -> None:
        with torch.no_grad():
            for _ in finished(Look(model, as_batch(images), found, further) for _ in range(count)):
                pass

    survey_ms, _ = _timed(lambda _: survey(model, images[0]), 1, device)
    found = survey(model, images[0])
    ways: dict[str, Work] = {"forward": forward, "measure": partial(look, ())}
    for one, kind in zip(dict.fromkeys(what), chosen(what), strict=True):
        with torch.no_grad():
            ways[one] = partial(look, [kind(model, found, as_batch(images))])
    map_bytes = len(model.blocks) * batch_size * model.blocks[0].attn.num_heads * num_tokens**2 * dtype.itemsize
    if map_bytes <= _MOST_MAP_BYTES.get(torch.device(device).type, 0):
        ways["maps"] = lambda count: _keep_maps(model, images, count)
    milliseconds, peaks = _take_turns(ways, num_batches, device)
    return MeasureRow(
        model=name,
        device=device,
        dtype=str(dtype).removeprefix("torch."),
        num_tokens=num_tokens,
        batch_size=batch_size,
        forward_ms=milliseconds["forward"],
        measure_ms=milliseconds["measure"],
        ratio=milliseconds["measure"] / milliseconds["forward"],
        survey_ms=survey_ms,
        maps_ms=milliseconds.get("maps"),
        extra_bytes=_difference(peaks["measure"], peaks["forward"]),
        maps_extra_bytes=_difference(peaks.get("maps"), peaks["forward"]),
        what_ms={one: milliseconds[one] for one in dict.fromkeys(what)},
    )


def _take_turns(ways: dict[str, Work], num_batches: int, device: str) -> tuple[dict[str, float], dict[str, int | None]]:
    """(median milliseconds per batch, growth of memory at its peak) of each way."""
    for work in ways.values():
        work(1)  # compiles the kernel where there is one
    times: dict[str, list[float]] = {way: [] for way in ways}
    peaks: dict[str, int | None] = {}
    for _ in range(_NUM_TURNS):
        for way, work in ways.items():
            milliseconds, peaks[way] = _timed(work, num_batches, device)
            times[way].append(milliseconds / num_batches)
    return {way: statistics.median(turns) for way, turns in times.items()}, peaks


def _keep_maps(model: Any, images: Tensor, count: int) -> None:
    """Forwards with unfused attention, each holding the maps of all its layers, as `output_attentions` does."""
    maps: list[Tensor] = []
    attentions: list[Any] = [block.attn for block in model.blocks]
    fused = [attention.fused_attn for attention in attentions]
    hooks = [
        a.attn_drop.register_forward_hook(lambda _module, inputs, _output: maps.append(inputs[0])) for a in attentions
    ]
    for attention in attentions:
        attention.fused_attn = False
    try:
        with torch.no_grad():
            for _ in range(count):
                model(images)
                maps.clear()
    finally:
        for attention, was_fused, hook in zip(attentions, fused, hooks, strict=True):
            attention.fused_attn = was_fused
            hook.remove()


def _timed(work: Work, count: int, device: str) -> tuple[float, int | None]:
    """(milliseconds, growth of memory at its peak) of `work(count)`."""
    memory = PeakMemory(device, exact=True)
    start = time.perf_counter()
    work(count)
    if memory.on_gpu:
        torch.cuda.synchronize()
    return (time.perf_counter() - start) * 1e3, memory.growth()


def _difference(more: int | None, less: int | None) -> int | None:
    return None if more is None or less is None else max(0, more - less)


def table(rows: Sequence[MeasureRow]) -> str:
    def cells(*values: str) -> str:
        return f"{values[0]:>7}{values[1]:>5}" + "".join(f"{value:>12}" for value in values[2:])

    def megabytes(value: int | None) -> str:
        return "-" if value is None else f"{value / 1e6:,.0f}"

    titles = (
        "tokens",
        "B",
        "forward ms",
        "measure ms",
        "ratio",
        "maps ms",
        "survey ms",
        "extra MB",
        "maps MB",
        "share",
    )
    lines = [
        cells(
            str(row.num_tokens),
            str(row.batch_size),
            f"{row.forward_ms:,.1f}",
            f"{row.measure_ms:,.1f}",
            f"{row.ratio:.2f}",
            "-" if row.maps_ms is None else f"{row.maps_ms:,.1f}",
            f"{row.survey_ms:,.0f}",
            megabytes(row.extra_bytes),
            megabytes(row.maps_extra_bytes),
            "-" if row.share_of_maps is None else f"{row.share_of_maps:.1%}",
        )
        for row in rows
    ]
    further = [
        f"{row.num_tokens:>7}{row.batch_size:>5}  with {name}: {milliseconds:,.1f} ms, "
        f"{milliseconds / row.measure_ms:.2f} times measure"
        for row in rows
        for name, milliseconds in row.what_ms.items()
    ]
    return "\n".join([f"{rows[0].model}, {rows[0].dtype}, {rows[0].device}", cells(*titles), *lines, *further])
