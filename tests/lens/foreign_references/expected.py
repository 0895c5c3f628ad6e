"""The numbers that the lens should find in a model of a case, from its own code."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from vit_references.checking import Found
from vit_references.dense import Layer, head_numbers, with_shuffled_keys
from vit_references.maps import Recorded

from foreign_references.case import Case, run
from foreign_references.recording import attending, record
from foreign_references.video_places import VideoLayer


class BadReferenceError(Exception):
    """A case that says nothing about the lens, because it does not fit its own model."""


@dataclass(frozen=True)
class Expected(Found):
    """The expected numbers of one layer."""

    time: np.ndarray | None = None
    """Of a video, the distance in time, in the longest that there is: [heads]."""
    time_elsewhere: np.ndarray | None = None
    """With keys at each other's times."""

    @property
    def places(self) -> Tensor:
        """[queries, 2], of those alone that are patches."""
        queries = self.layer.queries_WN2
        return queries[queries[..., 0].isfinite()]


def expect(case: Case, model: nn.Module, inputs: Any) -> list[Expected]:
    """What the lens should find, in the order in which the model computes it."""

    def forward() -> None:
        for part in inputs.split(1) if case.is_alone else [inputs]:
            run(model, case, part)

    names = attending(model, forward)
    known = [*case.layers, *case.skipped]
    for name, shape in names.items():
        if not any(re.fullmatch(pattern, name) for pattern in known):
            raise BadReferenceError(f"{case.name}: nothing is said of {name!r}, whose weights are {list(shape)}")
    spatial = [name for name in names if any(re.fullmatch(pattern, name) for pattern in case.layers)]
    recorded = record(model, forward, spatial, case) if spatial else []
    found = list(_joined([_numbers(case, one) for one in recorded if not _is_left_out(case, one.name)]))
    for layer in found:
        _check_that_it_says_something(case, layer)
    return found


def _is_left_out(case: Case, name: str) -> bool:
    """Whether it is the second attention of a module, say, of which only the first is spatial."""
    return any("#" in pattern and re.fullmatch(pattern, name) for pattern in case.skipped)


def _numbers(case: Case, recorded: Recorded) -> Expected:
    name = recorded.name.partition("#")[0]
    mechanism = next(places for pattern, places in case.layers.items() if re.fullmatch(pattern, name))
    layer = mechanism(recorded, case.image_size)
    mad, entropy, mad_elsewhere = _of_heads(case, recorded.attention, layer)
    if not isinstance(layer, VideoLayer):
        return Expected(recorded.name, layer, mad, entropy, mad_elsewhere)
    time, _, time_elsewhere = _of_heads(case, recorded.attention, layer.in_time)
    if layer.is_along_time:
        mad = np.full_like(mad, np.nan)
    return Expected(recorded.name, layer, mad, entropy, mad_elsewhere, time, time_elsewhere)


def _of_heads(case: Case, attention: Tensor, layer: Layer) -> list[np.ndarray]:
    """Distance, entropy, and distance with keys at each other's places: [heads], means over the images."""
    distance_BH, entropy_BH = head_numbers(attention, layer, case.num_images)
    elsewhere_BH, _ = head_numbers(attention, with_shuffled_keys(layer), case.num_images)
    return [values.mean(0).numpy() for values in (distance_BH, entropy_BH, elsewhere_BH)]


def _joined(found: list[Expected]) -> Iterator[Expected]:
    """One layer of those attentions of a module in which different patches of one grid ask."""
    for _, group in groupby(found, key=lambda layer: layer.name.partition("#")[0]):
        parts = list(group)
        together = torch.cat([part.places for part in parts])
        on_one_grid = len({part.layer.grid_size for part in parts}) == 1
        if len(parts) > 1 and on_one_grid and len(together.unique(dim=0)) == len(together):
            yield _of_parts(parts)
        else:
            yield from parts


def _of_parts(parts: list[Expected]) -> Expected:
    """Means over the queries of all parts."""
    counts = [len(part.places) for part in parts]
    mad, entropy, elsewhere = (
        np.average([getattr(part, name) for part in parts], axis=0, weights=counts)
        for name in ("mad", "entropy", "mad_elsewhere")
    )
    queries, keys = (_stacked([getattr(part.layer, name) for part in parts]) for name in ("queries_WN2", "keys_WM2"))
    layer = replace(parts[0].layer, queries_WN2=queries, keys_WM2=keys)
    return Expected(parts[0].name, layer, mad, entropy, elsewhere)


def _stacked(places: list[Tensor]) -> Tensor:
    """The windows of all parts, filled up to the size of the largest."""
    most = max(part.shape[1] for part in places)
    return torch.cat([F.pad(part, (0, 0, 0, most - part.shape[1]), value=torch.nan) for part in places])


def _check_that_it_says_something(case: Case, found: Expected) -> None:
    """Numbers must exist, and other places must give other ones."""
    is_along_time = isinstance(found.layer, VideoLayer) and found.layer.is_along_time
    pairs = [] if is_along_time else [(found.mad, found.mad_elsewhere)]
    if found.time is not None:
        pairs.append((found.time, found.time_elsewhere))
    if not np.isfinite([*(numbers for numbers, _ in pairs), found.entropy]).all():
        raise BadReferenceError(f"{case.name}: the numbers of {found.name} are not finite")
    if found.layer.keys_WM2[..., 0].isfinite().sum() <= 4:
        return
    for numbers, elsewhere in pairs:
        change = np.abs(elsewhere - numbers) / np.where(numbers == 0, 1.0, numbers)
        if change.max() < 1e-3:
            raise BadReferenceError(f"{case.name}: {found.name} looks everywhere alike")
