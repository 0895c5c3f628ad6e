"""An atlas: many measured models on the same pictures, as tables over models. `report/atlas_page.py` shows them.

Intervals are over pictures: 95 %, Student's t. They say how certain a number is for these weights; other weights of the
same recipe may differ by more.

Shape suffixes: N images, R heads.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from nearsight.errors import InputError
from nearsight.files import replacing
from nearsight.lens import HeadTable
from nearsight.lens.table import KIND_COLUMNS, read_arrays
from nearsight.metrics.kinds import KINDS, OTHER
from nearsight.report.differences import Quantity, by_halves, differ, existing_heads, most_local_head
from nearsight.report.inputs import ModelHeads, read_measured
from nearsight.report.tables import MISSING, Row, Table, columns_of, difference_in_words, rounded, with_interval
from nearsight.study.statistics import Estimate, mean_interval

Kind = Literal["trained", "random", "preparation"]
TEXTS = ("trained_on", "citation", "licence", "note")
"""What a list says of a model; it may be corrected without measuring again."""
PICTURES = "pictures.npz"
"""Of `AtlasModel.pictures`, in the folder of a model."""
_OF_SIZES = ("grid_size", "cell_size")
_DIGITS_OF_DIGEST = 12


class SinkChange(NamedTuple):
    """How far the distance of a head moves if each picture's sinks are left out."""

    layer: int
    head: int
    estimate: Estimate


@dataclass(frozen=True, kw_only=True, eq=False)
class AtlasModel:
    """One row of an atlas."""

    heads: ModelHeads
    table: HeadTable
    kind: Kind
    beside: str | None = None
    """The label of what it is compared with: of a trained model, its architecture with random weights; of a model under
    another preparation, itself under its own."""
    kept: Mapping[str, NDArray[Any]] | None = None
    """`pictures`, where a file has only them of what single pictures gave."""

    @property
    def label(self) -> str:
        return self.heads.label

    @property
    def record(self) -> Mapping[str, Any]:
        """What the atlas wrote down about the model."""
        return self.heads.config or {}

    @cached_property
    def pictures(self) -> Mapping[str, NDArray[Any]]:
        """Of single pictures, what has an interval here, by name, [N] each; empty where they are not known.

        `most_local` and `sink_change` are of heads that are chosen on one half of the pictures and measured on the
        other: the most local one, and that whose distance moves most without sinks.
        """
        if self.kept is not None or self.heads.per_image is None:
            return self.kept or {}
        rows, digests = existing_heads(self.heads), self.heads.per_image.digests
        mad_NR, name = self.heads.image_values("mad", rows), "mad_without_sinks"
        found = {"most_local": by_halves(digests, mad_NR, np.argmin)[0], "all_heads": mad_NR.mean(1)}
        if name in self.heads.per_image.further:
            change_NR = self.heads.image_values(name, rows) - mad_NR
            found["sink_change"] = by_halves(digests, change_NR, _largest)[0]
            found["sink_change_most_local"] = change_NR[:, int(rows["mad"].argmin())]
        return {"digests": digests, **{name: values.astype(np.float32) for name, values in found.items()}}

    @cached_property
    def most_local(self) -> Quantity:
        best, values = most_local_head(replace(self.heads, per_image=None)), self.pictures.get("most_local")
        if values is None:
            return best
        return replace(best, digests=self.pictures["digests"], values=values.astype(np.float64))

    def most_local_interval(self) -> Estimate:
        """The mean is that of the head that is named; its interval is as wide as that of the values by halves."""
        return self._around(self.most_local.mean, "most_local")

    def all_heads(self) -> Estimate:
        """The mean over all heads, with its interval over pictures."""
        return self._around(float(existing_heads(self.heads)["mad"].mean()), "all_heads")

    @cached_property
    def sink_changes(self) -> tuple[SinkChange, SinkChange] | None:
        """Of the head whose distance moves most without sinks, and of the most local one; None where that was not
        measured."""
        rows, name = existing_heads(self.heads), "mad_without_sinks"
        if name not in self.table.extra:
            return None
        place_of = {layer: place for place, layer in enumerate(self.heads.layers())}
        at = rows["layer"].map(place_of).to_numpy(), rows["head"].to_numpy()
        change_R = (self.table.extra[name] - self.table.mad)[at]
        if not np.isfinite(change_R).any():
            return None

        def change(place: int, name: str) -> SinkChange:
            layer, head = (int(rows[column].iloc[place]) for column in ("layer", "head"))
            return SinkChange(layer, head, self._around(float(change_R[place]), name))

        local = int(rows["mad"].argmin())
        return change(int(_largest(change_R)), "sink_change"), change(local, "sink_change_most_local")

    def _around(self, mean: float, name: str) -> Estimate:
        """A mean over pictures, with the width of the interval of their values, if these are known."""
        if (values := self.pictures.get(name)) is None:
            return Estimate(value=mean, n=self.num_images)
        found = mean_interval(values)
        shift = mean - found.value
        return replace(found, value=mean, low=found.low + shift, high=found.high + shift, p=float("nan"))

    @property
    def num_images(self) -> int:
        return self.table.num_images

    def most_local_layer(self) -> int:
        """The layer whose heads have the lowest mean distance, by its place, from 0."""
        return int(np.nanargmin(np.nanmean(self.table.mad, axis=1)))

    @property
    def has_kinds(self) -> bool:
        return KIND_COLUMNS["own"] in self.table.extra

    def extra_columns(self) -> dict[str, np.ndarray]:
        """What was measured beside distance and entropy, per head or per layer, by name."""
        return {
            name: values
            for name, values in self.table.extra.items()
            if name not in _OF_SIZES and (values.shape == self.table.mad.shape or values.ndim == 1)
        }


def read_model(folder: Path, kind: Kind, beside: str | None) -> AtlasModel:
    """A model from its folder; an `InputError` if something there is damaged."""
    heads, table = read_measured(folder).heads, HeadTable.load(folder / "heads.npz")
    kept = None
    if table.per_image is None and (folder / PICTURES).exists():
        kept = read_arrays(folder / PICTURES)
    return AtlasModel(heads=heads, table=table, kind=kind, beside=beside, kept=kept)


def with_texts(model: AtlasModel, texts: Mapping[str, str]) -> AtlasModel:
    """With other `TEXTS` than when it was measured."""
    return replace(model, heads=replace(model.heads, config={**model.record, **texts}))


def keep_small(folder: Path) -> None:
    """Leave of single pictures only what an atlas has intervals of: some kB instead of MB."""
    model = read_model(folder, "trained", None)
    with replacing(folder / PICTURES) as temporary, temporary.open("wb") as file:
        np.savez(file, allow_pickle=False, **model.pictures)
    replace(model.table, per_image=None).save(folder / "heads.npz")


def trained_of(models: Sequence[AtlasModel]) -> list[AtlasModel]:
    """Those whose weights somebody trained; all where there are none."""
    return [model for model in models if model.kind == "trained"] or list(models)


def _largest(change_R: NDArray[np.float64]) -> np.intp:
    return np.nanargmax(np.abs(change_R))


def _in_unit(table: HeadTable, unit: Literal["patches", "pixels"]) -> np.ndarray:
    """Distances; NaN where they are not one number."""
    try:
        return table.mad_in(unit)
    except (InputError, KeyError):
        return np.full_like(table.mad, np.nan)


def overview(models: Sequence[AtlasModel], problems: Mapping[str, str]) -> Table:
    """A row per model, those that failed at the end."""
    by_label = {model.label: model for model in models}
    rows = [_row(model, by_label) for model in models]
    shown = [row for model, row in zip(models, rows, strict=True) if model.kind != "preparation"]
    rows += [Row().both("label", label, "model").keep(kind="failed", problem=why) for label, why in problems.items()]
    notes: tuple[str, ...] = (
        "MAD: mean attention distance, as a fraction of the grid’s diagonal. ±: the 95 % interval over pictures.",
        "In patches and pixels: of the most local head. Uniform: the MAD of a head that attends to all patches alike.",
        "Less random: the most local head less that of the same architecture with random weights, picture by picture.",
    )
    if any(model.sink_changes for model in models):
        notes += (
            "Without sinks: how far the distance of the head moves that moves most if each picture’s sinks are left "
            "out, the patches that receive more than ten times the mean.",
        )
    return Table.of("atlas", "The models", rows, shown=shown, notes=notes)


def _row(model: AtlasModel, by_label: Mapping[str, AtlasModel]) -> Row:
    table, record, best = model.table, model.record, model.most_local
    place = np.unravel_index(np.nanargmin(table.mad), table.mad.shape)
    num_layers, num_heads = table.mad.shape
    grid = model.heads.grid(model.heads.layers()[0])
    preparation = record.get("preparation") or {}
    patches, pixels = (float(_in_unit(table, unit)[place]) for unit in ("patches", "pixels"))
    uniform = float("nan") if table.uniform is None else float(np.nanmean(table.uniform))
    row = Row().both("label", model.label, "model").keep(kind=model.kind, model=record.get("model"))
    row.keep(layers=num_layers, heads=num_heads).show("layers × heads", f"{num_layers} × {num_heads}")
    row.both(
        "grid",
        "" if grid is None else f"{grid[0]}x{grid[1]}",
        "grid",
        MISSING if grid is None else "{} × {}".format(*grid),
    )
    row.interval("min_mad", model.most_local_interval(), "most local head", digits=4)
    row.keep(min_mad_layer=best.layer, min_mad_head=best.head).show("where", f"layer {best.layer}, head {best.head}")
    row.both("min_mad_patches", patches, "in patches", rounded(patches, 2))
    row.both("min_mad_pixels", pixels, "in pixels", rounded(pixels, 1))
    row.interval("mean_mad", model.all_heads(), "all heads", digits=4)
    row.both("uniform_mad", uniform, "uniform", rounded(uniform))
    row.both("most_local_layer", model.heads.layers()[model.most_local_layer()], "most local layer")
    twin = by_label.get(model.beside or "")
    if twin is None:
        row.show("less random", MISSING)
    else:
        found = differ(best, twin.most_local).estimate
        row.keep(beside=twin.label, less_beside=found.value, less_beside_low=found.low, less_beside_high=found.high)
        row.show("less random", difference_in_words(found, digits=4))
    if (changes := model.sink_changes) is not None:
        for name, change in zip(("sink_change", "sink_change_most_local"), changes, strict=True):
            row.keep(
                **columns_of(name, change.estimate), **{f"{name}_layer": change.layer, f"{name}_head": change.head}
            )
        row.show("without sinks", difference_in_words(changes[0].estimate, digits=4))
    elif "mad_without_sinks" in table.extra:
        row.show("without sinks", MISSING)
    for name, values in model.extra_columns().items():
        if np.isfinite(values).any():
            row.keep(**{f"{name}_mean": float(np.nanmean(values)), f"{name}_max": float(np.nanmax(values))})
    if model.has_kinds:
        kinds = table.kinds()
        known = kinds[kinds != ""]
        row.keep(**{f"kind_{_as_name(kind)}": float((known == kind).mean()) for kind in (*KINDS, OTHER)})
    row.keep(num_images=table.num_images, images=(record.get("images") or {}).get("from"))
    row.keep(
        **{
            name: _listed(preparation.get(name))
            for name in ("input_size", "mean", "std", "crop_pct", "crop_mode", "interpolation")
        }
    )
    return row.keep(**{name: record.get(name) for name in ("trained_on", "licence", "citation", "note", "digest")})


def _as_name(kind: str) -> str:
    """Of a column with the share of heads of this kind."""
    return f"{kind.replace(' ', '_').replace('/', '_')}_heads"


def _listed(value: object) -> object:
    return " ".join(map(str, value)) if isinstance(value, list | tuple) else value


def identities(models: Sequence[AtlasModel], problems: Mapping[str, str]) -> Table:
    """What each model is: who made it, on what it was trained, how its pictures are prepared, and which weights."""
    rows = []
    for model in models:
        record = model.record
        preparation = record.get("preparation") or {}
        texts = {name: str(record.get(name) or MISSING) for name in ("model", *TEXTS)}
        digest = str(record.get("digest") or MISSING)
        row = Row().both("label", model.label, "model").both("name", texts["model"], "loaded as")
        for name in TEXTS:
            row.both(name, texts[name], name.replace("_", " "))
        row.both("digest", digest, "weights (sha256)", digest[:_DIGITS_OF_DIGEST])
        size, crop = preparation.get("input_size"), preparation.get("crop_pct")
        said = (
            f"{size[-1]} px, mean {_numbers(preparation.get('mean'))}, std {_numbers(preparation.get('std'))}"
            if size
            else MISSING
        )
        row.both("preparation", said + (f", crop {crop:.3g}" if crop and crop != 1 else ""), "preparation")
        rows.append(row)
    notes = [f"Not measured: {label}: {why}" for label, why in problems.items()]
    return Table.of("models", "What each model is", rows, notes=notes)


def _numbers(values: Sequence[float] | None) -> str:
    if values is None:
        return MISSING
    return f"{values[0]:.3g}" if len(set(values)) == 1 else "/".join(f"{value:.3g}" for value in values)


def preparations(models: Sequence[AtlasModel]) -> Table | None:
    """What the same weights give on the same pictures under another mean and standard deviation."""
    by_label = {model.label: model for model in models}
    rows = []
    for model in (model for model in models if model.kind == "preparation"):
        own = by_label.get(model.beside or "")
        if own is None:
            continue
        preparation = model.record["preparation"]
        row = Row().both("label", own.label, "model")
        row.both("mean", _numbers(preparation["mean"])).both("std", _numbers(preparation["std"]))
        row.interval("own", own.most_local_interval(), "most local head, own")
        row.interval("min_mad", model.most_local_interval(), "this one")
        other = model.most_local
        found = differ(other, own.most_local).estimate
        row.keep(difference=found.value, low=found.low, high=found.high).show("difference", difference_in_words(found))
        row.show("where", f"layer {other.layer}, head {other.head}")
        row.both("mean_mad", model.all_heads().value, "all heads", with_interval(model.all_heads()))
        rows.append(row)
    notes = ("The same weights and pictures; only the normalisation of the pixels differs.",)
    return Table.of("preparations", "The effect of preparation", rows, notes=notes) if rows else None


def further(models: Sequence[AtlasModel]) -> Table | None:
    """What else was measured: the mean over heads or layers, and the largest."""
    names = dict.fromkeys(name for model in models for name in model.extra_columns())
    if not names:
        return None
    rows = []
    for model in models:
        row, columns = Row().both("label", model.label, "model"), model.extra_columns()
        for name in names:
            values = columns.get(name, np.full(1, np.nan))
            there = bool(np.isfinite(values).any())
            mean, most = (float(np.nanmean(values)), float(np.nanmax(values))) if there else (np.nan, np.nan)
            said = f"{rounded(mean)} ({rounded(most)})" if there else MISSING
            row.keep(**{f"{name}_mean": mean, f"{name}_max": most}).show(name, said)
        rows.append(row)
    notes = ("The mean over a model’s heads or layers; in brackets the largest of them.",)
    return Table.of("further", "What else was measured", rows, notes=notes)


def head_rows(models: Sequence[AtlasModel]) -> pd.DataFrame:
    """A row per head of every model, with all that was measured of heads."""
    frames = []
    for model in models:
        frame = model.table.to_frame()
        place = frame["layer"].to_numpy(), frame["head"].to_numpy()
        extra = {name: values[place] for name, values in model.extra_columns().items() if values.ndim == 2}
        units = {f"mad_{unit}": _in_unit(model.table, unit)[place] for unit in ("patches", "pixels")}
        frames.append(frame.assign(**units, **extra).assign(model=model.label, kind=model.kind))
    joined = pd.concat(frames, ignore_index=True)
    return joined[["model", "kind", *(name for name in joined if name not in ("model", "kind"))]]
