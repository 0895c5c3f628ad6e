"""Claim by claim of S3: does it reproduce? The rules decide, and the file says them."""

from collections import Counter
from dataclasses import dataclass

import pandas as pd

from nearsight.errors import InputError
from nearsight.report.structure.claims import CLAIMS, StructureClaim
from nearsight.report.structure.numbers import PAPER, notes_of
from nearsight.report.study.notes import seeds_in_words
from nearsight.report.study.rules import Finding, Verdict
from nearsight.report.study.table import MISSING, Table
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
        return Finding(verdict=Verdict.NOT_TESTED, ours=str(reason), value=float("nan"), n=0)


def verdict_table(results: SimulationResults, judgements: list[StructureJudgement]) -> Table:
    rows, shown = [], []
    for number, judgement in enumerate(judgements, start=1):
        claim, finding = judgement.claim, judgement.finding
        texts = {"claim": claim.text, "source": claim.source, "paper": claim.paper, "ours": finding.ours}
        numbers = {"value": finding.value, "low": finding.low, "high": finding.high, "n": finding.n}
        rows.append({"number": number, **texts, **numbers, "verdict": str(finding.verdict), "scale": results.scale})
        shown.append(
            {
                "": str(number),
                "claim": f"{claim.text} ({claim.source})",
                "paper": claim.paper,
                "ours": finding.ours,
                "seeds": str(finding.n) if finding.n else MISSING,
                "verdict": f"**{finding.verdict}**",
            }
        )
    notes = ("± is half the 95 % interval of the mean over seeds; ranges in brackets are 95 % intervals.",)
    return Table(
        name="verdict",
        title=f"{results.name}: what reproduces",
        numbers=pd.DataFrame(rows),
        shown=pd.DataFrame(shown),
        notes=(*notes, *notes_of(results)),
    )


def verdict_markdown(results: SimulationResults, judgements: list[StructureJudgement]) -> str:
    """The table, a summary before it and the rules after it."""
    counts = Counter(str(judgement.finding.verdict) for judgement in judgements)
    told = ", ".join(f"{counts[verdict]} {verdict}" for verdict in Verdict if counts[verdict])
    seeds = seeds_in_words(results.runs.groupby("condition")["seed"].nunique())
    summary = f"Of {len(judgements)} claims of {PAPER}: {told}. {len(results.runs)} cells, {seeds} per condition."
    title, table = verdict_table(results, judgements).markdown().split("\n", maxsplit=1)
    return "\n".join([title, "", summary, table, *_rules([judgement.claim for judgement in judgements])])


def _rules(claims: list[StructureClaim]) -> list[str]:
    lines = ["## The rules", "", "Every verdict is computed by one of these; what it judges is in brackets.", ""]
    for rule in dict.fromkeys(claim.rule for claim in claims):
        judged = [(number, claim) for number, claim in enumerate(claims, start=1) if claim.rule == rule]
        lines.append(f"- {rule} ({', '.join(str(number) for number, _ in judged)})")
        for number, claim in judged:
            if claim.readings is not None:
                strict, weak = claim.readings
                lines.append(f"  - {number}. Strict: {strict}. Weak: {weak}.")
    return [*lines, ""]
