"""A run of the simplified model, from its settings to tables."""

import math
from collections.abc import Sequence

import pandas as pd
import torch
from torch import Tensor

from nearsight.data.structured import PatchData
from nearsight.errors import unknown_name
from nearsight.train.structure.config import StructureRun
from nearsight.train.structure.descent import Descended, Heard, descend
from nearsight.train.structure.phases import exact_from, find_phases
from nearsight.train.structure.tracking import CURVES

RESULTS = ("exact", "exact_from", "phase_2", "phase_3", *CURVES, "best_acc", "best_risk")
"""What a run gave, after its seed: numbers of the last step, unless they say otherwise.

exact: whether all patches are associated (1 or 0). exact_from: the step from which on they are. phase_…: the step at
which a phase begins. best_…: what no classifier can better."""


TABLES = ("curves", "attention")
"""What can be kept beside."""


class StructureRunner:
    """Runs one condition after the other; an attention that several start with is learned once."""

    def __init__(self, *, keep: Sequence[str] = TABLES) -> None:
        for name in keep:
            if name not in TABLES:
                raise unknown_name("table to keep", name, TABLES)
        self._keep = frozenset(keep)
        self._learned: tuple[object, Tensor] | None = None

    def __call__(
        self, run: StructureRun, seeds: Sequence[int], device: torch.device, heard: Heard
    ) -> dict[str, pd.DataFrame]:
        """A row per seed in `runs`: seed and `RESULTS`; and of `keep`: curves (of every recorded step) and attention
        (A before and after)."""
        found = descend(
            run, seeds, attention_SDD=self._attention(run, seeds, device, heard), device=device, heard=heard
        )
        tables = {"runs": _results(found.curves, run.data)}
        if "curves" in self._keep:
            tables["curves"] = found.curves
        if "attention" in self._keep:
            tables["attention"] = _attention_entries(found, seeds, run.descent.steps)
        return tables

    def _attention(self, run: StructureRun, seeds: Sequence[int], device: torch.device, heard: Heard) -> Tensor | None:
        if not run.kept_from:
            return None
        wanted = (run.before, tuple(seeds), str(device))
        if self._learned is None or self._learned[0] != wanted:
            learned = descend(run.before, seeds, device=device, heard=lambda share: heard(0.0)).last.attention_SDD
            self._learned = (wanted, learned)
        return self._learned[1]


def _results(curves: pd.DataFrame, data: PatchData) -> pd.DataFrame:
    rows = []
    for seed, curve in curves.groupby("seed", sort=False):
        phases, last = find_phases(curve, data.best_accuracy), curve.iloc[-1]
        rows.append(
            {
                "seed": seed,
                "exact": int(last["associated"] == 1),
                "exact_from": exact_from(curve),
                "phase_2": math.nan if phases.second is None else phases.second,
                "phase_3": math.nan if phases.third is None else phases.third,
                **{name: last[name] for name in CURVES},
                "best_acc": data.best_accuracy,
                "best_risk": data.best_risk,
            }
        )
    return pd.DataFrame(rows, columns=["seed", *RESULTS])


def _attention_entries(found: Descended, seeds: Sequence[int], steps: int) -> pd.DataFrame:
    """A row per entry of A, at the start and at the end."""
    frames = []
    for step, weights in ((0, found.first), (steps, found.last)):
        entries_SDD = weights.attention_SDD.double().cpu()
        names = ["seed", "row", "column"]
        index = pd.MultiIndex.from_product([list(seeds), *(range(size) for size in entries_SDD.shape[1:])], names=names)
        frame = pd.DataFrame({"entry": entries_SDD.flatten().numpy()}, index=index).reset_index()
        frame.insert(1, "step", step)
        frames.append(frame)
    return pd.concat(frames, ignore_index=True)
