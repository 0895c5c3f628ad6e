"""Whether the lens is right about a model, refuses it, or neither: the only two that are allowed."""

import re
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from vit_references.checking import Found
from vit_references.dense import head_numbers, with_shuffled_keys

from foreign_references.case import Case, prepare, run
from foreign_references.recording import attending, record
from nearsight import measure
from nearsight.errors import InputError

Kind = Literal["right", "refused", "partly refused", "wrong", "traceback"]
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
    """Relative, of distance and entropy, the largest over all layers and heads."""
    expected: list[Found] = field(default_factory=list)
    skipped: Mapping[str, str] = field(default_factory=dict)
    """What the lens does not measure, with its reasons."""


class BadReferenceError(Exception):
    """A case that says nothing about the lens, because it does not fit its own model."""


def outcome(case: Case) -> Outcome:
    """Measure the model of a case and compare with what its own code says."""
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
    return compared(case, table, expected)


def expect(case: Case, model: Any, inputs: Any) -> list[Found]:
    """What the lens should find, in the order in which the model computes it."""
    names = attending(model, lambda: run(model, case, inputs))
    known = [*case.layers, *case.skipped]
    for name, shape in names.items():
        if not any(re.fullmatch(pattern, name) for pattern in known):
            raise BadReferenceError(f"{case.name}: nothing is said of {name!r}, whose weights are {list(shape)}")
    spatial = [name for name in names if any(re.fullmatch(pattern, name) for pattern in case.layers)]
    found = []
    for recorded in record(model, lambda: run(model, case, inputs), spatial, case) if spatial else []:
        name = recorded.name.partition("#")[0]
        mechanism = next(places for pattern, places in case.layers.items() if re.fullmatch(pattern, name))
        layer = mechanism(recorded, case.image_size)
        mad_BH, entropy_BH = head_numbers(recorded.attention, layer, case.num_images)
        elsewhere_BH, _ = head_numbers(recorded.attention, with_shuffled_keys(layer), case.num_images)
        numbers = (values.mean(0).numpy() for values in (mad_BH, entropy_BH, elsewhere_BH))
        found.append(Found(recorded.name, layer, *numbers))
    for layer in found:
        _check_that_it_says_something(case, layer)
    return found


def _check_that_it_says_something(case: Case, found: Found) -> None:
    """Numbers must exist, and other places must give other ones."""
    if not np.isfinite([found.mad, found.entropy]).all():
        raise BadReferenceError(f"{case.name}: the numbers of {found.name} are not finite")
    if found.layer.keys_WM2[..., 0].isfinite().sum() > 4:
        change = np.abs(found.mad_elsewhere - found.mad) / np.where(found.mad == 0, 1.0, found.mad)
        if change.max() < 1e-3:
            raise BadReferenceError(f"{case.name}: {found.name} looks everywhere alike")


def compared(case: Case, table: Any, expected: list[Found]) -> Outcome:
    by_name = {found.name: found for found in expected}
    unknown = [name for name in table.layer_names if name not in by_name]
    if unknown:
        return Outcome("wrong", f"measures {', '.join(unknown[:3])}, which is no spatial attention", expected=expected)
    largest, worst = 0.0, ""
    for name, mad, entropy in zip(table.layer_names, table.mad, table.entropy, strict=True):
        found = by_name[name]
        heads = len(found.mad)
        if np.isfinite(mad).sum() != heads:
            message = f"{name} has {heads} heads, not {np.isfinite(mad).sum()}"
            return Outcome("wrong", message, expected=expected, skipped=table.skipped)
        for got, wanted in ((mad[:heads], found.mad), (entropy[:heads], found.entropy)):
            difference = float((np.abs(got - wanted) / np.maximum(wanted, SMALLEST)).max())
            if not difference <= largest:
                largest, worst = difference, name
    missing = [name for name in by_name if name not in table.layer_names]
    kind: Kind = "right"
    message = ""
    if not largest < TOLERANCE:
        kind, message = "wrong", f"{worst} differs by {largest:.1e}"
    elif missing:
        reasons = {table.skipped.get(name, "nothing is said of it") for name in missing}
        kind, message = "partly refused", f"{len(missing)} of {len(expected)}, {missing[0]}: {'; '.join(reasons)}"
    elif reason := unexplained(case, table.skipped):
        kind, message = "wrong", reason
    return Outcome(kind, message, largest, expected, dict(table.skipped))


def unexplained(case: Case, skipped: Mapping[str, str]) -> str:
    """What the lens says it leaves out, without need or with a reason that does not fit."""
    for name, reason in skipped.items():
        fitting = [words for names, words in case.skipped.items() if re.fullmatch(names, name)]
        if not any(words in reason for words in fitting):
            return f"skips {name}: {reason}"
    return ""
