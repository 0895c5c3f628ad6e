"""Training runs as small functions. Importing this package registers them."""

from nearsight.recipes import compact, vit
from nearsight.recipes.demo import demo_runs
from nearsight.study.recipes import RUNS, find_run

__all__ = ["RUNS", "compact", "demo_runs", "find_run", "vit"]
