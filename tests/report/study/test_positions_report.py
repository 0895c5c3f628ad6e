"""The report of S3's image studies, and of what learned positions have to do with S1: planted effects are found."""

import dataclasses
import itertools
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from made_up_results import made_up, noise
from matplotlib.axes import Axes
from scipy import stats

from nearsight.errors import InputError
from nearsight.recipes.permuted import permuted_cifar100, positional_cifar100, positional_svhn
from nearsight.recipes.protocols import ablation_cifar100, protocol_cifar10
from nearsight.report.study import write_study_report, writing
from nearsight.report.study.positions import paper as s3
from nearsight.report.study.positions.association import association_table, chance_association
from nearsight.report.study.positions.figure_association import association_and_distance
from nearsight.report.study.positions.figure_permuted import permutation_curves
from nearsight.report.study.positions.figure_positional import seeds_of_both
from nearsight.report.study.positions.permuted import permutation_table
from nearsight.report.study.positions.positional import positional_table
from nearsight.report.study.positions.rank_correlation import rank_correlation
from nearsight.report.study.registry import parts_of
from nearsight.report.study.rules import Verdict
from nearsight.report.study.verdict import judge_claims
from nearsight.study import Cell, StudyResults

REPRODUCED, DIRECTION, NOT, UNTESTED = tuple(Verdict)
PERMUTED = {
    "ViT": {"1×1": 0.45, "4×4": 0.448, "32×32": 0.445},
    "Positional ViT": {"1×1": 0.44, "4×4": 0.439, "32×32": 0.436},
    "ResNet-18": {"1×1": 0.65, "4×4": 0.55, "32×32": 0.38},
}


def of_permuted(*, seeds: int = 3, spread: float = 0.001, **changed: dict[str, float]) -> StudyResults:
    """Seeds differ by a point, in all conditions alike; `changed` by the first word of the network."""
    planted = {name: {**row, **changed.get(name.split("-")[0].split()[0], {})} for name, row in PERMUTED.items()}

    def numbers(cell: Cell) -> dict[str, float]:
        accuracy = planted[cell.levels["model"]][cell.levels["tiles"]]
        return {"test_acc": accuracy + 0.01 * cell.seed + noise(cell, spread)}

    results = made_up(permuted_cifar100(seeds=seeds), numbers)
    without = (results.runs["model"] == "ResNet-18") | (results.runs["tiles"] == "32×32")
    results.runs.loc[without, ["min_mad", "max_mad", "min_entropy", "max_entropy"]] = math.nan
    return results


def verdicts(results: StudyResults) -> list[str]:
    return [str(judgement.finding.verdict) for judgement in judge_claims(results)]


def only(results: StudyResults, keep: Callable[[pd.DataFrame], "pd.Series[bool]"]) -> StudyResults:
    return dataclasses.replace(results, runs=results.runs[keep(results.runs)].reset_index(drop=True))


def drawn(panel: Axes, gid: str) -> tuple[list[float], list[float]]:
    (line,) = [line for line in panel.get_lines() if line.get_gid() == gid]
    return [float(x) for x in line.get_xdata()], [float(y) for y in line.get_ydata()]


# permuted-cifar100


def test_shuffled_tiles_are_judged_by_what_was_planted() -> None:
    # Per size of tiles: the ViT keeps, the ResNet loses, and more than the ViT, positions alone keep as much.
    assert verdicts(of_permuted()) == [REPRODUCED, REPRODUCED, REPRODUCED, "yes"] * 2
    lost = of_permuted(ViT={"32×32": 0.38}, Positional={"4×4": 0.38})
    assert verdicts(lost) == [REPRODUCED, REPRODUCED, REPRODUCED, "no", NOT, REPRODUCED, REPRODUCED, "yes"]
    robust = of_permuted(ResNet={"4×4": 0.65 + 0.01, "32×32": 0.66})
    assert verdicts(robust) == [REPRODUCED, NOT, NOT, "yes"] * 2
    noisy = of_permuted(seeds=2, spread=0.01, ViT={"4×4": 0.45})
    assert verdicts(noisy)[0] == DIRECTION
    one_seed = of_permuted(seeds=1)
    assert verdicts(one_seed) == [DIRECTION, DIRECTION, DIRECTION, "yes"] * 2


def test_the_drops_are_paired_within_seeds() -> None:
    results = of_permuted()
    table = permutation_table(results).numbers.set_index(["network", "tiles"])
    wide = results.runs.pivot(index="seed", columns=["model", "tiles"], values="test_acc")
    theirs = stats.ttest_rel(wide["ResNet-18", "4×4"], wide["ResNet-18", "1×1"]).confidence_interval(0.95)
    ours = table.loc[("ResNet-18", "4×4")]
    assert (ours["change_low"], ours["change_high"]) == pytest.approx((theirs.low, theirs.high))
    excess = (wide["ResNet-18", "32×32"] - wide["ResNet-18", "1×1"]) - (wide["ViT", "32×32"] - wide["ViT", "1×1"])
    assert table.loc[("ResNet-18", "32×32"), "change_beyond_vit_mean"] == pytest.approx(excess.mean())
    assert table.loc[("ResNet-18", "32×32"), "paper_change"] == pytest.approx(-0.23)
    assert table["paper_change"].notna().sum() == 2  # the ViT's and the ResNet's, of single pixels
    assert table.loc[("ViT", "1×1"), ["change_mean", "change_beyond_vit_mean"]].isna().all()
    # The words are those of the factors, not the conditions' names.
    assert not permutation_table(results).shown["network"].str.contains("model|\\+").any()


def test_missing_conditions_leave_the_rest() -> None:
    results = only(of_permuted(), lambda runs: ~((runs["model"] == "ResNet-18") & (runs["tiles"] == "1×1")))
    assert verdicts(results) == [REPRODUCED, UNTESTED, UNTESTED, "yes"] * 2
    reasons = [judgement.finding.ours for judgement in judge_claims(results)]
    assert "no seed of ResNet-18 has a run with 4×4 tiles and one without shuffling" in reasons[1]
    table = permutation_table(results)
    assert len(table.numbers) == 8
    assert any("No complete run yet: model ResNet-18, tiles 1×1" in note for note in table.notes)
    ours, _, change = permutation_curves(results).figure.axes
    assert len(drawn(ours, "accuracy-ResNet-18")[0]) == 2
    assert drawn(change, "change-ResNet-18")[0] == []


def test_the_permutation_curves_are_the_means() -> None:
    results = of_permuted()
    drawing = permutation_curves(results)
    ours, papers, change = drawing.figure.axes
    means = results.runs.groupby(["model", "tiles"])["test_acc"].mean()
    for network in PERMUTED:
        numbers, heights = drawn(ours, f"accuracy-{network}")
        assert heights == pytest.approx([100 * means[network, tiles] for tiles in ("1×1", "4×4", "32×32")])
        assert [round(math.log2(number)) for number in numbers] == [0, 2, 5]
        below = [100 * (means[network, tiles] - means[network, "1×1"]) for tiles in ("1×1", "4×4", "32×32")]
        assert drawn(change, f"change-{network}")[1] == pytest.approx(below)
    assert drawn(papers, "paper-ResNet-18") == ([2, 32], [80, pytest.approx(57)])
    assert drawn(papers, "paper-VGG") == ([2, 32], [76, 47])
    assert ours.get_ylim() == papers.get_ylim()
    assert ours.get_xscale() == "log"
    assert "fewer epochs" in drawing.caption


# positional-*


def of_positional(*, accuracy: float = -0.002, distance: float = 0.1, association: float = 0.1) -> StudyResults:
    """What positional attention changes."""

    def numbers(cell: Cell) -> dict[str, float]:
        is_positional = cell.levels["model"] == "Positional ViT"
        return {
            "test_acc": 0.62 + 0.02 * cell.seed + accuracy * is_positional + noise(cell, 0.001),
            "min_mad": 0.15 + distance * is_positional + noise(cell, 0.005),
            "early_mad": 0.38 + distance * is_positional,
        }

    results = made_up(positional_cifar100(), numbers)
    random = np.random.default_rng(3)
    is_positional = results.runs["model"] == "Positional ViT"
    spread = 0.01 * random.standard_normal(len(results.runs))
    results.runs["position_association"] = 0.6 + association * is_positional + spread
    return results


def test_positional_attention_is_judged_by_what_was_planted() -> None:
    assert verdicts(of_positional()) == [REPRODUCED, "ViT", "ViT", "Positional ViT"]
    other = of_positional(accuracy=-0.03, distance=-0.1, association=-0.1)
    assert verdicts(other) == [NOT, "Positional ViT", "Positional ViT", "ViT"]
    assert verdicts(of_positional(association=0.0))[3] == "not shown"
    unmeasured = of_positional()
    unmeasured.runs["position_association"] = math.nan
    assert verdicts(unmeasured)[3] == UNTESTED
    lonely = only(of_positional(), lambda runs: runs["model"] == "ViT")
    assert verdicts(lonely) == [UNTESTED] * 4
    assert list(positional_table(lonely).numbers["model"]) == ["ViT"]


def test_the_difference_stands_beside_the_papers() -> None:
    results = of_positional()
    table = positional_table(results)
    row = table.numbers.set_index("model").loc["Positional ViT minus ViT"]
    wide = results.runs.pivot(index="seed", columns="model", values="position_association")
    theirs = stats.ttest_rel(wide["Positional ViT"], wide["ViT"]).confidence_interval(0.95)
    assert (row["position_association_low"], row["position_association_high"]) == pytest.approx(
        (theirs.low, theirs.high)
    )
    assert row["paper_test_acc"] == 0.0
    assert list(table.shown["paper's accuracy"]) == ["68.0", "68.0", "0.0"]
    svhn = parts_of(positional_svhn().name).claims[0]
    assert svhn.paper == "98.20 to 97.30 %: −0.90 points"
    assert set(s3.PAIRS) == {f"positional-{name}" for name in ("cifar10", "cifar100", "svhn")}


def test_the_boxes_are_the_seeds() -> None:
    results = of_positional()
    panels = {panel.get_title(loc="left"): panel for panel in seeds_of_both(results).figure.axes}
    assert len(panels) == 4
    panel = panels["test accuracy, %"]
    values = 100 * results.runs.loc[results.runs["model"] == "ViT", "test_acc"]
    assert drawn(panel, "median-test_acc-ViT")[1] == pytest.approx([values.median()] * 2)
    assert drawn(panel, "seeds-test_acc-ViT")[1] == pytest.approx(list(values))
    assert ["paper: 68.0" in label.get_text() for label in panel.get_xticklabels()] == [True, True]
    results.runs["position_association"] = math.nan
    assert len(seeds_of_both(results).figure.axes) == 3
    one_seed = only(results, lambda runs: runs["seed"] == 0)
    assert "1 seed" in seeds_of_both(one_seed).caption


# From S3 to S1


@pytest.mark.parametrize("n", [3, 5, 6])
def test_the_p_of_few_runs_counts_every_order(n: int) -> None:
    random = np.random.default_rng(n)
    one, other = random.normal(size=n), random.integers(0, 3, size=n) + np.arange(n) / 2
    ours = rank_correlation(one, other)
    real = stats.spearmanr(one, other).statistic
    everything = np.array([stats.spearmanr(one, order).statistic for order in itertools.permutations(other)])
    share = min((everything <= real + 1e-9).mean(), (everything >= real - 1e-9).mean())
    assert ours.value == pytest.approx(real)
    assert (ours.p, ours.exact, ours.n) == (pytest.approx(min(1.0, 2 * share)), True, n)


@pytest.mark.parametrize("slope", [0.0, 0.2, -0.4])
def test_the_p_of_many_runs_is_drawn(slope: float) -> None:
    random = np.random.default_rng([7, int(10 * abs(slope))])
    one = random.normal(size=40)
    other = slope * one + random.normal(size=40)
    ours, theirs = rank_correlation(one, other), stats.spearmanr(one, other)
    assert ours.value == pytest.approx(theirs.statistic)
    # Four times the error of a share of 9,999 drawn orders, and a little for the large-sample p.
    half = theirs.pvalue / 2
    error = 2 * math.sqrt(half * (1 - half) / 9999)
    assert ours.p == pytest.approx(theirs.pvalue, abs=4 * error + 0.002)
    assert not ours.exact
    assert ours == rank_correlation(one, other)
    assert ours.low < ours.value < ours.high


def test_what_has_no_rank_correlation() -> None:
    assert math.isnan(rank_correlation([1.0, 2.0], [1.0, 2.0]).value)
    assert math.isnan(rank_correlation([1.0, 1.0, 1.0], [1.0, 2.0, 3.0]).p)
    perfect = rank_correlation(range(6), range(6))
    assert (perfect.value, perfect.p) == (pytest.approx(1.0), pytest.approx(2 / math.factorial(6)))
    assert math.isnan(perfect.low)


def of_ablation(*, effect: float = 0.2, link: float = -1.0, seeds: int = 3) -> StudyResults:
    """CutMix raises association by `effect`; within its groups, the smallest distance follows `link` times it."""

    def numbers(cell: Cell) -> dict[str, float]:
        distance = 0.08 if cell.levels["cutmix"] != "off" else 0.3
        return {"min_mad": distance + link * noise(cell, 0.02)}

    study = ablation_cifar100(seeds=seeds)
    results = made_up(study, numbers)
    association = {
        cell.run: 0.5 + effect * (cell.levels["cutmix"] != "off") + noise(cell, 0.02) for cell in study.cells
    }
    results.runs["position_association"] = results.runs["run"].map(association)
    return results


def answers(results: StudyResults) -> dict[str, str]:
    table = association_table(results).numbers
    return dict(zip(table["what"], table["answer"], strict=True))


def test_cutmix_and_association_in_an_ablation() -> None:
    results = of_ablation()
    table = association_table(results).numbers.set_index("what")
    means = results.runs.groupby("cutmix")["position_association"].mean()
    effect = table.loc["effect on association, CutMix"]
    assert effect["value"] == pytest.approx(means["p=0.5"] - means["off"])
    assert effect["low"] < 0.2 < effect["high"]
    assert table.loc["association, with CutMix", "value"] == pytest.approx(means["p=0.5"])
    found = answers(results)
    assert found["effect on association, CutMix"] == "yes"
    assert found["effect on association, AutoAugment"] == "–"
    groups = ("all runs", "without CutMix", "with CutMix")
    assert [found[f"association and min MAD, {group}"] for group in groups] == ["yes"] * 3
    # More association goes with larger distances within groups, though CutMix itself makes it seem otherwise.
    confounded = answers(of_ablation(link=1.0))
    told = [confounded[f"association and min MAD, {group}"] for group in groups]
    assert told == ["yes", "the other way round", "the other way round"]
    assert answers(of_ablation(effect=-0.2))["effect on association, CutMix"] == "the other way round"
    assert answers(of_ablation(effect=0.0))["effect on association, CutMix"] == "not shown"


def test_association_with_missing_runs() -> None:
    results = of_ablation()
    results.runs.loc[results.runs["condition"] == "Modern", "position_association"] = math.nan
    table = association_table(results)
    assert any("21 runs" in note for note in table.notes)
    assert answers(results)["effect on association, CutMix"] == "yes"
    without = only(of_ablation(), lambda runs: runs["cutmix"] == "off")
    left = answers(without)
    assert "effect on association, CutMix" not in left
    assert left["association and min MAD, all runs"] == "yes"
    assert left["association and min MAD, with CutMix"] == "not shown"
    assert "with CutMix none (n = 0)" in association_and_distance(without).caption
    without.runs["min_mad"] = math.nan
    with pytest.raises(InputError, match="learned positions and measured heads"):
        association_and_distance(without)


def of_protocols() -> StudyResults:
    study = protocol_cifar10(seeds=3)
    results = made_up(study, lambda cell: {"min_mad": 0.05 if cell.levels["protocol"] == "Modern" else 0.3})
    raised = {cell.run: 0.5 + 0.3 * (cell.condition == "Modern") + noise(cell, 0.02) for cell in study.cells}
    results.runs["position_association"] = results.runs["run"].map(raised)
    return results


def test_of_two_protocols_the_change_is_paired() -> None:
    results = of_protocols()
    row = association_table(results).numbers.set_index("what").loc["change of association, Modern minus Baseline"]
    wide = results.runs.pivot(index="seed", columns="protocol", values="position_association")
    theirs = stats.ttest_rel(wide["Modern"], wide["Baseline"]).confidence_interval(0.95)
    assert (row["low"], row["high"], row["answer"]) == (
        pytest.approx(theirs.low),
        pytest.approx(theirs.high),
        "yes",
    )


def test_chance_is_that_of_the_grid() -> None:
    def by_hand(side: int) -> float:
        patches = list(itertools.product(range(side), repeat=2))
        counts = [sum(max(abs(a - c), abs(b - d)) == 1 for c, d in patches) for a, b in patches]
        return sum(counts) / len(patches) / (len(patches) - 1)

    assert chance_association(of_ablation().settings) == pytest.approx(by_hand(8))
    tiny = {"data.name": "tiny-imagenet", "data.image_size": None, "model.patch_size": 16}
    assert chance_association(tiny) == pytest.approx(by_hand(4))
    assert chance_association({"model.patch_size": 4}) is None


def test_the_scatter_has_every_run() -> None:
    results = of_ablation()
    drawing = association_and_distance(results)
    (panel,) = drawing.figure.axes
    for level in ("off", "p=0.5"):
        here = results.runs[results.runs["cutmix"] == level]
        assert drawn(panel, f"runs-{level}") == (list(here["position_association"]), list(here["min_mad"]))
    assert drawn(panel, "chance")[0][0] == pytest.approx(chance_association(results.settings))
    assert "chance, 0.104" in drawing.caption


def test_what_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "FIGURES", {})  # those that all studies have are tested elsewhere, and take their time
    results = of_protocols()
    paths = {str(path.relative_to(tmp_path / "with")) for path in write_study_report(results, tmp_path / "with")}
    wanted = {f"tables/position-association.{kind}" for kind in ("csv", "md")}
    wanted |= {f"figures/position-association.{kind}" for kind in ("png", "svg")}
    assert wanted <= paths
    results.runs["position_association"] = math.nan
    with pytest.raises(InputError, match="no run has learned positions"):
        association_table(results)
    paths = {str(path.relative_to(tmp_path / "none")) for path in write_study_report(results, tmp_path / "none")}
    assert not wanted & paths
    captions = (tmp_path / "none" / "figures" / "captions.md").read_text(encoding="utf-8")
    assert "**position-association**: not drawn; no run has learned positions" in captions
