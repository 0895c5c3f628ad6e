"""What `nearsight finetune` writes and prints: a model before and after, side by side."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nearsight.commands.finetune import FinetuneOptions
from nearsight.commands.measured import Measured, explore, write_all
from nearsight.commands.pictures import RunImages
from nearsight.commands.subjects import Subject
from nearsight.files import FINETUNED, write_json
from nearsight.probe.finetuning import Finetuned, Side
from nearsight.report.finetuned import finetuned_section, finetuned_table
from nearsight.report.page.document import PAGE


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

    def write(self, command: str) -> list[Path]:
        measured, record = list(self.measured), self.as_json(())
        section = finetuned_section(record)
        files = [*write_all(self.out, measured, command, [section], explore(measured)), self.out / FINETUNED]
        write_json(files[-1], record)
        return files

    def as_json(self, files: Iterable[Path]) -> dict[str, Any]:
        def described(side: Side) -> dict[str, Any]:
            scores = {"own": side.own, "linear": side.linear, "knn": side.knn}
            named = {name: None if score is None else score.as_json() for name, score in scores.items()}
            mad = side.heads.to_frame()["mad"]
            return {**named, "min_mad": float(mad.min()), "mean_mad": float(mad.mean()), "alpha": side.alpha}

        return {
            "model": self.options.model,
            "added": self.options.add,
            "start": self.options.start,
            "seed": self.options.seed,
            "data": self.found.config.data.name,
            "num_images": len(self.measured[0].subject.images),
            "num_reference": min(self.options.num_reference, len(self.found.dataset.train)),
            "run": str(self.out / "run"),
            "before": described(self.found.before),
            "after": described(self.found.after),
            "files": [str(path) for path in files],
        }

    def as_text(self) -> list[str]:
        table = finetuned_table(self.as_json(()))
        return [
            table.shown.to_string(index=False),
            *table.notes,
            "",
            f"Run: {self.found.run.path}",
            f"Page: {self.out / PAGE}",
        ]
