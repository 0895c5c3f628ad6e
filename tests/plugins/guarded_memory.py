"""Memory in which whoever reads or writes what is not his is found out."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class Memory(TorchDispatchMode):
    """New tensors lie between NaNs that nobody may write, and are NaN until they are written.

    Whoever reads past an end, or forgets a place, gets a NaN for it.
    """

    MARGIN = 1 << 16  # numbers; more than a tile
    EMPTY = (
        torch.ops.aten.empty.memory_format,
        torch.ops.aten.empty_like.default,
        torch.ops.aten.new_empty.default,
    )

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device
        self.given: list[tuple[Tensor, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        return self._like(made) if func in self.EMPTY and made.numel() and made.is_floating_point() else made

    def _like(self, tensor: Tensor) -> Tensor:
        size = tensor.numel()
        whole = torch.full((size + 2 * self.MARGIN,), torch.nan, dtype=tensor.dtype, device=tensor.device)
        self.given.append((whole, size))
        return whole[self.MARGIN : self.MARGIN + size].view(tensor.shape)

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32, mean: float = 0.0) -> Tensor:
        """Random numbers."""
        numbers = torch.randn(shape) + mean
        return self._like(numbers.to(self.device, dtype)).copy_(numbers)

    def check(self) -> None:
        for whole, size in self.given:
            assert whole[: self.MARGIN].isnan().all(), "written before a tensor's first number"
            assert whole[self.MARGIN + size :].isnan().all(), "written past a tensor's last number"
