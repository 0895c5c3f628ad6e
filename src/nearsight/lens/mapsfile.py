"""Attention maps as they are given out: in memory, or in a file that is filled while they come.

The file is safetensors and not zarr: it is one file, needs no library that is not here already, is read by torch, NumPy
and JAX, knows bfloat16, and runs no code. It is mapped into memory when it is opened, so that only what is looked
at is read. It has a tensor "<layer>/<field>" for each tensor of `LayerMaps`; the rest is JSON in its metadata.

Shape suffixes: B images, H heads, N queries of the model, M keys. Of a map: Q its queries, patches row by row and then
tokens that are not patches; K the patches that are keys, row by row; O the keys that are not patches.
"""

import errno
import json
import math
import os
import shutil
import struct
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import safe_open
from torch import Tensor

from nearsight.errors import InputError
from nearsight.files import check_output_folder, replacing
from nearsight.lens.inputs import on_the_host

Grid = tuple[int, int]
"""(rows, columns)."""

DTYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.float64: "F64"}
"""Of maps, and what safetensors calls them."""
_ALL_DTYPES = {**DTYPES, torch.int64: "I64", torch.bool: "BOOL"}
_OF_IMAGES = ("weights_BHQK", "other_weights_BHQO", "distances_BHQ")
_OF_LAYER = ("reach_QK", "query_order_N", "key_order_M")
_PAIRS = ("grid_size", "query_grid", "key_grid", "whole_query_grid", "whole_key_grid")
_LISTS = ("heads", *_PAIRS, "others", "other_queries")
_METADATA_KEY, _KIND, _FORMAT = "nearsight", "attention maps", 1


@dataclass(frozen=True, eq=False, repr=False)  # tensors are not equal or unequal as a whole
class LayerMaps:
    """The attention maps of one layer, on the CPU or in a file.

    Windows are in their place on the whole grid. If patches are pooled, a query is the mean of its patches, and a key
    the sum of its own, so that a row sums to what it did.
    """

    name: str
    heads: tuple[int, ...]
    """Which of the layer's heads these are, from 0."""
    grid_size: Grid
    """The layer's own, whose diagonal is the unit of distances."""
    query_grid: Grid
    key_grid: Grid
    whole_query_grid: Grid
    """Before pooling."""
    whole_key_grid: Grid
    others: tuple[str, ...]
    """The keys that are not patches: CLS, register 1, …"""
    other_queries: tuple[str, ...]
    """The queries that are not patches: the same, or none where each window has its own."""
    weights_BHQK: Tensor
    """With `other_weights_BHQO` a row sums to 1, except for what goes to the padding of windows."""
    other_weights_BHQO: Tensor
    distances_BHQ: Tensor
    """How far a query looks, renormalised over the patches, in diagonals; NaN for one that is not a patch."""
    reach_QK: Tensor | None
    """Which patches a query can see; None: all of them."""
    query_order_N: Tensor | None
    """The row of a map that is each query of the model, in its order; None if they are not the same, one by one."""
    key_order_M: Tensor | None
    """The column of a map that is each key: those of `weights_BHQK`, and then those of `other_weights_BHQO`."""

    def __repr__(self) -> str:
        shape, dtype = list(self.weights_BHQK.shape), str(self.weights_BHQK.dtype).removeprefix("torch.")
        return f"LayerMaps({self.name!r}, heads {list(self.heads)}; .weights_BHQK {shape} {dtype}, .full())"

    def full(self, images: slice = slice(None)) -> Tensor:
        """All tokens to all tokens in the model's own order, with CLS and registers: [B, H, N, M].

        This is what the model's unfused code has after its softmax. It is put together in memory: of many images in a
        file, take some at a time.
        """
        if self.query_order_N is None or self.key_order_M is None:
            raise InputError(
                f"{self.name} has no one map of all its tokens: it has windows or padding, or its maps are pooled; "
                "take weights_BHQK"
            )
        joined = torch.cat([self.weights_BHQK[images], self.other_weights_BHQO[images]], dim=-1)
        return joined[:, :, self.query_order_N[:, None], self.key_order_M]

    def with_maps(self, made: Callable[[str, Tensor], Tensor]) -> Self:
        """With other maps, each made from the name of the field and what is there."""
        maps: dict[str, Any] = {field: made(field, getattr(self, field)) for field in _OF_IMAGES}
        return replace(self, **maps)


@dataclass(frozen=True, eq=False)
class PictureMaps:
    """Where every head looks on a few pictures."""

    layers: tuple[LayerMaps, ...]
    """By layer, as `attention_maps` returns them."""
    pictures_BHWC: NDArray[np.uint8]
    """The pictures as people see them."""

    def choose(self, names: Sequence[str]) -> Self:
        by_name = {layer.name: layer for layer in self.layers}
        return replace(self, layers=tuple(by_name[name] for name in names))

    def __repr__(self) -> str:
        return f"PictureMaps({len(self.layers)} layers, {len(self.pictures_BHWC)} pictures)"


class InMemory:
    """Room for maps, which come batch by batch: for so many images, if that is known."""

    def __init__(self, num_images: int | None) -> None:
        self._num_images = num_images
        self._parts: dict[str, list[LayerMaps]] = {}

    def room(self, layer: LayerMaps, images: slice) -> LayerMaps:
        """Where the maps of these images, which come behind the last ones, are to be written; all 0 at first.

        `layer` has maps of no images.
        """
        parts, known = self._parts.setdefault(layer.name, []), self._num_images
        if known is None or not parts:
            size = images.stop - images.start if known is None else known
            parts.append(layer.with_maps(lambda _, empty: empty.new_zeros(size, *empty.shape[1:])))
        return parts[-1] if known is None else parts[0].with_maps(lambda _, whole: whole[images])

    def finished(self, layers: Sequence[LayerMaps]) -> list[LayerMaps]:
        """The maps of all images, layer by layer."""
        # The parts of one layer are freed before the next is joined.
        return [_joined(self._parts.pop(layer.name)) for layer in layers]


def _joined(parts: Sequence[LayerMaps]) -> LayerMaps:
    if len(parts) == 1:
        return parts[0]
    return parts[0].with_maps(lambda field, _: torch.cat([getattr(part, field) for part in parts]))


class InFile:
    """The same in a file. Its header, at the front, says how many images there are. If that is known, `begin` comes
    first; otherwise each tensor waits in a file of its own, without a name, and they are joined in the end."""

    def __init__(self, file: IO[bytes], folder: Path, open_files: ExitStack, num_images: int | None) -> None:
        self._file, self._folder, self._open_files = file, folder, open_files
        self._is_known, self._num_images = num_images is not None, num_images or 0
        self._begins: dict[str, int] = {}
        self._waiting: dict[str, IO[bytes]] = {}

    def begin(self, layers: Sequence[LayerMaps]) -> None:
        """Write the header, and what does not depend on images."""
        header, self._begins, size = _planned(layers, self._num_images)
        if self._is_known:
            _reserve(self._file, 0, size)
        self._file.write(header)
        for name, (field, tensor) in _tensors(layers).items():
            if field in _OF_LAYER:
                self._file.seek(self._begins[name])
                self._file.write(tensor.numpy().tobytes())
        self._file.flush()

    def room(self, layer: LayerMaps, images: slice) -> LayerMaps:
        """Memory that belongs to the file as long as it is in use."""
        self._num_images = max(self._num_images, images.stop)
        return layer.with_maps(lambda field, empty: self._mapped(f"{layer.name}/{field}", empty, images))

    def finished(self, layers: Sequence[LayerMaps]) -> list[LayerMaps]:
        """None here: `open_maps` opens the file when it has its name."""
        if not self._is_known:
            self.begin(layers)
            for name, waiting in self._waiting.items():
                waiting.seek(0)
                self._file.seek(self._begins[name])
                shutil.copyfileobj(waiting, self._file, 2**24)
                waiting.close()  # its room on the disk is free again
        self._file.flush()
        return []

    def _mapped(self, name: str, empty: Tensor, images: slice) -> Tensor:
        shape = images.stop - images.start, *empty.shape[1:]
        size = math.prod(shape) * empty.dtype.itemsize
        if not size:  # nothing cannot be mapped
            return empty.new_zeros(shape)
        file, begin = self._file, self._begins.get(name, 0) + size // shape[0] * images.start
        if not self._is_known:
            if name not in self._waiting:
                nameless = tempfile.TemporaryFile(dir=self._folder)  # noqa: SIM115 (the stack closes it)
                self._waiting[name] = self._open_files.enter_context(nameless)
            file = self._waiting[name]
            _reserve(file, begin, size)
        return torch.from_numpy(np.memmap(file, np.uint8, "r+", begin, (size,))).view(empty.dtype).view(shape)


def _tensors(layers: Sequence[LayerMaps]) -> dict[str, tuple[str, Tensor]]:
    """By their names in the file: the field, and the tensor."""
    return {
        f"{layer.name}/{field}": (field, tensor)
        for layer in layers
        for field in (*_OF_IMAGES, *_OF_LAYER)
        if (tensor := getattr(layer, field)) is not None
    }


def _planned(layers: Sequence[LayerMaps], num_images: int) -> tuple[bytes, dict[str, int], int]:
    """A file of the maps of so many images: its header, where each tensor begins, and its size in bytes."""
    tensors = _tensors(layers)
    entries: dict[str, Any] = {"__metadata__": {_METADATA_KEY: json.dumps(_described(layers))}}
    end = 0
    # The widest numbers first: then each begins at a multiple of its width.
    for name, (field, tensor) in sorted(tensors.items(), key=lambda item: -item[1][1].dtype.itemsize):
        shape = [num_images, *tensor.shape[1:]] if field in _OF_IMAGES else list(tensor.shape)
        begin, end = end, end + math.prod(shape) * tensor.dtype.itemsize
        entries[name] = {"dtype": _ALL_DTYPES[tensor.dtype], "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    header = struct.pack("<Q", len(text)) + text
    return header, {name: len(header) + entries[name]["data_offsets"][0] for name in tensors}, len(header) + end


def size_of_maps(layers: Sequence[LayerMaps], num_images: int) -> int:
    """Bytes of a file with the maps of so many images of these layers."""
    return _planned(layers, num_images)[2]


def _reserve(file: IO[bytes], begin: int, size: int) -> None:
    """Room on the disk: if it is full that is an error now, and not a signal that ends the process when maps come."""
    try:
        os.posix_fallocate(file.fileno(), begin, size)
    except (AttributeError, OSError) as error:  # not every system has it, nor every file system
        if isinstance(error, OSError) and error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
        file.truncate(begin + size)


@contextmanager
def keeping_maps(out: Path | None, num_images: int | None) -> Iterator[InMemory | InFile]:
    """Where maps are kept. A file has its name only when all of it is there."""
    if out is None:
        yield InMemory(num_images)
        return
    if out.is_dir():
        raise InputError(f"{out} is a folder; give the name of a file, such as {out / 'maps.safetensors'}")
    check_output_folder(out.parent)
    with replacing(out) as temporary, temporary.open("w+b") as file, ExitStack() as open_files:
        yield InFile(file, out.parent, open_files, num_images)


def _described(layers: Sequence[LayerMaps]) -> dict[str, Any]:
    described = [{field: getattr(layer, field) for field in ("name", *_LISTS)} for layer in layers]
    return {"kind": _KIND, "format": _FORMAT, "layers": described}


def open_maps(path: str | Path) -> list[LayerMaps]:
    """The maps that `attention_maps(…, out=path)` has written, one object per layer.

    Their tensors are the file's own memory: it is read where they are looked at, and what is written to them does not
    reach it. Nothing in the file is executed.
    """
    try:
        with on_the_host(), safe_open(path, framework="pt") as file:
            described = json.loads((file.metadata() or {}).get(_METADATA_KEY, "{}"))
            if not isinstance(described, dict) or described.get("kind") != _KIND:
                raise InputError(f"{path} holds no attention maps; attention_maps(…, out=…) writes such a file")
            if described["format"] > _FORMAT:
                raise InputError(f"{path} was written by a newer nearsight (format {described['format']}); update it")
            names = set(file.keys())
            return [_opened(file, names, layer) for layer in described["layers"]]
    except FileNotFoundError as error:
        raise InputError(f"{path} does not exist") from error
    except InputError:
        raise
    except Exception as error:  # safetensors, json and torch have many kinds for a damaged file
        reason = " ".join(str(error).split())[:200]
        raise InputError(f"{path} is damaged or is not a file of attention maps ({reason}); write it again") from error


def _opened(file: Any, names: set[str], layer: dict[str, Any]) -> LayerMaps:
    tensors: dict[str, Any] = {
        field: file.get_tensor(name) if (name := f"{layer['name']}/{field}") in names else None
        for field in (*_OF_IMAGES, *_OF_LAYER)
    }
    lists: dict[str, Any] = {field: tuple(layer[field]) for field in _LISTS}
    maps = LayerMaps(name=layer["name"], **lists, **tensors)
    if any(len(getattr(maps, field)) != 2 for field in _PAIRS):
        raise ValueError(f"a grid of {maps.name} does not have two sides")
    num_queries = math.prod(maps.query_grid) + len(maps.other_queries)
    num_keys = math.prod(maps.key_grid)
    lead = len(tensors["distances_BHQ"]), len(maps.heads), num_queries
    shapes = {
        "weights_BHQK": (*lead, num_keys),
        "other_weights_BHQO": (*lead, len(maps.others)),
        "distances_BHQ": lead,
        "reach_QK": (num_queries, num_keys),
        "query_order_N": (num_queries,),
        "key_order_M": (num_keys + len(maps.others),),
    }
    for field, shape in shapes.items():
        if (tensor := tensors[field]) is None and field in _OF_LAYER:
            continue
        if tensor is None or tensor.shape != shape:
            raise ValueError(f"{maps.name}/{field} is not a tensor of {list(shape)}")
        if field.endswith(("_N", "_M")) and not torch.equal(tensor.sort().values, torch.arange(len(tensor))):
            raise ValueError(f"{maps.name}/{field} is not an order of its tokens")
    return maps
