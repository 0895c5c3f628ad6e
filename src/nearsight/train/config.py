"""A run as data: everything that decides its numbers, and the identity that follows from it.

A protocol is what is done to train a model: optimiser, schedule, stopping and augmentations, and nothing about how or
where. The first two are those of S1 §4.3. What the paper does not report (learning rate, weight decay, CutMix
probability and α, smoothing, padding) is a field with a conventional value, and `ASSUMED` names it. The third is S2's.
"""

import dataclasses
import math
import re
from dataclasses import dataclass, field
from typing import Any, Literal, Self, get_args

from nearsight.augment import (
    AUGMENTATIONS,
    Augmentation,
    AutoAugment,
    CutMix,
    HorizontalFlip,
    MixupOrCutMix,
    RandomCrop,
    RandomErasing,
    ResizedCrop,
    TimmRandAugment,
)
from nearsight.augment.pipeline import stack_key
from nearsight.configuration import ADDED, check_choices, decode, encode, identifying, register_family, settle_numbers
from nearsight.data.dataset import RUN
from nearsight.errors import InputError, check_at_least, check_below_one, check_fraction, check_numbers, unknown_name
from nearsight.files import canonical_hash
from nearsight.models import ModelConfig

ASSUMED = (
    "lr", "weight_decay", "decay_all", "smoothing", "cutmix.p", "cutmix.alpha", "crop.padding", "precision", "init",
    "position_std", "colorjitter.brightness", "colorjitter.contrast", "colorjitter.saturation", "colorjitter.hue",
)  # fmt: skip
"""Settings the paper does not report; their values here are conventional first guesses."""


def _augmentation(name: str) -> type[Augmentation]:
    if name not in AUGMENTATIONS:
        raise unknown_name("augmentation", name, AUGMENTATIONS)
    return AUGMENTATIONS[name]


register_family(Augmentation, _augmentation)

Schedule = Literal["cosine", "triangular"]
Scaling = Literal["none", "linear", "sqrt"]


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """A training protocol. Everything here changes the numbers a run gives."""

    lr: float = 1e-3
    """Peak learning rate of AdamW."""
    weight_decay: float = 0.05
    """Decoupled weight decay."""
    decay_all: bool = False
    """Decay norms, biases, CLS token and positions too, as AdamW over all parameters would."""
    betas: tuple[float, float] = (0.9, 0.999)
    """AdamW's decay rates of the gradient's first and second moment."""
    clip_norm: float | None = None
    """Largest gradient norm; larger gradients are scaled down to it."""
    batch_size: int = 128
    """Images per step, over all processes."""
    max_epochs: int = 600
    """Epochs at most; the schedule ends here."""
    warmup_epochs: int = 5
    """Epochs over which the learning rate rises linearly to its peak."""
    patience: int = 20
    """Epochs without a better validation accuracy after which training stops."""
    smoothing: float = 0.0
    """Label smoothing ε."""
    augment: tuple[Augmentation, ...] = (RandomCrop(), HorizontalFlip())
    """Augmentations, in the order in which they are applied."""
    schedule: Schedule = field(default="cosine", metadata=ADDED)
    """How the learning rate goes down after the warm-up: half a cosine, or a straight line (S2)."""
    drop_path: float = field(default=0.0, metadata=ADDED)
    """Probability that a sample skips a branch of the last block (stochastic depth). It rises from 0 at the first, so a
    model of one block skips nothing."""
    dropout: float = field(default=0.0, metadata=ADDED)
    """Probability that a number is dropped after the embedding, after attention's projection and in the MLP."""
    teacher: str | None = field(default=None, metadata=ADDED)
    """A run folder, or a model with published weights, whose predictions are learned instead of the labels."""
    lr_scaling: Scaling = field(default="none", metadata=ADDED)
    """How lr grows with batch_size: not at all, in proportion to it or to its square root, from lr_scaling_batch on."""
    lr_scaling_batch: int = field(default=256, metadata=ADDED)
    """Images per step that lr is given for, where it is scaled."""
    layer_decay: float = field(default=1.0, metadata=ADDED)
    """Each layer's learning rate over that of the next one towards the classifier, as in BEiT (0.65 to 0.9 where
    trained weights are trained further); 1: one rate for all."""
    locality_lr: float = field(default=1.0, metadata=ADDED)
    """Learning rate of what makes attention local, over that of the rest. From a gentle start α takes thousands of
    steps of a fine-tuning's small rate; 100 makes that tens."""
    ema: float = field(default=0.0, metadata=ADDED)
    """Decay per step of a moving average of the weights, such as 0.9998, which is then what is validated, saved and
    tested; 0: none."""
    accumulate: int = field(default=1, metadata=ADDED)
    """Parts in which the forward and backward of a batch are done one after the other, to take less memory; their
    gradients are added up, so that the step is the same up to rounding."""

    def __post_init__(self) -> None:
        settle_numbers(self)
        check_at_least("max_epochs", self.max_epochs, 1)
        check_at_least("warmup_epochs", self.warmup_epochs, 0)
        check_at_least("batch_size", self.batch_size, 1)
        check_at_least("patience", self.patience, 1)
        check_at_least("weight_decay", self.weight_decay, 0)
        if not self.lr > 0:
            raise InputError(f"lr is {self.lr}, but must be positive")
        check_below_one("smoothing", self.smoothing)
        if not all(0 <= beta < 1 for beta in self.betas):
            raise InputError(f"betas are {self.betas}, but must lie in [0, 1)")
        if self.schedule not in get_args(Schedule):
            raise unknown_name("schedule", self.schedule, get_args(Schedule))
        if self.lr_scaling not in get_args(Scaling):
            raise unknown_name("lr_scaling", self.lr_scaling, get_args(Scaling))
        check_at_least("lr_scaling_batch", self.lr_scaling_batch, 1)
        check_below_one("drop_path", self.drop_path)
        check_below_one("ema", self.ema)
        if not 0 < self.layer_decay <= 1:
            raise InputError(f"layer_decay is {self.layer_decay}, but must be above 0 and at most 1")
        if not self.locality_lr > 0:
            raise InputError(f"locality_lr is {self.locality_lr}, but must be positive")
        check_at_least("accumulate", self.accumulate, 1)
        if self.accumulate > self.batch_size:
            raise InputError(
                f"accumulate is {self.accumulate}, but a batch of {self.batch_size} images has no so many parts"
            )
        check_below_one("dropout", self.dropout)
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise InputError(f"clip_norm is {self.clip_norm}, but must be positive")
        if self.teacher == "":
            raise InputError("teacher is empty: name a run folder or a model, or leave it out to learn the labels")

    @property
    def has_own_rates(self) -> bool:
        """Whether some parameters learn at other rates than others."""
        return self.layer_decay < 1 or self.locality_lr != 1

    @property
    def peak_lr(self) -> float:
        """The learning rate after the warm-up."""
        grown = self.batch_size / self.lr_scaling_batch
        return self.lr * {"none": 1.0, "linear": grown, "sqrt": math.sqrt(grown)}[self.lr_scaling]

    def augmentation(self, name: str) -> Augmentation | None:
        """The augmentation of this name, if the protocol has it."""
        return next((augmentation for augmentation in self.augment if augmentation.name == name), None)

    def without(self, name: str) -> Self:
        kept = tuple(augmentation for augmentation in self.augment if augmentation.name != _augmentation(name).name)
        return dataclasses.replace(self, augment=kept)

    def with_(self, augmentation: Augmentation) -> Self:
        """The protocol with this augmentation: in place of one of the same name, otherwise where its stage belongs."""
        if self.augmentation(augmentation.name) is not None:
            changed = (augmentation if old.name == augmentation.name else old for old in self.augment)
            return dataclasses.replace(self, augment=tuple(changed))
        place = sum(old.stage <= augmentation.stage for old in self.augment)
        return dataclasses.replace(self, augment=(*self.augment[:place], augmentation, *self.augment[place:]))


def baseline() -> Protocol:
    """Random crop and flip, nothing else (S1 §4.3.1)."""
    return Protocol()


def modern() -> Protocol:
    """AutoAugment, CutMix and label smoothing on top of Baseline (S1 §4.3.2, CIFAR)."""
    return dataclasses.replace(baseline().with_(AutoAugment()).with_(CutMix(p=0.5, alpha=1.0)), smoothing=0.1)


def locat() -> Protocol:
    """RandAugment, Mixup or CutMix, random erasing and smoothing, triangular schedule (S2 §5.1, ImageNet, Tiny)."""
    return Protocol(
        clip_norm=5.0,
        batch_size=1024,
        max_epochs=300,
        warmup_epochs=20,
        patience=300,  # all epochs: S2 does not stop early
        smoothing=0.1,
        schedule="triangular",
        drop_path=0.1,
        augment=(ResizedCrop(), HorizontalFlip(), TimmRandAugment(), RandomErasing(), MixupOrCutMix()),
    )


PROTOCOLS = {"baseline": baseline, "modern": modern, "locat": locat}
"""The protocols a run can start from, by name."""


SCHEMA = 1
"""Version of the run folder's layout and of config.json; raised whenever an older reader would go wrong."""

_RUN_NAME = re.compile(r"[0-9a-f]{16}")


class RunName(str):
    """The identity of a run: 16 hexadecimal digits.

    Folders and locks are named by it and by nothing else. A name from outside (of a study.json, a table, a bucket)
    becomes one where it is read, and a path to somewhere else does not pass.
    """

    __slots__ = ()

    def __new__(cls, name: object) -> "RunName":
        if isinstance(name, cls):
            return name
        if not isinstance(name, str) or not _RUN_NAME.fullmatch(name):
            raise InputError(f"{name!r:.80} is not the name of a run, which has 16 hexadecimal digits")
        return super().__new__(cls, name)


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Which images, and how they are divided."""

    name: str = "shapes"
    """Data set, as `nearsight data list` names it."""
    image_size: int | None = None
    """Side of the images in pixels; the data set's own by default."""
    num_train: int | None = None
    """Training images before the validation split; all by default."""
    num_test: int | None = None
    """Test images; all by default."""
    validation_fraction: float = 0.2
    """Share of the training images held out for validation, stratified by class."""
    split_seed: int = 0
    """Seed of that split; independent of the run's seed, so that all runs of a study share the split."""
    stream: bool = field(default=False, metadata=ADDED)
    """Decode training pictures from their files in every epoch, so that random crops are those of whole pictures; else
    all are decoded once, resized to their shorter side and cut to a square."""
    window: int = field(default=16_384, metadata=ADDED)
    """Of streamed shards, pictures among which the order is random; folders of pictures are shuffled as a whole."""
    crop_pct: float = field(default=1.0, metadata=ADDED)
    """Of streamed data: side of the middle that is evaluated, as a share of the resized picture's (0.875: 224 of
    256)."""

    def __post_init__(self) -> None:
        settle_numbers(self)
        check_fraction("validation_fraction", self.validation_fraction)
        check_at_least("window", self.window, RUN)
        if not 0 < self.crop_pct <= 1:
            raise InputError(f"crop_pct is {self.crop_pct}, but must be greater than 0 and at most 1")
        if self.crop_pct != 1 and not self.stream:
            raise InputError(
                f"crop_pct is {self.crop_pct}, but pictures that are decoded once are cut to what trains; add "
                "--data.stream, or leave it at 1"
            )
        for name in ("image_size", "num_train", "num_test"):
            if (value := getattr(self, name)) is not None:
                check_at_least(name, value, 1)


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """One training run: model, data, protocol and seed."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    protocol: Protocol = field(default_factory=Protocol)
    seed: int = 0
    """Seed of every random choice of the run."""
    weights: str | None = field(default=None, metadata=ADDED)
    """Weights to start from: pretrained (those that timm has for the model), a file, a run folder, or the name of a
    model that has some. A classifier for other classes starts anew, positions are resampled; None: all start anew."""
    weights_normalized: Literal["data", "model"] = field(default="data", metadata=ADDED)
    """How images were normalised when the weights of a file were trained: as for this data set, or as timm says for the
    model's name. Of runs and published weights it is known."""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Arithmetic of the forward and backward; weights and optimiser are float32 in all. fp16 scales its losses."""
    num_measured: int = 5000
    """Test images on which the heads are measured (all, if there are fewer)."""
    measure_every: int = 0
    """Epochs between measurements of the heads during training, from the initial weights on; 0: only at the end."""
    num_measured_during: int = 512
    """Test images for those, a part of the others; their labels are not looked at."""

    def __post_init__(self) -> None:
        settle_numbers(self)
        check_choices(self)
        check_at_least("seed", self.seed, 0)
        if self.weights == "":
            raise InputError("weights is empty: name a file, a run folder or a model, or leave it out to start anew")
        if self.weights_normalized == "model" and (self.weights is None or self.model.kind != "timm"):
            raise InputError("weights_normalized is model, but that is about weights of a file for a model of timm")
        check_at_least("num_measured", self.num_measured, 1)
        check_at_least("measure_every", self.measure_every, 0)
        check_at_least("num_measured_during", self.num_measured_during, 1)
        check_numbers(self)

    @property
    def identity(self) -> RunName:
        """16 hex digits that are the same for two runs if and only if the settings that make their numbers are.

        Measuring during training changes no weight, but it is part of what a run gives: a folder without the time
        course is not the one that was asked for. Where nothing is measured, how is no setting.
        """
        fields = identifying(self)
        if self.measure_every == 0:
            del fields["measure_every"], fields["num_measured_during"]
        return RunName(canonical_hash(fields))

    @property
    def stack_key(self) -> tuple[object, ...]:
        """What runs must have in common to train as one stack. All else is in the optimiser, the augmentations and the
        seed, which each cell has for itself."""
        protocol = self.protocol
        return (
            self.model.shape,
            self.data,
            self.precision,
            protocol.batch_size,
            protocol.betas,
            # Other programs:
            protocol.drop_path > 0,
            protocol.dropout > 0,
            protocol.has_own_rates,
            protocol.ema > 0,
            protocol.accumulate,
            protocol.teacher,
            stack_key(protocol.augment),
        )

    def to_json(self) -> dict[str, Any]:
        return {"schema": SCHEMA, "identity": self.identity, "config": encode(self)}

    @classmethod
    def from_json(cls, value: Any, source: str) -> "RunConfig":
        """The config in a config.json; `source` names the file in errors."""
        if not isinstance(value, dict) or not isinstance(value.get("schema"), int) or "config" not in value:
            raise InputError(f"{source} is not the config of a run")
        if value["schema"] > SCHEMA:
            raise InputError(
                f"{source} has schema {value['schema']}, but this nearsight reads up to {SCHEMA}; update nearsight"
            )
        try:
            return decode(cls, value["config"])
        except InputError as error:
            raise InputError(f"{source}: {error}") from error
