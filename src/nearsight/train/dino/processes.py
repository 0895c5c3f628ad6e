"""Several processes that train one model, each on its share of every batch (torchrun)."""

from dataclasses import dataclass

import torch
import torch.distributed
from torch import Tensor

from nearsight.errors import InputError


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

    def share(self, batches_SB: Tensor) -> Tensor:
        """This process's part of every batch."""
        return batches_SB.chunk(self.num, dim=1)[self.rank]

    def averaged(self, tensors: list[Tensor]) -> list[Tensor]:
        """Their means over the processes, sent as one."""
        if self.num == 1:
            return tensors
        flat = torch.cat([tensor.flatten() for tensor in tensors])
        torch.distributed.all_reduce(flat)
        parts = (flat / self.num).split([tensor.numel() for tensor in tensors])
        return [part.view_as(tensor) for part, tensor in zip(parts, tensors, strict=True)]

    def any(self, wish: bool, device: torch.device) -> bool:
        """Whether one of them says so."""
        if self.num == 1:
            return wish
        said = torch.tensor(float(wish), device=device)
        torch.distributed.all_reduce(said)
        return bool(said > 0)
