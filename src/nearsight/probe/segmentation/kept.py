"""Features of whole test images that are kept, so that another head on the same model is tested without the model.

Test images keep their shapes: those of one size have a file together (`nearsight.probe.cache`). Training crops are
never the same twice, so nothing of them is kept.

Shape suffixes: B images, C channels, H rows, W columns, h and w of patches.
"""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from nearsight.data.decoding import UnreadableError, stored_size
from nearsight.data.segmentation import MaskedImages
from nearsight.errors import InputError
from nearsight.probe.cache import FeatureKey, MapReader, cached_features, keeps_maps
from nearsight.probe.frozen import FrozenModel
from nearsight.probe.segmentation.config import SegmentConfig
from nearsight.probe.segmentation.head import Tester, whole_size

Kept = Callable[[int], Tensor | None]
"""From the place of an image to its features [1, C, h, w], where they are known."""


def kept_maps(
    frozen: FrozenModel,
    images: MaskedImages,
    config: SegmentConfig,
    reader: MapReader,
    tester: Tester,
    *,
    data: str,
    step: int,
    dtype: torch.dtype,
    folder: Path | None,
) -> Kept:
    """The features of all test images, computed where they are not kept yet; of none if they are too many to be kept.

    Args:
        tester: resizes the images.
        data: fingerprint of the data set.
        dtype: in which the model computes.
        folder: see `cached_features`.
    """
    sizes = [whole_size(_rows_and_columns(image), config, step) for image, _ in images.pairs]
    if not keeps_maps(reader, max(sizes, key=lambda size: size[0] * size[1]), len(sizes), folder):
        return lambda _: None
    places: dict[tuple[int, int], list[int]] = {}
    for place, size in enumerate(sizes):
        places.setdefault(size, []).append(place)
    found: dict[int, Tensor] = {}
    for size, of_size in places.items():
        key = FeatureKey(
            model=frozen.identity,
            data=data,
            part=f"test at {size[0]}×{size[1]} in {dtype}",
            spec=reader.spec,
            preparation=frozen.preparation,
        )

        def resized(begin: int, end: int, chosen: tuple[int, ...] = tuple(of_size)) -> Tensor:
            return torch.stack([tester.prepared(place)[2] for place in chosen[begin:end]])

        # One at a time, as without a file: a sum over a larger batch may round differently.
        maps = cached_features(key, reader, resized, len(of_size), folder=folder, batch_size=1)
        found |= {place: maps[row : row + 1] for row, place in enumerate(of_size)}
    return found.__getitem__


def _rows_and_columns(image: Path) -> tuple[int, int]:
    try:
        columns, rows = stored_size(image)
    except UnreadableError as error:
        raise InputError(f"{image} cannot be read: {error}; get it again") from error
    return rows, columns
