"""The papers' experiments as small functions. Importing this package registers them."""

from nearsight.recipes import compact, locat, protocols, vit
from nearsight.recipes.demo import demo_runs
from nearsight.recipes.registry import RUNS, STUDIES, find_run, find_study

__all__ = ["RUNS", "STUDIES", "compact", "demo_runs", "find_run", "find_study", "locat", "protocols", "vit"]
