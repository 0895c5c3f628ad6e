"""Weights of K models where a module expects those of one, so that its own code runs all K at once.

Activations of a stack are one long batch, [K·B, …], cell after cell; a model's code does not notice. Only where weights
meet activations does it matter whose are whose: there a `StackedWeight` of shape [K, …] steps in, splits the batch by
cells, and joins it again. Everything else (attention, activations, reshapes) is plain code on a larger batch, which
compiles to the same program for any K.

Shape suffixes: K cells, B samples.
"""

import string
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Rule = Callable[..., Any]

# The default is never changed; with a read-only view of it, torch.compile could not rely on that.
_steps_in: ContextVar[Mapping[Any, Rule]] = ContextVar("steps_in", default={})  # noqa: B039


@contextmanager
def rules_replaced(rules: Mapping[Any, Rule]) -> Iterator[None]:
    """Use other rules for some operations on weights; they may call `plainly` for the ordinary one."""
    token = _steps_in.set(rules)
    try:
        yield
    finally:
        _steps_in.reset(token)


def plainly(func: Any, *args: Any, **kwargs: Any) -> Any:
    """An operation on stacked weights by its ordinary rule."""
    with rules_replaced({}):
        return func(*args, **kwargs)


class UnstackableError(Exception):
    """A use of weights that is not known here; the message names it."""


class StackedWeight(Tensor):
    """Weights [K, …] that stand for those of one model, […]."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if not all(issubclass(StackedWeight, kind) for kind in types):
            return NotImplemented  # a `Pending` tensor handles it
        if (other := _steps_in.get().get(func)) is not None:
            return other(*args, **(kwargs or {}))
        rule = _RULES.get(func)
        if rule is None:
            raise UnstackableError(f"{getattr(func, '__name__', func)} of weights")
        with torch._C.DisableTorchFunctionSubclass():
            return rule(*args, **(kwargs or {}))


def stack_up(weight_K: Tensor) -> Tensor:
    """A tensor with a leading axis K as weights of one model."""
    return weight_K.as_subclass(StackedWeight)


def plain(weight: Tensor) -> Tensor:
    """The numbers themselves, [K, …]."""
    with torch._C.DisableTorchFunctionSubclass():
        return weight.view(weight.shape)


def _by_cell(activations: Tensor, num_cells: int) -> Tensor:
    """[K·B, …] → [K, B, …]."""
    split: Tensor = activations.unflatten(0, (num_cells, -1))
    return split


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    weight_Koi = plain(weight)
    num_cells, width_out, width_in = weight_Koi.shape
    rows_Kri = input.reshape(num_cells, -1, width_in)
    if bias is None:
        rows_Kro = torch.bmm(rows_Kri, weight_Koi.transpose(1, 2))
    else:
        rows_Kro = torch.baddbmm(plain(bias).unsqueeze(1), rows_Kri, weight_Koi.transpose(1, 2))
    result = rows_Kro.reshape(*input.shape[:-1], width_out)
    return stack_up(result) if isinstance(input, StackedWeight) else result  # weights of weights, as of positions


def _layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    normal = F.layer_norm(input, normalized_shape, None, None, eps)
    return _scaled(stack_up(normal) if isinstance(input, StackedWeight) else normal, weight, bias)


def _group_norm(
    input: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    normal = F.group_norm(input, num_groups, None, None, eps)
    ones = [1] * (input.dim() - 2)
    scale, shift = (None if w is None else stack_up(plain(w).unflatten(1, (-1, *ones))) for w in (weight, bias))
    return _scaled(normal, scale, shift)


def _scaled(normal: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    if weight is not None:
        normal = _combined(torch.mul, normal, weight)
    return normal if bias is None else _combined(torch.add, normal, bias)


def _conv2d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Tensor:
    weight_K = plain(weight)
    num_cells, width, _, *kernel = weight_K.shape
    if _is_patch_embedding(input, kernel, stride, padding, dilation, groups):
        return _embed_patches(input, weight_K, bias)
    # Cells as groups of one convolution: [B, K·C, H, W].
    side_by_side = _by_cell(input, num_cells).transpose(0, 1).flatten(1, 2)
    flat_bias = None if bias is None else plain(bias).flatten()
    out = F.conv2d(side_by_side, weight_K.flatten(0, 1), flat_bias, stride, padding, dilation, groups * num_cells)
    by_cell: Tensor = out.unflatten(1, (num_cells, width)).transpose(0, 1)
    return by_cell.flatten(0, 1)


def _is_patch_embedding(
    input: Tensor, kernel: Sequence[int], stride: Any, padding: Any, dilation: Any, groups: int
) -> bool:
    divides = all(side % patch == 0 for side, patch in zip(input.shape[-2:], kernel, strict=True))
    plain = padding in (0, (0, 0)) and dilation in (1, (1, 1)) and groups == 1
    return divides and plain and stride in (tuple(kernel), kernel[0])


def _embed_patches(input: Tensor, weight_K: Tensor, bias: Tensor | None) -> Tensor:
    """A convolution whose stride is its kernel, as one matrix product over flattened patches."""
    patch_rows, patch_cols = weight_K.shape[-2:]
    rows, cols = input.shape[-2] // patch_rows, input.shape[-1] // patch_cols
    patches = input.unflatten(3, (cols, patch_cols)).unflatten(2, (rows, patch_rows)).permute(0, 2, 4, 1, 3, 5)
    embedded = _linear(patches.reshape(len(input), rows * cols, -1), weight_K.flatten(2), bias)
    grid: Tensor = embedded.transpose(1, 2).unflatten(2, (rows, cols))
    return grid


def _combined(func: Callable[[Tensor, Tensor], Tensor], one: Any, other: Any) -> Tensor:
    """An operation element by element, of weights with activations, with a number, or with other weights."""
    if isinstance(one, StackedWeight) and isinstance(other, StackedWeight):
        rank = max(one.dim(), other.dim())
        return stack_up(func(_aligned(plain(one), rank), _aligned(plain(other), rank)))
    if not isinstance(one, StackedWeight):
        return _met(lambda weight, activations: func(activations, weight), other, one)
    return _met(func, one, other)


def _met(func: Callable[[Tensor, Any], Tensor], weight: Tensor, other: Any) -> Tensor:
    """Weights with activations or a number."""
    weight_K = plain(weight)
    if not isinstance(other, Tensor) or other.dim() == 0:
        return stack_up(func(weight_K, other))
    if weight_K.dim() > other.dim():
        if weight_K.shape[1] == 1:
            weight_K = weight_K.squeeze(1)  # one for all samples of a batch
        elif weight_K.dim() > other.dim() + 1 or weight_K.shape[1] * len(weight_K) != len(other):  # nor one for each
            raise UnstackableError("weights of a whole batch")
    split = _by_cell(other, len(weight_K))
    return func(_aligned(weight_K, split.dim()), split).flatten(0, 1)


def _aligned(weight_K: Tensor, rank: int) -> Tensor:
    """[K, …] with axes of size 1 after K, so that it broadcasts as weights of one model do."""
    return weight_K.reshape(len(weight_K), *[1] * (rank - weight_K.dim()), *weight_K.shape[1:])


def _expand(weight: Tensor, *sizes: Any) -> Tensor:
    """To a batch, as CLS tokens are: [1, …] of one model becomes [K·B, …] of all."""
    shape = list(sizes[0]) if len(sizes) == 1 and isinstance(sizes[0], Sequence) else list(sizes)
    weight_K = plain(weight)
    num_cells = len(weight_K)
    if len(shape) != weight_K.dim() - 1:
        raise UnstackableError("expand of weights to more axes")
    if weight_K.shape[1] != 1 or shape[0] in (-1, 1):
        return stack_up(weight_K.expand(num_cells, *shape))
    return weight_K.expand(num_cells, shape[0] // num_cells, *shape[1:]).flatten(0, 1)


def _matmul(one: Tensor, other: Tensor) -> Tensor:
    if isinstance(one, StackedWeight) and isinstance(other, StackedWeight) and one.dim() == other.dim():
        return stack_up(torch.matmul(plain(one), plain(other)))
    if isinstance(one, StackedWeight) or other.dim() != 3:
        raise UnstackableError("matmul of weights other than activations @ matrix")
    return _linear(one, plain(other).transpose(1, 2))


def _einsum(equation: str, *operands: Tensor) -> Tensor:
    """Of weights, and of activations whose first axis is the batch, which must be the first of the result too."""
    inputs, arrow, output = equation.replace(" ", "").partition("->")
    terms = inputs.split(",")
    pairs = list(zip(terms, operands, strict=True))
    batches = {term[:1] for term, operand in pairs if not isinstance(operand, StackedWeight)}
    in_weights = {letter for term, operand in pairs if isinstance(operand, StackedWeight) for letter in term}
    if not arrow or "." in equation or batches & in_weights or batches - {output[:1]}:
        raise UnstackableError(f"einsum {equation!r} of weights")
    num_cells = next(len(plain(operand)) for operand in operands if isinstance(operand, StackedWeight))
    cell = next(letter for letter in string.ascii_letters if letter not in equation)
    result = torch.einsum(
        ",".join(cell + term for term in terms) + f"->{cell}{output}",
        *(
            plain(operand) if isinstance(operand, StackedWeight) else _by_cell(operand, num_cells)
            for operand in operands
        ),
    )
    return result.flatten(0, 1) if batches else stack_up(result)


def _element_by_element(func: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def rule(weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return stack_up(func(plain(weight), *args, **kwargs))

    return rule


def _shifted(axis: int) -> int:
    return axis if axis < 0 else axis + 1


def _getitem(weight: Tensor, index: Any) -> Tensor:
    index = index if isinstance(index, tuple) else (index,)
    return stack_up(plain(weight)[(slice(None), *index)])


def _binary(func: Callable[[Tensor, Tensor], Tensor], *, swapped: bool = False) -> Callable[..., Tensor]:
    def rule(one: Any, other: Any) -> Tensor:
        return _combined(func, other, one) if swapped else _combined(func, one, other)

    return rule


_RULES: dict[Any, Rule] = {
    F.linear: _linear,
    F.layer_norm: _layer_norm,
    F.group_norm: _group_norm,
    F.conv2d: _conv2d,
    torch.conv2d: _conv2d,
    torch.matmul: _matmul,
    Tensor.matmul: _matmul,
    Tensor.__matmul__: _matmul,
    torch.einsum: _einsum,
    Tensor.expand: _expand,
    Tensor.__getitem__: _getitem,
    Tensor.unsqueeze: lambda weight, dim: stack_up(plain(weight).unsqueeze(_shifted(dim))),
    Tensor.squeeze: lambda weight, dim: stack_up(plain(weight).squeeze(_shifted(dim))),
    Tensor.transpose: lambda weight, one, other: stack_up(plain(weight).transpose(_shifted(one), _shifted(other))),
    Tensor.unflatten: lambda weight, dim, sizes: stack_up(plain(weight).unflatten(_shifted(dim), sizes)),
    torch.softmax: lambda weight, dim: stack_up(torch.softmax(plain(weight), _shifted(dim))),
    Tensor.dim: lambda weight: plain(weight).dim() - 1,
    Tensor.shape.__get__: lambda weight: plain(weight).shape[1:],  # type: ignore[attr-defined]
    Tensor.dtype.__get__: lambda weight: plain(weight).dtype,  # type: ignore[attr-defined]
    Tensor.device.__get__: lambda weight: plain(weight).device,
    **{
        name: _binary(func, swapped=swapped)
        for func, plain, reversed_ in (
            (torch.add, (torch.add, Tensor.add, Tensor.__add__, Tensor.add_, Tensor.__iadd__), Tensor.__radd__),
            (torch.sub, (torch.sub, Tensor.sub, Tensor.__sub__), Tensor.__rsub__),
            (torch.mul, (torch.mul, Tensor.mul, Tensor.__mul__, Tensor.mul_, Tensor.__imul__), Tensor.__rmul__),
            (torch.div, (torch.div, Tensor.div, Tensor.__truediv__), Tensor.__rtruediv__),
        )
        for name, swapped in (*((name, False) for name in plain), (reversed_, True))
    },
    **{
        func: _element_by_element(func)
        for func in (
            torch.exp, Tensor.exp, torch.sigmoid, Tensor.sigmoid, torch.tanh, Tensor.tanh, F.softplus, torch.clamp,
            Tensor.clamp, torch.sqrt, Tensor.sqrt, Tensor.float, Tensor.to, Tensor.neg, Tensor.__neg__, Tensor.abs,
            Tensor.contiguous, Tensor.detach,
        )
    },
}  # fmt: skip
