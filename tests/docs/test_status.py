"""The numbers of docs/status.md are those of the tables under results/."""

import json
import re
from pathlib import Path
from typing import Any

import pandas as pd

from nearsight.papers import declare_all
from nearsight.report.own_patch import HEADS, OTHERS, with_own_patch
from nearsight.report.studies import report_of
from nearsight.study import StudyResults

declare_all()
ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "status.md").read_text(encoding="utf-8")
TOLD = re.sub(r"\s+", " ", TEXT)  # lines may break anywhere


def test_the_cost_of_measuring_is_what_was_measured() -> None:
    rows = json.loads((ROOT / "results/bench-measure/h200.json").read_text())["rows"]
    for row in rows:
        slower, maps = row["ratio"], row["maps_ms"] / row["forward_ms"]
        extra, extra_of_maps = row["extra_bytes"] / 1e6, row["maps_extra_bytes"] / 1e6
        line = f"| {row['num_tokens']:,} | {slower:.2f} × | {maps:.2f} × | {extra:.1f} of {extra_of_maps:,.0f} MB |"
        assert line in TEXT


def test_the_speed_of_training_is_what_was_measured() -> None:
    ordinary, *ours = json.loads((ROOT / "results/bench-train/h200.json").read_text())["rows"]
    assert f"16 DataLoader workers | {round(ordinary['images_per_second'], -2):,.0f} | 1 × |" in TEXT
    shown = {1: "one model", 8: "8 models", 24: "24 models"}
    for row in ours:
        line = f"| {shown.get(row['num_cells'])} | {round(row['images_per_second'], -2):,.0f} | {row['ratio']:.0f} × |"
        assert line in TEXT or row["num_cells"] not in shown


def test_the_cost_of_locat_is_what_was_measured() -> None:
    rows = (ROOT / "results/bench-gaug/h200.txt").read_text().splitlines()
    ratios = {(words[0], words[1], words[3]): float(words[6]) for words in map(str.split, rows[2:])}
    assert f"takes {ratios['vit_base_patch16_224', '197', 'nearsight']:.2f} times the plain one" in TOLD
    assert f"1,025 tokens {ratios['attention', '1025', 'nearsight']:.2f} times" in TOLD
    assert f"takes {ratios['attention', '1025', 'dense']:.0f} times" in TOLD


def judged(study: str, claim: str) -> "pd.Series[Any]":
    verdicts = pd.read_csv(ROOT / "results" / study / "tables" / "verdict.csv")
    (row,) = (row for _, row in verdicts.iterrows() if row["claim"].startswith(claim))
    return row


def test_the_cost_of_loading_pictures_is_what_was_measured() -> None:
    text = (ROOT / "docs/train.md").read_text(encoding="utf-8")
    told = re.findall(r"^\| .+ \| (\d+) \| (\d\.\d\d) \| (\d\.\d\d) \|$", text, flags=re.MULTILINE)
    rows = {row["what"]: row for row in json.loads((ROOT / "results/bench-input/cpu-2.json").read_text())["rows"]}
    order = ("timm", "torchvision", "nearsight", "nearsight, jitter", "nearsight, bytes", "nearsight, Pillow, bytes")
    expected = [[rows[name][key] for key in ("images_per_second", "ratio", "ratio_torchvision")] for name in order]
    assert told == [(f"{rate:.0f}", f"{ratio:.2f}", f"{other:.2f}") for rate, ratio, other in expected]


def test_the_protocol_study_is_what_its_results_say() -> None:
    """The numbers of the table are those of the runs, and those in the words below it are those of the verdicts."""
    study = "ablation-fitted-cifar100"
    results = StudyResults.read(ROOT / "results" / study)
    runs, paper = with_own_patch(results), report_of(study).published.conditions
    number = r"([\d.]+) \(([\d.]+) to ([\d.]+)\)"
    rows = re.findall(rf"^\| [^|]+ \| {number} \| ([\d.]+) \| {number} \| ([\d.]+) \| {number} \|$", TEXT, re.MULTILINE)
    assert len(rows) == 8
    told = {tuple(map(float, row)) for row in rows}
    for condition, some in runs.groupby("condition"):

        def of_seeds(values: "pd.Series[float]", digits: int) -> list[float]:
            return [round(float(value), digits) for value in (values.mean(), values.min(), values.max())]

        expected = (
            *(*of_seeds(100 * some["test_acc"], 1), round(100 * paper[condition].test_acc, 1)),
            *(*of_seeds(some["min_mad"], 3), paper[condition].min_mad, *of_seeds(some[OTHERS], 3)),
        )
        assert expected in told, condition
    with_it, without = (runs.loc[runs["cutmix"] == level, "min_mad"] for level in ("on", "off"))
    assert f"below {with_it.max():.3f}, all without at or above {without.min():.3f}" in TOLD
    separates = judged(study, "CutMix separates the conditions")
    assert f"by {-separates['value']:.3f} ± {(separates['high'] - separates['low']) / 2:.3f}, and by twice" in TOLD
    beside = judged(study, "AutoAugment does not change what CutMix does")
    without_it, with_both = map(float, re.findall(r"(?:CutMix's|,) −([\d.]+)", beside["ours"])[:2])
    assert 1.5 < with_both / without_it < 2.5
    assert (beside["verdict"], beside["to_decide"]) == ("inconclusive", 8)
    assert "three seeds suggest it, eight would decide" in TOLD
    assert f"in {(runs[HEADS] > 0).sum()} of {len(with_it)} runs" in TOLD
    own = runs.loc[runs[HEADS] > 0, "max_share_self"]
    assert f"spend {100 * own.min():.0f} % of their attention" in TOLD


def test_what_is_told_of_other_studies_is_what_their_results_say() -> None:
    longer = judged("mixing-long-cifar100", "Does CutMix make the most local head")
    assert f"nearer by {-longer['value']:.3f} ± {(longer['high'] - longer['low']) / 2:.3f}" in TOLD
    for claim in (
        "Does hiding CutMix's box",
        "Does Mixup make it",
        "Does a second label make it",
        "Does CutMix make the",
    ):
        assert judged("mixing-long-cifar100", claim)["verdict"] == "yes"
    for study in ("protocol-cifar10", "protocol-tiny-imagenet"):
        nearer = judged(study, "Under the Modern protocol the most local head")
        assert (nearer["verdict"], nearer["n"]) == ("in direction", 2)
    fitted = "emergence-fitted-cifar100"
    assert judged(fitted, "Do local heads appear")["ours"].startswith("4 of 4 runs with CutMix, 0 of 4 without")
    epochs = judged(fitted, "When does the first local head")["verdict"].removeprefix("epoch ").split(",")[0]
    assert f"the first at epoch {epochs}, and none turns back" in TOLD
    assert judged(fitted, "Does a local head ever")["verdict"] == "no"
