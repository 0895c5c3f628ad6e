"""The papers, and our own questions beside them: one file per study. Importing this package declares them all."""

from nearsight.papers.locat import accuracy, dense, parts
from nearsight.papers.protocol import ablation, emergence, mixing, size, unreported
from nearsight.papers.structure import association, association_control, association_sweep, permuted, transfer
from nearsight.papers.structure import parts as structure_parts
from nearsight.study.recipes import SIMULATIONS, STUDIES, find_study, find_study_or_simulation

__all__ = [
    "SIMULATIONS",
    "STUDIES",
    "ablation",
    "accuracy",
    "association",
    "association_control",
    "association_sweep",
    "dense",
    "emergence",
    "find_study",
    "find_study_or_simulation",
    "mixing",
    "parts",
    "permuted",
    "size",
    "structure_parts",
    "transfer",
    "unreported",
]
