"""What is done to train a model: optimiser, schedule, stopping and augmentations, and nothing about how or where.

The first two protocols are those of S1 §4.3. What the paper does not report (learning rate, weight decay, CutMix
probability and α, smoothing, padding) is a field with a conventional value, and `ASSUMED` names it. The third is S2's.
"""

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Literal, Self, get_args

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
from nearsight.configuration import ADDED, register_family, settle_numbers
from nearsight.errors import InputError, check_at_least, check_below_one, unknown_name

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
    teacher: str | None = field(default=None, metadata=ADDED)
    """A run folder, or a model with published weights, whose predictions are learned instead of the labels."""
    lr_scaling: Scaling = field(default="none", metadata=ADDED)
    """How lr grows with batch_size: not at all, in proportion to it or to its square root, from lr_scaling_batch on."""
    lr_scaling_batch: int = field(default=256, metadata=ADDED)
    """Images per step that lr is given for, where it is scaled."""

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
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise InputError(f"clip_norm is {self.clip_norm}, but must be positive")
        if self.teacher == "":
            raise InputError("teacher is empty: name a run folder or a model, or leave it out to learn the labels")

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
        """The protocol with this augmentation: in the place of one of the same name, else where its stage belongs."""
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
