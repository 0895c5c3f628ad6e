"""The report on a study whose heads were changed: what each run loses, in tables and figures, and the answers."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from nearsight.errors import InputError
from nearsight.report.ablated import ALL, AREA, NEEDED, RANK, RANK_WITHIN, AblatedRuns
from nearsight.report.claims import Verdicts
from nearsight.report.conditions import missing_notes, noted, scale_notes
from nearsight.report.figures.looks import looks
from nearsight.report.figures.style import MUTED, house_style, light_grid
from nearsight.report.marks import Drawing, add_fitting_legend, draw_courses, draw_dots, draw_seeds
from nearsight.report.reports import Report
from nearsight.report.studies import report_of
from nearsight.report.tables import OF_TWO, Row, Table, records, rounded, seeds_in_words
from nearsight.study.statistics import mean_interval

OVER_IMAGES = "In brackets: 95 % intervals over test images, for these weights."
_NEEDED = (
    "Reach needed: the smallest distance, in patches, to which all heads of a layer can be limited while the model "
    "loses less than 1 point; no limit counts as the diagonal of the grid."
)
_PANEL, _HEIGHT = 2.3, 3.0
"""In inches."""
_RESPONSES = {
    NEEDED: ("reach needed, patches", 1.0, 2),
    RANK: ("rank correlation of MAD and worth", 1.0, 2),
    RANK_WITHIN: ("within layers", 1.0, 2),
    AREA: ("removal, local first: points", 100.0, 1),
}


def runs_table(results: AblatedRuns) -> Table:
    """A row per run: what its numbers say, and the head that it needs most."""
    rows, removed = [], results.heads("zero")
    for run in records(results.as_study().runs):
        row = Row(run=run["run"], condition=run["condition"], seed=run["seed"])
        of_run = removed[removed["run"] == run["run"]]
        if len(of_run):
            row.both("base", float(of_run["base"].iloc[0]), "accuracy", _percent(float(of_run["base"].iloc[0])))
        for column, (title, scale, digits) in _RESPONSES.items():
            value = float(run.get(column, np.nan))
            row.both(column, value, title, rounded(scale * value, digits, signed=column != NEEDED))
        if len(of_run):
            worst = records(of_run.nlargest(1, "loss"))[0]
            kept = ("layer", "head", "mad", "loss", "loss_low", "loss_high")
            row.keep(**{f"most_{name}": worst[name] for name in kept})
            which = f"L{worst['layer']} head {worst['head']} (MAD {rounded(worst['mad'])}): {loss_in_words(worst)}"
            row.show("head that costs most when removed", which)
        rows.append(row)
    notes = (
        *scale_notes(results.as_study()),
        _NEEDED,
        "Rank correlation (Spearman): over heads, of MAD and the loss when the head gives nothing; below 0: more local "
        "heads are worth more. Within layers: of ranks within each layer. Removal: the area under the accuracy while "
        "heads are removed, most local first, less the mean of random orders; below 0: local heads cost more.",
        f"Layers and heads count from 0. {OVER_IMAGES}",
    )
    return Table.of("runs", f"{results.name}: what heads are worth to each run", rows, notes=notes)


def conditions_table(results: AblatedRuns) -> Table:
    """A row per condition: means over its seeds."""
    rows = []
    for condition, runs in results.as_study().runs.groupby("condition", sort=False):
        row = Row(condition=str(condition)).both("seeds", len(runs))
        for column, (title, scale, digits) in _RESPONSES.items():
            if column in runs:
                row.interval(column, mean_interval(runs[column].dropna()), title, scale=scale, digits=digits)
        rows.append(row)
    notes = (
        f"± is half the 95 % interval of the mean over seeds; {OF_TWO}.",
        _NEEDED,
        *missing_notes(results.as_study()),
    )
    return Table.of("conditions", f"{results.name}: what heads are worth, by condition", rows, notes=notes)


def needed_table(results: AblatedRuns) -> Table:
    """A row per condition and layer: the reach that the layer needs."""
    found, rows = results.needed(), []
    shown: dict[str, Row] = {}
    for (condition, layer), one in found.groupby(["condition", "layer"], sort=False):
        mean = mean_interval(one[NEEDED])
        rows.append(Row().keep(condition=condition, layer=layer, **mean.as_mean()))
        words = shown.setdefault(str(condition), Row().show("condition", str(condition)))
        words.show(f"L{layer}", " ".join(f"{value:g}" for value in one[NEEDED]))
    if not rows:
        raise InputError("no run's reach was limited")
    notes = (f"A number per seed, in patches. {_NEEDED}", "Layers count from 0.")
    title = f"{results.name}: how far the heads of a layer have to reach"
    return Table.of("reach-needed", title, rows, shown=shown.values(), notes=notes)


def own_patch_table(results: AblatedRuns) -> Table:
    """A row per own-patch head: what it is worth, by plan."""
    heads, rows = results.tables["head"], []
    own = heads[heads["mad"] < results.own_patch_bound]
    for key, one in own.groupby(["condition", "seed", "layer", "head"], sort=False):
        named = dict(zip(("condition", "seed", "layer", "head"), key, strict=True))
        row = Row(**named).both("mad", float(one["mad"].iloc[0]), "MAD", rounded(float(one["mad"].iloc[0])))
        for plan in records(one):
            row.keep(**{f"{plan['plan']}_{name}": plan[name] for name in ("loss", "loss_low", "loss_high")})
            row.show(f"{plan['plan']}: points lost", loss_in_words(plan))
        rows.append(row)
    if not rows:
        raise InputError("no run has an own-patch head")
    notes = (f"Own-patch heads: MAD below {rounded(results.own_patch_bound)}. {OVER_IMAGES}",)
    return Table.of("own-patch", f"{results.name}: what own-patch heads are worth", rows, notes=notes)


def loss_in_words(row: Mapping[str, Any]) -> str:
    """ "57.7 (56.7 to 58.7)", in points."""
    mean, low, high = (rounded(100 * row[name], 1) for name in ("loss", "loss_low", "loss_high"))
    return f"{mean} ({low} to {high})"


def _percent(value: float) -> str:
    return rounded(100 * value, 1)


def reach_of_conditions(results: AblatedRuns) -> Drawing:
    """The accuracy with all heads of all layers limited to a reach."""
    table = results.tables["reach"]
    everywhere = table[table["layer"] == ALL]
    if everywhere.empty:
        raise InputError("no run's reach was limited in all layers")
    study, styles = results.as_study(), looks(list(dict.fromkeys(everywhere["condition"])))
    with house_style():
        figure = Figure(figsize=(6.4, 4.0), layout="constrained")
        panel = figure.subplots()
        counts = []
        for condition, rows in everywhere.groupby("condition", sort=False):
            style, by_seed = styles[str(condition)], rows.pivot(index="reach", columns="seed", values="accuracy")
            counts.append(by_seed.shape[1])
            name = f"reach-{list(styles).index(str(condition))}"
            draw_seeds(panel, by_seed.index.tolist(), by_seed.to_numpy().tolist(), style.colour, f"seeds-{name}")
            panel.plot(by_seed.index, by_seed.mean(axis=1), **style.look_with(markersize=5), gid=name)
            unchanged = rows.groupby("seed")["base"].first().mean()
            panel.axhline(unchanged, color=style.colour, linewidth=0.8, linestyle=(0, (1, 2)))
        _accuracy_axis(panel)
        panel.set_xlabel("reach of all heads, in patches")
        add_fitting_legend(figure, [style.handle() for style in styles.values()], list(styles))
    words = f"Lines: mean over {seeds_in_words(counts)}{'; dots: seeds' if max(counts) > 1 else ''}; dotted: unchanged."
    caption = "Accuracy with all heads of all layers limited to patches within a reach, without any training for it."
    return noted(figure, study, caption, words, missing=True)


def needed_by_layer(results: AblatedRuns) -> Drawing:
    """The reach that each layer needs, a line per condition."""
    found = results.needed()
    if found.empty:
        raise InputError("no run's reach was limited layer by layer")
    study, styles = results.as_study(), looks(list(dict.fromkeys(found["condition"])))
    with house_style():
        figure = Figure(figsize=(6.4, 3.6), layout="constrained")
        panel = figure.subplots()
        counts = []
        for number, (condition, rows) in enumerate(found.groupby("condition", sort=False)):
            style, by_seed = styles[str(condition)], rows.pivot(index="layer", columns="seed", values=NEEDED)
            counts.append(by_seed.shape[1])
            across = by_seed.index + 0.08 * (number - (len(styles) - 1) / 2)
            draw_seeds(panel, across.tolist(), by_seed.to_numpy().tolist(), style.colour, f"seeds-needed-{number}")
            panel.plot(across, by_seed.mean(axis=1), **style.look_with(markersize=5), gid=f"needed-{number}")
        panel.set_ylim(bottom=-0.2)
        panel.xaxis.set_major_locator(MaxNLocator(integer=True))
        panel.set_xlabel("layer (from 0)")
        panel.set_ylabel("reach needed, in patches")
        light_grid(panel)
        add_fitting_legend(figure, [style.handle() for style in styles.values()], list(styles))
    words = f"Lines: mean over {seeds_in_words(counts)}{'; dots: seeds' if max(counts) > 1 else ''}."
    return noted(figure, study, f"How far the heads of each layer have to reach. {_NEEDED}", words, missing=True)


def worth_by_distance(results: AblatedRuns) -> Drawing:
    """A panel per condition: every head, by its distance and by what the model loses without it."""
    removed = results.heads("zero")
    if removed.empty:
        raise InputError("no head was removed")
    styles = looks(list(dict.fromkeys(removed["condition"])))
    with house_style():
        figure = Figure(figsize=(0.6 + _PANEL * len(styles), _HEIGHT), layout="constrained")
        panels = figure.subplots(1, len(styles), sharex=True, sharey=True, squeeze=False)[0]
        for number, (panel, (condition, style)) in enumerate(zip(panels, styles.items(), strict=True)):
            rows = removed[removed["condition"] == condition]
            draw_dots(panel, rows["mad"], 100 * rows["loss"], style.colour, f"worth-{number}")
            panel.axhline(0.0, color=MUTED, linewidth=0.8)
            panel.axvline(results.own_patch_bound, color=MUTED, linewidth=0.8, linestyle=(0, (1, 2)))
            panel.set_yscale("symlog", linthresh=1.0)
            panel.yaxis.set_major_formatter("{x:g}")
            panel.set_title(condition, parse_math=False)
            light_grid(panel)
            panel.set_xlabel("mean attention distance")
        panels[0].set_xlim(left=-0.02)  # dots at 0 are whole
        panels[0].set_ylabel("points lost without the head")
    words = (
        "A dot per head and seed; left of the dotted line are own-patch heads; above 1 point the scale is logarithmic."
    )
    return noted(figure, results.as_study(), "What every head is worth, beside how far it attends.", words)


def removal_of_conditions(results: AblatedRuns) -> Drawing:
    """A panel per condition: the accuracy while more and more heads give nothing, local first and in random order."""
    table = results.tables["removal"]
    if table.empty:
        raise InputError("no heads were removed one after the other")
    styles = looks(list(dict.fromkeys(table["condition"])))
    with house_style():
        figure = Figure(figsize=(0.6 + _PANEL * len(styles), _HEIGHT), layout="constrained")
        panels = figure.subplots(1, len(styles), sharex=True, sharey=True, squeeze=False)[0]
        for panel, (condition, style) in zip(panels, styles.items(), strict=True):
            rows = table[table["condition"] == condition]
            local, random = _curves(rows, "most local first"), _curves(rows, "random")
            for curves, colour, kind in ((random, MUTED, "random"), (local, style.colour, "local")):
                gid = f"removal-{kind}-{list(styles).index(condition)}"
                draw_courses(panel, curves.index, curves.to_numpy().T.tolist(), colour, f"{gid}-run")
                dash = "solid" if kind == "local" else (0, (4, 2))
                panel.plot(curves.index, curves.mean(axis=1), color=colour, linestyle=dash, linewidth=1.8, gid=gid)
            panel.set_title(condition, parse_math=False)
            panel.set_xlabel("heads removed")
            light_grid(panel)
        _accuracy_axis(panels[0])  # which all share
    words = "Solid: most local heads first; dashed: random orders; thick: their means, thin: single runs and orders."
    caption = "Accuracy while more and more heads give nothing."
    return noted(figure, results.as_study(), caption, words, missing=True)


def _curves(rows: pd.DataFrame, order: str) -> pd.DataFrame:
    """A column per run and order that begins so, with the unchanged model at 0 heads."""
    chosen = rows[rows["order"].str.startswith(order)]
    curves = chosen.pivot(index="removed", columns=["run", "order"], values="accuracy")
    unchanged = chosen.pivot_table(index=["run", "order"], values="base")["base"]
    return pd.concat([pd.DataFrame([unchanged.reindex(curves.columns)], index=[0]), curves])


def _accuracy_axis(panel: Axes) -> None:
    panel.set_ylim(bottom=0.0)
    panel.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    panel.set_ylabel("accuracy")
    light_grid(panel)


_TABLES = (conditions_table, runs_table, needed_table, own_patch_table)
_FIGURES: Mapping[str, Callable[[AblatedRuns], Drawing]] = {
    "reach": reach_of_conditions,
    "reach-needed": needed_by_layer,
    "worth": worth_by_distance,
    "removal": removal_of_conditions,
}


def ablated_verdicts(results: AblatedRuns) -> Verdicts | None:
    """What was asked of these runs, judged; None where nothing is declared under the name."""
    study = results.as_study()
    return report_of(study.name).verdicts_on(
        study,
        units="runs",
        intervals=f"± is half the 95 % interval of the mean over seeds; {OF_TWO}. Differences are taken within seeds.",
        notes=missing_notes(study),
        warning="".join(scale_notes(study)),
    )


def ablated_report(results: AblatedRuns) -> Report:
    """What was asked for is in it."""
    study, tables = results.as_study(), []
    if study.runs.empty:
        raise InputError("no run's heads have been changed yet, so there is nothing to report")
    for make in _TABLES:
        try:
            tables.append(make(results))
        except InputError:
            continue
    figures = {name: partial(draw, results) for name, draw in _FIGURES.items()}
    notes = (*scale_notes(study), *missing_notes(study))
    return Report(title=study.name, tables=tables, figures=figures, verdicts=ablated_verdicts(results), notes=notes)


def write_ablated_report(results: AblatedRuns, folder: Path) -> tuple[Path, ...]:
    """Write the tables of all variants, and the report on them; the files written."""
    return (*results.write(folder), *ablated_report(results).write(folder))
