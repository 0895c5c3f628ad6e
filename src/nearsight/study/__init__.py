"""Factors × seeds → cells → runs → tables: what is varied, what is missing, who does it, what it gave."""

from typing import TYPE_CHECKING

from nearsight.lazy import open_room

if TYPE_CHECKING:
    from nearsight.study.design import Cell, Study, add_one, leave_one_out
    from nearsight.study.factors import OFF
    from nearsight.study.folder import CellState, StudyFolder
    from nearsight.study.results import StudyResults
    from nearsight.study.runner import StudyListener
    from nearsight.study.running import StudyPart, run_studies, run_study
    from nearsight.study.simulation import Simulation, SimulationCell
    from nearsight.study.simulation_folder import SimulationFolder, SimulationResults, is_simulation
    from nearsight.study.simulation_running import SimulationListener, run_simulation

__all__ = [
    "OFF",
    "Cell",
    "CellState",
    "Simulation",
    "SimulationCell",
    "SimulationFolder",
    "SimulationListener",
    "SimulationResults",
    "Study",
    "StudyFolder",
    "StudyListener",
    "StudyPart",
    "StudyResults",
    "add_one",
    "is_simulation",
    "leave_one_out",
    "run_simulation",
    "run_studies",
    "run_study",
]

open_room(__name__)
