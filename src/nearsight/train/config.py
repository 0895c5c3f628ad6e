"""A run as data: everything that decides its numbers, and the identity that follows from it."""

import re
from dataclasses import dataclass, field
from typing import Any, Literal

from nearsight.augment.pipeline import stack_key
from nearsight.configuration import check_choices, decode, encode, identifying, settle_numbers
from nearsight.errors import InputError, check_at_least, check_fraction, check_numbers
from nearsight.files import canonical_hash
from nearsight.models import ModelConfig
from nearsight.train.protocol import Protocol

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

    def __post_init__(self) -> None:
        settle_numbers(self)
        check_fraction("validation_fraction", self.validation_fraction)
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
    precision: Literal["fp32", "bf16"] = "fp32"
    """Arithmetic of the forward and backward; weights and optimiser are float32 in both."""
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
            protocol.drop_path > 0,  # another program
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
