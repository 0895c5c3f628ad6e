"""Whether the lens is right about a model, refuses it, or neither: the only two that are allowed."""

import os
import re
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal
from unittest import mock

import numpy as np

from foreign_references.case import Case, prepare
from foreign_references.expected import Expected, expect
from nearsight import measure
from nearsight.errors import InputError

Kind = Literal["right", "refused", "wrong", "traceback"]
TOLERANCE = 1e-5
SMALLEST = 1e-2
"""What differences are relative to where a number is smaller: of a head that looks at one patch alone, float32 leaves
little of the entropy."""


@dataclass(frozen=True)
class Outcome:
    """What became of one case."""

    kind: Kind
    message: str = ""
    """Of a refusal, or what is wrong."""
    difference: float = float("nan")
    """Relative, of distance and entropy, the largest over all layers and heads; of videos that of distance in time,
    too."""
    expected: list[Expected] = field(default_factory=list)
    skipped: Mapping[str, str] = field(default_factory=dict)
    """What the lens does not measure, with its reasons."""


def outcome(case: Case) -> Outcome:
    """Measure the model of a case and compare with what its own code says."""
    with mock.patch.dict(os.environ, case.environment):
        return _outcome(case)


def _outcome(case: Case) -> Outcome:
    model, inputs = prepare(case)
    expected = expect(case, model, inputs)
    options = dict(case.options) | ({} if case.call is None else {"call": case.call})
    try:
        table = measure(model, inputs, **options)
    except InputError as error:
        return Outcome("refused", str(error), expected=expected)
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{frame.filename.rpartition('/')[2]}:{frame.lineno}"
        return Outcome("traceback", f"{type(error).__name__} in {place}: {str(error)[:300]}", expected=expected)
    try:
        difference = largest_difference(table, expected)
        check_what_is_left_out(case, table.skipped)
    except WrongError as error:
        return Outcome("wrong", str(error), expected=expected, skipped=table.skipped)
    return Outcome("right", "", difference, expected, dict(table.skipped))


def fault(case: Case, found: Outcome) -> str:
    """What is not as the case says; nothing, if all is."""
    wanted: Kind = "right" if case.refused is None else "refused"
    if found.kind != wanted:
        return f"{found.kind} instead of {wanted}: {found.message}"
    if case.refused is not None and (case.refused not in found.message or "\n" in found.message):
        return f"refused in other words: {found.message}"
    return ""


class WrongError(Exception):
    """The lens says something else than a model's own code."""


def largest_difference(table: Any, expected: list[Expected]) -> float:
    """Over all layers and heads; exactly those layers that are expected must be there."""
    by_name = {found.name: found for found in expected}
    if unknown := [name for name in table.layer_names if name not in by_name]:
        raise WrongError(f"measures {', '.join(unknown[:3])}, which is no spatial attention")
    if missing := [name for name in by_name if name not in table.layer_names]:
        reasons = {table.skipped.get(name, "nothing is said of it") for name in missing}
        raise WrongError(f"leaves out {len(missing)} of {len(expected)}, {missing[0]}: {'; '.join(reasons)}")
    times = table.extra.get("temporal_distance", np.full_like(table.mad, np.nan))
    differences = {
        name: _difference(by_name[name], *numbers)
        for name, *numbers in zip(table.layer_names, table.mad, table.entropy, times, strict=True)
    }
    worst = max(differences, key=lambda name: differences[name])
    if not differences[worst] < TOLERANCE:
        raise WrongError(f"{worst} differs by {differences[worst]:.1e}")
    return differences[worst]


def _difference(found: Expected, mad: np.ndarray, entropy: np.ndarray, time: np.ndarray) -> float:
    """Of one layer, whose row may be longer than it has heads."""
    heads = len(found.entropy)
    if np.isfinite(entropy).sum() != heads:
        raise WrongError(f"{found.name} has {heads} heads, not {np.isfinite(entropy).sum()}")
    largest = 0.0
    none = np.full(heads, np.nan)
    for what, got, wanted in (
        ("distance", mad, found.mad),
        ("entropy", entropy, found.entropy),
        ("distance in time", time, none if found.time is None else found.time),
    ):
        if (np.isnan(got[:heads]) != np.isnan(wanted)).any() or np.isfinite(got[heads:]).any():
            raise WrongError(f"{found.name} has a {what} where there is none, or none where there is one")
        relative = np.abs(got[:heads] - wanted) / np.maximum(wanted, SMALLEST)
        largest = max(largest, float(np.nan_to_num(relative, nan=0.0).max()))
    return largest


def check_what_is_left_out(case: Case, skipped: Mapping[str, str]) -> None:
    """It is what the case says, for reasons that fit; and of all that the case says, the lens speaks."""
    for name, reason in skipped.items():
        fitting = [words for names, words in case.skipped.items() if re.fullmatch(names, name)]
        if not any(re.search(words, reason) for words in fitting):
            raise WrongError(f"skips {name}: {reason}")
    for names in case.skipped:
        if names not in case.unspoken and not any(re.fullmatch(names, name) for name in skipped):
            raise WrongError(f"says nothing of {names}")
