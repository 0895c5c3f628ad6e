"""What a verdict is about: something a paper says, or a question of our own, and the rule that judges it."""

from collections.abc import Callable
from dataclasses import dataclass

from nearsight.report.study.rules import Finding
from nearsight.report.study.table import MISSING
from nearsight.study.results import StudyResults

OURS = "our question"
"""The source of what is asked beside a paper's claims, and is none of them."""


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A claim of a paper or, where the study's parts name no paper or the source is `OURS`, a question."""

    id: str
    """By which others find it among the claims of its study, whatever its words are."""
    text: str
    source: str
    """Where the paper makes it, or leaves it open."""
    paper: str = MISSING
    """The paper's numbers, in words."""
    rule: str
    """What judges it, in words."""
    readings: tuple[str, str] | None = None
    """The strict and the weak reading, where the rule is that of every seed."""
    needs: tuple[str, ...] = ()
    """Conditions without which it cannot be judged."""
    across_seeds: bool = False
    """One fit to all runs judges it, which takes out what each seed does: a seed that lacks a condition tells too."""
    judge: Callable[[StudyResults], Finding]
    """An `InputError` says why the runs there are cannot tell."""
