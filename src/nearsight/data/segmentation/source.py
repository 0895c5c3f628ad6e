"""What finding a data set of masks gives, and what a line of their registry says."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from nearsight.data.segmentation.masks import LabelTable

Pairs = tuple[tuple[Path, Path], ...]
"""(image, mask) files."""


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
