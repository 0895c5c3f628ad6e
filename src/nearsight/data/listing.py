"""Behind `nearsight data list`: which data sets there are, and which are on this machine."""

from dataclasses import dataclass
from pathlib import Path

from nearsight.data.cache import cache_file
from nearsight.data.locations import data_folder
from nearsight.data.registry import DATASETS
from nearsight.data.segmentation import SEGMENTATION_SETS
from nearsight.data.source import Source
from nearsight.errors import InputError
from nearsight.files import reading


@dataclass(frozen=True, kw_only=True)
class ListedDataset:
    """A line of the list."""

    name: str
    """What to call it."""
    about: str
    """What it is."""
    state: str
    """"present", "absent", "damaged" or, for a set that nearsight draws, "built in"."""
    folder: Path | None
    """Where it is."""
    detail: str
    """Its layout, or what is wrong with it, or how to get it."""
    decoded: bool
    """Whether it is in the image cache, so that opening it takes no time."""


def _listed(name: str, folder: Path) -> ListedDataset:
    spec = DATASETS[name]
    if spec.find is None:
        return ListedDataset(
            name=name, about=spec.about, state="built in", folder=None, detail="always there", decoded=False
        )
    try:
        with reading(folder):
            source = spec.find(folder, spec.image_size)
    except InputError as error:
        return ListedDataset(
            name=name, about=spec.about, state="damaged", folder=folder, detail=str(error), decoded=False
        )
    if source is None:
        way = f"nearsight data fetch {name}" if spec.downloads else f"put it into {folder}"
        return ListedDataset(name=name, about=spec.about, state="absent", folder=None, detail=way, decoded=False)
    return ListedDataset(
        name=name,
        about=spec.about,
        state="present",
        folder=source.folder,
        detail=source.layout,
        decoded=_is_decoded(name, source, spec.image_size),
    )


def _is_decoded(name: str, source: Source, image_size: int) -> bool:
    try:
        return cache_file(name, source, image_size).is_file()
    except (InputError, OSError):  # a cache that cannot be looked at is none, and the data are there all the same
        return False


def _listed_masks(name: str, folder: Path) -> ListedDataset:
    about = SEGMENTATION_SETS[name].about
    try:
        with reading(folder):
            source = SEGMENTATION_SETS[name].find(folder)
    except InputError as error:
        return ListedDataset(name=name, about=about, state="damaged", folder=folder, detail=str(error), decoded=False)
    if source is None:
        way = f"put it into {folder}"
        return ListedDataset(name=name, about=about, state="absent", folder=None, detail=way, decoded=False)
    detail = f"masks, {source.layout}"
    return ListedDataset(name=name, about=about, state="present", folder=source.folder, detail=detail, decoded=False)


def list_datasets(data_dir: Path | None = None) -> tuple[ListedDataset, ...]:
    """Every data set: those with a class for each image, then those with masks, in the order of their registries."""
    folder = data_folder(data_dir)
    # `image-folder` is whatever the caller says the data folder is, so it cannot be present or absent.
    labelled = (_listed(name, folder) for name in DATASETS if name != "image-folder")
    return (*labelled, *(_listed_masks(name, folder) for name in SEGMENTATION_SETS))
