"""S3's simplified model on structured patches: what it learns, step by step, for many seeds at once."""

from nearsight.train.structure.descent import CURVES, RESULTS, Descended, Phases, StructureRunner, descend, find_phases
from nearsight.train.structure.model import Descent, PositionalModel, StructureRun

__all__ = [
    "CURVES",
    "RESULTS",
    "Descended",
    "Descent",
    "Phases",
    "PositionalModel",
    "StructureRun",
    "StructureRunner",
    "descend",
    "find_phases",
]
