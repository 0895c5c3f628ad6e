"""The papers, and our own questions beside them: one file per study. Importing this package declares them all."""

from nearsight.papers.locat import cutmix, dense, variants
from nearsight.papers.protocol import ablation, emergence, mixing, size, unreported
from nearsight.papers.structure import permuted, positional, simulations
from nearsight.study.recipes import SIMULATIONS, STUDIES, find_study, find_study_or_simulation

__all__ = [
    "SIMULATIONS",
    "STUDIES",
    "ablation",
    "cutmix",
    "dense",
    "emergence",
    "find_study",
    "find_study_or_simulation",
    "mixing",
    "permuted",
    "positional",
    "simulations",
    "size",
    "unreported",
    "variants",
]
