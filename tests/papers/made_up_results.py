"""Results made up for any study: numbers by condition and seed go in, tables of runs, heads and epochs come out."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from nearsight.report.claims import Judgement
from nearsight.report.writing import study_verdicts
from nearsight.study import Cell, Study
from nearsight.study.design import flat_settings, shared_settings
from nearsight.study.results import StudyResults, run_columns

Numbers = Mapping[str, float]
"""min_mad, early_mad and test_acc of a run; what is not given has a usual value."""
USUAL = {"min_mad": 0.3, "early_mad": 0.38, "test_acc": 0.5, "max_mad": 0.5, "min_entropy": 0.5, "max_entropy": 0.95}


def made_up(
    study: Study,
    numbers: Callable[[Cell], Numbers],
    *,
    epochs: int = 0,
    course: Callable[[Cell, int], Numbers] | None = None,
    scale: str = "full",
) -> StudyResults:
    """With `course`, the smallest distance and the validation accuracy of a cell after so many epochs."""
    rows: list[dict[str, Any]] = []
    heads, history, courses = [], [], []
    for cell in study.cells:
        given = {**USUAL, **numbers(cell)}
        frame = _heads(cell, given)
        last = course(cell, epochs) if course else {}
        rows.append(
            {
                **{"run": cell.run, "condition": cell.condition, **cell.levels, "seed": cell.seed},
                **{"epochs": epochs or 80, "best_epoch": epochs or 80, "best_val_acc": given["test_acc"]},
                "test_acc": given["test_acc"],
                **{"min_mad": frame["mad"].min(), "max_mad": frame["mad"].max()},
                **{"min_entropy": frame["entropy"].min(), "max_entropy": frame["entropy"].max()},
                **{"images_per_second": 1e5, "wall_seconds": 100.0},
            }
        )
        heads.append(frame)
        for epoch in range(1, max(epochs, 2) + 1):
            told = course(cell, epoch) if course else last
            history.append(_epoch(cell, epoch, told.get("val_acc", 0.1)))
        if course is not None:
            during = range(epochs + 1)
            courses += [_heads(cell, {**given, **course(cell, epoch)}).assign(epoch=epoch) for epoch in during]
    extra = {"course": pd.concat(courses, ignore_index=True)} if courses else {}
    return StudyResults(
        name=study.name,
        factors=study.labels,
        runs=pd.DataFrame(rows).reindex(columns=list(run_columns(tuple(study.labels)))),
        heads=pd.concat(heads, ignore_index=True),
        history=pd.DataFrame(history),
        scale=scale,
        settings=shared_settings([flat_settings(cell.config) for cell in study.cells]),
        assumed=("protocol.lr",),
        **extra,
    )


def _heads(cell: Cell, given: Numbers) -> pd.DataFrame:
    """As many heads as the model has: the first of the first layer has the smallest distance, the first two layers
    have the given mean, and distance grows with depth."""
    depth, num_heads = cell.config.model.depth, cell.config.model.num_heads
    random = np.random.default_rng([cell.seed, *cell.condition.encode()])
    layer, head = np.divmod(np.arange(depth * num_heads), num_heads)
    place = layer / max(depth - 1, 1)
    mad = given["early_mad"] + (given["max_mad"] - given["early_mad"]) * np.clip(place, 0, 0.98)
    mad = np.clip(mad + 0.03 * random.uniform(-1, 1, mad.size), 0.0, given["max_mad"])
    mad[0], mad[-1] = given["min_mad"], given["max_mad"]
    early = layer < 2
    rest = early.copy()
    rest[0] = False
    mad[rest] += (given["early_mad"] * early.sum() - mad[early].sum()) / rest.sum()
    entropy = np.interp(mad, [mad.min(), mad.max()], [given["min_entropy"], given["max_entropy"]])
    return pd.DataFrame(
        {
            **{
                "run": cell.run,
                "layer": layer,
                "layer_name": [f"blocks.{index}.attn" for index in layer],
                "head": head,
            },
            **{"mad": mad, "mad_std": 0.02, "entropy": entropy, "entropy_std": 0.03, "num_images": 5000},
        }
    )


def _epoch(cell: Cell, epoch: int, accuracy: float) -> dict[str, Any]:
    losses = {"train_loss": 4.0 / epoch, "val_loss": 4.1 / epoch}
    return {"run": cell.run, "epoch": epoch, **losses, "val_acc": accuracy, "lr": 1e-3, "seconds": 1.0}


def noise(cell: Cell, size: float) -> float:
    """The same for a cell whenever it is asked."""
    return size * float(np.random.default_rng([cell.seed, 11, *cell.condition.encode()]).standard_normal())


def only(results: StudyResults, keep: Callable[[pd.DataFrame], "pd.Series[bool]"]) -> StudyResults:
    """The part of the results that has these runs."""
    return dataclasses.replace(results, runs=results.runs[keep(results.runs)].reset_index(drop=True))


def judgements(results: StudyResults) -> list[Judgement]:
    """Of every claim and question of a study; none where nothing is declared under its name."""
    verdicts = study_verdicts(results)
    return list(verdicts.judgements) if verdicts else []


def drawn(panel: Axes, gid: str) -> tuple[list[float], list[float]]:
    """Where the line of this name has its points."""
    (line,) = [line for line in panel.get_lines() if line.get_gid() == gid]
    return [float(x) for x in line.get_xdata()], [float(y) for y in line.get_ydata()]
