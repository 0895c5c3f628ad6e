"""Attention from positions alone beside the usual one: the table and the claims of the `positional-*` studies."""

from collections.abc import Mapping
from dataclasses import asdict
from functools import partial

import pandas as pd

from nearsight.errors import InputError
from nearsight.report.study.claim import OURS, Claim
from nearsight.report.study.locat.measures import OF_RUNS, Measure, measures_of, run_measures
from nearsight.report.study.locat.rules import COMPARABLE, judge_comparable
from nearsight.report.study.notes import missing_notes
from nearsight.report.study.positions import paper as s3
from nearsight.report.study.positions.rules import WHICH, judge_which
from nearsight.report.study.rules import Finding, change_in_words
from nearsight.report.study.shares import share_notes
from nearsight.report.study.table import MISSING, Table, rounded
from nearsight.report.study.tables_conditions import INTERVALS
from nearsight.study.results import StudyResults
from nearsight.study.statistics import MeanInterval, mean_interval, paired_difference
from nearsight.study.statistics.intervals import by_seed

ASSOCIATION = "position_association"
MEASURES: Mapping[str, Measure] = {
    **{column: OF_RUNS[column] for column in ("test_acc", "min_mad", "mean_mad")},
    ASSOCIATION: Measure(title="position association"),
}
"""Column → what it is, of a run."""
WHAT_ASSOCIATION_IS = (
    "Position association: the share of a patch's neighbours in the image (up to 8) that are among as many patches "
    "whose learned positions are most alike to its own, mean over patches."
)
DIFFERENCE = f"{s3.POSITIONAL_VIT} minus {s3.VIT}"
MODELS = (s3.VIT, s3.POSITIONAL_VIT)


def named_runs(results: StudyResults) -> pd.DataFrame:
    """The runs with every column of `MEASURES`, their model as condition; NaN where a run was not measured so."""
    runs = run_measures(results)
    runs = runs.assign(condition=runs["model"])
    return runs.reindex(columns=list(dict.fromkeys([*runs.columns, *MEASURES]))).astype({ASSOCIATION: "float64"})


def accuracy_differences(results: StudyResults) -> "pd.Series[float]":
    """Positional minus vanilla, of the seeds that have both."""
    wide = by_seed(named_runs(results), "test_acc").reindex(columns=list(MODELS))
    return (wide[s3.POSITIONAL_VIT] - wide[s3.VIT]).dropna()


def of_model(runs: pd.DataFrame, model: str, column: str) -> MeanInterval:
    return mean_interval(runs.loc[runs["condition"] == model, column].dropna())


def positional_table(results: StudyResults) -> Table:
    """A row per model, and their difference within seeds."""
    runs, published = named_runs(results), s3.PAIRS[results.name]
    measures = measures_of(results, MEASURES)
    here = [model for model in MODELS if model in set(runs["condition"])]
    if not here:
        raise InputError("none of its models has a run yet")
    ours = {model: {column: of_model(runs, model, column) for column in measures} for model in here}
    papers = dict(published.accuracy)
    difference = {column: paired_difference(runs, s3.POSITIONAL_VIT, s3.VIT, column) for column in measures}
    if difference["test_acc"].n:
        ours[DIFFERENCE], papers[DIFFERENCE] = difference, published.difference
    rows: list[dict[str, object]] = []
    shown: list[dict[str, object]] = []
    for name, numbers in ours.items():
        signed = name == DIFFERENCE
        named: dict[str, object] = {"model": name, "seeds": numbers["test_acc"].n}
        flat = {f"{column}_{part}": x for column, interval in numbers.items() for part, x in asdict(interval).items()}
        rows.append({**named, "scale": results.scale, **flat, "paper_test_acc": papers.get(name)})
        cells = {_unit(measure): measure.told(numbers[column], signed=signed) for column, measure in measures.items()}
        accuracy = _unit(MEASURES["test_acc"])
        shown.append(
            {
                **named,
                accuracy: cells.pop(accuracy),
                "paper's accuracy": rounded(100 * papers[name], 1, signed=signed) if name in papers else MISSING,
                **cells,
            }
        )
    return Table(
        name="positional",
        title=f"{results.name}: attention from positions alone beside the usual one",
        numbers=pd.DataFrame(rows),
        shown=pd.DataFrame(shown).astype(str),
        notes=(
            INTERVALS,
            "The difference is taken within seeds, that of per cent in points. MAD: over all heads of a run.",
            *share_notes(results),
            WHAT_ASSOCIATION_IS,
            f"The paper's accuracies ({published.dataset}, 10 seeds, patches of 4) are read off box plots.",
            *missing_notes(results),
        ),
    )


def _unit(measure: Measure) -> str:
    return f"{measure.title}, %" if measure.is_share else measure.title


def _difference(results: StudyResults, column: str) -> tuple[MeanInterval, str]:
    """Positional minus vanilla within seeds, and in words with the means of the seeds that have both."""
    runs = named_runs(results).dropna(subset=[column])
    ours = paired_difference(runs, s3.POSITIONAL_VIT, s3.VIT, column)
    if not ours.n:
        title = MEASURES[column].title
        raise InputError(f"no seed of which both {s3.VIT} and {s3.POSITIONAL_VIT} have a {title}")
    paired = runs[runs.groupby("seed")["condition"].transform("nunique") == len(MODELS)]
    before, after = (of_model(paired, model, column) for model in MODELS)
    return ours, change_in_words(before, after, ours, accuracy=MEASURES[column].is_share)


def _judge_on_par(results: StudyResults) -> Finding:
    ours, words = _difference(results, "test_acc")
    return judge_comparable(ours, words=words)


def _judge_which(column: str, larger: str, smaller: str, results: StudyResults) -> Finding:
    ours, words = _difference(results, column)
    return judge_which(ours, larger=larger, smaller=smaller, words=words)


def positional_claims(study: str) -> tuple[Claim, ...]:
    published = s3.PAIRS[study]
    before, after = (mean_interval([published.accuracy[model]]) for model in MODELS)
    questions = {
        "min_mad": ("Which of the two has the more local head, the one that looks nearest?", s3.VIT, s3.POSITIONAL_VIT),
        "mean_mad": ("Whose heads look nearer on average?", s3.VIT, s3.POSITIONAL_VIT),
        ASSOCIATION: ("Whose learned positions are more associated with neighbours?", s3.POSITIONAL_VIT, s3.VIT),
    }
    return (
        Claim(
            id="on-par",
            text="Attention from positions alone is on par with the usual one",
            source=s3.POSITIONAL,
            paper=change_in_words(before, after, mean_interval([published.difference]), accuracy=True),
            rule=COMPARABLE,
            judge=_judge_on_par,
        ),
        *(
            Claim(id=column, text=text, source=OURS, rule=WHICH, judge=partial(_judge_which, column, larger, smaller))
            for column, (text, larger, smaller) in questions.items()
        ),
    )
