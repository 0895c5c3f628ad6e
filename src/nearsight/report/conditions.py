"""The conditions of a study: which plays which part, how levels are called, and what is missing or assumed."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from matplotlib.figure import Figure

from nearsight.errors import InputError
from nearsight.report.claims import seeds_lacking
from nearsight.report.figures.looks import BASE, ModelStyle, looks
from nearsight.report.marks import Drawing, add_footnote
from nearsight.report.studies import report_of
from nearsight.study.results import StudyResults

FACTOR_NAMES = {
    **{"cutmix": "CutMix", "autoaugment": "AutoAugment", "colorjitter": "ColorJitter", "smoothing": "label smoothing"},
    **{"lr": "learning rate", "weight_decay": "weight decay", "init": "initialisation"},
    "position_std": "positions' deviation",
    **{"qkv_bias": "biases of q, k, v", "embed_norm": "norms of the patch embedding", "head_size": "size of a head"},
    **{"qk_std": "initial deviation of q and k", "final_norm": "final norm", "activation": "activation"},
    **{"batch_size": "batch size", "dropout": "dropout", "precision": "precision"},
    **{"cutmix.per_sample": "CutMix per sample", "cutmix.alpha": "CutMix's α"},
}
"""How figures and tables spell a factor; others are spelt as in the study."""
OFF = ("off", "0", "0.0")
"""Labels of a level at which a factor is not there."""


@dataclass(frozen=True, kw_only=True)
class Roles:
    """Labels of conditions; None where the study has no complete run of it."""

    base: str | None
    """All factors at their first level (S1: Baseline)."""
    full: str | None
    """All factors at their last level (S1: Modern)."""
    only_key: str | None
    """The base with the key factor at its last level (S1: +CutMix)."""
    without_key: str | None
    """The full protocol with the key factor at its first level (S1: −CutMix)."""


def roles(results: StudyResults) -> Roles:
    first = {name: levels[0] for name, levels in results.factors.items()}
    last = {name: levels[-1] for name, levels in results.factors.items()}
    key = key_factor(results)
    only_key = {**first, key: last[key]} if key else first
    without_key = {**last, key: first[key]} if key else last
    return Roles(
        base=_label_at(results, first),
        full=_label_at(results, last),
        only_key=_label_at(results, only_key),
        without_key=_label_at(results, without_key),
    )


def _label_at(results: StudyResults, levels: dict[str, str]) -> str | None:
    here = results.runs
    for name, level in levels.items():
        here = here[here[name] == level]
    return None if here.empty else str(here["condition"].iloc[0])


def key_factor(results: StudyResults) -> str | None:
    """The factor the paper holds responsible; in a study of our own, the one that moves the smallest distance most."""
    published = report_of(results.name).published
    if published is not None and published.key_factor in results.factors:
        return published.key_factor
    moved = {}
    for name, levels in results.factors.items():
        means = results.runs.groupby(name)["min_mad"].mean()
        if len(levels) > 1 and levels[0] in means and levels[-1] in means:
            moved[name] = abs(means[levels[-1]] - means[levels[0]])
    return max(moved, key=lambda name: moved[name]) if moved else None


def level_in_words(factor: str, levels: Sequence[str], level: str) -> str:
    """ "with CutMix" and "without CutMix"; for more than two levels "CutMix: 0.5"."""
    name = FACTOR_NAMES.get(factor, factor)
    if len(levels) != 2 or levels[0] not in OFF:
        return f"{name}: {level}"
    return f"without {name}" if level == levels[0] else f"with {name}"


def level_looks(factor: str, levels: Sequence[str]) -> dict[str, ModelStyle]:
    """A look per level of a factor: none of it is the baseline's, CutMix is CutMix's."""
    words = {level: level_in_words(factor, levels, level) for level in levels if level not in OFF}
    found = looks(list(words.values()))
    return {level: found[words[level]] if level in words else BASE for level in levels}


def pair_columns(results: StudyResults, factor: str) -> list[str]:
    """The columns in which two runs agree that differ in this factor alone."""
    return ["seed", *(name for name in results.factors if name != factor)]


def ordered_conditions(results: StudyResults) -> list[str]:
    """The conditions that have runs: in the paper's order, then in the study's."""
    published = report_of(results.name).published
    known = set(results.runs["condition"])
    first = [label for label in published.conditions if label in known] if published else []
    return [*first, *(label for label in dict.fromkeys(results.runs["condition"]) if label not in first)]


def condition_looks(results: StudyResults) -> dict[str, ModelStyle]:
    """The same in all of a study's figures, and on its page."""
    return looks(ordered_conditions(results))


def base_and_full(results: StudyResults) -> list[str]:
    """What Figures 1 to 3 compare: the full protocol, then the base."""
    found = roles(results)
    labels = [label for label in dict.fromkeys((found.full, found.base)) if label is not None]
    if not labels:
        raise InputError("it compares the condition with all factors on and that with none, and neither has a run yet")
    return labels


def with_attention(results: StudyResults) -> StudyResults:
    """The part of the results that has heads: a convolutional network has none to measure."""
    has = results.runs["min_mad"].notna()
    kept, left = results.runs[has], results.runs[~has]
    factors = {
        name: tuple(level for level in levels if level in set(kept[name]) or level not in set(left[name]))
        for name, levels in results.factors.items()
    }
    return dataclasses.replace(
        results,
        runs=kept,
        factors={name: levels for name, levels in factors.items() if len(levels) > 1},
        planned=tuple(label for label in results.planned if label not in set(left["condition"])),
    )


def num_seeds(results: StudyResults, condition: str) -> int:
    return int(results.runs.loc[results.runs["condition"] == condition, "seed"].nunique())


SMALL = "Small scale: a smaller model, few images, few epochs. This tests the path, not the paper's claims."
# Levels of a factor that a note names; more are in the tables.
MOST_LEVELS = 4


def scale_notes(results: StudyResults) -> list[str]:
    return [] if results.scale == "full" else [SMALL]


def noted(figure: Figure, results: StudyResults, caption: str, words: str, *, missing: bool = False) -> Drawing:
    """A figure with the same words below it and at the end of its caption; `missing`: below it also what lacks."""
    add_footnote(figure, [words, *(missing_notes(results) if missing else ()), *scale_notes(results)])
    return Drawing(figure=figure, caption=f"{caption} {words}")


def beside_the_paper(results: StudyResults, figure: str) -> str:
    """How the paper's figure differs from ours of this name, where it has such a study; otherwise nothing."""
    published = report_of(results.name).published
    return f" {published.beside_figures[figure]}" if published and figure in published.beside_figures else ""


def missing_notes(results: StudyResults) -> list[str]:
    """Conditions without a complete run, and seeds that some conditions have and others lack."""
    published = report_of(results.name).published
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
    lacking = seeds_lacking(runs, list(dict.fromkeys(runs["condition"])))
    return [*notes, f"Seeds that others have and these lack: {lacking}."] if lacking else notes


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
