"""Which way to make attention local pays? S2's bias beside seven others, in one model and one training.

From scratch, so that every inducer takes effect from the first step, as published: gates begin at 1, tables at 0.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import pandas as pd

from nearsight.augment import CutMix
from nearsight.errors import InputError
from nearsight.papers.locat.cost import SECONDS, gain_figure, gain_table, gains, with_times
from nearsight.papers.locat.measured import layer_profiles, layers_table, locality_table
from nearsight.report.claims import OURS, Claim
from nearsight.report.contrasts import Contrast, between, contrast_figure, contrast_table, sign_questions
from nearsight.report.marks import Drawing
from nearsight.report.probe_tables import difference
from nearsight.report.probes import ProbeResults, title_of
from nearsight.report.responses import of_shared_seeds
from nearsight.report.rules import SIGN, Finding, judge_sign
from nearsight.report.studies import report_on
from nearsight.report.tables import Table, probability, rounded
from nearsight.study import OFF, Study
from nearsight.study.recipes import recipe
from nearsight.study.results import StudyResults
from nearsight.study.statistics import mean_interval
from nearsight.study.statistics.rank_correlation import rank_correlation_within
from nearsight.train.recipes import compact_cifar100, compact_tiny_imagenet, trained_for

_EPOCHS, _TINY_EPOCHS = 60, 40
_PLAIN, _MASK, _MIXED = "ViT", "Neighbourhood", " + CutMix"
WAYS: Mapping[str, Any] = {
    "2-D ALiBi": {"locality": ("alibi2d:gate=1.0",)},
    "Fixed Gaussian": {"locality": ("gaussian:gate=1.0,width=1.5",)},
    "Relative positions": {"locality": ("relpos",)},
    # A quarter of the side of an 8×8 grid: 13 of 64 patches.
    _MASK: {"locality": ("neighborhood:radius=2.0",)},
    "GPSA": {"locality": ("gpsa",)},
    "LSA": {"locality": ("lsa",)},
    "Entmax-1.5": {"locality": ("entmax15",)},
    "GAug": {"gaug": True},  # last, as a study's ends are compared head by head
}
"""Eight ways, each with the settings of its paper or (widths and radii) with a middling one."""
# One of each kind, chosen before any was run: a fixed bias, a learned one, a mask, and one that queries predict.
_FOUR = ("2-D ALiBi", "Relative positions", _MASK, "GAug")


@recipe("inducers-cifar100")
def inducers_cifar100(*, seeds: int = 3) -> Study:
    """Which way to make attention local pays: eight inducers × CutMix (S2 and seven others)

    Run     nearsight study run inducers-cifar100
    Cost    54 cells of at most 60 epochs of 40,000 images (129 M); needs a GPU
    Result  not run yet; its plan is in results/inducers-cifar100
    """
    ways: dict[str, Any] = {_PLAIN: {}, **WAYS}
    mixed = {name + _MIXED: {**settings, "cutmix": CutMix(p=0.5)} for name, settings in ways.items()}
    levels = {_PLAIN: OFF, **mixed, **WAYS}
    return Study(trained_for(compact_cifar100("baseline"), _EPOCHS), factors={"model": levels}, seeds=seeds)


@recipe("inducers-tiny-imagenet")
def inducers_tiny_imagenet(*, seeds: int = 3) -> Study:
    """Which of four ways to make attention local pays on Tiny-ImageNet (S2 and three others)

    Run     nearsight study run inducers-tiny-imagenet
    Cost    15 cells of at most 40 epochs of 80,000 images (48 M); needs a GPU
    Result  not run yet; its plan is in results/inducers-tiny-imagenet
    """
    levels = {_PLAIN: OFF, **{name: settings for name, settings in WAYS.items() if name in _FOUR}}
    return Study(trained_for(compact_tiny_imagenet("baseline"), _TINY_EPOCHS), factors={"model": levels}, seeds=seeds)


def _slug(way: str) -> str:
    return way.lower().replace(" × ", "-").replace(" ", "-").replace(".", "-")


def _conditions(study: Study) -> list[str]:
    return list(study.labels["model"])


def _contrasts(study: Study, question: str, sign: int) -> list[Contrast]:
    """Each way against none, with CutMix and without where there are both."""
    names = _conditions(study)
    mixes = [mix for mix in ("", _MIXED) if _PLAIN + mix in names]
    return [
        between(
            way,
            question.format(way),
            [way + mix for mix in mixes],
            [_PLAIN + mix for mix in mixes],
            sign=sign,
        )
        for way in WAYS
        if way in names
    ]


def _asked_of(contrasts: Iterable[Contrast], response: str, id: str, family: str) -> list[Claim]:
    contrasts = list(contrasts)
    claims = sign_questions(contrasts, response)
    return [
        replace(
            claim,
            id=f"{_slug(contrast.name)}-{id}",
            family=family,
            needs=tuple(contrast.weights),
            across_seeds=True,
        )
        for claim, contrast in zip(claims, contrasts, strict=True)
    ]


def _beside_a_mask(text: str, sign: int) -> list[Contrast]:
    """What CutMix changes with a mask minus what it changes without one."""
    return [between("CutMix × mask", text, [_MASK + _MIXED, _PLAIN], [_MASK, _PLAIN + _MIXED], sign=sign, of_sums=True)]


_SU = "Su (arXiv 2605.23868) says that locality alone does not tell dense quality"


def _ranks_rule(score: str, alike: str) -> str:
    return (
        f"*Rank correlation* of the smallest MAD with {score} among {alike}: negative where more local models are the "
        "better ones, tested by permutations within them (two-sided)."
    )


def _judge_ranks(seeds: int, column: str, results: StudyResults) -> Finding:
    """Yes: the more local, the better."""
    if not {"min_mad", column} <= set(results.runs):
        raise InputError(f"the models have no {column} beside a distance: they are of no study")
    runs = results.runs.dropna(subset=["min_mad", column])
    if (n := int(runs["seed"].nunique())) < seeds:
        raise InputError(f"{n} of {seeds} seeds; judged when all are complete")
    blocks = [f"{seed} {name.endswith(_MIXED)}" for seed, name in zip(runs["seed"], runs["condition"], strict=True)]
    found = rank_correlation_within(runs["min_mad"], runs[column], blocks)
    p, p_against = (found.p if sign * found.value > 0 else 1.0 for sign in (-1, 1))
    words = f"rank correlation {rounded(found.value, 2, signed=True)}, {found.n} runs, p = {probability(found.p)}"
    return Finding(ours=words, value=found.value, n=n, p=p, p_against=p_against)


_MORE_LOCAL = "Is the most local head more local with {}?"


def questions(study: Study) -> tuple[Claim, ...]:
    """All that is asked of the runs."""
    local, accurate = _contrasts(study, _MORE_LOCAL, -1), _contrasts(study, "Is test accuracy higher with {}?", 1)
    claims = _asked_of(local, "min_mad", "mad", "locality") + _asked_of(accurate, "test_acc", "accuracy", "accuracy")
    if _PLAIN + _MIXED in _conditions(study):
        less_local = "Does CutMix lower the smallest MAD less where a mask already makes attention local?"
        less_accurate = "Does CutMix raise accuracy less where a mask already makes attention local?"
        family = "CutMix beside a mask"
        claims += _asked_of(_beside_a_mask(less_local, 1), "min_mad", "mad", family)
        claims += _asked_of(_beside_a_mask(less_accurate, -1), "test_acc", "accuracy", family)
    seeds = len(study.seed_list)
    claims.append(
        Claim(
            id="local-and-accurate",
            text="Are the more local models the more accurate ones?",
            source=f"{OURS}; {_SU}",
            rule=_ranks_rule("test accuracy", "the models of one seed with the same CutMix"),
            needs=tuple(_conditions(study)),
            family="does locality explain it",
            judge=partial(_judge_ranks, seeds, "test_acc"),
        )
    )
    return tuple(claims)


_DENSE = ("segment_miou", "retrieve_miou")


def dense_questions(probed: ProbeResults) -> list[tuple[str, Claim]]:
    """Of frozen features, by the measure that answers each: is a way better than none, and does distance tell which?"""
    better = [
        (
            measure,
            Claim(
                id=f"inducers-{_slug(way)}-{measure}",
                text=f"Are features of {way} better than those of the plain ViT: {title_of(measure)}?",
                source=OURS,
                rule=SIGN,
                needs=(_PLAIN, way),
                family=f"inducers: {title_of(measure)}",
                judge=partial(_judge_dense, probed, measure, way),
            ),
        )
        for measure in _DENSE
        for way in WAYS
    ]
    explained = [
        (
            measure,
            Claim(
                id=f"inducers-local-and-{measure}",
                text=f"Are the more local models those with the better features: {title_of(measure)}?",
                source=f"{OURS}; {_SU}",
                rule=_ranks_rule(title_of(measure), "the models of one seed with the same CutMix"),
                needs=(_PLAIN, *_FOUR),
                family="inducers: does locality explain it",
                judge=partial(_judge_ranks, 3, measure),
            ),
        )
        for measure in _DENSE
    ]
    return better + explained


def _judge_dense(probed: ProbeResults, measure: str, way: str, results: StudyResults) -> Finding:
    if measure not in results.runs:
        raise InputError(f"no model has a {title_of(measure)}")
    values = of_shared_seeds(results.runs, measure, (_PLAIN, way), title_of(measure))
    words = f"{difference(probed, way, _PLAIN, measure).in_words()} points"
    return judge_sign(mean_interval(values[way] - values[_PLAIN]), sign=1, words=words)


def _with_times(results: StudyResults) -> dict[str, pd.DataFrame]:
    """Gains in accuracy, without CutMix and with it."""
    runs = with_times(results)
    titles = {"": "test accuracy", _MIXED: f"test accuracy,{_MIXED}"}
    known = set(runs["condition"])
    return {
        title: gains(runs, "test_acc", _PLAIN + mix, [way + mix for way in WAYS])
        for mix, title in titles.items()
        if _PLAIN + mix in known
    }


def _with_features(probed: ProbeResults) -> tuple[StudyResults, dict[str, pd.DataFrame]]:
    """Gains in mIoU; refused where no way but LocAt's own was probed, or no times are known."""
    results = probed.as_study()
    measures = [measure for measure in _DENSE if measure in results.runs]
    if SECONDS not in results.runs or not measures or not {*WAYS} & {*results.runs["condition"]}:
        raise InputError("no ways to make attention local were probed with their study")
    return results, {title_of(one): gains(results.runs, one, _PLAIN, list(WAYS)) for one in measures}


def gains_table(results: StudyResults | ProbeResults) -> Table:
    """Of a study in accuracy, of its probes in mIoU."""
    return gain_table(*_panels(results))


def gains_figure(results: StudyResults | ProbeResults) -> Drawing:
    """Likewise."""
    return gain_figure(*_panels(results))


def _panels(results: StudyResults | ProbeResults) -> tuple[StudyResults, dict[str, pd.DataFrame]]:
    return _with_features(results) if isinstance(results, ProbeResults) else (results, _with_times(results))


_CAPTION = "What each way to make attention local changes; where there are runs with CutMix too, on average over both."


def _report(name: str, study: Study) -> None:
    contrasts = _contrasts(study, _MORE_LOCAL, -1)
    report_on(
        name,
        claims=questions(study),
        tables=[
            locality_table,
            layers_table,
            gains_table,
            partial(contrast_table, contrasts=contrasts, title="what each way changes"),
        ],
        figures={
            "inducers": partial(contrast_figure, contrasts=contrasts, caption=_CAPTION),
            "cost": gains_figure,
            "layers": layer_profiles({name: name for name in _conditions(study) if _MIXED not in name}),
        },
        is_about_locality=True,
    )


for _name, _make in (("inducers-cifar100", inducers_cifar100), ("inducers-tiny-imagenet", inducers_tiny_imagenet)):
    _report(_name, _make())
