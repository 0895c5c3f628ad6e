"""Whose a folder is: config.json says it, and whoever finds another identity there keeps away."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from nearsight.errors import InputError
from nearsight.files import check_output_folder, output_folder, remove_remains, write_json
from nearsight.kinds import RUN, check_kind

CONFIG = RUN


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


def claim(folder: Path, described: dict[str, Any]) -> None:
    """Make a folder, which was checked, that of whom config.json is to describe, or find that it already is."""
    output_folder(folder)
    remove_remains(folder)
    if not (folder / CONFIG).exists():
        write_json(folder / CONFIG, described)


def check_still_there(folder: Path) -> None:
    """Refuse to go on where a disk was unmounted, or the folder removed: what comes now would be half a run."""
    if not (folder / CONFIG).is_file():
        raise InputError(f"{folder} has gone while it was written to; put it back, and give the same command again")
