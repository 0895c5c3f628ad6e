"""`load_dataset`: from a name to images in memory, by way of files that are as published."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import floor
from pathlib import Path

from nearsight.data.cache import Decoded, open_cached
from nearsight.data.cropping import middles
from nearsight.data.dataset import Dataset, ImageSet, balanced_subset, content_fingerprint
from nearsight.data.locations import data_folder
from nearsight.data.registry import DATASETS, DatasetSpec, Source
from nearsight.data.segmentation.masks import SEGMENTATION_SETS
from nearsight.errors import InputError, check_at_least, unknown_name
from nearsight.files import canonical_hash, reading
from nearsight.lazy import torch


def dataset_spec(name: str) -> DatasetSpec:
    """The registry line of a name."""
    if name in SEGMENTATION_SETS:
        raise InputError(
            f"{name} has masks, not a class for each image: it is for nearsight probe segment and retrieve, and its "
            "makers' files have to be put into the data folder"
        )
    if name not in DATASETS:
        raise unknown_name("data set", name, DATASETS)
    return DATASETS[name]


def find_source(name: str, spec: DatasetSpec, folder: Path, image_size: int) -> Source:
    """The files of a data set, or an error that says how to get them."""
    assert spec.find is not None
    with reading(folder):
        source = spec.find(folder, image_size)
    if source is None:
        way_out = f"get it with `nearsight data fetch {name}`, or" if spec.downloads else "put it there, or"
        raise InputError(f"{name} is not in {folder}; {way_out} say with --data-dir where it is")
    return source


def _drawn(spec: DatasetSpec, num_train: int | None, num_test: int | None, image_size: int) -> Decoded:
    assert spec.draw is not None
    assert spec.num_train is not None
    assert spec.num_test is not None
    test = spec.draw(num_test or spec.num_test, image_size=image_size, split="test")
    num_train = spec.num_train if num_train is None else num_train
    train = spec.draw(num_train, image_size=image_size, split="train") if num_train else _none_of(test)
    return Decoded(classes=spec.classes, train=train, test=test, fingerprint=content_fingerprint(train, test))


def _none_of(images: ImageSet) -> ImageSet:
    return ImageSet(images.images_NCHW[:0], images.labels_N[:0])


def _at_most(name: str, part: str, images: ImageSet, num: int | None) -> ImageSet:
    if num is None or num == len(images):
        return images
    if num == 0:
        return _none_of(images)
    if num > len(images):
        raise InputError(f"{num} {part} images of {name} were asked for, but it has {len(images)}")
    return images.select(balanced_subset(images.labels_N, num))


def load_dataset(
    name: str,
    *,
    data_dir: Path | None = None,
    image_size: int | None = None,
    num_train: int | None = None,
    num_test: int | None = None,
    verify: bool = True,
    stream: bool = False,
    crop_pct: float = 1.0,
) -> Dataset:
    """The data set of this name, with every image or with a class-balanced choice that is always the same.

    Files are looked for in `data_dir`, by default in `NEARSIGHT_DATA`, or else the user's cache folder. When they are
    decoded, which happens once, `verify` compares them with their published checksums. With a `num_train` of 0 the test
    images come alone; only so is a set opened that has no others.

    With `stream` the training images stay where they are, undecoded, as the set's `pictures`, and only the test images
    are decoded: their shorter side resized to the image size over `crop_pct`, and the middle cut out.
    """
    spec = dataset_spec(name)
    for what, value, least in (("image_size", image_size, 1), ("num_train", num_train, 0), ("num_test", num_test, 1)):
        if value is not None:
            check_at_least(what, value, least)
    if spec.num_train == 0 and num_train != 0:
        raise InputError(f"{name} has no training images, only test images to look at models with; name another set")
    size = image_size or spec.image_size
    if size != spec.image_size and not spec.other_sizes:
        raise InputError(
            f"image_size is {size}, but {name} images are {spec.image_size}×{spec.image_size}; leave it out"
        )
    if stream:
        return _streamed(name, spec, data_folder(data_dir), size, num_train, num_test, floor(size / crop_pct))
    if spec.find is None:
        whole = _drawn(spec, num_train, num_test, size)
    else:
        source = find_source(name, spec, data_folder(data_dir), size)
        if verify:
            whole = open_cached(name, source, size, before_decoding=lambda: check_published(source, spec.md5))
        else:  # under a name of its own, so that it never passes for a verified one
            whole = open_cached(f"{name}-unverified", source, size)
    train = _at_most(name, "training", whole.train, num_train)
    test = _at_most(name, "test", whole.test, num_test)
    complete = train is whole.train and test is whole.test
    return Dataset(
        name=name,
        classes=whole.classes,
        image_size=(size, size),
        mean=spec.mean,
        std=spec.std,
        train=train,
        test=test,
        # The choice is a function of the whole set and the two numbers, so they identify it.
        fingerprint=whole.fingerprint
        if complete
        else canonical_hash([whole.fingerprint, len(train), len(test)], digits=64),
    )


def _streamed(
    name: str, spec: DatasetSpec, folder: Path, size: int, num_train: int | None, num_test: int | None, resized: int
) -> Dataset:
    source = None if spec.find is None else find_source(name, spec, folder, size)
    if source is None or source.train_pictures is None or source.test_pictures is None:
        raise InputError(
            f"{name} cannot be streamed: its pictures are not files of their own, nor in shards; give --data.no-stream "
            "--data.crop-pct 1"
        )
    of_test = source.test_pictures
    alone = replace(
        source,
        train=None,
        test=lambda: middles(of_test(), size, resized),
        files=source.test_files or source.files,
    )
    decoded = open_cached(f"{name}-test-{resized}", alone, size)
    pictures, test = source.train_pictures(), _at_most(name, "test", decoded.test, num_test)
    if num_train is not None and num_train != len(pictures):
        if num_train > len(pictures):
            raise InputError(f"{num_train} training images of {name} were asked for, but it has {len(pictures)}")
        none_n = torch.zeros(0, dtype=torch.int64)
        pictures = pictures.select(balanced_subset(pictures.labels_N, num_train) if num_train else none_n)
    numbers = [len(pictures), len(test), list(source.classes), pictures.labels_N.tolist()]
    return Dataset(
        name=name,
        classes=source.classes,
        image_size=(size, size),
        mean=spec.mean,
        std=spec.std,
        train=decoded.train,
        test=test,
        fingerprint=canonical_hash([pictures.digest, decoded.fingerprint, *numbers], digits=64),
        pictures=pictures,
        resized=resized,
    )


@dataclass(frozen=True)
class Checksum:
    """A file whose digest is published."""

    path: Path
    """The file."""
    expected: str
    """What its makers say (md5)."""
    found: str
    """What it has (md5)."""

    @property
    def ok(self) -> bool:
        return self.found == self.expected


def _md5(path: Path) -> str:
    with reading(path), path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


def published_checksums(source: Source, md5: Mapping[str, str]) -> tuple[Checksum, ...]:
    """One entry per file of the source that has a published digest."""
    paths = ((source.folder / name, expected) for name, expected in md5.items())
    return tuple(Checksum(path, expected, _md5(path)) for path, expected in paths if path.is_file())


def check_published(source: Source, md5: Mapping[str, str]) -> None:
    """Refuse a source in which a file differs from the published one."""
    for checksum in published_checksums(source, md5):
        if not checksum.ok:
            raise InputError(
                f"{checksum.path} is damaged or was changed: its md5 is {checksum.found}, "
                f"but {checksum.expected} is published; get it again"
            )
