"""Errors a user can cause, and the words for them.

Whatever the user got wrong is an `InputError` (a `ValueError`): its message is one line that names the thing, says why
it does not work and, where there is one, the way out. The commands print that line and exit with 2. Anything else that
escapes is a defect of this package and keeps its traceback.
"""

import difflib
from collections.abc import Iterable


class InputError(ValueError):
    """Something the user gave does not fit; the message says what, why and what to do."""


def unknown_name(kind: str, name: str, known: Iterable[str]) -> InputError:
    """The error for a name that is not in a registry, with the nearest one that is."""
    known = sorted(known)
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    if near:
        return InputError(f"{name!r} is not a known {kind}; did you mean {near[0]!r}?")
    shown = ", ".join(known[:12]) + (", …" if len(known) > 12 else "")
    return InputError(f"{name!r} is not a known {kind}; known: {shown or 'none'}")


def check_probability(name: str, value: float) -> None:
    if not 0.0 <= value <= 1.0:  # also false for NaN
        raise InputError(f"{name} is {value}, but a probability lies in [0, 1]")


def check_at_least(name: str, value: float, least: float) -> None:
    if not value >= least:  # also true for NaN
        raise InputError(f"{name} is {value}, but must be at least {least}")
