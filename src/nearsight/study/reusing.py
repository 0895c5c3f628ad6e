"""Runs that another study has already done: a run is what its config says, whichever study asks for it."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from nearsight.errors import InputError
from nearsight.study.folder import StudyFolder
from nearsight.train import RunFolder
from nearsight.train.checksums import copy_complete


def reusable_runs(runs: Iterable[str], paths: Sequence[Path]) -> dict[str, RunFolder]:
    """Run → where it is done, of those that one of these studies has."""
    for path in paths:
        if not (path / "runs").is_dir():
            raise InputError(f"{path} has no runs to reuse: it is not the folder of a study, or its runs are elsewhere")
    others = [StudyFolder(path) for path in paths]
    found = ((run, next((other for other in others if other.is_done(run)), None)) for run in runs)
    return {run: other.run_folder(run) for run, other in found if other is not None}


def reuse_runs(found: dict[str, RunFolder], folder: StudyFolder) -> None:
    """Copy whole runs into a study's folder, except for what somebody is at."""
    locks = folder.locks()
    for run, source in found.items():
        if folder.is_done(run) or not locks.take(run):
            continue
        try:
            _copy(source, folder.run_folder(run))
        except BaseException:
            locks.release(run)
            raise
        locks.clear(run)


def _copy(source: RunFolder, target: RunFolder) -> None:
    """Without its checkpoint, which a run needs that is not done."""
    target.checkpoint.unlink(missing_ok=True)
    copy_complete(source.path, target.path, without=(source.checkpoint.name,))
