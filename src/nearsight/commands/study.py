"""`nearsight study {list,power,run,show}`: the papers' experiments, with error bars."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from nearsight.commands.options import DEFAULT_ADDRESS, Common, Engine, check_engine, dispatch, parse, stoppable
from nearsight.errors import InputError, check_at_least
from nearsight.files import is_url
from nearsight.lazy import torch
from nearsight.papers import catalogue, find_study_or_simulation
from nearsight.study.recipes import Scale, StackBy
from nearsight.train import Stop

if TYPE_CHECKING:
    from nearsight.study import Simulation, Study, StudyFolder
    from nearsight.study.executors import Executor
    from nearsight.study.location import StudyPublisher
    from nearsight.study.plan import PlannedClaims

_OF_TRAININGS = ("reuse", "stack_by", "cells_per_stack", "engine", "workers", "address", "checkpoint_every")
"""Options that a simulation does not use."""
_USAGE = """usage: nearsight study list
       nearsight study run NAME [--seeds N] [--scale {full,small}] [--engine ENGINE] [OPTIONS]
       nearsight study show NAME_OR_DIR

nearsight study run --help shows all options."""
_NAME = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="NAME")]


@dataclass(frozen=True, kw_only=True)
class ListOptions:
    """Show every study."""

    json: bool = False
    """Print one machine-readable object instead of text."""


@dataclass(frozen=True, kw_only=True)
class RunOptions(Common):
    """Run what is missing of a study, and write its tables, figures and verdict when all is done.

    Stopped or killed, it continues when the same command is given again. Several at once on one folder share the cells.
    """

    name: _NAME
    """The study, as `nearsight study list` calls it."""
    seeds: int | None = None
    """Seeds per condition; the recipe's own number by default. At small scale, at most 2 are run."""
    scale: Scale = "full"
    """small: a narrow model, few images and two epochs, to test the path on any machine. It is no result."""
    out: str | None = None
    """Folder of the study; runs/NAME by default. Or a place for its results that fsspec reaches: s3://BUCKET/PATH, …"""
    reuse: tuple[Path, ...] = ()
    """Folders of other studies: their finished runs are taken where they are of the same config. Of folders of results,
    as results/NAME, they are taken from the tables and have no weights."""
    stack_by: StackBy = "seed"
    """What trains together: the conditions of one seed, one seed after the other, or all. It changes no number."""
    cells_per_stack: int | None = None
    """The most cells to take at a time; smaller ones are shared out more evenly among workers. It changes no number."""
    engine: Engine = "local"
    """What trains the cells: this process, several of this machine (one per GPU), or a Ray cluster."""
    workers: int | None = None
    """Of the engine processes: how many; by default one per GPU, or on a CPU one per core."""
    address: str = DEFAULT_ADDRESS
    """Of the engine ray: auto (the cluster that runs here), local (a new one of this machine), or HOST:PORT."""
    checkpoint_every: int = 1
    """Epochs between checkpoints; a kill costs those since the last, SIGINT and SIGTERM none. It changes no number."""


@dataclass(frozen=True, kw_only=True)
class ShowOptions(ListOptions):
    """How far a study is, who works on it, and what it gave: means over seeds with their 95 % intervals."""

    name: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="NAME_OR_DIR")]
    """The study's folder or URL, or its name: then what is in runs/NAME, results/NAME or runs/NAME-small."""


@dataclass(frozen=True, kw_only=True)
class PowerOptions(ListOptions):
    """What so many seeds of a study can show, before it runs: its own verdicts on made-up runs."""

    name: _NAME
    """The study, as `nearsight study list` calls it."""
    seeds: tuple[int, ...] = ()
    """Numbers of seeds per condition; the recipe's own, 2, 3, 5 and 10 by default."""
    pilot: Path | None = None
    """Folder of earlier runs of these conditions, whose means and spread are taken; by default the paper's means."""
    draws: int = 100
    """Studies that are made up, for each number of seeds, with the effects and without any."""


def main(arguments: Sequence[str]) -> int:
    return dispatch("study", arguments, {"list": _list, "power": _power, "run": _run, "show": _show}, _USAGE)


def _list(arguments: list[str]) -> int:
    options = parse(ListOptions, arguments, prog="nearsight study list")
    known = catalogue()
    rows = [
        {"name": name, "cells": _num_cells(name, about), "about": about.splitlines()[0] if about else ""}
        for name, about in sorted(known.items())
    ]
    if options.json:
        print(json.dumps({"studies": rows}, ensure_ascii=False))
        return 0
    width = max(map(len, known))
    for row in rows:
        print(f"  {row['name']:<{width}}  {row['cells']:>3} cells  {row['about']}")
    return 0


def _num_cells(name: str, about: str) -> int:
    """As the line `Cost` of its recipe says; making the study, for those that do not say it, loads what draws it."""
    stated = re.search(r"^ *Cost +(\d+) cells", about, re.MULTILINE)
    return int(stated[1]) if stated else len(find_study_or_simulation(name)().cells)


def _power(arguments: list[str]) -> int:
    options = parse(PowerOptions, arguments, prog="nearsight study power")
    check_at_least("draws", options.draws, 1)
    for number in options.seeds:
        check_at_least("seeds", number, 1)
    study = find_study_or_simulation(options.name)()
    from nearsight.study import Simulation, StudyResults

    if isinstance(study, Simulation):
        raise InputError(f"study {options.name!r} simulates its own data; its claims have no numbers to draw around")
    from nearsight.papers import declare_all
    from nearsight.report.power import NUMBERS_OF_SEEDS, of_paper, of_runs, power_table

    declare_all()
    assumed = of_paper(study) if options.pilot is None else of_runs(StudyResults.read(options.pilot))
    seeds = options.seeds or sorted({*NUMBERS_OF_SEEDS, len(study.seed_list)})
    found = power_table(study, assumed, seeds=seeds, num_draws=options.draws)
    if options.json:
        claims = found.numbers.to_dict(orient="records")
        print(json.dumps({"study": study.name, "claims": claims, "notes": found.notes}, ensure_ascii=False))
    else:
        print(found.markdown())
    return 0


def _run(arguments: list[str]) -> int:
    options = parse(RunOptions, arguments, prog="nearsight study run")
    recipe = find_study_or_simulation(options.name)
    from nearsight.study import Simulation
    from nearsight.study.location import StudyPublisher

    study = recipe() if options.seeds is None else recipe(seeds=options.seeds)
    if options.scale == "small":
        study = study.small()
    location = StudyPublisher(options.out) if options.out and is_url(options.out) else None
    out = Path(options.out) if options.out else _default_folder(study.name, study.scale)
    if isinstance(study, Simulation):
        _check_for_simulation(options, study.name)
        simulation = study
        return stoppable(lambda stop: _run_simulation(simulation, out, options, stop))
    executor = _executor(options)
    return stoppable(lambda stop: _run_and_report(study, out, location, options, executor, stop))


def _run_simulation(simulation: Simulation, out: Path, options: RunOptions, stop: Stop) -> int:
    from nearsight.commands.study_progress import SimulationProgress
    from nearsight.commands.study_tables import described_simulation, simulation_table
    from nearsight.study import SimulationResults, run_simulation

    with SimulationProgress(simulation.name, simulation.responses) as progress:
        folder = run_simulation(
            simulation, out, device=options.torch_device, listener=progress, stop=stop, claims=_claims(simulation)
        )
    from nearsight.report.page.folders import write_folder_page
    from nearsight.report.simulations import write_simulation_report

    results = SimulationResults.read(folder.path)
    write_simulation_report(results, out)
    write_folder_page(out)
    if options.json:
        print(json.dumps({"folder": str(out), **described_simulation(results)}, ensure_ascii=False))
    else:
        print(simulation_table(results))
        print(f"\nTables, figures, verdict and page: {out}")
    sys.stdout.flush()
    return 0


def _check_for_simulation(options: RunOptions, name: str) -> None:
    for field in fields(RunOptions):
        if field.name in _OF_TRAININGS and getattr(options, field.name) != field.default:
            option = f"--{field.name.replace('_', '-')}"
            raise InputError(f"study {name!r} is one tensor program, for one device; leave out {option}")
    if options.out and is_url(options.out):
        raise InputError(f"the tables of study {name!r} are written to a folder; {options.out} is not one")


def _executor(options: RunOptions) -> Executor:
    from nearsight.study.executors import LocalExecutor, ProcessesExecutor, RayExecutor

    check_engine(options.engine, workers=options.workers, address=options.address)
    if options.engine == "processes":
        return ProcessesExecutor(device=options.torch_device, workers=options.workers)
    if options.engine == "ray":
        # The workers' devices need not be here.
        return RayExecutor(address=options.address, device=options.device)
    return LocalExecutor(device=options.torch_device)


def _claims(study: Study | Simulation) -> PlannedClaims:
    """What is declared for it, to be written down before its runs."""
    from nearsight.report.studies import report_of

    return report_of(study.name).plan()


def _default_folder(name: str, scale: Scale) -> Path:
    return Path("runs") / (name if scale == "full" else f"{name}-{scale}")


def _run_and_report(
    study: Study, out: Path, location: StudyPublisher | None, options: RunOptions, executor: Executor, stop: Stop
) -> int:
    from nearsight.commands.study_progress import StudyProgress
    from nearsight.commands.study_tables import described, table
    from nearsight.study import run_study
    from nearsight.study.location import scratch_folder

    place = location.url if location else str(out)
    out = scratch_folder(location.url) if location else out
    from nearsight.report.page.live import LivePage

    with StudyProgress(study.name) as progress:
        folder = run_study(
            study,
            out,
            data_dir=options.data_dir,
            listener=LivePage(out, progress),
            stop=stop,
            checkpoint_every=options.checkpoint_every,
            cells_per_stack=options.cells_per_stack,
            stack_by=options.stack_by,
            executor=executor,
            location=location,
            reuse=options.reuse,
            claims=_claims(study),
        )
    left = [cell.run for cell in study.cells if not folder.is_done(cell.run)]
    if not left:
        _write_report(folder, options)
        if location is not None:
            location.publish_tables(out)
    if options.json:
        print(json.dumps({"folder": place, "left": left, **described(folder)}, ensure_ascii=False))
        return 0
    print(table(folder))
    if left:
        print(f"\n{len(left)} cells are with other runners; when they are done, the same command writes the report.")
    else:
        print(f"\nTables, figures, verdict and page: {place}")
    sys.stdout.flush()
    return 0


def _write_report(folder: StudyFolder, options: RunOptions) -> None:
    from nearsight.commands.exploring import explorer_of_study
    from nearsight.report.page.folders import write_folder_page
    from nearsight.report.writing import write_study_report

    results = folder.write_tables()
    write_study_report(results, folder.path)
    # A cluster's devices need not be here, and a few forwards take no GPU.
    device = torch.device("cpu") if options.engine == "ray" else options.torch_device
    explorer = explorer_of_study(folder.path, results, data_dir=options.data_dir, device=device)
    write_folder_page(folder.path, explorer=explorer)


def _show(arguments: list[str]) -> int:
    options = parse(ShowOptions, arguments, prog="nearsight study show")
    path = None if is_url(options.name) else _find_folder(options.name)
    from nearsight.commands.study_tables import described, described_simulation, simulation_table, table
    from nearsight.study import SimulationResults, StudyFolder, is_simulation
    from nearsight.study.location import PublishedStudy
    from nearsight.study.running import fetch_study

    path = path or fetch_study(PublishedStudy(options.name))
    if is_simulation(path):
        results = SimulationResults.read(path)
        description, shown = described_simulation(results), simulation_table(results)
    else:
        folder = StudyFolder(path)
        description, shown = described(folder), table(folder)
    print(json.dumps({"folder": str(path), **description}, ensure_ascii=False) if options.json else shown)
    return 0


def _find_folder(name: str) -> Path:
    if Path(name).is_dir():
        return Path(name)
    if name not in catalogue() and len(Path(name).parts) > 1:
        raise InputError(f"{name} is not a folder")
    find_study_or_simulation(name)
    below = [path for path in sorted(Path("results").glob(f"*/{name}")) if (path / "study.json").exists()]
    places = [_default_folder(name, "full"), Path("results") / name, *below, _default_folder(name, "small")]
    for place in places:
        if (place / "study.json").exists():
            return place
    raise InputError(
        f"study {name!r} is not in {' or '.join(map(str, places))}; run it with `nearsight study run {name}`, or give "
        "its folder"
    )
