"""A study as data: a base run, factors with levels, seeds, and the cells that follow from them."""

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from numbers import Integral
from typing import Any

from nearsight.configuration import encode
from nearsight.errors import InputError, check_at_least, unknown_name
from nearsight.models import ModelConfig
from nearsight.models.factory import timms_settings
from nearsight.randomness import different_seeds
from nearsight.study.factors import ENDS, Factor, Levels, condition_name
from nearsight.study.fractions import FRACTION, Fraction
from nearsight.study.recipes import Scale
from nearsight.study.results import SCHEMA, run_columns
from nearsight.study.run_tables import check_label
from nearsight.train import ASSUMED, DataConfig, RunConfig, RunName

Factors = Mapping[str, Sequence[str]]
"""Factor → the labels of its levels; the first is the base, the last is all the way on."""
MOST_SEEDS = 2
"""Of a study at small scale."""
_HEAD_WIDTH = 4
_PATCH_SIZE = 8
_CHANNELS = 8
_NUM_TRAIN = 120


@dataclass(frozen=True)
class Cell:
    """One run of a study."""

    condition: str
    """Its levels in a word, as in −CutMix."""
    levels: dict[str, str]
    """Factor → label of its level."""
    config: RunConfig

    @property
    def run(self) -> RunName:
        """The run's identity."""
        return self.config.identity

    @property
    def seed(self) -> int:
        return self.config.seed


@dataclass(frozen=True)
class Study:
    """Factors × levels × seeds, from one base run: a full factorial design, or a part of one.

    A factor is named after an augmentation (levels OFF and augmentations) or after a setting of a run, such as
    protocol.lr or smoothing (levels: its values), or has any name and levels that are mappings of such names to values.
    The first level is the base. Levels have labels (off, on, p=0.5, 0.1), which can be given: {"label": level, …}.
    """

    base: RunConfig
    _: KW_ONLY
    factors: Mapping[str, Levels]
    seeds: int | Sequence[int] = 1
    """How many, counted from 0, or which."""
    name: str = "study"
    ends: tuple[str, str] = ENDS
    """What the conditions with all factors at their first and at their last level are called. Where a factor chooses
    among values, "all" says nothing, and the values are named."""
    chosen: tuple[dict[str, str], ...] | None = None
    """The level combinations to run; all by default."""
    generators: tuple[str, ...] = ()
    """Of the fraction that `chosen` is."""
    described: str = ""
    """What `chosen` is, in a line for people, where no generators say it."""
    scale: Scale = "full"
    """small: every run is shrunk."""

    def __post_init__(self) -> None:
        if not self.factors:
            raise InputError(f"study {self.name!r} varies nothing; give it a factor")
        for name in self.factors:
            if name in run_columns(()):
                raise InputError(f"a factor cannot be called {name!r}: runs.csv has a column of that name")
        listed(self.seeds)

    @cached_property
    def seed_list(self) -> tuple[int, ...]:
        return listed(self.seeds)

    @cached_property
    def parsed(self) -> tuple[Factor, ...]:
        return tuple(Factor.of(name, levels) for name, levels in self.factors.items())

    @property
    def labels(self) -> dict[str, tuple[str, ...]]:
        """Factor → the labels of its levels."""
        return {factor.name: factor.labels for factor in self.parsed}

    @cached_property
    def cells(self) -> tuple[Cell, ...]:
        """All runs, seed by seed. No two conditions are the same run."""
        conditions: dict[str, dict[str, str]] = {}
        for levels in self._combinations():
            name = condition_name(self.parsed, levels, self.ends)
            check_label(name, f"a condition of study {self.name!r}")
            if conditions.setdefault(name, levels) != levels:
                raise InputError(f"two conditions of study {self.name!r} are both called {name!r}; rename a factor")
        cells: dict[str, Cell] = {}
        for seed in self.seed_list:
            for condition, levels in conditions.items():
                cell = Cell(condition, levels, self._config(levels, seed))
                if (same := cells.setdefault(cell.run, cell)) is not cell:
                    raise self._no_difference(same.condition, condition)
        return tuple(cells.values())

    def _no_difference(self, first: str, second: str) -> InputError:
        if self.scale == "small":
            return InputError(f"study {self.name!r} varies what small runs have in common; run it at full scale")
        return InputError(
            f"conditions {first!r} and {second!r} of study {self.name!r} are the same run: two of its factors set the "
            "same thing, or two levels are equal; leave one out"
        )

    def only(self, combinations: Iterable[Mapping[str, str]], *, described: str = "") -> "Study":
        """The part of the study with these level combinations; a factor that one does not name is at its base.
        `described`: what they are, in a line for people."""
        base = {factor.name: factor.labels[0] for factor in self.parsed}
        chosen = []
        for combination in combinations:
            for name, label in combination.items():
                if name not in base:
                    raise unknown_name("factor", name, base)
                if label not in self.labels[name]:
                    raise unknown_name(f"level of {name}", label, self.labels[name])
            chosen.append({**base, **combination})
        return dataclasses.replace(self, chosen=tuple(chosen), generators=(), described=described)

    def fraction(self, *generators: str) -> "Study":
        """The two-level fraction that generators such as D=ABC make; A, B, … are the factors in their order."""
        for factor in self.parsed:
            if len(factor.labels) != 2:
                raise InputError(
                    f"a fraction needs two levels of each factor, {factor.name!r} has {len(factor.labels)}"
                )
        rows = Fraction(len(self.parsed), generators).rows()
        part = self.only(
            {factor.name: factor.labels[sign > 0] for factor, sign in zip(self.parsed, row, strict=True)}
            for row in rows
        )
        return dataclasses.replace(part, generators=generators)

    def small(self) -> "Study":
        """The same study with every run shrunk, to test the path from recipe to report without a GPU."""
        few = dataclasses.replace(self, seeds=self.seed_list[:MOST_SEEDS])
        small = dataclasses.replace(few, scale="small")
        _ = few.cells, small.cells  # which refuses what cannot be
        return small

    @property
    def design(self) -> str:
        """The design in a line for people."""
        if self.generators:
            return FRACTION + Fraction(len(self.parsed), self.generators).describe([f.title for f in self.parsed])
        return "full factorial" if self.chosen is None else self.described or "chosen conditions"

    def to_json(self) -> dict[str, Any]:
        flat = [flat_settings(cell.config) for cell in self.cells]
        return {
            "schema": SCHEMA,
            "name": self.name,
            "scale": self.scale,
            "design": self.design,
            "factors": {name: list(labels) for name, labels in self.labels.items()},
            "settings": (shared := shared_settings(flat)),
            "assumed": [*assumed_names(shared), *self._assumed_factors()],
            "cells": [
                {
                    "run": cell.run,
                    "condition": cell.condition,
                    "levels": cell.levels,
                    "seed": cell.seed,
                    "config": encode(cell.config),
                }
                for cell in self.cells
            ],
        }

    def _assumed_factors(self) -> list[str]:
        """Those that vary a setting which the paper does not report."""
        assumed = []
        for factor in self.parsed:
            flat = [flat_settings(factor.apply(self.base, label)) for label in factor.labels]
            varied = {name for each in flat for name in each if any(other.get(name) != each[name] for other in flat)}
            if assumed_names(sorted(varied)):
                assumed.append(factor.name)
        return assumed

    def _combinations(self) -> list[dict[str, str]]:
        if self.chosen is not None:
            return list(self.chosen)
        names = [factor.name for factor in self.parsed]
        levels = itertools.product(*(factor.labels for factor in self.parsed))
        return [dict(zip(names, labels, strict=True)) for labels in levels]

    def _config(self, levels: Mapping[str, str], seed: int) -> RunConfig:
        config = dataclasses.replace(self.base, seed=seed)
        for factor in self.parsed:
            config = factor.apply(config, levels[factor.name])
        return shrink(config) if self.scale == "small" else config


def listed(seeds: int | Sequence[int]) -> tuple[int, ...]:
    """Every seed. A number says how many, from 0 on. NumPy's whole numbers, and arrays of them, will do."""
    given: Any = seeds
    if not isinstance(given, bool) and isinstance(given, Integral):
        number = int(given)
        check_at_least("seeds", number, 1)
        return tuple(range(number))
    return different_seeds(given, needed="how many, or which: whole numbers")


def add_one(factors: Factors) -> list[dict[str, str]]:
    """What does each factor do by itself? The base, then each factor alone at each of its other levels."""
    base = {name: labels[0] for name, labels in factors.items()}
    return [base, *({**base, name: label} for name, labels in factors.items() for label in labels[1:])]


def leave_one_out(factors: Factors) -> list[dict[str, str]]:
    """What is each factor needed for? All factors on, then each of them alone at its base."""
    full = {name: labels[-1] for name, labels in factors.items()}
    return [full, *({**full, name: labels[0]} for name, labels in factors.items())]


def flat_settings(config: RunConfig) -> dict[str, object]:
    """{"model.depth": 8, "protocol.cutmix.p": 0.5, …} of a run, without its seed and without what has no effect."""
    fields = encode(config)
    del fields["seed"]
    if not config.measure_every:
        del fields["measure_every"], fields["num_measured_during"]
    augmentations = fields["protocol"].pop("augment")
    for augmentation in augmentations:
        fields["protocol"][augmentation.pop("name")] = augmentation
    return flat(fields)


def flat(fields: Mapping[str, Any], above: str = "") -> dict[str, object]:
    """Nested settings under dotted names."""
    found: dict[str, object] = {}
    for name, value in fields.items():
        found |= flat(value, f"{above}{name}.") if isinstance(value, Mapping) else {f"{above}{name}": value}
    return found


def shared_settings(runs: Sequence[Mapping[str, object]]) -> dict[str, object]:
    """What is the same in every run that has it: an augmentation's settings are shared by the runs that use it."""
    names = dict.fromkeys(name for settings in runs for name in settings)
    shared = {}
    for name in names:
        values = [settings[name] for settings in runs if name in settings]
        if all(value == values[0] for value in values):
            shared[name] = values[0]
    return shared


def assumed_names(names: Iterable[str]) -> list[str]:
    """Those whose values the paper does not report."""
    return [name for name in names if any(f".{name}".endswith(f".{assumed}") for assumed in ASSUMED)]


def shrink(config: RunConfig) -> RunConfig:
    """The same run on a few images of the embedded set, with a narrow model, for two epochs, on any processor.

    It tests the path from recipe to report, and is no result. Depth and heads stay, so that tables and figures keep
    their form.
    """
    protocol = config.protocol
    return RunConfig(
        model=_narrow(config.model),
        data=DataConfig(
            name="shapes", num_train=_num_train(config.data), num_test=40, split_seed=config.data.split_seed
        ),
        # A teacher knows the classes of other images than these.
        protocol=dataclasses.replace(protocol, batch_size=32, max_epochs=2, warmup_epochs=1, patience=2, teacher=None),
        seed=config.seed,
        precision="fp32",
        num_measured=20,
        measure_every=min(config.measure_every, 1),
        num_measured_during=10,
    )


def _num_train(data: DataConfig) -> int:
    """Fewer where the run has fewer than its data set, so that the two stay apart."""
    return _NUM_TRAIN if data.num_train is None else _NUM_TRAIN // 2


def _narrow(model: ModelConfig) -> ModelConfig:
    if model.kind == "timm":
        given = timms_settings(model.settings)
        if not {"embed_dim", "num_heads"} <= given.keys():
            return model
        first = given["num_heads"] if isinstance(given["num_heads"], int) else given["num_heads"][0]
        narrow = {**given, "embed_dim": _HEAD_WIDTH * first}
        return dataclasses.replace(model, settings=tuple(f"{name}={value}" for name, value in narrow.items()))
    if model.kind == "resnet":
        return dataclasses.replace(model, channels=_CHANNELS)
    width = _HEAD_WIDTH * model.num_heads
    head_size = None if model.head_size is None else 2 * _HEAD_WIDTH
    return dataclasses.replace(model, patch_size=_PATCH_SIZE, width=width, mlp_width=2 * width, head_size=head_size)
