"""The factorial of record: all train equally long, with CutMix in every batch or without.

An ablation stops early, and CutMix lets a run go on several times as long; some of its runs have an own-patch head and
others none, so that one spread for all conditions is wrong. So here nothing is stopped, every effect is a contrast
within a seed, tested over seeds, and every question about the most local head is asked again without own-patch heads.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import pandas as pd

from nearsight.augment import Augmentation, AutoAugment, ColorJitter, CutMix
from nearsight.errors import InputError
from nearsight.metrics import next_patch_distance
from nearsight.papers.protocol import numbers as s1
from nearsight.papers.protocol.ablation import ablation
from nearsight.papers.protocol.course import LASTING, LOCAL, courses
from nearsight.papers.protocol.emergence import course_table
from nearsight.papers.protocol.emergence_figures import over_epochs
from nearsight.papers.protocol.own_patch import every_head, judge_often, own_patch_table
from nearsight.papers.protocol.own_patch_model import entropy_by_distance, own_patch_model
from nearsight.report.claims import OURS, Claim
from nearsight.report.conditions import missing_notes, noted
from nearsight.report.contrasts import Contrast
from nearsight.report.marks import Drawing, ForestRow, dots_and_bars, forest
from nearsight.report.own_patch import HEADS, OTHERS, OWN_PATCH, grid_of, with_own_patch
from nearsight.report.responses import EARLY, EARLY_LAYERS, Measure, of_shared_seeds, with_early_layers
from nearsight.report.rules import (
    LEANING,
    NO_EFFECT_RULE,
    RATES,
    SIGN,
    Finding,
    judge_comparable,
    judge_no_effect,
    judge_sign,
    within_rule,
)
from nearsight.report.studies import report_on
from nearsight.report.tables import Row, Table, probability, rounded, share
from nearsight.study import OFF, Study
from nearsight.study.recipes import StudyRecipe, recipe
from nearsight.study.results import StudyResults
from nearsight.study.statistics import Estimate, mean_interval
from nearsight.study.statistics.intervals import ACCURACY_MARGIN
from nearsight.study.statistics.rank_correlation import rank_correlation_within
from nearsight.train import RunConfig
from nearsight.train.recipes import compact_cifar10, compact_cifar100, compact_tiny_imagenet, trained_for

_EPOCHS_BETWEEN = 10
_CUTMIX = CutMix(p=1.0)
SEEDS, FEWER_SEEDS = 5, 3
"""With fewer than a recipe has by default, the plan is to show the numbers and not to judge them."""


@recipe("factorial-cifar100")
def factorial_cifar100(*, seeds: int = SEEDS) -> Study:
    """The factorial of record: CutMix in every batch × AutoAugment × LabelSmoothing, all equally long (S1, Table 2)

    That label smoothing does nothing is not shown by the ablations, so it is a factor. Every head is measured on 512
    test images at the start and after every tenth epoch. Seeds 0 and 1 come first, 2 to 4 later, whatever these say.

    Run     nearsight study run factorial-cifar100
    Cost    40 cells of 300 epochs of 40,000 images (480 M), and 0.6 M measured; about an hour of an H200
    Result  not run yet; its plan is in results/factorial-cifar100
    """
    return ablation(_long(compact_cifar100("baseline"), 300), colour=AutoAugment(), cutmix=_CUTMIX, seeds=seeds)


@recipe("factorial-cifar10")
def factorial_cifar10(*, seeds: int = SEEDS) -> Study:
    """The factorial of record on CIFAR-10: CutMix in every batch × AutoAugment (S1 §7, future work ii)

    Run     nearsight study run factorial-cifar10
    Cost    20 cells of 150 epochs of 40,000 images (120 M), and 0.2 M measured; needs a GPU
    Result  not run yet; its plan is in results/factorial-cifar10
    """
    return _of_two(_long(compact_cifar10("baseline"), 150), AutoAugment(), seeds)


@recipe("factorial-tiny-imagenet")
def factorial_tiny_imagenet(*, seeds: int = FEWER_SEEDS) -> Study:
    """The factorial of record on Tiny-ImageNet: CutMix in every batch × ColorJitter (S1 §7, future work ii)

    Run     nearsight study run factorial-tiny-imagenet
    Cost    12 cells of 80 epochs of 80,000 images (76 M), and 0.1 M measured; needs a GPU
    Result  not run yet; its plan is in results/factorial-tiny-imagenet
    """
    return _of_two(_long(compact_tiny_imagenet("baseline"), 80), ColorJitter(), seeds)


def _long(run: RunConfig, epochs: int) -> RunConfig:
    return dataclasses.replace(trained_for(run, epochs), measure_every=_EPOCHS_BETWEEN)


def _of_two(base: RunConfig, colour: Augmentation, seeds: int) -> Study:
    factors = {"cutmix": (OFF, _CUTMIX), colour.name: (OFF, colour)}
    both = f"{s1.CUTMIX}+{type(colour).__name__}"
    return Study(base, factors=factors, seeds=seeds, ends=(s1.BASELINE, both))


LOCAL_HEADS = "local_heads"
_ACCURACY = "test_acc"


class Asked(NamedTuple):
    """A number of a run that is asked about. Its questions are one family, corrected together."""

    id: str
    title: str
    noun: str
    is_share: bool = False

    @property
    def sign(self) -> int:
        """Of what CutMix is to do: it lowers distances, and raises shares."""
        return 1 if self.is_share else -1

    @property
    def verb(self) -> str:
        return f"{'raise' if self.is_share else 'lower'} {self.noun}"

    @property
    def measure(self) -> Measure:
        return Measure(title=self.title, is_share=self.is_share)


ASKED: Mapping[str, Asked] = {
    "min_mad": Asked("min-mad", "min MAD", "the MAD of the most local head"),
    OTHERS: Asked("others", "min MAD of the others", "the MAD of the most local head other than own-patch heads"),
    EARLY: Asked("early", "MAD, early layers", "the mean MAD of early layers"),
    LOCAL_HEADS: Asked("local", "local heads", "the share of local heads", is_share=True),
    _ACCURACY: Asked("accuracy", "accuracy", "test accuracy", is_share=True),
}
"""By the column of a run."""


def runs_with(results: StudyResults, column: str) -> pd.DataFrame:
    """The runs with one of the columns of `ASKED`."""
    if column in results.runs:
        return results.runs
    if column == EARLY:
        return with_early_layers(results)
    if column == OTHERS:
        return with_own_patch(results)
    local = (results.heads["mad"] < LOCAL).groupby(results.heads["run"]).mean()
    return results.runs.assign(**{LOCAL_HEADS: results.runs["run"].map(local).astype("float64")})


@dataclasses.dataclass(frozen=True)
class Factorial:
    """The effects of a full two-level factorial with CutMix."""

    conditions: Mapping[str, frozenset[str]]
    """Condition → the factors that are on."""
    colour: str
    """What the data set has for AutoAugment, as a factor."""

    @classmethod
    def of(cls, study: Study) -> "Factorial":
        bases = {name: labels[0] for name, labels in study.labels.items()}
        on = {cell.condition: frozenset(cell.levels.items() - bases.items()) for cell in study.cells}
        conditions = {label: frozenset(name for name, _ in levels) for label, levels in on.items()}
        return cls(conditions, list(study.labels)[1])

    @property
    def colour_title(self) -> str:
        return {"autoaugment": s1.AUTOAUGMENT, "colorjitter": s1.COLORJITTER}[self.colour]

    @property
    def has_smoothing(self) -> bool:
        return any("smoothing" in on for on in self.conditions.values())

    def having(self, *parts: str) -> list[str]:
        """The conditions with all of these."""
        return [label for label, on in self.conditions.items() if on.issuperset(parts)]

    def contrast(self, name: str, *parts: str, without: str | None = None) -> Contrast:
        """Of one part: with it minus without. Of two: what one changes with the other minus without that. Both are
        means over the other factors; `without`: among the conditions that lack this."""
        among = {label: on for label, on in self.conditions.items() if without not in on}
        size = 2 ** len(parts) / len(among)
        weights = {label: size * math.prod(1 if part in on else -1 for part in parts) for label, on in among.items()}
        return Contrast(name=name, weights=weights)

    def effects(self) -> dict[str, Contrast]:
        """By their ids."""
        colour = self.colour_title
        found = {
            "cutmix": self.contrast(s1.CUTMIX, "cutmix"),
            "colour": self.contrast(colour, self.colour),
            "colour-without-cutmix": self.contrast(f"{colour} without CutMix", self.colour, without="cutmix"),
            "colour-and-cutmix": self.contrast(f"{colour} × CutMix", self.colour, "cutmix"),
        }
        if self.has_smoothing:
            found["smoothing"] = self.contrast("label smoothing", "smoothing")
            found["smoothing-and-cutmix"] = self.contrast("label smoothing × CutMix", "smoothing", "cutmix")
        return found


def of_seeds(results: StudyResults, contrast: Contrast, column: str) -> "pd.Series[float]":
    """The contrast within every seed that has all its conditions."""
    values = of_shared_seeds(runs_with(results, column), column, list(contrast.weights), ASKED[column].measure.title)
    return values @ pd.Series(contrast.weights)


_NO_EFFECT = f"{NO_EFFECT_RULE} CutMix's is its mean over the other factors, in the same number."
_WITHIN_A_POINT = within_rule(f"{100 * ACCURACY_MARGIN:g} point of accuracy on either side")


def _about(effect: str, contrast: Contrast, column: str) -> tuple[str, str, int] | None:
    """What is asked about an effect on a number: the text, the rule, and the sign of a yes (0: no effect)."""
    asked, part, of_accuracy = ASKED[column], contrast.name.split(" × ")[0], column == _ACCURACY
    none = _WITHIN_A_POINT if of_accuracy else _NO_EFFECT
    match effect:
        case "cutmix" | "colour":
            return f"Does {part} {asked.verb}?", SIGN, asked.sign
        case "smoothing":
            return f"Does {part} leave {asked.noun} as it is?", none, 0
        case "colour-without-cutmix":
            return None if of_accuracy else (f"Does {part} leave {asked.noun} as it is?", none, 0)
        case _ if of_accuracy:  # in earlier runs of 300 epochs two parts gave less than the sum of their gains
            return f"Does CutMix {asked.verb} less with {part} than without?", SIGN, -1
        case "colour-and-cutmix":
            return f"Does CutMix {asked.verb} more with {part} than without?", SIGN, asked.sign
        case _:
            return f"Does {part} leave what CutMix does to {asked.noun} as it is?", none, 0


def _judge_effect(contrast: Contrast, key: Contrast, column: str, sign: int, results: StudyResults) -> Finding:
    if column == OTHERS and not with_own_patch(results)[HEADS].any():
        raise InputError("no run has an own-patch head: the numbers are those of all heads")
    asked = ASKED[column]
    ours, of_cutmix = (mean_interval(of_seeds(results, each, column)) for each in (contrast, key))
    words = asked.measure.in_words(ours, signed=True) + (" points" if asked.is_share else "")
    if sign:
        return judge_sign(ours, sign=sign, words=words)
    return (
        judge_comparable(ours, words=words)
        if column == _ACCURACY
        else judge_no_effect(ours, of_cutmix, key_sign=asked.sign)
    )


_HAZARD = (
    f"{RATES} Here: a head whose distance is below {share(OWN_PATCH)} of that to the next patch, {LASTING} "
    "measurements in a row, at any time of training. The epochs of a run end where that begins."
)


def at_risk(results: StudyResults) -> pd.DataFrame:
    """The runs, with whether a head turned to its own patch, and how many epochs went by until then."""
    step = next_patch_distance(grid_of(results))
    turns = {(course.condition, course.seed): (course.first_own_patch(step), course) for course in courses(results)}
    rows = [
        {
            **{"condition": condition, "seed": seed, HEADS: int(turn is not None)},
            "epochs": float(turn.epoch if turn else course.epochs_E[-1]),
        }
        for (condition, seed), (turn, course) in turns.items()
    ]
    return pd.DataFrame(rows)


def _judge_hazard(having: Sequence[str], whose: str, results: StudyResults) -> Finding:
    runs = at_risk(results)
    return judge_often(runs, runs["condition"].isin(having), (f"with {whose}", "of the others"))


def _prediction_rule(before: str, later: str) -> str:
    return (
        f"*Prediction.* The rank correlation, among the runs of a condition, of {before} with {later}: its sign is "
        "the one asked for, or the opposite one, by permutations within conditions (two-sided)."
    )


def _at_epoch(results: StudyResults, epoch: int) -> pd.DataFrame:
    """The runs with what they were like after so many epochs: `min_then`, `early_then` and `accuracy_then`."""
    course = results.course[results.course["epoch"] == epoch]
    if course.empty:
        raise InputError(f"no run was measured after epoch {epoch}")
    smallest = course.groupby("run")["mad"].min()
    early = course[course["layer"] < EARLY_LAYERS].groupby("run")["mad"].mean()
    accuracy = results.history[results.history["epoch"] == epoch].set_index("run")["val_acc"]
    then = {"min_then": smallest, "early_then": early, "accuracy_then": accuracy}
    runs = results.runs.assign(**{name: results.runs["run"].map(values) for name, values in then.items()})
    return runs.dropna(subset=list(then))


def _judge_prediction(before: str, later: str, epoch: int, results: StudyResults) -> Finding:
    """Yes: the two go together with a negative sign, as a small distance and a high accuracy do."""
    runs = _at_epoch(results, epoch)
    found = rank_correlation_within(runs[before], runs[later], list(runs["condition"]))
    if math.isnan(found.value):
        raise InputError(f"no condition has runs to compare, or all are equal: {found.n} runs")
    p, p_against = (found.p if sign * found.value > 0 else 1.0 for sign in (-1, 1))
    words = f"rank correlation {rounded(found.value, 2, signed=True)} within conditions, {found.n} runs, "
    return Finding(
        ours=f"{words}p = {probability(found.p)}",
        value=found.value,
        n=int(runs["seed"].nunique()),
        p=p,
        p_against=p_against,
        leans=p <= 2 * LEANING,
    )


def _when_all_are_there(judge: Callable[[StudyResults], Finding], seeds: int, results: StudyResults) -> Finding:
    found, n = judge(results), int(results.runs["seed"].nunique())
    if n < seeds:
        raise InputError(f"{found.ours}; with {n} of {seeds} seeds, judged when all are complete")
    return found


def questions(design: Factorial, *, seeds: int, epoch: int) -> tuple[Claim, ...]:
    """All that is asked of such a study; `epoch`: after which locality is to predict accuracy, and the reverse."""
    found: list[Claim] = []

    def ask(id: str, text: str, rule: str, family: str, judge: Callable[[StudyResults], Finding]) -> None:
        judge_all_seeds = partial(_when_all_are_there, judge, seeds)
        about = {"source": OURS, "needs": tuple(design.conditions), "family": family}
        found.append(Claim(id=id, text=text, rule=rule, judge=judge_all_seeds, **about))  # type: ignore[arg-type]

    effects, colour = design.effects(), design.colour_title
    for column, asked in ASKED.items():
        for effect, contrast in effects.items():
            if about := _about(effect, contrast, column):
                text, rule, sign = about
                judge = partial(_judge_effect, contrast, effects["cutmix"], column, sign)
                ask(f"{effect}-{asked.id}", text, rule, asked.title, judge)
    for id, whose, parts in (
        ("cutmix", s1.CUTMIX, ["cutmix"]),
        ("colour", colour, [design.colour]),
        *([("smoothing", "label smoothing", ["smoothing"])] if design.has_smoothing else []),
        ("both", f"both CutMix and {colour}", ["cutmix", design.colour]),
    ):
        text = f"Do heads turn to their own patch more often with {whose}?"
        ask(f"own-patch-{id}", text, _HAZARD, "own patch", partial(_judge_hazard, design.having(*parts), whose))
    then = f"at epoch {epoch}"
    local, early, accurate = f"the smallest MAD {then}", f"the mean MAD of early layers {then}", "test accuracy"
    for id, before, later, text, rule in (
        (
            *("local-then-accurate", "min_then", _ACCURACY),
            f"Are runs of a condition with a more local head {then} more accurate in the end?",
            _prediction_rule(local, accurate),
        ),
        (
            *("early-then-accurate", "early_then", _ACCURACY),
            f"Are runs of a condition with a lower mean MAD of early layers {then} more accurate in the end?",
            _prediction_rule(early, accurate),
        ),
        (
            *("accurate-then-local", "accuracy_then", "min_mad"),
            f"Do runs of a condition that are more accurate {then} have a more local head in the end?",
            _prediction_rule(f"validation accuracy {then}", "the smallest MAD of the final model"),
        ),
    ):
        ask(id, text, rule, "prediction", partial(_judge_prediction, before, later, epoch))
    return tuple(found)


def effects_table(design: Factorial, results: StudyResults) -> Table:
    """A row per effect, a column per number of a run."""
    rows = []
    for id, contrast in design.effects().items():
        row = Row().keep(effect=id).show("effect", contrast.name)
        for column, asked in ASKED.items():
            estimate: Estimate = mean_interval(of_seeds(results, contrast, column))
            asked.measure.put(row, column, estimate, unit="points", signed=True)
        rows.append(row.keep(scale=results.scale))
    notes = (
        "Differences within seeds, mean over seeds ± half the 95 % interval (Student's t); of two seeds, both are in "
        "brackets. A × B: what B changes with A minus what it changes without. Each is a mean over the other factors.",
        f"The others: all but own-patch heads. Early layers: the mean over the heads of the first {EARLY_LAYERS}. "
        f"Local heads: those with a distance below {rounded(LOCAL)}.",
        *missing_notes(results),
    )
    return Table.of("factorial", f"{results.name}: main effects and interactions", rows, notes=notes)


def effects_figure(design: Factorial, column: str, results: StudyResults) -> Drawing:
    """The effects on one number, with every seed."""
    rows = []
    for id, contrast in design.effects().items():
        values = of_seeds(results, contrast, column)
        estimate = mean_interval(values)
        rows.append(
            ForestRow(label=contrast.name, estimate=estimate, seeds=values.tolist(), is_reference=id == "cutmix")
        )
    figure = forest(rows, f"change of {ASKED[column].noun} (left: more local)")
    n = len(rows[0].seeds)
    words = f"Mean over {n} seed{'' if n == 1 else 's'}{dots_and_bars([n])}. × is a difference of two differences."
    return noted(figure, results, f"What each part changes in {ASKED[column].noun}.", words, missing=True)


def _report_on(name: str, make: StudyRecipe, *, epoch: int) -> None:
    study = make()
    design = Factorial.of(study)
    report_on(
        name,
        claims=questions(design, seeds=len(study.seed_list), epoch=epoch),
        intervals="± is half the 95 % interval of the mean over seeds; of two seeds, both are in brackets. Effects are "
        "differences within seeds.",
        tables=(partial(effects_table, design), own_patch_table, own_patch_model, course_table),
        figures={
            "factorial-effects": partial(effects_figure, design, "min_mad"),
            "factorial-effects-early": partial(effects_figure, design, EARLY),
            "emergence-course": over_epochs,
            "own-patch": every_head,
            "own-patch-model": entropy_by_distance,
        },
        is_about_locality=True,
    )


# After a third of the training the runs with CutMix that were measured before had their first local head, or were about
# to (epochs 36 to 102 of 300), and two thirds of the training, most of the fall of the learning rate, were to come.
_report_on("factorial-cifar100", factorial_cifar100, epoch=100)
_report_on("factorial-cifar10", factorial_cifar10, epoch=50)
_report_on("factorial-tiny-imagenet", factorial_tiny_imagenet, epoch=30)
