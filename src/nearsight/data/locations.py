"""Where data lie: what the caller says, else `NEARSIGHT_DATA`, else the user's cache folder. Nowhere else is looked."""

import os
from pathlib import Path

from nearsight.errors import InputError
from nearsight.files import reading

ENVIRONMENT_VARIABLE = "NEARSIGHT_DATA"


def user_cache_folder() -> Path:
    """`$XDG_CACHE_HOME/nearsight`, or `~/.cache/nearsight`."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else _with_home(Path("~/.cache"))) / "nearsight"


def _with_home(path: Path) -> Path:
    try:
        return path.expanduser()
    except RuntimeError as error:  # neither HOME nor the list of users knows
        raise InputError(
            f"no home folder is known for {path}; set HOME or XDG_CACHE_HOME, or name the folder in full"
        ) from error


def check_spelling(path: Path) -> Path:
    """The path, unless its name is none that can be written down: records of runs and caches are in UTF-8."""
    try:
        str(path).encode()
    except UnicodeEncodeError as error:
        shown = str(path).encode(errors="backslashreplace").decode()
        raise InputError(f"the folder {shown} has a name that is not UTF-8; rename it, or use another") from error
    return path


def data_folder(data_dir: Path | None = None) -> Path:
    """The folder that holds the data sets. One that was named must exist; the default one may still have to be made."""
    if data_dir is not None:
        folder, origin = Path(data_dir), "--data-dir"
    elif os.environ.get(ENVIRONMENT_VARIABLE):
        folder, origin = Path(os.environ[ENVIRONMENT_VARIABLE]), ENVIRONMENT_VARIABLE
    else:
        return check_spelling(user_cache_folder() / "data")
    folder = check_spelling(_with_home(folder))
    with reading(folder):
        if not folder.is_dir():
            reason = "is a file, not a folder" if folder.exists() else "is not there"
            raise InputError(f"the data folder {folder} {reason}; correct {origin}")
    return folder
