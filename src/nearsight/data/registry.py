"""What is known of a data set by its name, and what finding its files gives, before anything is decoded.

A new data set is one file, here or anywhere else, that calls `register_dataset`.

Shape suffixes: n images of a chunk, C channels, H rows, W columns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeAlias

from nearsight.data.dataset import ImageSet

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from nearsight.data.pictures import Pictures

Chunk: TypeAlias = "tuple[NDArray[np.uint8], NDArray[np.int64]]"
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
    train: Reader | None
    """The official training set; None: it is not wanted."""
    test: Reader
    """The official test set."""
    train_pictures: Callable[[], Pictures] | None = None
    """The same training images where they lie, undecoded; None: their files are not such as can be streamed."""
    test_pictures: Callable[[], Pictures] | None = None
    """Likewise, the test images."""
    test_files: tuple[Path, ...] = ()
    """Those of the files that only the test images are read from, where training images have others."""


@dataclass(frozen=True, kw_only=True)
class Download:
    """A file on a web server; an archive is unpacked and then removed."""

    url: str
    """Where it is."""
    md5: str
    """Its published digest."""
    folder: str
    """Folder below the data folder that receives it; of an archive, the one that it holds."""

    @property
    def filename(self) -> str:
        return self.url.rsplit("/", 1)[-1]


@dataclass(frozen=True, kw_only=True)
class HubDownload:
    """The parquet files of a data set on the Hugging Face hub."""

    repository: str
    """`owner/name` there."""
    folder: str
    """Folder below the data folder that receives them."""


Finder = Callable[[Path, int], Source | None]
"""(data folder, image size) → the data set in that folder, or None when it is absent."""


class Drawer(Protocol):
    """Makes the first images of a split ("train" or "test")."""

    def __call__(self, num_images: int, *, image_size: int, split: str) -> ImageSet: ...


@dataclass(frozen=True, kw_only=True)
class DatasetSpec:
    """A line of the registry."""

    about: str
    """One line for people."""
    find: Finder | None
    """Finds its files; None when it is made, not read."""
    draw: Drawer | None = None
    """Makes its images where `find` is None; then `classes`, `num_train` and `num_test` are needed."""
    classes: tuple[str, ...] = ()
    """Class names of a set that is made; files bring theirs along."""
    num_classes: int | None = None
    """How many classes it has; None when the files decide."""
    num_train: int | None = None
    """Official number of training images; None when the files decide; 0: it has test images only."""
    num_test: int | None = None
    """Official number of test images; None when the files decide."""
    image_size: int
    """Rows and columns by default."""
    other_sizes: bool = False
    """Whether others can be chosen."""
    balanced: bool = True
    """Whether every class has the same number of images in each part."""
    mean: tuple[float, float, float]
    """Channel means of the training images in [0, 1]."""
    std: tuple[float, float, float]
    """Channel deviations of the training images in [0, 1]."""
    md5: Mapping[str, str] = field(default_factory=dict)
    """Published digests by path below the set's own folder, for the files of all its layouts."""
    downloads: tuple[Download | HubDownload, ...] = ()
    """Where to download it; empty when its makers want to be asked first."""


DATASETS: dict[str, DatasetSpec] = {}
"""The data sets with a class for each image, by name."""


def register_dataset(name: str, spec: DatasetSpec) -> None:
    """Make a data set known by its name: to `load_dataset`, to recipes and to the commands."""
    if name in DATASETS:
        raise ValueError(f"there is a data set {name!r} already: {DATASETS[name].about}")
    if spec.find is None and (spec.draw is None or not (spec.classes and spec.num_test) or spec.num_train is None):
        raise ValueError(f"the data set {name!r} is neither found nor drawn: give find, or draw, classes and numbers")
    DATASETS[name] = spec
