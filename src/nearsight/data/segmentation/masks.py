"""Data sets of images with masks: pairs of files that are read together, and how a set is registered and loaded.

Errors about an image and a mask that do not fit name the files.

Shape suffixes: C channels, H rows, W columns.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Self

from nearsight.data.decoding import UnreadableError, is_image_name, opened_image, opened_rgb
from nearsight.data.locations import data_folder, incomplete, read_published
from nearsight.errors import InputError, unknown_name
from nearsight.files import canonical_hash, reading
from nearsight.lazy import np, torch

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

IGNORED = 255
"""In masks as they are handed out, of every data set: pixels that have no class."""

Pairs = tuple[tuple[Path, Path], ...]
"""(image, mask) files."""
_INVALID = -1
_INDEXED_MODES = ("1", "L", "P", "I", "I;16")
"""Pillow's names for pictures with one number per pixel; of a palette it is the index that counts."""


@dataclass(frozen=True)
class LabelTable:
    """From the numbers in a data set's files to classes from 0 on, and to `IGNORED`."""

    class_of_number: Mapping[int, int]
    ignored_numbers: frozenset[int]
    way_out: str = ""
    """What to do about a number that is neither, after a semicolon."""

    @classmethod
    def starting_at(cls, first: int, num_classes: int, *, ignored: Iterable[int]) -> Self:
        """Classes numbered without gaps, the first of them `first`."""
        return cls({first + label: label for label in range(num_classes)}, frozenset(ignored))

    @property
    def num_classes(self) -> int:
        return len(set(self.class_of_number.values()))

    def classes(self, numbers_HW: NDArray[np.integer], mask: Path) -> NDArray[np.uint8]:
        """The classes of a mask; numbers that are not labels are an error that names them."""
        table = self._table
        if numbers_HW.dtype == np.uint8:
            classes_HW = table[numbers_HW]
        else:
            known_HW = (numbers_HW >= 0) & (numbers_HW < len(table))
            classes_HW = np.where(known_HW, table[np.where(known_HW, numbers_HW, 0)], _INVALID)
        if classes_HW.min(initial=0) == _INVALID:
            wrong = ", ".join(str(number) for number in np.unique(numbers_HW[classes_HW == _INVALID])[:5])
            raise InputError(
                f"{mask} has labels out of range: {wrong}; its data set has {min(self.class_of_number)} to "
                f"{max(self.class_of_number)}, and ignores {_in_words(self.ignored_numbers)}{self.way_out}"
            )
        as_bytes_HW: NDArray[np.uint8] = classes_HW.astype(np.uint8)
        return as_bytes_HW

    @cached_property
    def _table(self) -> NDArray[np.int16]:
        """The class of every number from 0 on."""
        ignored = [number for number in self.ignored_numbers if number >= 0]  # a number below 0 is in no file
        table = np.full(max([255, *self.class_of_number, *ignored]) + 1, _INVALID, dtype=np.int16)
        table[list(self.class_of_number)] = list(self.class_of_number.values())
        table[ignored] = IGNORED
        return table


def _in_words(numbers: Iterable[int]) -> str:
    numbers = sorted(numbers)
    return ", ".join(map(str, numbers)) if len(numbers) <= 3 else f"{len(numbers)} others"


@dataclass(frozen=True)
class MaskedImages:
    """Images and their masks in a fixed order, each (image [3, H, W] uint8, mask [H, W] uint8), of many sizes."""

    pairs: Sequence[tuple[Path, Path]]
    """(image, mask) files."""
    labels: LabelTable

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image, mask = self.pairs[index]
        try:
            with opened_rgb(image) as picture:
                pixels_HWC = np.asarray(picture)
        except UnreadableError as error:
            raise InputError(f"{image} cannot be read: {error}; get it again") from error
        numbers_HW = read_numbers(mask)
        if numbers_HW.shape != pixels_HWC.shape[:2]:
            raise InputError(
                f"{mask} is {_size(numbers_HW)}, but its image {image.name} is {_size(pixels_HWC)}; "
                "a mask has its image's size"
            )
        classes_HW = self.labels.classes(numbers_HW, mask)
        return torch.from_numpy(pixels_HWC.transpose(2, 0, 1).copy()), torch.from_numpy(classes_HW)

    def mask(self, index: int) -> Tensor:
        """One mask alone, [H, W] uint8."""
        return torch.from_numpy(self.labels.classes(self.numbers(index), self.pairs[index][1]))

    def numbers(self, index: int) -> NDArray[np.integer]:
        """What the file of a mask holds, [H, W]."""
        return read_numbers(self.pairs[index][1])

    def numbers_of(self, classes: Iterable[int]) -> tuple[int, ...]:
        """What the files have for these classes."""
        wanted = set(classes)
        return tuple(number for number, label in self.labels.class_of_number.items() if label in wanted)

    def name(self, index: int) -> str:
        """The name of an image: its file's name, without the ending."""
        return self.pairs[index][0].stem

    def check_labelled(self, what: str) -> None:
        """Refuse a set in which not one pixel has a class. As a rule the first mask decides, and no more are read."""
        if not any(bool((self.mask(index) != IGNORED).any()) for index in range(len(self))):
            raise InputError(
                f"every pixel of the {len(self)} {what} masks is ignored, from {self.pairs[0][1]} on; "
                "are they the masks of this data set?"
            )


def read_numbers(mask: Path) -> NDArray[np.integer]:
    """The numbers in a mask's file, [H, W]."""
    try:
        with opened_image(mask) as picture:
            mode, numbers = picture.mode, np.asarray(picture)
    except UnreadableError as error:
        raise InputError(f"{mask} cannot be read: {error}; get it again") from error
    if mode not in _INDEXED_MODES:
        raise InputError(
            f"{mask} is a picture in colours ({mode}), but a mask holds one label number per pixel; "
            "save it as a palette PNG, or as a grey one of 8 or 16 bits"
        )
    return numbers.astype(np.int32) if mode != "L" else numbers


def _size(array: NDArray[np.generic]) -> str:
    return f"{array.shape[1]}×{array.shape[0]}"


def listed_pairs(names: Path, images: Path, masks: Path) -> Pairs:
    """The pairs that a file names, one a line, images ending in .jpg and masks in .png."""
    lines = read_published(names).split()
    for name in lines:
        if Path(name).name != name:  # a path could point anywhere
            raise InputError(f"{names} has {name!r}, which is not the name of an image; get it again")
    pairs = tuple((images / f"{name}.jpg", masks / f"{name}.png") for name in lines)
    _check_present([image for image, _ in pairs], images)
    _check_present([mask for _, mask in pairs], masks)
    return _checked(pairs, names)


def folder_pairs(images: Path, masks: Path, mask_ending: str = ".png") -> Pairs:
    """Every image of a folder, in the order of their names, with the mask of its name."""
    found = sorted(path for path in images.iterdir() if is_image_name(path.name))
    pairs = tuple((image, masks / f"{image.stem}{mask_ending}") for image in found)
    _check_present([mask for _, mask in pairs], masks)
    return _checked(pairs, images)


def missing_parts(folder: Path, parts: Sequence[str]) -> list[str]:
    """The files and folders that do not exist."""
    return [part for part in parts if not (folder / part).exists()]


def _check_present(wanted: Sequence[Path], folder: Path) -> None:
    # One listing instead of a check per file: there may be a hundred thousand.
    present = {path.name for path in folder.iterdir()}
    missing = [path.name for path in wanted if path.name not in present]
    if missing:
        raise incomplete(folder, missing)


def _checked(pairs: Pairs, where: Path) -> Pairs:
    if not pairs:
        raise InputError(f"{where} names no images; get it again")
    return pairs


@dataclass(frozen=True, kw_only=True)
class SegmentationSource:
    """A data set of masks that was found on disk."""

    folder: Path
    """Where it was found."""
    layout: str
    """Which of the official layouts it has, in words."""
    class_names: tuple[str, ...]
    """In the order of the classes."""
    labels: LabelTable
    """What the numbers in its masks mean."""
    train: Pairs
    """The official training images."""
    test: Pairs
    """The images that published numbers are on: the official validation set where the test set has no labels."""


SegmentationFinder = Callable[[Path], SegmentationSource | None]
"""Data folder → the data set in it, or None when it is absent."""


@dataclass(frozen=True, kw_only=True)
class SegmentationSpec:
    """A line of the registry."""

    about: str
    """One line for people."""
    find: SegmentationFinder
    num_classes: int
    num_train: int
    """Official number of training images."""
    num_test: int
    """Official number of test images."""


SEGMENTATION_SETS: dict[str, SegmentationSpec] = {}
"""The data sets of masks by name."""


def register_segmentation(name: str, spec: SegmentationSpec) -> None:
    """Make a data set of masks known by its name: to `load_segmentation` and to the commands."""
    if name in SEGMENTATION_SETS:
        raise ValueError(f"there is a data set {name!r} already: {SEGMENTATION_SETS[name].about}")
    SEGMENTATION_SETS[name] = spec


@dataclass(frozen=True, kw_only=True)
class SegmentationSet:
    """Images with a class for every pixel, to train on and to test on."""

    name: str
    folder: Path
    """Where it was found."""
    class_names: tuple[str, ...]
    """In the order of the labels."""
    train: MaskedImages
    test: MaskedImages
    """The images that published numbers are on."""
    ignore_index: int = IGNORED
    """The label of pixels without a class."""
    labels_by_content: bool = False
    """Of a folder that may be edited: the fingerprint is that of what its masks say, and of the names of classes."""

    @property
    def num_classes(self) -> int:
        return len(self.class_names)

    @cached_property
    def fingerprint(self) -> str:
        """Digest of the names and sizes of all its files: to read a hundred thousand of them would take minutes."""
        if self.labels_by_content:
            return self._fingerprint_of_labels()
        with reading(self.folder):
            files = [
                [str(path.relative_to(self.folder)), path.stat().st_size]
                for part in (self.train, self.test)
                for pair in part.pairs
                for path in pair
            ]
        return canonical_hash([self.name, files], digits=64)

    def _fingerprint_of_labels(self) -> str:
        parts = []
        for part in (self.train, self.test):
            files = []
            for image, mask in part.pairs:
                with reading(mask), mask.open("rb") as file:
                    digest = hashlib.file_digest(file, "sha256").hexdigest()
                files.append([image.name, image.stat().st_size, digest])
            numbers = sorted(part.labels.class_of_number.items())
            parts.append([files, numbers, sorted(part.labels.ignored_numbers)])
        return canonical_hash([self.class_names, parts], digits=64)


def find_segmentation(name: str, data_dir: Path | None = None) -> SegmentationSource:
    """The files of a data set of masks, or an error that says where they should be."""
    if name not in SEGMENTATION_SETS:
        raise unknown_name("data set with masks", name, SEGMENTATION_SETS)
    folder = data_folder(data_dir)
    with reading(folder):
        source = SEGMENTATION_SETS[name].find(folder)
    if source is None:
        raise InputError(
            f"{name} is not in {folder}; put it there in its official layout, or say with --data-dir where it is"
        )
    return source


def load_segmentation(name: str, data_dir: Path | None = None) -> SegmentationSet:
    """The data set of this name, from `data_dir`, by default from `NEARSIGHT_DATA`, or else the user's cache folder.

    Images are read when they are needed; a damaged one is an error then, or is found by `check_segmentation`.
    """
    source = find_segmentation(name, data_dir)
    return SegmentationSet(
        name=name,
        folder=source.folder,
        class_names=source.class_names,
        train=MaskedImages(source.train, source.labels),
        test=MaskedImages(source.test, source.labels),
    )
