"""`load_dataset`: from a name to images in memory."""

from pathlib import Path

from nearsight.data import shapes
from nearsight.data.cache import Decoded, open_cached
from nearsight.data.checksums import check_published
from nearsight.data.dataset import Dataset, ImageSet, content_fingerprint
from nearsight.data.locations import data_folder
from nearsight.data.registry import DATASETS
from nearsight.data.segmentation.registry import SEGMENTATION_SETS
from nearsight.data.source import DatasetSpec, Source
from nearsight.data.splits import balanced_subset
from nearsight.errors import InputError, check_at_least, unknown_name
from nearsight.files import canonical_hash, reading


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


def _made_shapes(num_train: int, num_test: int, image_size: int) -> Decoded:
    train, test = (
        shapes.make_shapes(num, image_size=image_size, split=split)
        for num, split in ((num_train, "train"), (num_test, "test"))
    )
    return Decoded(classes=shapes.CLASSES, train=train, test=test, fingerprint=content_fingerprint(train, test))


def _at_most(name: str, part: str, images: ImageSet, num: int | None) -> ImageSet:
    if num is None or num == len(images):
        return images
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
) -> Dataset:
    """The data set of this name, with every image or with a class-balanced choice that is always the same.

    Files are looked for in `data_dir`, else in `NEARSIGHT_DATA`, else in the user's cache folder. When they are
    decoded, which happens once, `verify` compares them with their published checksums.
    """
    spec = dataset_spec(name)
    for what, value in (("image_size", image_size), ("num_train", num_train), ("num_test", num_test)):
        if value is not None:
            check_at_least(what, value, 1)
    size = image_size or spec.image_size
    if size != spec.image_size and not spec.other_sizes:
        raise InputError(
            f"image_size is {size}, but {name} images are {spec.image_size}×{spec.image_size}; leave it out"
        )
    if spec.find is None:
        assert spec.num_train is not None
        assert spec.num_test is not None
        whole = _made_shapes(num_train or spec.num_train, num_test or spec.num_test, size)
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
