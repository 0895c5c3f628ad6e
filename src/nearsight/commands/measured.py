"""What `nearsight measure` has found: as files, as text, and as one object for machines."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from nearsight.commands.exploring import explorer_of
from nearsight.commands.further import extra_tables_in, further_files, write_extra_tables
from nearsight.commands.pictures import PreparedImages
from nearsight.commands.subjects import Subject
from nearsight.errors import InputError
from nearsight.files import output_folder
from nearsight.lens import HeadTable, patch_grid
from nearsight.report.explorer import Explorer
from nearsight.report.figures.models import FIGURES, write_figures
from nearsight.report.figures.style import figure_files
from nearsight.report.inputs import DESCRIPTION, ModelHeads, model_heads, shorten, with_images, write_measured
from nearsight.report.page.document import PAGE, Section
from nearsight.report.page.models import common_grid, write_page
from nearsight.report.reading import compare_with_first, describe, layer_table
from nearsight.train import write_heads
from nearsight.train.integrity import provenance

LAYERS_NAMED = 3
LABEL_LIMIT = 40
EXPLORER = "explorer.json"
"""Where the heads look on a few images, kept for a page that is made when the model is no longer there."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A subject, and what was seen of it."""

    subject: Subject
    table: HeadTable
    heads: ModelHeads
    layers: Sequence[int]
    """The numbers that the layers of the table have in the whole model."""
    folder: Path
    """Where its tables go."""

    @classmethod
    def of(
        cls, subject: Subject, table: HeadTable, layers: Sequence[int], folder: Path, device: torch.device
    ) -> "Measured":
        heads = _heads(subject, table, layers, device)
        return cls(subject=subject, table=table, heads=heads, layers=layers, folder=folder)

    def files(self) -> tuple[Path, Path]:
        return _tables_in(self.folder)

    @property
    def is_at_home(self) -> bool:
        """Whether its tables go to the folder of the run that it is."""
        run = self.subject.run
        return run is not None and self.files()[0].resolve() == run.heads.resolve()

    def write_extra_tables(self, what: Sequence[str]) -> list[Path]:
        return write_extra_tables(self.table, self.layers, what, self.folder)

    def as_json(self) -> dict[str, Any]:
        rows = self.heads.measured()
        return {
            "label": self.subject.label,
            "heads": rows.astype(object).where(rows.notna(), None).to_dict(orient="records"),
            "uniform": {str(layer): self.heads.uniform_distance(layer) for layer in self.heads.layers()},
            "images": _images_record(self.subject),
            "skipped": dict(self.table.skipped),
            "notes": list(self.subject.notes),
        }


def _heads(subject: Subject, table: HeadTable, numbers: Sequence[int], device: torch.device) -> ModelHeads:
    """A subject's heads for the report, with the numbers its layers have in the whole model."""
    frame = table.to_frame()
    frame = frame.assign(layer=[numbers[place] for place in frame["layer"]], epoch=subject.epoch)
    if subject.run is not None:
        model = model_heads(subject.run, subject.label, heads=frame)
        if isinstance(subject.images, PreparedImages):  # not those of the run, which its config describes
            model = replace(model, config={**(model.config or {}), "measured_on": _images_record(subject)})
    else:
        model = ModelHeads(label=subject.label, heads=frame, config=subject.config, provenance=provenance(device))
    uniform = None if table.uniform is None else dict(zip(numbers, table.uniform.tolist(), strict=True))
    return with_images(replace(model, grids=_grids(subject, table, numbers), uniform=uniform), table)


def _images_record(subject: Subject) -> dict[str, Any]:
    images = subject.images
    return {"from": images.name, "num": len(images), "preparation": images.preparation}


def _grids(subject: Subject, table: HeadTable, numbers: Sequence[int]) -> dict[int, tuple[int, int]] | None:
    """Rows and columns of each layer's tokens, where they are known."""
    if "grid_size" in table.extra:
        grids = table.extra["grid_size"].astype(int).tolist()
        return {number: (rows, columns) for number, (rows, columns) in zip(numbers, grids, strict=True)}
    grid_size = patch_grid(subject.model)
    return None if grid_size is None else dict.fromkeys(numbers, grid_size)


def write_all(
    out: Path,
    measured: Sequence[Measured],
    command: str,
    further: Sequence[Section] = (),
    explorer: Explorer | None = None,
) -> list[Path]:
    """Write everything, once all checks have passed; returns the files. `further`: sections of the page."""
    models = [one.heads for one in measured]
    output_folder(out)
    # Before anything is written: even after an interruption, files of two calls never lie side by side.
    _remove(list(_files_of_earlier_calls(out, measured)))
    described: list[Path] = []
    for one in measured:
        table, arrays = one.files()
        run = one.subject.run
        # In its own folder, a run keeps what was measured during its training, and says itself what it is.
        during = run.read_heads() if run is not None and one.is_at_home else None
        write_heads(table, one.heads.heads, one.subject.epoch, others=during)
        one.table.save(arrays)
        if not one.is_at_home:
            described.append(write_measured(one.folder, one.heads, command))
    figures = write_figures(models, out / "figures", grid_size=common_grid(models))
    explorer = explorer or explore(measured)
    if explorer is not None and described:  # of a run at home it can be made again
        explorer.write(out / EXPLORER)
        described.append(out / EXPLORER)
    page = write_page_of(out, measured, command, explorer, further)
    return [*(path for one in measured for path in one.files()), *described, *figures, page]


def write_page_of(
    out: Path, measured: Sequence[Measured], command: str, explorer: Explorer | None, further: Sequence[Section]
) -> Path:
    """The page alone."""
    models, page = [one.heads for one in measured], out / PAGE
    title = " and ".join(filter(None, [", ".join(one.label for one in models[:-1]), models[-1].label]))
    write_page(
        page,
        title=title,
        models=models,
        grid_size=common_grid(models),
        command=command,
        explorer=explorer,
        further=further,
    )
    return page


def _tables_in(folder: Path) -> tuple[Path, Path]:
    return folder / "heads.csv", folder / "heads.npz"


def _files_of_earlier_calls(out: Path, measured: Sequence[Measured]) -> Iterator[Path]:
    """Where they may be; whatever else is in a folder is not ours."""
    for one in measured:
        if one.is_at_home and one.folder != out:  # all else there is of the run too, and stays true
            yield from extra_tables_in(one.folder)
        else:
            # Its heads.csv stays until it is replaced: a run's own holds what was measured during training.
            yield one.files()[1]
            yield from _files_beside_tables(one.folder)
    if all(one.folder != out for one in measured):
        # Tables without a description are a run's own.
        yield from _tables_in(out) if (out / DESCRIPTION).exists() else ()
        yield from _files_beside_tables(out)


def _files_beside_tables(folder: Path) -> Iterator[Path]:
    yield folder / PAGE
    yield folder / EXPLORER
    yield from (path for name in FIGURES for path in figure_files(folder / "figures", name))
    yield from further_files(folder)
    yield folder / DESCRIPTION  # the last: it says whose the tables are


def _remove(files: Sequence[Path]) -> None:
    for path in files:
        try:
            if path.is_file() or path.is_symlink():
                path.unlink(missing_ok=True)
        except OSError as error:
            raise InputError(
                f"{path} of an earlier measurement cannot be removed: {error.strerror}; choose another --out"
            ) from error


def explore(measured: Sequence[Measured]) -> Explorer | None:
    """Where the heads look on some of the images; None where that cannot be shown."""
    subjects = [one.subject for one in measured]
    device = next(subjects[0].model.parameters(), torch.zeros(())).device
    try:
        return explorer_of(subjects, [one.heads for one in measured], device)
    except (InputError, torch.OutOfMemoryError):  # the tables are what was asked for, and they are there
        return None


def _sentences(models: Sequence[ModelHeads]) -> list[str]:
    """What the numbers say: the clearest comparison in full, of the others the verdicts; the page has them all."""
    if len(models) == 1:
        return list(describe(models[0]))
    first, *others = compare_with_first(models)
    return [*first.sentences, *(reading.headline for reading in others)]


def _comparisons(models: Sequence[ModelHeads]) -> list[dict[str, Any]]:
    return [reading.as_json() for reading in compare_with_first(models)]


def _images(measured: Sequence[Measured]) -> list[str]:
    """Which images, and how they were prepared: the numbers depend on that. Models that saw the same share a line."""
    seen: dict[str, list[str]] = {}
    for one in measured:
        images = one.subject.images
        text = f"{len(images)} of {images.name}, {images.preparation}"
        seen.setdefault(text, []).append(one.subject.label)
    if len(seen) == 1:
        return [f"Images: {text}" for text in seen]
    return [f"Images of {', '.join(labels)}: {text}" for text, labels in seen.items()]


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
    objects, heads = [one.as_json() for one in measured], [one.heads for one in measured]
    return {
        **(objects[0] if len(objects) == 1 else {"models": objects, "comparisons": _comparisons(heads)}),
        "sentences": _sentences(heads),
        "files": [str(path) for path in files],
    }


def as_text(out: Path, measured: Sequence[Measured]) -> list[str]:
    models = [one.heads for one in measured]
    numbers = layer_table(models).rename(columns=lambda label: shorten(label, LABEL_LIMIT), level=0)
    if len(models) == 1:
        numbers = numbers.droplevel("model", axis="columns")
        known = [models[0].uniform_distance(layer) for layer in models[0].layers()]
        if None not in known:
            numbers["uniform"] = known
    tables = ", ".join(str(one.files()[0]) for one in measured)
    return [
        numbers.to_string(float_format=lambda value: f"{value:.3f}", na_rep="–"),
        "",
        *_sentences(models),
        *_images(measured),
        *(f"Note: {note}" for note in _notes(measured)),
        "",
        f"Table{'s' if len(measured) > 1 else ''}: {tables}",
        f"Figures: {out / 'figures'}",
        f"Page: {out / PAGE}",
    ]
