"""What can be set of the probes, and their usual settings. Segmentation, of which there is more, has a file of its own.

Nothing is computed here, so that a command can show its options at once.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Literal

from nearsight.configuration import check_choices
from nearsight.errors import InputError, check_at_least, check_below_one, check_fraction, check_numbers, check_positive

KNN_KS = (10, 20, 100, 200)
KNN_TEMPERATURE = 0.07
ABLATION_K = 20
"""Neighbours of k-NN among the images that changed heads are asked about."""
Scored = Literal["classifier", "knn"]
"""Who says which class an image has: the model's own classifier, or the nearest other images."""
QUESTIONS = ("heads", "reach", "removal")
"""About changed heads: each by itself, all of a layer limited to a reach, and more and more of them."""
USUAL_PLANS = ("zero", "identity", "uniform")
PLANS = (*USUAL_PLANS, "mean", "offsets", "drop-sinks")
"""What single heads do instead, by the names of `nearsight.lens`."""
LOCAT = ("gaug", "prr", "locat", "nothing")
"""What a model can be finetuned with, beside the names of other inducers."""
RETRIEVE_K = 30
RETRIEVE_TEMPERATURE = 0.02
MEMORY_SIZE = 1_000_000
"""Of retrieval, in patches."""
IndexKind = Literal["exact", "faiss"]
Place = Literal["block", "norm", "prr"]
"""As a block returns its tokens, after the model's final norm, or after patch representation refinement."""
Tokens = Literal["cls", "mean", "cls+mean", "patches"]


@dataclass(frozen=True, kw_only=True)
class FeatureSpec:
    """Which features of a model. By default S2's dense ones: the last block's patches, before norm and PRR."""

    block: int = -1
    """Counted from 0, or from the end if negative; the stage of a hierarchical timm model."""
    place: Place | None = "block"
    """As the block returns them, after the final norm, or refined (PRR); None for the last of these that there is."""
    tokens: Tokens | None = "patches"
    """CLS, the mean of the patches, these two one after the other, or the map of patches; None: CLS, or the mean."""

    def __post_init__(self) -> None:
        check_choices(self)
        if self.place == "prr" and self.block != -1:
            raise InputError(f"PRR refines what the last block returns (−1), so that block {self.block} has none")


def check_votes(ks: Sequence[int], temperature: float) -> None:
    """Refuse settings of the votes that are wrong for any features."""
    if not ks:
        raise InputError("k-NN needs at least one k; write --ks 20, say")
    for k in ks:
        check_at_least("k", k, 1)
    check_positive("the temperature", temperature)


@dataclass(frozen=True, kw_only=True)
class LinearConfig:
    """How the heads are trained. The defaults are those of DINO's linear evaluation, with its rate in a grid."""

    optimizer: Literal["sgd", "adamw"] = "sgd"
    learning_rates: tuple[float, ...] = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
    """For 256 images per batch; scaled in proportion to the batch."""
    weight_decays: tuple[float, ...] = (0.0,)
    """Each with each learning rate."""
    momentum: float = 0.9
    """Of SGD."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Of AdamW."""
    batch_size: int = 1024
    num_epochs: int = 100
    """Over which the learning rate falls as a cosine to 0, epoch by epoch."""
    validation_fraction: float = 0.1
    """Of the training samples, held out to choose the head."""
    seed: int = 0

    def __post_init__(self) -> None:
        check_choices(self)
        if not self.learning_rates or not self.weight_decays:
            raise InputError("a linear probe needs at least one learning rate and one weight decay")
        for name in ("learning_rates", "weight_decays"):
            for value in getattr(self, name):
                check_at_least(name, value, 0.0)
        check_at_least("batch_size", self.batch_size, 1)
        check_at_least("num_epochs", self.num_epochs, 1)
        check_fraction("validation_fraction", self.validation_fraction)
        for name, value in (("momentum", self.momentum), *(("betas", beta) for beta in self.betas)):
            check_below_one(name, value)
        check_numbers(self)

    @property
    def grid(self) -> list[tuple[float, float]]:
        """(learning rate, weight decay) of each head."""
        return list(product(self.learning_rates, self.weight_decays))


@dataclass(frozen=True, kw_only=True)
class FinetuneConfig:
    """How a trained model is trained further, and probed before and after."""

    add: str = "gaug"
    """What makes attention local: an inducer, with options as in neighborhood:radius=1.5; locat is gaug and prr, and
    nothing is to compare with."""
    start: Literal["gentle", "abrupt"] = "gentle"
    """How strong it is at first: near 0, where it can be, or as in training from scratch."""
    epochs: int = 10
    """Over the training images."""
    lr: float = 1e-4
    """Peak learning rate of AdamW, after one epoch of warm-up."""
    locality_lr: float | None = None
    """Learning rate of what is added, over that of the rest; by default 100 from a gentle start, 10 from an abrupt
    one."""
    layer_decay: float = 1.0
    """Each layer's learning rate over that of the next one towards the classifier; 0.65 to 0.9 are usual."""
    ema: float = 0.0
    """Decay of a moving average of the weights, which is then the result; 0: none."""
    batch_size: int = 64
    """Images per step."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Of training; bf16 is faster on a GPU."""
    checkpoint: Path | None = None
    """File with weights of the model, instead of published ones, trained on images normalised as for those."""
    settings: tuple[str, ...] = ()
    """Arguments of a model of timm, such as patch_size=8."""
    image_size: int | None = None
    """Side of the images in pixels, if not the model's own."""
    num_train: int | None = None
    """Training images at most; all by default."""
    num_test: int | None = None
    """Test images at most; all by default."""
    num_images: int = 1000
    """Of them, those that heads and features are measured on."""
    num_reference: int = 5000
    """Training images that k-NN and the linear classifier learn from."""
    seed: int = 0
    """Of new weights and of the order of images."""

    def __post_init__(self) -> None:
        check_choices(self)
        if self.add not in LOCAT:
            from nearsight.locat.inducers import inducer_of  # here, because few finetune

            inducer_of(self.add)
        for name in ("epochs", "batch_size", "num_images"):
            check_at_least(name, getattr(self, name), 1)
        check_at_least("num_reference", self.num_reference, ABLATION_K)
        if self.locality_lr is not None:
            check_positive("locality_lr", self.locality_lr)
        check_numbers(self)
