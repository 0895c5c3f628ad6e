"""What a report is made of: one model's heads and, where known, how the model came to be.

Plain data frames with the columns of a run folder's files, so that figures and readings can be made from any run, any
measured model, or a file from elsewhere.
"""

import json
import math
import numbers
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from nearsight.configuration import decode
from nearsight.errors import InputError, check_side
from nearsight.files import check_file, read_object, write_json
from nearsight.lens import HeadTable
from nearsight.lens.perimage import PerImage
from nearsight.metrics import uniform_attention_distance
from nearsight.study.run_tables import MOST_COUNTED
from nearsight.train import HEADS_COLUMNS, HistoryRow, RunFolder

HISTORY_COLUMNS = tuple(field.name for field in fields(HistoryRow))

# The entropy of uniform attention exceeds 1 by rounding, and by the ε inside its logarithm.
ROUNDING = 1e-6


@dataclass(frozen=True, kw_only=True, eq=False)
class ModelHeads:
    """One measured model: its name in figures and words, its heads, and what is known about its training."""

    label: str
    """The model's name for people; it may hold any characters."""
    heads: pd.DataFrame
    """The columns of heads.csv; layers and heads count from 0; a head that does not exist is NaN or has no row."""
    grids: Mapping[int, tuple[int, int]] | None = None
    """Rows and columns of the tokens of each layer, by its number; None where they are not known."""
    uniform: Mapping[int, float] | None = None
    """The distance of uniform attention in each layer, by its number, where it was found when the model was measured:
    in windows and on pooled keys it is not that of the grid."""
    epoch: int | None = None
    """Which of the measured epochs is reported; None is the last one."""
    history: pd.DataFrame | None = None
    """The columns of history.csv; accuracies are fractions."""
    test_accuracy: float | None = None
    """A fraction."""
    config: Mapping[str, Any] | None = None
    """The complete configuration of the run."""
    provenance: Mapping[str, Any] | None = None
    """Commit, versions, hardware, seed, wall time."""
    per_image: PerImage | None = None
    """The numbers of single images, with the layers of `layers()` in that order; None where they are not known."""

    def __post_init__(self) -> None:
        check_heads(self.heads, f"the heads of {self.label!r}")
        if self.history is not None:
            check_history(self.history, f"the history of {self.label!r}")
        given: dict[str, Any] = {"epoch": self.epoch, "test accuracy": self.test_accuracy}
        for name, number in given.items():
            if number is not None and not isinstance(number, numbers.Real):
                raise InputError(f"the {name} of {self.label!r} is {number!r}, which is not a number")
        if self.epoch is not None and self.epoch not in set(self.heads["epoch"]):
            raise InputError(f"the heads of {self.label!r} were not measured at epoch {self.epoch}")
        if self.per_image is not None:
            _, num_layers, num_heads = self.per_image.mad.shape
            if num_layers != len(self.layers()) or num_heads <= self.measured()["head"].max():
                raise InputError(f"the numbers of single images of {self.label!r} are of other heads than the rest")

    def measured(self) -> pd.DataFrame:
        """The rows of the reported epoch, by layer and head."""
        epoch = self.heads["epoch"].max() if self.epoch is None else self.epoch
        return self.heads[self.heads["epoch"] == epoch].sort_values(["layer", "head"])

    def uniform_distance(self, layer: int) -> float | None:
        """The distance of uniform attention in this layer: as it was found or, where it was not, that of its grid."""
        if self.uniform is not None and layer in self.uniform:
            return None if np.isnan(self.uniform[layer]) else self.uniform[layer]
        grid = self.grid(layer)
        return None if grid is None else uniform_attention_distance(grid)

    def grid(self, layer: int) -> tuple[int, int] | None:
        """Rows and columns of a layer's tokens, where they are known."""
        return None if self.grids is None else self.grids.get(layer)

    def layers(self) -> tuple[int, ...]:
        """The numbers of the measured layers, from 0."""
        return tuple(sorted({int(layer) for layer in self.measured()["layer"]}))

    def matrix(self, column: str) -> NDArray[np.float64]:
        """A column as layers × heads, in the order of `layers()`; heads that do not exist are NaN."""
        rows = self.measured()
        row_of_layer = {layer: row for row, layer in enumerate(self.layers())}
        matrix = np.full((len(row_of_layer), int(rows["head"].max()) + 1), np.nan)
        matrix[rows["layer"].map(row_of_layer), rows["head"]] = rows[column]
        return matrix

    def image_values(self, metric: str, rows: pd.DataFrame) -> NDArray[np.float64]:
        """Images × these rows of `measured()`, where the numbers of single images are known: "mad", "entropy", or what
        a measurement has for each image."""
        assert self.per_image is not None
        own = {"mad": self.per_image.mad, "entropy": self.per_image.entropy}
        values_NLH = (own | dict(self.per_image.further))[metric]
        place_of_layer = {layer: place for place, layer in enumerate(self.layers())}
        return values_NLH[:, rows["layer"].map(place_of_layer), rows["head"]].astype(np.float64)


def check_labels(models: Sequence[ModelHeads]) -> None:
    """Figures and tables distinguish models by their label."""
    if not models:
        raise InputError("a report needs at least one measured model")
    labels = [model.label for model in models]
    for label in labels:
        if labels.count(label) > 1:
            raise InputError(f"two models are both called {shorten(label, 60)!r}; give each its own label")


def check_heads(frame: pd.DataFrame, source: str) -> None:
    _check_columns(frame, HEADS_COLUMNS, source, numeric=[name for name in HEADS_COLUMNS if name != "layer_name"])
    for name in ("epoch", "layer", "head", "num_images"):
        values = frame[name].to_numpy(dtype=np.float64)
        if not np.all(np.isfinite(values)) or np.any(values != np.round(values)) or np.any(values < 0):
            raise InputError(f"{source}: column {name!r} must hold whole numbers from 0")
    for name in ("mad", "entropy"):
        values = frame[name].to_numpy(dtype=np.float64)
        outside = values[(values < -ROUNDING) | (values > 1 + ROUNDING)]
        if outside.size:
            raise InputError(f"{source}: column {name!r} holds {outside[0]:g}, but {name} lies in [0, 1]")
    for name in ("mad_std", "entropy_std"):
        if (frame[name] < 0).any():
            raise InputError(f"{source}: column {name!r} holds a negative standard deviation")
    for name, most in MOST_COUNTED.items():
        if (largest := frame[name].max()) >= most:
            raise InputError(f"{source}: column {name!r} holds {largest:g}, but must hold less than {most}")
    if frame.duplicated(["epoch", "layer", "head"]).any():
        raise InputError(f"{source}: the same epoch, layer and head is there twice; measure the model again")


def check_history(frame: pd.DataFrame, source: str) -> None:
    _check_columns(frame, HISTORY_COLUMNS, source, numeric=HISTORY_COLUMNS)


def _check_columns(frame: pd.DataFrame, columns: Sequence[str], source: str, *, numeric: Iterable[str]) -> None:
    missing = [name for name in columns if name not in frame.columns]
    if missing:
        raise InputError(f"{source}: no column {', '.join(map(repr, missing))}; needed: {', '.join(columns)}")
    if frame.empty:
        raise InputError(f"{source}: no rows")
    for name in numeric:
        if not pd.api.types.is_numeric_dtype(frame[name]) or pd.api.types.is_bool_dtype(frame[name]):
            raise InputError(f"{source}: column {name!r} holds something that is not a number")


def read_heads(path: Path) -> pd.DataFrame:
    """The rows of a heads.csv, checked."""
    frame = _read_table(path)
    check_heads(frame, str(path))
    # A file in which a layer has no name must give the same type as one in which all have.
    return frame.astype({"epoch": np.int64, "layer": np.int64, "head": np.int64, "num_images": np.int64}).assign(
        layer_name=frame["layer_name"].fillna("").astype(str)
    )


def read_history(path: Path) -> pd.DataFrame:
    """The rows of a history.csv, checked."""
    frame = _read_table(path)
    check_history(frame, str(path))
    return frame


def _read_table(path: Path) -> pd.DataFrame:
    check_file(path)
    try:
        return pd.read_csv(path)
    except FileNotFoundError as error:
        raise InputError(f"{path} does not exist") from error
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}") from error
    except (pd.errors.ParserError, pd.errors.EmptyDataError, UnicodeDecodeError) as error:
        raise InputError(f"{path} is damaged or not a CSV file: {' '.join(str(error).split())}") from error


def with_images(model: ModelHeads, table: HeadTable) -> ModelHeads:
    """A model with the numbers of single images that a table has; without them where the table is of something else."""
    rows = model.measured()
    places = {name: place for place, name in enumerate(table.layer_names)}
    if table.per_image is None or not set(rows["layer_name"]) <= places.keys():
        return model
    at = rows["layer_name"].map(places).to_numpy(), rows["head"].to_numpy()
    if at[1].max() >= table.mad.shape[1] or (rows["num_images"] != table.num_images).any():
        return model
    pairs = ((rows[name], values[at]) for name, values in (("mad", table.mad), ("entropy", table.entropy)))
    if not all(np.allclose(written, kept, rtol=1e-9, equal_nan=True) for written, kept in pairs):
        return model
    names = rows.drop_duplicates("layer")["layer_name"]
    return replace(model, per_image=table.per_image.choose([places[name] for name in names]))


def _with_images_of(path: Path, model: ModelHeads) -> ModelHeads:
    return with_images(model, HeadTable.load(path)) if path.exists() else model


def model_heads(folder: RunFolder, label: str, *, heads: pd.DataFrame | None = None) -> ModelHeads:
    """A finished run's heads (or others of its model) with all that the page says about how they came to be."""
    result = folder.read_result()
    model = ModelHeads(
        label=label,
        heads=read_heads(folder.heads) if heads is None else heads,
        # Heads may have been measured all through training; the model is that of the best epoch, not of the last.
        epoch=result["best_epoch"] if heads is None else None,
        # Pretraining without labels has a history of its own and no accuracy.
        history=read_history(folder.path / "history.csv") if "test_acc" in result else None,
        test_accuracy=result.get("test_acc"),
        config=folder.read_settings(),
        provenance=folder.read_provenance(),
    )
    return _with_images_of(folder.heads_per_image, model) if heads is None else model


DESCRIPTION = "measured.json"
"""What `nearsight measure` writes next to its tables, so that a page can be made of them again."""
_SCHEMA = 1
"""Its version; raised whenever an older reader would go wrong."""


@dataclass(frozen=True, kw_only=True, eq=False)
class MeasuredModel:
    heads: ModelHeads
    command: str | None
    """What measured it, as it was typed."""


def write_measured(folder: Path, model: ModelHeads, command: str | None) -> Path:
    """Put down all that the page says about a model but its numbers, which are in heads.csv."""
    known = {layer: model.uniform_distance(layer) for layer in model.uniform or ()}
    record = {
        "schema": _SCHEMA,
        "label": model.label,
        "grids": None if model.grids is None else {str(layer): list(grid) for layer, grid in model.grids.items()},
        "uniform": {str(layer): distance for layer, distance in known.items()} or None,
        "test_accuracy": model.test_accuracy,
        "config": model.config,
        "provenance": model.provenance,
        "command": command,
    }
    write_json(folder / DESCRIPTION, json.loads(json.dumps(record, default=str)))
    return folder / DESCRIPTION


def read_measured(folder: Path) -> MeasuredModel:
    """The model of a folder that has a heads.csv; without a measured.json it is called like its folder."""
    record = _read_record(folder / DESCRIPTION)
    model = ModelHeads(
        label=str(record.get("label") or folder.resolve().name),
        heads=read_heads(folder / "heads.csv"),
        grids=_grids(folder / DESCRIPTION, record.get("grids")),
        uniform=_uniform(folder / DESCRIPTION, record.get("uniform")),
        test_accuracy=record.get("test_accuracy"),
        config=record.get("config"),
        provenance=record.get("provenance"),
    )
    return MeasuredModel(heads=_with_images_of(folder / "heads.npz", model), command=record.get("command"))


def _grids(path: Path, grids: Any) -> dict[int, tuple[int, int]] | None:
    if grids is None:
        return None
    try:
        found = {int(layer): decode(tuple[int, int], grid, "a grid") for layer, grid in grids.items()}
        for side in chain(*found.values()):
            check_side("the side of a grid", side)  # there are no more patches than pixels
    except (AttributeError, ValueError) as error:  # an InputError is a ValueError
        raise InputError(f"{path} is damaged: {error}") from error
    return found


def _uniform(path: Path, uniform: Any) -> dict[int, float] | None:
    if uniform is None:  # also of an earlier nearsight
        return None
    try:
        found = {int(layer): math.nan if value is None else float(value) for layer, value in uniform.items()}
        if not all(math.isnan(value) or 0 <= value <= 1 for value in found.values()):
            raise ValueError("a distance of uniform attention is not in [0, 1]")
    except (AttributeError, TypeError, ValueError) as error:
        raise InputError(f"{path} is damaged: {error}") from error
    return found


def _read_record(path: Path) -> dict[str, Any]:
    if not path.exists():  # of an older nearsight, or from elsewhere
        return {}
    record = read_object(path, missing=str(path.parent))
    if not isinstance(record.get("schema"), int) or not all(
        isinstance(record.get(name), dict | None) for name in ("config", "provenance")
    ):
        raise InputError(f"{path} does not describe a measured model")
    if record["schema"] > _SCHEMA:
        raise InputError(
            f"{path} has schema {record['schema']}, but this nearsight reads up to {_SCHEMA}; update nearsight"
        )
    return record


def shorten(label: str, limit: int) -> str:
    """A label as one printable line of at most `limit` characters.

    The middle goes: generated names often differ at their end. Control characters would make an SVG
    file invalid, and direction overrides would turn the text that follows.
    """
    characters = (
        " " if character.isspace() else character
        for character in label
        if character.isspace() or unicodedata.category(character)[0] != "C"
    )
    line = " ".join("".join(characters).split()) or "unnamed"
    if len(line) <= limit:
        return line
    tail = (limit - 1) // 3
    return f"{line[: limit - 1 - tail].rstrip()}…{line[len(line) - tail :].lstrip()}"
