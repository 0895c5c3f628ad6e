"""Where data lie: what the caller says, else `NEARSIGHT_DATA`, else the user's cache folder. Nowhere else is looked."""

import os
from pathlib import Path

from nearsight.errors import InputError

ENVIRONMENT_VARIABLE = "NEARSIGHT_DATA"


def user_cache_folder() -> Path:
    """`$XDG_CACHE_HOME/nearsight`, or `~/.cache/nearsight`."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "nearsight"


def data_folder(data_dir: Path | None = None) -> Path:
    """The folder that holds the data sets. One that was named must exist; the default one may still have to be made."""
    if data_dir is not None:
        folder, origin = Path(data_dir), "--data-dir"
    elif os.environ.get(ENVIRONMENT_VARIABLE):
        folder, origin = Path(os.environ[ENVIRONMENT_VARIABLE]), ENVIRONMENT_VARIABLE
    else:
        return user_cache_folder() / "data"
    folder = folder.expanduser()
    if not folder.is_dir():
        reason = "is a file, not a folder" if folder.exists() else "is not there"
        raise InputError(f"the data folder {folder} {reason}; correct {origin}")
    return folder
