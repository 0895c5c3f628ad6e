"""What a study can show before it runs: its own verdicts on made-up runs, with and without the paper's effects.

Runs are drawn around a mean per condition: that of the paper or of earlier runs or, where nothing has an effect, one
for all. Every claim is then judged by its own rule, corrected for its family, as it will be on real runs. Claims about
single heads, layers or epochs need more than a row per run, and are left out by name.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from nearsight.errors import InputError
from nearsight.report.claims import Claim, judge_all
from nearsight.report.rules import Verdict
from nearsight.report.studies import report_of
from nearsight.report.tables import Row, Table, share
from nearsight.study import Study, StudyResults

NUMBERS_OF_SEEDS = (2, 3, 5, 10)
TYPICAL_SPREAD = {"test_acc": 0.015, "min_mad": 0.05, "max_mad": 0.045, "min_entropy": 0.12, "max_entropy": 0.01}
"""Standard deviation over the seeds of a condition: as in our own ablations on CIFAR-100, for want of others."""
USUAL = {"test_acc": 0.5, "min_mad": 0.3, "max_mad": 0.5, "min_entropy": 0.5, "max_entropy": 0.95}
"""Where neither a paper nor earlier runs say a number."""


@dataclass(frozen=True, kw_only=True)
class Assumed:
    """What made-up runs are drawn around."""

    means: Mapping[str, Mapping[str, float]]
    """Condition → response → mean."""
    spread: Mapping[str, float]
    """Response → standard deviation over seeds."""
    words: str

    @property
    def without_effects(self) -> "Assumed":
        """All conditions are as the first."""
        first = next(iter(self.means.values()))
        return replace(self, means=dict.fromkeys(self.means, first), words="no condition differs from any other")


def of_paper(study: Study) -> Assumed:
    """The paper's numbers of the study's conditions, with a typical spread over seeds."""
    published = report_of(study.name).published
    if published is None:
        raise InputError(
            f"no paper has numbers for the conditions of {study.name}; give earlier runs as --pilot FOLDER"
        )
    known = published.conditions
    means = {
        condition: {name: _known(known.get(condition), name, usual) for name, usual in USUAL.items()}
        for condition in dict.fromkeys(cell.condition for cell in study.cells)
    }
    return Assumed(means=means, spread=TYPICAL_SPREAD, words=f"the means of {published.source}")


def _known(published: object, name: str, usual: float) -> float:
    value = getattr(published, name, None)
    return usual if value is None else float(value)


def of_runs(pilot: StudyResults) -> Assumed:
    """The means of earlier runs, and their spread over the seeds of a condition, pooled."""
    by_condition = pilot.runs.groupby("condition", sort=False)[list(USUAL)]
    spread = by_condition.var(ddof=1).mean().pow(0.5)
    if spread.isna().any():
        raise InputError(f"the runs of {pilot.name} have one seed per condition, which have no spread")
    means = {str(label): dict(row) for label, row in by_condition.mean().iterrows()}
    return Assumed(means=means, spread=dict(spread), words=f"the means and the spread of {pilot.name}")


def made_up_runs(results: StudyResults, assumed: Assumed, n: int, random: np.random.Generator) -> StudyResults:
    """Results of n seeds; `results` has a row per condition, whose levels they take."""
    tables = []
    for seed in range(n):
        table = results.runs.assign(seed=seed, run=[f"{seed}-{label}" for label in results.runs["condition"]])
        for name, deviation in assumed.spread.items():
            means = np.array([assumed.means[label][name] for label in table["condition"]])
            table[name] = means + deviation * random.standard_normal(len(table))
        tables.append(table)
    return replace(results, runs=pd.concat(tables, ignore_index=True))


def one_row_each(study: Study) -> StudyResults:
    """The conditions of a study, with no numbers yet."""
    cells = {cell.condition: cell for cell in study.cells}
    rows = [{"condition": label, **cell.levels, "seed": 0, "epochs": 100} for label, cell in cells.items()]
    nothing = pd.DataFrame(columns=["run", "layer", "head", "mad", "entropy"])
    return StudyResults(study.name, study.labels, pd.DataFrame(rows), nothing, nothing, "full", {}, ())


def verdict_rates(
    claims: Sequence[Claim], results: StudyResults, assumed: Assumed, n: int, *, num_draws: int, seed: int = 0
) -> dict[str, Counter[Verdict]]:
    """Claim → how often each verdict comes out."""
    random = np.random.default_rng([seed, n])
    counted: dict[str, Counter[Verdict]] = {claim.id: Counter() for claim in claims}
    for _ in range(num_draws):
        for judgement in judge_all(claims, made_up_runs(results, assumed, n, random)):
            if judgement.verdict is not None:
                counted[judgement.claim.id][judgement.verdict] += 1
    return counted


def simulated_claims(claims: Iterable[Claim], results: StudyResults, assumed: Assumed, n: int) -> list[Claim]:
    """Those that a row per run can judge, with so many seeds."""
    drawn = made_up_runs(results, assumed, n, np.random.default_rng(0))
    found = []
    for claim in claims:
        try:
            (judgement,) = judge_all([claim], drawn)
        except (KeyError, ValueError, IndexError):  # it reads a table that made-up runs do not have
            continue
        if judgement.verdict not in (None, Verdict.NOT_TESTED):
            found.append(claim)
    return found


def power_table(
    study: Study, assumed: Assumed, *, seeds: Sequence[int] = NUMBERS_OF_SEEDS, num_draws: int = 100
) -> Table:
    """Per claim and number of seeds: how often it comes out as reproduced where the effects are as assumed, and where
    there are none."""
    results = one_row_each(study)
    if missing := [label for label in results.runs["condition"] if label not in assumed.means]:
        raise InputError(f"no numbers are assumed for {', '.join(missing)}")
    declared = list(report_of(study.name).claims_of(results))
    claims = simulated_claims(declared, results, assumed, max(seeds))
    if not claims:
        raise InputError(f"no claim of {study.name} can be judged by a row per run")
    rates = {
        (n, is_null): verdict_rates(
            claims, results, assumed.without_effects if is_null else assumed, n, num_draws=num_draws
        )
        for n in seeds
        for is_null in (False, True)
    }
    rows = []
    for claim in claims:
        row = Row(claim=claim.text).keep(id=claim.id, family=claim.family)
        for n in seeds:
            real, null = (rates[n, is_null][claim.id] for is_null in (False, True))
            shown, leaning, false = (
                counts[verdict] / num_draws
                for counts, verdict in (
                    (real, Verdict.REPRODUCED),
                    (real, Verdict.IN_DIRECTION),
                    (null, Verdict.REPRODUCED),
                )
            )
            row.keep(**{f"reproduced_{n}": shown, f"in_direction_{n}": leaning, f"false_{n}": false})
            row.show(f"{n} seeds", f"{share(shown)} ({share(leaning)})")
        most = max(rates[n, True][claim.id][Verdict.REPRODUCED] / num_draws for n in seeds)
        rows.append(row.show("where nothing differs", share(most)))
    left_out = [claim.text for claim in declared if claim not in claims]
    notes = (
        f"Of {num_draws} made-up studies with the assumed effects: how often the claim is reproduced, or answered by "
        "yes (in brackets: in direction, leaning yes). Where nothing differs: the same, at most, where all conditions "
        "are equal.",
        f"Assumed: {assumed.words}; what they do not say is the same in all conditions. Standard deviation over seeds: "
        + ", ".join(f"{name} {value:.3g}" for name, value in assumed.spread.items() if name in ("test_acc", "min_mad"))
        + ".",
        *([f"Not simulated, since they need more than a row per run: {'; '.join(left_out)}."] if left_out else []),
    )
    return Table.of("power", f"{study.name}: what so many seeds can show", rows, notes=notes)
