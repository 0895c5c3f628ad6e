"""What a way to make attention local gains, against what it costs: per cent of the time of an epoch.

Both are differences to the plain model of the same seed and the same CutMix. Times are those of training, the middle
one of a run's epochs: all ways have equally many runs, which train as one stack, so that times compare where one
machine trained them all.
"""

from collections.abc import Mapping, Sequence

import pandas as pd
from matplotlib.figure import Figure

from nearsight.errors import InputError
from nearsight.report.conditions import missing_notes, scale_notes
from nearsight.report.figures.looks import looks
from nearsight.report.figures.style import MUTED, house_style, light_grid
from nearsight.report.marks import WHITE_EDGE, Drawing, add_footnote, draw_dots, legend_above, with_room
from nearsight.report.tables import MISSING, Row, Table, rounded
from nearsight.study.results import StudyResults
from nearsight.study.statistics import mean_interval

SECONDS = "epoch_seconds"
"""Column of a run."""
_TIMES = (
    "Time: that of an epoch of training, the middle one of a run, beside the plain model's of the same seed; runs that "
    "train as one stack have the time of all together, so it compares ways with equally many runs on one machine."
)


def with_times(results: StudyResults) -> pd.DataFrame:
    """The runs with how long an epoch took."""
    if SECONDS in results.runs:
        return results.runs
    seconds = results.history.groupby("run")["seconds"].median()
    return results.runs.assign(**{SECONDS: results.runs["run"].map(seconds).astype("float64")})


def gains(runs: pd.DataFrame, column: str, plain: str, ways: Sequence[str]) -> pd.DataFrame:
    """Of each way and seed: `gain` in points of a score, `longer` in per cent of the plain model's time. A way without
    a run is left out."""
    found = runs.set_index(["condition", "seed"])[[column, SECONDS]].astype("float64")
    parts = []
    for way in ways:
        if way in found.index and plain in found.index:
            own, other = found.loc[way], found.loc[plain]
            gain, longer = 100 * (own[column] - other[column]), 100 * (own[SECONDS] / other[SECONDS] - 1)
            parts.append(pd.DataFrame({"way": way, "gain": gain, "longer": longer}).dropna())
    table = pd.concat(parts) if parts else pd.DataFrame(columns=["way", "gain", "longer"])
    if table.empty:
        raise InputError(f"no seed has a run of {plain} and of a way to make it local, with its time")
    return table.rename_axis("seed").reset_index()


Panels = Mapping[str, pd.DataFrame]
"""What a score is called → its `gains`."""


def gain_table(results: StudyResults, panels: Panels) -> Table:
    """A row for each way and score: what it gains, what it costs, and the one per per cent of the other."""
    rows = []
    for score, table in panels.items():
        for way, seeds in table.groupby("way", sort=False):
            gain, longer = (mean_interval(seeds[column]) for column in ("gain", "longer"))
            row = Row(score=score, way=way).interval("gain", gain, "gain, points", digits=2, signed=True)
            row.interval("longer", longer, "longer, %", digits=1, signed=True)
            rate = gain.value / longer.value if longer.value > 0 else None
            words = MISSING if rate is None else rounded(rate, 3, signed=True)
            rows.append(row.both("per_percent", rate, "points per per cent", words).keep(scale=results.scale))
    notes = (
        "Differences to the plain model within seeds, mean ± half the 95 % interval (Student's t).",
        f"{_TIMES} Where a way takes no longer, nothing is divided.",
        *missing_notes(results),
    )
    return Table.of("cost", f"{results.name}: what each way gains, and what it costs", rows, notes=notes)


def gain_figure(results: StudyResults, panels: Panels) -> Drawing:
    """Gain against cost, a panel for each score: up and to the left is better."""
    names = list(dict.fromkeys(_name(way) for table in panels.values() for way in table["way"]))
    styles = {
        name: style.look_with(linestyle="none", markersize=7, **WHITE_EDGE) for name, style in looks(names).items()
    }
    with house_style():
        figure = Figure(figsize=(max(6.4, 0.8 + 3.6 * len(panels)), 4.4), layout="constrained")
        row = figure.subplots(1, len(panels), squeeze=False)[0]
        for panel, (score, table) in zip(row, panels.items(), strict=True):
            panel.axhline(0, color=MUTED, linewidth=1, zorder=1)
            panel.axvline(0, color=MUTED, linewidth=1, zorder=1)
            for way, seeds in table.groupby("way", sort=False):
                style, longer, gain = styles[_name(str(way))], seeds["longer"], seeds["gain"]
                if len(seeds) > 1:
                    draw_dots(panel, longer, gain, style["color"], f"seeds-{score}-{way}")
                panel.plot(longer.mean(), gain.mean(), **style, zorder=3, gid=f"mean-{score}-{way}")
            panel.set_xlim(*with_room([0.0, *table["longer"]], 0.1, 10.0))
            panel.set_ylim(*with_room([0.0, *table["gain"]], 0.1, 1.0))
            panel.set_title(score)
            panel.set_xlabel("longer than the plain model, % of an epoch")
            panel.set_ylabel("gain, points")
            light_grid(panel)
        legend_above(figure, styles)
    most = max(int(table["seed"].nunique()) for table in panels.values())
    words = f"Means over {most} seeds; dots: seeds." if most > 1 else "1 seed."
    add_footnote(figure, [words, _TIMES, *missing_notes(results), *scale_notes(results)])
    scores = " and ".join(panels)
    return Drawing(
        figure=figure,
        caption=f"What each way to make attention local gains ({scores}) against how much longer it trains; the plain "
        f"model is where the lines cross. Up and to the left is better. {words}",
    )


def _name(way: str) -> str:
    return way.partition(" + ")[0]
