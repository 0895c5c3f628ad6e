"""A pretraining run as data: everything that decides its numbers, and the identity that follows from it.

Its config.json keeps model, data, seed and precision where every run has them, so that whatever opens a run to look at
its model can open this one; what belongs to DINO alone stands beside them.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

from nearsight.augment import GaussianBlur
from nearsight.augment.colour import LARGEST_HUE
from nearsight.configuration import check_choices, decode, encode, identifying, settle_numbers
from nearsight.errors import InputError, check_at_least, check_below_one, check_numbers, check_probability
from nearsight.files import canonical_hash
from nearsight.models import ModelConfig
from nearsight.train.config import SCHEMA

_OF_EVERY_RUN = ("model", "data", "seed", "precision")


@dataclass(frozen=True, kw_only=True)
class ImagesConfig:
    """Which images. All training images are used; their labels are not."""

    name: str = "shapes"
    """Data set, as `nearsight data list` names it."""
    image_size: int | None = None
    """Side of the images, and of the global crops, in pixels; the data set's own by default."""
    num_train: int | None = None
    """Training images; all by default."""
    num_test: int | None = None
    """Test images, which only probes look at: no part of a run's identity; all by default."""

    def __post_init__(self) -> None:
        settle_numbers(self)
        for name in ("image_size", "num_train", "num_test"):
            if (value := getattr(self, name)) is not None:
                check_at_least(name, value, 1)


@dataclass(frozen=True, kw_only=True)
class CropsConfig:
    """The views of an image: two global crops as large as the image, and smaller local ones."""

    num_local: int = 8
    """Local crops."""
    local_size: int = 96
    """Side of a local crop in pixels; a multiple of the patch size."""
    min_global_area: float = 0.4
    """Smallest share of the image in a global crop; the largest is all of it."""
    min_local_area: float = 0.05
    """Smallest share in a local crop."""
    max_local_area: float = 0.4
    """Largest share in a local crop."""
    jitter_p: float = 0.8
    """Probability that the colours of a view are changed."""
    brightness: float = 0.4
    """How strongly its brightness is."""
    contrast: float = 0.4
    """Likewise, its contrast."""
    saturation: float = 0.2
    """Likewise, its saturation."""
    hue: float = 0.1
    """Likewise, its hue."""
    grey_p: float = 0.2
    """Probability that a view is grey."""
    blur_first_p: float = 1.0
    """Probability that the first global crop is blurred."""
    blur_second_p: float = 0.1
    """Likewise, the second."""
    blur_local_p: float = 0.5
    """Likewise, a local one."""
    max_sigma: float = 2.0
    """Largest deviation of a blur in pixels, at least 0.1; less for images smaller than 224."""
    solarize_second_p: float = 0.2
    """Probability that the second global crop is solarised."""

    def __post_init__(self) -> None:
        settle_numbers(self)
        check_at_least("num_local", self.num_local, 0)
        check_at_least("local_size", self.local_size, 1)
        for name in ("jitter_p", "grey_p", "blur_first_p", "blur_second_p", "blur_local_p", "solarize_second_p"):
            check_probability(name, getattr(self, name))
        # As the augmentations would, but before the data are loaded and under the names that were given.
        for name in ("min_global_area", *(("min_local_area", "max_local_area") if self.num_local else ())):
            if not 0 < getattr(self, name) <= 1:
                raise InputError(f"{name} is {getattr(self, name)}, but must be a share, above 0 and at most 1")
        if self.num_local and self.min_local_area > self.max_local_area:
            raise InputError(f"min_local_area is {self.min_local_area}, above max_local_area, {self.max_local_area}")
        for name in ("brightness", "contrast", "saturation", "hue"):
            check_at_least(name, getattr(self, name), 0)
        if self.hue > LARGEST_HUE:
            raise InputError(f"hue is {self.hue}, but must be at most {LARGEST_HUE}, half the circle either way")
        check_at_least("max_sigma", self.max_sigma, GaussianBlur.min_sigma)


@dataclass(frozen=True, kw_only=True)
class DinoProtocol:
    """How the student learns; the original's values by default."""

    epochs: int = 100
    """Epochs."""
    batch_size: int = 1024
    """Images per step, over all processes."""
    lr: float = 5e-4
    """Peak learning rate for 256 images per step; it grows in proportion to them."""
    min_lr: float = 1e-6
    """Where the learning rate ends."""
    warmup_epochs: int = 10
    """Epochs over which the learning rate rises."""
    weight_decay: float = 0.04
    """Weight decay at the start; not on biases and norms."""
    weight_decay_end: float = 0.4
    """Weight decay at the end."""
    clip_norm: float = 3.0
    """Longest gradient of each parameter."""
    drop_path: float = 0.1
    """Stochastic depth of the student at its last block; a model of one block skips nothing."""
    momentum: float = 0.996
    """How much of itself the teacher keeps per step; it rises to 1."""
    centre_momentum: float = 0.9
    """Likewise, the centre of its output."""
    teacher_temperature: float = 0.07
    """Temperature of the teacher after its warm-up."""
    teacher_temperature_start: float = 0.04
    """Temperature of the teacher in the first epoch."""
    temperature_warmup_epochs: int = 30
    """Epochs over which it rises."""
    student_temperature: float = 0.1
    """Temperature of the student."""
    num_prototypes: int = 65536
    """Outputs of the head."""
    hidden: int = 2048
    """Hidden units of the head."""
    bottleneck: int = 256
    """Channels in front of the prototypes."""
    frozen_epochs: int = 1
    """Epochs in which the prototypes stay as they are."""

    def __post_init__(self) -> None:
        settle_numbers(self)
        for name in ("epochs", "batch_size", "hidden", "bottleneck"):
            check_at_least(name, getattr(self, name), 1)
        check_at_least("num_prototypes", self.num_prototypes, 2)
        for name in ("lr", "min_lr", "warmup_epochs", "weight_decay", "weight_decay_end", "temperature_warmup_epochs"):
            check_at_least(name, getattr(self, name), 0)
        check_at_least("frozen_epochs", self.frozen_epochs, 0)
        for name in ("momentum", "centre_momentum"):
            check_probability(name, getattr(self, name))
        check_below_one("drop_path", self.drop_path)
        for name in ("clip_norm", "teacher_temperature", "teacher_temperature_start", "student_temperature"):
            if not getattr(self, name) > 0:
                raise InputError(f"{name} is {getattr(self, name)}, but must be above 0")


@dataclass(frozen=True, kw_only=True)
class DinoConfig:
    """One pretraining run: model, data, views, protocol and seed."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: ImagesConfig = field(default_factory=ImagesConfig)
    crops: CropsConfig = field(default_factory=CropsConfig)
    protocol: DinoProtocol = field(default_factory=DinoProtocol)
    seed: int = 0
    """Seed of every random choice of the run."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Arithmetic of the forward and backward; weights and optimiser are float32 in both."""

    def __post_init__(self) -> None:
        settle_numbers(self)
        check_choices(self)
        check_at_least("seed", self.seed, 0)
        check_numbers(self)
        if self.model.kind != "compact":
            raise InputError(f"{self.model.name} has no patches, but DINO here is for ViTs; take compact_vit")
        if self.crops.num_local and self.crops.local_size % self.model.patch_size:
            raise InputError(
                f"a patch size of {self.model.patch_size} does not divide local crops of {self.crops.local_size} "
                "pixels; choose another crops.local_size"
            )

    @property
    def identity(self) -> str:
        """16 hex digits that are the same for two runs if and only if the settings that make their numbers are."""
        fields = identifying(self)
        del fields["data"]["num_test"]
        return canonical_hash({"dino": fields})

    def to_json(self) -> dict[str, Any]:
        fields = encode(self)
        common = {name: fields.pop(name) for name in _OF_EVERY_RUN}
        return {"schema": SCHEMA, "identity": self.identity, "config": common, "dino": fields}

    @classmethod
    def from_json(cls, value: Any, source: str) -> "DinoConfig":
        """The config in a config.json; `source` names the file in errors."""
        if not isinstance(value, dict) or not {"schema", "config", "dino"} <= set(value):
            raise InputError(f"{source} is not the config of a DINO run")
        if value["schema"] > SCHEMA:
            raise InputError(
                f"{source} has schema {value['schema']}, but this nearsight reads up to {SCHEMA}; update nearsight"
            )
        try:
            return decode(cls, {**value["config"], **value["dino"]})
        except InputError as error:
            raise InputError(f"{source}: {error}") from error
