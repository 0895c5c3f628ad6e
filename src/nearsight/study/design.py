"""A study as data: a base run, factors with levels, seeds, and the cells that follow from them."""

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from typing import Any, Literal

from nearsight.configuration import encode
from nearsight.errors import InputError, unknown_name
from nearsight.study.conditions import ENDS, condition_name
from nearsight.study.factors import Factor, Levels
from nearsight.study.fractions import FRACTION, Fraction
from nearsight.study.results import SCHEMA, run_columns
from nearsight.study.seeds import listed
from nearsight.study.settings import assumed_names, flat_settings, shared_settings
from nearsight.study.small import MOST_SEEDS, shrink
from nearsight.train import RunConfig, RunName

Scale = Literal["full", "small"]


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
    among values, "all" says nothing, and the values are told."""
    chosen: tuple[dict[str, str], ...] | None = None
    """The level combinations to run; all by default."""
    generators: tuple[str, ...] = ()
    """Of the fraction that `chosen` is."""
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
        """What is run, seed by seed. No two conditions come to the same run."""
        conditions: dict[str, dict[str, str]] = {}
        for levels in self._combinations():
            name = condition_name(self.parsed, levels, self.ends)
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
            "same thing, or two levels are alike; leave one away"
        )

    def only(self, combinations: Iterable[Mapping[str, str]]) -> "Study":
        """The part of the study with these level combinations; a factor that one does not name is at its base."""
        base = {factor.name: factor.labels[0] for factor in self.parsed}
        chosen = []
        for combination in combinations:
            for name, label in combination.items():
                if name not in base:
                    raise unknown_name("factor", name, base)
                if label not in self.labels[name]:
                    raise unknown_name(f"level of {name}", label, self.labels[name])
            chosen.append({**base, **combination})
        return dataclasses.replace(self, chosen=tuple(chosen), generators=())

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
        _ = few.cells, small.cells  # which says what cannot be
        return small

    @property
    def design(self) -> str:
        """The design in a line for people."""
        if self.generators:
            return FRACTION + Fraction(len(self.parsed), self.generators).describe([f.title for f in self.parsed])
        return "full factorial" if self.chosen is None else "chosen conditions"

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
