"""S2's Table 1 at our scale: LocAt in five backbones of equal size, what it does to accuracy, and Figure 2 of probes.

All have 5 to 6 M parameters, 64 pixels in 8×8 patches (Swin: its own pyramid, whose third stage has 8×8), and the same
training. Jumbo, as in S2, learns from a teacher: the best of the other eight by validation accuracy, of seed 0.
"""

import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import Any

from matplotlib.figure import Figure

from nearsight.errors import InputError
from nearsight.papers.locat import numbers as s2
from nearsight.papers.locat.measured import differences_to, locality_table
from nearsight.papers.locat.numbers import above
from nearsight.papers.locat.variants import more_local, of_accuracy, trained_as_in_s2
from nearsight.report.conditions import missing_notes, num_seeds
from nearsight.report.figures.looks import looks
from nearsight.report.figures.style import house_style, light_grid
from nearsight.report.marks import WHITE_EDGE, Drawing, add_footnote, draw_dots, legend_above
from nearsight.report.probes import ProbeResults, main_measures, title_of
from nearsight.report.studies import report_on
from nearsight.report.study_tables import INTERVALS
from nearsight.report.tables import MISSING, Row, Table, percent, rounded, with_interval
from nearsight.study import Study
from nearsight.study.recipes import recipe
from nearsight.study.results import StudyResults
from nearsight.study.statistics import mean_interval, paired_difference
from nearsight.train.recipes import vit_tiny_imagenet

TEACHER = "runs/locat-backbones-teacher"
"""A run folder."""
_EPOCHS = 40
_DROP_PATH = 0.1  # S2's for Tiny
_VIT = ("patch_size=8", "embed_dim=192", "depth=12", "num_heads=3")
_OF_BACKBONES: Mapping[str, Mapping[str, Any]] = {
    s2.VIT: {"model.name": "vit_tiny_patch16_224", "model.settings": _VIT},
    "RegViT": {"model.name": "vit_tiny_patch16_reg4_224", "model.settings": _VIT},
    "RoPEViT": {"model.name": "vit_tiny_patch16_rope_mixed_224", "model.settings": _VIT},
    "Swin": {
        "model.name": "swin_tiny_patch4_window7_224",
        "model.settings": (
            *("patch_size=2", "window_size=4", "embed_dim=48"),
            *("depths=(2,2,2,2)", "num_heads=(3,6,12,24)"),
        ),
    },
    "Jumbo": {
        "model.name": "jumbo_vit_tiny_patch16_224",
        "model.settings": ("patch_size=8", "embed_dim=112", "depth=12", "num_heads=2"),
        "protocol.teacher": TEACHER,
    },
}


def _levels() -> dict[str, Any]:
    """Every backbone without LocAt, then with it; ViT's first and last, as a study's ends are compared."""
    pairs = [(s2.BACKBONES[name], settings) for name, settings in _OF_BACKBONES.items()]
    plain = {without: settings for (without, _), settings in pairs}
    local = {local: {**settings, "gaug": True, "prr": True} for (_, local), settings in reversed(pairs)}
    return {**plain, **local}


@recipe("locat-backbones")
def locat_backbones(*, seeds: int = 3) -> Study:
    """LocAt in ViT, RegViT, RoPEViT, Swin and Jumbo, 5 to 6 M parameters each, on Tiny-ImageNet (S2, Table 1, Figure 2)

    Jumbo's teacher is the run of seed 0 with the highest validation accuracy among the other eight conditions, by its
    folder: cp -r runs/locat-backbones/runs/NAME runs/locat-backbones-teacher. Without it all but Jumbo is trained; the
    same command then trains the rest. A study at small scale has no teacher.

    Run     nearsight study run locat-backbones
    Cost    30 cells of 40 epochs of 80,000 images (96 M); needs a GPU
    Result  not run yet; its plan is in results/locat-backbones
    """
    base = trained_as_in_s2(vit_tiny_imagenet("locat"), _EPOCHS)
    protocol = dataclasses.replace(base.protocol, drop_path=_DROP_PATH)
    data = dataclasses.replace(base.data, validation_fraction=0.2)  # as in the other studies on this set
    return Study(
        dataclasses.replace(base, protocol=protocol, data=data, num_measured=5000),
        factors={"model": _levels()},
        seeds=seeds,
    )


def backbones_table(results: StudyResults) -> Table:
    """Table 1 at our scale: accuracy without LocAt and with it, beside the paper's."""
    rows = []
    for name, (without, local) in s2.BACKBONES.items():
        if not (num_seeds(results, without) and num_seeds(results, local)):
            continue
        row = Row(backbone=name, seeds=min(num_seeds(results, without), num_seeds(results, local)))
        for title, label in (("accuracy, %", without), ("with LocAt, %", local)):
            accuracy = mean_interval(results.runs.loc[results.runs["condition"] == label, "test_acc"])
            row.both(f"test_acc {label}", accuracy.value, title, with_interval(accuracy, scale=100, digits=2))
        change = paired_difference(results.runs, local, without, "test_acc")
        words = with_interval(change, scale=100, digits=2, signed=True)
        row.both("difference", change.value, "LocAt's difference, points", words)
        for size, accuracies in s2.TABLE_1.accuracy.items():
            theirs = 100 * (accuracies[local] - accuracies[without])
            words = f"{percent(accuracies[without])}, {rounded(theirs, 2, signed=True)}"
            row.both(f"paper_{size}", theirs, f"paper, {size}", words)
        rows.append(row)
    if not rows:
        raise InputError("no backbone has runs both without and with LocAt yet")
    notes = (INTERVALS, "The paper: on ImageNet-1K at 224 pixels, one run each.", *missing_notes(results))
    return Table.of("backbones", f"{results.name}: S2's Table 1 at our scale", rows, notes=notes)


def probed_backbones(results: ProbeResults) -> list[str]:
    """Those of which both conditions were probed. Fewer than two are no comparison of backbones."""
    known = set(results.rows["condition"])
    found = [name for name, pair in s2.BACKBONES.items() if known.issuperset(pair)]
    if len(found) < 2:
        raise InputError("fewer than two backbones were probed both without and with LocAt")
    return found


def features_table(results: ProbeResults) -> Table:
    """Table 1 of frozen features: every probe without LocAt, and what LocAt changes."""
    study, rows = results.as_study(), []
    for name in probed_backbones(results):
        without, local = s2.BACKBONES[name]
        row = Row(backbone=name)
        for measure in main_measures(results.measures):
            mean = mean_interval(study.runs.loc[study.runs["condition"] == without, measure].dropna())
            change = paired_difference(study.runs, local, without, measure)
            row.keep(**{measure: mean.value, f"{measure}_difference": change.value})
            words = f"{percent(mean.value)}; {with_interval(change, scale=100, digits=2, signed=True)}"
            row.show(title_of(measure), words if change.n else MISSING)
        rows.append(row)
    notes = (*results.scale_notes, "In per cent: without LocAt; what LocAt adds within seeds, in points.")
    return Table.of("backbones", f"{results.name}: backbones without LocAt, and what it adds", rows, notes=notes)


_ACCURACY, _MIOU = "linear", "segment_miou"


def accuracy_and_segmentation(results: ProbeResults) -> Drawing:
    """S2's Figure 2: accuracy against segmentation, an arrow per backbone from without LocAt to with it."""
    names, study = probed_backbones(results), results.as_study()
    if not {_ACCURACY, _MIOU} <= set(results.measures):
        raise InputError("it needs a linear classifier and segmentation of every model")
    styles = {
        name: style.look_with(linestyle="none", markersize=7, **WHITE_EDGE) for name, style in looks(names).items()
    }
    with house_style():
        figure = Figure(figsize=(5.6, 4.4), layout="constrained")
        panel = figure.subplots()
        for name in names:
            ends = []
            for label in s2.BACKBONES[name]:
                seeds = 100 * study.runs.loc[study.runs["condition"] == label, [_ACCURACY, _MIOU]].dropna()
                if len(seeds) > 1:
                    draw_dots(panel, seeds[_ACCURACY], seeds[_MIOU], styles[name]["color"], f"seeds-{label}")
                ends.append((float(seeds[_ACCURACY].mean()), float(seeds[_MIOU].mean())))
            panel.annotate("", ends[1], ends[0], arrowprops={"arrowstyle": "->", "color": styles[name]["color"]})
            for label, end in zip(s2.BACKBONES[name], ends, strict=True):
                panel.plot(*end, **styles[name], gid=f"mean-{label}")
        panel.set_xlabel("accuracy of a linear classifier on frozen features, %")
        panel.set_ylabel("segmentation mIoU, %")
        light_grid(panel)
        legend_above(figure, styles)
    words = "Arrows: from a backbone to the same with LocAt; means over seeds, dots: seeds."
    add_footnote(figure, [words, *results.scale_notes])
    caption = f"Accuracy against segmentation of frozen features (S2, Figure 2). Up and to the right is better. {words}"
    return Drawing(figure=figure, caption=caption)


_of_backbones = partial(
    of_accuracy, source="S2 §5.2, Table 1", published=[s2.TABLE_1], family="accuracy (Table 1)", rule="not worse"
)
_CLAIMS = [
    claim
    for name, (without, local) in s2.BACKBONES.items()
    for claim in (
        _of_backbones(f"{name.lower()}-accuracy", f"LocAt costs {name} no accuracy", above(local, without)),
        dataclasses.replace(
            more_local("", "mean_mad", id=f"{name.lower()}-mean-mad", contrast=above(local, without)),
            text=f"LocAt makes attention local: heads of {name} are more local on average",
        ),
    )
]

report_on(
    "locat-backbones", paper=s2.PAPER, claims=_CLAIMS, tables=(backbones_table, locality_table, differences_to(s2.VIT))
)
