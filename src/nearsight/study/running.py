"""Studies from start to finish: runs what is missing, alone or beside other runners on the same folders."""

import math
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from nearsight.data import data_folder
from nearsight.data.loading import dataset_spec, find_source
from nearsight.errors import InputError, check_at_least
from nearsight.files import output_folder, read_object
from nearsight.study.design import Cell, Study
from nearsight.study.executors import Executor, LocalExecutor, Work
from nearsight.study.folder import StudyFolder
from nearsight.study.location import DamagedError, PublishedStudy, StudyPublisher, scratch_folder
from nearsight.study.plan import Entry, Plan, PlannedClaims, write_plan
from nearsight.study.results import read_description
from nearsight.study.reusing import ReusableRun, WholeRun, put_run, reusable_runs, reuse_runs
from nearsight.study.runner import StudyListener
from nearsight.train import RunConfig, RunFolder, RunName, Stop, TrainingError, check_images_of_finished
from nearsight.train.planning import MOST_CELLS


def run_study(
    study: Study,
    path: Path,
    *,
    device: torch.device | str = "cpu",
    data_dir: Path | None = None,
    listener: StudyListener | None = None,
    stop: Stop | None = None,
    checkpoint_every: int = 1,
    cells_per_stack: int | None = None,
    executor: Executor | None = None,
    location: StudyPublisher | None = None,
    reuse: Sequence[Path] = (),
    claims: PlannedClaims | None = None,
) -> StudyFolder:
    """Run what is missing of a study in the folder `path`, except for the cells of other runners.

    If a cell cannot go on, the others are finished first; then its error is raised.

    Args:
        device: of this process, which does the study where no executor is given.
        cells_per_stack: the most cells to train at a time; by default as many as pay and as memory takes.
        executor: what trains the cells, if not this process (`nearsight.study.executors`).
        location: where finished runs are published; `path` is then the folder to work in
            (`nearsight.study.location.scratch_folder`), and what is published already is not done again.
        reuse: folders of other studies, whose finished runs are taken where they are of the same config; of folders of
            results, which have no weights, from the tables.
        claims: what the runs are to judge, as `StudyReport.plan` gives it, written into plan.json before they train;
            None: no plan is written, and it is not known afterwards what was planned.
    """
    (folder,) = run_studies(
        [StudyPart(study=study, path=path, listener=listener, location=location, claims=claims)],
        device=device,
        data_dir=data_dir,
        stop=stop,
        checkpoint_every=checkpoint_every,
        cells_per_stack=cells_per_stack,
        executor=executor,
        reuse=reuse,
    )
    return folder


@dataclass(frozen=True, kw_only=True)
class StudyPart:
    """A study, and what goes with it; as the arguments of `run_study`."""

    study: Study
    path: Path
    listener: StudyListener | None = None
    location: StudyPublisher | None = None
    claims: PlannedClaims | None = None


def run_studies(
    parts: Sequence[StudyPart],
    *,
    device: torch.device | str = "cpu",
    data_dir: Path | None = None,
    stop: Stop | None = None,
    checkpoint_every: int = 1,
    cells_per_stack: int | None = None,
    executor: Executor | None = None,
    reuse: Sequence[Path] = (),
) -> list[StudyFolder]:
    """Run what is missing of studies, each in a folder of its own, as `run_study` does. Their cells wait in one queue,
    so that those of one study train beside the last of another; a run that several have is trained once."""
    paths = [part.path.resolve() for part in parts]
    if len(set(paths)) < len(paths):
        raise InputError("two studies share a folder; give each its own")
    executor = executor or LocalExecutor(device=device)
    if len(parts) > 1 and not isinstance(executor, LocalExecutor):
        raise InputError("several studies wait in the queue of one process; run them locally, or one by one")
    begun: list[_Begun] = []
    for part in parts:
        # What one of them has already is not trained for another.
        others = [other.path for other in parts if other is not part and _has_runs(other.path)]
        begun.append(_begun(part, executor, data_dir, checkpoint_every, cells_per_stack, [*reuse, *others]))
    if isinstance(executor, LocalExecutor):
        works, listeners = [each.work for each in begun], [each.listener for each in begun]
        failed = executor.run_together(works, listeners, stop or Stop())
    else:
        failed = executor.run(begun[0].work, begun[0].listener, stop or Stop())
    for each in begun:
        each.end()
    _raise_failures(failed)
    return [each.folder for each in begun]


def _has_runs(path: Path) -> bool:
    return (path / "study.json").exists() and (path / "runs").is_dir()


@dataclass(frozen=True, kw_only=True)
class _Begun:
    """A study whose folder is claimed."""

    part: StudyPart
    folder: StudyFolder
    work: Work
    listener: StudyListener
    reuse: Sequence[Path]
    num_reused: int

    def write_plan(self) -> None:
        part = self.part
        if part.claims is not None:
            _write_plan(part.claims, part.study, self.folder, part.location, self.reuse, num_reused=self.num_reused)

    def end(self) -> None:
        """Write what follows from all runs that are done."""
        self.folder.write_runs()
        if self.part.location is not None:
            self.write_plan()  # others may have planned something meanwhile
            self.part.location.publish_tables(self.folder.path)


def _begun(
    part: StudyPart,
    executor: Executor,
    data_dir: Path | None,
    checkpoint_every: int,
    cells_per_stack: int | None,
    reuse: Sequence[Path],
) -> _Begun:
    """Find what is missing, take what is done elsewhere, and write the plan."""
    check_at_least("checkpoint_every", checkpoint_every, 1)
    if cells_per_stack is not None:
        check_at_least("cells_per_stack", cells_per_stack, 1)
    study, path, location = part.study, part.path, part.location
    folder, listener = StudyFolder(path), part.listener or StudyListener()
    if location is not None:
        location.fetch_description(path)
    folder.check(study)
    if location is not None:
        _exchange([cell.run for cell in study.cells], folder, location, listener)
    missing = [cell for cell in study.cells if not folder.is_done(cell.run)]
    reusable = reusable_runs([cell.run for cell in missing], reuse)
    _check_data([cell.config for cell in missing if cell.run not in reusable], data_dir)
    _check_images(study, {cell.run for cell in missing}, folder, reusable, data_dir)
    executor.check()
    folder.claim(study)
    begun = _Begun(
        part=part,
        folder=folder,
        work=Work(
            folder=path,
            cells=(),
            cells_per_stack=cells_per_stack or MOST_CELLS,
            data_dir=data_dir,
            checkpoint_every=checkpoint_every,
            location=location,
        ),
        listener=listener,
        reuse=reuse,
        num_reused=len(reusable),
    )
    begun.write_plan()
    reuse_runs(reusable, folder)
    if location is not None and reusable:
        _exchange(reusable, folder, location, listener)
    left = [cell for cell in missing if not folder.is_done(cell.run)]
    listener.planned(study.cells, left)
    ranks = _ranks(study, left, folder)
    work = replace(begun.work, cells=tuple(sorted(left, key=lambda cell: ranks[cell.run])), ranks=ranks)
    return replace(begun, work=work)


def _ranks(study: Study, missing: Sequence[Cell], folder: StudyFolder) -> dict[RunName, float]:
    """Run → its place in the queue, the smallest first; equals stay in the study's order, seed by seed.

    What was begun goes on first. Then the longest are begun first: one that is begun last trains on when the others
    have ended, alone and at a low rate. Expected are as many epochs as the finished runs of the condition took on
    average, and before there are any, as many as the recipe allows. Epochs alone are compared, since runs that share a
    stack train on the same images, and others do not wait for the same slots.
    """
    left = {cell.run for cell in missing}
    finished: dict[str, list[int]] = {}
    for cell in study.cells:
        if cell.run not in left:
            finished.setdefault(cell.condition, []).append(_epochs(folder.run_folder(cell.run)))
    ranks = {}
    for cell in missing:
        known = finished.get(cell.condition)
        expected = statistics.mean(known) if known else cell.config.protocol.max_epochs
        begun = folder.run_folder(cell.run).checkpoint.exists()
        ranks[cell.run] = -math.inf if begun else -float(expected)
    return ranks


def _epochs(run: RunFolder) -> int:
    """Of a finished run."""
    return int(read_object(run.path / "result.json", missing=f"{run.path} is not a complete run folder")["epochs"])


def _write_plan(
    claims: PlannedClaims,
    study: Study,
    folder: StudyFolder,
    location: StudyPublisher | None,
    reuse: Sequence[Path],
    *,
    num_reused: int,
) -> None:
    """Write down what is to be judged; runs that are taken from other folders count as finished."""
    others = [*(location.fetch_plans() if location else ()), *_plans_of(study.name, reuse)]
    plan = write_plan(
        folder.path,
        claims,
        conditions=list(dict.fromkeys(cell.condition for cell in study.cells)),
        seeds=study.seed_list,
        finished=lambda: num_reused + sum(folder.is_done(cell["run"]) for cell in folder.cells()),
        others=others,
    )
    if location is not None:
        location.publish_plans(plan.entries)


def _plans_of(name: str, folders: Iterable[Path]) -> list[Entry]:
    """What these folders have planned, of those that are of the same study."""
    same = [folder for folder in folders if read_description(folder)["name"] == name]
    return [entry for folder in same if (plan := Plan.read(folder)) for entry in plan.entries]


def fetch_study(location: PublishedStudy) -> Path:
    """Bring here what is published of a study, except for weights; the folder with it. Nothing is written there."""
    path = scratch_folder(location.url)
    if not location.fetch_description(path):
        raise InputError(f"{location.url} does not hold a study: it has no study.json")
    folder, published = StudyFolder(path), location.published()
    output_folder(path / "runs")  # also of a study of which nothing is done
    _fetch([cell["run"] for cell in read_description(path)["cells"]], folder, location, published, StudyListener())
    return path


def _fetch(
    runs: Iterable[RunName],
    folder: StudyFolder,
    location: PublishedStudy,
    published: Collection[RunName],
    listener: StudyListener,
) -> None:
    """Bring here what is published of these runs and is not here, except for what other runners have."""
    locks = folder.locks()
    for run in runs:
        if run in published:
            try:
                put_run(run, folder, locks, location.fetch)
            except DamagedError as error:
                listener.set_aside(folder.run_folder(run).path, str(error))


def _exchange(
    runs: Collection[RunName], folder: StudyFolder, location: StudyPublisher, listener: StudyListener
) -> None:
    """Bring here what is published of one's own runs, and publish those that are done here and are not there yet."""
    published = location.published()
    _fetch(runs, folder, location, published, listener)
    for run in runs:
        if run not in published and folder.is_done(run):
            location.publish(folder.run_folder(run))


def _raise_failures(failed: Mapping[RunName, Exception]) -> None:
    errors = list({str(error): error for error in failed.values()}.values())
    if len(errors) == 1:
        raise errors[0]
    if errors:
        kind = InputError if all(isinstance(error, InputError) for error in errors) else TrainingError
        raise kind(f"{len(failed)} cells could not be done: " + "; ".join(map(str, errors)))


def _check_images(
    study: Study,
    missing: Collection[RunName],
    folder: StudyFolder,
    reusable: Mapping[RunName, ReusableRun],
    data_dir: Path | None,
) -> None:
    """Refuse to put runs on other images beside those that are done, here or where they are taken from."""
    done = {cell.run: folder.run_folder(cell.run) for cell in study.cells if cell.run not in missing}
    done |= {run: source.source for run, source in reusable.items() if isinstance(source, WholeRun)}
    configs = {cell.run: cell.config for cell in study.cells}
    check_images_of_finished([configs[run] for run in done], list(done.values()), data_dir)


def _check_data(configs: Iterable[RunConfig], data_dir: Path | None) -> None:
    """Refuse a missing data set before anything is written."""
    for config in dict.fromkeys(config.data for config in configs):
        spec = dataset_spec(config.name)
        if spec.find is not None:
            find_source(config.name, spec, data_folder(data_dir), config.image_size or spec.image_size)
