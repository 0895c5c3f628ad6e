"""`nearsight measure --what …`: what there is to see beside distance and entropy, as tables, figures and sections.

Measurements of heads and layers describe themselves (`nearsight.lens.Measurement`). Three others are no columns of such
a table, and are done here: CKA between layers, rollout over pictures, learned positions.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd
import torch
from matplotlib.figure import Figure

from nearsight.commands.pictures import as_seen
from nearsight.files import output_folder, replacing
from nearsight.lens import WHAT, HeadTable, Measurement, attention_rollout, layer_similarity, position_gram
from nearsight.lens.measurement import MEASUREMENTS
from nearsight.report.ablation import ablation_files
from nearsight.report.figures.heat import head_heatmaps, layer_lines, similarity_heatmap
from nearsight.report.figures.kinds import kind_strips
from nearsight.report.figures.patches import offset_pictures, position_maps
from nearsight.report.figures.pictures import rollout_overlays
from nearsight.report.figures.style import figure_files, save_figure
from nearsight.report.page.document import Section, figure_html

if TYPE_CHECKING:
    from nearsight.commands.measured import Measured

NUM_ROLLOUTS = 8
"""Pictures that are shown under their rollout."""
CKA_BATCH = 64
EXTRA_TABLES = {"head": "extra-heads.csv", "layer": "extra-layers.csv"}
"""What a row is of, and its file."""


@dataclass(frozen=True)
class Further:
    """What was found of models beside their tables of heads: figures, tables that are not per head, and sentences."""

    tables: dict[str, pd.DataFrame] = field(default_factory=dict)
    """By the name of their file."""
    figures: dict[str, dict[str, Figure]] = field(default_factory=dict)
    """What was asked for → figures by the names of their files."""
    sentences: dict[str, list[str]] = field(default_factory=dict)
    """What was asked for → what was found, model by model."""

    def write(self, out: Path) -> list[Path]:
        files: list[Path] = []
        for name, table in self.tables.items():
            files.append(out / f"{name}.csv")
            _write_csv(files[-1], table)
        for figures in self.figures.values():
            folder = output_folder(out / "figures")
            files += [path for name, figure in figures.items() for path in save_figure(figure, folder, name)]
        return files

    def sections(self) -> list[Section]:
        """For the page, one for all that was asked for."""
        return [
            Section(name=f"what-{name}", heading=name[:1].upper() + name[1:], body=self._body(name))
            for name in dict.fromkeys((*self.sentences, *self.figures))
        ]

    def _body(self, name: str) -> str:
        about, sentences = WHAT[name], self.sentences.get(name, [])
        words = "".join(f"<p>{escape(sentence)}</p>" for sentence in sentences)
        drawn = self.figures.get(name, {})
        caption = f"{about[:1].upper()}{about[1:]}."
        return words + "".join(
            figure_html(file, figure, " ".join((caption, *sentences)), caption) for file, figure in drawn.items()
        )


def look_further(measured: "Sequence[Measured]", what: Sequence[str], device: torch.device) -> Further:
    """All that is asked for, in its order; of several models, files are named after their folders."""
    further = Further()
    for name in what:
        figures = _LOOKS[name](measured, device, further.tables) if name in _LOOKS else _pictures(measured, name)
        if figures:
            further.figures[name] = figures
        if sentences := [_of(seen, measured, said) for seen in measured if (said := _summary(seen, name))]:
            further.sentences[name] = sentences
    return further


def _summary(seen: "Measured", name: str) -> str:
    return MEASUREMENTS[name].summary(seen.table, seen.layers) if name in MEASUREMENTS else ""


def _of(seen: "Measured", measured: "Sequence[Measured]", said: str) -> str:
    return f"{seen.subject.label}: {said}" if len(measured) > 1 else said


def _end(seen: "Measured", measured: "Sequence[Measured]") -> str:
    """Of the names of its files."""
    return f"-{seen.folder.name}" if len(measured) > 1 else ""


def _pictures(measured: "Sequence[Measured]", name: str) -> dict[str, Figure]:
    if MEASUREMENTS[name].picture == "strips":  # of all models, one below the other
        return {name: kind_strips({seen.subject.label: seen.table for seen in measured})}
    drawn = {
        f"{name}{_end(seen, measured)}": draw_measurement(
            MEASUREMENTS[name], seen.table, label=seen.subject.label, layers=seen.layers
        )
        for seen in measured
    }
    return {file: figure for file, figure in drawn.items() if figure is not None}


def draw_measurement(kind: type[Measurement], table: HeadTable, *, label: str, layers: Sequence[int]) -> Figure | None:
    """None where it has no picture; `layers` are the numbers that the table's layers have in the whole model."""
    picture = kind.picture
    if picture is None:
        return None
    if picture == "heat":
        return head_heatmaps(table, kind.columns, label=label, layers=layers)
    if picture == "layers":
        return layer_lines(table, kind.columns, label=label, layers=layers)
    if picture == "strips":
        return kind_strips({label: table})
    if picture == "steps":
        return offset_pictures(table, label=label, layers=layers)
    assert callable(picture), f"{kind.__name__} has a picture of an unknown kind, {picture!r}"
    drawn = picture(table, label=label, layers=layers)
    assert isinstance(drawn, Figure)
    return drawn


def _cka(measured: "Sequence[Measured]", device: torch.device, tables: dict[str, pd.DataFrame]) -> dict[str, Figure]:
    one, other = measured[0].subject, measured[-1].subject
    similarity = layer_similarity(
        one.model,
        one.images.batches(CKA_BATCH),
        None if other is one else other.model,
        other_images=None if other is one else other.images.batches(CKA_BATCH),
        batch_size=CKA_BATCH,
        device=device,
    )
    tables["cka"] = similarity.to_frame()
    other_label = None if other is one else other.label
    return {"cka": similarity_heatmap(similarity, label=one.label, other_label=other_label)}


def _rollout(measured: "Sequence[Measured]", device: torch.device, _: dict[str, pd.DataFrame]) -> dict[str, Figure]:
    figures = {}
    for seen in measured:
        images = next(seen.subject.images.batches(NUM_ROLLOUTS))
        maps = attention_rollout(seen.subject.model, images, device=device)
        drawn = rollout_overlays(list(as_seen(seen.subject.images, images)), maps.numpy(), label=seen.subject.label)
        figures[f"rollout{_end(seen, measured)}"] = drawn
    return figures


def _positions(measured: "Sequence[Measured]", _: torch.device, tables: dict[str, pd.DataFrame]) -> dict[str, Figure]:
    figures = {}
    for seen in measured:
        name, positions = f"positions{_end(seen, measured)}", position_gram(seen.subject.model)
        tables[name] = positions.to_frame()
        figures[name] = position_maps(positions, label=seen.subject.label)
    return figures


_LOOKS = {"cka": _cka, "rollout": _rollout, "positions": _positions}


def further_files(folder: Path) -> Iterator[Path]:
    """All that `Further.write`, `write_extra_tables` and `nearsight ablate` may have left in a folder, of one model or
    of several."""
    yield from extra_tables_in(folder)
    yield from ablation_files(folder)
    # Of several models, each has a folder here, after which its files are named.
    ends = ("", *(f"-{table.parent.name}" for table in folder.glob("*/heads.csv")))
    for name in WHAT:
        for end in ("",) if name == "cka" else ends:
            if name in ("cka", "positions"):
                yield folder / f"{name}{end}.csv"
            yield from figure_files(folder / "figures", f"{name}{end}")


def extra_tables_in(folder: Path) -> list[Path]:
    return [folder / name for name in EXTRA_TABLES.values()]


def write_extra_tables(table: HeadTable, layers: Sequence[int], what: Sequence[str], folder: Path) -> list[Path]:
    """Per head and per layer, what was asked for beyond distance and entropy; `layers` are the numbers of the table's
    layers in the whole model."""
    files = []
    asked = {MEASUREMENTS[name].table for name in what if name in MEASUREMENTS}
    for per, name in EXTRA_TABLES.items():
        if per in asked:
            frame = table.extra_frame("head" if per == "head" else "layer")
            files.append(folder / name)
            _write_csv(files[-1], frame.assign(layer=[layers[place] for place in frame["layer"]]))
    return files


def _write_csv(path: Path, table: pd.DataFrame) -> None:
    with replacing(path) as temporary:
        table.to_csv(temporary, index=False)
