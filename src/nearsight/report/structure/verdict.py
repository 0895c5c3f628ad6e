"""Claim by claim of S3: does it reproduce? The rules decide, and the file says them."""

from dataclasses import dataclass

from nearsight.errors import InputError
from nearsight.report.structure.claims import CLAIMS, StructureClaim
from nearsight.report.structure.numbers import PAPER, notes_of
from nearsight.report.study.judged import counted, judged_rows, not_tested, rules_in_words
from nearsight.report.study.notes import seeds_in_words
from nearsight.report.study.rules import Finding, Verdict
from nearsight.report.study.table import Table
from nearsight.study.simulation_folder import SimulationResults


@dataclass(frozen=True, kw_only=True)
class StructureJudgement:
    claim: StructureClaim
    finding: Finding


def judge_claims(results: SimulationResults) -> list[StructureJudgement]:
    """Every claim that this study is about; none where nothing is registered under its name."""
    return [StructureJudgement(claim=claim, finding=_judge(claim, results)) for claim in CLAIMS.get(results.name, ())]


def _judge(claim: StructureClaim, results: SimulationResults) -> Finding:
    try:
        return claim.judge(results)
    except InputError as reason:
        return not_tested(str(reason))


def verdict_table(results: SimulationResults, judgements: list[StructureJudgement]) -> Table:
    notes = ("± is half the 95 % interval of the mean over seeds; ranges in brackets are 95 % intervals.",)
    return Table(
        name="verdict",
        title=f"{results.name}: what reproduces",
        **judged_rows(judgements, results.scale),
        notes=(*notes, *notes_of(results)),
    )


def verdict_markdown(results: SimulationResults, judgements: list[StructureJudgement]) -> str:
    """The table, a summary before it and the rules after it."""
    title, table = verdict_table(results, judgements).markdown().split("\n", maxsplit=1)
    return "\n".join([title, "", verdict_summary(results, judgements), table, *rules_in_words(judgements)])


def verdict_summary(results: SimulationResults, judgements: list[StructureJudgement]) -> str:
    """In a line."""
    told = counted([str(judgement.finding.verdict) for judgement in judgements], map(str, Verdict))
    seeds = seeds_in_words(results.runs.groupby("condition")["seed"].nunique())
    return f"Of {len(judgements)} claims of {PAPER}: {told}. {len(results.runs)} cells, {seeds} per condition."
