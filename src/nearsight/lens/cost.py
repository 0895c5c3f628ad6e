"""What a forward of one image costs, counted without computing it: on the meta device, where tensors are shapes alone.

Multiply-adds are those of products of matrices, of attention too, and of convolutions, and with them one for each
number that an activation function gives and two for each of a norm. With this rule all twenty numbers of S2's Table 1,
which are by ptflops (Sovrasov 2018), agree to the last digit that is printed; products alone are lower by 0.1 to 0.3 %.
Softmax, sums and offsets are not counted.

Memory is the largest sum of the tensors that live at the same time, as float32, beside the weights. Attention counts as
one step that keeps no map, as fused kernels do it; an attention that a model computes by itself has its map. What
kernels need inside, and what an allocator keeps, is not in it.
"""

import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from nearsight.lens.running import running
from nearsight.locat.attend import attend

_NORMS = ("native_layer_norm", "native_group_norm", "_native_batch_norm_legit_no_training", "native_batch_norm")
_ACTIVATIONS = ("gelu", "silu", "relu", "relu_", "elu", "leaky_relu", "hardtanh", "hardswish", "mish", "_prelu_kernel")
_PER_NORMED_NUMBER = 2


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Of a forward of one image."""

    products: int
    """Multiply-adds of matrices, attention and convolutions."""
    norms: int
    """Two for each number that a layer, group or batch norm gives."""
    activations: int
    """One for each number that an activation function gives."""
    weight_bytes: int
    """Of all parameters and buffers."""
    forward_bytes: int
    """The largest sum of tensors that live at the same time, without the weights."""
    computed: bool
    """Whether it had to be computed after all, since the model asks for the values of a tensor."""

    @property
    def multiply_adds(self) -> int:
        return self.products + self.norms + self.activations


def forward_cost(model: nn.Module, image_size: tuple[int, int]) -> Cost:
    """The cost of a forward of one image of (rows, columns). Nothing is computed where the model allows it, and the
    model stays as it is."""
    with running(model) as run:
        own = dict(run.model.named_parameters()) | dict(run.model.named_buffers())
        bare = {name: torch.empty_like(tensor, device="meta") for name, tensor in own.items()}
        image = torch.zeros(1, 3, *image_size, dtype=run.dtype)
        try:
            counted, computed = _counted(run.model, bare, image.to("meta")), False
        except Exception:  # a model may ask for values, or hold tensors that are neither parameters nor buffers
            counted, computed = _counted(run.model, own, image.to(run.device)), True
    return Cost(
        products=counted.products,
        norms=counted.norms,
        activations=counted.activations,
        weight_bytes=sum(tensor.numel() * tensor.element_size() for tensor in own.values()),
        forward_bytes=counted.most,
        computed=computed,
    )


def _counted(model: nn.Module, tensors: dict[str, Tensor], image: Tensor) -> "_Counter":
    counter = _Counter([*tensors.values(), image])
    with counter, _WholeAttention(counter):
        functional_call(model, tensors, (image,))
    return counter


class _Counter(TorchDispatchMode):
    """Sees every elementary operation, and when the tensors that they make are gone."""

    def __init__(self, lasting: list[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.products = self.norms = self.activations = self.most = 0
        self._alive: dict[int, int] = {}
        self._lasting = {_key(tensor) for tensor in lasting}
        self._sum = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        packet = func._overloadpacket
        if packet in flop_registry:
            self.products += flop_registry[packet](*args, **(kwargs or {}), out_val=made) // 2
        elif (name := packet.__name__) in _NORMS:
            self.norms += _PER_NORMED_NUMBER * made[0].numel()
        elif name in _ACTIVATIONS:
            self.activations += made.numel()
        for tensor in tree_leaves(made):
            if isinstance(tensor, Tensor):
                self._note(tensor)
        return made

    def _note(self, tensor: Tensor) -> None:
        storage, key = tensor.untyped_storage(), _key(tensor)
        if key in self._lasting or key in self._alive:
            return
        self._alive[key] = storage.nbytes()
        self._sum += storage.nbytes()
        self.most = max(self.most, self._sum)
        weakref.finalize(storage, self._gone, key)

    def _gone(self, key: int) -> None:
        self._sum -= self._alive.pop(key, 0)


def _key(tensor: Tensor) -> int:
    """Of the memory that a tensor and its views share."""
    key: int = tensor.untyped_storage()._cdata
    return key


class _WholeAttention(TorchFunctionMode):
    """Takes each attention that is asked for in one call as one step. On the meta device torch has no fused kernel, and
    would make the map."""

    def __init__(self, counter: _Counter) -> None:
        super().__init__()
        self._counter = counter

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.scaled_dot_product_attention and func is not attend:
            return func(*args, **(kwargs or {}))
        query, key, value = _heads(args, kwargs or {})
        pairs = prod(query.shape[:-1]) * key.shape[-2]
        self._counter.products += pairs * (query.shape[-1] + value.shape[-1])
        return query.new_zeros(*query.shape[:-1], value.shape[-1])


def _heads(args: Any, kwargs: Any) -> Iterator[Tensor]:
    named = ("query", "key", "value")
    return (args[place] if place < len(args) else kwargs[name] for place, name in enumerate(named))
