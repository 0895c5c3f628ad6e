"""The course of the studies of emergence as a table."""

import numpy as np
import pandas as pd

from nearsight.metrics import next_patch_distance
from nearsight.report.own_patch import OWN_PATCH
from nearsight.report.study.emergence.course import GLOBAL_AGAIN, LASTING, LOCAL, courses
from nearsight.report.study.own_patch.heads import grid_of
from nearsight.report.study.table import MISSING, Table, rounded, share
from nearsight.study.results import StudyResults

NEVER = "never"
_WHOLE_OR_NONE = ("first_epoch", "first_layer", "own_patch_epoch", "own_patch_layer")


def course_table(results: StudyResults) -> Table:
    """A row per run: its first local head, its half-way epochs, its heads that turned back."""
    rows, shown = [], []
    step = next_patch_distance(grid_of(results))
    for course in courses(results):
        first = course.first_local()
        became, again = course.turned()
        locality, accuracy = course.locality_half(), course.accuracy_half()
        turn = course.first_own_patch(step)
        rows.append(
            {
                **{"condition": course.condition, "seed": course.seed, "threshold": LOCAL, "scale": results.scale},
                **{"first_epoch": first[0] if first else None, "first_layer": first[1] if first else None},
                **{"own_patch_epoch": turn.epoch if turn else None, "own_patch_layer": turn.layer if turn else None},
                **{"smallest_at_start": course.smallest[0], "smallest_at_end": course.smallest[-1]},
                **{"num_local_at_end": course.num_local(), "num_ever_local": became, "num_global_again": again},
                **{"locality_half_epoch": locality, "accuracy_half_epoch": accuracy, "lag": locality - accuracy},
            }
        )
        shown.append(
            {
                "condition": course.condition,
                "seed": str(course.seed),
                "first local head": f"epoch {first[0]}, L{first[1] + 1}" if first else NEVER,
                "to its own patch": f"epoch {turn.epoch}, L{turn.layer + 1}" if turn else NEVER,
                "smallest MAD, start to end": f"{rounded(course.smallest[0])} to {rounded(course.smallest[-1])}",
                "local heads at the end": str(course.num_local()),
                "ever local, global again": f"{became}, {again}",
                "half way: MAD, accuracy": f"{_epoch(locality)}, {_epoch(accuracy)}",
                "lag, epochs": rounded(locality - accuracy, 1, signed=True),
            }
        )
    numbers = pd.DataFrame(rows)
    return Table(
        name="emergence",
        title=f"{results.name}: when heads become local",
        numbers=numbers.astype(dict.fromkeys(_WHOLE_OR_NONE, "Int64")),
        shown=pd.DataFrame(shown),
        notes=(
            f"Local: a distance below {rounded(LOCAL)}, the paper's smallest without CutMix, {LASTING} measurements "
            f"in a row; global again: at least {rounded(GLOBAL_AGAIN)} for as many. Epoch 0 are the initial weights.",
            f"To its own patch: below {share(OWN_PATCH)} of the distance to the next patch ({rounded(step)}), "
            f"{LASTING} measurements in a row.",
            "Half way: the epoch at which the smallest distance, or the validation accuracy, has made half of its "
            "change from start to end (accuracy from 0). Lag: the former minus the latter; positive: accuracy leads.",
        ),
    )


def _epoch(value: float) -> str:
    return MISSING if np.isnan(value) else f"epoch {rounded(value, 1)}"
