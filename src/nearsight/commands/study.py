"""`nearsight study {list,run,show}`: the papers' experiments, with error bars."""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from nearsight.commands import study_simulation
from nearsight.commands.options import Common, parse
from nearsight.commands.signals import stoppable
from nearsight.commands.study_progress import StudyProgress
from nearsight.commands.study_tables import described, table
from nearsight.errors import InputError, unknown_name
from nearsight.recipes import SIMULATIONS, STUDIES, find_study_or_simulation
from nearsight.recipes.registry import SimulationRecipe, StudyRecipe
from nearsight.study import Simulation, SimulationResults, Study, StudyFolder, is_simulation, run_study
from nearsight.study.design import Scale
from nearsight.study.running import StackBy
from nearsight.train import Stop

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
    """Seeds per condition; the recipe's own number by default."""
    scale: Scale = "full"
    """small: a narrow model, few images and two epochs, to test the path on any machine. It is no result."""
    out: Path | None = None
    """Folder of the study; runs/NAME by default."""
    stack_by: StackBy = "seed"
    """What trains together: the conditions of one seed, one seed after the other, or all. It changes no number."""
    checkpoint_every: int = 1
    """Epochs between checkpoints; a kill costs those since the last, SIGINT and SIGTERM none. It changes no number."""


@dataclass(frozen=True, kw_only=True)
class ShowOptions(ListOptions):
    """How far a study is, who is at it, and what it gave: means over seeds with their 95 % intervals."""

    name: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="NAME_OR_DIR")]
    """The study's folder, or its name: then what is in runs/NAME, results/NAME or runs/NAME-small."""


def main(arguments: Sequence[str]) -> int:
    actions = {"list": _list, "run": _run, "show": _show}
    if not arguments or arguments[0] in ("-h", "--help"):
        print(
            "usage: nearsight study list\n"
            "       nearsight study run NAME [--seeds N] [--scale {full,small}] [--out DIR] [OPTIONS]\n"
            "       nearsight study show NAME_OR_DIR\n\n"
            "nearsight study run --help shows all options."
        )
        return 0 if arguments else 2
    if arguments[0] not in actions:
        raise unknown_name("action", arguments[0], actions)
    return actions[arguments[0]](list(arguments[1:]))


def _list(arguments: list[str]) -> int:
    options = parse(ListOptions, arguments, prog="nearsight study list")
    recipes: dict[str, StudyRecipe | SimulationRecipe] = {**STUDIES, **SIMULATIONS}
    rows = [
        {"name": name, "cells": len(recipe().cells), "about": (recipe.__doc__ or "").splitlines()[0]}
        for name, recipe in sorted(recipes.items())
    ]
    if options.json:
        print(json.dumps(rows, ensure_ascii=False))
        return 0
    width = max(map(len, recipes))
    for row in rows:
        print(f"  {row['name']:<{width}}  {row['cells']:>3} cells  {row['about']}")
    return 0


def _run(arguments: list[str]) -> int:
    options = parse(RunOptions, arguments, prog="nearsight study run")
    recipe = find_study_or_simulation(options.name)
    study = recipe() if options.seeds is None else recipe(seeds=options.seeds)
    if options.scale == "small":
        study = study.small()
    out = options.out or _default_folder(study.name, study.scale)
    if isinstance(study, Simulation):
        simulation, device = study, options.torch_device
        return stoppable(
            lambda stop: study_simulation.run_and_report(simulation, out, device, stop, as_json=options.json)
        )
    return stoppable(lambda stop: _run_and_report(study, out, options, stop))


def _default_folder(name: str, scale: Scale) -> Path:
    return Path("runs") / (name if scale == "full" else f"{name}-{scale}")


def _run_and_report(study: Study, out: Path, options: RunOptions, stop: Stop) -> int:
    with StudyProgress(study.name) as progress:
        folder = run_study(
            study,
            out,
            device=options.torch_device,
            data_dir=options.data_dir,
            listener=progress,
            stop=stop,
            checkpoint_every=options.checkpoint_every,
            stack_by=options.stack_by,
        )
    left = [cell.run for cell in study.cells if not folder.is_done(cell.run)]
    if not left:
        from nearsight.report.study import write_study_report

        write_study_report(folder.write_tables(), out)
    if options.json:
        print(json.dumps({"folder": str(out), "left": left, **described(folder)}, ensure_ascii=False))
        return 0
    print(table(folder))
    if left:
        print(f"\n{len(left)} cells are with other runners; when they are done, the same command writes the report.")
    else:
        print(f"\nTables, figures and verdict: {out}")
    sys.stdout.flush()
    return 0


def _show(arguments: list[str]) -> int:
    options = parse(ShowOptions, arguments, prog="nearsight study show")
    path = _find_folder(options.name)
    if is_simulation(path):
        results = SimulationResults.read(path)
        told, shown = study_simulation.described(results), study_simulation.table(results)
    else:
        folder = StudyFolder(path)
        told, shown = described(folder), table(folder)
    print(json.dumps({"folder": str(path), **told}, ensure_ascii=False) if options.json else shown)
    return 0


def _find_folder(name: str) -> Path:
    if Path(name).is_dir():
        return Path(name)
    if name not in {**STUDIES, **SIMULATIONS} and len(Path(name).parts) > 1:
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
