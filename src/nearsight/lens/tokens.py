"""Where the patches, CLS and registers are in what the blocks of a model return.

Shape suffixes: B images, N tokens, P patches row by row, C channels.
"""

import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._pytree import tree_leaves

from nearsight.lens.geometry import Geometry
from nearsight.lens.inputs import Batch, as_batch
from nearsight.lens.places import PADDING, Places, constant_along
from nearsight.lens.trace import PlaceTrace, without_values_first

if TYPE_CHECKING:
    from nearsight.lens.survey import Survey

_CLASS_TOKEN = re.compile(r"(^|.*[._])(cls|class)(_[^.]*)?")


def has_class_token(model: nn.Module) -> bool:
    """Whether the model learns a class token: a parameter whose own name has "cls" or "class" as a word.

    cls_token (timm, Hugging Face), class_embedding (CLIP), class_token (torchvision); not classifier.weight.
    """
    return any(_CLASS_TOKEN.fullmatch(name) for name, _ in model.named_parameters())


def class_keys(model: nn.Module, geometry: Geometry) -> Tensor:
    """Which keys are the class token, [W, M] bool: the first that is not a patch, if the model has one at all.

    All other tokens that are not patches are registers, a distillation token too.
    """
    others_WM = other_keys(geometry)
    return others_WM & (others_WM.cumsum(-1) == 1) & has_class_token(model)


def other_keys(geometry: Geometry) -> Tensor:
    """Which keys are tokens of their own, neither patches nor padding: [W, M] bool."""
    others_WM = geometry.key_places_WM2[..., 0].isnan()
    return others_WM if geometry.padding_WM is None else others_WM & ~geometry.padding_WM


@dataclass(frozen=True)
class TokenMap:
    """Where the tokens are in the output of a module, for images of one size."""

    tensor: int
    """Which of the tensors that the module returns."""
    images: int
    """Its axis of images."""
    channels: int
    """Its axis of channels."""
    patches: Tensor
    """Positions of the patches, row by row, among the other axes together."""
    grid_size: tuple[int, int]
    cls: int | None
    """Position of the class token, if there is one."""
    registers: tuple[int, ...] = ()
    """Positions of the other tokens that are neither patches nor padding."""

    def norms(self, outputs: Sequence[Tensor]) -> Tensor:
        """Euclidean norms of all tokens, in the order of the positions: [B, N], float32 or better."""
        output = outputs[self.tensor]
        wide = torch.promote_types(output.dtype, torch.float32)
        norms = torch.linalg.vector_norm(output, dim=self.channels, dtype=wide)
        norms_BN: Tensor = norms.movedim(self.images - (self.channels < self.images), 0).flatten(1)
        return norms_BN

    def patch_tokens(self, outputs: Sequence[Tensor]) -> Tensor:
        """[B, P, C]."""
        return self.all_tokens(outputs)[:, self.patches.to(outputs[self.tensor].device)]

    def class_token(self, outputs: Sequence[Tensor]) -> Tensor | None:
        """[B, 1, C]."""
        return None if self.cls is None else self.all_tokens(outputs)[:, self.cls : self.cls + 1]

    def all_tokens(self, outputs: Sequence[Tensor]) -> Tensor:
        """In the order of the positions: [B, N, C]."""
        return outputs[self.tensor].movedim((self.images, self.channels), (0, -1)).flatten(1, -2)


def same_tokens(one: TokenMap | None, other: TokenMap | None) -> bool:
    """Whether the same tokens are at the same positions."""
    if one is None or other is None:
        return one is other
    named = [(tokens.grid_size, tokens.cls, tokens.registers) for tokens in (one, other)]
    return named[0] == named[1] and torch.equal(one.patches, other.patches)


def alike(maps: Mapping[str, TokenMap]) -> list[list[str]]:
    """Blocks by name, those together whose tokens are at the same positions."""
    groups: list[list[str]] = []
    for name, tokens in maps.items():
        for group in groups:
            if same_tokens(tokens, maps[group[0]]):
                group.append(name)
                break
        else:
            groups.append([name])
    return groups


def block_of(layer_name: str) -> str | None:
    """The block an attention is in, its nearest ancestor with a number: blocks.0 of blocks.0.attn."""
    parts = layer_name.partition("#")[0].split(".")
    ends = [end for end in range(1, len(parts)) if parts[end - 1][-1:].isdigit()]
    return ".".join(parts[: ends[-1]]) if ends else None


OnTensors = Callable[[str, list[Tensor]], None]
"""What is called with the name of a module and tensors of it."""


@contextmanager
def watching_outputs(model: nn.Module, names: Sequence[str], on_output: OnTensors) -> Iterator[None]:
    """Call `on_output(name, tensors)` whenever one of these modules returns, while active."""
    with _hooked(model, names, on_output, register_module_forward_hook, nn.Module.register_forward_hook):
        yield


@contextmanager
def watching_inputs(model: nn.Module, names: Sequence[str], on_input: OnTensors) -> Iterator[None]:
    """Call `on_input(name, tensors)` whenever one of these modules is called, with its positional arguments."""
    with _hooked(model, names, on_input, register_module_forward_pre_hook, nn.Module.register_forward_pre_hook):
        yield


@contextmanager
def _hooked(
    model: nn.Module,
    names: Sequence[str],
    on_tensors: OnTensors,
    everywhere: Callable[..., Any],
    on: Callable[..., Any],
) -> Iterator[None]:
    """With hooks on these modules, because one on all of them slows down every module of a forward."""
    paths = {name: path for name in names if (path := _path(model, name)) is not None}
    wanted = {path[-1]: name for name, path in paths.items()}
    thread = threading.get_ident()

    def look(module: nn.Module, *values: Any) -> None:
        if module in wanted and threading.get_ident() == thread:
            # What is computed here is not the model's: a tap must not take it for attention.
            with torch._C.DisableTorchFunction():
                on_tensors(wanted[module], [leaf for leaf in tree_leaves(values[-1]) if isinstance(leaf, Tensor)])

    with ExitStack() as hooks:
        # nn.TransformerEncoderLayer changes its way of computing if any of its modules has a hook.
        if any(isinstance(module, nn.TransformerEncoderLayer) for path in paths.values() for module in path):
            hooks.callback(everywhere(look).remove)
        else:
            for module in wanted:
                hooks.callback(on(module, look).remove)
        yield


def _path(model: nn.Module, name: str) -> list[nn.Module] | None:
    """From the model to its module of this name, if it has one: in each batch anew, so not by a walk through all."""
    path: list[nn.Module | None] = [model]
    for part in name.split(".") if name else ():
        path.append(path[-1]._modules.get(part) if path[-1] is not None else None)
    return [module for module in path if module is not None] if path[-1] is not None else None


@dataclass(frozen=True)
class BlockTokens:
    """Where the tokens are in what goes into the blocks of a model, and in what comes out of them."""

    of_layers: tuple[str | None, ...]
    """The name of the block that each layer is in."""
    inputs: dict[str, TokenMap]
    """By block, of its positional arguments; without those that do not hold a grid of patches, or run twice."""
    outputs: dict[str, TokenMap]


def block_tokens(model: nn.Module, found: "Survey", batch: Batch) -> BlockTokens:
    """Of the blocks that the surveyed attentions are in, by one forward for all measurements."""
    blocks = tuple(block_of(layer) for layer in found.layers)
    if ("blocks", blocks) not in found.cache:
        names = list(dict.fromkeys(filter(None, blocks)))
        found.cache["blocks", blocks] = BlockTokens(blocks, *_map_both(model, batch, names))
    known: BlockTokens = found.cache["blocks", blocks]
    return known


def map_tokens(model: nn.Module, image: Tensor | Batch, names: Sequence[str]) -> dict[str, TokenMap]:
    """Where the tokens are in the outputs of these modules, by a forward of two images like this one [C, H, W].

    Left out are modules whose outputs do not hold a grid of patches, or that run more than once.
    """
    return _map_both(model, image, names)[1]


def _map_both(
    model: nn.Module, image: Tensor | Batch, names: Sequence[str]
) -> tuple[dict[str, TokenMap], dict[str, TokenMap]]:
    """In the inputs of modules, and in their outputs."""
    batch = as_batch(image)
    if batch.is_one:
        return {}, {}
    pair = batch.pair()
    return without_values_first(lambda with_values: _mapped_tokens(model, pair, names, with_values))


def _mapped_tokens(
    model: nn.Module, pair: Batch, names: Sequence[str], with_values: bool
) -> tuple[dict[str, TokenMap], dict[str, TokenMap]]:
    trace = PlaceTrace(pair, with_values=with_values)
    has_cls = has_class_token(model)
    inputs, outputs = dict[str, TokenMap](), dict[str, TokenMap]()
    times: Counter[str] = Counter()

    def look(found: dict[str, TokenMap], name: str, tensors: list[Tensor]) -> None:
        for number, tensor in enumerate(tensors):
            traced = trace.of(tensor)
            if name not in found and traced is not None:
                mapped = _mapped(trace.places, traced.own, number, has_cls)
                found.update({} if mapped is None else {name: mapped})

    def look_at_inputs(name: str, tensors: list[Tensor]) -> None:
        times[name] += 1
        look(inputs, name, tensors)

    watching = watching_inputs(model, names, look_at_inputs), watching_outputs(model, names, partial(look, outputs))
    with torch.no_grad(), trace, watching[0], watching[1]:
        pair.run(model)
    once = [name for name in names if times[name] == 1]
    inputs, outputs = ({name: found[name] for name in once if name in found} for found in (inputs, outputs))
    return inputs, outputs


def _mapped(places: Places, numbers: Tensor, tensor: int, has_cls: bool) -> TokenMap | None:
    """From the place of each element of a tensor for two images."""
    axes = _axes(places, numbers)
    if axes is None:
        return None
    first, second = numbers.movedim(axes, (0, -1))[..., 0].flatten(1)
    if not torch.equal(*(places.cells(image).nan_to_num(-1.0) for image in (first, second))):
        return None  # its tokens lie elsewhere in one image than in another
    is_patch = (places.image_of(first) >= 0) & ~places.covers_image(first)
    centres = places.cells(first[is_patch])
    rows, row = centres[:, 0].unique(return_inverse=True)
    cols, col = centres[:, 1].unique(return_inverse=True)
    cell = row * len(cols) + col
    if not len(centres) or len(rows) * len(cols) != len(centres) or len(cell.unique()) != len(centres):
        return None
    others = (~is_patch & (first != PADDING)).nonzero().flatten()
    cls = int(others[0]) if has_cls and len(others) else None
    registers = tuple(others.tolist()[0 if cls is None else 1 :])
    patches = is_patch.nonzero().flatten()[cell.argsort()]
    return TokenMap(tensor, *axes, patches, (len(rows), len(cols)), cls, registers)


def _axes(places: Places, numbers: Tensor) -> tuple[int, int] | None:
    """(images, channels): the axis along which images differ, and the one along which no place changes."""
    image = places.image_of(numbers)
    by_image = [
        axis
        for axis in range(numbers.dim())
        if numbers.shape[axis] == 2
        and all(bool(((part == which) | (part < 0)).all()) for which, part in enumerate(image.unbind(axis)))
    ]
    if numbers.dim() < 3 or not (image >= 0).any() or len(by_image) != 1:
        return None
    constant = [
        axis for axis in range(numbers.dim()) if axis != by_image[0] and constant_along(numbers, axis) is not None
    ]
    if not constant:
        return None
    last = numbers.dim() - 1
    return by_image[0], last if last in constant else constant[0]  # among several, as a grid of one column has
