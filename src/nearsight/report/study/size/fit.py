"""Does a larger model need more data, or more CutMix, to become local? One fit to all runs of `size-cifar100`.

Heads differ in number between widths, and the smallest of more numbers is smaller: so the answers are about the mean
over the heads of the first layers, and the smallest distance stands beside it.
"""

import math
from dataclasses import dataclass
from functools import partial

import pandas as pd

from nearsight.report.study.claim import Claim
from nearsight.report.study.least_squares import Estimate, LeastSquares, least_squares
from nearsight.report.study.measures import EARLY_LAYERS
from nearsight.report.study.questions import SIGN, judge_sign
from nearsight.report.study.responses import EARLY, responses_of, with_early_layers
from nearsight.report.study.rules import Finding
from nearsight.report.study.shares import known_shares, share_notes
from nearsight.report.study.table import Table
from nearsight.study.results import StudyResults

TIMES = " × "
DOUBLINGS = ("width", "depth")
"""Factors whose levels are numbers; they count in doublings of the base."""


def predictors(results: StudyResults) -> pd.DataFrame:
    """A row per run. Width and depth count in doublings, CutMix and images are −½ and ½, more CutMix is 0 and 1."""
    runs = results.runs
    columns = {"mean": pd.Series(1.0, index=runs.index)}
    for name in DOUBLINGS:
        base = float(results.factors[name][0])
        columns[name] = runs[name].astype(float).div(base).map(math.log2)
    off, _, *more = results.factors["cutmix"]
    columns["cutmix"] = (runs["cutmix"] != off) - 0.5
    columns["more"] = runs["cutmix"].isin(more).astype(float)
    columns["fewer"] = (runs["images"] != results.factors["images"][0]) - 0.5
    for first, second in (
        *(("width", "cutmix"), ("depth", "cutmix"), ("width", "fewer")),
        *(("fewer", "cutmix"), ("width", "more")),
    ):
        columns[f"{first}{TIMES}{second}"] = columns[first] * columns[second]
    return pd.DataFrame(columns)


def fit_of(results: StudyResults, response: str) -> LeastSquares:
    """The mean, and all effects whose factors vary among the runs there are."""
    columns = predictors(results)
    varying = [
        name
        for name in columns
        if name == "mean" or all(columns[part].nunique() > 1 for part in str(name).split(TIMES))
    ]
    return least_squares(columns[varying], with_early_layers(results)[response])


@dataclass(frozen=True, kw_only=True)
class Question:
    text: str
    name: str
    weights: dict[str, float]
    """Of the fit's effects."""
    sign: int
    """Of a yes."""


def _interaction(name: str, text: str, effect: str) -> Question:
    """Whether one factor changes what another does: a difference of differences, since CutMix and fewer images, one of
    which each such effect has, are a unit apart."""
    return Question(name=name, text=text, weights={effect: 1.0}, sign=1)


QUESTIONS = (
    Question(
        name="width doubled, without CutMix, all images",
        text="Without CutMix, does a wider model look farther in its early layers?",
        weights={"width": 1.0, "width × cutmix": -0.5, "width × fewer": -0.5},
        sign=1,
    ),
    Question(
        name="CutMix, at S1's size",
        text="At S1's size, does CutMix make the early layers look nearer?",
        weights={"cutmix": 1.0, "fewer × cutmix": -0.5},
        sign=-1,
    ),
    _interaction(
        "width doubled: change of what CutMix does",
        "Does CutMix do less in a wider model, so that it needs more of it?",
        "width × cutmix",
    ),
    _interaction(
        "depth doubled: change of what CutMix does", "Does CutMix do less in a deeper model?", "depth × cutmix"
    ),
    _interaction(
        "width doubled: change of what a quarter of the images does",
        "Do fewer images make a wider model look farther than they make a narrow one?",
        "width × fewer",
    ),
    _interaction(
        "a quarter of the images: change of what CutMix does",
        "Does CutMix do less where there are fewer images?",
        "fewer × cutmix",
    ),
    Question(
        name="CutMix in every batch rather than in half, at twice the width",
        text="Does more CutMix make the widest model look nearer?",
        weights={"more": 1.0, "width × more": 1.0},
        sign=-1,
    ),
)


def size_table(results: StudyResults) -> Table:
    """What size, images and CutMix change in each response."""
    responses = responses_of(results)
    fits = {response: fit_of(results, response) for response in responses}
    rows, shown = [], []
    for question in QUESTIONS:
        if not set(question.weights) <= set(fits[EARLY].names):
            continue
        found = {response: fit.estimate(question.weights) for response, fit in fits.items()}
        rows += [_row(results, question, response, estimate) for response, estimate in found.items()]
        cells = {
            title: found[response].in_words(scale=scale, digits=digits)
            for response, (title, scale, digits) in responses.items()
        }
        shown.append({"what": question.name, **cells})
    fit = fits[EARLY]
    farther_out = "their smallest distance smaller" + (
        " and their largest shares larger" if known_shares(results) else ""
    )
    return Table(
        name="size",
        title=f"{results.name}: size, images and CutMix",
        numbers=pd.DataFrame(rows),
        shown=pd.DataFrame(shown),
        notes=(
            "Ordinary least squares on all runs: width and depth in doublings of S1's, CutMix and images as two "
            f"levels, and these interactions; {len(results.runs)} runs, {fit.residual_df} of them left over to learn "
            "the noise. ± is half the 95 % interval.",
            f"Early layers: the mean over the heads of the first {EARLY_LAYERS}. Wider models have more heads, which "
            f"by itself makes {farther_out}.",
            *share_notes(results),
        ),
    )


def _row(results: StudyResults, question: Question, response: str, estimate: Estimate) -> dict[str, object]:
    numbers = {"estimate": estimate.value, "low": estimate.low, "high": estimate.high, "scale": results.scale}
    return {"what": question.name, "response": response, **numbers}


def _judge(question: Question, results: StudyResults) -> Finding:
    estimate = fit_of(results, EARLY).estimate(question.weights)
    words = f"{question.name}: {estimate.in_words()}"
    n = int(results.runs["seed"].nunique())
    return judge_sign(estimate, sign=question.sign, words=words, n=n)


SIZE_QUESTIONS = tuple(
    Claim(
        id=question.name,
        text=question.text,
        source="MAD of the early layers",
        rule=SIGN,
        judge=partial(_judge, question),
    )
    for question in QUESTIONS
)
