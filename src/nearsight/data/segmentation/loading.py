"""`load_segmentation`: from a name to images with masks."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from nearsight.data.locations import data_folder
from nearsight.data.segmentation.masks import IGNORED, MaskedImages
from nearsight.data.segmentation.registry import SEGMENTATION_SETS
from nearsight.data.segmentation.source import SegmentationSource
from nearsight.errors import InputError, unknown_name
from nearsight.files import canonical_hash, reading


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

    @property
    def num_classes(self) -> int:
        return len(self.class_names)

    @cached_property
    def fingerprint(self) -> str:
        """Digest of the names and sizes of all its files: to read a hundred thousand of them would take minutes."""
        with reading(self.folder):
            files = [
                [str(path.relative_to(self.folder)), path.stat().st_size]
                for part in (self.train, self.test)
                for pair in part.pairs
                for path in pair
            ]
        return canonical_hash([self.name, files], digits=64)


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
    """The data set of this name, from `data_dir`, else from `NEARSIGHT_DATA`, else from the user's cache folder.

    Images are read when they are asked for; what is wrong with one of them is known then, or by `check_segmentation`.
    """
    source = find_segmentation(name, data_dir)
    return SegmentationSet(
        name=name,
        folder=source.folder,
        class_names=source.class_names,
        train=MaskedImages(source.train, source.labels),
        test=MaskedImages(source.test, source.labels),
    )
