"""The papers' experiments as small functions. Importing this package registers them."""

from nearsight.recipes import compact
from nearsight.recipes.demo import demo_runs
from nearsight.recipes.registry import RUNS, find_run

__all__ = ["RUNS", "compact", "demo_runs", "find_run"]
