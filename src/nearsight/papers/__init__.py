"""The papers, and our own questions beside them: one file per study.

Importing a file registers its recipe and declares what is reported of its runs. Who only asks for names gets them from
the files' text, without loading what draws.
"""

import ast
import functools
import pkgutil
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, cast

from nearsight.errors import unknown_name
from nearsight.lazy import marked
from nearsight.study import recipes
from nearsight.study.recipes import SimulationRecipe, StudyRecipe

__all__ = ["SIMULATIONS", "STUDIES", "catalogue", "declare_all", "find_study", "find_study_or_simulation"]


@dataclass(frozen=True)
class _Entry:
    """A recipe as its file has it."""

    module: str
    """Under `nearsight.papers`."""
    about: str
    """Its docstring."""


@functools.cache
def _written() -> dict[str, _Entry]:
    """The name in `@recipe("…")` or `@simulation("…")` → the recipe below it, in every file of this package."""
    return {
        name: _Entry(module=module, about=ast.get_docstring(function) or "")
        for name, module, function in marked(Path(__path__[0]), "recipe", "simulation")
    }


def catalogue() -> dict[str, str]:
    """Every study and simulation by name, with its docstring; those that others have registered, too."""
    registered = {**recipes.STUDIES, **recipes.SIMULATIONS}
    return {
        **{name: entry.about for name, entry in _written().items()},
        **{name: make.__doc__ or "" for name, make in registered.items() if name not in _written()},
    }


def declare_all() -> None:
    """Load every file here: whoever reports results calls it first."""
    for place in pkgutil.walk_packages(__path__, f"{__name__}."):
        import_module(f"nearsight.papers.{place.name.removeprefix(f'{__name__}.')}")


def find_study(name: str) -> StudyRecipe:
    found = find_study_or_simulation(name)
    if name not in recipes.STUDIES:  # a simulation
        raise unknown_name("study", name, recipes.STUDIES)
    return cast("StudyRecipe", found)


def find_study_or_simulation(name: str) -> StudyRecipe | SimulationRecipe:
    if name in _written():
        import_module(f"nearsight.papers.{_written()[name].module}")
    elif name not in catalogue():
        raise unknown_name("study", name, catalogue())
    return recipes.STUDIES[name] if name in recipes.STUDIES else recipes.SIMULATIONS[name]


def __getattr__(name: str) -> Any:
    if name in ("SIMULATIONS", "STUDIES"):
        declare_all()
        return getattr(recipes, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
