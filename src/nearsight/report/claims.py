"""Claims of papers and questions of our own: how they are judged, and how the verdicts are written down."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pandas as pd

from nearsight.errors import InputError
from nearsight.report.rules import SHORT, Finding, Verdict
from nearsight.report.tables import MISSING, Row, Table
from nearsight.study.plan import MARKS, NOT_KNOWN

OURS = "our question"
"""The source of a question that is none of a paper's claims."""
IN_WORDS = "answered in words"


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
    across_seeds: bool = False
    """One fit to all runs judges it, which takes out what each seed does: a seed that lacks a condition counts too."""
    judge: Callable[[Any], Finding]
    """Of the study's results. An `InputError` says why these runs cannot judge it."""


def asked(
    id: str, text: str, *, source: str, paper: str = MISSING, rule: str, needs: tuple[str, ...] = ()
) -> Callable[[Callable[[Any], Finding]], Claim]:
    """A decorator: turns the function that judges a claim or question into the claim."""
    return lambda judge: Claim(id=id, text=text, source=source, paper=paper, rule=rule, needs=needs, judge=judge)


@dataclass(frozen=True, kw_only=True)
class Judgement:
    claim: Claim
    finding: Finding


def not_tested(reason: str) -> Finding:
    return Finding(verdict=Verdict.NOT_TESTED, ours=reason, value=float("nan"), n=0)


def judge(claim: Claim, results: Any) -> Judgement:
    """What the runs say about a claim; not tested where they lack a condition or a seed that it needs.

    Seeds that lack one of the conditions it needs do not count, so that all its numbers are of the same seeds; where
    one fit judges it they count, as in the table of that fit.
    """
    return Judgement(claim=claim, finding=_finding(claim, results))


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
            row.both(
                "verdict", str(finding.verdict), "verdict" if of_paper else "answer", f"**{finding.verdict}**"
            ).keep(scale=self.scale)
            rows.append(row)
        return Table.of("verdict", self.title, rows, notes=(*self.notes, MARKS))

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
        about = "Every verdict is computed by one of these rules; the numbers of the rows it judges are in brackets."
        lines = ["## The rules", "", about, ""]
        numbered = list(enumerate((judgement.claim for judgement in self.judgements), start=1))
        for rule in dict.fromkeys(claim.rule for _, claim in numbered):
            claims = [(number, claim) for number, claim in numbered if claim.rule == rule]
            lines.append(f"- {rule} ({', '.join(str(number) for number, _ in claims)})")
            for number, claim in claims:
                if claim.readings is not None:
                    strict, weak = claim.readings
                    lines.append(f"  - {number}. Strict: {strict}. Weak: {weak}.")
        return [*lines, ""]


def _counted(what: str, judgements: Sequence[Judgement], whose: str) -> str:
    """ "3 claims of S1: 2 reproduced, 1 not tested"."""
    known = [*map(str, Verdict), *SHORT, IN_WORDS]
    found = [str(judgement.finding.verdict) for judgement in judgements]
    found = [word if word in known else IN_WORDS for word in found]
    counts = ", ".join(f"{found.count(word)} {word}" for word in known if word in found)
    return f"{len(found)} {what if len(found) == 1 else f'{what}s'}{whose}: {counts}"
