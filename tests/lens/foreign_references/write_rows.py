"""Check every case and make a table for each library, for docs/coverage.md."""

import importlib.metadata
import importlib.util
import os
from collections import Counter
from collections.abc import Mapping
from typing import Any
from unittest import mock

from vit_references.local import Taken, as_weights, header, row, taken
from vit_references.table import as_row
from vit_references.write_table import grid_of, reasons

from foreign_references.case import Case, prepare, run
from foreign_references.expected import Expected
from foreign_references.outcomes import Outcome, fault, outcome
from foreign_references.registry import CASES, LIBRARIES
from foreign_references.video_places import VideoLayer
from nearsight import measure

INTRODUCTION = """
## Models of other libraries

Small models with random weights, checked in the same way. Maps come from the library's own unfused code in float64.
Places of tokens are stated for each architecture. Numbers are plain dense sums.

**Right** means that all attention between patches is measured, and that the largest difference is less than 1e-5. It is
relative; to 0.01, where a number is smaller than that. What else a model computes by a softmax is in the last column,
with the reason the lens gives. **Refused** means that nothing is measured; the row has what the lens says instead.
Nothing else is allowed: with a wrong number or a traceback this page is not written.

Of videos, distance is that on the picture, entropy is over the patches of all times that a query may see, and distance
in time is checked as well. Attention along time alone has no distance on the picture.

What follows a comma in a model's name tells variants of it apart, or ways to call it.

| library | right | refused | wrong | tracebacks |
|---|---|---|---|---|
"""
HEADER = """
### {name} {version}

{what}

| model | layers | grids | what is special | largest difference, or what the lens says | not measured there |
|---|---|---|---|---|---|
"""


def tables() -> str:
    """All libraries: how many models are right, and a row for each; fails if one is neither right nor refused."""
    if missing := [name for name in LIBRARIES if importlib.util.find_spec(LIBRARIES[name].module) is None]:
        raise ModuleNotFoundError(f"{', '.join(missing)} must be there: pip install 'nearsight[foreign]'")
    found = {library: [(case, outcome(case)) for case in CASES if case.library == library] for library in LIBRARIES}
    checked = [pair for pairs in found.values() for pair in pairs]
    faults = [f"{case.library} {case.name}: {said}" for case, result in checked if (said := fault(case, result))]
    assert not faults, "\n".join(faults)
    parts = [INTRODUCTION, *(_counts(library, _kinds(pairs)) for library, pairs in found.items())]
    parts.append(_counts("together", _kinds(checked)))
    for library, pairs in found.items():
        version = importlib.metadata.version(LIBRARIES[library].package)
        parts.append(HEADER.format(name=library, version=version, what=LIBRARIES[library].what))
        parts += [_row(case, result) for case, result in pairs]
    return "".join(parts)


def _kinds(pairs: list[tuple[Case, Outcome]]) -> Counter[str]:
    return Counter(result.kind for _, result in pairs)


def _counts(name: str, number: Mapping[str, int]) -> str:
    return as_row(name, *(number[kind] for kind in ("right", "refused", "wrong", "traceback")))


def _row(case: Case, found: Outcome) -> str:
    told = ", ".join(f"{name}={value}" for name, value in case.options.items())
    special = "; ".join(words for words in (case.note, f"told `{told}`" if told else "") if words)
    if found.kind == "refused":
        return as_row(case.name, "", "", special, f"refused: {found.message}", "")
    grids = dict.fromkeys(map(_grid, found.expected))
    cells = (len(found.expected), ", ".join(grids), special, f"{found.difference:.0e}", reasons(dict(found.skipped)))
    return as_row(case.name, *cells)


def _grid(found: Expected) -> str:
    """Of a video with its times."""
    layer = found.layer
    if not isinstance(layer, VideoLayer):
        return grid_of(layer)
    rows, cols = layer.grid_size
    if layer.is_along_time:
        return f"{rows}×{cols} along {layer.num_times} times"
    times = layer.key_times_WM.nan_to_num(0.0)
    if len(times) > 1 and (layer.key_times_WM.isnan() | (times == times.amax(1, keepdim=True))).all():
        return f"{rows}×{cols} at each of {layer.num_times} times"
    return f"{grid_of(layer)} at {layer.num_times} times"


def local_tables() -> list[str]:
    """What the inducers do to the models of which anything is measured."""
    parts = []
    for library in LIBRARIES:
        rows = [local_row(case) for case in CASES if case.library == library and case.refused is None]
        parts += [f"\n### {library}\n\n", header("model"), *rows]
    return parts


def local_row(case: Case) -> str:
    with mock.patch.dict(os.environ, case.environment):
        return row(local_outcome(case), case.name)


def local_outcome(case: Case) -> dict[str, Taken]:
    """Of every inducer on the model of a case."""
    model, inputs = prepare(case)
    options: dict[str, Any] = {**case.options, **({} if case.call is None else {"call": case.call})}
    return taken(
        model,
        lambda one: run(one, case, as_weights(inputs, one)),
        lambda one: measure(one, inputs, **options),
        **case.options,
        image_size=case.image_size,
    )
