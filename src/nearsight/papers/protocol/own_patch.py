"""Questions of our own: what S1's most local heads attend to, and whether its claims hold without them."""

import dataclasses
from collections.abc import Iterable
from dataclasses import replace

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from nearsight.errors import InputError
from nearsight.metrics import least_share_on_itself, next_patch_distance, uniform_attention_distance
from nearsight.papers.protocol import numbers as s1
from nearsight.papers.protocol.links import CUTMIX, groups
from nearsight.report.claims import OURS, Claim, asked
from nearsight.report.conditions import condition_looks, missing_notes, noted, ordered_conditions, pair_columns
from nearsight.report.figures.looks import ModelStyle, depth_of, level_markers, shade
from nearsight.report.figures.style import (
    DISTANCE_LABEL_ONE_LINE,
    GRID,
    INK,
    MUTED,
    add_legend,
    draw_uniform_line,
    house_style,
    light_grid,
)
from nearsight.report.marks import Drawing, distances_from_zero
from nearsight.report.own_patch import (
    HEADS,
    OTHERS,
    OWN_PATCH,
    grid_of,
    own_patch_bound,
    own_patch_heads,
    with_own_patch,
)
from nearsight.report.rules import GROUPS, RATES, SIGN, Finding, judge_groups, judge_rates, judge_sign, paired_change
from nearsight.report.tables import (
    MISSING,
    Row,
    Table,
    layers_in_words,
    probability,
    rounded,
    share,
    with_interval,
)
from nearsight.study.results import StudyResults
from nearsight.study.statistics import mean_interval, separation, share_interval

_FAMILY, _LEFT_OUT = "own patch", "Leaving out own-patch heads,"
_SHARE = "max_share_self"
# Of a row's height in the figure: what its layers take up, from the first above to the last below.
_SPREAD = 0.62


_RULE = (
    f"{RATES} Here: an own-patch head, whose distance is below {share(OWN_PATCH)} of that to the next patch, at the "
    "end of training."
)


def judge_often(runs: pd.DataFrame, having: "pd.Series[bool]", whose: tuple[str, str], more: str = "") -> Finding:
    """Whether runs `having` something come to have own-patch heads more often than the others; `whose`: in words."""
    sides = (runs[having], runs[~having])
    found = [(int((side[HEADS] > 0).sum()), float(side["epochs"].sum())) for side in sides]
    shares = [share_interval(side[HEADS] > 0) for side in sides]
    words = "; ".join(
        f"{events} of {part.n} runs {name} ({share(part.low)} to {share(part.high)}), in {epochs:.0f} epochs"
        for (events, epochs), part, name in zip(found, shares, whose, strict=True)
    )
    value, n = shares[0].value - shares[1].value, int(runs["seed"].nunique())
    return judge_rates(*found[0], *found[1], words=words + more, value=value, n=n)


@asked("own-patch-heads", "Does CutMix turn heads to their own patch?", source=OURS, rule=_RULE, family=_FAMILY)
def _more_often(results: StudyResults) -> Finding:
    runs, levels = with_own_patch(results), results.factors[CUTMIX]
    having = runs.assign(has_one=(runs[HEADS] > 0).astype(float))
    dealt = separation(having, CUTMIX, levels, "has_one", blocks=pair_columns(results, CUTMIX))
    more = f"; p = {probability(dealt.p)} of the shares alone, by {'exact ' if dealt.exact else ''}permutation in pairs"
    return judge_often(runs, runs[CUTMIX] == levels[-1], ("with CutMix", "without"), more)


def _with_both(colour: str) -> Claim:
    text = f"Is an own-patch head more likely where CutMix and {colour} are both?"

    @asked("own-patch-with-both", text, source=OURS, rule=_RULE, family=_FAMILY)
    def question(results: StudyResults) -> Finding:
        runs = with_own_patch(results)
        having = runs["condition"].isin((s1.MODERN, s1.WITHOUT_SMOOTHING))
        return judge_often(runs, having, ("with both", "of the others"))

    return question


@asked(
    "others-separated",
    f"{_LEFT_OUT} does CutMix still separate the conditions?",
    source=OURS,
    rule=GROUPS,
    family=_FAMILY,
)
def _gap(results: StudyResults) -> Finding:
    runs = with_own_patch(results)
    if not runs[HEADS].any():
        raise InputError("no run has an own-patch head")
    return judge_groups(runs, CUTMIX, results.factors[CUTMIX], OTHERS, None)


@asked(
    "others-more-local",
    f"{_LEFT_OUT} is Modern's most local head still more local than Baseline's?",
    source=OURS,
    rule=SIGN,
    needs=(s1.BASELINE, s1.MODERN),
    family=_FAMILY,
)
def _nearer(results: StudyResults) -> Finding:
    runs, both = with_own_patch(results), (s1.MODERN, s1.BASELINE)
    if not runs.loc[runs["condition"].isin(both), HEADS].any():
        raise InputError(f"neither {s1.BASELINE} nor {s1.MODERN} has an own-patch head")
    ours, words = paired_change(runs, *both, OTHERS)
    if not ours.n:
        raise InputError(f"no seed has such heads of both {s1.BASELINE} and {s1.MODERN}")
    return judge_sign(ours, sign=-1, words=words)


def own_patch_questions(colour: str) -> tuple[Claim, ...]:
    """Of an ablation; `colour` is what its data set has for AutoAugment."""
    all_eight = (*s1.with_cutmix(colour), *s1.without_cutmix(colour))
    of_all = (_more_often, _gap, _with_both(colour))
    more_often, gap, with_both = (dataclasses.replace(question, needs=all_eight) for question in of_all)
    return more_often, gap, _nearer, with_both


def own_patch_table(results: StudyResults) -> Table:
    """A row per condition: which runs have own-patch heads, and the distances of the others."""
    runs, heads, grid = with_own_patch(results), own_patch_heads(results), grid_of(results)
    published = s1.PUBLISHED[results.name].conditions if results.name in s1.PUBLISHED else {}
    rows = []
    for label in ordered_conditions(results):
        here = runs[runs["condition"] == label]
        if here.empty:
            continue
        having = here[here[HEADS] > 0]
        found = heads[heads["run"].isin(having["run"])]
        least = [least_share_on_itself(mad, grid) for mad in found["mad"]]
        others, nearest = mean_interval(here[OTHERS]), mean_interval(here["min_mad"])
        distance = getattr(published.get(label), "min_mad", None)
        paper = float("nan") if distance is None else least_share_on_itself(distance, grid)
        row = Row(condition=label).keep(runs=len(here))
        row.both("runs_with_own_patch", len(having), "runs with such a head", f"{len(having)} of {len(here)}")
        row.both("heads", len(found)).show("in layer", layers_in_words(found["layer"]))
        row.show("its own patch gets, at least", _shares(least)).show("measured", _shares(having[_SHARE].dropna()))
        row.both("min_mad", nearest.value, "min MAD", with_interval(nearest))
        row.both("min_mad_of_others", others.value, "min MAD of the others", with_interval(others))
        row.keep(low=others.low, high=others.high, least_share=min(least, default=float("nan")))
        words = MISSING if distance is None else share(paper)
        row.both("paper_least_share", paper, "the paper's head, at least", words)
        rows.append(row.keep(scale=results.scale))
    notes = (
        "Layers count from 0.",
        f"Such a head has a distance below {share(OWN_PATCH)} of that to the next patch, which is "
        f"{rounded(next_patch_distance(grid))} of the diagonal. What it does not spend on the query's own patch it "
        "spends at that distance or farther, so that its own patch gets at least 1 − distance / distance of the next "
        "patch of its attention on patches.",
        "Measured: the largest share of a run that a head spends on the query's own patch, CLS counted too, where the "
        "run says it. The others: all other heads. ± is half the 95 % interval over seeds; of two, both "
        "are in brackets.",
        *missing_notes(results),
    )
    return Table.of("own-patch", f"{results.name}: heads that attend to their own patch", rows, notes=notes)


def _shares(values: Iterable[float]) -> str:
    return _ends([share(value) for value in sorted(values)])


def _ends(words: list[str]) -> str:
    if not words:
        return MISSING
    return words[0] if words[0] == words[-1] else f"{words[0].removesuffix(' %')} to {words[-1]}"


def every_head(results: StudyResults) -> Drawing:
    """Every head by its distance, so that none stands for its model: a row per condition, the most local on top."""
    runs, bound = with_own_patch(results), own_patch_bound(results)
    heads = results.heads.dropna(subset=["mad"]).merge(runs[["run", "condition", CUTMIX]], on="run")
    labels = list(runs.groupby("condition")["min_mad"].mean().sort_values().index)
    styles, markers = condition_looks(results), level_markers(results.factors[CUTMIX])
    with house_style():
        figure = Figure(figsize=(7.2, 1.6 + 0.5 * len(labels)), layout="constrained")
        axes = figure.subplots()
        _draw_landmarks(axes, grid_of(results), bound)
        for place, label in enumerate(labels):
            here = heads[heads["condition"] == label]
            _draw_row(axes, place, here, replace(styles[label], marker=markers[str(here[CUTMIX].iloc[0])]))
        axes.set_yticks(range(len(labels)), labels, parse_math=False)
        axes.set_ylim(len(labels) - 0.5, -0.85)
        distances_from_zero(axes, float(heads["mad"].max()))
        light_grid(axes, "x")
        axes.tick_params(axis="y", length=0)
        axes.set_xlabel(DISTANCE_LABEL_ONE_LINE)
        named = {level: words for level, words in reversed(groups(results).items()) if level in set(runs[CUTMIX])}
        handles = [Line2D([], [], color=INK, marker=markers[level], markersize=6, linestyle="none") for level in named]
        add_legend(figure, handles, list(named.values()), loc="outside upper left", ncols=2, handlelength=1)
    having = int((runs[HEADS] > 0).sum())
    words = (
        "A mark per head, of all seeds; in a row the first layer is on top. Shaded: below "
        f"{rounded(bound)}, half of the distance to the next patch, a head spends more on its own patch than on "
        f"all others: in {having} of {len(runs)} runs."
    )
    return noted(figure, results, "The mean attention distance of every head, by condition.", words, missing=True)


def _draw_row(axes: Axes, place: int, heads: pd.DataFrame, style: ModelStyle) -> None:
    layers = sorted(set(heads["layer"]))
    for layer in layers:
        mad, depth = heads.loc[heads["layer"] == layer, "mad"], depth_of(layer, layers)
        axes.plot(
            mad,
            [place + _SPREAD * (depth - 0.5)] * len(mad),
            color=shade(style.colour, depth),
            marker=style.marker,
            markersize=3.2,
            markeredgewidth=0,
            linestyle="none",
            alpha=0.7,  # heads that lie on one another show through
            gid=f"heads-{heads['condition'].iloc[0]}-{layer}",
        )


def _draw_landmarks(axes: Axes, grid: tuple[int, int], bound: float) -> None:
    """What the distances of this grid mean: the patch itself, the next one, uniform attention."""
    step, uniform = next_patch_distance(grid), uniform_attention_distance(grid)
    axes.axvspan(0, bound, facecolor=GRID, alpha=0.8, linewidth=0, zorder=0, gid="own-patch")
    axes.axvline(step, color=INK, linewidth=0.8, linestyle=(0, (4, 2)), zorder=1, gid="next-patch")
    draw_uniform_line(axes, uniform, horizontal=False, gid="uniform")
    beside = {"own patch": (0.0, "left"), "next patch": (step, "left"), "uniform": (uniform, "right")}
    for words, (x, side_of_text) in beside.items():
        axes.annotate(
            words,
            (x, 1.0),
            xycoords=("data", "axes fraction"),
            xytext=(-3 if side_of_text == "right" else 3, -2),
            textcoords="offset points",
            ha=side_of_text,
            va="top",
            fontsize=8,
            color=MUTED,
        )
