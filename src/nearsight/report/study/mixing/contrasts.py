"""Is it the cut, the mix, or the label? What sets two conditions of `mixing-*` apart, in numbers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import pandas as pd

from nearsight.errors import InputError
from nearsight.report.study.claim import Claim
from nearsight.report.study.least_squares import POOLED, Estimate, LeastSquares, condition_means
from nearsight.report.study.measures import EARLY_LAYERS
from nearsight.report.study.questions import PART_OF_WHOLE, judge_part
from nearsight.report.study.responses import responses_of, with_early_layers
from nearsight.report.study.rules import Finding
from nearsight.report.study.shares import share_notes
from nearsight.report.study.table import Table
from nearsight.study.results import StudyResults

NONE, CUTMIX, OWN_LABELS = "None", "CutMix", "CutMix, own labels"
BOXES = ("Noise box", "Mean box")
BOXES_WITH_LABELS = ("Noise box, mixed labels", "Mean box, mixed labels")


@dataclass(frozen=True, kw_only=True)
class Contrast:
    """The mean of some conditions minus the mean of others, which lack one thing."""

    name: str
    question: str
    with_it: tuple[str, ...]
    without_it: tuple[str, ...]
    sign: int = -1
    """That the question asks for."""
    of_sums: bool = False
    """Sums instead of means: the difference of two differences."""

    @property
    def weights(self) -> Mapping[str, float]:
        return self._shared(self.with_it, 1) | self._shared(self.without_it, -1)

    def _shared(self, labels: Sequence[str], whole: float) -> dict[str, float]:
        return dict.fromkeys(labels, whole if self.of_sums else whole / len(labels))

    @property
    def in_words(self) -> str:
        return f"{self._joined(self.with_it)} − {self._joined(self.without_it)}"

    def _joined(self, labels: Sequence[str]) -> str:
        several = f"{'sum' if self.of_sums else 'mean'} of {' and '.join(labels)}"
        return labels[0] if len(labels) == 1 else several


WHOLE = Contrast(name="CutMix", question="", with_it=(CUTMIX,), without_it=(NONE,))
# The first three add up to what CutMix does.
CONTRASTS = (
    Contrast(
        name="the cut",
        question="Is it the cut: does hiding CutMix's box, with the image's own label, make heads local?",
        with_it=BOXES,
        without_it=(NONE,),
    ),
    Contrast(
        name="the other image",
        question="Is it the other image: does it matter what is in the box, while the label stays the image's own?",
        with_it=(OWN_LABELS,),
        without_it=BOXES,
    ),
    Contrast(
        name="its label",
        question="Is it the label: does it matter that the pasted image's label counts too?",
        with_it=(CUTMIX,),
        without_it=(OWN_LABELS,),
    ),
    Contrast(
        name="a label without its image",
        question="Is it the label alone: does a second label matter where nothing of its image is seen?",
        with_it=BOXES_WITH_LABELS,
        without_it=BOXES,
    ),
    Contrast(
        name="the mix without a cut",
        question="Is it the mix: do two images and two labels make heads local without a cut (Mixup)?",
        with_it=("Mixup",),
        without_it=(NONE,),
    ),
    Contrast(
        name="boxes across patches",
        question="Does the box have to cut through the model's patches?",
        with_it=(CUTMIX,),
        without_it=("Patch-aligned CutMix",),
    ),
    Contrast(
        name="a sharp edge",
        question="Does the box's edge have to be sharp?",
        with_it=(CUTMIX,),
        without_it=("Feathered CutMix",),
    ),
    Contrast(
        name="CutOut",
        question="Does CutOut do it too?",
        with_it=("CutOut",),
        without_it=(NONE,),
    ),
    Contrast(
        name="random erasing",
        question="Does random erasing do it too?",
        with_it=("Random erasing",),
        without_it=(NONE,),
    ),
    Contrast(
        name="shuffled tiles",
        question="Does destroying what is global do it, with nothing hidden or mixed (tile shuffle)?",
        with_it=("Tile shuffle",),
        without_it=(NONE,),
    ),
)
ALL = (WHOLE, *CONTRASTS)
_ADD_UP = "The cut, the other image and its label add up to what CutMix does."


def contrast_table(results: StudyResults, asked: Sequence[Contrast] = ALL, about: Sequence[str] = (_ADD_UP,)) -> Table:
    """Every contrast on locality, focus and accuracy; those whose conditions have runs."""
    runs = with_early_layers(results)
    rows, shown = [], []
    responses = responses_of(results)
    fits = {response: condition_means(runs, response) for response in responses}
    for contrast in asked:
        try:
            found = {response: fit.estimate(contrast.weights) for response, fit in fits.items()}
        except InputError:
            continue
        rows += [_row(results, contrast, response, estimate) for response, estimate in found.items()]
        cells = {
            title: found[response].in_words(scale=scale, digits=digits)
            for response, (title, scale, digits) in responses.items()
        }
        shown.append({"what": contrast.name, "contrast": contrast.in_words, **cells})
    if not rows:
        raise InputError("no two conditions that it compares have a run yet")
    return Table(
        name="contrasts",
        title=f"{results.name}: the cut, the mix and the label",
        numbers=pd.DataFrame(rows),
        shown=pd.DataFrame(shown),
        notes=(
            " ".join((*about, "Negative: nearer, more focused.")),
            *share_notes(results),
            f"Early layers: the mean over the heads of the first {EARLY_LAYERS}.",
            POOLED,
        ),
    )


def _row(results: StudyResults, contrast: Contrast, response: str, estimate: Estimate) -> dict[str, object]:
    numbers = {"estimate": estimate.value, "low": estimate.low, "high": estimate.high, "scale": results.scale}
    return {"name": contrast.name, "contrast": contrast.in_words, "response": response, **numbers}


def fit_of(results: StudyResults, response: str = "min_mad") -> LeastSquares:
    return condition_means(results.runs, response)


def _judge(contrast: Contrast, results: StudyResults) -> Finding:
    fit = fit_of(results)
    n = int(results.runs["seed"].nunique())
    return judge_part(fit.estimate(contrast.weights), fit.estimate(WHOLE.weights), n=n)


def _claim(contrast: Contrast) -> Claim:
    return Claim(
        id=contrast.name,
        text=contrast.question,
        source=f"min MAD; {contrast.in_words}",
        rule=PART_OF_WHOLE,
        needs=tuple(dict.fromkeys((*contrast.with_it, *contrast.without_it, CUTMIX, NONE))),
        across_seeds=True,
        judge=partial(_judge, contrast),
    )


MIXING_QUESTIONS = tuple(_claim(contrast) for contrast in CONTRASTS)
