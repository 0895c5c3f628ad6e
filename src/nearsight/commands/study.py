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
from nearsight.study.recipes import Scale
from nearsight.train import Stop

if TYPE_CHECKING:
    from nearsight.study import Simulation, Study, StudyFolder
    from nearsight.study.executors import Executor
    from nearsight.study.plan import PlannedClaims

_OF_TRAININGS = ("reuse", "cells_per_stack", "engine", "workers", "address", "checkpoint_every")
"""Options that a simulation does not use."""
_USAGE = """usage: nearsight study list
       nearsight study run NAME [NAME ...] [--seeds N] [--scale {full,small}] [--engine ENGINE] [OPTIONS]
       nearsight study show NAME_OR_DIR

nearsight study run --help shows all options."""
_NAME = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="NAME")]
_NAMES = Annotated[
    tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="NAME [NAME ...]", help_behavior_hint="")
]


@dataclass(frozen=True, kw_only=True)
class ListOptions:
    """Show every study."""

    json: bool = False
    """Print one machine-readable object instead of text."""


@dataclass(frozen=True, kw_only=True)
class RunOptions(Common):
    """Run what is missing of studies, and write their tables, figures and verdicts when all is done.

    Stopped or killed, it continues when the same command is given again. Several at once on one folder share the cells.
    """

    names: _NAMES
    """The study, as `nearsight study list` calls it. The cells of several wait in one queue, so that none has the
    device to itself at its end, and a run that two of them have is trained once; each keeps a folder of its own."""
    seeds: int | None = None
    """Seeds per condition; the recipe's own number by default. At small scale, at most 2 are run."""
    scale: Scale = "full"
    """small: a narrow model, few images and two epochs, to test the path on any machine. It is no result."""
    out: str | None = None
    """Folder of the study; runs/NAME by default. Or a place for its results that fsspec reaches: s3://BUCKET/PATH, …
    Of several studies it is the parent of their folders: OUT/NAME."""
    reuse: tuple[Path, ...] = ()
    """Folders of other studies: their finished runs are taken where they are of the same config. Of folders of results,
    as results/NAME, they are taken from the tables and have no weights."""
    cells_per_stack: int | None = None
    """The most cells that a runner trains at a time: 24 (on a CPU 8) if memory takes them. Fewer leave more to other
    runners. It changes no number."""
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
    if not options.names:
        raise InputError("no study is named; give its NAME, as `nearsight study list` calls it")
    recipes = [find_study_or_simulation(name) for name in options.names]
    from nearsight.study import Simulation

    made = [recipe() if options.seeds is None else recipe(seeds=options.seeds) for recipe in recipes]
    if options.scale == "small":
        made = [study.small() for study in made]
    studies = [study for study in made if not isinstance(study, Simulation)]
    simulations = [study for study in made if isinstance(study, Simulation)]
    if len(made) > 1:
        _check_for_several(options, simulations)
    if simulations:
        _check_for_simulation(options, simulations[0].name)
        out = Path(options.out) if options.out else _default_folder(simulations[0].name, simulations[0].scale)
        return stoppable(lambda stop: _run_simulation(simulations[0], out, options, stop))
    executor = _executor(options)
    return stoppable(lambda stop: _run_and_report(studies, options, executor, stop))


def _check_for_several(options: RunOptions, simulations: Sequence[Simulation]) -> None:
    """Whether these studies can wait in one queue."""
    for name in options.names:
        if options.names.count(name) > 1:
            raise InputError(f"study {name!r} is named twice; once is enough")
    if simulations:
        raise InputError(f"study {simulations[0].name!r} simulates its own data and has no queue; run it by itself")
    if options.engine != "local":
        raise InputError(f"several studies wait in the queue of one process; leave out --engine {options.engine}")
    if options.out and not is_url(options.out) and (Path(options.out) / "study.json").exists():
        raise InputError(
            f"{options.out} is the folder of one study, and of several --out is the parent of their folders; "
            "choose another"
        )


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


def _place(study: Study, options: RunOptions) -> str:
    """Folder or URL of a study's results."""
    if not options.out:
        return str(_default_folder(study.name, study.scale))
    if len(options.names) == 1:
        return options.out
    return f"{options.out.rstrip('/')}/{study.name}" if is_url(options.out) else str(Path(options.out) / study.name)


def _run_and_report(studies: Sequence[Study], options: RunOptions, executor: Executor, stop: Stop) -> int:
    from nearsight.commands.study_progress import StudyProgress
    from nearsight.commands.study_tables import described, table
    from nearsight.report.page.live import LivePage
    from nearsight.study import StudyPart, run_studies
    from nearsight.study.location import StudyPublisher, scratch_folder

    places = [_place(study, options) for study in studies]
    with StudyProgress(studies[0].name if len(studies) == 1 else f"{len(studies)} studies") as progress:
        parts = []
        for study, place in zip(studies, places, strict=True):
            out = scratch_folder(place) if is_url(place) else Path(place)
            location = StudyPublisher(place) if is_url(place) else None
            page = LivePage(out, progress)
            parts.append(StudyPart(study=study, path=out, listener=page, location=location, claims=_claims(study)))
        folders = run_studies(
            parts,
            data_dir=options.data_dir,
            stop=stop,
            checkpoint_every=options.checkpoint_every,
            cells_per_stack=options.cells_per_stack,
            executor=executor,
            reuse=options.reuse,
        )
    left = [
        [cell.run for cell in study.cells if not folder.is_done(cell.run)]
        for study, folder in zip(studies, folders, strict=True)
    ]
    for part, folder, missing in zip(parts, folders, left, strict=True):
        if not missing:
            _write_report(folder, options)
            if part.location is not None:
                part.location.publish_tables(folder.path)
    if options.json:
        objects = [
            {"folder": place, "left": missing, **described(folder)}
            for place, missing, folder in zip(places, left, folders, strict=True)
        ]
        print(json.dumps(objects[0] if len(objects) == 1 else {"studies": objects}, ensure_ascii=False))
        return 0
    for number, (place, missing, folder) in enumerate(zip(places, left, folders, strict=True)):
        print(("\n" if number else "") + table(folder))
        if missing:
            print(f"\n{len(missing)} cells are with other runners; then the same command writes the report.")
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
