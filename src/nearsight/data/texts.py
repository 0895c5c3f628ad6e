"""The text files of data sets: lists of names, classes and annotations."""

from pathlib import Path

from nearsight.errors import InputError


def read_published(path: Path) -> str:
    """The content of a text file, which its makers wrote in UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is damaged: {error}; get it again") from error
