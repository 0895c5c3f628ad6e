"""Several processes that train one model, each on its share of every batch (torchrun).

What they say to each other is of two kinds. Numbers (gradients, sums) are tensors where the model is; words (who wishes
for a stop, which epoch a run is in) are on the CPU, so that hearing them never waits for a GPU.
"""

import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed
from torch import Tensor

from nearsight.errors import InputError, check_positive
from nearsight.train.failing import LostProcessError

T = TypeVar("T")

TIMEOUT = 600.0
"""Seconds that a process waits for the others before it takes them for lost. One that dies is missed at once."""


@dataclass(frozen=True)
class Processes:
    """Which of how many this one is. One alone by default, which has nobody to talk to."""

    rank: int = 0
    num: int = 1

    @classmethod
    def joined(cls) -> "Processes":
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
        """What one of them says, if any does; of several, the first one's. All have come here when it returns."""
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
        """What `work` gives in the first process, which alone does it; an error of the user there is one of all."""
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
    """What torch says has happened, without where in its code and what one might think of it."""
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
