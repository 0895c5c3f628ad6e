"""The images that models are shown: a folder, a data set's test images, or the embedded set; and how many at once."""

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import floor
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from timm.data import DEFAULT_CROP_PCT, create_transform
from torch import Tensor

from nearsight.data import DATASETS, balanced_subset, data_folder, load_dataset, make_shapes, measuring_subset
from nearsight.data import pictures as data_pictures
from nearsight.data.decoding import UnreadableError, opened_rgb, stored_size
from nearsight.data.image_folder import TEST_NAMES, class_pictures, listed_images, readable_images
from nearsight.data.loading import dataset_spec, find_source
from nearsight.data.segmentation import SEGMENTATION_SETS, MaskedFolder, load_segmentation, read_numbers
from nearsight.data.segmentation.folders import IMAGES, MASKS
from nearsight.errors import InputError, unknown_name
from nearsight.files import canonical_hash, reading
from nearsight.models.sourced import OWN
from nearsight.train.heads import MeasuringImages, pixels_id

EMBEDDED_SIZE = 64
T = TypeVar("T")

MOST = 512
SHARE_OF_FREE_MEMORY = 0.8
"""The rest is for what the allocator cannot use, and for others on the same device."""
PIXELS_ON_A_CPU = 32 * 224 * 224
"""More at once is not faster there, and its memory is the computer's own."""
MOST_ON_A_CPU = 256


@dataclass(frozen=True)
class FilePictures:
    """Image files, opened one at a time."""

    name: str
    paths: Sequence[Path]

    def __len__(self) -> int:
        return len(self.paths)

    @contextmanager
    def opened(self, index: int, *, shorter_side: int) -> Iterator[Image.Image]:
        try:
            with opened_rgb(self.paths[index], shorter_side=shorter_side) as picture:
                yield picture
        except (UnreadableError, ValueError) as error:  # also of a preparation that leaves nothing of a narrow one
            raise InputError(f"{self.paths[index]} cannot be read: {error}; remove it") from error

    def id(self, index: int) -> bytes:
        """By the content of its file: the same under another name, and in another folder."""
        with reading(self.paths[index]), self.paths[index].open("rb") as file:
            return hashlib.file_digest(file, "sha256").digest()

    def chosen(self, places: Sequence[int]) -> "FilePictures":
        return replace(self, paths=[self.paths[place] for place in places])

    def digest(self) -> str:
        """Of names and sizes: to read all of them would take as long as to measure."""
        digest = hashlib.sha256()
        root = os.path.commonpath([path.parent for path in self.paths])
        for path in self.paths:
            digest.update(f"{path.relative_to(root).as_posix()}\0{path.stat().st_size}\0".encode())
        return digest.hexdigest()


BACKGROUND = "background"
"""What the class is called that is not of the foreground."""


@dataclass(frozen=True)
class MaskedPictures(FilePictures):
    """Image files with a mask each."""

    masks: Sequence[Path]
    background: frozenset[int]
    """The numbers of pixels that are background; those without a class (`IGNORED`) are neither, and count as
    foreground."""

    @contextmanager
    def foreground(self, index: int) -> Iterator[Image.Image]:
        """White on what is not background."""
        numbers_HW = read_numbers(self.masks[index])
        with reading(self.paths[index]):
            columns, rows = stored_size(self.paths[index])
        if numbers_HW.shape != (rows, columns):
            mask, picture = self.masks[index], self.paths[index].name
            size = f"{numbers_HW.shape[1]}×{numbers_HW.shape[0]}"
            raise InputError(
                f"{mask} is {size}, but its image {picture} is {columns}×{rows}; a mask has its image's size"
            )
        levels_HW = np.where(np.isin(numbers_HW, list(self.background)), 0, 255).astype(np.uint8)
        with Image.fromarray(levels_HW) as grey:
            yield grey.convert("RGB")

    def chosen(self, places: Sequence[int]) -> "MaskedPictures":
        paths, masks = ([files[place] for place in places] for files in (self.paths, self.masks))
        return replace(self, paths=paths, masks=masks)

    def digest(self) -> str:
        masks = FilePictures(self.name, self.masks).digest()
        return canonical_hash([super().digest(), masks, sorted(self.background)], digits=64)


@dataclass(frozen=True)
class PixelPictures:
    """Images in memory."""

    name: str
    images_NCHW: Tensor

    def __len__(self) -> int:
        return len(self.images_NCHW)

    @contextmanager
    def opened(self, index: int, *, shorter_side: int) -> Iterator[Image.Image]:
        yield Image.fromarray(self.images_NCHW[index].permute(1, 2, 0).numpy())

    def id(self, index: int) -> bytes:
        return pixels_id(self.images_NCHW[index])

    def chosen(self, places: Sequence[int]) -> "PixelPictures":
        return replace(self, images_NCHW=self.images_NCHW[list(places)])

    def digest(self) -> str:
        digest = hashlib.sha256(str(list(self.images_NCHW.shape)).encode())
        digest.update(self.images_NCHW.contiguous().numpy().data)
        return digest.hexdigest()


@dataclass(frozen=True)
class StoredPictures:
    """Pictures of a data set, in files or shards, opened one at a time."""

    name: str
    pictures: data_pictures.Pictures

    def __len__(self) -> int:
        return len(self.pictures)

    @contextmanager
    def opened(self, index: int, *, shorter_side: int) -> Iterator[Image.Image]:
        try:
            with opened_rgb(self.pictures.read(index), shorter_side=shorter_side) as picture:
                yield picture
        except (UnreadableError, ValueError) as error:
            raise InputError(f"{self.pictures.name(index)} cannot be read: {error}; remove it") from error

    def id(self, index: int) -> bytes:
        return hashlib.sha256(self.pictures.read(index)).digest()

    def chosen(self, places: Sequence[int]) -> "StoredPictures":
        return replace(self, pictures=self.pictures.select(torch.tensor(places)))

    def digest(self) -> str:
        return self.pictures.digest


Pictures = FilePictures | PixelPictures | StoredPictures
"""Images before a model's own preparation."""


def find_pictures(images: str | None, num_images: int, data_dir: Path | None, *, all_decoded: bool = True) -> Pictures:
    """The pictures that --images names, at most `num_images` of them, and always the same ones.

    Files are decoded once, so that all that cannot be read are named at once; where only a part of them is
    needed, they need not be `all_decoded`.
    """
    files = readable_images if all_decoded else listed_images
    if images is None:
        pixels = make_shapes(num_images, image_size=EMBEDDED_SIZE, split="test").images_NCHW
        return PixelPictures("the embedded set", pixels)
    if images in DATASETS:
        return _test_pictures(images, num_images, data_dir, files)
    if images in SEGMENTATION_SETS:
        dataset = load_segmentation(images, data_dir)
        classes = [label for label, name in enumerate(dataset.class_names) if name == BACKGROUND]
        return _with_masks(f"{images}, test", dataset.test.pairs, dataset.test.numbers_of(classes), num_images)
    folder = Path(images)
    if (folder / IMAGES).is_dir() and (folder / MASKS).is_dir():
        masked = MaskedFolder(folder=folder)
        numbers = masked.numbers_of(BACKGROUND)
        return _with_masks(images, masked.all_pairs(), (0,) if numbers is None else numbers, num_images)
    if not folder.exists() and "/" not in images and "\\" not in images:
        raise unknown_name("data set, nor a folder that is there", images, [*DATASETS, *SEGMENTATION_SETS])
    return FilePictures(images, files(folder, num_images))


def _with_masks(
    name: str, pairs: Sequence[tuple[Path, Path]], background: Iterable[int], num_images: int
) -> MaskedPictures:
    chosen = [pairs[index] for index in measuring_subset(len(pairs), num_images).tolist()]
    paths, masks = ([pair[part] for pair in chosen] for part in (0, 1))
    return MaskedPictures(name, paths, masks, frozenset(background))


def _test_pictures(
    name: str, num_images: int, data_dir: Path | None, files: Callable[[Path, int], list[Path]]
) -> Pictures:
    spec = DATASETS[name]
    if spec.find is not None:
        source = find_source(name, spec, data_folder(data_dir), spec.image_size)
        *others, last = source.files
        if others and last.is_dir() and last.name.lower() in TEST_NAMES:
            # A tree of pictures: a few of them, at their own size, need no decoded copy of the whole set.
            return FilePictures(f"{name}, test", files(last, num_images))
    test = load_dataset(name, data_dir=data_dir, num_train=0).test
    return PixelPictures(f"{name}, test", test.images_NCHW[measuring_subset(len(test), num_images)])


def pictures_to_classify(
    data: str, data_dir: Path | None, num: int | None
) -> tuple[StoredPictures | PixelPictures, Tensor, tuple[str, ...]]:
    """(pictures, labels, classes): the test images of a data set, or all of a folder with a folder per class; with
    `num`, a class-balanced choice that is always the same."""
    if data not in DATASETS and Path(data).is_dir():
        stored, classes = class_pictures(Path(data))
        name = data
    else:
        spec, name = dataset_spec(data), f"{data}, test"
        source = None if spec.find is None else find_source(data, spec, data_folder(data_dir), spec.image_size)
        if source is None or source.test_pictures is None:
            dataset = load_dataset(data, data_dir=data_dir, num_train=0, num_test=num)
            return PixelPictures(name, dataset.test.images_NCHW), dataset.test.labels_N, dataset.classes
        stored, classes = source.test_pictures(), source.classes
    if num is not None and num < len(stored):
        stored = stored.select(balanced_subset(stored.labels_N, num))
    return StoredPictures(name, stored), stored.labels_N, classes


@dataclass(frozen=True)
class PreparedImages:
    """Pictures prepared as a data config of timm says."""

    pictures: Pictures
    data_config: Mapping[str, Any]
    prepared_by: str = OWN
    """Who says so."""

    @property
    def name(self) -> str:
        return self.pictures.name

    def __len__(self) -> int:
        return len(self.pictures)

    @property
    def _shorter_side(self) -> int:
        """What the preparation resizes the shorter side of a picture to; 0 where it says so of the longer one too."""
        if self.data_config.get("crop_mode") in ("squash", "border"):
            return 0
        largest: int = max(self.data_config["input_size"][1:])
        share: float = self.data_config.get("crop_pct") or DEFAULT_CROP_PCT
        return floor(largest / share)

    @property
    def preparation(self) -> str:
        """In words."""
        rows, columns = self.data_config["input_size"][1:]
        side, mode = self._shorter_side, self.data_config.get("crop_mode")
        resized = f"shorter side resized to {side}" if side else f"resized, {mode}"
        interpolation = self.data_config.get("interpolation", "bilinear")
        normalised = _normalisation(self.data_config["mean"], self.data_config["std"])
        return f"{rows}×{columns} pixels ({resized}, {interpolation}), {normalised}; {self.prepared_by}"

    def ids(self) -> Iterator[bytes]:
        """What the pictures are called, in their order; the same however a model has them prepared."""
        return map(self.pictures.id, range(len(self)))

    def masks(self) -> Iterator[Tensor] | None:
        """Of the prepared pictures, in their order, [rows, columns] bool: True on the foreground; None where
        they have none."""
        pictures = self.pictures
        if not isinstance(pictures, MaskedPictures) or not pictures.background:
            return None
        as_they_are = {"interpolation": "nearest", "mean": (0.0, 0.0, 0.0), "std": (1.0, 1.0, 1.0)}
        prepare = create_transform(**{**self.data_config, **as_they_are}, is_training=False)

        def prepared(index: int) -> Tensor:
            with pictures.foreground(index) as picture:
                is_foreground: Tensor = prepare(picture)[0] > 0.5
                return is_foreground

        return map(prepared, range(len(self)))

    def batches(self, batch_size: int) -> Iterator[Tensor]:
        """Prepared by threads, one batch ahead of the model that looks at them."""
        prepare = create_transform(**self.data_config, is_training=False)

        def prepared(index: int) -> Tensor:
            with self.pictures.opened(index, shorter_side=self._shorter_side) as picture:
                tensor: Tensor = prepare(picture)
                return tensor

        waiting: list[Future[Tensor]] = []
        with ThreadPoolExecutor(os.cpu_count()) as threads:
            try:
                for begin in range(0, len(self), batch_size):
                    indices = range(begin, min(begin + batch_size, len(self)))
                    coming = [threads.submit(prepared, index) for index in indices]
                    if waiting:
                        yield torch.stack([future.result() for future in waiting])
                    waiting = coming
                yield torch.stack([future.result() for future in waiting])
            finally:
                threads.shutdown(cancel_futures=True)  # the rest may not be asked for


class RunImages(MeasuringImages):
    """Those of a run's own data set, as it is measured on them at its end."""

    @property
    def name(self) -> str:
        return f"{self.dataset.name}, test"

    @property
    def preparation(self) -> str:
        """In words."""
        rows, columns = self.dataset.test.images_NCHW.shape[-2:]
        normalised = _normalisation(self.dataset.mean, self.dataset.std)
        return f"{rows}×{columns} pixels, {normalised}; as the run was trained"

    def __len__(self) -> int:
        return min(self.num_images, len(self.dataset.test))


Images = PreparedImages | RunImages
"""Images as a model takes them."""


def _normalisation(mean: Sequence[float], std: Sequence[float]) -> str:
    """In words."""
    means, deviations = (f"({', '.join(f'{value:.4g}' for value in values)})" for values in (mean, std))
    return f"mean {means}, std {deviations}"


def as_seen(images: Images, images_BCHW: Tensor) -> NDArray[np.uint8]:
    """Normalised images as pictures again: [B, H, W, C]."""
    per_channel = (
        (images.data_config["mean"], images.data_config["std"])
        if isinstance(images, PreparedImages)
        else (images.dataset.mean, images.dataset.std)
    )
    mean_C11, std_C11 = (torch.tensor(values).view(-1, 1, 1) for values in per_channel)
    levels_BCHW = (images_BCHW.float().cpu() * std_C11 + mean_C11).clamp(0, 1).mul(255).round().to(torch.uint8)
    pictures: NDArray[np.uint8] = levels_BCHW.permute(0, 2, 3, 1).numpy()
    return pictures


def find_batch_size(run: Callable[[int], object], image_size: tuple[int, int], device: torch.device) -> int:
    """How many images of this size go through a model at once: as many as its memory takes.

    `run` measures so many images; on a GPU it is called with 1 and 2.
    """
    if device.type != "cuda":
        rows, columns = image_size
        return max(1, min(MOST_ON_A_CPU, PIXELS_ON_A_CPU // (rows * columns)))
    try:
        one, two = (_peak_bytes(run, num_images, device) for num_images in (1, 2))
    except torch.OutOfMemoryError:
        return 1
    free, _ = torch.cuda.mem_get_info(device)
    return batch_size_for(one, two, free + torch.cuda.memory_reserved(device))


def batch_size_for(one: int, two: int, available: int) -> int:
    """From the peak memory of one and of two images: their difference is an image, what is left is the model."""
    image = max(two - one, 1)
    model = max(one - image, 0)
    return max(1, min(MOST, int(SHARE_OF_FREE_MEMORY * available - model) // image))


def _peak_bytes(run: Callable[[int], object], num_images: int, device: torch.device) -> int:
    torch.cuda.reset_peak_memory_stats(device)
    run(num_images)
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device)


def within_memory(run: Callable[[int], T], batch_size: int, *, may_shrink: bool) -> T:
    """What `run` gives; where a batch does not fit into memory, it starts again with half of it."""
    while True:
        try:
            return run(batch_size)
        except torch.OutOfMemoryError as error:
            if not may_shrink:
                raise InputError(
                    f"a batch of {batch_size} images does not fit into memory; use a smaller --batch-size, or auto"
                ) from error
            if batch_size == 1:
                raise InputError(
                    "one image does not fit into memory; use --device cpu or a smaller --image-size"
                ) from error
        torch.cuda.empty_cache()  # after the handler: the error keeps the failed batch alive
        batch_size //= 2
