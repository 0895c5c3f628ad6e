"""Tables of a study's report, as HTML."""

import re
from collections.abc import Mapping
from html import escape
from typing import Any

from nearsight.report.study.table import Table, percent, records, rounded
from nearsight.report.tables import flattened, headings, label_html, labelled, table
from nearsight.study.results import StudyResults

ROWS_THAT_SCROLL = 24
"""A longer table gets a box of its own height."""
_BOLD = re.compile(r"\*\*(.+?)\*\*")
_ITALIC = re.compile(r"\*(.+?)\*")
RUN_NUMBERS = {
    "test_acc": ("test accuracy, %", percent),
    "min_mad": ("min MAD", lambda value: rounded(value, 4)),
    "max_mad": ("max MAD", lambda value: rounded(value, 4)),
    "min_entropy": ("min entropy", lambda value: rounded(value, 4)),
    "max_entropy": ("max entropy", lambda value: rounded(value, 4)),
}
"""Column of the runs → its title, and how its numbers are written."""


def text_html(text: str) -> str:
    """A cell or a note: text from outside, with the two marks of Markdown that our tables use, and intervals whole."""
    text = escape(text).replace(" ± ", "\N{NO-BREAK SPACE}±\N{NO-BREAK SPACE}")
    return _ITALIC.sub(r"<i>\1</i>", _BOLD.sub(r"<b>\1</b>", text))


def table_html(shown: Table, *, kind: str = "numbers fit") -> str:
    """A table as people read it, with what has to be said under it."""
    rows = [[f"<bdi>{text_html(str(cell))}</bdi>" for cell in row.values()] for row in records(shown.shown)]
    if not rows:
        return ""
    body = table(
        shown.title, [headings([escape(str(name)) for name in shown.shown.columns])], map(labelled, rows), kind=kind
    )
    notes = "".join(f"<li>{text_html(note)}</li>" for note in shown.notes)
    return body + (f'<ul class="notes">{notes}</ul>' if notes else "")


def opened_html(shown: Table) -> str:
    """A table to open by its title."""
    return f"<details><summary>{text_html(shown.title)}</summary>{table_html(shown)}</details>"


def runs_table(results: StudyResults) -> str:
    """A row per complete run."""
    named = [*results.factors, "seed", "epochs"]
    titles = ["condition", *named, *(title for title, _ in RUN_NUMBERS.values()), "run"]
    rows = [
        [
            label_html(str(run["condition"])),
            *(label_html(str(run[name])) for name in named),
            *(write(run[name]) for name, (_, write) in RUN_NUMBERS.items()),
            f"<code>{escape(str(run['run']))}</code>",
        ]
        for run in records(results.runs)
    ]
    return table(
        "Every run",
        [headings([escape(title) for title in titles])],
        map(labelled, rows),
        kind="numbers",
        is_tall=len(rows) > ROWS_THAT_SCROLL,
    )


def record_table(caption: str, record: Mapping[str, Any]) -> str:
    """A nested record, one row per dotted name; empty where there is nothing."""
    rows = [[label_html(name), label_html(value)] for name, value in flattened(record).items()]
    return table(caption, [headings(["", "value"])], map(labelled, rows), kind="facts") if rows else ""
