"""Training by the Modern protocol: the stacked engine at several K against one model in the ordinary loop.

The ordinary loop is `nearsight.bench.ordinary`: eager, bfloat16 autocast on CUDA, torchvision transforms in a
DataLoader with a worker per core. It is measured on PIL images and on uint8 tensors; the faster of the two has a row,
which says which, and is what the others are compared with. Both sides train the compact ViT on images of CIFAR's size
by the same protocol and split. Each is warmed up for an epoch (workers start, programs compile) and then timed over
whole epochs, so that augmentation, validation and whatever else an epoch needs are included in their true proportion.
Images per second are training images of all cells.

The floor is the time in which the device's bfloat16 peak would do an epoch's matrix products: forward and backward of
the training images, forward of those held out.

Two rows train one model without augmentation: a loop written by hand for speed (images on the device, `torch.compile`
on a GPU) and nearsight. Their ratio is what the engine's step is worth by itself.

On a CPU two more rows train four small cells, stacked and one after the other, in alternating epochs. CPU rows want an
idle machine: with one of two cores taken, OpenMP's threads wait for each other, and the rows with the smallest
operations suffer most (cells one after another ran 10 times slower than on one thread, stacked ones 4 times).
OMP_NUM_THREADS=1 avoids that.

What to expect on an H200. The model takes 0.33 GFLOP forward and 1.00 forward and backward; with an image held out for
every four that train, the floor is 1.08 GFLOP per training image, which bounds it to 912 k images/s.

    nearsight bench train --device cuda
"""

import contextlib
import dataclasses
import functools
import gc
import itertools
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import get_args

import torch

from nearsight.bench.costs import PeakMemory, StepClock, check_counts, flops_per_image, peak_flops
from nearsight.bench.ordinary import (
    CIFAR100_MEAN,
    CIFAR100_STD,
    CompiledLoop,
    Kind,
    OrdinaryLoop,
    picture_like_images,
)
from nearsight.data import Dataset, ImageSet, load_dataset
from nearsight.errors import InputError, check_at_least
from nearsight.models import ModelConfig
from nearsight.train import DataConfig, RunConfig, modern
from nearsight.train.engine import Stack

RunEpoch = Callable[[Callable[[int], None]], object]

_NUM_SMALL_CELLS = 4
_SMALL = ModelConfig(depth=2, width=48, num_heads=4, mlp_width=96)


@dataclass(frozen=True, kw_only=True)
class TrainRow:
    """One way of training, measured."""

    what: str
    """The ordinary loop and its images, nearsight, or the small cells in either order."""
    model: str
    """With what about it is not as usual."""
    device: str
    num_threads: int
    """CPU threads torch computes with, beside the DataLoader's workers."""
    precision: str
    batch_size: int
    """Per cell."""
    num_cells: int
    images_per_epoch: int
    """Training images a cell sees in an epoch."""
    flops_per_image: float
    """Of a training image, with its share of the validation."""
    images_per_second: float
    """Training images of all cells; validation included in the time."""
    ratio: float
    """Images per second against the ordinary loop; without augmentation, against the compiled one; for the small cells,
    against one after another."""
    floor_share: float | None
    """Time at the device's bfloat16 peak over the time it took; None where the peak is not known."""
    extra_bytes: int | None
    """Peak memory of starting and a first epoch. CUDA: allocated by torch; CPU: growth of this process's peak resident
    set (Linux), which memory kept from earlier rows makes smaller. None for small cells, held together."""
    epoch_seconds: float
    """Mean time of an epoch of all cells."""
    slowest_step: float | None
    """Slowest step over the median. The first step of an epoch is left out: preparing the epoch counts into it."""


def bench_train(
    *,
    device: str,
    num_cells: Sequence[int] | None = None,
    num_images: int | None = None,
    seconds: float = 5.0,
    batch_size: int = 128,
    image_size: int = 32,
    model: ModelConfig | None = None,
    num_workers: int | None = None,
) -> list[TrainRow]:
    """Every way in this process, one after the other, each for about `seconds` and at least an epoch.

    `num_images` are split into training and validation images, 4 to 1: 50,000 by default on a GPU and 640 on a CPU.
    `num_cells` lists the stack sizes K: 1, 8 and 24 on a GPU, 1 and 4 on a CPU. A DataLoader worker per core.
    """
    where = torch.device(device)
    on_gpu = where.type == "cuda"
    if num_cells is None:
        num_cells = (1, 8, 24) if on_gpu else (1, 4)
    if num_images is None:
        num_images = 50_000 if on_gpu else 640
    check_counts("num_cells", num_cells)
    check_at_least("num_images", num_images, 1)
    check_at_least("seconds", seconds, 0)
    if num_workers is None:
        num_workers = os.cpu_count() or 1
    config = RunConfig(
        model=model or ModelConfig(),
        data=DataConfig(name="cifar100"),
        protocol=dataclasses.replace(modern(), batch_size=batch_size),
        precision="bf16" if on_gpu else "fp32",
    )
    dataset = cifar_like(num_images, image_size)
    work = _Work(config, dataset, where)
    plain = dataclasses.replace(config, protocol=dataclasses.replace(config.protocol, augment=()))
    with torch.cuda.device(where) if on_gpu else contextlib.nullcontext():
        ordinary = _fastest_ordinary(work, seconds, num_workers)
        rows = [ordinary]
        for cells in num_cells:
            stack = functools.partial(work.stack, range(cells))
            rows.append(_row(work, seconds, "nearsight", cells, stack, ordinary.images_per_second))
        rows += _without_augmentation(_Work(plain, dataset, where), seconds)
        if where.type == "cpu":
            rows += _small_cells(config, num_images, seconds)
    return rows


def _without_augmentation(work: "_Work", seconds: float) -> list[TrainRow]:
    kind = "compiled" if work.device.type == "cuda" else "plain"
    peer = _row(work, seconds, f"{kind} loop, unaugmented", 1, work.compiled)
    ours = functools.partial(work.stack, [0])
    return [peer, _row(work, seconds, "nearsight, unaugmented", 1, ours, peer.images_per_second)]


def _small_cells(config: RunConfig, num_images: int, seconds: float) -> list[TrainRow]:
    config = dataclasses.replace(config, model=_SMALL, data=DataConfig(name="shapes"))
    work = _Work(config, load_dataset("shapes", num_train=num_images, num_test=1), torch.device("cpu"))
    seeds, named = range(_NUM_SMALL_CELLS), f"{_NUM_SMALL_CELLS} cells"
    alone = _Way(work, f"{named} one after another", len(seeds), [functools.partial(work.stack, [k]) for k in seeds])
    stacked = _Way(work, f"{named} stacked", len(seeds), [lambda: work.stack(seeds)])
    _alternate([alone, stacked], seconds)
    alone.extra_bytes = stacked.extra_bytes = None  # both are held at once, so they cannot be measured apart
    return [alone.row(), stacked.row(alone.images_per_second)]


def cifar_like(num_images: int, side: int = 32) -> Dataset:
    images, labels = picture_like_images(num_images, side), torch.arange(num_images) % 100
    return Dataset(
        name="cifar100",
        classes=tuple(f"class {label}" for label in range(100)),
        image_size=(side, side),
        mean=CIFAR100_MEAN,
        std=CIFAR100_STD,
        train=ImageSet(images, labels),
        test=ImageSet(images[:1], labels[:1]),
        fingerprint="synthetic",
    )


class _Work:
    """What every cell has to do in an epoch."""

    def __init__(self, config: RunConfig, dataset: Dataset, device: torch.device) -> None:
        self.config, self.dataset, self.device = config, dataset, device
        num_validated = round(len(dataset.train) * config.data.validation_fraction)
        batch_size = config.protocol.batch_size
        self.num_trained = (len(dataset.train) - num_validated) // batch_size * batch_size
        if self.num_trained == 0:
            raise InputError(
                f"{len(dataset.train)} images leave no batch of {batch_size} to train on; take more images"
            )
        model = config.model.build(dataset.image_size, dataset.num_classes)
        forward, both = flops_per_image(model, dataset.image_size)
        self.flops = self.num_trained * both + num_validated * forward

    def stack(self, seeds: Sequence[int]) -> RunEpoch:
        configs = [dataclasses.replace(self.config, seed=seed) for seed in seeds]
        return Stack.start(configs, self.dataset, self.device).run_epoch

    def ordinary(self, kind: Kind, num_workers: int) -> RunEpoch:
        return OrdinaryLoop(self.config, self.dataset, self.device, num_workers=num_workers, kind=kind).run_epoch

    def compiled(self) -> RunEpoch:
        return CompiledLoop(self.config, self.dataset, self.device).run_epoch


class _Way:
    """Something that trains, warmed up for an epoch, and how long its epochs and steps took since."""

    def __init__(self, work: _Work, what: str, num_cells: int, starts: Sequence[Callable[[], RunEpoch]]) -> None:
        self.work, self.what, self.num_cells = work, what, num_cells
        gc.collect()
        torch.cuda.empty_cache()  # what the last way left in the cache would count as taken memory
        memory = PeakMemory(str(work.device))
        self.runners = [start() for start in starts]
        self.epoch_seconds: list[float] = []
        self.step_seconds: list[float] = []
        self.run_epoch()
        self.extra_bytes = memory.growth()
        self.epoch_seconds.clear()
        self.step_seconds.clear()

    def run_epoch(self) -> None:
        start = time.perf_counter()
        clocks = [StepClock(self.work.device) for _ in self.runners]
        for run_epoch, clock in zip(self.runners, clocks, strict=True):
            run_epoch(clock)
        if self.work.device.type == "cuda":
            torch.cuda.synchronize()
        self.epoch_seconds.append(time.perf_counter() - start)
        for clock in clocks:
            self.step_seconds += clock.seconds()

    @property
    def images_per_second(self) -> float:
        return self.num_cells * self.work.num_trained / statistics.mean(self.epoch_seconds)

    def row(self, peer: float | None = None) -> TrainRow:
        work, config = self.work, self.work.config
        on_gpu = work.device.type == "cuda"
        epoch_seconds = statistics.mean(self.epoch_seconds)
        peak = peak_flops(work.device) if config.precision == "bf16" else None
        steps = self.step_seconds
        return TrainRow(
            what=self.what,
            model=_named(config.model),
            device=torch.cuda.get_device_name(work.device) if on_gpu else str(work.device),
            num_threads=torch.get_num_threads(),
            precision=config.precision,
            batch_size=config.protocol.batch_size,
            num_cells=self.num_cells,
            images_per_epoch=work.num_trained,
            flops_per_image=work.flops / work.num_trained,
            images_per_second=self.images_per_second,
            ratio=self.images_per_second / peer if peer else 1.0,
            floor_share=self.num_cells * work.flops / peak / epoch_seconds if peak else None,
            extra_bytes=self.extra_bytes,
            epoch_seconds=epoch_seconds,
            slowest_step=max(steps) / statistics.median(steps) if steps else None,
        )


def _named(model: ModelConfig) -> str:
    """Its name, and what is not as usual."""
    usual = ModelConfig()
    settings = {field.name: getattr(model, field.name) for field in dataclasses.fields(model) if field.name != "name"}
    unusual = [f"{name} {value}" for name, value in settings.items() if value != getattr(usual, name)]
    return ", ".join([model.name, *unusual])


def _alternate(ways: Sequence[_Way], seconds: float) -> None:
    """Epochs of the ways in turn, until each has had its time."""
    while any(not way.epoch_seconds or sum(way.epoch_seconds) < seconds for way in ways):
        for way in ways:
            way.run_epoch()


def _row(
    work: _Work, seconds: float, what: str, num_cells: int, start: Callable[[], RunEpoch], peer: float | None = None
) -> TrainRow:
    """One way on its own; its memory and processes are given back before the next one starts."""
    way = _Way(work, what, num_cells, [start])
    _alternate([way], seconds)
    return way.row(peer)


def _fastest_ordinary(work: _Work, seconds: float, num_workers: int) -> TrainRow:
    """On PIL images or on tensors, whichever is faster here: the ratios are to the best that people would use."""
    rows = [
        _row(work, seconds, f"ordinary loop, {kind}", 1, functools.partial(work.ordinary, kind, num_workers))
        for kind in get_args(Kind)
    ]
    return max(rows, key=lambda row: row.images_per_second)


def table(rows: Sequence[TrainRow]) -> str:
    """A part for each kind of work, below a line that says which: the small cells are another model's."""
    titles = (
        f"{'way':<28}{'K':>4}{'images/s':>11}{'ratio':>8}{'of floor':>10}{'extra MB':>10}{'s/epoch':>10}"
        f"{'slowest/median step':>21}"
    )
    parts = []
    for work, ways in itertools.groupby(rows, _described):
        parts.append("\n".join([work, titles, *map(_line, ways)]))
    return "\n\n".join(parts)


def _described(row: TrainRow) -> str:
    """What is trained, on what, and where."""
    device = f"cpu (threads: {row.num_threads})" if row.device == "cpu" else row.device
    return (
        f"{row.model}, {row.precision}, {device}, batch {row.batch_size}, {row.images_per_epoch:,} training images, "
        f"{row.flops_per_image / 1e9:.3g} GFLOP each with its share of validation"
    )


def _line(row: TrainRow) -> str:
    share = "-" if row.floor_share is None else f"{row.floor_share:.1%}"
    extra = "-" if row.extra_bytes is None else f"{row.extra_bytes / 1e6:,.0f}"
    slowest = "-" if row.slowest_step is None else f"{row.slowest_step:.2f}"
    return (
        f"{row.what:<28}{row.num_cells:>4}{row.images_per_second:>11,.0f}{row.ratio:>8.2f}{share:>10}{extra:>10}"
        f"{row.epoch_seconds:>10.3f}{slowest:>21}"
    )
