"""The three phases of S3's dynamics, found in the curves of one run.

S3 proves: I, only v moves; II, the entries of A within sets outgrow those between; III, the risk goes to its end. The
proof is about limits; these rules put a step to each border:

- II begins when γ − ρ reaches `MOVED`: within a set, attention is then a tenth stronger than between sets.
- III begins when all patches are associated and the test accuracy is within `NEAR` of the best there is. Where features
  appear by chance (q > 0) even that is not 1, so the risk does not go to 0 but to its least value.
"""

import math
from dataclasses import dataclass

import pandas as pd

MOVED = 0.1
"""In logits of attention."""
NEAR = 0.01
"""One percentage point."""


@dataclass(frozen=True, kw_only=True)
class Phases:
    """Where the second and the third phase begin; None where they do not come."""

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
