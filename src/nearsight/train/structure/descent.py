"""Gradient descent of the simplified model: all seeds of a run as one tensor program."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import pandas as pd
import torch
from torch import Tensor

from nearsight.augment.pipeline import threads_for
from nearsight.data.structured_samples import FreshSamples, SampleSource, StoredSamples
from nearsight.errors import InputError
from nearsight.randomness import different_seeds
from nearsight.train.structure.config import StructureRun
from nearsight.train.structure.model import Weights, initial_weights, performance, risk_and_gradients
from nearsight.train.structure.tracking import Tracker

Heard = Callable[[float], None]
"""Told after each step how much of the descent is done, from 0 to 1; what it raises ends it."""


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
