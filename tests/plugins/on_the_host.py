"""What would make a GPU wait for the host, found without a GPU."""

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class OnTheHost(TorchDispatchMode):
    """Notes every operation that reads or makes a tensor of the host."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves((args, kwargs, out)) if isinstance(leaf, Tensor)]
        # lift_fresh is what torch.tensor([...]) ends with, wherever it puts the numbers.
        if func is torch.ops.aten.lift_fresh.default or any(tensor.device.type == "cpu" for tensor in tensors):
            self.found.append(str(func))
        return out
