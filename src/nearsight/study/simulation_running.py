"""A simulation from start to finish: what is missing is done, condition by condition."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import pandas as pd
import torch

from nearsight.errors import InputError
from nearsight.files import output_folder
from nearsight.study.lock import Locks
from nearsight.study.plan import PlannedClaims, write_plan
from nearsight.study.simulation import RUNS, Simulation, SimulationCell
from nearsight.study.simulation_folder import SimulationFolder
from nearsight.train import Stop, StoppedError
from nearsight.train.integrity import provenance

_LOCK = "simulation"


class SimulationListener:
    """Its methods are called while a simulation runs; by default they do nothing."""

    def planned(self, cells: Sequence[SimulationCell], missing: Sequence[SimulationCell]) -> None:
        """These are the cells, and those of them that are not done yet."""

    def started(self, condition: str, cells: Sequence[SimulationCell]) -> None:
        """These are computed next, together."""

    def heard(self, condition: str, share: float) -> None:
        """So much of the condition is done, from 0 to 1."""

    def finished(self, condition: str, runs: pd.DataFrame) -> None:
        """What its cells gave."""


class SimulationStoppedError(StoppedError):
    """A stop was requested; the conditions that were done are on disk."""

    def __init__(self, by: str) -> None:
        self.by = by
        Exception.__init__(self, f"stopped by {by}; whole conditions are kept, and the same command continues")


def run_simulation(
    simulation: Simulation,
    path: Path,
    *,
    device: torch.device | str = "cpu",
    listener: SimulationListener | None = None,
    stop: Stop | None = None,
    claims: PlannedClaims | None = None,
) -> SimulationFolder:
    """Run what is missing of a simulation in the folder `path`. A condition is written when all its seeds are done.

    `claims`: what the runs are to judge, as `StudyReport.plan` gives it, written into plan.json before them.
    """
    folder, listener, stop = SimulationFolder(path), listener or SimulationListener(), stop or Stop()
    folder.check(simulation)
    output_folder(path)
    with _alone(path):
        folder.claim(simulation)
        done = folder.done()
        if claims is not None:
            write_plan(
                path,
                claims,
                conditions=list(simulation.conditions),
                seeds=simulation.seed_list,
                finished=lambda: len(done),
                is_alone=True,
            )
        missing = [cell for cell in simulation.cells if cell.run not in done]
        listener.planned(simulation.cells, missing)
        certificate = provenance(torch.device(device)) if missing else {}
        for condition in dict.fromkeys(cell.condition for cell in missing):
            cells = [cell for cell in missing if cell.condition == condition]
            listener.started(condition, cells)
            with stop.listening():
                found = _run_condition(simulation, cells, torch.device(device), listener, stop)
            folder.add(condition, cells, found)
            folder.write_provenance(certificate)
            listener.finished(condition, found[RUNS])
    return folder


def _run_condition(
    simulation: Simulation,
    cells: Sequence[SimulationCell],
    device: torch.device,
    listener: SimulationListener,
    stop: Stop,
) -> dict[str, pd.DataFrame]:
    condition, began = cells[0].condition, time.perf_counter()

    def heard(share: float) -> None:
        if stop.by is not None:
            raise SimulationStoppedError(stop.by)
        listener.heard(condition, share)

    found = dict(simulation.simulate(simulation.conditions[condition], [cell.seed for cell in cells], device, heard))
    _check_responses(simulation, found)
    seconds = (time.perf_counter() - began) / len(cells)  # its share, since all seeds were computed together
    return {**found, RUNS: found[RUNS].assign(wall_seconds=round(seconds, 2))}


def _check_responses(simulation: Simulation, found: Mapping[str, pd.DataFrame]) -> None:
    """Before anything is written, for what sums a condition up must be there when it is read again."""
    if RUNS not in found:
        raise InputError(f"the function of study {simulation.name!r} returns no table {RUNS!r}, with a row per seed")
    for name in simulation.responses:
        if name not in found[RUNS]:
            columns = ", ".join(map(str, found[RUNS].columns))
            words = f"its function returns no column {name!r} of {RUNS!r}, but {columns}"
            raise InputError(f"study {simulation.name!r} has the response {name!r}, and {words}")
        if not pd.api.types.is_numeric_dtype(found[RUNS][name]):
            raise InputError(f"response {name!r} of study {simulation.name!r} holds no numbers, so it has no mean")


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """No other command writes to the folder meanwhile."""
    place = path / "locks"
    with Locks(place).kept_alive() as locks:
        if not locks.take(_LOCK):
            holder = locks.holder(_LOCK)
            who = holder.name if holder else "somebody"
            raise InputError(f"{path} is being written to by {who}; wait until that is done, or choose another --out")
        try:
            yield
        finally:
            locks.clear(_LOCK)
            with suppress(OSError):  # another may already wait for it
                place.rmdir()
