"""What the report of one study has besides the tables and figures that all have."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from nearsight.report.study.animation import Animation
from nearsight.report.study.claim import Claim
from nearsight.report.study.drawing import Drawing
from nearsight.report.study.table import Table
from nearsight.study.results import StudyResults


@dataclass(frozen=True, kw_only=True)
class StudyParts:
    """The claims that a study judges, its own tables and figures, and those of all studies that it does without.

    Tables, figures and animations are functions of the results. One that the runs there are cannot give raises an
    `InputError`, which says why.
    """

    paper: str | None = None
    """Whose claims they are, as in S1 (arXiv 2605.16390); None: they are questions of our own."""
    claims: tuple[Claim, ...] = ()
    """Of the paper, and questions of our own beside them."""
    intervals: str = ""
    """How the intervals in the verdict were estimated; by default seed by seed, and in studies of our own by fits."""
    without: frozenset[str] = frozenset()
    """Names of tables and figures that all studies have, and that say nothing in this one."""
    tables: Sequence[Callable[[StudyResults], Table]] = ()
    figures: Mapping[str, Callable[[StudyResults], Drawing]] = field(default_factory=dict)
    """By the name of their files."""
    animations: Mapping[str, Callable[[StudyResults], Animation]] = field(default_factory=dict)
    """Likewise."""

    def __post_init__(self) -> None:
        ids = [claim.id for claim in self.claims]
        assert len(set(ids)) == len(ids), f"two claims of a study have one id: {sorted(ids)}"
