"""S3's three phases as claims about the curves of every seed."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pandas as pd

from nearsight.report.structure.numbers import attention_of, by_seed, curves_of, patches_of, runs_of
from nearsight.report.study.rules import Finding, judge_every_seed
from nearsight.report.study.table import rounded, share
from nearsight.study.simulation_folder import SimulationResults
from nearsight.study.statistics import MeanInterval, mean_interval
from nearsight.train.structure.descent import NEAR

LEARNED = 0.9
"""Share of its largest value at which v counts as learned."""
STILL, LITTLE = 0.1, 0.25
"""Shares of the largest γ − ρ that count as not moved, and as little."""
SMALL_PART = 0.1


@dataclass(frozen=True, kw_only=True)
class PhaseClaim:
    text: str
    strict: str
    weak: str
    judge: Callable[[str], Callable[[SimulationResults], Finding]]
    """From the condition that is looked at to the judge."""


def gain_since_moving(results: SimulationResults, condition: str) -> MeanInterval:
    """Test accuracy at the end minus that at the beginning of the second phase, within seeds."""
    second, gains = by_seed(runs_of(results, condition), "phase_2"), []
    for seed, curve in curves_of(results, condition).items():
        then = curve.loc[curve["step"] == second[seed], "test_acc"].tolist()  # nothing where there is no second phase
        gains += [float(curve["test_acc"].iloc[-1]) - accuracy for accuracy in then]
    return mean_interval([gain for gain in gains if np.isfinite(gain)])  # none of a seed that has diverged


def _first(condition: str) -> Callable[[SimulationResults], Finding]:
    def judge(results: SimulationResults) -> Finding:
        moved = [_moved_when_learned(curve) for curve in curves_of(results, condition).values()]
        words = f"when v has {share(LEARNED)} of its length, γ − ρ has {share(min(moved))} to {share(max(moved))}"
        return judge_every_seed([m <= STILL for m in moved], [m <= LITTLE for m in moved], words)

    return judge


def _moved_when_learned(curve: pd.DataFrame) -> float:
    """The share of the largest γ − ρ that is there when α first has `LEARNED` of its largest value."""
    gap, alpha = curve["gamma"] - curve["rho"], curve["alpha"]
    when = int((alpha >= LEARNED * alpha.max()).to_numpy().argmax())
    return float(gap.iloc[when] / gap.max()) if gap.max() > 0 else 1.0


def _second(condition: str) -> Callable[[SimulationResults], Finding]:
    def judge(results: SimulationResults) -> Finding:
        sets = patches_of(results, condition).sets().numpy()
        within = (sets[:, None] == sets) & ~np.eye(len(sets), dtype=bool)
        between = sets[:, None] != sets
        strict, weak, gaps = [], [], []
        for seed in runs_of(results, condition).index:
            _, after = attention_of(results, condition, int(seed))
            strict.append(bool(after[within].min() > after[between].max()))
            gaps.append(float(after[within].mean() - after[between].mean()))
            weak.append(gaps[-1] > 0)
        return judge_every_seed(strict, weak, f"γ − ρ ends at {rounded(min(gaps), 2)} to {rounded(max(gaps), 2)}")

    return judge


def _third(condition: str) -> Callable[[SimulationResults], Finding]:
    def judge(results: SimulationResults) -> Finding:
        runs = runs_of(results, condition)
        best, best_accuracy = (float(runs[name].iloc[0]) for name in ("best_risk", "best_acc"))
        left, ends = [], []
        for curve in curves_of(results, condition).values():
            first, *_, last = curve["test_risk"].tolist()
            ends.append(last)
            left.append((last - best) / (first - best))
        words = (
            f"test risk ends at {rounded(min(ends))} to {rounded(max(ends))}, least possible {rounded(best)}; of what "
            f"was above that, {share(min(left))} to {share(max(left))} is left"
        )
        near = [bool(accuracy >= best_accuracy - NEAR) for accuracy in runs["test_acc"]]
        return judge_every_seed([part <= SMALL_PART for part in left], near, words)

    return judge


PHASE_CLAIMS = (
    PhaseClaim(
        text="I: at first only v moves",
        strict=f"when α first has {share(LEARNED)} of its largest value, γ − ρ has at most {share(STILL)} of its own",
        weak=f"at most {share(LITTLE)}",
        judge=_first,
    ),
    PhaseClaim(
        text="II: entries of A within sets outgrow those between",
        strict="at the end every entry within a set is larger than every entry between sets",
        weak="γ is larger than ρ",
        judge=_second,
    ),
    PhaseClaim(
        text="III: the risk goes to its least value",
        strict=f"of the test risk above the least possible, at most {share(SMALL_PART)} of that at the start is left",
        weak=f"the test accuracy is within {100 * NEAR:.0f} percentage point of the best possible",
        judge=_third,
    ),
)
