"""Where data lie, and how their folders and lists are read.

They are in the folder the caller names, in `NEARSIGHT_DATA`, or in the user's cache folder, the first that is given. In
folders links are followed, what is hidden is left out, and nothing is skipped in silence.
"""

import os
from collections.abc import Iterator, Sequence
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
    """The path, unless its name cannot be written down: records of runs and caches are in UTF-8."""
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


_LEFT_BY_MACOS = "__MACOSX"
"""The folder with which macOS doubles whatever it packs into a zip file."""


def is_hidden(name: str) -> bool:
    """Whether a file or folder belongs to an editor or the system, and is not data."""
    return name.startswith(".") or name == _LEFT_BY_MACOS


def entries_below(folder: Path) -> Iterator["os.DirEntry[str]"]:
    """Every file and folder below a folder, in no order; one that cannot be listed is an `OSError`."""
    return _entries(str(folder), link=None, above=frozenset())


def _entries(folder: str, *, link: str | None, above: frozenset[tuple[int, int]]) -> Iterator["os.DirEntry[str]"]:
    status = os.stat(folder)
    identity = status.st_dev, status.st_ino
    if identity in above:
        raise InputError(f"{link or folder} leads back to a folder that contains it, in an endless loop; remove it")
    with os.scandir(folder) as entries:
        for entry in entries:
            if is_hidden(entry.name):
                continue
            yield entry
            if entry.is_dir():
                last_link = entry.path if entry.is_symlink() else link
                yield from _entries(entry.path, link=last_link, above=above | {identity})


def read_published(path: Path) -> str:
    """The content of a text file, which its makers wrote in UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is damaged: {error}; get it again") from error


def incomplete(folder: Path, missing: Sequence[str]) -> InputError:
    """What to raise where files of a data set are not in its folder."""
    more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
    return InputError(f"{folder} is not complete: {', '.join(missing[:3])}{more} missing; get it again")
