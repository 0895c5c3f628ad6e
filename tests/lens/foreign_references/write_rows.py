"""Check every case and make a table for each library, for docs/coverage.md."""

import importlib.metadata
import importlib.util
import sys
from collections import Counter

from vit_references.write_table import grids, reasons

from foreign_references.case import Case
from foreign_references.outcomes import Outcome, outcome
from foreign_references.registry import CASES, LIBRARIES

INTRODUCTION = """## Models of other libraries

Small models with random weights, checked in the same way: maps by the library's own unfused code in float64, places
stated for each architecture, numbers by dense sums. *Right* means that all attention between patches is measured, with
the largest difference over all layers and heads; *refused* that nothing is, with what the lens says; *partly refused*
that some of it is not. Differences are relative, to 0.01 where a number is smaller. What follows a comma tells variants
of a model apart. {right} rows are right, {refused} refused, {partly} partly refused.
"""
HEADER = """
### {name} {version}

| model | layers | grids | what is special | result | not measured there |
|---|---|---|---|---|---|
"""


def row(case: Case, found: Outcome) -> str:
    result = f"right, {found.difference:.0e}" if found.kind == "right" else f"{found.kind}: {found.message}"
    measured = [] if found.kind == "refused" else found.expected
    cells = (case.name, len(measured) or "", grids(measured), case.note, result, reasons(dict(found.skipped)))
    return "| " + " | ".join(str(cell).replace("|", "\\|").replace("\n", " ") for cell in cells) + " |\n"


def is_installed(library: str) -> bool:
    return importlib.util.find_spec(LIBRARIES[library][0]) is not None


def tables() -> str:
    """The tables of all libraries that are installed, with a sentence of how many models are right."""
    found = {
        library: [(case, outcome(case)) for case in CASES if case.library == library]
        for library in LIBRARIES
        if is_installed(library)
    }
    wrong = [
        f"{case.name}: {result.kind}, {result.message}"
        for rows in found.values()
        for case, result in rows
        if result.kind in ("wrong", "traceback")
    ]
    assert not wrong, "\n".join(wrong)
    number = Counter(result.kind for rows in found.values() for _, result in rows)
    parts = [INTRODUCTION.format(right=number["right"], refused=number["refused"], partly=number["partly refused"])]
    for library, rows in found.items():
        version = importlib.metadata.version(LIBRARIES[library][1])
        parts.append(HEADER.format(name=library, version=version))
        parts += [row(case, result) for case, result in rows]
    return "".join(parts)


if __name__ == "__main__":
    sys.stdout.write(tables())
