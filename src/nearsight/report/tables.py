"""Tables and numbers in words: raw numbers for machines, the same readable for people, and what is said under them."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import pandas as pd

from nearsight.files import write_text
from nearsight.study.run_tables import NO_WORD, as_csv
from nearsight.study.statistics import Estimate

OF_TWO = "of two seeds, both are in brackets"
"""What goes with every explanation of ±."""
MISSING = NO_WORD


@dataclass(frozen=True, kw_only=True, eq=False)
class Table:
    name: str
    """Of its files."""
    title: str
    numbers: pd.DataFrame
    """As computed, unrounded; accuracies are fractions; layers count from 0."""
    shown: pd.DataFrame
    """Words and rounded numbers, as text; accuracies in per cent; layers count from 0."""
    notes: tuple[str, ...]

    @classmethod
    def of(
        cls, name: str, title: str, rows: Iterable["Row"], *, shown: Iterable["Row"] | None = None, notes: Iterable[str]
    ) -> Self:
        """From rows, each of which has its numbers and its words; `shown`: other rows for people."""
        rows = list(rows)
        numbers = pd.DataFrame([row.numbers for row in rows])
        words = pd.DataFrame([row.words for row in (rows if shown is None else shown)])
        return cls(name=name, title=title, numbers=numbers, shown=words, notes=tuple(notes))

    def markdown(self) -> str:
        body = markdown_rows(records(self.shown)) if len(self.shown) else ["None."]
        return "\n".join([f"# {self.title}", "", *body, "", *(f"- {note}" for note in self.notes)]) + "\n"

    def write(self, folder: Path) -> tuple[Path, Path]:
        csv, markdown = folder / f"{self.name}.csv", folder / f"{self.name}.md"
        write_text(csv, as_csv(self.numbers))
        write_text(markdown, self.markdown())
        return csv, markdown


class Row:
    """A row of a table, built cell by cell: every cell says at once what machines keep and what people read."""

    def __init__(self, **both: object) -> None:
        """Columns that have the same name and value in both."""
        self.numbers: dict[str, object] = {}
        self.words: dict[str, str] = {}
        for name, value in both.items():
            self.both(name, value)

    def both(self, name: str, value: object, title: str | None = None, words: str | None = None) -> Self:
        """A value under its name, and its words under a title; by default the name, and the value as it is."""
        self.numbers[name] = value
        self.words[name if title is None else title] = str(value) if words is None else words
        return self

    def keep(self, **numbers: object) -> Self:
        """For machines alone."""
        self.numbers |= numbers
        return self

    def show(self, title: str, words: str) -> Self:
        """For people alone."""
        self.words[title] = words
        return self

    def interval(
        self,
        name: str,
        found: Estimate,
        title: str,
        *,
        scale: float = 1.0,
        digits: int = 3,
        signed: bool = False,
    ) -> Self:
        """A mean over seeds: `name`_n, _mean, _std, _low and _high, and "0.021 ± 0.003"."""
        self.keep(**columns_of(name, found))
        return self.show(title, with_interval(found, scale=scale, digits=digits, signed=signed))


def columns_of(name: str, found: Estimate) -> dict[str, float]:
    """A mean over seeds as columns whose names have the same beginning."""
    return {f"{name}_{part}": value for part, value in found.as_mean().items()}


def records(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """The rows, by the names of the columns."""
    return [dict(zip(map(str, frame.columns), row, strict=True)) for row in frame.itertuples(index=False, name=None)]


def markdown_rows(rows: Sequence[Mapping[str, object]]) -> list[str]:
    """The lines of a Markdown table; all rows have the same columns."""
    cells: list[list[object]] = [list(rows[0]), ["---"] * len(rows[0]), *(list(row.values()) for row in rows)]
    return ["| " + " | ".join(str(cell).replace("|", "\\|") for cell in row) + " |" for row in cells]


def share(value: float) -> str:
    return f"{100 * value:.0f} %"


def rounded(value: float | None, digits: int = 3, *, signed: bool = False) -> str:
    """A number with so many decimals and a true minus sign; a dash where there is none."""
    if value is None or np.isnan(value):
        return MISSING
    value = round(value, digits)
    if value == 0:  # neither −0 nor +0
        return f"{0:.{digits}f}"
    return f"{value:{'+' if signed else ''}.{digits}f}".replace("-", "−")


def percent(value: float | None) -> str:
    return rounded(None if value is None else 100 * value, 2)


def with_interval(interval: Estimate, *, scale: float = 1.0, digits: int = 3, signed: bool = False) -> str:
    """ "0.021 ± 0.003": the mean and half the width of its interval; the mean alone where there is none.

    Of two seeds both, "0.021 (0.020, 0.022)": their interval is wider than anything that can be measured.
    """
    if interval.n == 2 and interval.df == 1 and np.isfinite(interval.value):
        apart = interval.std / 2**0.5
        both = (rounded(scale * end, digits, signed=signed) for end in (interval.value - apart, interval.value + apart))
        return f"{rounded(scale * interval.value, digits, signed=signed)} ({', '.join(both)})"
    return mean_and_ends(interval.value, interval.low, interval.high, scale=scale, digits=digits, signed=signed)


def difference_in_words(found: Estimate, *, scale: float = 1.0, digits: int = 3) -> str:
    """As `with_interval`, with its sign."""
    return with_interval(found, scale=scale, digits=digits, signed=True)


def mean_and_ends(
    mean: float, low: float, high: float, *, scale: float = 1.0, digits: int = 3, signed: bool = True
) -> str:
    """As `with_interval`, from the numbers."""
    text = rounded(scale * mean, digits, signed=signed)
    return text if np.isnan(low) else f"{text} ± {rounded(scale * (high - low) / 2, digits)}"


def probability(p: float) -> str:
    if np.isnan(p):
        return MISSING
    return f"{p:.2f}" if p >= 0.1 else f"{p:.2g}"


def layers_in_words(layers: Iterable[int]) -> str:
    """ "L0, L2": each once, in their order, counted from 0; a dash where there is none."""
    return ", ".join(f"L{layer}" for layer in sorted(set(layers))) or MISSING


def span(low: str, high: str) -> str:
    return MISSING if low == high == MISSING else f"{low} to {high}"


def seeds_in_words(counts: Iterable[int]) -> str:
    """ "3 seeds", "1 seed", "2 to 3 seeds"."""
    few, many = min(found := list(counts)), max(found)
    if few != many:
        return f"{few} to {many} seeds"
    return "1 seed" if many == 1 else f"{many} seeds"
