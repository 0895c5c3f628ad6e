"""Tables of a page as HTML: those of models, those of a report, of runs and of records."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

import numpy as np

from nearsight.report.differences import Quantity, first_layer_mean, first_layer_name, most_local_head
from nearsight.report.figures.looks import looks
from nearsight.report.inputs import ModelHeads, shorten
from nearsight.report.reading import layer_table
from nearsight.report.tables import MISSING, Table, percent, records, rounded
from nearsight.study.results import StudyResults

_NUMBER_TITLES = {
    "min_mad": "min MAD",
    "mean_mad": "mean MAD",
    "min_entropy": "min entropy",
    "mean_entropy": "mean entropy",
}
_FULL_NAME = 1000
_ROWS_THAT_SCROLL = 24
"""A longer table gets a box of its own height."""
_WHOLE = re.compile(r" ± |(?<=\d) (?=%)")
"""Where a line does not end: in an interval, and before a per cent sign."""
_BOLD = re.compile(r"\*\*(.+?)\*\*")
_ITALIC = re.compile(r"\*(.+?)\*")
_RUN_NUMBERS = {
    "test_acc": ("test accuracy, %", percent),
    "min_mad": ("min MAD", lambda value: rounded(value, 4)),
    "max_mad": ("max MAD", lambda value: rounded(value, 4)),
    "min_entropy": ("min entropy", lambda value: rounded(value, 4)),
    "max_entropy": ("max entropy", lambda value: rounded(value, 4)),
}
"""Column of the runs → its title, and how its numbers are written."""


def label_html(label: str) -> str:
    """A name from outside: shown as it is, and kept from turning the direction of the text around it."""
    return f"<bdi>{escape(label)}</bdi>"


def names_html(models: Sequence[ModelHeads], limit: int = 60) -> list[str]:
    """The models' names with the colours they have in the figures; characters beyond `limit` are in the overview."""
    return [
        f'<span class="swatch" style="--colour: {style.colour}" aria-hidden="true"></span>'
        + label_html(shorten(label, limit))
        for label, style in looks([model.label for model in models]).items()
    ]


def overview(models: Sequence[ModelHeads]) -> str:
    """One row per model: what it is, how well it does, how local it is."""
    firsts = [first_layer_mean(model) for model in models]
    first_title = f"{first_layer_name(firsts)}, mean"
    titles = ("model", "test accuracy", "layers × heads", "images", "most local head", "where", first_title)
    rows = []
    for name, model, first in zip(names_html(models, _FULL_NAME), models, firsts, strict=True):
        best = most_local_head(model)
        assert best.head is not None
        rows.append(
            (
                name,
                MISSING if model.test_accuracy is None else f"{100 * model.test_accuracy:.2f} %",
                " × ".join(str(length) for length in model.matrix("mad").shape),
                f"{best.num_images:,}",
                _quantity_html(best),
                f"layer {best.layer}, head {best.head}",
                _quantity_html(first) + (f" layer {first.layer}" if first.layer else ""),
            )
        )
    return _table("The models and their most local heads", titles, rows, kind="numbers overview")


def _quantity_html(quantity: Quantity) -> str:
    """Its mean, and in brackets of another look how the images spread."""
    if not quantity.has_spread:
        return f"<b>{quantity.mean:.3f}</b>"
    return (
        f"<b>{quantity.mean:.3f}</b> "
        f'<span class="range">{quantity.low:.3f}\N{NO-BREAK SPACE}to\N{NO-BREAK SPACE}{quantity.high:.3f}</span>'
    )


def layers(models: Sequence[ModelHeads]) -> str:
    """The per-layer table; each column's smallest number stands out."""
    numbers = layer_table(models)
    groups = '<th scope="col" rowspan="2" data-column="0">layer</th>' + "".join(
        f'<th scope="colgroup" colspan="{len(_NUMBER_TITLES)}">{name}</th>' for name in names_html(models)
    )
    titles = list(_NUMBER_TITLES.values())
    names = [f"{shorten(model.label, _FULL_NAME)}: {title}" for model in models for title in titles]
    smallest = numbers.min().to_numpy()
    rows = []
    for layer, values in zip(numbers.index, numbers.to_numpy(), strict=True):
        cells = [
            MISSING if np.isnan(value) else f"<b>{value:.3f}</b>" if value == least else f"{value:.3f}"
            for value, least in zip(values, smallest, strict=True)
        ]
        rows.append([str(layer), *cells])
    caption, above = "Distance and entropy per layer, over its heads", f"<tr>{groups}</tr>"
    return _table(caption, titles * len(models), rows, kind="numbers layers", above=above, names=names, first=1)


def facts(records: Sequence[Mapping[str, Any] | None], models: Sequence[ModelHeads], *, only_differing: bool) -> str:
    """Nested records side by side: one row per dotted name, one column per model; empty where there is nothing."""
    flat = [flattened(record or {}) for record in records]
    names = list(dict.fromkeys(name for record in flat for name in record))
    if only_differing:
        names = [name for name in names if len({record.get(name) for record in flat}) > 1]
    if not names:
        return ""
    rows = [[label_html(name), *(label_html(record.get(name, MISSING)) for record in flat)] for name in names]
    titles = ["", *names_html(models)]
    return _table("Settings by model", titles, rows, kind="facts")


def flattened(record: Mapping[str, Any], above: str = "") -> dict[str, str]:
    """{"model": {"depth": 8}} as {"model.depth": "8"}; lists are values."""
    flat: dict[str, str] = {}
    for name, value in record.items():
        if isinstance(value, Mapping) and value:
            flat.update(flattened(value, f"{above}{name}."))
        else:
            flat[f"{above}{name}"] = value if isinstance(value, str) else json_text(value)
    return flat


def json_text(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, indent=indent, ensure_ascii=False, default=str)


def _table(
    caption: str,
    titles: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    kind: str = "numbers",
    is_tall: bool = False,
    above: str = "",
    names: Sequence[str] | None = None,
    first: int = 0,
) -> str:
    """A table in a box that scrolls sideways, by keyboard too, when the screen is narrow. The first cell names a row.

    Where scripts run, it can be sorted by the columns whose headings know their number. `is_tall`: it scrolls within
    the page. `above`: a row above the headings. `names` say in a copy what a title alone does not, `first` counts
    columns before.
    """
    headings = []
    for place, title in enumerate(titles):
        name = "" if names is None else f' data-name="{escape(names[place])}"'
        shown = title or '<span class="unseen">name</span>'  # what sorts must be called something
        headings.append(f'<th scope="col" data-column="{first + place}"{name}>{shown}</th>')
    body = (
        f'<tr><th scope="row">{row[0]}</th>' + "".join(f"<td>{cell}</td>" for cell in row[1:]) + "</tr>" for row in rows
    )
    return (
        f'<div class="{"scroll tall" if is_tall else "scroll"}" data-table role="region" tabindex="0" '
        f'aria-label="{escape(caption)}"><table class="{kind}"><caption class="unseen">{escape(caption)}</caption>'
        f"<thead>{above}<tr>{''.join(headings)}</tr></thead><tbody>{''.join(body)}</tbody></table></div>"
    )


def text_html(text: str) -> str:
    """A cell or a note: text from outside, with the two marks of Markdown that our tables use. Intervals and shares are
    kept whole."""
    text = _WHOLE.sub(lambda found: found[0].replace(" ", "\N{NO-BREAK SPACE}"), escape(text))
    return _ITALIC.sub(r"<i>\1</i>", _BOLD.sub(r"<b>\1</b>", text))


def table_html(shown: Table, *, kind: str = "numbers fit") -> str:
    """A table as people read it, with what has to be said under it."""
    rows = [[f"<bdi>{text_html(str(cell))}</bdi>" for cell in row.values()] for row in records(shown.shown)]
    if not rows:
        return ""
    body = _table(shown.title, [escape(str(name)) for name in shown.shown.columns], rows, kind=kind)
    notes = "".join(f"<li>{text_html(note)}</li>" for note in shown.notes)
    return body + (f'<ul class="notes">{notes}</ul>' if notes else "")


def opened_html(shown: Table) -> str:
    """A table to open by its title."""
    return f"<details><summary>{text_html(shown.title)}</summary>{table_html(shown)}</details>"


def runs_table(results: StudyResults) -> str:
    """A row per complete run."""
    named = [*results.factors, "seed", "epochs"]
    titles = ["condition", *named, *(title for title, _ in _RUN_NUMBERS.values()), "run"]
    rows = [
        [
            label_html(str(run["condition"])),
            *(label_html(str(run[name])) for name in named),
            *(write(run[name]) for name, (_, write) in _RUN_NUMBERS.items()),
            f"<code>{escape(str(run['run']))}</code>",
        ]
        for run in records(results.runs)
    ]
    return _table("Every run", [escape(title) for title in titles], rows, is_tall=len(rows) > _ROWS_THAT_SCROLL)


def record_table(caption: str, record: Mapping[str, Any]) -> str:
    """A nested record, one row per dotted name; empty where there is nothing."""
    rows = [[label_html(name), label_html(value)] for name, value in flattened(record).items()]
    return _table(caption, ["", "value"], rows, kind="facts") if rows else ""
