"""An atlas as people get it: tables, two figures, sentences, and one page of all of them. Each is made once.

Shape suffixes: L layers.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any, Self

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from nearsight.files import output_folder, read_object, replacing, write_json, write_text
from nearsight.models.lists import RANDOM
from nearsight.report.atlas import (
    TEXTS,
    AtlasModel,
    further,
    head_rows,
    identities,
    overview,
    preparations,
    read_model,
    trained_of,
    with_texts,
)
from nearsight.report.atlas_words import headline, sentences
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
from nearsight.report.inputs import DESCRIPTION, read_measured, shorten
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
from nearsight.report.tables import MISSING, Table, records
from nearsight.train.integrity import joined

_SAID = ("command", "title", "about")
_PANELS_PER_ROW = 4
_COLOUR = "#0072b2"
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
    said: Mapping[str, str]
    """The `command`, the `title` of the page, and what the list is `about`."""
    overview: Table
    identities: Table
    preparations: Table | None
    depth: Figure
    strips: Figure | None
    headline: str
    sentences: Sequence[str]
    """The most important first, without the headline."""

    @classmethod
    def of(cls, models: Sequence[AtlasModel], problems: Mapping[str, str], said: Mapping[str, str]) -> Self:
        return cls(
            models=models,
            problems=problems,
            said=said,
            overview=overview(models, problems),
            identities=identities(models, problems),
            preparations=preparations(models),
            depth=depth_figure(models),
            strips=strips_figure(models),
            headline=headline(models),
            sentences=sentences(models),
        )

    @classmethod
    def read(cls, folder: Path) -> Self:
        """From what `write` and the measuring of the models have left."""
        rows = records(pd.read_csv(folder / "atlas.csv", dtype=str, keep_default_na=False))
        folders = {
            read_measured(path.parent).heads.label: path.parent for path in folder.glob(f"models/*/{DESCRIPTION}")
        }
        texts = {
            row["label"]: {name: "" if row[name] == MISSING else row[name] for name in TEXTS}
            for row in records(pd.read_csv(folder / "models.csv", dtype=str, keep_default_na=False))
        }
        models = [
            with_texts(read_model(folders[row["label"]], row["kind"], row.get("beside") or None), texts[row["label"]])
            for row in rows
            if row["kind"] != "failed"
        ]
        problems = {row["label"]: row["problem"] for row in rows if row["kind"] == "failed"}
        provenance = read_object(folder / "provenance.json", missing=str(folder))
        return cls.of(models, problems, {name: str(provenance.get(name, "")) for name in _SAID})

    def write(self, folder: Path) -> list[Path]:
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
        files.append(folder / "provenance.json")
        write_json(files[-1], self._provenance())
        files.append(folder / PAGE)
        write_text(files[-1], self.page().html())
        return files

    def _provenance(self) -> dict[str, Any]:
        certificates = [model.heads.provenance or {} for model in self.models]
        return {
            **self.said,
            **joined(certificates, ("commit", "versions", "hardware")),
            **joined([model.record for model in self.models], ("images",)),
            "weights": {model.label: model.record["digest"] for model in self.models},
        }

    def as_json(self, files: Sequence[Path]) -> dict[str, Any]:
        numbers = self.overview.numbers
        rows = records(numbers.astype(object).where(numbers.notna(), None))
        return {
            "models": json.loads(json.dumps(rows, default=str)),
            "failed": dict(self.problems),
            "sentences": [self.headline, *self.sentences],
            "files": list(map(str, files)),
        }

    def as_text(self, files: Sequence[Path]) -> list[str]:
        failed = [f"Not measured: {label}: {why}" for label, why in self.problems.items()]
        shown = [str(path) for path in files if path.suffix != ".svg"]
        return [self.overview.shown.to_string(index=False), "", self.headline, *self.sentences, *failed, "", *shown]

    def page(self) -> Document:
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
            title=self.said["title"],
            headline=text_html(self.headline),
            details=[text_html(text) for text in (self.said["about"], *self.sentences) if text],
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
                Section(name="again", heading="Run it again", body=command_html(self.said["command"])),
                Section(name="cite", heading="Cite it", body=citing_html()),
            ],
        )


def depth_figure(models: Sequence[AtlasModel]) -> Figure:
    """A panel per trained model: the least, the mean and the largest distance of each layer's heads over the depth;
    random weights of the same architecture dashed, uniform attention dotted."""
    by_label = {model.label: model for model in models}
    shown = trained_of(models)
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
            panel.tick_params(labelbottom=place + num_columns >= len(shown))  # also above a panel that is not there
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
    tables = {
        # A long name is cut in its middle, and the end is what these have in common.
        f"random: {model.label.removesuffix(RANDOM)}" if model.kind == "random" else model.label: model.table
        for model in models
        if model.kind != "preparation" and model.has_kinds
    }
    return kind_strips(tables) if tables else None
