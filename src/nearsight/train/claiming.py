"""Whose a folder is: config.json says it, and whoever finds another identity there keeps away."""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nearsight.data import Dataset
from nearsight.errors import InputError
from nearsight.files import RUN, check_kind, check_output_folder, output_folder, read_object, write_json

CONFIG = RUN
OWN_IMAGES = "image-folder"
"""The data set whose name, and so an identity, does not say which images they are."""
_FINGERPRINT = "data_fingerprint"
"""What config.json says of such images beside the settings."""


def check_owner(folder: Path, identity: str, held: Callable[[], str | None], others: str = "another run") -> None:
    """Refuse a folder that is another's, or that nothing can be written to; nothing is changed.

    Args:
        held: reads the identity in config.json; called if there is one.
        others: what the folder of another holds, in words.
    """
    check_output_folder(folder)
    if (folder / CONFIG).exists():
        found = held()
        if found != identity:
            raise InputError(
                f"{folder} holds {others} ({found or 'without identity'}, not {identity}): choose another --out, "
                f"or repeat the settings in its {CONFIG} to continue it"
            )
    elif any(folder.glob("*.safetensors")):
        raise InputError(f"{folder} holds weights but no {CONFIG}; choose another --out")
    check_kind(folder, RUN)


def claim(folder: Path, described: dict[str, Any], dataset: Dataset | None = None) -> None:
    """Make a folder, which was checked, that of whom config.json is to describe, or find that it already is; of a run
    on one's own images, on these."""
    _check_images(folder, dataset)
    output_folder(folder)
    if not (folder / CONFIG).exists():
        write_json(folder / CONFIG, described | _told_of_images(dataset))


def _told_of_images(dataset: Dataset | None) -> dict[str, str]:
    """What is to stand in config.json beside the settings, so that `_check_images` can tell one's own images apart."""
    return {_FINGERPRINT: dataset.fingerprint} if dataset is not None and dataset.name == OWN_IMAGES else {}


def _check_images(folder: Path, dataset: Dataset | None) -> None:
    """Refuse a folder whose run is on other images; None: not known, as in a folder that does not say on which."""
    path = folder / CONFIG
    told = read_object(path, missing=str(folder)).get(_FINGERPRINT) if path.exists() else None
    if dataset is not None and told not in (None, dataset.fingerprint):
        raise InputError(
            f"{folder} holds a run on other images than those in the data folder now: choose another --out, or give "
            "the run the images it began with (--data-dir)"
        )


def check_finished(folder: Path, name: str, load: Callable[[], Dataset]) -> None:
    """`_check_images` of a run that is complete, for which no images are loaded otherwise.

    Args:
        name: of its data set.
        load: loads the images that are given now. Images that cannot be loaded are no others.
    """
    if name == OWN_IMAGES:
        dataset = None
        with contextlib.suppress(InputError):
            dataset = load()
        _check_images(folder, dataset)


def check_still_there(folder: Path) -> None:
    """Refuse to go on where a disk was unmounted, or the folder removed: what comes now would be half a run."""
    if not (folder / CONFIG).is_file():
        raise InputError(f"{folder} has gone while it was written to; put it back, and give the same command again")
