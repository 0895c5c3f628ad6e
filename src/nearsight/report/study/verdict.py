"""Claim by claim: does it reproduce? The rules decide, and the file says them."""

import dataclasses
from dataclasses import dataclass

from nearsight.errors import InputError
from nearsight.report.study.claim import OURS, Claim
from nearsight.report.study.judged import counted, judged_rows, not_tested, rules_in_words
from nearsight.report.study.measures import shared_seeds
from nearsight.report.study.notes import assumed_notes, missing_notes, scale_notes, seeds_in_words, seeds_lacking
from nearsight.report.study.questions import SHORT
from nearsight.report.study.registry import parts_of
from nearsight.report.study.rules import Finding, Verdict
from nearsight.report.study.table import Table
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
    """What the runs say about a claim; not tested where they lack a condition or a seed that it needs.

    Seeds that lack one of the conditions it needs have no say, so that all its numbers are of the same ones; but where
    one fit judges it they have, as in the table of that fit.
    """
    absent = [label for label in claim.needs if label not in set(results.runs["condition"])]
    if absent:
        return not_tested(f"no complete run of {', '.join(absent)}")
    if claim.needs and not claim.across_seeds:
        seeds = shared_seeds(results, *claim.needs)
        if not seeds:
            return not_tested(f"no seed has a run of each; lacking: {seeds_lacking(results, claim.needs)}")
        if len(seeds) < results.runs["seed"].nunique():
            runs = results.runs[results.runs["seed"].isin(seeds)]
            results = dataclasses.replace(results, runs=runs)
    try:
        return claim.judge(results)
    except InputError as reason:
        return not_tested(str(reason))


def verdict_table(results: StudyResults, judgements: list[Judgement]) -> Table:
    parts = parts_of(results.name)
    of_paper = parts.paper is not None
    of_seeds = "± is half the 95 % interval of the mean over seeds; differences are taken within seeds."
    of_fits = "± is half a 95 % interval; the tables say how each was estimated."
    notes = (parts.intervals or (of_seeds if of_paper else of_fits),)
    return Table(
        name="verdict",
        title=f"{results.name}: {'what reproduces' if of_paper else 'the answers'}",
        **judged_rows(judgements, results.scale, of_paper=of_paper),
        notes=(*scale_notes(results), *notes, *missing_notes(results), *assumed_notes(results)),
    )


def verdict_markdown(results: StudyResults, judgements: list[Judgement]) -> str:
    """The table, a summary before it and the rules after it."""
    title, table = verdict_table(results, judgements).markdown().split("\n", maxsplit=1)
    top = [title, *(scale_notes(results) or [""]), verdict_summary(results, judgements)]
    return "\n".join([*top, table, *rules_in_words(judgements)])


def verdict_summary(results: StudyResults, judgements: list[Judgement]) -> str:
    """In a line. Runs that test the path say nothing about a claim, so none is counted."""
    seeds = seeds_in_words(results.runs.groupby("condition")["seed"].nunique())
    runs = f"{len(results.runs)} runs, {seeds} per condition."
    return runs if scale_notes(results) else f"{_in_short(results, judgements)} {runs}"


def _in_short(results: StudyResults, judgements: list[Judgement]) -> str:
    """How many came out how; the paper's claims and our questions each for themselves."""
    paper = parts_of(results.name).paper
    if paper is None:
        return f"Of {_told('question', judgements)}."
    ours = [judgement for judgement in judgements if judgement.claim.source == OURS]
    claims = [judgement for judgement in judgements if judgement.claim.source != OURS]
    sentences = [f"Of {_told('claim', claims, f' of {paper}')}."] if claims else []
    if ours:
        sentences.append(f"Of {_told('question', ours, ' of our own')}.")
    return " ".join(sentences)


def _told(what: str, judgements: list[Judgement], whose: str = "") -> str:
    known = (*map(str, Verdict), *SHORT)
    found = [str(judgement.finding.verdict) for judgement in judgements]
    number = f"{len(found)} {what}" if len(found) == 1 else f"{len(found)} {what}s"
    told = counted([word if word in known else IN_WORDS for word in found], (*known, IN_WORDS))
    return f"{number}{whose}: {told}"
