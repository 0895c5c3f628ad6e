"""A run of the simplified model, from its settings to tables: gradient descent of all seeds as one tensor program, the
numbers that S3's proof is about, and the three phases of its dynamics.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import pandas as pd
import torch
from torch import Tensor

from nearsight.augment.pipeline import threads_for
from nearsight.data.structured import PatchData
from nearsight.data.structured_samples import FreshSamples, SampleSource, StoredSamples, along_and_across
from nearsight.errors import InputError, unknown_name
from nearsight.metrics import patch_association
from nearsight.randomness import different_seeds
from nearsight.train.structure.model import (
    Performance,
    StructureRun,
    Weights,
    initial_weights,
    performance,
    risk_and_gradients,
)

CURVES = (
    *("alpha", "across", "gamma", "rho"),
    *("train_risk", "test_risk", "test_acc", "associated", "rand_index"),
)
"""Columns of the curves after seed and step.

alpha: v along the feature. across: the length of v in all other directions. gamma: mean entry of A between two
different patches of one set. rho: mean entry between patches of different sets. associated: share of patches that are
associated (S3 Def. 2.2). rand_index: adjusted Rand index of the sets that A gives."""
RESULTS = ("exact", "exact_from", "phase_2", "phase_3", *CURVES, "best_acc", "best_risk")
"""What a run gave, after its seed: numbers of the last step, unless they say otherwise.

exact: whether all patches are associated (1 or 0). exact_from: the step from which on they are. phase_…: the step at
which a phase begins. best_…: what no classifier can better."""
TABLES = ("curves", "attention")
"""What can be kept beside."""
MOVED = 0.1
"""In logits of attention."""
NEAR = 0.01
"""One percentage point."""


class Tracker:
    """Collects the curves of all seeds, point by point."""

    def __init__(self, feature_Sd: Tensor, sets_D: Tensor) -> None:
        self._feature_Sd, self._sets_D = feature_Sd, sets_D
        together_DD = sets_D[:, None] == sets_D
        self._within = together_DD & ~torch.eye(len(sets_D), dtype=torch.bool, device=sets_D.device)
        self._between = ~together_DD
        self._steps: list[int] = []
        self._points: list[Tensor] = []

    def record(self, step: int, weights: Weights, train_risk_S: Tensor, test: Performance) -> None:
        alpha_S, across_Sd = along_and_across(weights.v_Sd, self._feature_Sd)
        # After an overflow nothing is associated: entries that are all equal are a tie.
        finite_SDD = weights.attention_SDD.nan_to_num(0.0, 0.0, 0.0) * weights.attention_SDD.isfinite().all(-1, True)
        found = patch_association(finite_SDD, self._sets_D)
        values = {
            "alpha": alpha_S,
            "across": across_Sd.norm(dim=-1),
            "gamma": weights.attention_SDD[:, self._within].mean(-1),
            "rho": weights.attention_SDD[:, self._between].mean(-1),
            "train_risk": train_risk_S,
            "test_risk": test.risk_S,
            "test_acc": test.accuracy_S,
            "associated": found.fraction,
            "rand_index": found.rand_index,
        }
        self._steps.append(step)
        self._points.append(torch.stack([values[name].double() for name in CURVES], dim=-1).cpu())

    def curves(self, seeds: Sequence[int]) -> pd.DataFrame:
        """A row per seed and step, seed by seed."""
        points_STQ = torch.stack(self._points, dim=1)
        frame = pd.DataFrame(points_STQ.flatten(0, 1).numpy(), columns=list(CURVES))
        frame.insert(0, "seed", [seed for seed in seeds for _ in self._steps])
        frame.insert(1, "step", self._steps * len(seeds))
        return frame


Heard = Callable[[float], None]
"""Called after each step with the share of the descent that is done, from 0 to 1; what it raises ends the descent."""


class Descended(NamedTuple):
    """What a descent gave."""

    first: Weights
    last: Weights
    curves: pd.DataFrame
    """A row per seed and recorded step: seed, step and `CURVES`."""


def descend(
    run: StructureRun,
    seeds: Sequence[int],
    *,
    attention_SDD: Tensor | None = None,
    device: torch.device | str = "cpu",
    heard: Heard = lambda share: None,
) -> Descended:
    """Run the seeds side by side. A seed's numbers do not depend on what it runs beside, but for rounding.

    Args:
        attention_SDD: the attention to start with; by default what `run.kept_from` says, and that is learned first.
    """
    seed_S = torch.tensor(different_seeds(seeds), device=device)
    needed = (len(seed_S), run.data.num_patches, run.data.num_patches)
    if attention_SDD is not None and attention_SDD.shape != needed:
        raise InputError(
            f"attention_SDD is of shape {tuple(attention_SDD.shape)}, but these seeds and patches need {needed}"
        )
    if attention_SDD is None and run.kept_from:
        attention_SDD = descend(run.before, seeds, device=device).last.attention_SDD
    # A step is some dozen short operations: a second thread makes it a third faster on an idle machine with two cores,
    # and four times slower on a busy one.
    with threads_for(seed_S):
        return _descend(run, seed_S, attention_SDD, heard)


def _descend(run: StructureRun, seed_S: Tensor, attention_SDD: Tensor | None, heard: Heard) -> Descended:
    descent = run.descent
    feature_Sd = run.data.feature(seed_S, run.feature)
    weights = initial_weights(run.model, run.data, seed_S)
    if attention_SDD is not None:
        weights = weights._replace(attention_SDD=attention_SDD)
    first, tracker = weights, Tracker(feature_Sd, run.data.sets().to(seed_S.device))
    training = _training(run, feature_Sd, seed_S)
    test = FreshSamples(run.data, feature_Sd, seed_S, f"structured.test.{run.feature}", descent.num_test)
    tested = list(test.pieces(0))
    for step in range(descent.steps + 1):
        found = risk_and_gradients(weights, run.model, training.pieces(step))
        if step % descent.record_every == 0 or step == descent.steps:
            tracker.record(step, weights, found.risk_S, performance(weights, run.model, tested))
        if step < descent.steps:
            weights = weights._replace(v_Sd=weights.v_Sd - descent.feature_lr * found.v_Sd)
            if descent.attention_lr:  # else it stays as it is, even where v's gradient has overflown
                moved_SDD = weights.attention_SDD - descent.attention_lr * found.attention_SDD
                weights = weights._replace(attention_SDD=moved_SDD)
            heard((step + 1) / descent.steps)
    return Descended(first, weights, tracker.curves(seed_S.tolist()))


def _training(run: StructureRun, feature_Sd: Tensor, seed_S: Tensor) -> SampleSource:
    stream, num_samples = f"structured.train.{run.feature}", run.descent.num_samples
    if run.descent.samples == "fresh":
        return FreshSamples(run.data, feature_Sd, seed_S, stream, num_samples)
    return StoredSamples.draw(run.data, feature_Sd, seed_S, stream, num_samples)


@dataclass(frozen=True, kw_only=True)
class Phases:
    """Where the second and the third phase of S3's dynamics begin; None where they do not come.

    S3 proves: I, only v moves; II, the entries of A within sets outgrow those between; III, the risk goes to its end.
    The proof is about limits; these rules put a step to each border:

    - II begins when γ − ρ reaches `MOVED`: within a set, attention is then a tenth stronger than between sets.
    - III begins when all patches are associated and the test accuracy is within `NEAR` of the best there is. Where
      features appear by chance (q > 0) even that is not 1, so the risk does not go to 0 but to its least value.
    """

    second: int | None
    third: int | None


def find_phases(curve: pd.DataFrame, best_accuracy: float) -> Phases:
    """The phases of one seed's curve, which has a row per recorded step."""
    moved = curve["gamma"] - curve["rho"] >= MOVED
    second = _first(curve, moved)
    if second is None:
        return Phases(second=None, third=None)
    done = (curve["associated"] == 1) & (curve["test_acc"] >= best_accuracy - NEAR) & (curve["step"] >= second)
    return Phases(second=second, third=_first(curve, done))


def exact_from(curve: pd.DataFrame) -> float:
    """The first step from which on all patches stay associated; NaN where they are not at the end."""
    steps, exact = curve["step"].tolist(), (curve["associated"] == 1).tolist()
    if not exact[-1]:
        return math.nan
    last_without = max((place for place, is_exact in enumerate(exact) if not is_exact), default=-1)
    return float(steps[last_without + 1])


def _first(curve: pd.DataFrame, holds: "pd.Series[bool]") -> int | None:
    steps = curve.loc[holds, "step"]
    return int(steps.iloc[0]) if len(steps) else None


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
