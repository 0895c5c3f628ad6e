"""What `nearsight finetune` writes and prints: a model before and after, side by side."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nearsight.commands.finetune import FinetuneOptions
from nearsight.commands.measured import Measured, explore, write_all
from nearsight.commands.pictures import RunImages
from nearsight.commands.subjects import Subject
from nearsight.files import write_json
from nearsight.probe.finetuning import Finetuned, Side
from nearsight.probe.scores import Score
from nearsight.probe.settings import ABLATION_K
from nearsight.report.page.document import PAGE, Section
from nearsight.report.page.tables import table_html
from nearsight.report.tables import MISSING, Row, Table, percent, rounded, span

_TITLES = {
    "own": "its own classifier, %",
    "linear": "linear classifier, %",
    "knn": f"k-NN (k = {ABLATION_K}), %",
}


@dataclass(frozen=True, kw_only=True)
class Page:
    """The two models, their heads, and what their features are worth."""

    found: Finetuned
    options: FinetuneOptions
    out: Path
    measured: tuple[Measured, Measured]

    @classmethod
    def of(cls, found: Finetuned, options: FinetuneOptions, out: Path) -> "Page":
        device = options.torch_device
        images = RunImages(found.dataset, options.num_images, device)

        def measured(label: str, side: Side) -> Measured:
            config = {"model": options.model, "added": options.add, "label": label}
            size = found.dataset.image_size
            subject = Subject(text=label, label=label, model=side.model, images=images, image_size=size, config=config)
            return Measured.of(subject, side.heads, range(len(side.heads.layer_names)), out / label, device)

        return cls(
            found=found,
            options=options,
            out=out,
            measured=(measured("before", found.before), measured("after", found.after)),
        )

    @property
    def _sides(self) -> dict[str, Side]:
        return {"before": self.found.before, "after": self.found.after}

    def table(self) -> Table:
        rows = []
        for label, side in self._sides.items():
            row = Row(model=label)
            for name, title in _TITLES.items():
                score: Score | None = getattr(side, name)
                row = row.both(name, None if score is None else score.value, title, _in_words(score))
            for name, (title, value) in _locality(side).items():
                row.both(name, value, title, rounded(value))
            rows.append(row.both("alpha", side.alpha, "GAug's α", rounded(side.alpha, 4)))
        notes = [
            f"On {len(self.measured[0].subject.images)} test images of {self.found.config.data.name}; in brackets 95 % "
            "intervals over images, which say nothing of other seeds. The linear classifier and k-NN learn from the "
            "features that the model's classifier takes, of "
            f"{min(self.options.num_reference, len(self.found.dataset.train))} training images.",
        ]
        if self.found.before.own is None:
            notes.append("Before, the model has no classifier for these classes.")
        return Table.of("finetuned", "Before and after", rows, notes=notes)

    def write(self, command: str) -> list[Path]:
        measured, table = list(self.measured), self.table()
        section = Section(name="finetuned", heading=table.title, body=table_html(table))
        files = [*write_all(self.out, measured, command, [section], explore(measured)), self.out / "finetune.json"]
        write_json(files[-1], self.as_json(()))
        return files

    def as_json(self, files: Iterable[Path]) -> dict[str, Any]:
        def described(side: Side) -> dict[str, Any]:
            scores = {name: getattr(side, name) for name in _TITLES}
            named = {name: None if score is None else score.as_json() for name, score in scores.items()}
            return {**named, **{name: value for name, (_, value) in _locality(side).items()}, "alpha": side.alpha}

        return {
            "model": self.options.model,
            "added": self.options.add,
            "run": str(self.out / "run"),
            **{label: described(side) for label, side in self._sides.items()},
            "files": [str(path) for path in files],
        }

    def as_text(self) -> list[str]:
        table = self.table()
        return [
            table.shown.to_string(index=False),
            *table.notes,
            "",
            f"Run: {self.found.run.path}",
            f"Page: {self.out / PAGE}",
        ]


def _locality(side: Side) -> dict[str, tuple[str, float]]:
    """Name → title and value."""
    mad = side.heads.to_frame()["mad"]
    return {"min_mad": ("most local head: MAD", float(mad.min())), "mean_mad": ("mean MAD", float(mad.mean()))}


def _in_words(score: Score | None) -> str:
    if score is None:
        return MISSING
    if score.low is None or score.high is None:
        return percent(score.value)
    return f"{percent(score.value)} [{span(percent(score.low), percent(score.high))}]"
