"""A study whose cells are no trainings of image models: named conditions × seeds, where one condition's seeds run
together as one tensor program."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import pandas as pd
import torch

from nearsight.configuration import encode, identifying
from nearsight.errors import InputError
from nearsight.files import canonical_hash
from nearsight.study.design import MOST_SEEDS, flat, listed, shared_settings
from nearsight.study.recipes import Scale
from nearsight.study.run_tables import check_label

SCHEMA = 1
"""Version of a simulation's study.json and tables; raised whenever an older reader would go wrong."""
RUNS = "runs"


class Simulate(Protocol):
    """Runs all seeds of a condition at once."""

    def __call__(
        self, config: Any, seeds: Sequence[int], device: torch.device, heard: Callable[[float], None], /
    ) -> Mapping[str, pd.DataFrame]:
        """The table `runs` with a row per seed, and further tidy tables by name, with as many rows of each seed; each
        has a column seed.

        `heard` is called now and then with the share that is done, from 0 to 1; what it raises ends the run.
        """


@dataclass(frozen=True)
class SimulationCell:
    condition: str
    seed: int
    run: str
    """Its identity: equal for equal settings and seed, whatever they are called."""


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """Conditions × seeds, and the function that runs the seeds of one condition."""

    conditions: Mapping[str, Any]
    """Name → its settings, a frozen dataclass."""
    simulate: Simulate
    shrink: Callable[[Any], Any]
    """The same settings, made small enough to test the path in seconds."""
    responses: Mapping[str, str]
    """The columns of `runs` that sum a condition up, and what they are called."""
    seeds: int | Sequence[int] = 10
    """How many, counted from 0, or which."""
    name: str = "simulation"
    assumed: tuple[str, ...] = ()
    """Settings, by their dotted names, whose values the paper does not report."""
    scale: Scale = "full"
    """small: every condition is shrunk."""

    def __post_init__(self) -> None:
        if not self.conditions:
            raise InputError(f"study {self.name!r} has no conditions; give it one")
        if len(set(self.conditions.values())) < len(self.conditions):
            raise InputError(f"two conditions of study {self.name!r} have the same settings")
        for condition in self.conditions:
            check_label(condition, f"a condition of study {self.name!r}")
        listed(self.seeds)

    @cached_property
    def seed_list(self) -> tuple[int, ...]:
        return listed(self.seeds)

    @cached_property
    def cells(self) -> tuple[SimulationCell, ...]:
        """What is run, condition by condition."""
        return tuple(
            SimulationCell(condition, seed, canonical_hash({"config": identifying(config), "seed": seed}))
            for condition, config in self.conditions.items()
            for seed in self.seed_list
        )

    @cached_property
    def settings(self) -> dict[str, dict[str, object]]:
        """Condition → {"data.num_sets": 5, "descent.steps": 1000, …}."""
        return {name: flat(encode(config)) for name, config in self.conditions.items()}

    @cached_property
    def shared(self) -> dict[str, object]:
        """The settings that all conditions have in common."""
        return shared_settings([*self.settings.values()])

    @property
    def levels(self) -> dict[str, dict[str, object]]:
        """Condition → what sets it apart: the settings that not all conditions have in common."""
        varied = dict.fromkeys(name for each in self.settings.values() for name in each if name not in self.shared)
        return {condition: {name: each.get(name) for name in varied} for condition, each in self.settings.items()}

    def small(self) -> "Simulation":
        """The same study with every condition shrunk, to test the path from recipe to report."""
        conditions = {name: self.shrink(config) for name, config in self.conditions.items()}
        if len(set(conditions.values())) < len(conditions):
            raise InputError(f"study {self.name!r} varies what small runs have in common; run it at full scale")
        return dataclasses.replace(self, conditions=conditions, seeds=self.seed_list[:MOST_SEEDS], scale="small")

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "kind": "simulation",
            "name": self.name,
            "scale": self.scale,
            "responses": dict(self.responses),
            "settings": self.shared,
            "assumed": list(self.assumed),
            "conditions": {name: encode(config) for name, config in self.conditions.items()},
            "levels": self.levels,
            "cells": [dataclasses.asdict(cell) for cell in self.cells],
        }
