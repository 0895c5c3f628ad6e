"""Pairs of an image and its mask, read together, with every way in which they may not fit named by file.

Shape suffixes: C channels, H rows, W columns.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nearsight.data.opening import UnreadableError, opened_image, opened_rgb
from nearsight.errors import InputError

IGNORED = 255
"""In masks as they are handed out, of every data set: pixels that have no class."""

_INVALID = -1
_INDEXED_MODES = ("1", "L", "P", "I", "I;16")
"""Pillow's names for pictures with one number per pixel; of a palette it is the index that counts."""


@dataclass(frozen=True)
class LabelTable:
    """From the numbers in a data set's files to classes from 0 on, and to `IGNORED`."""

    class_of_number: Mapping[int, int]
    ignored_numbers: frozenset[int]

    @classmethod
    def starting_at(cls, first: int, num_classes: int, *, ignored: Iterable[int]) -> Self:
        """Classes numbered without gaps, the first of them `first`."""
        return cls({first + label: label for label in range(num_classes)}, frozenset(ignored))

    @property
    def num_classes(self) -> int:
        return len(set(self.class_of_number.values()))

    def classes(self, numbers_HW: NDArray[np.integer], mask: Path) -> NDArray[np.uint8]:
        """The classes of a mask; numbers that are no label are an error that names them."""
        table = np.full(256, _INVALID, dtype=np.int16)
        table[list(self.class_of_number)] = list(self.class_of_number.values())
        table[list(self.ignored_numbers)] = IGNORED
        classes_HW = np.where((numbers_HW < 0) | (numbers_HW > 255), _INVALID, table[numbers_HW & 255])
        if classes_HW.min(initial=0) == _INVALID:
            wrong = ", ".join(str(number) for number in np.unique(numbers_HW[classes_HW == _INVALID])[:5])
            raise InputError(
                f"{mask} has labels out of range: {wrong}; its data set has {min(self.class_of_number)} to "
                f"{max(self.class_of_number)}, and ignores {_in_words(self.ignored_numbers)}"
            )
        return classes_HW.astype(np.uint8)


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
        numbers_HW = _read_numbers(mask)
        if numbers_HW.shape != pixels_HWC.shape[:2]:
            raise InputError(
                f"{mask} is {_size(numbers_HW)}, but its image {image.name} is {_size(pixels_HWC)}; "
                "a mask has its image's size"
            )
        classes_HW = self.labels.classes(numbers_HW, mask)
        return torch.from_numpy(pixels_HWC.transpose(2, 0, 1).copy()), torch.from_numpy(classes_HW)

    def mask(self, index: int) -> Tensor:
        """One mask alone, [H, W] uint8."""
        path = self.pairs[index][1]
        return torch.from_numpy(self.labels.classes(_read_numbers(path), path))

    def name(self, index: int) -> str:
        """What people call an image: its file's name, without the ending."""
        return self.pairs[index][0].stem

    def check_labelled(self, what: str) -> None:
        """Refuse a set in which not one pixel has a class. As a rule the first mask decides, and no more are read."""
        if not any(bool((self.mask(index) != IGNORED).any()) for index in range(len(self))):
            raise InputError(
                f"every pixel of the {len(self)} {what} masks is ignored, from {self.pairs[0][1]} on; "
                "are they the masks of this data set?"
            )


def _read_numbers(mask: Path) -> NDArray[np.integer]:
    """The numbers in a mask's file, [H, W]."""
    try:
        with opened_image(mask) as picture:
            mode, numbers = picture.mode, np.asarray(picture)
    except UnreadableError as error:
        raise InputError(f"{mask} cannot be read: {error}; get it again") from error
    if mode not in _INDEXED_MODES:
        raise InputError(f"{mask} is a picture in colours ({mode}), but a mask holds one label number per pixel")
    return numbers.astype(np.int32) if mode != "L" else numbers


def _size(array: NDArray[np.generic]) -> str:
    return f"{array.shape[1]}×{array.shape[0]}"
