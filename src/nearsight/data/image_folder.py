"""Folders of images: trees with a folder per class (ImageNet, Imagenette, mini-ImageNet, your own), and plain ones."""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from PIL import Image

from nearsight.data.decoding import UnreadableError, decode, is_image_name, open_rgb, unreadable
from nearsight.data.source import Chunk, Reader, Source
from nearsight.data.splits import measuring_subset, stratified_split
from nearsight.errors import InputError, check_at_least

TEST_NAMES = ("val", "test", "validation", "valid")
_HELD_OUT = 0.2


def _class_folders(folder: Path) -> dict[str, Path]:
    """Folders that stand for classes, by name, in the order of their labels."""
    return {path.name: path for path in sorted(folder.iterdir()) if path.is_dir() and not path.name.startswith(".")}


def _listed(classes: dict[str, Path]) -> tuple[list[Path], list[int]]:
    """Images, also those in folders below a class's own, and their labels."""
    images: list[Path] = []
    labels: list[int] = []
    for label, folder in enumerate(classes.values()):
        of_class = _images_below(folder)
        if not of_class:
            raise InputError(f"{folder} holds no images, but every class needs some; remove it or fill it")
        images += of_class
        labels += [label] * len(of_class)
    return images, labels


def _images_below(folder: Path) -> list[Path]:
    return sorted(Path(below, name) for below, _, names in os.walk(folder) for name in names if is_image_name(name))


def _reader(folder: Path, classes: dict[str, Path], size: int) -> Reader:
    def read() -> Iterator[Chunk]:
        images, labels = _listed(classes)
        return decode(folder, images, labels, size)

    return read


def _held_out_reader(folder: Path, classes: dict[str, Path], size: int, part: int) -> Reader:
    def read() -> Iterator[Chunk]:
        images, labels = _listed(classes)
        chosen = stratified_split(torch.tensor(labels), _HELD_OUT, seed=0)[part].tolist()
        return decode(folder, [images[index] for index in chosen], [labels[index] for index in chosen], size)

    return read


def open_tree(folder: Path, image_size: int) -> Source:
    """A tree with `train` and `val` (or `test`), or with classes right below: then a fifth of it is the test set."""
    train_folder = folder / "train"
    if not train_folder.is_dir():
        classes = _class_folders(folder)
        if not classes:
            raise InputError(f"{folder} has no classes: put the images of each class into a folder named after it")
        return Source(
            folder=folder,
            layout="folder per class, a fifth held out as test set",
            files=(folder,),
            classes=tuple(classes),
            train=_held_out_reader(folder, classes, image_size, 0),
            test=_held_out_reader(folder, classes, image_size, 1),
        )
    test_folder = next((folder / name for name in TEST_NAMES if (folder / name).is_dir()), None)
    if test_folder is None:
        raise InputError(f"{folder} has a folder 'train' but none named {' or '.join(map(repr, TEST_NAMES))}")
    train_classes, test_classes = _class_folders(train_folder), _class_folders(test_folder)
    for part in (train_folder, test_folder):
        if not _class_folders(part):
            raise InputError(f"{part} has no classes: put the images of each class into a folder named after it")
    only = sorted(train_classes.keys() ^ test_classes.keys())
    if only:
        raise InputError(
            f"{train_folder} and {test_folder} do not have the same classes: {', '.join(only[:3])} "
            f"{'is' if len(only) == 1 else 'are'} in one of them alone ({len(only)} in all)"
        )
    return Source(
        folder=folder,
        layout=f"folder per class, train and {test_folder.name}",
        files=(train_folder, test_folder),
        classes=tuple(train_classes),
        train=_reader(folder, train_classes, image_size),
        test=_reader(folder, test_classes, image_size),
    )


def folder_images(folder: Path, num: int | None = None) -> Iterator[Image.Image]:
    """The pictures in a folder and below it; see `readable_images`."""
    return map(open_rgb, readable_images(folder, num))


def readable_images(folder: Path, num: int | None = None) -> list[Path]:
    """`listed_images`, all decoded once, so that one error names every file that cannot be read."""
    paths = listed_images(folder, num)

    def problem(path: Path) -> str | None:
        try:
            open_rgb(path)
        except UnreadableError as error:
            return str(error)
        return None

    with ThreadPoolExecutor(os.cpu_count()) as threads:
        reasons = list(threads.map(problem, paths))
    problems = [(str(path.relative_to(folder)), reason) for path, reason in zip(paths, reasons, strict=True) if reason]
    if problems:
        raise unreadable(folder, problems)
    return paths


def listed_images(folder: Path, num: int | None = None) -> list[Path]:
    """The image files in a folder and below it, in order of their names; of more than `num`, always the same choice."""
    if num is not None:
        check_at_least("the number of images", num, 1)
    if not folder.is_dir():
        raise InputError(
            f"{folder} is {'a file' if folder.exists() else 'not there'}, but a folder of images is needed"
        )
    paths = _images_below(folder)
    if not paths:
        raise InputError(f"{folder} holds no images (looked for {', '.join(('.jpg', '.jpeg', '.png'))} and others)")
    if num is not None:
        paths = [paths[index] for index in measuring_subset(len(paths), num).tolist()]
    return paths
