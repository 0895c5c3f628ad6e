"""A folder of one's own: images and masks of the same names, and the names of the classes in a JSON file.

FOLDER/
  images/NAME.jpg        any picture that is read elsewhere, also in folders below
  masks/NAME.png         one number per pixel: a palette PNG, or a grey one of 8 or 16 bits
  classes.json           ["road", "sky"] for 0, 1, … or {"0": "road", "7": "sky"}; numbers of one name are one class

Where images and masks have the folders `train` and `val` (or `test`), those are the parts; otherwise a share of the
images is held out, always the same ones.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nearsight.data.decoding import UnreadableError, is_image_name, stored_size
from nearsight.data.image_folder import TEST_NAMES, TRAIN_NAMES
from nearsight.data.locations import check_spelling, entries_below, is_hidden
from nearsight.data.segmentation.masks import (
    IGNORED,
    SEGMENTATION_SETS,
    LabelTable,
    MaskedImages,
    Pairs,
    SegmentationSet,
)
from nearsight.errors import InputError, check_fraction, check_number
from nearsight.files import check_file, reading
from nearsight.lazy import np

IMAGES, MASKS, CLASSES = "images", "masks", "classes.json"
LARGEST_NUMBER = 2**16 - 1
"""That a mask of 16 bits can hold."""
_LOSSY = (".jpeg", ".jpg", ".webp")
"""Endings of formats that change numbers a little."""
_SHOWN, _NUMBERS_SHOWN = 3, 12


@dataclass(frozen=True, kw_only=True)
class MaskedFolder:
    """Where a data set of one's own is, and how it is read."""

    folder: Path
    """With `images` in it; or of the images themselves, if `masks` is given."""
    masks: Path | None = None
    """Folder of the masks, in `folder` or anywhere; by default `masks` in it."""
    classes: Path | None = None
    """The JSON file of the classes; by default `classes.json` beside the images' folder, or in it."""
    ignored: int = IGNORED
    """Number of the pixels that count nowhere; one that no mask has, such as −1, leaves none out."""
    test_share: float = 0.2
    """Of the images, held out where there are no parts."""
    split_seed: int = 0
    """Of that choice."""

    def __post_init__(self) -> None:
        check_fraction("the share of test images", self.test_share)
        check_number("the seed of the split", self.split_seed)

    def load(self) -> SegmentationSet:
        """The data set; a wrong folder, pair or name of a class is an error. Masks are read when they are needed, or
        by `check_pairs`."""
        check_spelling(self.folder)
        images, masks = self._places()
        root = Path(os.path.commonpath([images, masks]))
        names, labels = self._labels(images, root, masks)
        train, test = self._parts(images, masks)
        return SegmentationSet(
            name=_name(root),
            folder=root,
            class_names=names,
            train=MaskedImages(train, labels),
            test=MaskedImages(test, labels),
            labels_by_content=True,
        )

    def all_pairs(self) -> Pairs:
        """Every image with its mask, whatever their part."""
        return _pairs(*self._places())

    def numbers_of(self, name: str) -> tuple[int, ...] | None:
        """The numbers of the class with this name; None where the folder does not say what its numbers mean."""
        file = Path(self.folder) / (self.classes or CLASSES)
        return tuple(number for number, of in _read_names(file).items() if of == name) if file.exists() else None

    def _places(self) -> tuple[Path, Path]:
        """The folders of images and of masks."""
        folder = Path(self.folder)
        if not folder.is_dir():
            problem = "is a file" if folder.exists() else "is not there"
            raise InputError(f"{folder} {problem}, but a folder with {IMAGES} and {MASKS} is needed")
        images = folder / IMAGES if (folder / IMAGES).is_dir() else folder
        if images == folder and self.masks is None:
            raise InputError(
                f"{folder} has no folder {IMAGES!r}; put pictures into {IMAGES} and their masks into {MASKS}, or name "
                "both folders: --data IMAGES --masks MASKS"
            )
        wanted = Path(MASKS) if self.masks is None else Path(self.masks)
        masks = folder / wanted
        if not masks.is_dir() and self.masks is not None:
            masks = wanted
        if not masks.is_dir():
            raise InputError(f"{masks} is not a folder, but the masks of {images} are needed; say where with --masks")
        images, masks = images.resolve(), masks.resolve()
        if images == masks:
            raise InputError(f"{images} is said to hold images and masks; put them into a folder each")
        return images, masks

    def _labels(self, images: Path, root: Path, masks: Path) -> tuple[tuple[str, ...], LabelTable]:
        given = [] if self.classes is None else [Path(self.folder) / self.classes, Path(self.classes)]
        file = next((path for path in given or [root / CLASSES, images / CLASSES] if path.exists()), None)
        if file is None:
            wanted = self.classes or root / CLASSES
            raise InputError(
                f"{wanted} is not there; write the names of the classes into it, such as "
                f'["road", "sky"] for 0 and 1, or {{"0": "road", "7": "sky"}}{_first_numbers(masks)}'
            )
        name_of = _read_names(file)
        if self.ignored in name_of:
            raise InputError(
                f"{file} names {self.ignored}, which is the number of ignored pixels; give another --ignore-value, "
                "such as -1 for none"
            )
        names = tuple(dict.fromkeys(name for _, name in sorted(name_of.items())))
        if len(names) > IGNORED:
            raise InputError(f"{file} names {len(names)} classes, but there can be {IGNORED} at most")
        way_out = f"; name it in {file.name}, or say with --ignore-value that it counts nowhere"
        ignored = frozenset({self.ignored})
        return names, LabelTable({number: names.index(name) for number, name in name_of.items()}, ignored, way_out)

    def _parts(self, images: Path, masks: Path) -> tuple[Pairs, Pairs]:
        found = {path.name.lower(): path for path in _subfolders(images)}
        train = next((found[name] for name in TRAIN_NAMES if name in found), None)
        test = next((found[name] for name in TEST_NAMES if name in found), None)
        if train is None and test is None:
            pairs = _pairs(images, masks)
            if len(pairs) < 2:
                raise InputError(f"{images} has one image, but one to train on and one to test on are needed; add more")
            return self._split(pairs, images)
        if train is None or test is None:
            have, lack = (train or test), "val" if test is None else "train"
            assert have is not None
            raise InputError(f"{images} has a part {have.name!r} but no {lack!r}; add it, or do without parts")
        others = [path.name for path in images.iterdir() if path not in (train, test) and not is_hidden(path.name)]
        beside = sorted(name for name in others if is_image_name(name) or name.lower() in TRAIN_NAMES)
        if beside:
            raise InputError(f"{images} has {_few(beside)} beside {train.name} and {test.name}; move it there")
        of_masks = {path.name.lower(): path for path in _subfolders(masks)}
        parts = []
        for part in (train, test):
            if part.name.lower() not in of_masks:
                raise InputError(f"{masks} has no folder {part.name!r}, but {images} has; parts have the same names")
            parts.append(_pairs(part, of_masks[part.name.lower()]))
        return parts[0], parts[1]

    def _split(self, pairs: Pairs, images: Path) -> tuple[Pairs, Pairs]:
        """By a digest of each name: an image that is added or removed moves hardly any other."""

        def place(image: Path) -> str:
            return hashlib.sha256(f"{self.split_seed}/{image.relative_to(images).as_posix()}".encode()).hexdigest()

        number = min(max(1, round(self.test_share * len(pairs))), len(pairs) - 1)
        held_out = {image for image, _ in sorted(pairs, key=lambda pair: place(pair[0]))[:number]}
        return (
            tuple(pair for pair in pairs if pair[0] not in held_out),
            tuple(pair for pair in pairs if pair[0] in held_out),
        )


def _name(root: Path) -> str:
    """That of the folder, unless a set is known by it."""
    return f"own {root.name}" if root.name in SEGMENTATION_SETS else root.name or "own"


def _subfolders(folder: Path) -> Iterator[Path]:
    with reading(folder):
        yield from (path for path in sorted(folder.iterdir()) if path.is_dir() and not is_hidden(path.name))


def _pairs(images: Path, masks: Path) -> Pairs:
    """Every image below a folder, in the order of their names, with the mask of its name."""
    of_images, of_masks = _by_stem(images), _by_stem(masks)
    for folder, found in ((images, of_images), (masks, of_masks)):
        if not found:
            raise InputError(f"{folder} holds no pictures; put {'masks' if folder == masks else 'images'} there")
    alone = sorted(of_images.keys() - of_masks.keys())
    if alone:
        raise InputError(f"{len(alone)} image(s) in {images} have no mask of their name in {masks}: {_few(alone)}")
    alone = sorted(of_masks.keys() - of_images.keys())
    if alone:
        raise InputError(f"{len(alone)} mask(s) in {masks} have no image of their name in {images}: {_few(alone)}")
    lossy = sorted(path.name for path in of_masks.values() if path.name.lower().endswith(_LOSSY))
    if lossy:
        raise InputError(f"{masks} has masks in a format that changes numbers: {_few(lossy)}; save them as PNG")
    return tuple((of_images[stem], of_masks[stem]) for stem in sorted(of_images))


def _by_stem(folder: Path) -> dict[str, Path]:
    """The pictures below a folder by their names without endings."""
    found: dict[str, Path] = {}
    with reading(folder):
        for entry in entries_below(folder):
            if not is_image_name(entry.name) or entry.is_dir():
                continue
            path = Path(entry.path)
            stem = path.relative_to(folder).with_suffix("").as_posix()
            if stem in found:
                raise InputError(f"{path} and {found[stem].name} have one name; rename or remove one of them")
            found[stem] = path
    return found


def _few(names: Iterable[str]) -> str:
    names = list(names)
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")


def _read_names(file: Path) -> dict[int, str]:
    """Number → name of its class."""
    check_file(file)
    try:
        with reading(file):
            value: Any = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # not JSON, not UTF-8, or brackets without end
        raise InputError(f"{file} is not JSON: {' '.join(str(error).split())}; write a list of names") from error
    if isinstance(value, list):
        if len(set(map(str, value))) < len(value):
            twice = next(name for name in value if value.count(name) > 1)
            raise InputError(f"{file} lists {twice!r} twice; numbers of one class are written as a mapping")
        value = {str(number): name for number, name in enumerate(value)}
    if not isinstance(value, Mapping) or not value:
        raise InputError(f'{file} holds no names of classes; write ["road", "sky"], or {{"0": "road", "7": "sky"}}')
    names: dict[int, str] = {}
    for number, name in value.items():
        if not isinstance(name, str) or not name.strip():
            raise InputError(f"{file} gives {number} the name {name!r}, but a name is text; write it in quotes")
        if not (number.isascii() and number.isdecimal() and len(number) <= 5 and int(number) <= LARGEST_NUMBER):
            raise InputError(f"{file} names {number!r}, but numbers of masks go from 0 to {LARGEST_NUMBER}")
        names[int(number)] = name.strip()
    return names


def _first_numbers(masks: Path) -> str:
    """What the first mask holds, as a hint; nothing where there is none that can be read."""
    try:
        first = min(_by_stem(masks).items())[1]
        numbers = MaskedImages([(first, first)], LabelTable({}, frozenset())).numbers(0)
    except (InputError, ValueError):
        return ""
    found = np.unique(numbers).tolist()
    more = f" and {len(found) - _NUMBERS_SHOWN} more" if len(found) > _NUMBERS_SHOWN else ""
    return f" ({first.name} has the numbers {', '.join(map(str, found[:_NUMBERS_SHOWN]))}{more})"


def check_pairs(images: MaskedImages) -> None:
    """Refuse pairs of which one cannot be read, sizes that differ and numbers without a class, all files in one error.

    Of images only the heads of their files are read, of masks all; one for each core at a time.
    """

    def problem(index: int) -> str | None:
        image, mask = images.pairs[index]
        try:
            columns, rows = stored_size(image)
        except UnreadableError as error:
            return f"{image} cannot be read: {error}"
        try:
            found = tuple(images.mask(index).shape)
        except InputError as error:
            return str(error)
        if found != (rows, columns):
            return f"{mask} is {found[1]}×{found[0]}, but its image {image.name} is {columns}×{rows}"
        return None

    with ThreadPoolExecutor(os.cpu_count()) as threads:
        problems = [found for found in threads.map(problem, range(len(images))) if found is not None]
    if problems:
        more = f" (and {len(problems) - 1} more pairs are wrong)" if len(problems) > 1 else ""
        raise InputError(f"{problems[0]}{more}")
