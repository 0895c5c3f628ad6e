"""Numbers for the charts: once, in columns, and with exactly the digits that the page prints."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pandas as pd

DIGITS = 4
"""Decimals of distances, entropies, losses and accuracies: what is printed in the page is then what was rounded here,
and never a rounding of a rounding."""


def packed(value: Mapping[str, Any]) -> str:
    """JSON that can stand in a script element: without any "<" it can neither end that element nor open another."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def columns(frame: pd.DataFrame, names: Iterable[str]) -> dict[str, list[Any]]:
    """The named columns as lists of JSON values."""
    return {name: [_plain(value) for value in frame[name].tolist()] for name in names}


def _plain(value: Any) -> Any:
    if not isinstance(value, float):
        return value
    if not math.isfinite(value):
        return None
    short = round(value, DIGITS)
    return int(short) if short == int(short) else short


def places(values: Iterable[Any], known: Sequence[Any]) -> list[int]:
    """Where each value stands among the known ones."""
    place = {value: number for number, value in enumerate(known)}
    return [place[value] for value in values]
