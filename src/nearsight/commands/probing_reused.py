"""What `nearsight probe all` leaves of each probe, and how another such folder takes it over.

A cluster probes each model in a job and a folder of its own; then one more command makes one report of them all.
"""

from collections.abc import Sequence
from pathlib import Path

from nearsight.errors import InputError
from nearsight.files import read_object
from nearsight.probe.segmentation.folder import SegmentFolder
from nearsight.probe.stored import ProbeKey, ProbeStore, StoredProbe
from nearsight.train.checksums import check_sums, copy_complete

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
        if stored is not None:
            head = SegmentFolder(segment_folder(other, key))
            if head.is_complete:
                check_sums(head.path)
                ours = SegmentFolder(segment_folder(out, key))
                copy_complete(head.path, ours.path)
                ours.checkpoint.unlink(missing_ok=True)
            # Results of earlier versions do not say where they are from, but their folder does.
            told = stored.told if PROVENANCE in stored.told else {**stored.told, PROVENANCE: _certificate(other)}
            return ProbeStore(out / RESULTS).write(key, stored.scores, told)
    return None


def _certificate(folder: Path) -> dict[str, object]:
    """By which code and on which machine the folder was made."""
    held = read_object(folder / "provenance.json", missing=f"{folder} does not say where its probes are from")
    return {name: held.get(name) for name in ("commit", "versions", "hardware")}
