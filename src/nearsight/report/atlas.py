"""An atlas: many measured models on the same pictures, as tables over models, a figure, sentences and a page.

Intervals are over pictures: 95 %, Student's t. They say how certain a number is for these weights; other weights of the
same recipe may differ by more.

Shape suffixes: N images, R heads, L layers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from nearsight.errors import InputError
from nearsight.files import write_text
from nearsight.lens import HeadTable
from nearsight.lens.table import KIND_COLUMNS
from nearsight.metrics.kinds import KINDS, OTHER
from nearsight.report.differences import Quantity, differ, existing_heads, most_local_head, quoted
from nearsight.report.figures.kinds import kind_strips
from nearsight.report.figures.style import (
    DISTANCE_LABEL,
    FIGURE_LABEL_LIMIT,
    INK,
    MUTED,
    UNIFORM,
    add_legend,
    house_style,
    light_grid,
)
from nearsight.report.inputs import ModelHeads, shorten
from nearsight.report.page.document import Document, Section, citing_html, command_html, figure_html, terms_html
from nearsight.report.page.tables import label_html, table_html, text_html
from nearsight.report.tables import MISSING, Row, Table, difference_in_words, rounded, share, with_interval
from nearsight.study.statistics import Estimate, mean_interval

Kind = Literal["trained", "random", "preparation"]
_PANELS_PER_ROW = 4
_COLOUR = "#0072b2"
_OF_SIZES = ("grid_size", "cell_size")
_DIGITS_OF_DIGEST = 12
_OWN_PATCH = 0.5
"""Share of a head's attention on its own patch from which on the sentences call it an own-patch head."""
_EARLY = 1 / 3
"""Of the depth."""
_INTERVALS = (
    "95 % over pictures (Student’s t): how certain a number is for these weights on pictures like these. A model with "
    "and without training is compared picture by picture. The most local head is chosen on one half of the pictures "
    "and compared on the other, and the other way round. Another training of the same recipe may differ by more than "
    "any of these intervals."
)


@dataclass(frozen=True, kw_only=True, eq=False)
class AtlasModel:
    """One row of an atlas."""

    heads: ModelHeads
    table: HeadTable
    kind: Kind
    beside: str | None = None
    """The label of what it is compared with: of a trained model, its architecture with random weights; of a model under
    another preparation, itself under its own."""

    @property
    def label(self) -> str:
        return self.heads.label

    @property
    def record(self) -> Mapping[str, Any]:
        """What the atlas wrote down about the model."""
        return self.heads.config or {}

    def all_heads(self) -> Estimate:
        """The mean over all heads, with its interval over pictures."""
        rows = existing_heads(self.heads)
        if self.heads.per_image is None:
            return Estimate(value=float(rows["mad"].mean()), n=self.table.num_images)
        return mean_interval(self.heads.image_values("mad", rows).mean(1))

    def most_local_layer(self) -> int:
        """The layer whose heads have the lowest mean distance, by its place, from 0."""
        return int(np.nanargmin(np.nanmean(self.table.mad, axis=1)))

    def extra_columns(self) -> dict[str, np.ndarray]:
        """What was measured beside distance and entropy, per head or per layer, by name."""
        return {
            name: values
            for name, values in self.table.extra.items()
            if name not in _OF_SIZES and (values.shape == self.table.mad.shape or values.ndim == 1)
        }


def _interval(quantity: Quantity) -> Estimate:
    if quantity.values is None:
        return Estimate(value=quantity.mean, n=quantity.num_images)
    found = mean_interval(quantity.values)
    # The mean is that of the head that is named; its interval is as wide as that of the values by halves.
    shift = quantity.mean - found.value
    return Estimate(
        value=quantity.mean, n=found.n, std=found.std, low=found.low + shift, high=found.high + shift, df=found.df
    )


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
    notes = (
        "MAD: mean attention distance, as a fraction of the grid’s diagonal. ±: the 95 % interval over pictures.",
        "In patches and pixels: of the most local head. Uniform: the MAD of a head that attends to all patches alike.",
        "Less random: the most local head less that of the same architecture with random weights, picture by picture.",
    )
    return Table.of("atlas", "The models", rows, shown=shown, notes=notes)


def _row(model: AtlasModel, by_label: Mapping[str, AtlasModel]) -> Row:
    table, record, best = model.table, model.record, most_local_head(model.heads)
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
    row.interval("min_mad", _interval(best), "most local head", digits=4)
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
        found = differ(best, most_local_head(twin.heads)).estimate
        row.keep(beside=twin.label, less_beside=found.value, less_beside_low=found.low, less_beside_high=found.high)
        row.show("less random", difference_in_words(found, digits=4))
    for name, values in model.extra_columns().items():
        if np.isfinite(values).any():
            row.keep(**{f"{name}_mean": float(np.nanmean(values)), f"{name}_max": float(np.nanmax(values))})
    if _has_kinds(model):
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


def _has_kinds(model: AtlasModel) -> bool:
    return KIND_COLUMNS["own"] in model.table.extra


def _as_name(kind: str) -> str:
    """Of a column with the share of heads of this kind."""
    return f"{kind.replace(' ', '_').replace('/', '_')}_heads"


def strips_figure(models: Sequence[AtlasModel]) -> Figure | None:
    """The kinds of the heads of all models, a strip each; None where they were not measured."""
    tables = {model.label: model.table for model in models if model.kind != "preparation" and _has_kinds(model)}
    return kind_strips(tables) if tables else None


def _listed(value: object) -> object:
    return " ".join(map(str, value)) if isinstance(value, list | tuple) else value


def identities(models: Sequence[AtlasModel], problems: Mapping[str, str]) -> Table:
    """What each model is: who made it, on what it was trained, how its pictures are prepared, and which weights."""
    rows = []
    for model in models:
        record = model.record
        preparation = record.get("preparation") or {}
        texts = {
            name: str(record.get(name) or MISSING) for name in ("model", "trained_on", "citation", "licence", "note")
        }
        digest = str(record.get("digest") or MISSING)
        row = Row().both("label", model.label, "model").both("name", texts["model"], "loaded as")
        for name, title in (
            ("trained_on", "trained on"),
            ("citation", "citation"),
            ("licence", "licence"),
            ("note", "note"),
        ):
            row.both(name, texts[name], title)
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
        best, other, preparation = most_local_head(own.heads), most_local_head(model.heads), model.record["preparation"]
        row = Row().both("label", own.label, "model")
        row.both("mean", _numbers(preparation["mean"])).both("std", _numbers(preparation["std"]))
        row.interval("own", _interval(best), "most local head, own").interval("min_mad", _interval(other), "this one")
        found = differ(other, best).estimate
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


def depth_figure(models: Sequence[AtlasModel]) -> Figure:
    """A panel per trained model: the least, the mean and the largest distance of each layer's heads over the depth;
    random weights of the same architecture dashed, uniform attention dotted."""
    by_label = {model.label: model for model in models}
    shown = [model for model in models if model.kind == "trained"] or list(models)
    num_rows = -(-len(shown) // _PANELS_PER_ROW)
    num_columns = -(-len(shown) // num_rows)
    with house_style():
        figure = Figure(figsize=(2.5 * num_columns + 0.6, 2.2 * num_rows + 0.9), layout="constrained")
        panels = figure.subplots(num_rows, num_columns, sharex=True, sharey=True, squeeze=False).ravel()
        for place, (panel, model) in enumerate(zip(panels, shown, strict=False)):
            depth_L, mad = _depths(model), model.table.mad
            panel.fill_between(
                depth_L,
                np.nanmin(mad, 1),
                np.nanmax(mad, 1),
                color=_COLOUR,
                alpha=0.25,
                linewidth=0,
                gid=f"range-{place}",
            )
            panel.plot(depth_L, np.nanmean(mad, 1), color=_COLOUR, marker="o", markersize=3, gid=f"mean-{place}")
            if (twin := by_label.get(model.beside or "")) is not None:
                random_L = np.nanmean(twin.table.mad, 1)
                panel.plot(
                    _depths(twin), random_L, color=MUTED, linestyle=(0, (4, 2)), linewidth=1, gid=f"random-{place}"
                )
            if model.table.uniform is not None:
                panel.plot(depth_L, model.table.uniform, **UNIFORM, gid=f"uniform-{place}")
            panel.set_title(shorten(model.label, FIGURE_LABEL_LIMIT), parse_math=False, color=INK, fontsize=8.5)
            light_grid(panel)
        for panel in panels[len(shown) :]:
            panel.remove()
        panels[0].set_ylim(bottom=0.0)
        figure.supxlabel("depth (0: first layer, 1: last layer)", fontsize=9.0)
        figure.supylabel(DISTANCE_LABEL, fontsize=9.0)
        handles = [
            *panels[0].plot([], [], color=_COLOUR, marker="o", markersize=3),
            *panels[0].plot([], [], color=_COLOUR, alpha=0.25, linewidth=7),
            *panels[0].plot([], [], color=MUTED, linestyle=(0, (4, 2)), linewidth=1),
            *panels[0].plot([], [], **UNIFORM),
        ]
        labels = ("mean of a layer’s heads", "least to largest", "random weights", "uniform attention")
        add_legend(figure, handles, labels, loc="outside upper left", ncols=4)
    return figure


def _depths(model: AtlasModel) -> np.ndarray:
    return np.linspace(0, 1, len(model.table.mad)) if len(model.table.mad) > 1 else np.zeros(1)


def sentences(models: Sequence[AtlasModel]) -> list[str]:
    """What the atlas says, the most important first."""
    trained = [model for model in models if model.kind == "trained"] or list(models)
    said = [_of_most_local(trained, [model for model in models if model.kind == "random"])]
    if own := _of_own_patch(trained):
        said.append(own)
    early = [model for model in trained if model.most_local_layer() <= _EARLY * (len(model.table.mad) - 1)]
    places = ", ".join(f"{quoted(one.label)} {one.heads.layers()[one.most_local_layer()]}" for one in trained)
    said.append(
        f"The layer whose heads have the lowest mean distance lies in the first third of the depth in {len(early)} of "
        f"{len(trained)} models (layers from 0: {places})."
    )
    if registers := _of_registers(trained):
        said.append(registers)
    if sinks := _of_sinks(trained):
        said.append(sinks)
    said += _of_preparations(models)
    return said


def _of_most_local(trained: Sequence[AtlasModel], random: Sequence[AtlasModel]) -> str:
    best = sorted((most_local_head(model.heads) for model in trained), key=lambda quantity: quantity.mean)
    low, high = best[0], best[-1]
    if len(best) == 1:
        text = f"The most local head of {quoted(low.label)} has a mean attention distance of {low.mean:.3f}"
    else:
        text = (
            f"The most local heads of {len(best)} trained models have mean attention distances from {low.mean:.3f} "
            f"({quoted(low.label)}) to {high.mean:.3f} ({quoted(high.label)})"
        )
    if random:
        found = sorted(most_local_head(model.heads).mean for model in random)
        text += f"; with random weights of the same architectures {_span(found[0], found[-1])}"
    return text + "."


def _span(low: float, high: float) -> str:
    return f"it is {low:.3f}" if f"{low:.3f}" == f"{high:.3f}" else f"they are {low:.3f} to {high:.3f}"


def _of_own_patch(trained: Sequence[AtlasModel]) -> str:
    shares = {model.label: model.table.extra["share_self"] for model in trained if "share_self" in model.table.extra}
    if not shares:
        return ""
    label = max(shares, key=lambda name: float(np.nanmax(shares[name])))
    values = shares[label]
    layer, head = np.unravel_index(np.nanargmax(values), values.shape)
    having = [name for name, found in shares.items() if np.nanmax(found) >= _OWN_PATCH]
    text = (
        "The largest share of its attention that any head pays to its own patch is "
        f"{share(float(values[layer, head]))} ({quoted(label)}, layer {layer}, head {head}); heads that pay half of it "
        f"or more there are in {len(having)} of {len(shares)} models"
    )
    lacking = [
        f"{quoted(name)} at most {share(float(np.nanmax(found)))}"
        for name, found in shares.items()
        if name not in having
    ]
    return text + (f" ({', '.join(lacking)})." if lacking and having else ".")


def _of_registers(trained: Sequence[AtlasModel]) -> str:
    found = []
    for model in trained:
        values = model.table.extra.get("share_registers")
        if values is not None and np.nanmax(values) > 0:
            by_layer = np.nanmean(values, axis=1)
            layer = int(np.argmax(by_layer))
            found.append(f"{share(float(by_layer[layer]))} in layer {layer} of {quoted(model.label)}")
    return f"Registers get up to {', '.join(found)}, over the heads of a layer." if found else ""


def _of_sinks(trained: Sequence[AtlasModel]) -> str:
    """Whether single patches that receive much, or have large norms, are what the distances come from."""
    found = []
    for model in trained:
        extra = model.table.extra
        if not {"mad_without_sinks", "outlier_share"} <= extra.keys():
            continue
        changes = extra["mad_without_sinks"] - model.table.mad
        of_best = float(changes.flat[np.nanargmin(model.table.mad)])
        found.append(
            f"{quoted(model.label)} {np.nanmax(np.abs(changes)):.3f} (the most local head "
            f"{rounded(of_best, signed=True)}; outliers {share(float(np.nanmax(extra['outlier_share'])))})"
        )
    if not found:
        return ""
    return (
        "Leaving out sinks, single patches that receive more than ten times the mean, changes the distance of a head "
        f"by so much at most: {', '.join(found)}. In brackets also the largest share of patches that are outliers "
        "by the norm of their token."
    )


def _of_preparations(models: Sequence[AtlasModel]) -> list[str]:
    by_label = {model.label: model for model in models}
    changed: dict[str, list[float]] = {}
    for model in models:
        if model.kind == "preparation" and model.beside in by_label:
            own = most_local_head(by_label[model.beside].heads).mean
            changed.setdefault(model.beside, [own]).append(most_local_head(model.heads).mean)
    return [
        f"Preparation counts: on the same pictures the most local head of {quoted(label)} has {values[0]:.3f} with the "
        f"model’s own mean and standard deviation, and {min(values[1:]):.3f} to {max(values[1:]):.3f} with others."
        for label, values in changed.items()
    ]


def write_atlas_page(
    path: Path,
    *,
    title: str,
    about: str,
    models: Sequence[AtlasModel],
    problems: Mapping[str, str],
    command: str,
) -> None:
    """Write the page, all of it or nothing."""
    headline, *details = sentences(models)
    prepared, extra = preparations(models), further(models)
    failed = "".join(f"<li>{label_html(label)}: {escape(why)}</li>" for label, why in problems.items())
    figure, strips = depth_figure(models), strips_figure(models)
    by_kind = "The heads of each model by where their attention goes; random weights below."
    parts = [
        Section(name="models", heading="Models", body=table_html(overview(models, problems))),
        Section(name="identities", heading="What each model is", body=table_html(identities(models, {}))),
        Section(name="failed", heading="Not measured", body=f"<ul>{failed}</ul>" if failed else ""),
        Section(
            name="kinds",
            heading="Kinds of heads",
            body="" if strips is None else figure_html("kinds", strips, by_kind, by_kind),
        ),
        Section(name="further", heading="What else was measured", body="" if extra is None else table_html(extra)),
        Section(name="preparation", heading="Preparation", body="" if prepared is None else table_html(prepared)),
        Section(name="terms", heading="How to read this", body=terms_html(None, _INTERVALS)),
        Section(name="again", heading="Run it again", body=command_html(command)),
        Section(name="cite", heading="Cite it", body=citing_html()),
    ]
    caption = (
        "Each layer’s heads, from the first layer to the last: the mean, and from the least to the largest. Dashed: "
        "the same architecture with random weights. Dotted: uniform attention."
    )
    document = Document(
        title=title,
        headline=text_html(headline),
        details=[*([text_html(about)] if about else []), *map(text_html, details)],
        hero=figure_html("depth", figure, f"{caption} {headline}", caption),
        sections=parts,
    )
    write_text(path, document.html())
