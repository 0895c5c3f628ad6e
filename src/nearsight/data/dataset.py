"""A data set in memory: uint8 images, integer labels, the digest that names their content; and which of them are used.

Which images train, which are held out, which are measured, and in which order an epoch visits them is integer
arithmetic only: positions are ordered by their 62-bit Philox keys, which no machine, torch version or thread count
changes. A split depends on the labels, the fraction and the seed, so every protocol of a study is validated on the same
images.

Shape suffixes: N images of the set, n chosen ones, C channels or classes, H rows, W columns, K cells, B of a batch.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nearsight.errors import InputError, check_at_least, check_fraction
from nearsight.files import canonical_hash
from nearsight.lazy import torch
from nearsight.randomness import permutation

RUN = 64
"""Pictures that lie side by side in a shard and are shuffled together."""
_ORDER = "epoch order"

if TYPE_CHECKING:
    from torch import Tensor

    from nearsight.data.pictures import Pictures


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

    def select(self, index_n: Tensor) -> ImageSet:
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
    """Hex digest of the exact content: pixels, labels and their order. Of pictures in files, names and sizes."""
    pictures: Pictures | None = None
    """The training pictures in their files, where they are decoded anew in every epoch; `train` has none then."""
    resized: int | None = None
    """What the shorter side of a picture is resized to before its middle is evaluated; None: the image size."""

    def __post_init__(self) -> None:
        for part, images in (("train", self.train), ("test", self.test)):
            if tuple(images.images_NCHW.shape[1:]) != (3, *self.image_size):
                raise InputError(
                    f"{self.name} {part} images are {list(images.images_NCHW.shape[1:])}, "
                    f"but [3, {self.image_size[0]}, {self.image_size[1]}] is needed"
                )
            check_label_range(f"{self.name} {part}", images.labels_N, len(self.classes))
        if self.pictures is not None:
            check_label_range(f"{self.name} train", self.pictures.labels_N, len(self.classes))

    @property
    def training_labels(self) -> Tensor:
        """Those [N] of the images that train, in memory or in their files."""
        return self.train.labels_N if self.pictures is None else self.pictures.labels_N

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


def _shuffled(num: int, stream: str, seed: int) -> Tensor:
    return permutation(torch.tensor([seed]), stream, torch.tensor(0), num)[0]


def _per_class_shares(labels_N: Tensor, num: int) -> Tensor:
    """How many of `num` images each class gives, in proportion to its size; largest remainders first, then low labels.

    Rounding class by class would let the total drift by up to half an image per class.
    """
    counts_C = torch.bincount(labels_N)
    product_C = counts_C * num
    shares_C = product_C // len(labels_N)
    remainders_C = product_C % len(labels_N)
    order_C = torch.argsort(remainders_C, descending=True, stable=True)
    shares_C[order_C[: num - int(shares_C.sum())]] += 1
    return shares_C


def _choose_per_class(labels_N: Tensor, num: int, stream: str, seed: int) -> tuple[Tensor, Tensor]:
    """(rest, chosen): `num` positions with the class proportions of the whole, both ascending."""
    order_N = _shuffled(len(labels_N), stream, seed)
    by_class_N = order_N[torch.argsort(labels_N[order_N], stable=True)]
    sorted_labels_N = labels_N[by_class_N]
    counts_C = torch.bincount(labels_N)
    rank_N = torch.arange(len(labels_N)) - (counts_C.cumsum(0) - counts_C)[sorted_labels_N]
    chosen_N = torch.zeros(len(labels_N), dtype=torch.bool)
    chosen_N[by_class_N] = rank_N < _per_class_shares(labels_N, num)[sorted_labels_N]
    return torch.nonzero(~chosen_N).flatten(), torch.nonzero(chosen_N).flatten()


def stratified_split(labels_N: Tensor, fraction: float, seed: int) -> tuple[Tensor, Tensor]:
    """(train, held out) positions, both ascending: `fraction` is held out, with the class proportions of the whole."""
    check_fraction("the held-out fraction", fraction)
    num_held_out = round(len(labels_N) * fraction)
    if not 0 < num_held_out < len(labels_N):
        raise InputError(
            f"{len(labels_N)} images cannot be split with {fraction} held out: one part would be empty; take more of "
            "them, or hold out another share"
        )
    return _choose_per_class(labels_N.cpu(), num_held_out, "stratified split", seed)


def balanced_subset(labels_N: Tensor, num: int, seed: int = 0) -> Tensor:
    """`num` ascending positions with the class proportions of the whole set."""
    if not 0 < num <= len(labels_N):
        raise InputError(f"{num} images were asked for, but there are {len(labels_N)}; ask for 1 to {len(labels_N)}")
    return _choose_per_class(labels_N.cpu(), num, "balanced subset", seed)[1]


def measuring_subset(num_available: int, num: int, seed: int = 0) -> Tensor:
    """The ascending positions of the images a model is measured on: `num` of them, or all when there are fewer."""
    if num < 1:
        raise InputError(f"{num} images were asked for, but at least 1 is needed to measure")
    return _shuffled(num_available, "measuring subset", seed)[:num].sort().values


def windowed_permutation(seed_K: Tensor, epoch: Tensor, num: int, window: int) -> Tensor:
    """[K, num]: runs of `RUN` neighbours in any order, and what `window` places one after another hold shuffled.

    For pictures in shards: those that are read at about the same time lie side by side in a few of them, and a batch
    still has pictures from window / RUN places of the data set.
    """
    num_runs = -(-num // RUN)
    runs_Kr = permutation(seed_K, "epoch runs", epoch, num_runs)
    place_KN = (runs_Kr.unsqueeze(-1) * RUN + torch.arange(RUN, device=seed_K.device)).flatten(1)
    # The last run may be shorter, wherever it has come to lie.
    place_KN = place_KN[place_KN < num].view(len(seed_K), num)
    order_KN = permutation(seed_K, _ORDER, epoch, num)
    by_window_KN = order_KN.gather(-1, torch.argsort(order_KN // window, dim=-1, stable=True))
    return place_KN.gather(-1, by_window_KN)


def epoch_batches(
    seed_K: Tensor, epoch: int | Tensor, num: int, batch_size: int, *, window: int | None = None
) -> Tensor:
    """Positions [steps, K, B] of the images of every step: a permutation per cell, without its incomplete last batch.

    A cell's order depends on its seed and the epoch alone: it sees the same batches whatever it is stacked with.
    `window`: see `windowed_permutation`; None: every order of all images is as likely.
    """
    check_at_least("the batch size", batch_size, 1)
    if num < batch_size:
        raise InputError(f"the batch size is {batch_size}, but there are {num} images; take at most {num}")
    num_steps = num // batch_size
    epoch = torch.as_tensor(epoch, device=seed_K.device)
    order_KN = (
        permutation(seed_K, _ORDER, epoch, num)
        if window is None or window >= num
        else windowed_permutation(seed_K, epoch, num, window)
    )[:, : num_steps * batch_size]
    return order_KN.view(len(seed_K), num_steps, batch_size).transpose(0, 1).contiguous()
