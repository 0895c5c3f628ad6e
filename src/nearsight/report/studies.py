"""What the report on a study has in addition to what all have: declared once, under its name.

A study is one file: its recipe (`nearsight.study.recipes`), what a paper has for it, its claims, its own tables and
figures, and one call of `report_on` that puts them together. Everything that reports results asks `report_of`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from nearsight.errors import InputError
from nearsight.report.claims import Claim, Verdicts, judge_all
from nearsight.report.marks import Animation, Drawing
from nearsight.report.tables import Table, seeds_in_words
from nearsight.study.plan import Plan, mark_of


@dataclass(frozen=True, kw_only=True)
class PublishedCondition:
    """One row of a paper's table; None where it gives no number."""

    test_acc: float
    min_mad: float | None = None
    max_mad: float | None = None
    min_entropy: float | None = None
    max_entropy: float | None = None


@dataclass(frozen=True, kw_only=True)
class Published:
    """What a paper says about the conditions of one study."""

    source: str
    """Where in the paper."""
    source_of_gain: str
    """The same, for the effect of all factors together on the accuracy."""
    dataset: str
    conditions: Mapping[str, PublishedCondition]
    key_factor: str | None = None
    """The factor that the paper holds responsible."""
    beside_figures: Mapping[str, str] = field(default_factory=dict)
    """Name of a figure that all studies have → how the paper's differs from it."""


@dataclass(frozen=True, kw_only=True)
class StudyReport:
    """The claims that a study judges, its own tables and figures, and those of all studies that it does without.

    Tables, figures and animations are functions of the results. One that the runs there are cannot give raises an
    `InputError`, which says why.
    """

    paper: str | None = None
    """Whose claims they are, as in S1 (arXiv 2605.16390); None: they are questions of our own."""
    published: Published | None = None
    claims: Sequence[Claim] = ()
    """Of the paper, and questions of our own: known before there are results."""
    claims_about: Callable[[Any], Sequence[Claim]] | None = None
    """Which of them some results are about, where these are not of one study; all by default."""
    intervals: str = ""
    """How the intervals in the verdict were estimated; by default seed by seed, and in studies of our own by fits."""
    without: frozenset[str] = frozenset()
    """Names of tables and figures that all studies have and that do not apply to this one."""
    tables: Sequence[Callable[[Any], Table]] = ()
    figures: Mapping[str, Callable[[Any], Drawing]] = field(default_factory=dict)
    """By the name of their files."""
    animations: Mapping[str, Callable[[Any], Animation]] = field(default_factory=dict)
    """In the same way."""
    is_about_locality: bool = False
    """Its page begins with what the most local heads do, not with the first claim and the first figure of its own."""

    def __post_init__(self) -> None:
        ids = [claim.id for claim in self.claims]
        assert len(set(ids)) == len(ids), f"two claims of a study have one id: {sorted(ids)}"

    def claims_of(self, results: Any) -> Sequence[Claim]:
        return self.claims if self.claims_about is None else self.claims_about(results)

    def plan(self) -> list[dict[str, Any]]:
        """Its claims as plain data, to be written down before the runs (`nearsight.study.plan`)."""
        return as_planned(self.claims)

    def tables_of(self, results: Any) -> list[Table]:
        """Those that the runs there are can give."""
        made = []
        for make in self.tables:
            with suppress(InputError):
                made.append(make(results))
        return made

    def verdicts_on(
        self, results: Any, *, units: str, intervals: str, notes: Iterable[str], warning: str = ""
    ) -> Verdicts | None:
        """Every claim and question judged; None where there are none. `units`: what the rows of the runs are."""
        claims = self.claims_of(results)
        if not claims:
            return None
        seeds = seeds_in_words(results.runs.groupby("condition")["seed"].nunique())
        return Verdicts(
            judgements=judge_all(claims, results),
            title=f"{results.name}: {'what reproduces' if self.paper else 'the answers'}",
            scale=results.scale,
            paper=self.paper,
            runs=f"{len(results.runs)} {units}, {seeds} per condition.",
            warning=warning,
            notes=(*([warning] if warning else []), intervals, *notes),
            asked=marks_of(results.plan, claims),
        )


def as_planned(claims: Iterable[Claim]) -> list[dict[str, Any]]:
    return [
        {
            **{"id": claim.id, "text": claim.text, "paper": claim.paper, "rule": claim.rule},
            "readings": None if claim.readings is None else list(claim.readings),
        }
        for claim in claims
    ]


def marks_of(plan: Plan | None, claims: Iterable[Claim]) -> dict[str, str]:
    """The id of each claim → when it was asked, by the plan of its results."""
    return {claim.id: mark_of(plan, claim.id, claim.rule) for claim in claims}


_REPORTS: dict[str, StudyReport] = {}
PROBES = "probes"
"""The name under which the claims about probed models are declared, whatever study the models come from."""


def report_on(*names: str, **parts: Any) -> None:
    """Declare the parts of a `StudyReport` on the results of these studies."""
    for name in names:
        assert name not in _REPORTS, name
        _REPORTS[name] = StudyReport(**parts)


def report_of(name: str) -> StudyReport:
    """What is declared under the name of a study; nothing where nothing is."""
    return _REPORTS.get(name, StudyReport())
