"""Errors a user can cause, and the words for them.

Whatever the user got wrong is an `InputError` (a `ValueError`): its message is one line that names the thing, says why
it does not work and, where there is one, the way out. The commands print that line and exit with 2. Anything else that
escapes is a defect of this package and keeps its traceback.
"""

import dataclasses
import difflib
import math
from collections.abc import Iterable
from typing import Any

LARGEST_SIDE = 4096
"""Of images that a file may ask a model to look at, in pixels: one takes 200 MB."""
_LARGEST = 2**63 - 1
"""Of whole numbers that tensors hold."""


class InputError(ValueError):
    """Something the user gave does not fit; the message says what, why and what to do."""


def unknown_name(kind: str, name: str, known: Iterable[str]) -> InputError:
    """The error for a name that is not in a registry, with the most similar one that is."""
    known = sorted(known)
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    if near:
        return InputError(f"{name!r} is not a known {kind}; did you mean {near[0]!r}?")
    shown = ", ".join(known[:12]) + (", …" if len(known) > 12 else "")
    return InputError(f"{name!r} is not a known {kind}; known: {shown or 'none'}")


def check_probability(name: str, value: float) -> None:
    if not 0.0 <= value <= 1.0:  # also false for NaN
        raise InputError(f"{name} is {value}, but a probability lies in [0, 1]")


def check_below_one(name: str, value: float) -> None:
    if not 0 <= value < 1:  # also false for NaN
        raise InputError(f"{name} is {value}, but must lie in [0, 1)")


def check_fraction(name: str, value: float) -> None:
    """Of a part that is neither nothing nor the whole."""
    if not 0 < value < 1:  # also false for NaN
        raise InputError(f"{name} is {value}, but must lie between 0 and 1")


def check_flag(name: str, value: object) -> None:
    if not isinstance(value, bool):  # any text would count as true
        raise InputError(f"{name} is {value!r}, but must be True or False")


def check_at_least(name: str, value: float, least: float) -> None:
    if not value >= least:  # also true for NaN
        raise InputError(f"{name} is {value}, but must be at least {least}")
    check_number(name, value)


def check_side(name: str, value: float) -> None:
    """Of an image, as a file says it."""
    if not 1 <= value <= LARGEST_SIDE:  # also true for NaN
        raise InputError(f"{name} is {value}, but the side of an image has 1 to {LARGEST_SIDE} pixels")


def check_positive(name: str, value: float) -> None:
    if not value > 0:  # also true for NaN
        raise InputError(f"{name} is {value}, but must be greater than 0")
    check_number(name, value)


def check_number(name: str, value: float) -> None:
    """Refuse what no tensor or no JSON can hold: infinity, NaN, and whole numbers of more than 64 bits."""
    if isinstance(value, int):
        if abs(value) > _LARGEST:
            raise InputError(f"{name} is {value}, but must lie within ±{_LARGEST}, which is what 64 bits hold")
    elif not math.isfinite(value):
        raise InputError(f"{name} is {value}, but must be finite")


def check_numbers(config: Any, where: str = "") -> None:
    """Refuse such numbers anywhere in a config; an item of a list is named by its own name, where it has one."""
    # The config itself, not what is made of it for a file: studies make thousands, and each is looked at.
    if isinstance(config, int | float):
        check_number(where, config)
    elif isinstance(config, list | tuple):
        for item in config:
            name = getattr(item, "name", None)
            check_numbers(item, f"{where}.{name}" if name else where)
    elif dataclasses.is_dataclass(config):
        for name, value in vars(config).items():
            check_numbers(value, f"{where}.{name}" if where else name)
