"""Runs that another study has already done: a run is what its config says, whichever study asks for it."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from nearsight.errors import InputError
from nearsight.files import LostError
from nearsight.study.folder import StudyFolder
from nearsight.study.lock import Locks
from nearsight.study.tabled_runs import tabled_runs
from nearsight.train import RunFolder, RunName
from nearsight.train.integrity import copy_complete


class ReusableRun(Protocol):
    """A run that is done elsewhere."""

    def put(self, target: RunFolder) -> None:
        """Make it a complete run folder, in place of what there may be of it; for whoever holds its lock."""


@dataclass(frozen=True)
class WholeRun:
    """A run whose folder is there."""

    source: RunFolder

    def put(self, target: RunFolder) -> None:
        """Without its checkpoint, which a run needs that is not done."""
        target.checkpoint.unlink(missing_ok=True)
        copy_complete(self.source.path, target.path, without=(self.source.checkpoint.name,))


def reusable_runs(runs: Iterable[RunName], paths: Sequence[Path]) -> dict[RunName, ReusableRun]:
    """Run → where it is done, of those that one of these studies has, in its run folders or in its tables."""
    for path in paths:
        if not _has_folders(path) and not all((path / name).is_file() for name in ("study.json", "runs.csv")):
            raise InputError(f"{path} has no runs to reuse: it is not the folder of a study, or its runs are elsewhere")
    wanted, found = list(runs), dict[RunName, ReusableRun]()
    # Tables have no weights, so a run is taken from them if no folder of it is named.
    for path in sorted(paths, key=_has_folders, reverse=True):
        left = [run for run in wanted if run not in found]
        found |= _whole_runs(StudyFolder(path), left) if _has_folders(path) else tabled_runs(path, left)
    return found


def _has_folders(path: Path) -> bool:
    return (path / "runs").is_dir()


def _whole_runs(study: StudyFolder, runs: Iterable[RunName]) -> dict[RunName, WholeRun]:
    return {run: WholeRun(study.run_folder(run)) for run in runs if study.is_done(run)}


def reuse_runs(found: Mapping[RunName, ReusableRun], folder: StudyFolder) -> None:
    """Put whole runs into a study's folder, except for what somebody is at."""
    locks = folder.locks()
    for run, source in found.items():
        put_run(run, folder, locks, source.put)


def put_run(run: RunName, folder: StudyFolder, locks: Locks, put: Callable[[RunFolder], None]) -> None:
    """Make a run that is done elsewhere a whole one here, unless it is, or somebody is at it."""
    if folder.is_done(run) or not locks.take(run):
        return
    target = folder.run_folder(run)
    try:
        with locks.guarding({run: target.path}):
            if not folder.is_done(run):  # since the last look
                put(target)
    except LostError:  # somebody else does it
        return
    except BaseException:
        locks.release(run)
        raise
    locks.clear(run)
