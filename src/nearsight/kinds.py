"""What a folder holds, told by one file of each kind: files of two kinds have the same names, and would be mixed up."""

from pathlib import Path

from nearsight.errors import InputError

RUN, STUDY, PROBES, MEASURED = "config.json", "study.json", "probes.json", "heads.csv"
_WORDS = {STUDY: "a study", RUN: "a run", PROBES: "what nearsight probe all left", MEASURED: "a measured model"}
"""The first that is there says it: runs and studies have a heads.csv, too."""


def check_kind(folder: Path, own: str | None) -> None:
    """Refuse a folder that holds something of another kind than the one that is to be written there (None: of any)."""
    found = next((mark for mark in _WORDS if (folder / mark).exists()), own)
    if found is not None and found != own:
        raise InputError(f"{folder} holds {_WORDS[found]}, whose files would be lost; choose another --out")
