"""The report on probed models: scores side by side, means of conditions over seeds, and what claims they bear out.

Conditions are compared with the first: within seeds and, where there is one seed, over test images.
"""

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from nearsight.errors import InputError
from nearsight.files import write_text
from nearsight.report.claims import Verdicts, judge_all
from nearsight.report.conditions import missing_notes
from nearsight.report.figures.looks import looks
from nearsight.report.figures.style import FIGURE_LABEL_LIMIT, house_style, light_grid
from nearsight.report.inputs import shorten
from nearsight.report.marks import FEWEST, Drawing, ForestRow, add_footnote, forest, interval_in_row
from nearsight.report.probes import ProbeResults, main_measures, title_of
from nearsight.report.reports import Report
from nearsight.report.studies import PROBES, marks_of, report_of
from nearsight.report.tables import MISSING, OF_TWO, Row, Table, percent, rounded, seeds_in_words, span, with_interval
from nearsight.study.statistics import Estimate, mean_interval, paired_difference
from nearsight.study.statistics.intervals import by_seed

OVER_IMAGES = (
    "Intervals (95 %) are over test images (bootstrap): they say how a model would do on other images like these, not "
    "how another training of it would."
)
_OVER_SEEDS = f"± is half the 95 % interval of the mean over seeds (Student's t); {OF_TWO}."
_IN_BRACKETS = (
    "In brackets: 95 % over test images, from the intervals of both scores (square and add). They say what other "
    "images would change, not what another training would."
)
_SEEDS, _IMAGES = "seeds", "test images"


@dataclass(frozen=True, kw_only=True)
class Difference(Estimate):
    """A difference with the interval that can be had."""

    interval_over: str
    """`_SEEDS` or, of a single seed, `_IMAGES`; empty where there is none."""

    def in_words(self) -> str:
        """In points."""
        if self.interval_over != _IMAGES:
            return with_interval(self, scale=100, digits=2, signed=True)
        return f"{rounded(100 * self.value, 2, signed=True)} {ends_in_words(self)}"


def ends_in_words(found: Estimate) -> str:
    """ "(+0.07 to +2.75)": the interval over test images, in points."""
    low, high = (rounded(100 * end, 2, signed=True) for end in (found.low, found.high))
    return f"({span(low, high)})"


def differences(results: ProbeResults, measure: str) -> dict[str, Difference]:
    """Condition → by how much it is above the first, within seeds; conditions without a common seed are left out."""
    reference, *conditions = results.as_study().factors["model"]
    found = {condition: difference(results, condition, reference, measure) for condition in conditions}
    return {condition: one for condition, one in found.items() if one.n}


def difference(results: ProbeResults, condition: str, reference: str, measure: str) -> Difference:
    """By how much a condition is above another, within seeds."""
    over_seeds = vars(paired_difference(results.as_study().runs, condition, reference, measure))
    if over_seeds["n"] != 1:
        return Difference(**over_seeds, interval_over=_SEEDS if over_seeds["n"] else "")
    over_images = difference_over_images(results, condition, reference, measure)
    ends = {"low": over_images.low, "high": over_images.high}
    return Difference(**{**over_seeds, **ends}, interval_over=_IMAGES if over_images.has_interval else "")


def difference_over_images(results: ProbeResults, condition: str, reference: str, measure: str) -> Estimate:
    """The same with an interval over test images, of the seeds that both have.

    The difference may be off by what both scores may be off, for independent numbers (Newcombe 1998, method 10).
    Scores on the same images mostly err together, so it is rather too wide than too narrow. For the same reason more
    seeds do not make it narrower: its ends are the means of theirs.
    """
    models = results.as_study().runs.dropna(subset=measure).set_index(["condition", "seed"])["run"]
    scores = results.scores(measure)
    pairs = [
        (scores[models[condition, seed]], scores[models[reference, seed]])
        for seed in models[condition].index
        if (reference, seed) in models.index
    ]
    value = fmean(one.value - other.value for one, other in pairs)
    down = fmean(math.hypot(one.value - one.low, other.high - other.value) for one, other in pairs)
    up = fmean(math.hypot(one.high - one.value, other.value - other.low) for one, other in pairs)
    return Estimate(value=value, low=value - down, high=value + up)


def models_table(results: ProbeResults) -> Table:
    """A row per model, a column per probe."""
    scores = {name: results.scores(name) for name in main_measures(results.measures)}
    shown = [
        {"model": model.model, **{title_of(name): _score(found.get(model.model)) for name, found in scores.items()}}
        for model in results.models
    ]
    sets = dict.fromkeys(zip(results.rows["probe"], results.rows["data"], strict=True))
    return Table(
        name="probes",
        title=f"{results.name}: what the features are worth, in per cent",
        numbers=results.rows,
        shown=pd.DataFrame(shown),
        notes=(*results.scale_notes, f"{', '.join(f'{probe} on {data}' for probe, data in sets)}.", OVER_IMAGES),
    )


def _score(score: Estimate | None) -> str:
    if score is None:
        return MISSING
    ends = f" ({span(percent(score.low), percent(score.high))})" if score.has_interval else ""
    return percent(score.value) + ends


def conditions_table(results: ProbeResults) -> Table:
    """A row per condition: the mean of every score over its seeds."""
    study, main = results.as_study(), main_measures(results.measures)
    rows, shown = [], []
    for condition, runs in study.runs.groupby("condition", sort=False):
        words = Row().show("condition", str(condition)).show("seeds", str(len(runs)))
        for name in results.measures:
            mean = mean_interval(runs[name].dropna())
            rows.append(Row().keep(condition=condition, measure=name, **mean.as_mean()))
            if name in main:
                words.show(title_of(name), with_interval(mean, scale=100, digits=2))
        shown.append(words)
    explained = [_OVER_SEEDS] if study.runs["condition"].duplicated().any() else []
    title = f"{results.name}: scores by condition, in per cent"
    notes = (*results.scale_notes, *explained, *missing_notes(study))
    return Table.of("conditions", title, rows, shown=shown, notes=notes)


def differences_table(results: ProbeResults) -> Table:
    """A row per condition but the first: the difference to it in every score."""
    study, main = results.as_study(), main_measures(results.measures)
    reference, *others = study.factors["model"]
    rows: list[dict[str, object]] = []
    shown = {condition: Row().show("condition", condition) for condition in others}
    for name in results.measures:
        found = differences(results, name)
        rows += [
            {"condition": label, "measure": name, **one.as_mean(), "interval_over": one.interval_over}
            for label, one in found.items()
        ]
        for condition, words in shown.items():
            if name in main:
                words.show(title_of(name), found[condition].in_words() if condition in found else MISSING)
    over = {row["interval_over"] for row in rows}
    explained = (words for kind, words in ((_SEEDS, _OVER_SEEDS), (_IMAGES, _IN_BRACKETS)) if kind in over)
    columns = ["condition", "measure", "n", "mean", "std", "low", "high", "interval_over"]
    return Table(
        name="differences",
        title=f"{results.name}: differences to {reference}, in points",
        numbers=pd.DataFrame(rows, columns=columns),
        shown=pd.DataFrame([words.words for words in shown.values()]),
        notes=(*results.scale_notes, "Taken within seeds.", *explained, *missing_notes(study)),
    )


# In inches.
_ROW, _AROUND, _PANEL, _LABELS = 0.3, 1.0, 1.9, 1.8


def scores_of_models(results: ProbeResults) -> Drawing:
    """A panel per probe, a row per model. Models of one condition share a look."""
    models, measures = results.models, main_measures(results.measures)
    styles = looks(list(dict.fromkeys(model.condition or model.model for model in models)))
    with house_style():
        size = _LABELS + _PANEL * len(measures), _AROUND + _ROW * len(models)
        figure = Figure(figsize=size, layout="constrained")
        panels = figure.subplots(1, len(measures), sharey=True, squeeze=False)[0]
        for panel, measure in zip(panels, measures, strict=True):
            scores = results.scores(measure)
            for place, model in enumerate(models):
                if model.model not in scores:
                    continue
                style, score = styles[model.condition or model.model], scores[model.model]
                name = f"{measure}-model{place}"
                if score.has_interval:
                    gid = f"interval-{name}"
                    interval_in_row(panel, 100 * score.low, 100 * score.high, place, style.colour, gid)
                panel.plot(100 * score.value, place, color=style.colour, marker=style.marker, markersize=6.5, gid=name)
            panel.set_title(f"{title_of(measure)}, %", fontsize=8.5)
            panel.xaxis.set_major_locator(MaxNLocator(nbins=4))
            light_grid(panel, "x")
            panel.tick_params(axis="y", length=0)
        names = [shorten(model.model, FIGURE_LABEL_LIMIT) for model in models]
        panels[0].set_yticks(range(len(models)), names, parse_math=False)
        panels[0].set_ylim(len(models) - 0.5, -0.5)
    add_footnote(figure, ["Bars: 95 % intervals over test images.", *results.scale_notes])
    return Drawing(figure=figure, caption=f"Scores of all probes, in per cent. {OVER_IMAGES}")


def differences_of_conditions(results: ProbeResults, measure: str) -> Drawing:
    """A row per condition: how much better it is than the first."""
    study, found = results.as_study(), differences(results, measure)
    reference, values = study.factors["model"][0], 100 * by_seed(study.runs, measure)
    rows = [
        ForestRow(
            label=condition,
            estimate=Estimate(value=100 * interval.value, low=100 * interval.low, high=100 * interval.high),
            seeds=(values[condition] - values[reference]).dropna().tolist() if interval.interval_over == _SEEDS else (),
            words=interval.in_words(),
        )
        for condition, interval in found.items()
    ]
    figure = forest(rows, f"{title_of(measure)}: difference to {reference}, in points")
    counts = [interval.n for interval in found.values()]
    over = {one.interval_over for one in found.values() if one.interval_over == _IMAGES or one.n >= FEWEST}
    words = "The difference within a seed"
    words += f", mean over {seeds_in_words(counts)}; dots: seeds" if max(counts) > 1 else ""
    kinds = {_SEEDS: "over seeds", _IMAGES: "(in brackets) over test images, since there is one seed"}
    bars = ", ".join(kind_words for kind, kind_words in kinds.items() if kind in over)
    without = "; ± is half the 95 % interval." if max(counts) > 1 else "; one seed has no interval."
    words += f"; bars: 95 % intervals {bars}." if bars else without
    add_footnote(figure, [words, *missing_notes(study), *results.scale_notes])
    return Drawing(figure=figure, caption=f"{title_of(measure)}: how far conditions are above {reference}. {words}")


def probe_verdicts(results: ProbeResults) -> Verdicts | None:
    """Every claim that these models can test, judged; None where they have fewer than two conditions."""
    own = report_of(PROBES)
    claims = own.claims_of(results) if results.num_conditions > 1 else ()
    if not claims:
        return None
    study = results.as_study()
    judgements = judge_all(claims, study)
    explained = {
        _OVER_SEEDS: any(judgement.finding.n > 1 for judgement in judgements),
        _IN_BRACKETS: any(judgement.finding.n for judgement in judgements) and results.rows["low"].notna().any(),
    }
    intervals = (words for words, is_needed in explained.items() if is_needed)
    seeds = seeds_in_words(study.runs.groupby("condition")["seed"].nunique())
    return Verdicts(
        judgements=judgements,
        title=f"{results.name}: what reproduces of {(own.paper or 'our').split()[0]}'s claims about frozen features",
        scale=results.scale,
        paper=own.paper,
        runs=f"{len(study.runs)} models, {seeds} per condition.",
        notes=(*results.scale_notes, own.intervals, *intervals, *missing_notes(study)),
        asked=marks_of(results.plan, claims),
    )


_OF_CONDITIONS = (
    *("verdict.md", "figures/differences-*", "figures/backbones.*"),
    *(f"tables/{name}.*" for name in ("conditions", "differences", "backbones", "verdict")),
)
"""Files that a report on models without conditions does not have."""


def probe_report(results: ProbeResults) -> Report:
    """On all models and, where they are of several conditions, on their differences."""
    if results.rows.empty:
        raise InputError("no model has been probed yet, so there is nothing to report")
    figures: dict[str, Callable[[], Drawing]] = {"probes": partial(scores_of_models, results)}
    tables = [conditions_table(results)] if results.num_conditions else []
    if results.num_conditions > 1:
        tables.append(differences_table(results))
        figures |= {
            f"differences-{measure.replace('_', '-')}": partial(differences_of_conditions, results, measure)
            for measure in main_measures(results.measures)
            if differences(results, measure)
        }
        own = report_of(PROBES)
        tables += own.tables_of(results)
        for name, draw in own.figures.items():
            with suppress(InputError):  # of other models than these
                figures[name] = partial(_drawn, draw(results))
    return Report(title=results.name, tables=tables, figures=figures, verdicts=probe_verdicts(results))


def _drawn(drawing: Drawing) -> Drawing:
    return drawing


def write_probe_report(results: ProbeResults, folder: Path) -> tuple[Path, ...]:
    """Write probes.csv, probes.md and figures/ and, of several conditions, tables/ of them; where a paper claims
    something about them, also verdict.md. The files written.

    What an earlier report on other models left there and this one does not have goes: a verdict must not outlive its
    numbers.
    """
    report = probe_report(results)
    written = [*results.write(folder), folder / "probes.md", *report.write(folder)]
    write_text(folder / "probes.md", models_table(results).markdown())
    for pattern in _OF_CONDITIONS:
        for path in set(folder.glob(pattern)) - set(written):
            path.unlink()
    return tuple(written)
