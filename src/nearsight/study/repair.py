"""Run folders in which something is missing or damaged: what is wrong, and how the run can still be done."""

import json
from collections.abc import Callable
from pathlib import Path

from nearsight.errors import InputError
from nearsight.files import check_file
from nearsight.study.run_tables import read_run
from nearsight.train import SCHEMA, RunConfig, RunFolder

Tell = Callable[[Path, str], None]
"""Given what is set aside and why."""


def result_problem(folder: RunFolder) -> str:
    """What is wrong with a complete folder, in words; nothing if it can be read."""
    try:
        read_run(folder)
    except InputError as error:
        return str(error)
    return ""


def make_ready(folder: RunFolder, config: RunConfig, tell: Tell) -> None:
    """Make a folder one that training starts from or continues; for nobody but the one who trains there.

    What is damaged is kept beside, and done again. What belongs to another run, was written by a newer nearsight or
    cannot be touched is an `InputError` that names it.
    """
    if not folder.path.exists():
        return
    try:
        if problem := _config_problem(folder, config):
            tell(folder.path, problem)
            _set_aside(folder.path)
            return
        if folder.is_complete and (problem := result_problem(folder)):
            tell(folder.path / "provenance.json", problem)
            _set_aside(folder.path / "provenance.json")  # without it, the end of the run is done again
        if not folder.is_complete and (problem := _checkpoint_problem(folder, config)):
            tell(folder.checkpoint, problem)
            _set_aside(folder.checkpoint)
    except OSError as error:
        raise InputError(f"{folder.path} cannot be continued: {error.strerror or error}") from error


def _config_problem(folder: RunFolder, config: RunConfig) -> str:
    path = folder.path / "config.json"
    check_file(path)
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return f"{path} is missing" if any(folder.path.glob("*.safetensors")) else ""
    except (ValueError, RecursionError) as error:  # not JSON, or not UTF-8
        return f"{path} is damaged: {error}"
    try:
        folder.read_config()
    except InputError as error:
        schema = stored.get("schema") if isinstance(stored, dict) else None
        if isinstance(schema, int) and schema > SCHEMA:
            raise
        return str(error)
    folder.check(config)
    return ""


def _checkpoint_problem(folder: RunFolder, config: RunConfig) -> str:
    try:
        stored = folder.read_checkpoint(config)
    except (InputError, KeyError) as error:
        return str(error)
    if stored is not None:
        folder.write_history(stored[0].history)  # which the end of a run does not write again
    return ""


def _set_aside(path: Path) -> None:
    """Out of the way, not lost: its content may be worth a look."""
    number = 1
    while (place := path.with_name(f"{path.name}.damaged-{number}")).exists():
        number += 1
    path.rename(place)
