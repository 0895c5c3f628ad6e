"""What `nearsight measure` leaves beside its tables, so that a page can be made of them again."""

import json
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from nearsight.configuration import decode
from nearsight.errors import InputError, check_side
from nearsight.files import read_object, write_json
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
    model = ModelHeads(
        label=str(record.get("label") or folder.resolve().name),
        heads=read_heads(folder / "heads.csv"),
        grids=_grids(folder / NAME, record.get("grids")),
        test_accuracy=record.get("test_accuracy"),
        config=record.get("config"),
        provenance=record.get("provenance"),
    )
    return MeasuredModel(heads=model, command=record.get("command"))


def _grids(path: Path, grids: Any) -> dict[int, tuple[int, int]] | None:
    if grids is None:
        return None
    try:
        told = {int(layer): decode(tuple[int, int], grid, "a grid") for layer, grid in grids.items()}
        for side in chain(*told.values()):
            check_side("the side of a grid", side)  # there are no more patches than pixels
    except (AttributeError, ValueError) as error:  # an InputError is a ValueError
        raise InputError(f"{path} is damaged: {error}") from error
    return told


def _read_record(path: Path) -> dict[str, Any]:
    if not path.exists():  # of an older nearsight, or sent by somebody
        return {}
    record = read_object(path, missing=str(path.parent))
    if not isinstance(record.get("schema"), int) or not all(
        isinstance(record.get(name), dict | None) for name in ("config", "provenance")
    ):
        raise InputError(f"{path} does not describe a measured model")
    if record["schema"] > SCHEMA:
        raise InputError(
            f"{path} has schema {record['schema']}, but this nearsight reads up to {SCHEMA}; update nearsight"
        )
    return record
