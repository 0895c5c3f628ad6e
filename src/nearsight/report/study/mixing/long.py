"""Which part of CutMix, long enough: what is asked of `mixing-long-cifar100`, written down before its runs."""

from functools import partial

from nearsight.errors import InputError
from nearsight.report.study.claim import Claim
from nearsight.report.study.measures import shared_seeds
from nearsight.report.study.mixing.contrasts import CUTMIX, NONE, OWN_LABELS, WHOLE, Contrast, contrast_table, fit_of
from nearsight.report.study.mixing.figure import contrasts
from nearsight.report.study.questions import SIGN, judge_sign
from nearsight.report.study.rules import Finding
from nearsight.study.results import StudyResults

LONG_SEEDS = 6
"""Fewer were planned to be shown, not judged."""
LONG_CONTRASTS = (
    Contrast(
        name=WHOLE.name,
        question="Does CutMix make the most local head look nearer?",
        with_it=(CUTMIX,),
        without_it=(NONE,),
    ),
    Contrast(
        name="CutOut or CutMix",
        question="Does CutOut bring it nearer than CutMix does?",
        with_it=("CutOut",),
        without_it=(CUTMIX,),
    ),
    Contrast(
        name="CutMix without its label",
        question="Does CutMix take it farther away where the label stays the image's own?",
        with_it=(OWN_LABELS,),
        without_it=(NONE,),
        sign=1,
    ),
    Contrast(
        name="leaving out its label",
        question="Is it farther away with CutMix of the image's own label than with CutMix?",
        with_it=(OWN_LABELS,),
        without_it=(CUTMIX,),
        sign=1,
    ),
    Contrast(
        name="a mean box",
        question="Does hiding CutMix's box, with the image's own label, bring it nearer?",
        with_it=("Mean box",),
        without_it=(NONE,),
    ),
    Contrast(
        name="a label without its image",
        question="Does a second label bring it nearer where nothing of its image is seen?",
        with_it=("Mean box, mixed labels",),
        without_it=("Mean box",),
    ),
    Contrast(
        name="the mix without a cut",
        question="Does Mixup bring it nearer?",
        with_it=("Mixup",),
        without_it=(NONE,),
    ),
    Contrast(
        name="the label × what is in the box",
        question="Does the second label do more where its image is seen?",
        with_it=(CUTMIX, "Mean box"),
        without_it=(OWN_LABELS, "Mean box, mixed labels"),
        of_sums=True,
    ),
)


def _judge(contrast: Contrast, results: StudyResults) -> Finding:
    words = fit_of(results).estimate(contrast.weights).in_words()
    n = len(shared_seeds(results, *contrast.weights))
    if n < LONG_SEEDS:
        raise InputError(f"{words} with {n} of {LONG_SEEDS} seeds; judged when all are there")
    return judge_sign(fit_of(results).estimate(contrast.weights), sign=contrast.sign, words=words, n=n)


def _claim(contrast: Contrast) -> Claim:
    return Claim(
        id=contrast.name,
        text=contrast.question,
        source=f"min MAD; {contrast.in_words}",
        rule=SIGN,
        needs=tuple(contrast.weights),
        across_seeds=True,
        judge=partial(_judge, contrast),
    )


LONG_QUESTIONS = tuple(_claim(contrast) for contrast in LONG_CONTRASTS)
long_contrast_table = partial(contrast_table, asked=LONG_CONTRASTS, about=())
long_contrasts = partial(contrasts, asked=LONG_CONTRASTS, about="")
