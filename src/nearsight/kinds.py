"""What a folder holds, told by one file of each kind: files of two kinds have the same names, and would be mixed up."""

from pathlib import Path

from nearsight.errors import InputError

RUN, STUDY, PROBES, MEASURED = "config.json", "study.json", "probes.csv", "heads.csv"
_WORDS = {STUDY: "a study", PROBES: "what nearsight probe all left", RUN: "a run", MEASURED: "a measured model"}
"""The first that is there says it: runs and studies have a heads.csv, too."""


def mark_of(folder: Path) -> str | None:
    """The file that says what a folder holds; None where it holds none of these."""
    return next((mark for mark in _WORDS if (folder / mark).exists()), None)


def check_kind(folder: Path, own: str | None) -> None:
    """Refuse a folder that holds something of another kind than the one that is to be written there (None: of any)."""
    found = mark_of(folder)
    if found not in (None, own):
        raise InputError(f"{folder} holds {_WORDS[found]}, whose files would be lost; choose another --out")
