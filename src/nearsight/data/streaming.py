"""Training pictures decoded anew in every epoch, by processes of this machine, into memory that they share.

A batch is divided into tasks: some pictures of one cell, which a process reads, crops and resizes into their places in
a ring of batches. It is a few batches long, so that decoding runs ahead of training and memory is bounded: the next
batches are under way while one is used. Which rectangle is cut out of a picture is `ResizedCrop`'s draw for its seed,
epoch and place in the data set, from the picture as it lies there. So a crop depends neither on how many processes
there are nor on what was decoded before: a run that continues with an epoch sees the pictures that it would have seen.

Processes rather than threads: of the millisecond and a half that a picture takes, a tenth needs the interpreter lock,
which ten threads would fight for, with the one that trains. Where processes cannot be forked, threads do the work.

Shape suffixes: K cells, B samples of a batch, n pictures of a task, P places, C channels, H rows, W columns.
"""

from __future__ import annotations

import collections
import mmap
import multiprocessing
import os
import signal
import threading
import time
import weakref
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from nearsight.augment import Augmentation, Pipeline, ResizedCrop
from nearsight.augment.base import Batch, Cells
from nearsight.augment.streams import Drawn
from nearsight.data.cropping import Crop, centred, cropped, stored_shape
from nearsight.data.decoding import UnreadableError, unreadable
from nearsight.data.device import DeviceImages
from nearsight.data.pictures import Pictures
from nearsight.errors import InputError
from nearsight.lazy import torch
from nearsight.randomness import Draws

if TYPE_CHECKING:
    from torch import Tensor

_PER_TASK = 64
_TASKS_AHEAD = 3
"""Of each process, at least."""
_SECONDS_BETWEEN_LOOKS = 1.0
_CORES = "NEARSIGHT_DECODERS"
"""Environment variable that says how many processes decode, for one that trains."""


@dataclass(frozen=True)
class Task:
    """Some pictures of a batch."""

    positions: tuple[int, ...]
    """In the data set."""
    crop: ResizedCrop | None = None
    """How they are cropped; None: the middle, as for evaluation."""
    seed: int = 0
    epoch: int = 0


def num_decoders() -> int:
    """Processes that decode for this one: the cores it may use, shared with those torchrun started beside it."""
    if (asked := os.environ.get(_CORES)) is not None:
        if not asked.isdecimal() or int(asked) < 1:
            raise InputError(f"{_CORES} is {asked!r}, but must be a number of processes, at least 1")
        return int(asked)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


@dataclass(frozen=True)
class _Ring:
    """What those that decode share: the pictures, and the places of decoded ones."""

    pictures: Pictures
    size: int
    resized: int
    memory_PCHW: Tensor
    fast: bool

    def work(self, task: Task, place: int) -> list[tuple[str, str]]:
        """Decode to the places from this one on; (name, reason) of what cannot be."""
        problems: list[tuple[str, str]] = []
        contents: list[tuple[int, int, bytes, tuple[int, int]]] = []
        for number, position in enumerate(task.positions):
            try:
                content = self.pictures.read(position)
                contents.append((number, position, content, stored_shape(content)))
            except UnreadableError as error:
                problems.append((self.pictures.name(position), str(error)))
        crops = _drawn(task, [(position, *shape) for _, position, _, shape in contents])
        for (number, position, content, _), crop in zip(contents, crops, strict=True):
            try:
                pixels_CHW = (
                    centred(content, self.size, self.resized if task.crop is None else self.size)
                    if crop is None
                    else cropped(content, crop, self.size, fast=self.fast)
                )
                self.memory_PCHW[place + number].copy_(pixels_CHW)
            except UnreadableError as error:
                problems.append((self.pictures.name(position), str(error)))
        return problems


def _drawn(task: Task, shapes: Sequence[tuple[int, int, int]]) -> list[Crop | None]:
    """The crops of pictures by (position, rows, columns); None: the middle."""
    if task.crop is None or task.crop.is_idle or not shapes:
        return [None] * len(shapes)
    cpu = torch.device("cpu")
    index_1n, height_1n, width_1n = torch.tensor(shapes).T.unsqueeze(1)
    draws = Draws(torch.tensor([task.seed]), torch.tensor([task.epoch]), torch.tensor(0), index_1n)
    cells = ResizedCrop.stack([task.crop], cpu)
    drawn = Drawn.of(draws, ResizedCrop.sample_draws(cells, torch.Size((3, 1, 1))), {})
    crops_n4 = torch.stack(ResizedCrop.draw(cells, drawn, height_1n, width_1n), dim=-1)[0]
    left_out_n = drawn.sample[ResizedCrop.name][0, :, 0] >= task.crop.p
    return [
        None if left_out else Crop(*crop) for crop, left_out in zip(crops_n4.tolist(), left_out_n.tolist(), strict=True)
    ]


class CroppedBefore(ResizedCrop):
    """`ResizedCrop` in a pipeline whose pictures were cropped when they were decoded: nothing is left to do."""

    @classmethod
    def sample_draws(cls, cells: Cells, image_shape: torch.Size) -> dict[str, int]:
        return {}

    @classmethod
    def output_shape(cls, cells: Cells, image_shape: torch.Size) -> torch.Size:
        return image_shape

    @classmethod
    def apply(cls, batch: Batch, cells: Cells, drawn: Drawn) -> Batch:
        return batch


def cropped_before(pipeline: Pipeline) -> Pipeline:
    """The pipeline of pictures that `StreamedImages.crops` gives."""
    kinds = [kind for kind, _ in pipeline.stages]
    if ResizedCrop in kinds[1:]:
        raise InputError(
            f"streamed pictures are cropped when they are decoded, but {kinds[0].name} comes before resizedcrop; leave "
            "one of them out"
        )
    stages = tuple((CroppedBefore if kind is ResizedCrop else kind, cells) for kind, cells in pipeline.stages)
    return replace(pipeline, stages=stages)


_own_ring: list[_Ring] = []
"""Of a process that decodes."""


def _begin(ring: _Ring, parent: int) -> None:
    """What a process that decodes does first."""
    _own_ring[:] = [ring]
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the one that trains decides when to end
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    torch.set_num_threads(1)
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()


def _end_with(parent: int) -> None:
    """A process that is killed leaves others waiting for it, for ever."""
    while os.getppid() == parent:
        time.sleep(_SECONDS_BETWEEN_LOOKS)
    os._exit(1)


def _work(task: Task, place: int) -> list[tuple[str, str]]:
    (ring,) = _own_ring
    return ring.work(task, place)


@dataclass(eq=False)
class Decoders:
    """Processes that decode, and what they decode into."""

    pictures: Pictures
    size: int
    """Side of what a model takes, in pixels."""
    resized: int
    """What a picture's shorter side is resized to before its middle is cut out, for evaluation."""
    num: int = field(default_factory=num_decoders)
    """Processes."""
    fast: bool = True
    """Whether JPEGs are decoded by simplejpeg, where it is installed."""
    _executor: Executor | None = None
    _ring: _Ring | None = None

    def batches(self, batches: Iterable[Sequence[Task]], most: int) -> Iterator[Tensor]:
        """uint8 [n, 3, S, S] for the n pictures of each batch, `most` of them at most, in order; the memory of one is
        used again when the next is asked for."""
        executor, ring = self._started(most)
        length = len(ring.memory_PCHW) // most
        under_way: collections.deque[tuple[Tensor, list[Future[list[tuple[str, str]]]]]] = collections.deque()
        source = enumerate(batches)
        try:
            while True:
                # The place of the batch that is being used is not among those that are written to.
                while len(under_way) < length - 1 and (following := next(source, None)) is not None:
                    number, tasks = following
                    under_way.append(self._submitted(executor, ring, tasks, most * (number % length)))
                if not under_way:
                    return
                places_nCHW, waiting = under_way.popleft()
                problems = [problem for future in waiting for problem in future.result()]
                if problems:
                    raise unreadable(self.pictures.folder, problems)
                yield places_nCHW
        except BrokenProcessPool as error:
            raise InputError(
                "a process that decodes pictures was killed, perhaps because memory ran out; the same command "
                f"continues (fewer of them: {_CORES})"
            ) from error
        finally:
            for _, waiting in under_way:
                for future in waiting:
                    future.cancel()
            for _, waiting in under_way:  # what is being done writes to places that would be given to others
                for future in waiting:
                    if not future.cancelled():
                        future.exception()

    def _submitted(
        self, executor: Executor, ring: _Ring, tasks: Sequence[Task], place: int
    ) -> tuple[Tensor, list[Future[list[tuple[str, str]]]]]:
        begin, waiting = place, []
        for task in tasks:
            if isinstance(executor, ThreadPoolExecutor):
                waiting.append(executor.submit(ring.work, task, place))
            else:
                waiting.append(executor.submit(_work, task, place))
            place += len(task.positions)
        return ring.memory_PCHW[begin:place], waiting

    def _started(self, most: int) -> tuple[Executor, _Ring]:
        """Processes whose ring takes such batches. They inherit it, so that a larger one needs new ones."""
        num_places = most * self._length(most)
        if self._executor is not None and self._ring is not None and len(self._ring.memory_PCHW) >= num_places:
            return self._executor, self._ring
        self.close()
        # Without a name: /dev/shm, which is small in containers, takes no part in it.
        shared = mmap.mmap(-1, num_places * 3 * self.size**2)
        memory_PCHW = torch.frombuffer(shared, dtype=torch.uint8).view(num_places, 3, self.size, self.size)
        self._ring = _Ring(self.pictures, self.size, self.resized, memory_PCHW, self.fast)
        executor: Executor
        if "fork" in multiprocessing.get_all_start_methods():
            executor = ProcessPoolExecutor(
                self.num, multiprocessing.get_context("fork"), initializer=_begin, initargs=(self._ring, os.getpid())
            )
        else:
            executor = ThreadPoolExecutor(self.num)
        self._executor = executor
        weakref.finalize(self, executor.shutdown, wait=False, cancel_futures=True)
        return executor, self._ring

    def _length(self, most: int) -> int:
        """Batches of the ring: the one that is used, the next, and what keeps every process busy."""
        return 2 + -(-self.num * _TASKS_AHEAD * _PER_TASK // most)

    def close(self) -> None:
        """End the processes; they start again when something is asked for."""
        if self._executor is not None:
            self._executor.shutdown(cancel_futures=True)
            self._executor = None


def tasks_of(positions: Sequence[int], crop: ResizedCrop | None = None, seed: int = 0, epoch: int = 0) -> list[Task]:
    """Of one cell's part of a batch."""
    begins = range(0, len(positions), _PER_TASK)
    return [Task(tuple(positions[begin : begin + _PER_TASK]), crop, seed, epoch) for begin in begins]


class StreamedImages:
    """Pictures as a training loop needs them: uint8 images and labels of each batch, on the device, in order. What
    `DeviceImages` is for images in memory; these are never resident."""

    resident = False

    def __init__(
        self, pictures: Pictures, device: torch.device | str, *, size: int, resized: int | None = None
    ) -> None:
        self.device = torch.device(device)
        self.decoders = Decoders(pictures, size, resized or size)
        self.in_shards = pictures.in_shards
        self.host_labels_N = pictures.labels_N
        self.labels_N = pictures.labels_N.to(self.device)
        self._side = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None

    def __len__(self) -> int:
        return len(self.labels_N)

    def gather(self, index: Tensor) -> Tensor:
        """The middles of the pictures [..., C, H, W] at positions [...]."""
        (batch,) = self.stream([index])
        return batch[0].clone()

    def labels(self, index: Tensor) -> Tensor:
        """Labels [...] at positions [...]."""
        return self.labels_N[index.to(self.device)]

    def positions(self, index: Tensor) -> Tensor:
        """Positions where `stream` and `crops` want them."""
        return index.cpu()

    def stream(self, index_batches: Iterable[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """The middles of the pictures, and labels, of each batch of positions. The host's memory of a batch is used
        again when the next is asked for."""
        batches = list(index_batches)
        tasks = (tasks_of(index.flatten().tolist()) for index in batches)
        yield from self._delivered(batches, tasks)

    def crops(
        self, crops: Sequence[Augmentation | None], seeds: Sequence[int], epochs: Sequence[int], index_SKB: Tensor
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Random crops of the pictures of each step, [K, B, C, H, W], and labels: each cell's by its own settings. A
        picture that is not cropped gives its middle."""
        cells = [
            (crop if isinstance(crop, ResizedCrop) else ResizedCrop(p=0.0), seed, epoch)
            for crop, seed, epoch in zip(crops, seeds, epochs, strict=True)
        ]
        tasks = (
            [task for of_cell, cell in zip(index_KB.tolist(), cells, strict=True) for task in tasks_of(of_cell, *cell)]
            for index_KB in index_SKB
        )
        yield from self._delivered(list(index_SKB), tasks)

    def _delivered(self, batches: list[Tensor], tasks: Iterable[Sequence[Task]]) -> Iterator[tuple[Tensor, Tensor]]:
        most = max((index.numel() for index in batches), default=0)
        if not most:
            return
        for index, images_nCHW in zip(batches, self.decoders.batches(tasks, most), strict=True):
            images, labels = self._brought(images_nCHW, self.host_labels_N[index.flatten()])
            yield images.view(*index.shape, *images.shape[1:]), labels.view(index.shape)

    def _brought(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """On a stream of its own: the copy must not wait for the steps that the device has still to do."""
        if self._side is None:
            return images, labels.to(self.device)
        with torch.cuda.stream(self._side):
            images, labels = images.to(self.device), labels.to(self.device)
        current = torch.cuda.current_stream(self.device)
        current.wait_stream(self._side)
        for tensor in (images, labels):
            tensor.record_stream(current)
        return images, labels


Images = DeviceImages | StreamedImages
"""What a training loop takes its images from."""
