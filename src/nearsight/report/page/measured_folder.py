"""What `nearsight measure` leaves beside its tables, so that a page can be made of them again."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nearsight.errors import InputError
from nearsight.files import write_json
from nearsight.report.inputs import ModelHeads, read_heads

NAME = "measured.json"
SCHEMA = 1
"""Version of measured.json; raised whenever an older reader would go wrong."""


@dataclass(frozen=True, kw_only=True, eq=False)
class MeasuredModel:
    heads: ModelHeads
    command: str | None
    """What measured it, as it was typed."""


def write_measured(folder: Path, model: ModelHeads, command: str | None) -> Path:
    """Put down all that the page says about a model but its numbers, which are in heads.csv."""
    record = {
        "schema": SCHEMA,
        "label": model.label,
        "grids": None if model.grids is None else {str(layer): list(grid) for layer, grid in model.grids.items()},
        "test_accuracy": model.test_accuracy,
        "config": model.config,
        "provenance": model.provenance,
        "command": command,
    }
    write_json(folder / NAME, json.loads(json.dumps(record, default=str)))
    return folder / NAME


def read_measured(folder: Path) -> MeasuredModel:
    """The model of a folder that has a heads.csv; without a measured.json it is called like its folder."""
    record = _read_record(folder / NAME)
    grids = record.get("grids")
    model = ModelHeads(
        label=str(record.get("label") or folder.resolve().name),
        heads=read_heads(folder / "heads.csv"),
        grids=None if grids is None else {int(layer): (int(grid[0]), int(grid[1])) for layer, grid in grids.items()},
        test_accuracy=record.get("test_accuracy"),
        config=record.get("config"),
        provenance=record.get("provenance"),
    )
    return MeasuredModel(heads=model, command=record.get("command"))


def _read_record(path: Path) -> dict[str, Any]:
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:  # of an older nearsight, or sent by somebody
        return {}
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}") from error
    except ValueError as error:  # not JSON, or not UTF-8
        raise InputError(f"{path} is damaged: {error}") from error
    if not isinstance(record, dict) or not isinstance(record.get("schema"), int):
        raise InputError(f"{path} does not describe a measured model")
    if record["schema"] > SCHEMA:
        raise InputError(
            f"{path} has schema {record['schema']}, but this nearsight reads up to {SCHEMA}; update nearsight"
        )
    return record
