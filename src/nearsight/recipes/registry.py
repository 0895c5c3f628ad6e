"""Recipes by name: small functions that return what to run."""

from collections.abc import Callable

from nearsight.errors import unknown_name
from nearsight.train import RunConfig

RunRecipe = Callable[[str], RunConfig]
"""From the name of a protocol to a run."""

RUNS: dict[str, RunRecipe] = {}
"""Single training runs, for `nearsight train`."""


def run_recipe(name: str) -> Callable[[RunRecipe], RunRecipe]:
    """Register a recipe for a single run under `name`."""

    def register(recipe: RunRecipe) -> RunRecipe:
        assert name not in RUNS, name
        RUNS[name] = recipe
        return recipe

    return register


def find_run(name: str) -> RunRecipe:
    if name not in RUNS:
        raise unknown_name("recipe", name, RUNS)
    return RUNS[name]
