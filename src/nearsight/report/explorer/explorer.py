"""From models and pictures to an explorer: a place in a page to be drawn at, its data, one script and one style sheet.

The maps are text that a page can hold, with 8 bits per weight. A layer of one picture is one run of bytes,
little-endian, in base64. First float32: of every head and query the largest weight, what goes to each token that is no
patch, and how far the query looks (NaN where that has no meaning). Then a byte for every head, query and key: the
weight as a share of the query's largest, which is 255.

Shape suffixes as in `nearsight.lens.mapsfile`.
"""

import base64
import io
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Self

import matplotlib as mpl
import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

from nearsight.errors import InputError
from nearsight.files import read_object, write_text
from nearsight.lens import LayerMaps, attention_maps
from nearsight.lens.mapsfile import Grid
from nearsight.report.inputs import ModelHeads, check_labels

_PLACE = "nearsight-explorer"
"""The id of the element the script draws in; that of the data is the same with "-data" behind it."""
_FORMAT = 1
"""Of the data; raised whenever an older script would go wrong."""
_LIMIT = 2_000_000
"""Characters that all maps of a page may have together."""
_POOLED_LINES = (8, 4, 2)
"""Rows and columns to which patches are pooled where whole maps are too large; the last ones for huge models."""
_COLOURS = "magma"
"""Perceptually uniform, dark where there is nothing to see, and readable without distinguishing red from green."""
_LEVELS = 255
_FLOAT_BYTES = 4
_LARGEST_SIDE = 224
"""Of a picture, in pixels: as large as they are drawn."""
_FEW_PIXELS = 64 * 64
"""Up to so many are kept exactly: a compressed copy would hardly be smaller, and it blurs what is drawn enlarged."""


@dataclass(frozen=True)
class Explorer:
    """Models, their maps on a few pictures, and what is to be said about them."""

    data: Mapping[str, Any]
    """JSON values: `colours`, `pictures`, `notes` and `models`, whose layers are as said above."""

    def html(self) -> str:
        """The body fragment; the page also needs `explorer_style` and, after the fragment, `explorer_script`."""
        # No text may end the element it stands in.
        text = self._text().replace("<", "\\u003c")
        return (
            f'<div id="{_PLACE}"><noscript><p>Looking into the heads needs JavaScript.</p></noscript></div>'
            f'<script type="application/json" id="{_PLACE}-data">{text}</script>'
        )

    def write(self, path: Path) -> None:
        """To a file, for a page that is made when the model is no longer there."""
        write_text(path, self._text())

    @classmethod
    def read(cls, path: Path) -> Self:
        data = read_object(path, missing=f"{path.parent} has no attention maps", way_out="; measure the model again")
        if not isinstance(data.get("format"), int):
            raise InputError(f"{path} holds no maps of attention; measure the model again")
        if data["format"] > _FORMAT:
            raise InputError(f"{path} was written by a newer nearsight (format {data['format']}); update it")
        explorer = cls(data)
        try:
            explorer._text()
        except ValueError as error:  # NaN and infinity, which Python reads and no page can hold
            raise InputError(f"{path} is damaged: {error}; measure the model again") from error
        return explorer

    def _text(self) -> str:
        return json.dumps(dict(self.data), allow_nan=False, separators=(",", ":"))


def explorer_style() -> str:
    return _file("explorer.css")


def explorer_script() -> str:
    return _file("explorer.js")


def _file(name: str) -> str:
    return resources.files("nearsight.report.explorer").joinpath(name).read_text(encoding="utf-8")


@dataclass(frozen=True, kw_only=True, eq=False)
class Exhibit:
    """A model to look into, and some images to do it with."""

    heads: ModelHeads
    """Its name, and the numbers of its heads that are shown."""
    model: nn.Module
    images_BCHW: Tensor
    """As the model takes them."""
    pictures_BHWC: NDArray[np.uint8]
    """The same, as people see them."""

    def maps(self, most_lines: int | None, device: torch.device | str | None) -> dict[int, LayerMaps]:
        """Of the layers that have numbers, by their number among all of the model's."""
        found = attention_maps(self.model, self.images_BCHW, dtype=torch.float64, most_lines=most_lines, device=device)
        numbers = self.heads.layers()
        if numbers[-1] >= len(found):
            raise InputError(
                f"the heads of {self.heads.label!r} are those of another model: "
                f"they have a layer {numbers[-1]}, but the model's count from 0 to {len(found) - 1}"
            )
        return {number: found[number] for number in numbers}


def explore(exhibits: Sequence[Exhibit], *, device: torch.device | str | None = None, limit: int = _LIMIT) -> Explorer:
    """The explorer of some models, each on its own copies of the same pictures.

    If the maps together exceed `limit`, patches are pooled to at most 8 × 8; if they still do, pictures are left out;
    and the page says so.
    """
    check_labels([exhibit.heads for exhibit in exhibits])
    wanted = min(len(exhibit.images_BCHW) for exhibit in exhibits)
    if not wanted:
        raise InputError("there are no pictures to look at")
    maps, num_pictures = _fitting(exhibits, wanted, limit, device)
    pictures: dict[str, int] = {}
    models = []
    for exhibit, layers in zip(exhibits, maps, strict=True):
        shown = [_data_uri(picture) for picture in exhibit.pictures_BHWC[:num_pictures]]
        models.append(
            {
                "label": exhibit.heads.label,
                # Models that see the same picture share it.
                "pictures": [pictures.setdefault(uri, len(pictures)) for uri in shown],
                "layers": list(_packed(exhibit.heads, layers, num_pictures)),
            }
        )
    return Explorer(
        {
            "format": _FORMAT,
            "colours": _colour_table(mpl.colormaps[_COLOURS](np.arange(256))),
            "pictures": list(pictures),
            "notes": list(_notes(maps, num_pictures, wanted)),
            "models": models,
        }
    )


_Maps = list[dict[int, LayerMaps]]
"""Of each model, by layer."""


def _fitting(
    exhibits: Sequence[Exhibit], wanted: int, limit: int, device: torch.device | str | None
) -> tuple[_Maps, int]:
    """The finest maps that fit, and of how many pictures.

    Pooled ones are made first: they are small whatever the model, and say how large the whole ones would be.
    """
    for lines in _POOLED_LINES:
        maps = [exhibit.maps(lines, device) for exhibit in exhibits]
        if lines == _POOLED_LINES[0] and _size(maps, whole=True) * wanted <= limit:
            return [exhibit.maps(None, device) for exhibit in exhibits] if _is_pooled(maps) else maps, wanted
        if num_pictures := min(wanted, limit // _size(maps)):
            return maps, num_pictures
    raise InputError(
        f"the maps of {len(exhibits)} models do not fit into a page, not even of one picture; show fewer at a time"
    )


def _size(maps: _Maps, *, whole: bool = False) -> int:
    """Characters per picture."""
    return sum(
        _packed_size(
            layer,
            layer.whole_query_grid if whole else layer.query_grid,
            layer.whole_key_grid if whole else layer.key_grid,
        )
        for layer in _all(maps)
    )


def _all(maps: _Maps) -> Iterator[LayerMaps]:
    return (layer for layers in maps for layer in layers.values())


def _is_pooled(maps: _Maps) -> bool:
    return any(
        (layer.query_grid, layer.key_grid) != (layer.whole_query_grid, layer.whole_key_grid) for layer in _all(maps)
    )


def _packed(heads: ModelHeads, layers: dict[int, LayerMaps], num_pictures: int) -> Iterator[dict[str, Any]]:
    rows = heads.measured()
    for number, maps in layers.items():
        yield _pack_layer(number, maps, rows[rows["layer"] == number], num_pictures)


def _notes(maps: _Maps, num_pictures: int, wanted: int) -> Iterator[str]:
    if _is_pooled(maps):
        lines = max(max(layer.query_grid + layer.key_grid) for layer in _all(maps))
        yield (
            f"To keep this page small, patches are pooled to at most {lines} × {lines}: a query is the mean over its "
            "patches, and its attention is added up over theirs."
        )
    if num_pictures < wanted:
        yield f"To keep this page small, {num_pictures} of {wanted} pictures are here."
    error = _largest_error(_all(maps))
    yield (
        f"Maps have 8 bits, from 0 to the query’s largest weight; none is off by more than {_rounded_up(error)} of all "
        "attention. MAD and entropy are those of the tables, over all measured images."
    )


def _rounded_up(error: float) -> str:
    """A share as a percentage of one digit that is not 0, never less than it."""
    percentage = 100 * error
    digits = 0 if percentage == 0 else max(0, -math.floor(math.log10(percentage)))
    return f"{math.ceil(percentage * 10**digits) / 10**digits:.{digits}f} %"


def _pack_layer(number: int, maps: LayerMaps, heads: pd.DataFrame, num_pictures: int) -> dict[str, Any]:
    """One layer as JSON values. `heads`: its rows of heads.csv, whose distances and entropies are the ones shown."""
    by_head = heads.set_index("head")
    num_heads = maps.weights_BHQK.shape[1]
    numbers = {
        name: [None if math.isnan(value) else float(value) for value in by_head[name].reindex(range(num_heads))]
        for name in ("mad", "entropy")
    }
    return {
        "number": number,
        "name": maps.name,
        "grid": maps.grid_size,
        "queries": maps.query_grid,
        "keys": maps.key_grid,
        "others": maps.others,
        "otherQueries": maps.other_queries,
        **numbers,
        "reach": None
        if maps.reach_QK is None
        else _text(np.packbits(maps.reach_QK.numpy(), bitorder="little").tobytes()),
        "maps": [_pack_maps(maps, picture) for picture in range(num_pictures)],
    }


def _pack_maps(maps: LayerMaps, picture: int) -> str:
    levels_HQK, largest_HQ = _quantised(maps.weights_BHQK[picture].numpy())
    floats = (largest_HQ, maps.other_weights_BHQO[picture].numpy(), maps.distances_BHQ[picture].numpy())
    return _text(b"".join([*(part.astype("<f4").tobytes() for part in floats), levels_HQK.tobytes()]))


def _quantised(weights_HQK: NDArray[np.float64]) -> tuple[NDArray[np.uint8], NDArray[np.float64]]:
    """Levels and the largest weight of each row: a weight is level · largest / 255, within largest / 510."""
    largest_HQ = weights_HQK.max(-1)
    shares_HQK = weights_HQK / np.where(largest_HQ > 0, largest_HQ, 1.0)[..., None]
    return np.rint(_LEVELS * shares_HQK).astype(np.uint8), largest_HQ


def _largest_error(layers: Iterable[LayerMaps]) -> float:
    """By how much a weight in the page is off at most."""
    error = 0.0
    for maps in layers:
        weights = maps.weights_BHQK.numpy()
        levels, largest = _quantised(weights)
        error = max(error, float(np.abs(levels * largest[..., None] / _LEVELS - weights).max()))
    return error


def _packed_size(maps: LayerMaps, query_grid: Grid, key_grid: Grid) -> int:
    """Characters of one picture of a layer, if its patches were pooled to these grids."""
    num_queries = math.prod(query_grid) + len(maps.other_queries)
    num_bytes = math.prod(key_grid) + _FLOAT_BYTES * (2 + len(maps.others))
    return math.ceil(maps.weights_BHQK.shape[1] * num_queries * num_bytes / 3) * 4


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _colour_table(colours: NDArray[np.float64]) -> str:
    """256 RGB colours of a map, as text."""
    return _text(np.rint(_LEVELS * colours[:, :3]).astype(np.uint8).tobytes())


def _data_uri(picture_HWC: NDArray[np.uint8]) -> str:
    """A picture as people see it, as text that a page can hold."""
    picture = Image.fromarray(picture_HWC)
    picture.thumbnail((_LARGEST_SIDE, _LARGEST_SIDE), Image.Resampling.LANCZOS)
    exact = picture.width * picture.height <= _FEW_PIXELS
    file = io.BytesIO()
    picture.save(file, "PNG" if exact else "JPEG", **({"optimize": True} if exact else {"quality": 85}))
    return f"data:image/{'png' if exact else 'jpeg'};base64,{base64.b64encode(file.getvalue()).decode()}"
