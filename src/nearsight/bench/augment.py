"""The Modern CIFAR augmentations (crop, flip, AutoAugment, CutMix, normalise): nearsight against torchvision.

Ours starts from a uint8 data set on the device and includes picking the batch. torchvision's runs in a DataLoader with
a worker per core, CutMix in its collate function, and includes the copy to the device. It is measured as people use it,
on PIL images, and on uint8 tensors; ratios are against the faster of the two. On a CPU ours runs on one thread
(`nearsight.augment.pipeline`) against torchvision on all cores.

What to expect on a GPU, before measuring. Counted with a dispatch mode on the fixed-shape path, eager: 860 kernels
per call whatever the batch, and 1.9 MB read and written per 32×32 image (AutoAugment 1.8 MB, most of it the int64 and
float32 temporaries of its two passes; crop and flip 60 kB, CutMix 30 kB, normalise 66 kB). At 4.8 TB/s that bounds an
H200 to 2.5 M images/s; launches of 4 µs bound a batch of 3,072 to 0.9 M, a captured graph (1.5 µs each) to 2.4 M.
Compiled, temporaries stay in registers. What must move is the picture between gathers and histograms (some 20 reads or
writes of 3 kB), histograms and tables (four of 1 to 3 kB), and 12 kB out: about 100 kB per image.

    nearsight bench augment --device cuda
"""

import os
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import get_args

import torch
from torch import Tensor

from nearsight.augment import Augmentation, AutoAugment, CutMix, HorizontalFlip, Pipeline, RandomCrop
from nearsight.augment.pipeline import threads_for
from nearsight.bench.costs import PeakMemory, check_counts, wait_for
from nearsight.bench.ordinary import (
    CIFAR100_MEAN,
    CIFAR100_STD,
    CUTMIX_P,
    PADDING,
    Kind,
    Loader,
    picture_like_images,
    torchvision_loader,
)
from nearsight.errors import InputError, check_at_least, check_positive
from nearsight.randomness import Draws

Augment = Callable[[Tensor, Tensor, Draws], tuple[Tensor, Tensor]]


@dataclass(frozen=True, kw_only=True)
class AugmentRow:
    """One way of augmenting, measured."""

    what: str
    """nearsight eager / compiled / graph / compiled graph, or torchvision on PIL images / tensors."""
    device: str
    num_cells: int
    batch_size: int
    images_per_second: float
    ratio: float
    """Images per second against the faster torchvision."""
    extra_bytes: int | None
    """Peak memory beyond the data set. CUDA: max_memory_allocated; CPU: growth of the peak resident set (Linux)."""


def bench_augment(
    *,
    device: str,
    num_images: int = 10_000,
    batch_size: int = 128,
    seconds: float = 5.0,
    num_cells: Sequence[int] | None = None,
    num_classes: int = 100,
    mean: Sequence[float] = CIFAR100_MEAN,
    std: Sequence[float] = CIFAR100_STD,
) -> list[AugmentRow]:
    """Both libraries in this process, each for about `seconds` per row: torchvision first, then ours.

    `num_cells` lists the stack sizes K; by default 1 on a CPU and 1 and 24 on a GPU. Batches of K × batch_size.
    """
    on_gpu = torch.device(device).type == "cuda"
    if num_cells is None:
        num_cells = (1, 24) if on_gpu else (1,)
    _check(num_images, batch_size, seconds, num_cells)
    images = picture_like_images(num_images)
    labels = torch.arange(num_images) % num_classes
    peers = {}
    for kind in get_args(Kind):
        loader = torchvision_loader(
            images,
            labels,
            kind,
            batch_size=batch_size,
            num_classes=num_classes,
            mean=mean,
            std=std,
            num_workers=os.cpu_count() or 1,
            pin_memory=on_gpu,
        )
        peers[f"torchvision {kind}"] = _speed(_torchvision_steps(loader, device), batch_size, seconds, device)
    fastest = max(peers.values())
    rows = [_row(what, device, 1, batch_size, speed, fastest, None) for what, speed in peers.items()]
    data, data_labels = images.to(device), labels.to(device)
    modern: list[Augmentation] = [RandomCrop(padding=PADDING), HorizontalFlip(), AutoAugment(), CutMix(p=CUTMIX_P)]
    for cells in num_cells:
        pipeline = Pipeline.stack(
            [modern] * cells, num_classes=num_classes, mean=mean, std=std, device=torch.device(device)
        )
        ways: dict[str, Augment] = {"eager": pipeline}
        if on_gpu:
            # Programs for other stack sizes would count against the limit on recompilations of one function.
            torch.compiler.reset()
            compiled = torch.compile(pipeline, fullgraph=True, dynamic=False)
            ways |= {"graph": pipeline, "compiled": compiled, "compiled graph": compiled}
        for way, augment in ways.items():
            memory = PeakMemory(device)
            steps = _our_steps(augment, data, data_labels, cells, batch_size, captured=way.endswith("graph"))
            speed = _speed(steps, cells * batch_size, seconds, device)
            rows.append(_row(f"nearsight {way}", device, cells, batch_size, speed, fastest, memory.growth()))
    return rows


def _check(num_images: int, batch_size: int, seconds: float, num_cells: Sequence[int]) -> None:
    check_at_least("batch_size", batch_size, 1)
    if num_images < batch_size:  # the DataLoader drops a batch that is not full, and would wait for one forever
        raise InputError(
            f"num_images is {num_images}, but one batch needs {batch_size}; take more images, or a smaller batch_size"
        )
    check_positive("seconds", seconds)
    check_counts("num_cells", num_cells)


def _row(
    what: str, device: str, num_cells: int, batch_size: int, speed: float, peer: float, extra: int | None
) -> AugmentRow:
    return AugmentRow(
        what=what,
        device=device,
        num_cells=num_cells,
        batch_size=batch_size,
        images_per_second=speed,
        ratio=speed / peer,
        extra_bytes=extra,
    )


def _our_steps(
    augment: Augment, data: Tensor, labels: Tensor, num_cells: int, batch_size: int, *, captured: bool
) -> Generator[None]:
    device = data.device
    index_KB = torch.zeros(num_cells, batch_size, dtype=torch.int64, device=device)
    step = torch.zeros((), dtype=torch.int64, device=device)
    draws = Draws(torch.arange(num_cells, device=device), torch.zeros_like(step), step, index_KB)

    def work() -> tuple[Tensor, Tensor]:
        with threads_for(data[: index_KB.numel()]):
            return augment(data[index_KB], labels[index_KB], draws)

    run: Callable[[], object] = _captured(work) if captured else work
    while True:
        step.add_(1)
        index_KB.random_(len(data))
        run()
        yield


def _captured(work: Callable[[], object]) -> Callable[[], object]:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = work()

    def replay() -> object:
        graph.replay()
        return kept

    return replay


def _torchvision_steps(loader: Loader, device: str) -> Generator[None]:
    while True:
        for batch, targets in loader:
            batch.to(device, non_blocking=True)
            targets.to(device, non_blocking=True)
            yield


def _speed(steps: Generator[None], images_per_step: int, seconds: float, device: str) -> float:
    """Images per second after warming up for three steps (compiling, starting workers, filling their queues)."""
    for _ in range(3):
        next(steps)
    wait_for(device)
    start = time.perf_counter()
    num_steps = 0
    while num_steps == 0 or time.perf_counter() - start < seconds:
        next(steps)
        num_steps += 1
        # Launches run ahead of the device: without a wait now and then, a queue of them would overrun the time.
        if num_steps % 20 == 0:
            wait_for(device)
    wait_for(device)
    speed = num_steps * images_per_step / (time.perf_counter() - start)
    steps.close()
    return speed


def table(rows: Sequence[AugmentRow]) -> str:
    lines = [f"{'what':<26}{'K':>4}{'B':>6}{'images/s':>12}{'ratio':>8}{'extra MB':>10}"]
    for row in rows:
        extra = "-" if row.extra_bytes is None else f"{row.extra_bytes / 1e6:.0f}"
        lines.append(
            f"{row.what:<26}{row.num_cells:>4}{row.batch_size:>6}{row.images_per_second:>12,.0f}{row.ratio:>8.1f}{extra:>10}"
        )
    return "\n".join(lines)
