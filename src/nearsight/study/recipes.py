"""Recipes of studies and simulations by name: small functions that return what to run."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, Protocol, TypeVar

if TYPE_CHECKING:
    from nearsight.study import Simulation, Study

Scale = Literal["full", "small"]
"""At which a study is run: as it is, or to test the path on any machine."""


class StudyRecipe(Protocol):
    """From the number of seeds to a study; it has its own default. The docstring says command, cost and result."""

    __doc__: str | None

    def __call__(self, *, seeds: int = ...) -> Study: ...


STUDIES: dict[str, StudyRecipe] = {}
"""Studies, for `nearsight study`."""


class SimulationRecipe(Protocol):
    """Likewise, to a simulation."""

    __doc__: str | None

    def __call__(self, *, seeds: int = ...) -> Simulation: ...


SIMULATIONS: dict[str, SimulationRecipe] = {}
"""Studies without image models, for `nearsight study`, too."""

Named = TypeVar("Named", "Study", "Simulation")


def recipe(name: str) -> Callable[[StudyRecipe], StudyRecipe]:
    """Register a recipe for a study under `name`, which becomes the study's own."""

    def register(make: StudyRecipe) -> StudyRecipe:
        assert name not in {**STUDIES, **SIMULATIONS}, name
        STUDIES[name] = _naming(make, name)
        return STUDIES[name]

    return register


def simulation(name: str) -> Callable[[SimulationRecipe], SimulationRecipe]:
    """Register a recipe for a simulation under `name`, which becomes the simulation's own."""

    def register(make: SimulationRecipe) -> SimulationRecipe:
        assert name not in {**STUDIES, **SIMULATIONS}, name
        SIMULATIONS[name] = _naming(make, name)
        return SIMULATIONS[name]

    return register


def _naming(make: Callable[..., Named], name: str) -> Callable[..., Named]:
    @functools.wraps(make)
    def named(**seeds: int) -> Named:
        return dataclasses.replace(make(**seeds), name=name)

    return named
