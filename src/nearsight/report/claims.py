"""Claims of papers and questions of our own: how they are judged, and how the verdicts are written down."""

import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import pandas as pd

from nearsight.errors import InputError
from nearsight.report.rules import (
    ANSWERS,
    LEANING_YES,
    NO,
    OTHER_WAY,
    VERDICTS,
    YES,
    Finding,
    Verdict,
    seeds_to_decide,
    weigh,
)
from nearsight.report.tables import MISSING, Row, Table, probability
from nearsight.study.plan import MARKS, NOT_KNOWN
from nearsight.study.statistics.significance import ALPHA, MOST_SEEDS, holm

OURS = "our question"
"""The source of a question that is none of a paper's claims."""
IN_WORDS = "answered in words"
COUNTED_FROM_1 = "Claims that name layers (L1) count them from 1, as their paper does; so do our numbers beside them."


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A claim of a paper or, where the study's report names no paper or the source is `OURS`, a question."""

    id: str
    """Finds it among the claims of its study, whatever its words are."""
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
    family: str = ""
    """Claims of one family are corrected together for their number; a paper's claims and our questions are apart."""
    across_seeds: bool = False
    """One fit to all runs judges it, which takes out what each seed does: a seed that lacks a condition counts too."""
    judge: Callable[[Any], Finding]
    """Of the study's results. An `InputError` says why these runs cannot judge it."""

    @property
    def is_question(self) -> bool:
        return self.text.endswith("?")

    @property
    def names_layers(self) -> bool:
        """By number: then its row counts as the paper does."""
        return re.search(r"\bL\d|\blayers? \d", " ".join((self.text, self.paper, *(self.readings or ())))) is not None


def asked(
    id: str,
    text: str,
    *,
    source: str,
    paper: str = MISSING,
    rule: str,
    readings: tuple[str, str] | None = None,
    needs: tuple[str, ...] = (),
    family: str = "",
) -> Callable[[Callable[[Any], Finding]], Claim]:
    """A decorator: turns the function that judges a claim or question into the claim."""
    about = {"source": source, "paper": paper, "rule": rule, "readings": readings, "needs": needs, "family": family}
    return lambda judge: Claim(id=id, text=text, judge=judge, **about)  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True)
class Judgement:
    claim: Claim
    finding: Finding
    verdict: Verdict | None
    """None: the question asks for a description, which is the answer."""
    p: float
    """Of the claim, corrected for its family; NaN where nothing was tested."""
    p_against: float
    """Of its opposite, likewise."""
    counts: int = 1
    """How often Holm counts its p-value: once for every claim of the family that is not shown more clearly."""

    @property
    def is_open(self) -> bool:
        return self.verdict in (Verdict.IN_DIRECTION, Verdict.INCONCLUSIVE) and self.p > ALPHA

    @cached_property
    def to_decide(self) -> int | None:
        """Seeds that would decide it; None where it is decided, or where that is not known."""
        return seeds_to_decide(self.finding, self.counts) if self.is_open else None

    @property
    def words(self) -> str:
        """The verdict on a claim, the answer to a question."""
        if self.verdict is None:
            return self.finding.answer
        if not self.claim.is_question:
            return str(self.verdict)
        return (
            self.finding.opposite if self.verdict is Verdict.CONTRADICTED else ANSWERS.get(self.verdict, self.verdict)
        )


def not_tested(reason: str) -> Finding:
    return Finding(ours=reason, value=float("nan"), n=0)


def judge_all(claims: Iterable[Claim], results: Any) -> list[Judgement]:
    """What the runs say about each claim, and the verdicts: p-values are corrected (Holm) within families.

    Not tested where they lack a condition or a seed that it needs. Seeds that lack one of the conditions it needs do
    not count, so that all its numbers are of the same seeds; where one fit judges it they count, as in the table of
    that fit.
    """
    asked = list(claims)
    findings = [_finding(claim, results) for claim in asked]
    families: dict[tuple[bool, str], list[int]] = {}
    for place, claim in enumerate(asked):
        families.setdefault((claim.is_question, claim.family), []).append(place)
    judged: dict[int, Judgement] = {}
    for places in families.values():
        # What is tested of each claim is whichever of it and its opposite is more likely.
        tested = [min(findings[place].p, findings[place].p_against) for place in places]
        for place, p, corrected in zip(places, tested, holm(tested), strict=True):
            counts = sum(p <= other for other in tested)
            judged[place] = _judgement(asked[place], findings[place], corrected, max(counts, 1))
    return [judged[place] for place in range(len(asked))]


def _judgement(claim: Claim, finding: Finding, corrected: float, counts: int) -> Judgement:
    is_for = finding.p <= finding.p_against
    p, p_against = (corrected, max(corrected, finding.p_against)) if is_for else (max(corrected, finding.p), corrected)
    verdict = None
    if not finding.answer:
        verdict = Verdict.NOT_TESTED if math.isnan(p) else weigh(finding, p, p_against)
    return Judgement(claim=claim, finding=finding, verdict=verdict, p=p, p_against=p_against, counts=counts)


def _finding(claim: Claim, results: Any) -> Finding:
    runs = results.runs
    if absent := [label for label in claim.needs if label not in set(runs["condition"])]:
        return not_tested(f"no complete run of {', '.join(absent)}")
    if claim.needs and not claim.across_seeds:
        seeds = shared_seeds(runs, *claim.needs)
        if not seeds:
            return not_tested(f"no seed has a run of each; lacking: {seeds_lacking(runs, claim.needs)}")
        if len(seeds) < runs["seed"].nunique():
            results = dataclasses.replace(results, runs=runs[runs["seed"].isin(seeds)])
    try:
        return claim.judge(results)
    except InputError as reason:
        return not_tested(str(reason))


def shared_seeds(runs: pd.DataFrame, *conditions: str) -> list[int]:
    """The seeds that have a run of every one of the conditions."""
    seeds = [set(runs.loc[runs["condition"] == condition, "seed"]) for condition in conditions]
    return sorted(int(seed) for seed in set.intersection(*seeds))


def seeds_lacking(runs: pd.DataFrame, conditions: Iterable[str]) -> str:
    """Which of these conditions lack which of the study's seeds: "Modern (seeds 0, 1); −CutMix (seed 1)"."""
    seeds = set(runs["seed"])
    of_condition = runs.groupby("condition")["seed"].agg(set)
    words = []
    for condition in conditions:
        lacks = sorted(seeds - of_condition.get(condition, set()))
        if lacks:
            words.append(f"{condition} ({'seed' if len(lacks) == 1 else 'seeds'} {', '.join(map(str, lacks))})")
    return "; ".join(words)


@dataclass(frozen=True, kw_only=True)
class Verdicts:
    """All judged claims of one report, and what has to be said around them."""

    judgements: Sequence[Judgement]
    title: str
    scale: str
    paper: str | None
    """Whose claims they are; None: nothing but questions of our own."""
    whose_questions: str = ""
    """Behind their number, as in " of our own"."""
    runs: str
    """What they rest on, in a sentence."""
    warning: str = ""
    """Why the runs are not a result: then none is counted."""
    notes: tuple[str, ...]
    asked: Mapping[str, str] = field(default_factory=dict)
    """The id of a claim → whether it was planned or asked afterwards, as plan.json says; where it does not, that this
    is not known."""

    def when_asked(self, claim: Claim) -> str:
        return self.asked.get(claim.id, NOT_KNOWN)

    def table(self) -> Table:
        """A row per claim. Of a paper's claims with what the paper has, and perhaps questions of our own among them."""
        of_paper = self.paper is not None
        is_mixed = any(judgement.claim.source == OURS for judgement in self.judgements)
        asked = "question" if not of_paper else "claim or question" if is_mixed else "claim"
        rows = []
        for number, judgement in enumerate(self.judgements, start=1):
            claim, finding = judgement.claim, judgement.finding
            row = Row().both("number", number, title="").show(asked, f"{claim.text} ({claim.source})")
            row.keep(claim=claim.text, source=claim.source).both("asked", self.when_asked(claim))
            if of_paper:
                row.both("paper", claim.paper)
            row.keep(paper=claim.paper).both("ours", finding.ours, title="ours" if of_paper else "numbers")
            row.keep(value=finding.value, low=finding.low, high=finding.high, n=finding.n)
            row.show("seeds", str(finding.n) if finding.n else MISSING)
            row.keep(
                family=claim.family or ("questions" if claim.is_question else "claims"),
                p=finding.p,
                p_against=finding.p_against,
            )
            # The p-value of what is more likely shown: the claim, or its opposite.
            likely = min(judgement.p, judgement.p_against)
            row.keep(p_corrected=judgement.p, p_against_corrected=judgement.p_against)
            # Of one seed, without a fit to all runs, there is none.
            is_tested = finding.n > 1 or min(finding.p, finding.p_against) < 0.5
            row.show("p", probability(likely if is_tested else float("nan")))
            row.both("verdict", judgement.words, "verdict" if of_paper else "answer", f"**{judgement.words}**")
            to_decide = pd.NA if judgement.to_decide is None else judgement.to_decide
            row.both("to_decide", to_decide, "to decide", _to_decide(judgement)).keep(scale=self.scale)
            rows.append(row)
        notes = (*self.notes, MARKS)
        if any(judgement.claim.names_layers for judgement in self.judgements):
            notes = (*notes, COUNTED_FROM_1)
        return Table.of("verdict", self.title, rows, notes=notes)

    def markdown(self) -> str:
        """The table, a summary before it and the rules after it."""
        title, table = self.table().markdown().split("\n", maxsplit=1)
        return "\n".join([title, self.warning, self.summary(), table, *self._rules()])

    def summary(self) -> str:
        """In a line: how many came out how, the paper's claims and our questions separately."""
        if self.warning:
            return self.runs
        if self.paper is None:
            return f"Of {_counted('question', self.judgements, self.whose_questions)}. {self.runs}"
        ours = [judgement for judgement in self.judgements if judgement.claim.source == OURS]
        claims = [judgement for judgement in self.judgements if judgement.claim.source != OURS]
        sentences = [f"Of {_counted('claim', claims, f' of {self.paper}')}."] if claims else []
        sentences += [f"Of {_counted('question', ours, ' of our own')}."] if ours else []
        return " ".join([*sentences, self.runs])

    def _rules(self) -> list[str]:
        about = (
            "Every p-value comes from one of these rules; the numbers of the rows that it judges are in brackets. The "
            "table shows the corrected one, of the claim or of its opposite, whichever is smaller."
        )
        lines = ["## The verdicts", "", VERDICTS, "", *self._families(), "## The rules", "", about, ""]
        numbered = list(enumerate((judgement.claim for judgement in self.judgements), start=1))
        for rule in dict.fromkeys(claim.rule for _, claim in numbered):
            claims = [(number, claim) for number, claim in numbered if claim.rule == rule]
            lines.append(f"- {rule} ({', '.join(str(number) for number, _ in claims)})")
            for number, claim in claims:
                if claim.readings is not None:
                    strict, weak = claim.readings
                    lines.append(f"  - {number}. Strict: {strict}. Weak: {weak}.")
        return [*lines, ""]

    def _families(self) -> list[str]:
        """Which rows are corrected together; nothing where all are."""
        members: dict[tuple[bool, str], list[str]] = {}
        for number, judgement in enumerate(self.judgements, start=1):
            claim = judgement.claim
            members.setdefault((claim.is_question, claim.family), []).append(str(number))
        if not any(family for _, family in members):
            return []
        words = (f"{family or 'the others'}: {', '.join(rows)}" for (_, family), rows in members.items())
        return [f"Families, by the numbers of their rows: {'; '.join(words)}.", ""]


def _to_decide(judgement: Judgement) -> str:
    """ "5 seeds"."""
    if not judgement.is_open or judgement.finding.decides is None or judgement.finding.n < 2:
        return MISSING
    return f"more than {MOST_SEEDS}" if judgement.to_decide is None else str(judgement.to_decide)


def _counted(what: str, judgements: Sequence[Judgement], whose: str) -> str:
    """ "3 claims of S1: 2 reproduced, 1 not tested"."""
    known = [*map(str, Verdict), YES, LEANING_YES, NO, OTHER_WAY, IN_WORDS]
    found = [IN_WORDS if judgement.verdict is None else judgement.words for judgement in judgements]
    found = [word if word in known else IN_WORDS for word in found]
    counts = ", ".join(f"{found.count(word)} {word}" for word in known if word in found)
    return f"{len(found)} {what if len(found) == 1 else f'{what}s'}{whose}: {counts}"
