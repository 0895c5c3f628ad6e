"""S3's simplified model on structured patches: what it learns, step by step, for many seeds at once."""

from typing import TYPE_CHECKING

from nearsight.lazy import open_room

if TYPE_CHECKING:
    from nearsight.train.structure.descent import (
        CURVES,
        RESULTS,
        Descended,
        Phases,
        StructureRunner,
        descend,
        find_phases,
    )
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

open_room(__name__)
