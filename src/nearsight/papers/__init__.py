"""The papers and our own questions: one file per study. Importing this package declares them all."""

import importlib
import pkgutil

from nearsight.study.recipes import SIMULATIONS, STUDIES, find_study, find_study_or_simulation

for _module in pkgutil.walk_packages(__path__, f"{__name__}."):
    importlib.import_module(_module.name)  # which registers its recipe and declares the report on its runs

__all__ = ["SIMULATIONS", "STUDIES", "find_study", "find_study_or_simulation"]
