"""What a data set is once it is in memory: uint8 images, integer labels, and the digest that names their content.

Shape suffixes: N images, C channels, H rows, W columns.
"""

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

from nearsight.errors import InputError
from nearsight.files import canonical_hash


@dataclass(frozen=True)
class ImageSet:
    """Images and their labels, in one order."""

    images_NCHW: Tensor
    """Pixels (uint8, RGB)."""
    labels_N: Tensor
    """Class numbers (int64), counted from 0."""

    def __post_init__(self) -> None:
        if self.images_NCHW.dtype != torch.uint8 or self.images_NCHW.ndim != 4:
            raise InputError(
                f"images must be uint8 [N, C, H, W], but are {self.images_NCHW.dtype} {list(self.images_NCHW.shape)}"
            )
        if self.labels_N.dtype != torch.int64 or self.labels_N.shape != self.images_NCHW.shape[:1]:
            raise InputError(
                f"{len(self.images_NCHW)} images need int64 labels [{len(self.images_NCHW)}], "
                f"but these are {self.labels_N.dtype} {list(self.labels_N.shape)}"
            )

    def __len__(self) -> int:
        return len(self.labels_N)

    def select(self, index_n: Tensor) -> "ImageSet":
        """The images at these positions, in this order (a copy)."""
        return ImageSet(self.images_NCHW[index_n], self.labels_N[index_n])


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """A classification data set with its official two parts."""

    name: str
    """The name it has in the registry."""
    classes: tuple[str, ...]
    """Class names; a label is a position in this tuple."""
    image_size: tuple[int, int]
    """Rows and columns of every image."""
    mean: tuple[float, float, float]
    """Channel means of the training images in [0, 1]."""
    std: tuple[float, float, float]
    """Channel deviations of the training images in [0, 1]."""
    train: ImageSet
    """The official training set; a validation set is split off it, never off `test`."""
    test: ImageSet
    """The official test set (the labelled validation set where the test labels are not public)."""
    fingerprint: str
    """Hex digest of the exact content: pixels, labels and their order."""

    def __post_init__(self) -> None:
        for part, images in (("train", self.train), ("test", self.test)):
            if tuple(images.images_NCHW.shape[1:]) != (3, *self.image_size):
                raise InputError(
                    f"{self.name} {part} images are {list(images.images_NCHW.shape[1:])}, "
                    f"but [3, {self.image_size[0]}, {self.image_size[1]}] is needed"
                )
            check_label_range(f"{self.name} {part}", images.labels_N, len(self.classes))

    @property
    def num_classes(self) -> int:
        return len(self.classes)


def check_label_range(where: str, labels_N: Tensor, num_classes: int) -> None:
    """Every label is a class number, or an error that says which one is not."""
    wrong_n = torch.nonzero((labels_N < 0) | (labels_N >= num_classes)).flatten()
    if len(wrong_n):
        first = int(wrong_n[0])
        raise InputError(
            f"{where}: image {first} has label {int(labels_N[first])}, but {num_classes} classes have labels "
            f"0 to {num_classes - 1} ({len(wrong_n)} wrong in all); the file is damaged or of another data set"
        )


def fingerprint(bytes_digest: str, num_train: int, num_test: int, image_size: tuple[int, int]) -> str:
    """The digest of a data set's content, from the sha256 of its bytes (see `content_fingerprint`) and its shape."""
    return canonical_hash(
        {"sha256": bytes_digest, "train": num_train, "test": num_test, "size": list(image_size)}, digits=64
    )


def content_fingerprint(train: ImageSet, test: ImageSet) -> str:
    """The digest of images in memory: train pixels, test pixels, train labels, test labels."""
    digest = hashlib.sha256()
    for tensor in (train.images_NCHW, test.images_NCHW, train.labels_N, test.labels_N):
        # The array itself goes to the digest: a bytes copy of a large set would double its memory.
        digest.update(tensor.contiguous().numpy().data)
    rows, columns = train.images_NCHW.shape[-2:]
    return fingerprint(digest.hexdigest(), len(train), len(test), (rows, columns))
