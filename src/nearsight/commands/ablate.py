"""`nearsight ablate MODEL --data NAME`: what the heads of a model are worth, and how far they have to reach."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from nearsight.commands.masked import OwnMasks
from nearsight.commands.options import Common, Request, parse, short_name
from nearsight.data import DATASETS
from nearsight.data.segmentation import SEGMENTATION_SETS
from nearsight.errors import InputError, check_at_least, check_number, unknown_name
from nearsight.files import ABLATED, MEASURED, STUDY, check_kind, check_output_folder
from nearsight.models.zoo import IMAGES, MODELS
from nearsight.probe.settings import PLANS, QUESTIONS


@dataclass(frozen=True, kw_only=True)
class AblateOptions(OwnMasks, Common):
    """Change heads of a model, and see how much of its score on test images is left.

    Each head by itself gives nothing (zero), attends to its own patch alone (identity) or to all patches alike
    (uniform); all heads of a layer attend to no patch beyond a reach; more and more heads are removed, in the order of
    their mean attention distance and in random orders. Writes ablation-heads.csv, ablation-reach.csv,
    ablation-removal.csv, their figures, ablation.json, and what nearsight measure writes for the same images.
    Interrupted, the same command continues.

    MODEL may be the folder of a study: then all its finished runs are asked, one after the other, and conditions are
    compared over seeds; what was asked of a run before is not asked again.
    """

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL", help_behavior_hint="")]
    """As for nearsight measure: a timm name, one of the zoo, hf:org/name, torchvision:NAME, a run folder, …; or the
    folder of a study."""
    data: str | None = None
    """A data set (nearsight data list) whose test images are asked about; by default that of the run, for the zoo
    cifar100-sample. One with masks is scored by mIoU; so is a folder of your own, with images and masks."""
    what: tuple[str, ...] = QUESTIONS
    """What to ask: heads (each by itself), reach (all heads of a layer, or of all), removal (more and more heads)."""
    plans: tuple[str, ...] = ()
    """What single heads do instead: zero, identity, uniform, mean (their average map), offsets (their average by the
    step from query to key), drop-sinks; by default the first three, as far as they fit the model."""
    reach: tuple[str, ...] = ()
    """Reaches in patches (1.5 is 3×3 patches); by default 0, 1, 1.5, 2, 3, … as far as the grid has them."""
    orders: int = 3
    """Random orders of removal."""
    score: Literal["classifier", "knn"] | None = None
    """Who says which class an image has: the model's own classifier (by default) or, where that is for other classes,
    the 20 nearest of the other test images, by the features that the classifier takes."""
    num_images: int = 1000
    """Test images at most."""
    num_reference: int = 256
    """Of the plans mean and offsets: over how many training images heads are averaged."""
    num_train: int = 1000
    """With masks: to how many training images the segmentation head is fitted."""
    steps: int = 2000
    """With masks: in how many steps the head is fitted."""
    batch_size: str = "auto"
    """Images at once; each goes through variants-at-once models. Or auto."""
    variants_at_once: int = 8
    """Changed models that run as one batch."""
    precision: Literal["float32", "bfloat16", "float16"] = "float32"
    """In which the model computes; on a GPU the half ones are several times as fast."""
    pretrained: bool = False
    """Load the published weights of models of timm and torchvision, which are random otherwise."""
    checkpoint: Path | None = None
    """File with your own weights of the model: safetensors, or a state dict that torch.save wrote."""
    image_size: int | None = None
    """Side of the images in pixels, if not the model's own."""
    seed: int = 0
    """Of random orders, of random weights and of the fit of a segmentation head."""
    out: Path | None = None
    """Where to write; runs/ablate-MODEL by default."""

    @property
    def request(self) -> Request:
        """What is measured."""
        return Request(
            models=(self.model,),
            images=self.data_set,
            num_images=self.num_images,
            pretrained=self.pretrained,
            checkpoint=self.checkpoint,
            image_size=self.image_size,
            seed=self.seed,
            device=self.device,
            data_dir=self.data_dir,
        )

    @property
    def data_set(self) -> str | None:
        """None: that of the run."""
        if self.data is not None:
            if not self.has_masks:
                if self.data not in DATASETS:
                    kind = "data set, nor a folder that is there"
                    raise unknown_name(kind, self.data, [*DATASETS, *SEGMENTATION_SETS])
            elif self.score is not None:
                raise InputError(f"{self.data} has masks, which are scored by mIoU; leave out --score {self.score}")
            return self.data
        if Path(self.model).is_dir():
            return None
        if self.model not in MODELS:
            raise InputError("say with --data on whose test images the model is asked (see nearsight data list)")
        return IMAGES

    @property
    def has_masks(self) -> bool:
        if self.data is None or self.data in DATASETS:
            return False
        return self.data in SEGMENTATION_SETS or Path(self.data).exists()

    def check(self) -> None:
        """Refuse what is wrong at a first look."""
        for option, value, least in (
            ("--num-images", self.num_images, 2),
            ("--num-reference", self.num_reference, 1),
            ("--num-train", self.num_train, 1),
            ("--steps", self.steps, 1),
            ("--variants-at-once", self.variants_at_once, 1),
            ("--orders", self.orders, 0),
        ):
            check_at_least(option, value, least)
        check_number("--seed", self.seed)
        if self.batch_size != "auto" and not (self.batch_size.isdecimal() and int(self.batch_size) > 0):
            raise InputError(f"--batch-size is {self.batch_size}, but must be a number from 1 on, or auto")
        for option, names, known in (("question of --what", self.asked, QUESTIONS), ("plan", self.plan_names, PLANS)):
            for name in names:
                if name not in known:
                    raise unknown_name(option, name, known)

    @property
    def asked(self) -> list[str]:
        return _separated(self.what)

    @property
    def plan_names(self) -> list[str]:
        return _separated(self.plans)

    @property
    def reaches(self) -> list[float]:
        found = []
        for text in _separated(self.reach):
            try:
                found.append(float(text))
            except ValueError:
                raise InputError(f"--reach {text}: a reach is a number of patches, such as 1.5") from None
            if not 0 <= found[-1] < float("inf"):
                raise InputError(f"--reach {text}: a reach is 0 or more")
        return found


def _separated(texts: Sequence[str]) -> list[str]:
    """Names that are separated by spaces or commas, each once."""
    return list(dict.fromkeys(name for text in texts for name in text.replace(",", " ").split()))


def main(arguments: Sequence[str]) -> int:
    options = parse(AblateOptions, arguments, prog="nearsight ablate")
    options.check()
    out = options.out or Path("runs") / f"ablate-{short_name(options.model)}"
    request, reaches, is_study = options.request, options.reaches, (Path(options.model) / STUDY).is_file()
    if is_study and options.has_masks:
        raise InputError(f"the runs of a study are asked about classes, but {options.data} has masks; name one run")
    check_output_folder(out)
    check_kind(out, ABLATED if is_study else MEASURED)
    # Here, because help and mistakes do without.
    from nearsight.lens.running import remembering_surveys

    command = shlex.join(["nearsight", "ablate", *arguments])
    with remembering_surveys():
        if is_study:
            from nearsight.commands.ablating_study import ask_study

            print(ask_study(options, reaches, out, command))
            return 0
        from nearsight.commands.ablating import ask

        asked = ask(options, request, reaches, out)
    written = asked.write(command)
    print(json.dumps(asked.as_json(written)) if options.json else "\n".join(asked.as_text()))
    return 0
