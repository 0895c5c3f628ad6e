"""From models and pictures to an explorer: a place in a page to be drawn at, its data, one script and one style sheet.

The maps are text that a page can hold, with 8 bits per weight. A layer of one picture is one run of bytes,
little-endian, deflated (zlib) and in base64. First float32: of every head and query the largest weight, what goes to
each token that is no patch, and how far the query looks (NaN where that has no meaning). Then a byte for every head,
query and key: the weight as a share of the query's largest, which is 255.

Shape suffixes as in `nearsight.lens.mapsfile`.
"""

import base64
import io
import json
import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple, Self

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
from nearsight.report.inputs import ModelHeads, check_labels

_PLACE = "nearsight-explorer"
"""The id of the element the script draws in; that of the data is the same with "-data" behind it."""
_FORMAT = 2
"""Of the data; raised whenever an older script would go wrong. Maps of format 1 were not deflated."""
_LIMIT = 16_000_000
"""Characters that all maps of a page may have together: three pictures of a ViT-B with 14 × 14 patches."""
_POOLED_LINES = (16, 8, 4, 2)
"""Rows and columns to which patches are pooled where not even one picture fits; the last ones for huge models."""
_MOST_DEFLATED = 4
"""Whole maps of more bytes than so many limits are not even tried: they would have to become smaller by this factor."""
_COLOURS = "magma"
"""Perceptually uniform, dark where there is nothing to see, and readable without distinguishing red from green."""
_LEVELS = 255
_FLOAT_BYTES = 4
_LARGEST_SIDE = 512
"""Of a picture, in pixels: as large as it is drawn on a dense screen, and larger than most models take it."""
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
        try:
            explorer = cls(_deflated(data) if data["format"] == 1 else data)
            explorer._text()
        except (ValueError, KeyError, TypeError) as error:  # NaN and infinity, too, which no page can hold
            raise InputError(f"{path} is damaged: {error}; measure the model again") from error
        return explorer

    def _text(self) -> str:
        return json.dumps(dict(self.data), allow_nan=False, separators=(",", ":"))


def _deflated(data: Mapping[str, Any]) -> dict[str, Any]:
    """Data of format 1, whose maps are as they are after inflating."""
    models = [
        {
            **model,
            "layers": [
                {
                    **layer,
                    "heads": list(range(len(layer["mad"]))),
                    "maps": [_text(zlib.compress(base64.b64decode(text))) for text in layer["maps"]],
                }
                for layer in model["layers"]
            ],
        }
        for model in data["models"]
    ]
    return {**data, "format": _FORMAT, "models": models}


def explorer_style() -> str:
    return _file("explorer.css")


def explorer_script() -> str:
    return _file("explorer.js")


def explorer_module() -> str:
    """The script as a module that a notebook's widget can be made of (anywidget's `_esm`).

    The widget's trait `data` holds `Explorer.data`; `explorer_style` is its `_css`.
    """
    render = 'render({ model, el }) { globalThis.nearsightExplorer.mount(el, model.get("data")); }'
    return f"{explorer_script()}\nexport default {{ {render} }};\n"


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

    @property
    def num_pictures(self) -> int:
        return len(self.images_BCHW)

    def maps(
        self, picture: int, most_lines: int | None, device: torch.device | str | None = None
    ) -> dict[int, LayerMaps]:
        """On one picture, of the layers that have numbers, by their number among all of the model's."""
        image_1CHW = self.images_BCHW[picture : picture + 1]
        found = attention_maps(self.model, image_1CHW, dtype=torch.float64, most_lines=most_lines, device=device)
        numbers = self.heads.layers()
        if numbers[-1] >= len(found):
            raise InputError(
                f"the heads of {self.heads.label!r} are those of another model: "
                f"they have a layer {numbers[-1]}, but the model's count from 0 to {len(found) - 1}"
            )
        return {number: found[number] for number in numbers}


@dataclass(frozen=True, kw_only=True, eq=False)
class KeptMaps:
    """The same where the maps are there already, and the model need not be; they are never pooled further."""

    heads: ModelHeads
    layers: Sequence[LayerMaps]
    """As `nearsight.attention_maps` gives them: of some or all of the layers and heads that have numbers."""
    pictures_BHWC: NDArray[np.uint8]

    @property
    def num_pictures(self) -> int:
        return len(self.pictures_BHWC)

    def maps(
        self, picture: int, _most_lines: int | None, _device: torch.device | str | None = None
    ) -> dict[int, LayerMaps]:
        rows = self.heads.measured()
        numbers = dict(zip(rows["layer_name"], rows["layer"], strict=True))
        if unknown := [layer.name for layer in self.layers if layer.name not in numbers]:
            raise InputError(f"the heads of {self.heads.label!r} are those of another model: they have no {unknown[0]}")
        return {
            int(numbers[layer.name]): layer.with_maps(lambda _, maps: maps[picture : picture + 1].double())
            for layer in self.layers
        }


def explore(
    exhibits: Sequence[Exhibit | KeptMaps], *, device: torch.device | str | None = None, limit: int = _LIMIT
) -> Explorer:
    """The explorer of some models, each on its own copies of the same pictures.

    If the maps together exceed `limit` characters, pictures are left out; if not even one fits, patches are pooled to
    at most 16 × 16, or fewer; and the page says so.
    """
    check_labels([exhibit.heads for exhibit in exhibits])
    wanted = min(exhibit.num_pictures for exhibit in exhibits)
    if not wanted:
        raise InputError("there are no pictures to look at")
    shown = _fitting(exhibits, wanted, limit, device)
    pictures: dict[str, int] = {}
    models = []
    for place, exhibit in enumerate(exhibits):
        uris = [_data_uri(picture) for picture in exhibit.pictures_BHWC[: len(shown)]]
        rows = exhibit.heads.measured()
        models.append(
            {
                "label": exhibit.heads.label,
                # Models that see the same picture share it.
                "pictures": [pictures.setdefault(uri, len(pictures)) for uri in uris],
                "layers": [
                    {
                        **_frame(number, layer.maps, rows[rows["layer"] == number]),
                        "maps": [picture[place][number].text for picture in shown],
                    }
                    for number, layer in shown[0][place].items()
                ],
            }
        )
    return Explorer(
        {
            "format": _FORMAT,
            "colours": _colour_table(mpl.colormaps[_COLOURS](np.arange(256))),
            "pictures": list(pictures),
            "notes": list(_notes(shown, wanted)),
            "models": models,
        }
    )


class _Layer(NamedTuple):
    """A layer on one picture."""

    maps: LayerMaps
    """Without weights: what is the same on all pictures."""
    text: str
    error: float
    """By how much a weight in the text is off at most."""


_Picture = list[dict[int, _Layer]]
"""Of each model, by layer."""


def _fitting(
    exhibits: Sequence[Exhibit | KeptMaps], wanted: int, limit: int, device: torch.device | str | None
) -> list[_Picture]:
    """The finest maps of which a picture fits, and as many pictures as do.

    The first picture is pooled at first: that is quick whatever the model, and says how large whole maps would be.
    """
    first = _packed(exhibits, 0, _POOLED_LINES[0], device)
    tried: tuple[int | None, ...] = _POOLED_LINES
    if _is_pooled(first) and sum(map(_whole_size, _layers_of(first))) <= _MOST_DEFLATED * limit:
        tried = (None, *tried)
    for lines in tried:
        shown: list[_Picture] = []
        left = limit
        for number in range(wanted):
            is_there = number == 0 and lines == _POOLED_LINES[0]
            picture = first if is_there else _packed(exhibits, number, lines, device)
            left -= sum(len(layer.text) for layer in _layers_of(picture))
            if left < 0:
                break
            shown.append(picture)
        if shown:
            return shown
    raise InputError(
        f"the maps of {len(exhibits)} models do not fit into a page, not even of one picture; show fewer at a time"
    )


def _packed(
    exhibits: Sequence[Exhibit | KeptMaps], picture: int, lines: int | None, device: torch.device | str | None
) -> _Picture:
    """A picture at a time, so that no more than its maps are in memory."""
    return [
        {number: _pack(maps) for number, maps in exhibit.maps(picture, lines, device).items()} for exhibit in exhibits
    ]


def _layers_of(picture: _Picture) -> Iterator[_Layer]:
    return (layer for layers in picture for layer in layers.values())


def _is_pooled(picture: _Picture) -> bool:
    return any(
        (maps.query_grid, maps.key_grid) != (maps.whole_query_grid, maps.whole_key_grid)
        for maps, _, _ in _layers_of(picture)
    )


def _whole_size(layer: _Layer) -> int:
    """Bytes of its maps, if they were not pooled, before they are deflated."""
    maps = layer.maps
    num_queries = math.prod(maps.whole_query_grid) + len(maps.other_queries)
    return len(maps.heads) * num_queries * (math.prod(maps.whole_key_grid) + _FLOAT_BYTES * (2 + len(maps.others)))


def _notes(shown: Sequence[_Picture], wanted: int) -> Iterator[str]:
    if _is_pooled(shown[0]):
        lines = max(max(layer.maps.query_grid + layer.maps.key_grid) for layer in _layers_of(shown[0]))
        yield (
            f"To keep this page small, patches are pooled to at most {lines} × {lines}: a query is the mean over its "
            "patches, and its attention is added up over theirs."
        )
    if len(shown) < wanted:
        yield f"To keep this page small, {len(shown)} of {wanted} pictures are here."
    error = max(layer.error for picture in shown for layer in _layers_of(picture))
    yield (
        f"Maps have 8 bits, from 0 to the query’s largest weight; none is off by more than {_rounded_up(error)} of all "
        "attention. MAD and entropy are those of the tables, over all measured images. Layers and heads count from 0."
    )


def _rounded_up(error: float) -> str:
    """A share as a percentage of one digit that is not 0, never less than it."""
    percentage = 100 * error
    digits = 0 if percentage == 0 else max(0, -math.floor(math.log10(percentage)))
    return f"{math.ceil(percentage * 10**digits) / 10**digits:.{digits}f} %"


def _frame(number: int, maps: LayerMaps, heads: pd.DataFrame) -> dict[str, Any]:
    """What is the same on all pictures. `heads`: the layer's rows of heads.csv, with the numbers that are shown."""
    by_head = heads.set_index("head")
    numbers = {
        name: [None if math.isnan(value) else float(value) for value in by_head[name].reindex(maps.heads)]
        for name in ("mad", "entropy")
    }
    reach = maps.reach_QK
    return {
        "number": number,
        "name": maps.name,
        "heads": maps.heads,
        "grid": maps.grid_size,
        "queries": maps.query_grid,
        "keys": maps.key_grid,
        "others": maps.others,
        "otherQueries": maps.other_queries,
        **numbers,
        "reach": None if reach is None else _text(np.packbits(reach.numpy(), bitorder="little").tobytes()),
    }


def _pack(maps: LayerMaps) -> _Layer:
    """The maps of one picture."""
    weights_HQK = maps.weights_BHQK[0].numpy()
    levels_HQK, largest_HQ = _quantised(weights_HQK)
    floats = (largest_HQ, maps.other_weights_BHQO[0].numpy(), maps.distances_BHQ[0].numpy())
    packed = b"".join([*(part.astype("<f4").tobytes() for part in floats), levels_HQK.tobytes()])
    error = np.abs(levels_HQK * largest_HQ[..., None] / _LEVELS - weights_HQK).max(initial=0.0)
    return _Layer(maps.with_maps(lambda _, whole: whole[:0]), _text(zlib.compress(packed)), float(error))


def _quantised(weights_HQK: NDArray[np.float64]) -> tuple[NDArray[np.uint8], NDArray[np.float64]]:
    """Levels and the largest weight of each row: a weight is level · largest / 255, within largest / 510."""
    largest_HQ = weights_HQK.max(-1)
    shares_HQK = weights_HQK / np.where(largest_HQ > 0, largest_HQ, 1.0)[..., None]
    return np.rint(_LEVELS * shares_HQK).astype(np.uint8), largest_HQ


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
    picture.save(file, "PNG" if exact else "JPEG", **({"optimize": True} if exact else {"quality": 90}))
    return f"data:image/{'png' if exact else 'jpeg'};base64,{base64.b64encode(file.getvalue()).decode()}"
