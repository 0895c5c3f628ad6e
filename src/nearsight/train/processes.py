"""Several processes that train one model, each on its share of every batch (torchrun).

They exchange two kinds of messages. Numbers (gradients, sums) are tensors where the model is; words (who requested a
stop, which epoch a run is in) are on the CPU, so that receiving them never waits for a GPU.

Batches and random numbers are functions of the seed, the epoch and a sample's place in the data set, so every process
knows them all and makes its own samples by itself. CutMix and Mixup pair samples of the whole batch: a process also
augments the partners of its own, which doubles what it augments, and forgets them after the mixing.

Shape suffixes: K cells, B samples of a batch, S steps, R samples that a process augments, C classes.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar, cast

from nearsight.augment import Augmentation, Pipeline
from nearsight.augment.base import Batch, Cells, Stage
from nearsight.augment.mixing import permutation_of
from nearsight.augment.streams import Drawn
from nearsight.errors import InputError, check_positive
from nearsight.lazy import torch
from nearsight.randomness import Draws, uniform
from nearsight.train.stopping import LostProcessError

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")

TIMEOUT = 600.0
"""Seconds that a process waits for the others before they count as lost. One that dies is noticed at once."""


@dataclass(frozen=True)
class Processes:
    """Which of how many this one is. By default a single one, which exchanges nothing."""

    rank: int = 0
    num: int = 1

    @classmethod
    def joined(cls) -> Processes:
        """Those of torch's process group, if there is one."""
        if not torch.distributed.is_initialized():
            return cls()
        return cls(torch.distributed.get_rank(), torch.distributed.get_world_size())

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def check(self, batch_size: int) -> None:
        if batch_size % self.num:
            raise InputError(f"{self.num} processes do not divide a batch of {batch_size} images; choose another size")

    def share(self, batches: Tensor) -> Tensor:
        """This process's part of every batch, the last axis. Parts differ by one sample at most."""
        return batches.tensor_split(self.num, dim=-1)[self.rank]

    def summed(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Their sums over the processes, added up in float64 and sent as one."""
        if self.num == 1:
            return list(tensors)
        return _parts(self._reduced(torch.cat([tensor.flatten().double() for tensor in tensors])), tensors)

    def averaged(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Their means over the processes, sent as one."""
        if self.num == 1:
            return list(tensors)
        return _parts(self._reduced(torch.cat([tensor.flatten() for tensor in tensors])) / self.num, tensors)

    def sum_(self, tensor: Tensor) -> None:
        """Add up a tensor over the processes, in place."""
        if self.num > 1:
            self._reduced(tensor)

    def spread(self, tensors: Sequence[Tensor]) -> None:
        """Give the first process's values to all, in place."""
        if self.num > 1:
            with self._talking():
                for tensor in tensors:
                    torch.distributed.broadcast(tensor, 0)

    def heard(self, word: str | None) -> str | None:
        """The word of one of them, if any has one; of several, the first one's. It returns when all have called it."""
        if self.num == 1:
            return word
        said = torch.tensor(int(word is not None))
        if not self._reduced(said):
            return None
        words: list[str | None] = [None] * self.num
        with self._talking():
            torch.distributed.all_gather_object(words, word)
        return next(word for word in words if word is not None)

    def from_first(self, work: Callable[[], T]) -> T:
        """The result of `work`, which only the first process does; an `InputError` there is raised in all."""
        if self.num == 1:
            return work()
        outcome: list[Any] = [None, None]
        if self.is_first:
            try:
                outcome[0] = work()
            except InputError as error:
                outcome[1] = str(error)
        with self._talking():
            torch.distributed.broadcast_object_list(outcome, 0)
        value, complaint = outcome
        if complaint is not None:
            raise InputError(complaint)
        given: T = value
        return given

    def _reduced(self, tensor: Tensor) -> Tensor:
        with self._talking():
            torch.distributed.all_reduce(tensor)
        return tensor

    @contextmanager
    def _talking(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise LostProcessError(self.num, _reason(error)) from error


def _reason(error: RuntimeError) -> str:
    """Torch's reason, without the place in its code and its advice."""
    return re.sub(r"^\[\S+:\d+\] ", "", str(error).splitlines()[0]).split(". ")[0]


def _parts(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    parts = flat.split([tensor.numel() for tensor in like])
    return [part.view(tensor.shape).to(tensor.dtype) for part, tensor in zip(parts, like, strict=True)]


@contextmanager
def together(device: torch.device, *, timeout: float = TIMEOUT) -> Iterator[torch.device]:
    """Join the processes that torchrun started, if it did: this process's device, each GPU to its own.

    Tensors on GPUs are exchanged by nccl, all else by gloo.
    """
    check_positive("timeout", timeout)
    num = int(os.environ.get("WORLD_SIZE", "1"))
    if num == 1:
        yield device
        return
    if device.type == "cuda":
        device = _own_gpu(int(os.environ["LOCAL_RANK"]))
    elif device.type != "cpu":
        raise InputError(f"several processes do not train on {device.type}; use --device cpu, or start one")
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    try:
        torch.distributed.init_process_group(backend, timeout=timedelta(seconds=timeout))
    except RuntimeError as error:
        raise LostProcessError(num, _reason(error)) from error
    try:
        yield device
    finally:
        torch.distributed.destroy_process_group()


def _own_gpu(position: int) -> torch.device:
    """The GPU of this machine's process at this position."""
    seen = torch.cuda.device_count()
    if position >= seen:
        raise InputError(
            f"process {position + 1} on this machine has no GPU of its own, there are {seen}; start torchrun with "
            f"--nproc-per-node {seen}"
        )
    device = torch.device("cuda", position)
    torch.cuda.set_device(device)
    return device


class Share:
    """A process's part of batches of one size: its own samples, and those that they are mixed with."""

    def __init__(self, processes: Processes, batch_size: int) -> None:
        if batch_size < processes.num:
            raise InputError(
                f"{processes.num} processes cannot share a batch of {batch_size} images; start fewer, or choose a "
                "larger --protocol.batch-size"
            )
        self._processes = processes
        self._own = processes.share(torch.arange(batch_size))
        self._weight = len(self._own) / batch_size

    @property
    def num_samples(self) -> int:
        return len(self._own)

    def pipeline(self, whole: Pipeline) -> Pipeline:
        """The same augmentations, for samples in the order of `needed`; only the process's own come out right."""
        distance = self.num_samples * 2 ** len(_mixing(whole))
        stages = []
        for kind, cells in whole.stages:
            if kind.stage is Stage.MIXING:
                distance //= 2
                kind = _paired(kind, distance)
            stages.append((kind, cells))
        return Pipeline(tuple(stages), whole.num_classes, whole.mean_C, whole.std_C)

    def needed(self, pipeline: Pipeline, seed_K: Tensor, epoch_K: Tensor, index_SKB: Tensor) -> Tensor:
        """Positions in the data set of what the process augments in every step, [S, K, R]: its own samples, then their
        partners in the last mixing, then the partners of all these in the one before, and so on."""
        place_SKR = self._own.to(index_SKB.device).expand(*index_SKB.shape[:2], -1)
        for kind in reversed(_mixing(pipeline)):
            draw_SKB1 = uniform(seed_K.unsqueeze(-1), _stream(kind), epoch_K.unsqueeze(-1), index_SKB, 1)
            partner_SKB = permutation_of(draw_SKB1.squeeze(-1))
            place_SKR = torch.cat((place_SKR, partner_SKB.gather(-1, place_SKR)), dim=-1)
        return index_SKB.gather(-1, place_SKR)

    def own(self, images_KRCHW: Tensor, targets_KRC: Tensor, draws: Draws) -> tuple[Tensor, Tensor, Draws]:
        """The process's own samples, without the partners."""
        num = self.num_samples
        return images_KRCHW[:, :num], targets_KRC[:, :num], draws.of(slice(num))

    def weighted(self, loss_K: Tensor) -> Tensor:
        """A mean over the process's samples as its part of the mean over the batch: these add up to it."""
        return loss_K * self._weight

    def sum_(self, gradient_KP: Tensor) -> None:
        """Make a gradient of the process's part that of the batch, in place."""
        self._processes.sum_(gradient_KP)


def _mixing(pipeline: Pipeline) -> list[type[Augmentation]]:
    return [kind for kind, _ in pipeline.stages if kind.stage is Stage.MIXING]


def _stream(kind: type[Augmentation]) -> str:
    """The draws by which a mixing chooses partners."""
    return f"{kind.name}.partner"


def _paired(kind: type[Augmentation], distance: int) -> type[Augmentation]:
    """The augmentation, but the first `distance` samples are mixed with those that come so many places later."""

    def apply(batch: Batch, cells: Cells, drawn: Drawn) -> Batch:
        num_cells, num_samples = batch.images_KBCHW.shape[:2]
        place_R = torch.arange(num_samples, device=batch.images_KBCHW.device)
        partner_R = torch.where(place_R < distance, place_R + distance, place_R - distance)
        partner_R = torch.where(place_R < 2 * distance, partner_R, place_R)
        # Partners are the order of the draws, and a permutation that swaps two blocks is the order of itself.
        draw_KR1 = partner_R.to(torch.float32).expand(num_cells, -1).unsqueeze(-1)
        return kind.apply(batch, cells, Drawn(drawn.sample | {_stream(kind): draw_KR1}, drawn.batch))

    return cast("type[Augmentation]", type(kind.__name__, (kind,), {"apply": staticmethod(apply)}))
