"""S2's ablations at the size of S1's compact ViT, where each takes minutes; and what CutMix does beside LocAt.

The augmentations and the schedule's form are S2's; model, batch, learning rate and crop are S1's (assumed: S2 has no
model of this size). All epochs are trained, without early stopping, so that every cell sees the same images.
"""

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import pandas as pd

from nearsight.augment import CutMix, RandomCrop
from nearsight.errors import InputError
from nearsight.papers.locat import numbers as s2
from nearsight.papers.locat.measures import (
    OF_LAYERS,
    OF_RUNS,
    Measure,
    by_layer,
    by_seed,
    interval_of,
    layer_measures,
    measures_of,
    run_measures,
)
from nearsight.papers.locat.numbers import PublishedTable
from nearsight.papers.locat.rules import (
    COMPARABLE,
    NOT_WORSE,
    ORDER,
    judge_comparable,
    judge_not_worse,
    judge_order,
)
from nearsight.papers.protocol.heads import ORDERED
from nearsight.report.claims import Claim
from nearsight.report.conditions import missing_notes, num_seeds, ordered_conditions
from nearsight.report.responses import share_notes
from nearsight.report.rules import EVERY_SEED, Finding, judge_every_seed
from nearsight.report.study_tables import INTERVALS
from nearsight.report.tables import MISSING, Table, percent, rounded, span, with_interval
from nearsight.study import OFF, Study
from nearsight.study.recipes import recipe
from nearsight.study.results import StudyResults
from nearsight.study.statistics import MeanInterval, mean_interval, paired_difference
from nearsight.train import RunConfig, locat
from nearsight.train.recipes import compact_cifar100, compact_tiny_imagenet, trained_for

_EPOCHS = 100
_TINY_EPOCHS = 40  # of twice as many images
_FACTORIAL_EPOCHS = 50
_LOCAT = {"gaug": True, "prr": True}
_CORE: Mapping[str, Any] = {
    "ViT": OFF,
    "ViT + GAug": {"gaug": True},
    "ViT + PRR": {"prr": True},
    "LocAt": _LOCAT,
}
_VARIANTS: Mapping[str, Any] = {
    "ViT - PE": {"positions": False},
    "LocAt - PE": {**_LOCAT, "positions": False},
    "ViT + GAP": {"pool": "avg"},
    # Of the Euclidean distance (App. E), so with one width for both axes.
    "Laplace kernel": {**_LOCAT, "locat_kernel": "laplace", "locat_isotropic": True},
    "Inverse distance": {**_LOCAT, "locat_kernel": "inverse", "locat_isotropic": True},
    "Width from input": {**_LOCAT, "locat_width": "input"},
    "Isotropic width": {**_LOCAT, "locat_isotropic": True},
    # S2's three fixed widths are not known; on its 14×14 grid or on this 8×8 one these are narrow, middling and wide.
    "Fixed width 1": {**_LOCAT, "locat_width": 1.0},
    "Fixed width 2": {**_LOCAT, "locat_width": 2.0},
    "Fixed width 4": {**_LOCAT, "locat_width": 4.0},
    "No scale": {**_LOCAT, "locat_scale": "none"},
    "Auto scale": {**_LOCAT, "locat_scale": "auto"},
}


@recipe("locat-cifar100")
def locat_cifar100(*, seeds: int = 2) -> Study:
    """What each part of LocAt gives, and each way to make it, on CIFAR-100 (S2, Tables 3, 5, 7 and 8)

    Run     nearsight study run locat-cifar100
    Cost    32 cells of at most 100 epochs of 40,000 images (128 M); needs a GPU
    Result  see results/locat-cifar100
    """
    base = _trained_as_in_s2(compact_cifar100("baseline"), _EPOCHS)
    # LocAt last: what compares a study's ends compares it with ViT.
    parts = {name: level for name, level in _CORE.items() if name != "LocAt"}
    return Study(base, factors={"model": {**parts, **_VARIANTS, "LocAt": _LOCAT}}, seeds=seeds)


@recipe("locat-tiny-imagenet")
def locat_tiny_imagenet(*, seeds: int = 2) -> Study:
    """What each part of LocAt gives on Tiny-ImageNet (S2, Table 5)

    Run     nearsight study run locat-tiny-imagenet
    Cost    8 cells of at most 40 epochs of 80,000 images (25 M); needs a GPU
    Result  see results/locat-tiny-imagenet
    """
    base = _trained_as_in_s2(compact_tiny_imagenet("baseline"), _TINY_EPOCHS)
    return Study(base, factors={"model": _CORE}, seeds=seeds)


@recipe("locat-cutmix-cifar100")
def locat_cutmix_cifar100(*, seeds: int = 3) -> Study:
    """Does CutMix still make attention local where LocAt already does? CutMix × GAug × PRR (S1 meets S2)

    Run     nearsight study run locat-cutmix-cifar100
    Cost    24 cells of at most 50 epochs of 40,000 images (48 M); needs a GPU
    Result  see results/locat-cutmix-cifar100
    """
    base = trained_for(compact_cifar100("baseline"), _FACTORIAL_EPOCHS)
    factors: dict[str, Any] = {
        "cutmix": (OFF, CutMix(p=0.5)),
        "GAug": {"off": OFF, "on": {"gaug": True}},
        "PRR": {"off": OFF, "on": {"prr": True}},
    }
    return Study(base, factors=factors, seeds=seeds, ends=("Baseline", "CutMix + LocAt"))


def _trained_as_in_s2(run: RunConfig, epochs: int) -> RunConfig:
    """With S2's augmentations, clipping and schedule, whose warm-up is a fifth of the epochs as on its small sets.

    Not with its stochastic depth: S2 drops less in smaller models, and this one is smaller than any of them.
    """
    theirs = locat().without("resizedcrop").with_(RandomCrop())
    protocol = dataclasses.replace(
        theirs, lr=run.protocol.lr, batch_size=run.protocol.batch_size, warmup_epochs=epochs // 5, drop_path=0.0
    )
    return trained_for(dataclasses.replace(run, protocol=protocol), epochs)


# What S2 claims about accuracy: each comparison is one function, applied to its tables and to our runs alike.


Contrast = Callable[[pd.DataFrame], "pd.Series[float]"]
"""From a column per condition to the number that is judged, row by row: a row is a seed, or a size of the paper's."""
Rule = Literal["higher", "lower", "comparable", "not worse"]
_RULES = {"higher": ORDER, "lower": ORDER, "comparable": COMPARABLE, "not worse": NOT_WORSE}


@dataclass(frozen=True, kw_only=True)
class Comparison:
    id: str
    text: str
    source: str
    needs: tuple[str, ...]
    contrast: Contrast
    rule: Rule
    published: tuple[PublishedTable, ...]

    def claim(self) -> Claim:
        return Claim(
            id=self.id,
            text=self.text,
            source=self.source,
            paper="; ".join(self._in(table) for table in self.published),
            rule=_RULES[self.rule],
            needs=self.needs,
            judge=self._judge,
        )

    def _in(self, table: PublishedTable) -> str:
        told = self.contrast(table.frame())
        words = ", ".join(f"{size} {rounded(100 * value, 2, signed=True)}" for size, value in told.items())
        return f"{words} points ({table.dataset}, {table.source})"

    def _judge(self, results: StudyResults) -> Finding:
        values = by_seed(results.runs, "test_acc", self.needs)
        differences = self.contrast(values)
        ours = mean_interval(differences)
        words = f"{with_interval(ours, scale=100, digits=2, signed=True)} points"
        if len(self.needs) == 2:
            before, after = (percent(float(values[label].mean())) for label in self.needs)
            words = f"{before} to {after} %: {words}"
        if self.rule == "comparable":
            return judge_comparable(ours, words=words)
        if self.rule == "not worse":
            return judge_not_worse(ours, words=words)
        return judge_order(differences.tolist(), ours, sign=1 if self.rule == "higher" else -1, words=words)


def _gain(
    id: str, text: str, source: str, condition: str, reference: str, *published: PublishedTable, rule: Rule = "higher"
) -> Comparison:
    """`condition` minus `reference`."""
    return Comparison(
        id=id,
        text=text,
        source=source,
        needs=(reference, condition),
        contrast=lambda accuracy: accuracy[condition] - accuracy[reference],
        rule=rule,
        published=published,
    )


def _beyond_both(accuracy: pd.DataFrame) -> "pd.Series[float]":
    return accuracy[s2.LOCAT] - accuracy[[s2.GAUG, s2.PRR]].max(axis=1)


def _loses_less(accuracy: pd.DataFrame) -> "pd.Series[float]":
    with_locat = accuracy[s2.LOCAT_WITHOUT_POSITIONS] - accuracy[s2.LOCAT]
    return with_locat - (accuracy[s2.VIT_WITHOUT_POSITIONS] - accuracy[s2.VIT])


def _worst_kernel(accuracy: pd.DataFrame) -> "pd.Series[float]":
    return accuracy[[s2.LOCAT, *s2.KERNELS]].min(axis=1) - accuracy[s2.VIT]


def _gaussian_beside_others(accuracy: pd.DataFrame) -> "pd.Series[float]":
    return accuracy[s2.LOCAT] - accuracy[[*s2.KERNELS]].max(axis=1)


def _best_fixed_width(accuracy: pd.DataFrame) -> "pd.Series[float]":
    return accuracy[[*s2.FIXED]].max(axis=1) - accuracy[s2.LOCAT]


def core_claims(small_set: PublishedTable) -> tuple[Claim, ...]:
    """Of ViT, GAug, PRR and LocAt; `small_set`: the part of Table 3 that is nearest to our data."""
    parts = "S2 §5.4, Table 5"
    comparisons = (
        _gain(
            "locat",
            "LocAt raises accuracy, also on a small data set",
            "S2 §5.2, Tables 3 and 5",
            s2.LOCAT,
            s2.VIT,
            small_set,
            s2.TABLE_5,
        ),
        _gain("gaug", "GAug alone raises accuracy", parts, s2.GAUG, s2.VIT, s2.TABLE_5),
        _gain("prr", "PRR alone raises accuracy", parts, s2.PRR, s2.VIT, s2.TABLE_5),
        Comparison(
            id="together",
            text="Together they raise it further than the better of the two alone",
            source=parts,
            needs=s2.CORE[1:],
            contrast=_beyond_both,
            rule="higher",
            published=(s2.TABLE_5,),
        ),
    )
    return tuple(comparison.claim() for comparison in comparisons)


def variant_claims() -> tuple[Claim, ...]:
    """Of positions, pooling, kernels, widths and scales."""
    positions, pooling, widths = "S2 §5.4, Table 5", "S2 §5.4, Table 5", "S2 App. D, Table 7"
    without, kernels = (s2.VIT_WITHOUT_POSITIONS, s2.LOCAT_WITHOUT_POSITIONS), "S2 App. E, Table 8"
    comparisons = (
        _gain(
            "without-positions",
            "Without positions LocAt is better than ViT",
            positions,
            without[1],
            without[0],
            s2.TABLE_5,
        ),
        _gain(
            "without-positions-beats-vit",
            "LocAt without positions is better than ViT with them",
            positions,
            without[1],
            s2.VIT,
            s2.TABLE_5,
        ),
        Comparison(
            id="loses-less-without-positions",
            text="LocAt loses less without positions than ViT does",
            source=positions,
            needs=(s2.VIT, s2.LOCAT, *without),
            contrast=_loses_less,
            rule="higher",
            published=(s2.TABLE_5,),
        ),
        _gain("gap", "Average pooling (GAP) raises ViT's accuracy", pooling, s2.GAP, s2.VIT, s2.TABLE_5),
        _gain("prr-beats-gap", "PRR raises it more than GAP", pooling, s2.PRR, s2.GAP, s2.TABLE_5),
        Comparison(
            id="every-kernel",
            text="With every kernel, Gaussian, Laplace or inverse distance, LocAt is better than ViT",
            source=kernels,
            needs=(s2.VIT, s2.LOCAT, *s2.KERNELS),
            contrast=_worst_kernel,
            rule="higher",
            published=(s2.TABLE_8,),
        ),
        Comparison(
            id="gaussian-competitive",
            text="The Gaussian kernel stays competitive with the other two in accuracy",
            source=kernels,
            needs=(s2.LOCAT, *s2.KERNELS),
            contrast=_gaussian_beside_others,
            rule="not worse",
            published=(s2.TABLE_8,),
        ),
        _gain(
            "width-from-input",
            "A width from the input is better than one from the query",
            widths,
            s2.FROM_INPUT,
            s2.LOCAT,
            s2.TABLE_7,
        ),
        _gain(
            "isotropic",
            "One width for both axes performs comparably",
            widths,
            s2.ISOTROPIC,
            s2.LOCAT,
            s2.TABLE_7,
            rule="comparable",
        ),
        Comparison(
            id="fixed-width",
            text="A fixed width, even the best of three, is worse than one from the query",
            source=widths,
            needs=(s2.LOCAT, *s2.FIXED),
            contrast=_best_fixed_width,
            rule="lower",
            published=(s2.TABLE_7,),
        ),
        _gain("no-scale", "Without a scale LocAt is worse", widths, s2.NO_SCALE, s2.LOCAT, s2.TABLE_7, rule="lower"),
        _gain(
            "auto-scale",
            "The automatic scale performs close to the learned one",
            widths,
            s2.AUTO_SCALE,
            s2.LOCAT,
            s2.TABLE_7,
            rule="comparable",
        ),
    )
    return tuple(comparison.claim() for comparison in comparisons)


# What S2 claims about where heads look and what the tokens of each layer are like (App. F, without numbers).


IN_A_FIGURE = "shown in a figure, no number"
IN_WORDS = "no number"
# S2: "after the third layer".
AFTER = 3
# The share of the layers that are the final ones: the last two of eight.
FINAL = 0.25


def _nearer(what: str, column: str) -> Claim:
    def judge(results: StudyResults) -> Finding:
        values = by_seed(run_measures(results), column, (s2.VIT, s2.GAUG))
        differences = values[s2.GAUG] - values[s2.VIT]
        ours = mean_interval(differences)
        before, after = (rounded(float(values[label].mean())) for label in (s2.VIT, s2.GAUG))
        words = f"{before} to {after}: {OF_RUNS[column].told(ours, signed=True)}"
        return judge_order(differences.tolist(), ours, sign=-1, words=words)

    return Claim(
        id=f"gaug-{column}",
        text=f"GAug makes attention local: {what}",
        source="S2 §4.1",
        paper=IN_WORDS,
        rule=ORDER,
        needs=(s2.VIT, s2.GAUG),
        judge=judge,
    )


def _shifted(
    column: str, reference: str, condition: str, *, sign: int, after: int = 0
) -> Callable[[StudyResults], Finding]:
    """Strict: in every layer from `after` on; weak: in their mean."""

    def judge(results: StudyResults) -> Finding:
        values = by_layer(layer_measures(results), column, (reference, condition))
        values = values[values.index.get_level_values("layer") >= after]
        if values.empty:
            raise InputError(f"the models have no layer after L{after}")
        shift = values[condition] - values[reference]
        means = shift.groupby("seed").mean()
        right = (shift * sign > 0).groupby("seed")
        counts = right.sum().tolist()
        before, afterwards = (rounded(float(values[label].mean())) for label in (reference, condition))
        told = OF_LAYERS[column].told(mean_interval(means), signed=True)
        num_layers = values.index.get_level_values("layer").nunique()
        words = (
            f"mean over layers {before} to {afterwards}: {told}; {'higher' if sign > 0 else 'lower'} in "
            f"{_range(counts, digits=0)} of {num_layers} layers"
        )
        return judge_every_seed(right.all().tolist(), (means * sign > 0).tolist(), words)

    return judge


def _drawn_to_cls(results: StudyResults) -> Finding:
    values = by_layer(layer_measures(results), "patch_cls_similarity", (s2.VIT,))[s2.VIT]
    profiles = [of_seed.droplevel("seed").sort_index() for _, of_seed in values.groupby("seed")]
    orders = [float(profile.corr(pd.Series(profile.index, profile.index), method="spearman")) for profile in profiles]
    peaks = [int(profile.argmax()) for profile in profiles]
    rises = [float(profile.iloc[-1] - profile.iloc[0]) for profile in profiles]
    final = len(profiles[0]) - max(1, round(FINAL * len(profiles[0])))
    words = (
        f"rank correlation with depth {_range(orders)}, highest in "
        f"{', '.join(f'L{peak + 1}' for peak in peaks)}, last minus first layer "
        f"{with_interval(mean_interval(rises), signed=True)}"
    )
    strict = [order >= ORDERED and peak >= final for order, peak in zip(orders, peaks, strict=True)]
    return judge_every_seed(strict, [rise > 0 for rise in rises], words)


def _range(values: Sequence[float], digits: int = 2) -> str:
    """Over seeds."""
    low, high = (rounded(end, digits) for end in (min(values), max(values)))
    return low if low == high else span(low, high)


def layer_claims() -> tuple[Claim, ...]:
    """In the studies that have ViT, GAug and LocAt."""
    gaug, locat = (s2.VIT, s2.GAUG), (s2.VIT, s2.LOCAT)
    return (
        _nearer("the most local head looks nearer", "min_mad"),
        _nearer("heads look nearer on average", "mean_mad"),
        Claim(
            id="gaug-every-layer",
            text="GAug makes attention local in every layer",
            source="S2 §4.1",
            paper=IN_WORDS,
            rule=EVERY_SEED,
            readings=(
                "the mean distance of the layer's heads is smaller than ViT's in every layer",
                "it is on average over the layers",
            ),
            needs=gaug,
            judge=_shifted("mean_mad", *gaug, sign=-1),
        ),
        Claim(
            id="patches-like-neighbours",
            text="LocAt's patches are more like their neighbours than ViT's, after the third layer",
            source="S2 App. F, Figure 5a",
            paper=IN_A_FIGURE,
            rule=EVERY_SEED,
            readings=(
                f"the locality score is higher than ViT's in every layer after L{AFTER}",
                "it is on average over these layers",
            ),
            needs=locat,
            judge=_shifted("locality_score", *locat, sign=1, after=AFTER),
        ),
        Claim(
            id="patches-unlike-cls",
            text="LocAt's patches are less like CLS than ViT's, in all layers",
            source="S2 App. F, Figure 5b",
            paper=IN_A_FIGURE,
            rule=EVERY_SEED,
            readings=(
                "the patch–CLS similarity is lower than ViT's in every layer",
                "it is on average over the layers",
            ),
            needs=locat,
            judge=_shifted("patch_cls_similarity", *locat, sign=-1),
        ),
        Claim(
            id="patches-drawn-to-cls",
            text="In ViT patches become more like CLS with depth, most of all in the final layers",
            source="S2 App. F, Figure 5b",
            paper=IN_A_FIGURE,
            rule=EVERY_SEED,
            readings=(
                f"the rank correlation of depth and patch–CLS similarity is at least {ORDERED}, and the similarity is "
                "highest in the last quarter of the layers",
                "the similarity is higher in the last layer than in the first",
            ),
            needs=(s2.VIT,),
            judge=_drawn_to_cls,
        ),
    )


# What the conditions of the LocAt studies gave, per model and per layer, and how far they are from ViT and LocAt.


WHAT_IS_MEASURED = (
    "MAD and entropy: over all heads of a run. Locality score: the mean cosine similarity of a patch token and its "
    "neighbours; patch–CLS similarity: that of the patch tokens and CLS (S2 App. F); both of what the blocks give, "
    "over all layers."
)
PAPERS = "paper's accuracy, points"


def locality_table(results: StudyResults) -> Table:
    """A row per condition: accuracy, where its heads look, what its tokens are like."""
    runs, measures = run_measures(results), measures_of(results)
    rows, shown = [], []
    for label in ordered_conditions(results):
        ours = {column: interval_of(runs, label, column) for column in measures}
        counted: dict[str, object] = {"condition": label, "seeds": num_seeds(results, label)}
        rows.append({**counted, "scale": results.scale, **_flat(ours)})
        cells = {_unit(measure): measure.told(ours[column]) for column, measure in measures.items()}
        shown.append({**counted, **cells})
    return Table(
        name="locality",
        title=f"{results.name}: accuracy and locality",
        numbers=pd.DataFrame(rows),
        shown=pd.DataFrame(shown).astype(str),
        notes=(INTERVALS, WHAT_IS_MEASURED, *share_notes(results), *missing_notes(results)),
    )


def _unit(measure: Measure) -> str:
    return f"{measure.title}, %" if measure.is_share else measure.title


def _flat(ours: dict[str, MeanInterval]) -> dict[str, float]:
    """A column per measure and part of its interval."""
    return {f"{column}_{part}": value for column, interval in ours.items() for part, value in asdict(interval).items()}


def layers_table(results: StudyResults) -> Table:
    """Every layer in the numbers; the first, a middle and the last one for people."""
    layers = layer_measures(results)
    numbers = sorted({int(layer) for layer in layers["layer"]})
    if not numbers:
        raise InputError("no run has a measured layer")
    picked = sorted({numbers[0], numbers[len(numbers) // 2], numbers[-1]})
    rows, shown = [], []
    for column, measure in OF_LAYERS.items():
        for label in ordered_conditions(results):
            here = layers[layers["condition"] == label]
            ours = {layer: mean_interval(here.loc[here["layer"] == layer, column].dropna()) for layer in numbers}
            named = {"measure": column, "condition": label, "scale": results.scale}
            rows += [{**named, "layer": layer, **asdict(interval)} for layer, interval in ours.items()]
            cells = {f"L{layer + 1}": measure.told(ours[layer]) for layer in picked}
            shown.append({"measure": measure.title, "condition": label, **cells})
    return Table(
        name="layers",
        title=f"{results.name}: layer by layer",
        numbers=pd.DataFrame(rows),
        shown=pd.DataFrame(shown),
        notes=(
            INTERVALS,
            "MAD and entropy: over the layer's heads. Locality score and patch–CLS similarity: of the tokens that the "
            "layer's block gives (S2 App. F).",
            "All layers are in the CSV file beside this one.",
        ),
    )


def differences_to(reference: str, *, of: Collection[str] | None = None) -> Callable[[StudyResults], Table]:
    """A table of what conditions change, seed by seed: of all of them, or `of` some."""

    def table(results: StudyResults) -> Table:
        known = ordered_conditions(results)
        others = [label for label in known if label != reference and (of is None or label in of)]
        if reference not in known or not others:
            raise InputError(f"it compares conditions with {reference}, and one of the two has no run yet")
        runs, measures = run_measures(results), measures_of(results)
        rows, shown = [], []
        for label in others:
            ours = {column: paired_difference(runs, label, reference, column) for column in measures}
            paper, by_size = published_difference(label, reference)
            counted: dict[str, object] = {"condition": label, "seeds": ours["test_acc"].n}
            theirs = {f"paper_{size}": value for size, value in by_size.items()}
            rows.append({**counted, "reference": reference, "scale": results.scale, **_flat(ours), **theirs})
            cells = {_change(measure): measure.told(ours[column], signed=True) for column, measure in measures.items()}
            shown.append(counted | cells | {PAPERS: paper})
        frame = pd.DataFrame(shown).astype(str)
        has_paper = bool((frame[PAPERS] != MISSING).any())
        notes = [
            f"Condition minus {reference}, taken within seeds. {INTERVALS}",
            WHAT_IS_MEASURED,
            *share_notes(results),
        ]
        if has_paper:
            notes.append(
                "The paper's differences of accuracy (S2 Tables 5, 7 and 8) are of larger models at 224 pixels: their "
                "sign can be compared, their size cannot."
            )
        return Table(
            name=f"differences-to-{reference.lower()}",
            title=f"{results.name}: what each condition changes in {reference}",
            numbers=pd.DataFrame(rows),
            shown=frame if has_paper else frame.drop(columns=PAPERS),
            notes=tuple(notes),
        )

    return table


def _change(measure: Measure) -> str:
    return f"{measure.title}, points" if measure.is_share else measure.title


def published_difference(condition: str, reference: str) -> tuple[str, dict[str, float]]:
    """The paper's difference of accuracy in words, and by the size of the model; none where it has no such pair."""
    for table in s2.ABLATIONS:
        # Of the fixed widths it is lost which is which.
        if table.has(condition, reference) and condition not in s2.FIXED:
            frame = table.frame()
            found = {str(size): float(value) for size, value in (frame[condition] - frame[reference]).items()}
            words = ", ".join(f"{size} {rounded(100 * value, 2, signed=True)}" for size, value in found.items())
            return f"{words} ({table.dataset})", found
    return MISSING, {}
