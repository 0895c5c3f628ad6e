"""S3's simplified model on structured patches: what it learns, step by step, for many seeds at once."""

from nearsight.train.structure.config import Descent, PositionalModel, StructureRun
from nearsight.train.structure.descent import Descended, descend
from nearsight.train.structure.phases import Phases, find_phases
from nearsight.train.structure.running import RESULTS, StructureRunner
from nearsight.train.structure.tracking import CURVES

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
