"""From models and pictures to an explorer that is small enough for a page."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from nearsight.errors import InputError
from nearsight.lens import LayerMaps, attention_maps
from nearsight.report.explorer.explorer import FORMAT, Explorer
from nearsight.report.explorer.packing import colour_table, largest_error, pack_layer, packed_size
from nearsight.report.explorer.pictures import data_uri
from nearsight.report.inputs import ModelHeads, check_labels

LIMIT = 2_000_000
"""Characters that all maps of a page may have together."""
POOLED_LINES = (8, 4, 2)
"""Rows and columns to which patches are pooled where whole maps are too large; the last ones for huge models."""
COLOURS = "magma"
"""Perceptually uniform, dark where there is nothing to see, and readable without telling red from green."""


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


def explore(exhibits: Sequence[Exhibit], *, device: torch.device | str | None = None, limit: int = LIMIT) -> Explorer:
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
        shown = [data_uri(picture) for picture in exhibit.pictures_BHWC[:num_pictures]]
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
            "format": FORMAT,
            "colours": colour_table(mpl.colormaps[COLOURS](np.arange(256))),
            "pictures": list(pictures),
            "notes": list(_notes(maps, num_pictures, wanted)),
            "models": models,
        }
    )


Maps = list[dict[int, LayerMaps]]
"""Of each model, by layer."""


def _fitting(
    exhibits: Sequence[Exhibit], wanted: int, limit: int, device: torch.device | str | None
) -> tuple[Maps, int]:
    """The finest maps that fit, and of how many pictures.

    Pooled ones are made first: they are small whatever the model, and say how large the whole ones would be.
    """
    for lines in POOLED_LINES:
        maps = [exhibit.maps(lines, device) for exhibit in exhibits]
        if lines == POOLED_LINES[0] and _size(maps, whole=True) * wanted <= limit:
            return [exhibit.maps(None, device) for exhibit in exhibits] if _is_pooled(maps) else maps, wanted
        if num_pictures := min(wanted, limit // _size(maps)):
            return maps, num_pictures
    raise InputError(
        f"the maps of {len(exhibits)} models do not fit into a page, not even of one picture; show fewer at a time"
    )


def _size(maps: Maps, *, whole: bool = False) -> int:
    """Characters per picture."""
    return sum(
        packed_size(
            layer,
            layer.whole_query_grid if whole else layer.query_grid,
            layer.whole_key_grid if whole else layer.key_grid,
        )
        for layer in _all(maps)
    )


def _all(maps: Maps) -> Iterator[LayerMaps]:
    return (layer for layers in maps for layer in layers.values())


def _is_pooled(maps: Maps) -> bool:
    return any(
        (layer.query_grid, layer.key_grid) != (layer.whole_query_grid, layer.whole_key_grid) for layer in _all(maps)
    )


def _packed(heads: ModelHeads, layers: dict[int, LayerMaps], num_pictures: int) -> Iterator[dict[str, Any]]:
    rows = heads.measured()
    for number, maps in layers.items():
        yield pack_layer(number, maps, rows[rows["layer"] == number], num_pictures)


def _notes(maps: Maps, num_pictures: int, wanted: int) -> Iterator[str]:
    if _is_pooled(maps):
        lines = max(max(layer.query_grid + layer.key_grid) for layer in _all(maps))
        yield (
            f"To keep this page small, patches are pooled to at most {lines} × {lines}: a query is the mean over its "
            "patches, and what it looks at is added up over theirs."
        )
    if num_pictures < wanted:
        yield f"To keep this page small, {num_pictures} of {wanted} pictures are here."
    error = largest_error(_all(maps))
    yield (
        f"Maps have 8 bits, from 0 to the query’s largest weight; none is off by more than {_rounded_up(error)} of all "
        "attention. MAD and entropy are those of the tables, over all measured images."
    )


def _rounded_up(error: float) -> str:
    """A share as a percentage of one digit that is not 0, never less than it."""
    percentage = 100 * error
    digits = 0 if percentage == 0 else max(0, -math.floor(math.log10(percentage)))
    return f"{math.ceil(percentage * 10**digits) / 10**digits:.{digits}f} %"
