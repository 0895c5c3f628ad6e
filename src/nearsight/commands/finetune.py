"""`nearsight finetune MODEL --add gaug --data NAME`: a trained model made local, and what that changes."""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from nearsight.commands.options import Common, parse, short_name, stoppable
from nearsight.data import DATASETS
from nearsight.errors import InputError, unknown_name
from nearsight.files import MEASURED, check_kind, check_output_folder
from nearsight.locat.inducers import described
from nearsight.probe import FinetuneConfig
from nearsight.train import Stop

_ADD_HELP = (
    "What makes attention local: locat (gaug and prr), nothing (to compare with), or an inducer, with options as in "
    f"neighborhood:radius=1.5. {described()}"
)


@dataclass(frozen=True, kw_only=True)
class FinetuneOptions(Common, FinetuneConfig):
    """Train a trained model further with locality added, and measure it before and after.

    Begins with the weights that MODEL has. With a gentle start (α near 0, a gate of 0) it first computes what it always
    did, and becomes local as far as the data ask for it; what takes effect at once has no such start. Writes the run,
    the heads of both models, what their features are worth (k-NN and a linear classifier), and one page.
    """

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL", help_behavior_hint="")]
    """A ViT that timm has weights for (or --checkpoint), one of the zoo, or a run folder."""
    data: str | None = None
    """A data set with classes (nearsight data list); image-folder for pictures of your own, a folder per class."""
    add: Annotated[str, tyro.conf.arg(help=_ADD_HELP)] = "gaug"
    """An inducer, locat, or nothing."""
    out: Path | None = None
    """Where to write; runs/finetune-MODEL-ADD by default."""

    @property
    def of_training(self) -> dict[str, object]:
        """The fields of `FinetuneConfig`."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(FinetuneConfig)}


def main(arguments: Sequence[str]) -> int:
    options = parse(FinetuneOptions, arguments, prog="nearsight finetune")
    if options.data is None:
        raise InputError("say with --data on which images to train on (see nearsight data list)")
    if options.data not in DATASETS:
        raise unknown_name("data set", options.data, DATASETS)
    added = re.sub(r"[^\w.]+", "-", options.add).strip("-")
    out = options.out or Path("runs") / f"finetune-{short_name(options.model)}-{added}"
    check_output_folder(out)
    check_kind(out, MEASURED)
    command = shlex.join(["nearsight", "finetune", *arguments])
    # Here, because help and mistakes do without.
    from nearsight.commands.finetuning import Page
    from nearsight.commands.progress import TrainingProgress
    from nearsight.probe import finetune

    def work(stop: Stop) -> int:
        assert options.data is not None
        with TrainingProgress("run") as progress:
            found = finetune(
                options.model,
                data=options.data,
                out=out / "run",
                device=options.torch_device,
                data_dir=options.data_dir,
                listener=progress,
                stop=stop,
                **options.of_training,
            )
        page = Page.of(found, options, out)
        files = page.write(command)
        print(json.dumps(page.as_json(files)) if options.json else "\n".join(page.as_text()))
        return 0

    return stoppable(work)
