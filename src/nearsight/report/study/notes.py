"""What has to be said beside every table and figure: the scale, the seeds, what is missing, what was assumed."""

import textwrap
from collections.abc import Iterable, Sequence
from itertools import product
from typing import cast

from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from nearsight.report.figures.style import MUTED, house_style
from nearsight.report.study.paper import PUBLISHED
from nearsight.study.results import StudyResults

SMALL = "Small scale: a smaller model, few images, few epochs. This tests the path, not the paper's claims."
# In inches: the height of a line of a footnote, the space around it, and the mean width of its letters.
LINE, SPACE, LETTER = 0.155, 0.08, 0.059
# The width of a legend's line and the space around it.
HANDLE = 0.75
FOOTNOTE_SIZE = 8.0
# Levels of a factor that a note names; more are in the tables.
MOST_LEVELS = 4


def seeds_in_words(counts: Iterable[int]) -> str:
    """ "3 seeds", "1 seed", "2 to 3 seeds"."""
    few, many = min(found := list(counts)), max(found)
    if few != many:
        return f"{few} to {many} seeds"
    return "1 seed" if many == 1 else f"{many} seeds"


def scale_notes(results: StudyResults) -> list[str]:
    return [] if results.scale == "full" else [SMALL]


def beside_the_paper(results: StudyResults, words: str) -> str:
    """The words, where the paper has such a study; else nothing."""
    return f" {words}" if results.name in PUBLISHED else ""


def missing_notes(results: StudyResults) -> list[str]:
    """Conditions without a complete run, and seeds that some conditions have and others lack."""
    published = PUBLISHED.get(results.name)
    runs = results.runs
    if results.planned:
        absent = [label for label in results.planned if label not in set(runs["condition"])]
    elif not results.factors:
        absent = []
    elif published is not None:
        absent = [label for label in published.conditions if label not in set(runs["condition"])]
    else:
        done = set(runs[list(results.factors)].itertuples(index=False, name=None))
        cells = (cell for cell in product(*results.factors.values()) if cell not in done)
        absent = [
            ", ".join(f"{name} {level}" for name, level in zip(results.factors, cell, strict=True)) for cell in cells
        ]
    notes = [f"No complete run yet: {'; '.join(absent)}."] if absent else []
    lacking = seeds_lacking(results, list(dict.fromkeys(runs["condition"])))
    return [*notes, f"Seeds that others have and these lack: {lacking}."] if lacking else notes


def seeds_lacking(results: StudyResults, conditions: Iterable[str]) -> str:
    """Which of these conditions lack which of the study's seeds: "Modern (seeds 0, 1); −CutMix (seed 1)"."""
    seeds = set(results.runs["seed"])
    of_condition = results.runs.groupby("condition")["seed"].agg(set)
    words = []
    for condition in conditions:
        lacks = sorted(seeds - of_condition.get(condition, set()))
        if lacks:
            words.append(f"{condition} ({'seed' if len(lacks) == 1 else 'seeds'} {', '.join(map(str, lacks))})")
    return "; ".join(words)


def assumed_notes(results: StudyResults) -> list[str]:
    """The settings whose values the paper does not report, with those taken."""
    if not results.assumed:
        return []
    words = []
    for name in results.assumed:
        levels = results.factors.get(name, ())
        value = results.settings.get(name, " or ".join(levels) if len(levels) <= MOST_LEVELS else "")
        words.append(f"{name} = {value}" if value != "" else name)
    return [f"*Assumed* (the paper does not report them): {', '.join(words)}."]


def legend_columns(figure: Figure, labels: Sequence[str], most: int) -> int:
    """How many columns of a legend fit side by side, so that they are equally long."""
    fitting = int(figure.get_size_inches()[0] / (HANDLE + LETTER * max(map(len, labels))))
    return next((number for number in range(min(most, fitting), 1, -1) if most % number == 0), 1)


def add_footnote(figure: Figure, notes: Iterable[str]) -> None:
    """Lines of small text below everything else; the figure grows by their height."""
    width, height = figure.get_size_inches()
    lines = [line for note in notes for line in textwrap.wrap(note, int((width - 2 * SPACE) / LETTER))]
    if not lines:
        return
    extra = LINE * len(lines) + SPACE
    figure.set_size_inches(width, height + extra)
    share = float(extra / (height + extra))
    with house_style():
        figure.text(
            SPACE / width,
            SPACE / (height + extra),
            "\n".join(lines),
            fontsize=FOOTNOTE_SIZE,
            color=MUTED,
            va="bottom",
            linespacing=1.25,
            parse_math=False,
            gid="footnote",
        )
    cast("ConstrainedLayoutEngine", figure.get_layout_engine()).set(rect=(0, share, 1, 1 - share))
