"""Which condition of a study plays which part: nothing on, everything on, only the key factor on, all but it on."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from nearsight.errors import InputError
from nearsight.report.study.paper import PUBLISHED
from nearsight.study.results import StudyResults

FACTOR_NAMES = {
    **{"cutmix": "CutMix", "autoaugment": "AutoAugment", "colorjitter": "ColorJitter", "smoothing": "label smoothing"},
    **{"lr": "learning rate", "weight_decay": "weight decay", "init": "initialisation"},
    "position_std": "positions' deviation",
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
    published = PUBLISHED.get(results.name)
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


def pair_columns(results: StudyResults, factor: str) -> list[str]:
    """The columns in which two runs agree that differ in this factor alone."""
    return ["seed", *(name for name in results.factors if name != factor)]


def ordered_conditions(results: StudyResults) -> list[str]:
    """The conditions that have runs: in the paper's order, then in the study's."""
    published = PUBLISHED.get(results.name)
    known = set(results.runs["condition"])
    first = [label for label in published.conditions if label in known] if published else []
    return [*first, *(label for label in dict.fromkeys(results.runs["condition"]) if label not in first)]


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
