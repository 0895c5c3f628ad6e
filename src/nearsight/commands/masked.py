"""Data sets with masks, as commands name them: one that is registered, or a folder of images and masks of one's own."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from nearsight.data.segmentation import (
    IGNORED,
    SEGMENTATION_SETS,
    MaskedFolder,
    MaskedImages,
    SegmentationSet,
    check_pairs,
    load_segmentation,
)
from nearsight.errors import InputError, unknown_name

KIND = "data set with masks, nor a folder that is there"


@dataclass(frozen=True, kw_only=True)
class OwnMasks:
    """The options that say how a folder of one's own is read."""

    masks: Path | None = None
    """Of a folder of your own: where its masks are, in it or elsewhere; by default masks, beside images."""
    classes: Path | None = None
    """Likewise: JSON of the names of the classes, a list or {number: name}; by default classes.json, beside images."""
    ignore_value: int = IGNORED
    """Likewise: the number of pixels that count nowhere; -1 where all count."""
    test_share: float = MaskedFolder.test_share
    """Likewise: share of the images held out as the test set, where it has no folders train and val."""
    split_seed: int = MaskedFolder.split_seed
    """Likewise: seed of that choice; --seed does not change it."""

    def load_masked(
        self, data: str, data_dir: Path | None, num_train: int | None = None, num_test: int | None = None
    ) -> SegmentationSet:
        """The data set, or the first images of its parts. All masks of one's own that are used are looked at, so that
        what is wrong with them is not found in the middle."""
        if data in SEGMENTATION_SETS:
            if changed := [name for name, (value, usual) in self._own.items() if value != usual]:
                option = f"--{changed[0].replace('_', '-')}"
                raise InputError(f"{option} is for a folder of your own, but {data} says that itself; leave it out")
            dataset = first_images(load_segmentation(data, data_dir), num_train, num_test)
        else:
            dataset = first_images(self.folder_of(data).load(), num_train, num_test)
            check_pairs(dataset.train)
            check_pairs(dataset.test)
        dataset.train.check_labelled("training")
        dataset.test.check_labelled("test")
        return dataset

    def folder_of(self, data: str) -> MaskedFolder:
        """The folder that --data names."""
        if not Path(data).exists() and "/" not in data and "\\" not in data:
            raise unknown_name(KIND, data, SEGMENTATION_SETS)
        return MaskedFolder(
            folder=Path(data),
            masks=self.masks,
            classes=self.classes,
            ignored=self.ignore_value,
            test_share=self.test_share,
            split_seed=self.split_seed,
        )

    @property
    def _own(self) -> dict[str, tuple[Any, Any]]:
        """Option → (its value, its default)."""
        return {field.name: (getattr(self, field.name), field.default) for field in fields(OwnMasks)}


def first_images(dataset: SegmentationSet, num_train: int | None, num_test: int | None) -> SegmentationSet:
    """The data set with so many of its images at most, the first ones."""

    def some(images: MaskedImages, num: int | None) -> MaskedImages:
        return images if num is None else replace(images, pairs=images.pairs[:num])

    return replace(dataset, train=some(dataset.train, num_train), test=some(dataset.test, num_test))
