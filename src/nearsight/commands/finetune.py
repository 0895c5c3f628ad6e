"""`nearsight finetune MODEL --add locat --data NAME`: a trained model made local, and what that changes."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from nearsight.commands.options import Common, parse, short_name, stoppable
from nearsight.data import DATASETS
from nearsight.errors import InputError, check_at_least, check_number, unknown_name
from nearsight.files import MEASURED, check_kind, check_output_folder
from nearsight.locat.inducers import described, inducer_of
from nearsight.train import Stop

LOCAT = ("gaug", "prr", "locat", "nothing")
"""What `add` may be beside the names of inducers."""
_ADD_HELP = (
    "What makes attention local: locat (gaug and prr), nothing (to compare with), or an inducer, with options as in "
    f"neighborhood:radius=1.5. {described()}"
)


@dataclass(frozen=True, kw_only=True)
class FinetuneOptions(Common):
    """Train a trained model further with locality added, and measure it before and after.

    Begins with the weights that MODEL has. With a gentle start (α near 0, a gate of 0) it first computes what it always
    did, and becomes local as far as the data ask for it; what takes effect at once has no such start. Writes the run,
    the heads of both models, their accuracy as features (k-NN among the test images), and one page.
    """

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL", help_behavior_hint="")]
    """A ViT that timm has weights for (or --checkpoint), one of the zoo, or a run folder."""
    data: str | None = None
    """A data set with classes (nearsight data list); image-folder for pictures of your own, a folder per class."""
    add: Annotated[str, tyro.conf.arg(help=_ADD_HELP)] = "gaug"
    """An inducer, locat, or nothing."""
    start: Literal["gentle", "abrupt"] = "gentle"
    """How strong the bias is at first: near 0, or as in training from scratch."""
    epochs: int = 10
    """Over the training images."""
    lr: float = 1e-4
    """Peak learning rate of AdamW, after one epoch of warm-up."""
    batch_size: int = 64
    """Images per step."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Of training; bf16 is faster on a GPU."""
    checkpoint: Path | None = None
    """File with weights of the model, instead of published ones."""
    settings: tuple[str, ...] = ()
    """Arguments of a model of timm, such as patch_size=8."""
    image_size: int | None = None
    """Side of the images in pixels, if not the model's own."""
    num_train: int | None = None
    """Training images at most; all by default."""
    num_images: int = 1000
    """Test images that heads and features are measured on."""
    seed: int = 0
    """Of new weights and of the order of images."""
    out: Path | None = None
    """Where to write; runs/finetune-MODEL-ADD by default."""

    def check(self) -> None:
        """Refuse what is wrong at a first look."""
        if self.data is None:
            raise InputError("say with --data on which images to train on (see nearsight data list)")
        if self.data not in DATASETS:
            raise unknown_name("data set", self.data, DATASETS)
        for option, value in (("--epochs", self.epochs), ("--batch-size", self.batch_size)):
            check_at_least(option, value, 1)
        check_at_least("--num-images", self.num_images, 22)
        if self.add not in LOCAT:
            inducer_of(self.add)
        check_number("--lr", self.lr)


def main(arguments: Sequence[str]) -> int:
    options = parse(FinetuneOptions, arguments, prog="nearsight finetune")
    options.check()
    added = re.sub(r"[^\w.]+", "-", options.add).strip("-")
    out = options.out or Path("runs") / f"finetune-{short_name(options.model)}-{added}"
    check_output_folder(out)
    check_kind(out, MEASURED)
    command = shlex.join(["nearsight", "finetune", *arguments])
    # Here, because help and mistakes do without.
    from nearsight.commands.finetuning import Finetuning, config_of

    config = config_of(options)

    def work(stop: Stop) -> int:
        found = Finetuning.of(options, config, out, stop)
        files = found.write(command)
        print(json.dumps(found.as_json(files)) if options.json else "\n".join(found.as_text()))
        return 0

    return stoppable(work)
