"""What work costs: time and memory, what must be computed at the least and could be at the most; and its sizes."""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from nearsight.errors import InputError, check_at_least
from nearsight.locat import Grid

_NUM_TURNS = 5
Step = Callable[[], object]


def wait_for(device: torch.device | str) -> None:
    """Until a GPU has done what it was given; a CPU has."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


class StepClock:
    """When the steps of an epoch end, as an `on_step` callback.

    On CUDA it records events on the device's own time line, to be read when the epoch is over: asking for the time
    there and then would make every step wait for the host, and the host's clock would only show when work was queued.
    """

    def __init__(self, device: torch.device) -> None:
        self.on_gpu = device.type == "cuda"
        self.events: list[torch.cuda.Event] = []
        self.times: list[float] = []

    def __call__(self, step: int) -> None:
        if self.on_gpu:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.events.append(event)
        else:
            self.times.append(time.perf_counter())

    def seconds(self) -> list[float]:
        """From the end of each step to the end of the next; the device must be done."""
        if self.on_gpu:
            return [earlier.elapsed_time(later) / 1e3 for earlier, later in pairwise(self.events)]
        return [later - earlier for earlier, later in pairwise(self.times)]


class PeakMemory:
    """How far memory grew at its highest since this object was made.

    On a CPU that is the resident set (Linux), which grows by too little where the allocator still holds memory from
    before. With `exact`, nothing is said there: differences between small pieces of work drown in it.
    """

    def __init__(self, device: str, *, exact: bool = False) -> None:
        self.on_gpu = torch.device(device).type == "cuda"
        self.before: int | None = None
        if self.on_gpu:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            self.before = torch.cuda.memory_allocated()
        elif not exact:
            try:
                # "5" resets the peak of the resident set (man 5 proc).
                with open("/proc/self/clear_refs", "w") as file:
                    file.write("5")
            except OSError:
                return
            self.before = _resident_bytes("VmRSS")

    def growth(self) -> int | None:
        """In bytes; None where it cannot be known."""
        if self.before is None:
            return None
        peak = torch.cuda.max_memory_allocated() if self.on_gpu else _resident_bytes("VmHWM")
        # Linux counts the resident set in batches, so that a peak can read lower than what was there before.
        return max(0, peak - self.before)


def _resident_bytes(name: str) -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(name))


_PEAK_BF16 = {
    "NVIDIA H200": 989e12,
    "NVIDIA H100 80GB HBM3": 989e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA A100-SXM4-40GB": 312e12,
}
"""FLOP/s of dense bfloat16 products from the maker's data sheets, by the name torch gives the device.

Names are whole on purpose: PCIe and NVL cards of the same family are slower."""


def peak_flops(device: torch.device) -> float | None:
    """The device's bfloat16 peak, where it is known."""
    return _PEAK_BF16.get(torch.cuda.get_device_name(device)) if device.type == "cuda" else None


def flops_per_image(model: nn.Module, image_size: tuple[int, int]) -> tuple[int, int]:
    """(forward, forward and backward) of one image: the matrix products, two operations per multiply-add."""
    image = torch.zeros(1, 3, *image_size, device=next(model.parameters()).device)
    # A fused backward computes the attention a second time; the count is to be of the work, not of a kernel's habits.
    with sdpa_kernel(SDPBackend.MATH):
        with FlopCounterMode(display=False) as forward:
            output = model(image).sum()
        with FlopCounterMode(display=False) as backward:
            torch.autograd.grad(output, list(model.parameters()))
    return forward.get_total_flops(), forward.get_total_flops() + backward.get_total_flops()


def check_counts(name: str, counts: Sequence[int]) -> None:
    """Each makes a row: there must be one, and none that leaves nothing to do."""
    if not counts:
        raise InputError(f"{name} is empty; give at least one number, or leave it out")
    for count in counts:
        check_at_least(name, count, 1)


def check_sizes(num_tokens: Sequence[int], batch_sizes: Sequence[int]) -> None:
    """Numbers of tokens that a square image has, with a batch size for each."""
    check_counts("num_tokens", num_tokens)
    for tokens in num_tokens:
        grid_of(tokens)
    check_counts("batch_sizes", batch_sizes)
    if len(batch_sizes) != len(num_tokens):
        raise InputError(f"num_tokens has {len(num_tokens)} numbers and batch_sizes {len(batch_sizes)}; give as many")


def grid_of(num_tokens: int) -> Grid:
    """Where CLS and a square of patches lie."""
    side = math.isqrt(max(0, num_tokens - 1))
    if side < 1 or 1 + side * side != num_tokens:
        raise InputError(f"{num_tokens} tokens are not CLS and a square of patches: take 197, 1025 or 4097, say")
    return Grid(side, side, 1)


@dataclass(frozen=True, kw_only=True)
class CostRow:
    """One way of doing one piece of work, forward and backward."""

    work: str
    """Attention, or a training step of a model."""
    way: str
    """plain, nearsight, dense or flex."""
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
    limit: float | None = None
    """What the ratio is to be at most, if there is such an aim."""
    note: str = ""
    """Why there is no number."""


def compare(
    work: str, ways: dict[str, Step], num_steps: int, *, limit: float | None = None, **shared: Any
) -> list[CostRow]:
    """A row for each way. They take turns of so many steps, and times are medians of their turns."""
    device = shared["device"]
    peaks = {way: _peak(step, device) for way, step in ways.items()}
    times: dict[str, list[float]] = {way: [] for way, peak in peaks.items() if peak is not _TOO_LARGE}
    for _ in range(_NUM_TURNS):
        for way, turns in times.items():
            turns.append(_timed(ways[way], num_steps, device))
    medians = {way: statistics.median(turns) for way, turns in times.items()}
    return [
        CostRow(
            work=work,
            way=way,
            milliseconds=medians.get(way),
            ratio=medians[way] / medians["plain"] if way in medians else None,
            extra_bytes=peaks[way] if way in medians else None,
            limit=limit if way == "nearsight" else None,
            note="" if way in medians else "not enough memory",
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
    step()
    wait_for(device)
    start = time.perf_counter()
    for _ in range(num_steps):
        step()
    wait_for(device)
    return (time.perf_counter() - start) * 1e3 / num_steps


def cost_table(rows: Sequence[CostRow], title: str) -> str:
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
    return "\n".join([title, cells("work", "tokens", "B", "way", "dtype", "ms", "ratio", "extra MB"), *lines])
