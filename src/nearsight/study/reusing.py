"""Runs that another study has already done: a run depends on its config alone, not on the study."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from nearsight.configuration import decode
from nearsight.errors import InputError
from nearsight.files import LostError, read_object, write_json, write_text
from nearsight.study.folder import StudyFolder
from nearsight.study.lock import Locks
from nearsight.study.results import COURSE, StudyResults, read_description
from nearsight.study.run_tables import EPOCH_COLUMNS, OF_LATER_VERSIONS, RESULT_COLUMNS, as_in_folder
from nearsight.study.simulation_folder import is_simulation
from nearsight.train import HEADS_COLUMNS, LAYERS_COLUMNS, RunConfig, RunFolder, RunName
from nearsight.train.heads import is_due
from nearsight.train.integrity import CERTIFIED, CHECKSUMS, CONFIG, PROVENANCE, TAKEN_FROM, copy_complete

_OF_PROVENANCE = ("images_per_second", "wall_seconds")
"""Columns of runs.csv that a run says in its provenance.json, the others in its result.json."""
_WAY_OUT = "put back the files as they were committed, or leave this folder out of --reuse"


class ReusableRun(Protocol):
    """A run that is done elsewhere."""

    def put(self, target: RunFolder) -> None:
        """Make it a complete run folder, in place of what there may be of it; the caller holds its lock."""


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
    """Put whole runs into a study's folder, except for what other runners have."""
    locks = folder.locks()
    for run, source in found.items():
        put_run(run, folder, locks, source.put)


def put_run(run: RunName, folder: StudyFolder, locks: Locks, put: Callable[[RunFolder], None]) -> None:
    """Make a run that is done elsewhere a whole one here, unless it is, or another runner has it."""
    if folder.is_done(run) or not locks.take(run):
        return
    target = folder.run_folder(run)
    try:
        with locks.guarding({run: target.path}):
            if not folder.is_done(run):  # since the last look
                put(target)
    except LostError:  # another runner does it
        return
    except BaseException:
        locks.release(run)
        raise
    locks.clear(run)


@dataclass(frozen=True, kw_only=True, eq=False)
class TabledRun:
    """A run of which tables alone are left: committed results keep no run folders, but nearly all that those said.

    It becomes a complete run folder without weights and without a log. What tables do not have stays absent; what they
    have is the same to the last digit. It is checked before anything is written: tables that were cut short, or that
    are not of one study, would otherwise become a run that looks whole.
    """

    config: RunConfig
    result: Mapping[str, Any]
    tables: Mapping[str, pd.DataFrame]
    """File of a run folder → what it holds."""
    provenance: Mapping[str, Any]

    def put(self, target: RunFolder) -> None:
        """Make the run's folder. What makes it complete comes last, and what another training left there goes first:
        its weights, its log and its single images would pass for those of this run."""
        marks = target.path / PROVENANCE, target.path / CHECKSUMS
        for path in (*marks, target.checkpoint, target.model, target.events, target.heads_per_image):
            path.unlink(missing_ok=True)
        write_json(target.path / CONFIG, self.config.to_json())
        for name, table in self.tables.items():
            write_text(target.path / name, table.to_csv(index=False))
        write_json(target.path / "result.json", self.result)
        target.finish(self.provenance)


def tabled_runs(folder: Path, wanted: Collection[RunName]) -> dict[RunName, TabledRun]:
    """Run → what a folder of results says of it, of the wanted runs that are there."""
    if is_simulation(folder):
        raise InputError(f"{folder} is of a simulation, which has no runs to reuse; leave it out of --reuse")
    cells = {cell["run"]: cell for cell in read_description(folder)["cells"] if cell["run"] in wanted}
    if not cells:
        return {}
    results = StudyResults.read(folder)
    origin = _origin(folder, results.name)
    unknown = [name for name in OF_LATER_VERSIONS if results.runs[name].isna().all()]
    parts = {
        name: dict(iter(getattr(results, name).groupby("run"))) for name in ("heads", "layers", "history", "course")
    }
    found: dict[RunName, TabledRun] = {}
    for row in results.runs.drop(columns=unknown).to_dict("records"):
        run = row["run"]
        if run not in cells:
            continue
        if run in found:
            raise InputError(f"{folder / 'runs.csv'} is damaged: it has run {run} twice; {_WAY_OUT}")
        frames = {name: of_runs.get(run, getattr(results, name).iloc[:0]) for name, of_runs in parts.items()}
        config = _config(folder, cells[run])
        _check(folder, config, row, frames)
        found[run] = _tabled(config, row, frames, origin)
    return found


def _tabled(
    config: RunConfig, row: Mapping[Any, Any], frames: Mapping[str, pd.DataFrame], origin: Mapping[str, Any]
) -> TabledRun:
    values = as_in_folder({name: row[name] for name in RESULT_COLUMNS if name in row})
    named = {"identity": config.identity}
    # Where heads were followed, those of the model are among those of the course.
    heads = frames["course"] if config.measure_every else frames["heads"].assign(epoch=row["best_epoch"])
    return TabledRun(
        config=config,
        result={**named, **{name: value for name, value in values.items() if name not in _OF_PROVENANCE}},
        tables={
            "heads.csv": heads[list(HEADS_COLUMNS)],
            "layers.csv": frames["layers"][list(LAYERS_COLUMNS)],
            "history.csv": frames["history"][list(EPOCH_COLUMNS)],
        },
        provenance={**origin, "seed": config.seed, **named, **{name: values[name] for name in _OF_PROVENANCE}},
    )


def _origin(folder: Path, study: str) -> dict[str, Any]:
    """Which code and machines a run of the study may be of: results say it of all their runs together."""
    held = read_object(folder / PROVENANCE, missing=f"{folder} does not say how it was made", way_out=f"; {_WAY_OUT}")
    origin: dict[str, Any] = {}
    for name in CERTIFIED:
        values = held.get(name)
        origin[name] = values[0] if isinstance(values, list) and len(values) == 1 else values
    return {**origin, TAKEN_FROM: study}


def _config(folder: Path, cell: Mapping[str, Any]) -> RunConfig:
    path, run = folder / "study.json", cell["run"]
    try:
        config = decode(RunConfig, cell["config"])
    except InputError as error:
        raise InputError(f"{path}: the config of run {run} cannot be read: {error}; {_WAY_OUT}") from error
    if config.identity != run:
        raise InputError(f"{path} is damaged: the config of run {run} is that of run {config.identity}; {_WAY_OUT}")
    return config


def _check(folder: Path, config: RunConfig, row: Mapping[Any, Any], frames: Mapping[str, pd.DataFrame]) -> None:
    """Refuse tables that do not hold the whole of a run, or of which one is another study's."""
    problem = (
        _problem_of_history(row, frames["history"])
        or _problem_of_heads(frames["heads"], frames["layers"])
        or (_problem_of_course(config, row, frames["heads"], frames["course"]) if config.measure_every else "")
    )
    if problem:
        raise InputError(f"{folder / problem}, of run {config.identity}; {_WAY_OUT}")


def _problem_of_history(row: Mapping[Any, Any], history: pd.DataFrame) -> str:
    epochs = list(history["epoch"])
    if len(epochs) != row["epochs"] or epochs != list(range(1, len(epochs) + 1)):
        return f"history.csv is damaged: it does not have the {row['epochs']} epochs that runs.csv states"
    if list(history.loc[history["epoch"] == row["best_epoch"], "val_acc"]) != [row["best_val_acc"]]:
        return "history.csv is damaged: it does not have the best epoch that runs.csv states"
    return ""


def _problem_of_heads(heads: pd.DataFrame, layers: pd.DataFrame) -> str:
    if set(heads["layer"]) != set(layers["layer"]):
        return "heads.csv is damaged: it does not have the layers that layers.csv has"
    return ""


def _problem_of_course(config: RunConfig, row: Mapping[Any, Any], heads: pd.DataFrame, course: pd.DataFrame) -> str:
    due = {epoch for epoch in range(int(row["epochs"]) + 1) if is_due(config, epoch)}
    if len(heads) and not due <= set(course["epoch"]):
        return f"{COURSE} is damaged or missing: it does not have the heads at all epochs at which they were measured"
    if not np.array_equal(_numbers(course[course["epoch"] == row["best_epoch"]]), _numbers(heads), equal_nan=True):
        return f"{COURSE} is damaged: it does not have the heads of the best epoch that heads.csv has"
    return ""


def _numbers(heads: pd.DataFrame) -> NDArray[np.float64]:
    return heads[[name for name in HEADS_COLUMNS if name not in ("epoch", "layer_name")]].to_numpy(dtype=np.float64)
