"""What `nearsight measure` has found: as files, as text, and as one object for machines."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nearsight.commands.subjects import Subject
from nearsight.files import output_folder
from nearsight.lens import HeadTable
from nearsight.report import ModelHeads, compare_with_first, describe, layer_table, write_page
from nearsight.report.inputs import shorten
from nearsight.report.runs import write_figures
from nearsight.train import write_heads

LAYERS_NAMED = 3
LABEL_LIMIT = 40


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A subject, and what was seen of it."""

    subject: Subject
    table: HeadTable
    heads: ModelHeads
    folder: Path
    """Where its tables go."""

    def files(self) -> tuple[Path, Path]:
        return self.folder / "heads.csv", self.folder / "heads.npz"

    def as_json(self) -> dict[str, Any]:
        rows = self.heads.measured()
        return {
            "label": self.subject.label,
            "heads": rows.astype(object).where(rows.notna(), None).to_dict(orient="records"),
            "skipped": dict(self.table.skipped),
            "notes": list(self.subject.notes),
        }


def write_all(out: Path, measured: Sequence[Measured], command: str) -> list[Path]:
    """Everything, now that nothing can be refused any more; the files."""
    models = [one.heads for one in measured]
    grids = {grid for model in models for grid in (model.grids or {}).values()}
    # The mark of uniform attention has one place only if all layers have the same grid.
    grid_size = grids.pop() if len(grids) == 1 and all(model.grids for model in models) else None
    output_folder(out)
    for one in measured:
        table, arrays = one.files()
        run = one.subject.run
        # In its own folder, a run keeps what was measured during its training.
        during = run.read_heads() if run is not None and table.resolve() == run.heads.resolve() else None
        write_heads(table, one.heads.heads, one.subject.epoch, others=during)
        one.table.save(arrays)
    figures = write_figures(models, out / "figures", grid_size=grid_size)
    page = out / "report.html"
    title = " and ".join(filter(None, [", ".join(one.label for one in models[:-1]), models[-1].label]))
    write_page(page, title=title, models=models, grid_size=grid_size, command=command)
    return [*(path for one in measured for path in one.files()), *figures, page]


def _sentences(models: Sequence[ModelHeads]) -> list[str]:
    """What the numbers say: the clearest comparison in full, of the others the verdicts; the page has them all."""
    if len(models) == 1:
        return list(describe(models[0]))
    first, *others = compare_with_first(models)
    return [*first.sentences, *(reading.headline for reading in others)]


def _notes(measured: Sequence[Measured]) -> list[str]:
    notes = [f"{one.subject.label}: {note}" for one in measured for note in one.subject.notes]
    for one in measured:
        by_reason: dict[str, list[str]] = {}
        for name, reason in one.table.skipped.items():
            by_reason.setdefault(reason, []).append(name)
        for reason, names in by_reason.items():
            more = f" and {len(names) - LAYERS_NAMED} more" if len(names) > LAYERS_NAMED else ""
            notes.append(f"{one.subject.label}: not measured: {', '.join(names[:LAYERS_NAMED])}{more} ({reason})")
    if len({one.subject.images.name for one in measured}) > 1:
        where = "; ".join(f"{one.subject.label} on {one.subject.images.name}" for one in measured)
        notes.append(f"the models were measured on different images ({where}); --images gives all of them the same")
    return notes


def as_json(measured: Sequence[Measured], files: Sequence[Path]) -> dict[str, Any]:
    objects = [one.as_json() for one in measured]
    return {
        **(objects[0] if len(objects) == 1 else {"models": objects}),
        "sentences": _sentences([one.heads for one in measured]),
        "files": [str(path) for path in files],
    }


def as_text(out: Path, measured: Sequence[Measured]) -> list[str]:
    models = [one.heads for one in measured]
    numbers = layer_table(models).rename(columns=lambda label: shorten(label, LABEL_LIMIT), level=0)
    if len(models) == 1:
        numbers = numbers.droplevel("model", axis="columns")
    tables = ", ".join(str(one.files()[0]) for one in measured)
    return [
        numbers.to_string(float_format=lambda value: f"{value:.3f}", na_rep="–"),
        "",
        *_sentences(models),
        *(f"Note: {note}" for note in _notes(measured)),
        "",
        f"Table{'s' if len(measured) > 1 else ''}: {tables}",
        f"Figures: {out / 'figures'}",
        f"Page: {out / 'report.html'}",
    ]
