"""What an augmentation is, and how those of K cells become one batched operation.

An augmentation is configured by a small frozen dataclass (`CutMix(p=0.5, alpha=1.0)`), one object per cell. For K cells
trained together the numbers of the K objects become tensors [K], and `apply` works on the whole batch [K, B, C, H, W]
at once. A cell without the augmentation has probability 0, and leaves its images bit-identical.

Shape suffixes: K cells, B samples, C channels (images) or classes (targets), H rows, W columns.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, ClassVar, Self, TypeVar

from nearsight.augment.streams import Drawn
from nearsight.configuration import settle_numbers
from nearsight.errors import InputError, check_probability
from nearsight.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


class Stage(IntEnum):
    """Where an augmentation belongs in a list that does not say otherwise."""

    GEOMETRY = 0
    COLOUR = 1
    OCCLUSION = 2
    MIXING = 3


@dataclass(frozen=True)
class Batch:
    """A step's images and targets while the augmentations work on them."""

    images_KBCHW: Tensor
    """Grey levels 0…255: uint8 until an operation needs fractions, float32 from then on. Normalised last of all."""
    targets_KBC: Tensor
    """Class distribution of every sample, float32; each row sums to 1."""
    mean_C: Tensor
    """The data set's channel means, in grey levels."""
    std_C: Tensor
    """The data set's channel deviations, in grey levels."""

    def replace(self, *, images: Tensor | None = None, targets: Tensor | None = None) -> Batch:
        return Batch(
            self.images_KBCHW if images is None else images,
            self.targets_KBC if targets is None else targets,
            self.mean_C,
            self.std_C,
        )


@dataclass(frozen=True)
class Cells:
    """One augmentation's settings in K cells."""

    numbers: dict[str, Tensor]
    """Field name → its values [K] (float32 or int64)."""
    largest: dict[str, float]
    """Field name → the largest value over the cells, known to the host: shapes may depend on it without a sync."""
    smallest: dict[str, float]
    """Field name → the smallest value over the cells that have the augmentation, also known to the host."""
    choices: dict[str, str]
    """Field name → its text; the same in every cell that has the augmentation."""
    constants: dict[str, Tensor]
    """Tables that all cells share, placed on the device once: a captured graph cannot hold a copy from the host."""

    def __getitem__(self, name: str) -> Tensor:
        return self.numbers[name]

    def takes(self, cell: Augmentation) -> bool:
        """Whether a cell with these settings can have a place here: what the host knows stays true of it."""
        return all(self.smallest[name] <= getattr(cell, name) <= self.largest[name] for name in self.numbers) and all(
            getattr(cell, name) == choice for name, choice in self.choices.items()
        )

    def put(self, position: int, cell: Augmentation | None) -> None:
        """Give a place to another cell, in the tensors that there are; None: the augmentation is off."""
        if cell is None:
            self.numbers["p"][position] = 0.0
            return
        for name, value_K in self.numbers.items():
            value_K[position] = getattr(cell, name)

    def select(self, keep: Tensor) -> Cells:
        return dataclasses.replace(self, numbers={name: value[keep] for name, value in self.numbers.items()})


@dataclass(frozen=True, kw_only=True)
class Augmentation:
    """Base of all augmentations. Subclasses add their strengths as fields and say what to do in `apply`."""

    name: ClassVar[str]
    stage: ClassVar[Stage]
    shared: ClassVar[tuple[str, ...]] = ()
    """Fields that are the same in all cells of a stack: texts, and what decides the shape of the images."""
    num_draws: ClassVar[int] = 1
    """Uniform draws per sample that `apply` takes from the stream of its name; the coin for p is one of them."""

    p: float = 1.0
    """Probability that it is applied."""

    def __post_init__(self) -> None:
        settle_numbers(self, self.name)
        check_probability(f"{self.name}.p", self.p)

    @property
    def is_idle(self) -> bool:
        """Whether it leaves every image as it is."""
        return self.p == 0

    @classmethod
    def sample_draws(cls, cells: Cells, image_shape: torch.Size) -> dict[str, int]:
        """Stream → how many uniform draws per sample `apply` uses on images [C, H, W].

        An InputError where it cannot be applied to images of that size.
        """
        return {cls.name: cls.num_draws}

    @classmethod
    def batch_draws(cls, cells: Cells) -> dict[str, int]:
        """Stream → how many uniform draws per batch `apply` uses."""
        return {}

    @classmethod
    def output_shape(cls, cells: Cells, image_shape: torch.Size) -> torch.Size:
        """[C, H, W] of the images that `apply` returns."""
        return image_shape

    @classmethod
    def constants(cls, choices: dict[str, str]) -> dict[str, Tensor]:
        """Tables that `apply` needs on the device."""
        return {}

    @classmethod
    def apply(cls, batch: Batch, cells: Cells, drawn: Drawn) -> Batch:
        """The augmented batch. Cells and samples it does not touch stay bit-identical."""
        raise TypeError(f"{cls.__name__} does not say how it is applied")

    @classmethod
    def stack(cls, cells: Sequence[Self | None], device: torch.device) -> Cells:
        """The settings of K cells as tensors; None (the augmentation is off) becomes probability 0."""
        present = [cell for cell in cells if cell is not None]
        if not present:
            raise InputError(f"{cls.name} is in none of the cells that would be stacked")
        numbers: dict[str, Tensor] = {}
        largest: dict[str, float] = {}
        smallest: dict[str, float] = {}
        choices: dict[str, str] = {}
        for field in dataclasses.fields(cls):
            values = [getattr(cell, field.name) for cell in present]
            if field.name in cls.shared and len(set(values)) > 1:
                raise InputError(f"{cls.name}.{field.name} differs between cells of one stack: {sorted(set(values))}")
            if isinstance(values[0], str):
                assert field.name in cls.shared, f"{cls.name}.{field.name} is a text, and must be shared"
                choices[field.name] = values[0]
                continue
            filler = 0.0 if field.name == "p" else values[0]
            column = [filler if cell is None else getattr(cell, field.name) for cell in cells]
            dtype = torch.int64 if all(isinstance(value, int) for value in values) else torch.float32
            numbers[field.name] = torch.tensor(column, dtype=dtype, device=device)
            largest[field.name] = max(values)
            smallest[field.name] = min(values)
        constants = {name: table.to(device) for name, table in cls.constants(choices).items()}
        return Cells(numbers, largest, smallest, choices, constants)


A = TypeVar("A", bound=Augmentation)

AUGMENTATIONS: dict[str, type[Augmentation]] = {}
"""Name → class of every augmentation, in the usual order: by stage, and within one as they were registered."""


def register_augmentation(kind: type[A]) -> type[A]:
    """Class decorator that makes an augmentation known by its name: to recipes, studies and the command line."""
    if kind.name in AUGMENTATIONS:
        raise ValueError(f"there is an augmentation {kind.name!r} already: {AUGMENTATIONS[kind.name].__qualname__}")
    AUGMENTATIONS[kind.name] = kind
    usual = sorted(AUGMENTATIONS.values(), key=lambda each: each.stage)
    AUGMENTATIONS.clear()
    AUGMENTATIONS.update((each.name, each) for each in usual)
    return kind


def chosen(cells: Cells, coin: Tensor) -> Tensor:
    """Where the augmentation is applied, by the cells' probabilities: bool, the shape of `coin` [K, ...]."""
    return coin < cells["p"].view(-1, *[1] * (coin.ndim - 1))


def require_grey_levels(name: str, images: Tensor) -> Tensor:
    """The images, known to be whole grey levels."""
    if images.dtype != torch.uint8:
        raise InputError(f"{name} works on whole grey levels; list it before augmentations that blend images")
    return images
