"""A study from start to finish: runs what is missing, alone or beside other runners on the same folder."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from nearsight.data import data_folder
from nearsight.data.loading import dataset_spec, find_source
from nearsight.errors import InputError, check_at_least
from nearsight.files import output_folder
from nearsight.study.design import Cell, Study
from nearsight.study.executors import Executor, LocalExecutor, Work
from nearsight.study.folder import StudyFolder
from nearsight.study.location import DamagedError, PublishedStudy, StudyPublisher, scratch_folder
from nearsight.study.plan import Entry, Plan, PlannedClaims, write_plan
from nearsight.study.recipes import StackBy
from nearsight.study.results import read_description
from nearsight.study.reusing import ReusableRun, WholeRun, put_run, reusable_runs, reuse_runs
from nearsight.study.worker import StudyListener
from nearsight.train import RunConfig, RunName, Stop, TrainingError, check_images_of_finished


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
    stack_by: StackBy = "seed",
    executor: Executor | None = None,
    location: StudyPublisher | None = None,
    reuse: Sequence[Path] = (),
    claims: PlannedClaims | None = None,
) -> StudyFolder:
    """Run what is missing of a study in the folder `path`, except for the cells of other runners.

    If a cell cannot go on, the others are finished first; then its error is raised.

    Args:
        device: of this process, which does the study where no executor is given.
        cells_per_stack: the most cells to take at a time; by default all that `stack_by` says.
        stack_by: seed: one seed after the other, so that whole seeds are finished first and runners share them out;
            all: whatever is missing. Either way, as many train at once as memory takes.
        executor: what trains the cells, if not this process (`nearsight.study.executors`).
        location: where finished runs are published; `path` is then the folder to work in
            (`nearsight.study.location.scratch_folder`), and what is published already is not done again.
        reuse: folders of other studies, whose finished runs are taken where they are of the same config; of folders of
            results, which have no weights, from the tables.
        claims: what the runs are to judge, as `StudyReport.plan` gives it, written into plan.json before they train;
            None: no plan is written, and it is not known afterwards what was planned.
    """
    check_at_least("checkpoint_every", checkpoint_every, 1)
    if cells_per_stack is not None:
        check_at_least("cells_per_stack", cells_per_stack, 1)
    folder, listener = StudyFolder(path), listener or StudyListener()
    if location is not None:
        location.fetch_description(path)
    folder.check(study)
    if location is not None:
        _exchange([cell.run for cell in study.cells], folder, location, listener)
    missing = [cell for cell in study.cells if not folder.is_done(cell.run)]
    reusable = reusable_runs([cell.run for cell in missing], reuse)
    _check_data([cell.config for cell in missing if cell.run not in reusable], data_dir)
    _check_images(study, {cell.run for cell in missing}, folder, reusable, data_dir)
    executor = executor or LocalExecutor(device=device)
    executor.check()
    folder.claim(study)
    if claims is not None:
        _write_plan(claims, study, folder, location, reuse, num_reused=len(reusable))
    reuse_runs(reusable, folder)
    if location is not None and reusable:
        _exchange(reusable, folder, location, listener)
    missing = [cell for cell in missing if not folder.is_done(cell.run)]
    listener.planned(study.cells, missing)
    work = Work(
        folder=path,
        groups=_groups(missing, stack_by),
        cells_per_stack=cells_per_stack or len(study.cells),
        data_dir=data_dir,
        checkpoint_every=checkpoint_every,
        location=location,
    )
    failed = executor.run(work, listener, stop or Stop())
    folder.write_runs()
    if location is not None:
        if claims is not None:  # others may have planned something meanwhile
            _write_plan(claims, study, folder, location, reuse, num_reused=len(reusable))
        location.publish_tables(path)
    _raise_failures(failed)
    return folder


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


def _groups(cells: Iterable[Cell], stack_by: StackBy) -> tuple[tuple[Cell, ...], ...]:
    groups: dict[Any, list[Cell]] = {}
    for cell in cells:
        groups.setdefault(cell.seed if stack_by == "seed" else None, []).append(cell)
    return tuple(map(tuple, groups.values()))


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
