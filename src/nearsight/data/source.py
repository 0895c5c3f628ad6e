"""What the registry knows about a data set, and what finding its files gives, before anything is decoded.

Shape suffixes: n images of a chunk, C channels, H rows, W columns.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from nearsight.data.downloads import Download, HubDownload

Chunk = tuple[NDArray[np.uint8], NDArray[np.int64]]
"""images_nCHW and labels_n."""
Reader = Callable[[], Iterator[Chunk]]
"""Decodes one part of a data set, a bounded number of images at a time and in their order."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """A data set that was found on disk."""

    folder: Path
    """Where it was found."""
    layout: str
    """Which of the official layouts it has, in words."""
    files: tuple[Path, ...]
    """Files and whole folders that are read: when something in them changes, what was decoded from them is stale."""
    classes: tuple[str, ...]
    """Class names in the order of the labels."""
    train: Reader
    """The official training set."""
    test: Reader
    """The official test set."""


Finder = Callable[[Path, int], Source | None]
"""(data folder, image size) → the data set in that folder, or None when it is absent."""


@dataclass(frozen=True, kw_only=True)
class DatasetSpec:
    """A line of the registry."""

    about: str
    """One line for people."""
    find: Finder | None
    """Finds its files; None when it is made, not read."""
    num_classes: int | None = None
    """How many classes it has; None when the files decide."""
    num_train: int | None = None
    """Official number of training images; None when the files decide."""
    num_test: int | None = None
    """Official number of test images; None when the files decide."""
    image_size: int
    """Rows and columns unless others are asked for."""
    other_sizes: bool = False
    """Whether others can be asked for."""
    balanced: bool = True
    """Whether every class has the same number of images in each part."""
    mean: tuple[float, float, float]
    """Channel means of the training images in [0, 1]."""
    std: tuple[float, float, float]
    """Channel deviations of the training images in [0, 1]."""
    md5: Mapping[str, str] = field(default_factory=dict)
    """Published digests by path below the set's own folder, for the files of all its layouts."""
    downloads: tuple[Download | HubDownload, ...] = ()
    """Where it can be had; empty when its makers want to be asked first."""
