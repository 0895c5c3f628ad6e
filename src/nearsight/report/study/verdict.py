"""Claim by claim: does it reproduce? The rules decide, and the file says them."""

from collections import Counter
from dataclasses import dataclass

import pandas as pd

from nearsight.errors import InputError
from nearsight.report.study.claim import Claim
from nearsight.report.study.measures import shared_seeds
from nearsight.report.study.notes import assumed_notes, missing_notes, scale_notes, seeds_in_words
from nearsight.report.study.questions import SHORT
from nearsight.report.study.registry import parts_of
from nearsight.report.study.rules import Finding, Verdict
from nearsight.report.study.table import MISSING, Table
from nearsight.study.results import StudyResults

IN_WORDS = "answered in words"


@dataclass(frozen=True, kw_only=True)
class Judgement:
    claim: Claim
    finding: Finding


def judge_claims(results: StudyResults) -> list[Judgement]:
    """Every claim and question that this study is about; none where nothing is registered under its name."""
    claims = parts_of(results.name).claims
    return [Judgement(claim=claim, finding=judge_claim(claim, results)) for claim in claims]


def judge_claim(claim: Claim, results: StudyResults) -> Finding:
    """What the runs say about a claim; not tested where they lack a condition or a seed that it needs."""
    absent = [label for label in claim.needs if label not in set(results.runs["condition"])]
    if absent:
        return _not_tested(f"no complete run of {', '.join(absent)}")
    if claim.needs and not shared_seeds(results, *claim.needs):
        return _not_tested(f"no seed of which all have a run: {', '.join(claim.needs)}")
    try:
        return claim.judge(results)
    except InputError as reason:
        return _not_tested(str(reason))


def _not_tested(reason: str) -> Finding:
    return Finding(verdict=Verdict.NOT_TESTED, ours=reason, value=float("nan"), n=0)


def verdict_table(results: StudyResults, judgements: list[Judgement]) -> Table:
    rows, shown = [], []
    of_paper = parts_of(results.name).paper is not None
    for number, judgement in enumerate(judgements, start=1):
        claim, finding = judgement.claim, judgement.finding
        texts = {"claim": claim.text, "source": claim.source, "paper": claim.paper, "ours": finding.ours}
        numbers = {"value": finding.value, "low": finding.low, "high": finding.high, "n": finding.n}
        rows.append({"number": number, **texts, **numbers, "verdict": str(finding.verdict), "scale": results.scale})
        shown.append(
            {
                "": str(number),
                "claim" if of_paper else "question": f"{claim.text} ({claim.source})",
                **({"paper": claim.paper} if of_paper else {}),
                "ours" if of_paper else "numbers": finding.ours,
                "seeds": str(finding.n) if finding.n else MISSING,
                "verdict" if of_paper else "answer": f"**{finding.verdict}**",
            }
        )
    of_seeds = "± is half the 95 % interval of the mean over seeds; differences are taken within seeds."
    of_fits = "± is half a 95 % interval; the tables say how each was estimated."
    notes = (of_seeds if of_paper else of_fits,)
    return Table(
        name="verdict",
        title=f"{results.name}: {'what reproduces' if of_paper else 'the answers'}",
        numbers=pd.DataFrame(rows),
        shown=pd.DataFrame(shown),
        notes=(*scale_notes(results), *notes, *missing_notes(results), *assumed_notes(results)),
    )


def verdict_markdown(results: StudyResults, judgements: list[Judgement]) -> str:
    """The table, a summary before it and the rules after it."""
    counts = Counter(_counted(judgement.finding.verdict) for judgement in judgements)
    told = ", ".join(f"{counts[word]} {word}" for word in (*Verdict, *SHORT, IN_WORDS) if counts[word])
    paper = parts_of(results.name).paper
    about = f"{len(judgements)} questions" if paper is None else f"{len(judgements)} claims of {paper}"
    seeds = seeds_in_words(results.runs.groupby("condition")["seed"].nunique())
    summary = f"Of {about}: {told}. {len(results.runs)} runs, {seeds} per condition."
    title, table = verdict_table(results, judgements).markdown().split("\n", maxsplit=1)
    return "\n".join([title, "", summary, table, *_rules(judgements)])


def _counted(verdict: str) -> str:
    return str(verdict) if verdict in (*Verdict, *SHORT) else IN_WORDS


def _rules(judgements: list[Judgement]) -> list[str]:
    lines = [
        "## The rules",
        "",
        "Every verdict is computed by one of these; what it judges is in brackets.",
        "",
    ]
    numbered = list(enumerate((judgement.claim for judgement in judgements), start=1))
    for rule in dict.fromkeys(claim.rule for _, claim in numbered):
        claims = [(number, claim) for number, claim in numbered if claim.rule == rule]
        lines.append(f"- {rule} ({', '.join(str(number) for number, _ in claims)})")
        for number, claim in claims:
            if claim.readings is not None:
                strict, weak = claim.readings
                lines.append(f"  - {number}. Strict: {strict}. Weak: {weak}.")
    return [*lines, ""]
