"""What `nearsight probe all` leaves of each probe, and how another such folder takes it over.

A cluster probes each model in a job and a folder of its own; then one more command makes one report of them all.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from nearsight.errors import InputError
from nearsight.files import read_object
from nearsight.probe.scores import ProbeKey, ProbeStore, StoredProbe
from nearsight.probe.segmentation.result import SegmentFolder
from nearsight.train.checksums import PROVENANCE as CERTIFICATE
from nearsight.train.checksums import check_sums, check_there, copy_complete

RESULTS = "results"
PROVENANCE = "provenance"
"""Under which a result says by which code and on which machine it was computed."""


def segment_folder(folder: Path, key: ProbeKey) -> Path:
    """Where a segmentation head is kept."""
    return folder / "segment" / key.identity


def check_reusable(folders: Sequence[Path]) -> None:
    for folder in folders:
        if not (folder / RESULTS).is_dir():
            raise InputError(f"{folder} has no probes to reuse: it is not a folder of nearsight probe all")


def reuse_probe(key: ProbeKey, others: Sequence[Path], out: Path) -> StoredProbe | None:
    """Copy what one of the other folders has of this probe into the folder `out`; None if none has it."""
    for other in others:
        stored = ProbeStore(other / RESULTS).read(key)
        if stored is None or (key.probe == "segment" and not _take_head(key, other, out)):
            continue
        print(f"{stored.told.get('label')}, {key.probe}: taken from {other}", file=sys.stderr)
        return _write(key, stored, other, out)
    return None


def with_certificate(key: ProbeKey, stored: StoredProbe, folder: Path) -> StoredProbe:
    """A result that says where it is from, if its folder does."""
    if PROVENANCE in stored.told or not (folder / CERTIFICATE).is_file():
        return stored
    return _write(key, stored, folder, folder)


def _write(key: ProbeKey, stored: StoredProbe, source: Path, out: Path) -> StoredProbe:
    """Results of earlier versions do not say where they are from, but their folder does."""
    told = stored.told if PROVENANCE in stored.told else {**stored.told, PROVENANCE: _certificate(source)}
    return ProbeStore(out / RESULTS).write(key, stored.scores, told)


def _take_head(key: ProbeKey, other: Path, out: Path) -> bool:
    """Copy a segmentation head and its pictures; False if it is not there as it was left."""
    theirs, ours = SegmentFolder(segment_folder(other, key)), SegmentFolder(segment_folder(out, key))
    if not theirs.is_complete:
        return False
    try:
        check_sums(theirs.path)
        check_there(theirs.path)
    except InputError:
        return False
    if theirs.figures.is_dir():
        copy_complete(theirs.figures, ours.figures)
    copy_complete(theirs.path, ours.path)
    ours.checkpoint.unlink(missing_ok=True)
    return True


def _certificate(folder: Path) -> dict[str, object]:
    """By which code and on which machine the folder was made."""
    held = read_object(folder / CERTIFICATE, missing=f"{folder} does not say where its probes are from")
    return {name: held.get(name) for name in ("commit", "versions", "hardware")}
