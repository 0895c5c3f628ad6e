"""Claim by claim of S2 on frozen features: does it reproduce? The rules decide, and the file says them."""

from nearsight.report.probes.claims import claims_about
from nearsight.report.probes.differences import OF_ONE_SEED
from nearsight.report.probes.results import ProbeResults
from nearsight.report.probes.tables import OVER_SEEDS
from nearsight.report.study.judged import counted, judged_rows, rules_in_words
from nearsight.report.study.locat.paper import PAPER
from nearsight.report.study.notes import missing_notes, seeds_in_words
from nearsight.report.study.rules import Verdict
from nearsight.report.study.table import Table
from nearsight.report.study.verdict import Judgement, judge_claim

SCALES = (
    "Beside each number stands what it is of: the paper's models are larger, see larger images and were trained on "
    "more of them, and it probes them on larger data sets."
)


def judge_claims(results: ProbeResults) -> list[Judgement]:
    """Every claim that these models can tell of; none where they are of fewer than two conditions."""
    if results.num_conditions < 2:
        return []
    study = results.as_study()
    return [Judgement(claim=claim, finding=judge_claim(claim, study)) for claim in claims_about(results)]


def verdict_table(results: ProbeResults, judgements: list[Judgement]) -> Table:
    explained = {
        OVER_SEEDS: any(judgement.finding.n > 1 for judgement in judgements),
        OF_ONE_SEED: any(judgement.finding.n == 1 for judgement in judgements),
    }
    intervals = (words for words, is_needed in explained.items() if is_needed)
    return Table(
        name="verdict",
        title=f"{results.name}: what reproduces of S2's claims about frozen features",
        **judged_rows(judgements, results.scale),
        notes=(*results.scale_notes, SCALES, *intervals, *missing_notes(results.as_study())),
    )


def verdict_markdown(results: ProbeResults, judgements: list[Judgement]) -> str:
    """The table, a summary before it and the rules after it."""
    title, table = verdict_table(results, judgements).markdown().split("\n", maxsplit=1)
    return "\n".join([title, "", verdict_summary(results, judgements), table, *rules_in_words(judgements)])


def verdict_summary(results: ProbeResults, judgements: list[Judgement]) -> str:
    """In a line."""
    told = counted([str(judgement.finding.verdict) for judgement in judgements], map(str, Verdict))
    runs = results.as_study().runs
    seeds = seeds_in_words(runs.groupby("condition")["seed"].nunique())
    return f"Of {len(judgements)} claims of {PAPER}: {told}. {len(runs)} models, {seeds} per condition."
