"""Recipes under the name they had: runs are in `nearsight.train.recipes`, studies in `nearsight.papers`."""

from typing import Any

from nearsight import papers
from nearsight.papers import find_study, find_study_or_simulation
from nearsight.train.recipes import RUNS, demo_run, find_run

__all__ = ["RUNS", "demo_run", "find_run", "find_study", "find_study_or_simulation"]


def __getattr__(name: str) -> Any:
    """`STUDIES` and `SIMULATIONS`, for which every study is loaded."""
    return getattr(papers, name)
