"""Recipes under the name they had: runs are in `nearsight.train.recipes`, studies in `nearsight.papers`."""

from nearsight.papers import SIMULATIONS, STUDIES, find_study, find_study_or_simulation
from nearsight.train.recipes import RUNS, demo_runs, find_run

__all__ = ["RUNS", "SIMULATIONS", "STUDIES", "demo_runs", "find_run", "find_study", "find_study_or_simulation"]
