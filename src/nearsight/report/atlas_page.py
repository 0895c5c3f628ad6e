"""What an atlas shows: two figures, sentences, and one page. Each is made once, for the files and for the page.

Shape suffixes: L layers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Self

import numpy as np
from matplotlib.figure import Figure

from nearsight.files import output_folder, replacing, write_text
from nearsight.report.atlas import AtlasModel, SinkChange, further, head_rows, identities, overview, preparations
from nearsight.report.differences import SMALLEST, differ, quoted
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
    save_figure,
)
from nearsight.report.inputs import shorten
from nearsight.report.page.document import (
    PAGE,
    Document,
    Section,
    citing_html,
    command_html,
    figure_html,
    terms_html,
)
from nearsight.report.page.tables import label_html, opened_html, table_html, text_html
from nearsight.report.tables import Table, difference_in_words, rounded, share

_PANELS_PER_ROW = 4
_COLOUR = "#0072b2"
_OWN_PATCH = 0.5
"""Share of a head's attention on its own patch from which on the sentences call it an own-patch head."""
_EARLY = 1 / 3
"""Of the depth."""
_INTERVALS = (
    "95 % over pictures (Student’s t): how certain a number is for these weights on pictures like these. A model with "
    "and without training is compared picture by picture. The most local head, and the one that sinks move most, are "
    "chosen on one half of the pictures and measured on the other, and the other way round. Another training of the "
    "same recipe may differ by more than any of these intervals."
)


@dataclass(frozen=True, kw_only=True, eq=False)
class AtlasReport:
    """All that is said and drawn of measured models."""

    models: Sequence[AtlasModel]
    problems: Mapping[str, str]
    """Label → why a model was not measured."""
    overview: Table
    identities: Table
    preparations: Table | None
    depth: Figure
    strips: Figure | None
    headline: str
    sentences: Sequence[str]
    """The most important first, without the headline."""

    @classmethod
    def of(cls, models: Sequence[AtlasModel], problems: Mapping[str, str]) -> Self:
        return cls(
            models=models,
            problems=problems,
            overview=overview(models, problems),
            identities=identities(models, problems),
            preparations=preparations(models),
            depth=depth_figure(models),
            strips=strips_figure(models),
            headline=headline(models),
            sentences=sentences(models),
        )

    def write(self, folder: Path, *, title: str, about: str, command: str) -> list[Path]:
        """The tables, the figures and the page; the files."""
        tables = (self.overview, self.identities, self.preparations)
        files = [path for table in tables if table is not None for path in table.write(folder)]
        files.append(folder / "atlas-heads.csv")
        with replacing(files[-1]) as temporary:
            head_rows(self.models).to_csv(temporary, index=False)
        figures = {"atlas-depth": self.depth, "atlas-kinds": self.strips}
        for name, figure in figures.items():
            if figure is not None:
                files += save_figure(figure, output_folder(folder / "figures"), name)
        files.append(folder / PAGE)
        write_text(files[-1], self.page(title=title, about=about, command=command).html())
        return files

    def page(self, *, title: str, about: str, command: str) -> Document:
        extra = further(self.models)
        failed = "".join(f"<li>{label_html(label)}: {escape(why)}</li>" for label, why in self.problems.items())
        by_kind = "The heads of each model by where their attention goes; random weights below."
        caption = (
            "Each layer’s heads, from the first layer to the last: the mean, and from the least to the largest. "
            "Dashed: the same architecture with random weights. Dotted: uniform attention."
        )
        strips = "" if self.strips is None else figure_html("kinds", self.strips, by_kind, by_kind)
        prepared = "" if self.preparations is None else table_html(self.preparations)
        return Document(
            title=title,
            headline=text_html(self.headline),
            details=[text_html(text) for text in (about, *self.sentences) if text],
            hero=figure_html("depth", self.depth, f"{caption} {self.headline}", caption),
            sections=[
                Section(name="models", heading="Models", body=table_html(self.overview)),
                Section(name="kinds", heading="Kinds of heads", body=strips),
                Section(name="preparation", heading="Preparation", body=prepared),
                Section(name="identities", heading="What each model is", body=table_html(self.identities)),
                Section(name="failed", heading="Not measured", body=f"<ul>{failed}</ul>" if failed else ""),
                Section(
                    name="further", heading="What else was measured", body="" if extra is None else opened_html(extra)
                ),
                Section(name="terms", heading="How to read this", body=terms_html(None, _INTERVALS)),
                Section(name="again", heading="Run it again", body=command_html(command)),
                Section(name="cite", heading="Cite it", body=citing_html()),
            ],
        )


def _trained(models: Sequence[AtlasModel]) -> list[AtlasModel]:
    return [model for model in models if model.kind == "trained"] or list(models)


def headline(models: Sequence[AtlasModel]) -> str:
    """Where the most local heads are, beside those of random weights."""
    trained, random = _trained(models), [model for model in models if model.kind == "random"]
    found = _span(sorted(model.most_local.mean for model in trained))
    one = f"The most local head of {quoted(trained[0].label)}: {found}"
    text = one if len(trained) == 1 else f"The most local heads of {len(trained)} models: {found}"
    if random and trained != random:
        text += f"; with random weights {_span(sorted(model.most_local.mean for model in random))}"
    return text + "."


def sentences(models: Sequence[AtlasModel]) -> list[str]:
    """What the atlas says beside its headline, the most important first."""
    trained = _trained(models)
    said = [_of_most_local(trained, {model.label: model for model in models}), _of_own_patch(trained)]
    said += [_of_depth(trained), _of_registers(trained), _of_sinks(trained), *_of_preparations(models)]
    return [text for text in said if text]


def _span(values: Sequence[float]) -> str:
    low, high = f"{values[0]:.3f}", f"{values[-1]:.3f}"
    return low if low == high else f"{low} to {high}"


def _of_most_local(trained: Sequence[AtlasModel], by_label: Mapping[str, AtlasModel]) -> str:
    text = ""
    if len(trained) > 1:
        low, *_, high = sorted(trained, key=lambda model: model.most_local.mean)
        text = f"The lowest is that of {quoted(low.label)}, the highest that of {quoted(high.label)}. "
    pairs = [(model, by_label[model.beside]) for model in trained if model.beside in by_label]
    lower = [pair for pair in pairs if differ(pair[0].most_local, pair[1].most_local).estimate.high < 0]
    if pairs:
        text += (
            f"In {len(lower)} of {len(pairs)} models it is lower than with random weights, picture by picture, and the "
            "interval excludes 0."
        )
    return text.strip()


def _of_own_patch(trained: Sequence[AtlasModel]) -> str:
    shares = {model.label: model.table.extra["share_self"] for model in trained if "share_self" in model.table.extra}
    if not shares:
        return ""
    having, lacking = [], []
    for label, values in shares.items():
        layer, head = np.unravel_index(np.nanargmax(values), values.shape)
        most = float(values[layer, head])
        if most >= _OWN_PATCH:
            having.append(f"{quoted(label)} (layer {layer}, head {head}: {share(most)})")
        else:
            lacking.append(f"{quoted(label)} {share(most)}")
    text = (
        f"Heads that pay half of their attention or more to their own patch: in {len(having)} of {len(shares)} models"
    )
    text += f", {', '.join(having)}." if having else "."
    return text + (f" The most that a head pays to it in the others: {', '.join(lacking)}." if lacking else "")


def _of_depth(trained: Sequence[AtlasModel]) -> str:
    late = [
        f"{quoted(model.label)}, layer {model.heads.layers()[model.most_local_layer()]} of {len(model.table.mad)}"
        for model in trained
        if model.most_local_layer() > _EARLY * (len(model.table.mad) - 1)
    ]
    return (
        "The layer whose heads have the lowest mean distance lies in the first third of the depth in "
        f"{len(trained) - len(late)} of {len(trained)} models"
        + (f"; not in {'; '.join(late)} (from 0)." if late else ".")
    )


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
    found = {model: model.sink_changes for model in trained}
    moved, least = [], []
    for model, changes in found.items():
        if changes is None:
            continue
        if abs(changes[0].estimate.value) < SMALLEST:
            least.append(abs(changes[0].estimate.value))
            continue
        text = f"{quoted(model.label)} by {_said(changes[0])}, of its most local head by {_said(changes[1])}"
        if "outlier_share" in model.table.extra:
            most = float(np.nanmax(model.table.extra["outlier_share"]))
            text += f" (up to {share(most)} of its patches are outliers by the norm of their token)"
        moved.append(text)
    if not moved and not least:
        return ""
    start = "Without sinks, single patches that receive more than ten times the mean, the distance "
    if not moved:
        return f"{start}of no head changes by more than {rounded(max(least))}."
    others = f"; in the others it changes by {rounded(max(least))} at most" if least else ""
    return f"{start}of one head changes in {'; in '.join(moved)}{others}."


def _said(change: SinkChange) -> str:
    return f"{difference_in_words(change.estimate)} (layer {change.layer}, head {change.head})"


def _of_preparations(models: Sequence[AtlasModel]) -> list[str]:
    by_label = {model.label: model for model in models}
    changed: dict[str, list[float]] = {}
    for model in models:
        if model.kind == "preparation" and model.beside in by_label:
            own = by_label[model.beside].most_local.mean
            changed.setdefault(model.beside, [own]).append(model.most_local.mean)
    return [
        f"Preparation counts: on the same pictures the most local head of {quoted(label)} has {values[0]:.3f} with the "
        f"model’s own mean and standard deviation, and {min(values[1:]):.3f} to {max(values[1:]):.3f} with others."
        for label, values in changed.items()
    ]


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


def strips_figure(models: Sequence[AtlasModel]) -> Figure | None:
    """The kinds of the heads of all models, a strip each; None where they were not measured."""
    tables = {model.label: model.table for model in models if model.kind != "preparation" and model.has_kinds}
    return kind_strips(tables) if tables else None
