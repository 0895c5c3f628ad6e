"""What of CutMix makes attention local: the cut, the mix, or the label?

Its box without the other image, the other image without a box, its label without its image and its image without its
label. All are applied with the same probability, the boxes drawn by the same law. CutMix, its relatives and Mixup draw
once per mini-batch, as in S1; what hides or shuffles without mixing draws for every image, as its authors do.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from nearsight.augment import CutFill, CutMix, CutOut, Mixup, RandomErasing, TileShuffle
from nearsight.errors import InputError
from nearsight.report.claims import Claim, shared_seeds
from nearsight.report.contrasts import POOLED, Contrast, between, contrast_figure, contrast_table, of_conditions
from nearsight.report.marks import Drawing
from nearsight.report.responses import EARLY_LAYERS, share_notes
from nearsight.report.rules import PART_OF_WHOLE, SIGN_OF_FIT, Finding, judge_part, judge_sign
from nearsight.report.studies import report_on
from nearsight.report.tables import Row, Table, difference_in_words
from nearsight.study import OFF, Study
from nearsight.study.recipes import recipe
from nearsight.study.results import StudyResults
from nearsight.train.recipes import compact_cifar100, trained_for

_EPOCHS, _LONG_EPOCHS = 60, 200
_EPOCHS_BETWEEN = 10
NONE, CUTMIX, OWN_LABELS = "None of these", "CutMix", "CutMix, own labels"
_ASKED_AGAIN = (NONE, "Mixup", "CutOut", "Mean box", "Mean box, mixed labels", OWN_LABELS, CUTMIX)


def _mixing(p: float) -> Mapping[str, Any]:
    return {
        NONE: OFF,
        # λ as CutMix draws it.
        "Mixup": Mixup(p=p, alpha=1.0),
        "CutOut": CutOut(p=p, size=16),
        "Random erasing": RandomErasing(p=p),
        "Noise box": CutFill(p=p, noise=1.0),
        "Noise box, mixed labels": CutFill(p=p, noise=1.0, mix_labels=True),
        "Mean box": CutFill(p=p, noise=0.0),
        "Mean box, mixed labels": CutFill(p=p, noise=0.0, mix_labels=True),
        "CutMix, own labels": CutMix(p=p, mix_labels=False),
        # The model's patches: boxes of whole tokens.
        "Patch-aligned CutMix": CutMix(p=p, patch=4),
        "Feathered CutMix": CutMix(p=p, feather=2.0),
        "Tile shuffle": TileShuffle(p=p, tile=8),
        # Last, since figures compare the last level with the first.
        "CutMix": CutMix(p=p),
    }


@recipe("mixing-cifar100")
def mixing_cifar100(*, seeds: int = 2) -> Study:
    """Is it the cut, the mix, or the label? Thirteen ways to hide and mix (S1 §7, future work v)

    Run     nearsight study run mixing-cifar100
    Cost    26 cells of 60 epochs of 40,000 images (62 M); needs a GPU
    Result  the label, perhaps the cut, not the other image: see results/mixing-cifar100
    """
    return Study(trained_for(compact_cifar100("baseline"), _EPOCHS), factors={"mixing": _mixing(0.5)}, seeds=seeds)


@recipe("mixing-long-cifar100")
def mixing_long_cifar100(*, seeds: int = 6) -> Study:
    """Which part of CutMix, long enough: seven of the thirteen ways, in every batch (S1 §7, future work v)

    At 60 epochs CutMix has done a part of what it will do. Here all train for 200, and every head is measured on 512
    test images at the start and after every tenth epoch.

    Run     nearsight study run mixing-long-cifar100
    Cost    42 cells of 200 epochs of 40,000 images (336 M), and 0.5 M measured; 46 minutes of an H200
    Result  all six make heads more local, CutMix the most, the cut alone less: see results/mixing-long-cifar100
    """
    base = dataclasses.replace(trained_for(compact_cifar100("baseline"), _LONG_EPOCHS), measure_every=_EPOCHS_BETWEEN)
    levels = _mixing(1.0)
    return Study(base, factors={"mixing": {label: levels[label] for label in _ASKED_AGAIN}}, seeds=seeds)


NOISE_BOX, MEAN_BOX = BOXES = ("Noise box", "Mean box")
NOISE_BOX_WITH_LABELS, MEAN_BOX_WITH_LABELS = BOXES_WITH_LABELS = ("Noise box, mixed labels", "Mean box, mixed labels")
WHOLE = between("CutMix", "Does CutMix make the most local head more local (lower MAD)?", [CUTMIX], [NONE])
CONTRASTS = (
    # The first three add up to what CutMix does.
    between(
        "the cut",
        "Is it the cut: does hiding CutMix's box, with the image's own label, make heads local?",
        BOXES,
        [NONE],
    ),
    between(
        "the other image",
        "Is it the other image: does it matter what is in the box, while the label stays the image's own?",
        [OWN_LABELS],
        BOXES,
    ),
    between(
        "its label",
        "Is it the label: does it matter that the pasted image's label counts too?",
        [CUTMIX],
        [OWN_LABELS],
    ),
    # What a second label does differs between the two boxes, so that it is asked of each, and of their difference.
    between(
        "a label in a mean box",
        "Is it the label alone: does a second label matter where a box of the mean colour hides its image?",
        [MEAN_BOX_WITH_LABELS],
        [MEAN_BOX],
    ),
    between(
        "a label in a noise box",
        "Is it the label alone: does it matter where a box of noise hides its image?",
        [NOISE_BOX_WITH_LABELS],
        [NOISE_BOX],
    ),
    between(
        "the label × the box",
        "Does a second label do more with a box of the mean colour than with one of noise?",
        [MEAN_BOX_WITH_LABELS, NOISE_BOX],
        [MEAN_BOX, NOISE_BOX_WITH_LABELS],
        of_sums=True,
    ),
    between(
        "the mix without a cut",
        "Is it the mix: do two images and two labels make heads local without a cut (Mixup)?",
        ["Mixup"],
        [NONE],
    ),
    between(
        "boxes across patches",
        "Does the box have to cut through the model's patches?",
        [CUTMIX],
        ["Patch-aligned CutMix"],
    ),
    between("a sharp edge", "Does the box's edge have to be sharp?", [CUTMIX], ["Feathered CutMix"]),
    between("CutOut", "Does CutOut make heads local too?", ["CutOut"], [NONE]),
    between("random erasing", "Does random erasing make heads local too?", ["Random erasing"], [NONE]),
    between(
        "shuffled tiles",
        "Does destroying global structure make heads local, with nothing hidden or mixed (tile shuffle)?",
        ["Tile shuffle"],
        [NONE],
    ),
)
POOLED_LABEL = between("a label without its image", "", BOXES_WITH_LABELS, BOXES)
"""Over both boxes: a mean of two different effects, in the table alone."""
LONG_SEEDS = 6
"""With fewer, the plan was to show the numbers and not to judge them."""
LONG_CONTRASTS = (
    WHOLE,
    between("CutOut or CutMix", "Does CutOut make it more local than CutMix does?", ["CutOut"], [CUTMIX]),
    between(
        "CutMix without its label",
        "Does CutMix make it less local where the label stays the image's own?",
        [OWN_LABELS],
        [NONE],
        sign=1,
    ),
    between(
        "leaving out its label",
        "Is it less local under CutMix with the image's own label than under CutMix?",
        [OWN_LABELS],
        [CUTMIX],
        sign=1,
    ),
    between(
        "a mean box",
        "Does hiding CutMix's box, with the image's own label, make it more local?",
        ["Mean box"],
        [NONE],
    ),
    between(
        "a label without its image",
        "Does a second label make it more local where nothing of its image is seen?",
        ["Mean box, mixed labels"],
        ["Mean box"],
    ),
    between("the mix without a cut", "Does Mixup make it more local?", ["Mixup"], [NONE]),
    between(
        "the label × what is in the box",
        "Does the second label do more where its image is seen?",
        [CUTMIX, "Mean box"],
        [OWN_LABELS, "Mean box, mixed labels"],
        of_sums=True,
    ),
)


def _table(contrasts: Sequence[Contrast], about: str, results: StudyResults) -> Table:
    return contrast_table(
        results,
        contrasts,
        title="the cut, the mix and the label",
        label=lambda contrast: Row().both("name", contrast.name, "what").both("contrast", contrast.words),
        notes=(
            f"{about}Negative: more local, more focused.",
            *share_notes(results),
            f"Early layers: the mean over the heads of the first {EARLY_LAYERS}.",
            POOLED,
        ),
    )


def _figure(contrasts: Sequence[Contrast], about: str, results: StudyResults) -> Drawing:
    caption = f"What each part of CutMix changes in the distance of the most local head{about}."
    return contrast_figure(results, contrasts, caption=caption, reference=WHOLE.name)


def _question(contrast: Contrast, rule: str, judge: Callable[[Contrast, StudyResults], Finding], *needs: str) -> Claim:
    return Claim(
        id=contrast.name,
        text=contrast.text,
        source=f"min MAD; {contrast.words}",
        rule=rule,
        needs=tuple(dict.fromkeys((*contrast.weights, *needs))),
        across_seeds=True,
        judge=partial(judge, contrast),
    )


def _judge_part(contrast: Contrast, results: StudyResults) -> Finding:
    fit = of_conditions(results, "min_mad")
    n = int(results.runs["seed"].nunique())
    return judge_part(fit.estimate(contrast.weights), fit.estimate(WHOLE.weights), n=n)


def _judge_when_all_are_there(contrast: Contrast, results: StudyResults) -> Finding:
    estimate = of_conditions(results, "min_mad").estimate(contrast.weights)
    n = len(shared_seeds(results.runs, *contrast.weights))
    if n < LONG_SEEDS:
        raise InputError(
            f"{difference_in_words(estimate)} with {n} of {LONG_SEEDS} seeds; judged when all are complete"
        )
    return judge_sign(dataclasses.replace(estimate, n=n), sign=contrast.sign, words=difference_in_words(estimate))


_ALL = (WHOLE, *CONTRASTS)
report_on(
    "mixing-cifar100",
    claims=[_question(contrast, PART_OF_WHOLE, _judge_part, CUTMIX, NONE) for contrast in CONTRASTS],
    tables=[
        partial(_table, (*_ALL, POOLED_LABEL), "The cut, the other image and its label add up to what CutMix does. ")
    ],
    figures={
        "mixing-contrasts": partial(
            _figure, _ALL, ": the cut, the other image and its label add up to CutMix itself (first row)"
        )
    },
)
report_on(
    "mixing-long-cifar100",
    claims=[_question(contrast, SIGN_OF_FIT, _judge_when_all_are_there) for contrast in LONG_CONTRASTS],
    tables=[partial(_table, LONG_CONTRASTS, "")],
    figures={"mixing-contrasts": partial(_figure, LONG_CONTRASTS, "")},
)
