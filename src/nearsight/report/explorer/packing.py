"""Attention maps as text that a page can hold: 8 bits per weight.

A layer of one picture is one run of bytes, little-endian, in base64. First float32: of every head and query the largest
weight, what goes to each token that is no patch, and how far the query looks (NaN where that has no meaning). Then a
byte for every head, query and key: the weight as a share of the query's largest, which is 255.

Shape suffixes as in `nearsight.lens.mapsfile`.
"""

import base64
import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from nearsight.lens.mapsfile import Grid, LayerMaps

LEVELS = 255
FLOAT_BYTES = 4


def pack_layer(number: int, maps: LayerMaps, heads: pd.DataFrame, num_pictures: int) -> dict[str, Any]:
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
        "maps": [pack_maps(maps, picture) for picture in range(num_pictures)],
    }


def pack_maps(maps: LayerMaps, picture: int) -> str:
    levels_HQK, largest_HQ = quantised(maps.weights_BHQK[picture].numpy())
    floats = (largest_HQ, maps.other_weights_BHQO[picture].numpy(), maps.distances_BHQ[picture].numpy())
    return _text(b"".join([*(part.astype("<f4").tobytes() for part in floats), levels_HQK.tobytes()]))


def quantised(weights_HQK: NDArray[np.float64]) -> tuple[NDArray[np.uint8], NDArray[np.float64]]:
    """Levels and the largest weight of each row: a weight is level · largest / 255, within largest / 510."""
    largest_HQ = weights_HQK.max(-1)
    shares_HQK = weights_HQK / np.where(largest_HQ > 0, largest_HQ, 1.0)[..., None]
    return np.rint(LEVELS * shares_HQK).astype(np.uint8), largest_HQ


def largest_error(layers: Iterable[LayerMaps]) -> float:
    """By how much a weight in the page is off at most."""
    error = 0.0
    for maps in layers:
        weights = maps.weights_BHQK.numpy()
        levels, largest = quantised(weights)
        error = max(error, float(np.abs(levels * largest[..., None] / LEVELS - weights).max()))
    return error


def packed_size(maps: LayerMaps, query_grid: Grid, key_grid: Grid) -> int:
    """Characters of one picture of a layer, if its patches were pooled to these grids."""
    num_queries = math.prod(query_grid) + len(maps.other_queries)
    num_bytes = math.prod(key_grid) + FLOAT_BYTES * (2 + len(maps.others))
    return math.ceil(maps.weights_BHQK.shape[1] * num_queries * num_bytes / 3) * 4


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def colour_table(colours: NDArray[np.float64]) -> str:
    """256 RGB colours of a map, as text."""
    return _text(np.rint(LEVELS * colours[:, :3]).astype(np.uint8).tobytes())
