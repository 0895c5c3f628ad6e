"""What is followed while the simplified model learns: the numbers that S3's proof is about."""

from collections.abc import Sequence

import pandas as pd
import torch
from torch import Tensor

from nearsight.data.structured_samples import along_and_across
from nearsight.metrics import patch_association
from nearsight.train.structure.model import Performance, Weights

CURVES = (
    *("alpha", "across", "gamma", "rho"),
    *("train_risk", "test_risk", "test_acc", "associated", "rand_index"),
)
"""Columns of the curves after seed and step.

alpha: v along the feature. across: the length of v in all other directions. gamma: mean entry of A between two
different patches of one set. rho: mean entry between patches of different sets. associated: share of patches that are
associated (S3 Def. 2.2). rand_index: adjusted Rand index of the sets that A gives."""


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
        # Of what has overflown nothing is associated: entries that are all alike are a tie.
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
