"""Folders of images: trees with a folder per class (ImageNet, Imagenette, mini-ImageNet, your own), and plain ones."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from nearsight.data.dataset import measuring_subset, stratified_split
from nearsight.data.decoding import UnreadableError, decode, is_image_name, open_rgb, opened_rgb, unreadable
from nearsight.data.locations import check_spelling, entries_below, is_hidden
from nearsight.data.pictures import Pictures
from nearsight.data.registry import Chunk, Reader, Source
from nearsight.errors import InputError, check_at_least
from nearsight.files import reading
from nearsight.lazy import torch

if TYPE_CHECKING:
    from PIL import Image

TRAIN_NAMES = ("train", "training")
TEST_NAMES = ("val", "validation", "valid", "test", "testing")
"""Parts of a data set, in capitals or not; of several the first is taken, and the others are not used. Validation comes
first because papers report it for ImageNet, whose test set has no labels, and for what was made of it."""
_HELD_OUT = 0.2


def _folders(folder: Path) -> dict[str, Path]:
    """Folders right below one, by name and in the order of their names."""
    return {path.name: path for path in sorted(folder.iterdir()) if not is_hidden(path.name) and path.is_dir()}


def _class_folders(folder: Path) -> dict[str, Path]:
    """Folders of classes, by name, in the order of their labels."""
    classes = _folders(folder)
    if not classes:
        raise InputError(f"{folder} has no classes: put the images of each class into a folder named after it")
    for path in classes.values():
        check_spelling(path)
    if all(name.lower() in TRAIN_NAMES + TEST_NAMES for name in classes):
        raise InputError(
            f"{folder} has {', '.join(map(repr, classes))}, which are names of parts, not of classes; "
            "a data set has 'train' and 'val', each with a folder per class, or just folders of classes"
        )
    return classes


def _part(folders: dict[str, Path], names: tuple[str, ...]) -> Path | None:
    """The first of these parts that is there."""
    for name in names:
        found = [path for path in folders.values() if path.name.lower() == name]
        if len(found) > 1:
            raise InputError(f"{found[0]} and {found[1].name} differ only in capitals; remove one of them")
        if found:
            return found[0]
    return None


def unused_parts(used: str, present: Iterable[str]) -> str:
    """For the description of a layout: the parts that could be the test set, but are not used."""
    others = [name for name in present if name.lower() in TEST_NAMES and name != used]
    return f" ({' and '.join(others)} not used)" if others else ""


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
    with reading(folder):
        files = (entry for entry in entries_below(folder) if is_image_name(entry.name) and not entry.is_dir())
        return sorted(Path(entry.path) for entry in files)


def _reader(folder: Path, classes: dict[str, Path], size: int) -> Reader:
    def read() -> Iterator[Chunk]:
        images, labels = _listed(classes)
        return decode(folder, images, labels, size)

    return read


def _part_listed(classes: dict[str, Path], part: int) -> tuple[list[Path], list[int]]:
    """Of a tree that has no test set of its own, the images that train (0), or those held out (1)."""
    images, labels = _listed(classes)
    chosen = stratified_split(torch.tensor(labels), _HELD_OUT, seed=0)[part].tolist()
    return [images[index] for index in chosen], [labels[index] for index in chosen]


def _held_out_reader(folder: Path, classes: dict[str, Path], size: int, part: int) -> Reader:
    def read() -> Iterator[Chunk]:
        return decode(folder, *_part_listed(classes, part), size)

    return read


def _is_class(part: Path, folders: dict[str, Path]) -> bool:
    """Whether 'train' is the vehicle: there are pictures right in it, and other classes beside it."""
    others = any(name.lower() not in TRAIN_NAMES + TEST_NAMES for name in folders)
    return others and any(is_image_name(path.name) for path in part.iterdir())


def open_tree(folder: Path, image_size: int) -> Source:
    """A tree with `train` and `val` (or `test`), or with classes right below: then a fifth of it is the test set."""
    folders = _folders(folder)
    train_folder, test_folder = _part(folders, TRAIN_NAMES), _part(folders, TEST_NAMES)
    if train_folder is None or (test_folder is None and _is_class(train_folder, folders)):
        classes = _class_folders(folder)
        return Source(
            folder=folder,
            layout="folder per class, a fifth held out as test set",
            files=(folder,),
            classes=tuple(classes),
            train=_held_out_reader(folder, classes, image_size, 0),
            test=_held_out_reader(folder, classes, image_size, 1),
            train_pictures=lambda: Pictures.of_files(folder, *_part_listed(classes, 0)),
            test_pictures=lambda: Pictures.of_files(folder, *_part_listed(classes, 1)),
        )
    if test_folder is None:
        raise InputError(
            f"{folder} has a folder {train_folder.name!r} but none named {' or '.join(map(repr, TEST_NAMES))}"
        )
    train_classes, test_classes = _class_folders(train_folder), _class_folders(test_folder)
    only = sorted(train_classes.keys() ^ test_classes.keys())
    if only:
        raise InputError(
            f"{train_folder} and {test_folder} do not have the same classes: {', '.join(only[:3])} "
            f"{'is' if len(only) == 1 else 'are'} in one of them alone ({len(only)} in all)"
        )
    return Source(
        folder=folder,
        layout=f"folder per class, {train_folder.name} and {test_folder.name}"
        + unused_parts(test_folder.name, folders),
        files=(train_folder, test_folder),
        classes=tuple(train_classes),
        train=_reader(folder, train_classes, image_size),
        test=_reader(folder, test_classes, image_size),
        train_pictures=lambda: Pictures.of_files(folder, *_listed(train_classes)),
        test_pictures=lambda: Pictures.of_files(folder, *_listed(test_classes)),
        test_files=(test_folder,),
    )


def class_pictures(folder: Path) -> tuple[Pictures, tuple[str, ...]]:
    """All pictures of a folder with a folder per class, and the classes."""
    with reading(folder):
        classes = _class_folders(folder)
        return Pictures.of_files(folder, *_listed(classes)), tuple(classes)


def folder_images(folder: Path, num: int | None = None) -> Iterator[Image.Image]:
    """The pictures in a folder and below it; see `readable_images`."""
    return map(open_rgb, readable_images(folder, num))


def readable_images(folder: Path, num: int | None = None) -> list[Path]:
    """`listed_images`, all decoded once, so that one error names every file that cannot be read."""
    paths = listed_images(folder, num)

    def problem(path: Path) -> str | None:
        try:
            with opened_rgb(path):
                return None
        except UnreadableError as error:
            return str(error)

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
    with reading(folder):
        if not folder.is_dir():
            problem = "a file" if folder.exists() else "not there"
            raise InputError(f"{folder} is {problem}, but a folder of images is needed")
    paths = _images_below(folder)
    if not paths:
        raise InputError(f"{folder} holds no images (looked for {', '.join(('.jpg', '.jpeg', '.png'))} and others)")
    if num is not None:
        paths = [paths[index] for index in measuring_subset(len(paths), num).tolist()]
    return paths
