"""What changed heads cost a model: in sentences, in tables and on the page.

Intervals are over images: of the mean loss, ± 1.96 standard errors, of the same images with and without the change
(`Ablation.rows`). Layers and heads count from 0.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from numpy.typing import NDArray

from nearsight.files import replacing
from nearsight.metrics import next_patch_distance
from nearsight.report.figures.ablation import reach_figure, removal_figure, worth_figure
from nearsight.report.figures.style import figure_files, save_figure
from nearsight.report.inputs import ModelHeads
from nearsight.report.own_patch import OWN_PATCH
from nearsight.report.page.document import Section, figure_html
from nearsight.report.page.tables import table_html
from nearsight.report.tables import Row, Table, records, rounded

if TYPE_CHECKING:
    from nearsight.probe import Ablation

Kind = Literal["head", "reach", "removal"]
TABLES: dict[Kind, str] = {"head": "ablation-heads", "reach": "ablation-reach", "removal": "ablation-removal"}
"""Kind → the name of its table and of its figure."""
SMALL = 0.01
"""A loss below it is called small: 1 point."""
METRICS: dict[str, str] = {"accuracy": "accuracy", "miou": "mIoU"}
"""Column → its name for people."""
_WIDTHS = {0.0: "their own patch", 1.0: "the patches next to each", 1.5: "3×3 patches"}
_NUM_SHOWN = 10
_INTERVALS = "Intervals are over images: 95 %, for these weights and these orders of removal."
_NUM_RESAMPLES = 1000
_CAPTIONS: dict[Kind, str] = {
    "head": "Layers × heads. Left: mean attention distance. The others: how many points of {metric} the model loses "
    "when this head alone follows the plan; bold where the interval over images excludes 0. Framed: own-patch heads, "
    "whose distance is below half of that to the next patch.",
    "reach": "The {metric} when all heads of a layer, or of all layers, attend to no patch beyond a reach. Dashed: the "
    "unchanged model. Band: 95 % interval of the loss over images.",
    "removal": "The {metric} while more and more heads give nothing. Bands: 95 % intervals of the loss over images.",
}


@dataclass(frozen=True, eq=False)
class AblationReport:
    """An ablation of a measured model."""

    found: "Ablation"
    model: ModelHeads
    by: str
    """What its score is, in words."""

    @property
    def metric(self) -> str:
        """The column of scores."""
        return self.found.tried.metric

    def frame(self, kind: Kind) -> pd.DataFrame:
        return self._frames[kind]

    @cached_property
    def _frames(self) -> dict[Kind, pd.DataFrame]:
        return {kind: self.found.to_frame(kind) for kind in TABLES}

    def own_patch(self) -> NDArray[np.bool_]:
        """[layers, heads]: whose distance is below half of that to the next patch."""
        num_heads = [site.num_heads for site in self.found.tried.found.layers.values()]
        own: NDArray[np.bool_] = np.zeros((len(num_heads), max(num_heads)), dtype=np.bool_)
        for row in records(self.model.measured()):
            grid = self.model.grid(row["layer"])
            if grid is not None and max(grid) > 1:
                own[row["layer"], row["head"]] = row["mad"] < OWN_PATCH * next_patch_distance(grid)
        return own

    def sentences(self) -> list[str]:
        first = f"Unchanged: {_percent(self.found.score)} ({self.by}, {len(self.found.tried.base_N)} images)."
        return [first, *self._of_heads(), *self._of_reach(), *self._of_removal()]

    def _of_heads(self) -> Iterator[str]:
        heads = self.frame("head")
        for plan in dict.fromkeys(heads["plan"]) if len(heads) else {}:
            of_plan = heads[heads["plan"] == plan]
            rows = records(of_plan)
            worst = max(rows, key=lambda row: row["loss"])
            done = "removed" if plan == "zero" else f"with {plan} attention"
            if worst["loss"] > 0:
                which = f"layer {worst['layer']} head {worst['head']} (MAD {rounded(worst['mad'])})"
                left = f"{_percent(worst[self.metric])} is left (loss {_points(worst, 'loss')})"
                yield f"The head that costs most {'when ' if plan == 'zero' else ''}{done} is {which}: {left}."
            felt, small = (sum(row["loss_low"] > 0 for row in rows), sum(row["loss_high"] < SMALL for row in rows))
            yield (
                f"{done.capitalize()} one at a time, {felt} of {len(rows)} heads cost something (interval above 0) and "
                f"{small} cost less than 1 point (interval below it)."
            )
            yield from self._correlation(plan, of_plan)

    def _correlation(self, plan: str, of_plan: pd.DataFrame) -> Iterator[str]:
        """Of the ranks of MAD and loss over heads; images are drawn again for its interval, MAD stays as it is."""
        mad_V = of_plan["mad"].to_numpy(float)
        tried = self.found.tried
        which = [variant.kind == "head" and variant.settings["plan"] == plan for variant in tried.variants]
        lost_VN = tried.base_N - tried.values_VN[which]
        found = _rank_correlation(mad_V, lost_VN.mean(1)[None])[0]
        if np.isfinite(found):
            num_images, generator = len(tried.base_N), np.random.default_rng(0)
            times_RN = generator.multinomial(num_images, np.full(num_images, 1 / num_images), size=_NUM_RESAMPLES)
            drawn_R = _rank_correlation(mad_V, times_RN @ lost_VN.T / num_images)
            values = [rounded(value, 2, signed=True) for value in (found, *np.nanquantile(drawn_R, [0.025, 0.975]))]
            yield f"Rank correlation of MAD and loss over heads ({plan}): {values[0]}, 95 % {values[1]} to {values[2]}."

    def _of_reach(self) -> Iterator[str]:
        rows = records(self.frame("reach"))
        if not rows:
            return
        everywhere = [row for row in rows if row["layer"] == "all"]
        shown = min(everywhere, key=lambda row: abs(row["reach"] - 1.5))
        limit = _WIDTHS.get(shown["reach"], "patches near each")
        yield (
            f"With all layers limited to {limit} (r = {shown['reach']:g}), {_percent(shown[self.metric])} is left "
            f"(loss {_points(shown, 'loss')})."
        )
        layers = range(len(self.found.tried.found.layers))
        needed = [_least_reach([row for row in rows if row["layer"] == layer]) for layer in layers]
        if more := sum(map(math.isinf, needed)):
            which = f"{more} of {len(needed)} layers lose 1 point or more on average even at r = {rows[-1]['reach']:g}"
        else:
            which = f"each loses less than 1 point on average from r = {max(needed):g} on"
        yield f"With one layer limited at a time, {which}."

    def _of_removal(self) -> Iterator[str]:
        for row in self.found.areas():
            text = f"Heads removed {row['order']}: {_percent(row['area'])} on average from no head to all of them"
            if "above_random" in row:
                text += f", {_points(row, 'above_random', sign='+')} beside the mean of the random orders"
            yield f"{text}."

    @cached_property
    def figures(self) -> dict[Kind, Figure]:
        """Kind → figure, of what was asked for."""
        heads, reaches, removals = self._frames.values()
        drawn: dict[Kind, Figure] = {}
        if len(heads):
            drawn["head"] = worth_figure(heads, self.own_patch())
        if len(reaches):
            drawn["reach"] = reach_figure(reaches, self.found.score, self.metric, METRICS[self.metric])
        if len(removals):
            drawn["removal"] = removal_figure(removals, self.found.score, self.metric, METRICS[self.metric])
        return drawn

    def section(self) -> Section:
        """Of the page."""
        sentences = self.sentences()
        body = "".join(f"<p>{escape(sentence)}</p>" for sentence in (*sentences, _INTERVALS))
        for kind, figure in self.figures.items():
            caption = _CAPTIONS[kind].format(metric=METRICS[self.metric])
            body += figure_html(TABLES[kind], figure, " ".join((caption, *sentences)), caption)
        body += table_html(self._costliest()) if "head" in self.figures else ""
        return Section(name="ablation", heading="What heads are worth", body=body)

    def _costliest(self) -> Table:
        costliest = self.frame("head").sort_values("loss", ascending=False, kind="stable").head(_NUM_SHOWN)
        rows = [
            Row(plan=row["plan"], layer=row["layer"], head=row["head"])
            .show("MAD", rounded(row["mad"]))
            .show(METRICS[self.metric], _percent(row[self.metric]))
            .show("loss", _points(row, "loss"))
            for row in records(costliest)
        ]
        return Table.of("costliest", "The changes of single heads that cost most", rows, notes=[_INTERVALS])

    def write(self, out: Path) -> list[Path]:
        """The tables and figures of what was asked for."""
        files = []
        for kind, figure in self.figures.items():
            files.append(out / f"{TABLES[kind]}.csv")
            with replacing(files[-1]) as temporary:
                self.frame(kind).to_csv(temporary, index=False)
            files += save_figure(figure, out / "figures", TABLES[kind])
        return files


def ablation_files(folder: Path) -> Iterator[Path]:
    """All that an ablation may have left in a folder."""
    yield folder / "ablation.json"
    for name in TABLES.values():
        yield folder / f"{name}.csv"
        yield from figure_files(folder / "figures", name)


def _least_reach(rows: Sequence[Mapping[str, Any]]) -> float:
    """From which on the loss stays small; ∞ if it never does."""
    least = math.inf
    for row in sorted(rows, key=lambda row: -row["reach"]):
        if row["loss"] >= SMALL:
            break
        least = row["reach"]
    return least


def _rank_correlation(x_V: NDArray[np.float64], y_RV: NDArray[np.float64]) -> NDArray[np.float64]:
    """Spearman's, of x with each row; NaN where there is none, as of constant rows."""
    ranks_V, ranks_RV = pd.Series(x_V).rank().to_numpy(), pd.DataFrame(y_RV).rank(axis=1).to_numpy()
    x, y = ranks_V - ranks_V.mean(), ranks_RV - ranks_RV.mean(1, keepdims=True)
    with np.errstate(invalid="ignore", divide="ignore"):
        found: NDArray[np.float64] = (y @ x) / np.sqrt((x**2).sum() * (y**2).sum(1))
    return found


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _points(row: Mapping[str, Any], name: str, *, sign: str = "-") -> str:
    mean, low, high = (f"{100 * row[key]:{sign}.1f}".replace("-", "−") for key in (name, f"{name}_low", f"{name}_high"))
    return f"{mean} points, 95 % {low} to {high}"
