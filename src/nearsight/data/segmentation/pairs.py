"""Which mask belongs to which image: by a list of names, or by equal names in two folders."""

from collections.abc import Sequence
from pathlib import Path

from nearsight.data.opening import is_image_name
from nearsight.data.segmentation.source import Pairs
from nearsight.data.texts import read_published
from nearsight.errors import InputError


def listed_pairs(names: Path, images: Path, masks: Path) -> Pairs:
    """The pairs that a file names, one a line, images ending in .jpg and masks in .png."""
    lines = read_published(names).split()
    for name in lines:
        if Path(name).name != name:  # a path could point anywhere
            raise InputError(f"{names} has {name!r}, which is no name of an image; get it again")
    pairs = tuple((images / f"{name}.jpg", masks / f"{name}.png") for name in lines)
    _check_present(names.parent, [image for image, _ in pairs], images)
    _check_present(names.parent, [mask for _, mask in pairs], masks)
    return _checked(pairs, names)


def folder_pairs(images: Path, masks: Path, mask_ending: str = ".png") -> Pairs:
    """Every image of a folder, in the order of their names, with the mask of its name."""
    found = sorted(path for path in images.iterdir() if is_image_name(path.name))
    pairs = tuple((image, masks / f"{image.stem}{mask_ending}") for image in found)
    _check_present(images, [mask for _, mask in pairs], masks)
    return _checked(pairs, images)


def missing_parts(folder: Path, parts: Sequence[str]) -> list[str]:
    """Those files and folders that are not there."""
    return [part for part in parts if not (folder / part).exists()]


def incomplete(folder: Path, missing: Sequence[str]) -> InputError:
    more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
    return InputError(f"{folder} is not complete: {', '.join(missing[:3])}{more} missing; get it again")


def _check_present(what: Path, wanted: Sequence[Path], folder: Path) -> None:
    # One listing instead of a question per file: there may be a hundred thousand.
    present = {path.name for path in folder.iterdir()}
    missing = [path.name for path in wanted if path.name not in present]
    if missing:
        raise incomplete(folder, missing)


def _checked(pairs: Pairs, where: Path) -> Pairs:
    if not pairs:
        raise InputError(f"{where} names no images; get it again")
    return pairs
