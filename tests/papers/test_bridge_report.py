"""From S3 to S1: what learned positions have to do with local heads. Planted effects are found."""

import itertools
import json
import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from made_up_results import drawn, made_up, noise, only
from scipy import stats

from nearsight.errors import InputError
from nearsight.files import write_json
from nearsight.papers.protocol.ablation import ablation_cifar100, protocol_cifar10
from nearsight.papers.structure.learned_positions import (
    association_and_distance,
    association_table,
    chance_association,
    write_bridge,
)
from nearsight.report import writing
from nearsight.report.rules import Verdict
from nearsight.report.writing import write_study_report
from nearsight.study import Cell, Study, StudyResults
from nearsight.study.statistics.rank_correlation import rank_correlation

UNTESTED = Verdict.NOT_TESTED
CHANGE = "change of association, with CutMix minus without CutMix"


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
    for pair in (([1.0, 2.0, math.nan, 4.0], range(4)), (range(4), [1.0, 2.0, math.nan, 4.0])):
        unknown = rank_correlation(*pair)
        assert all(map(math.isnan, (unknown.value, unknown.p, unknown.low, unknown.high)))
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
    by_seed = results.runs.groupby(["seed", "cutmix"])["position_association"].mean().unstack()
    theirs = stats.ttest_rel(by_seed["p=0.5"], by_seed["off"])
    change = table.loc[CHANGE]
    assert (change["value"], change["p"], change["n"]) == (
        pytest.approx(effect["value"]),
        pytest.approx(theirs.pvalue),
        3,
    )
    ends = theirs.confidence_interval(0.95)
    assert (change["low"], change["high"]) == pytest.approx((ends.low, ends.high))
    assert table.loc["association, with CutMix", "value"] == pytest.approx(means["p=0.5"])
    found = answers(results)
    assert found[CHANGE] == "yes"
    assert found["effect on association, CutMix"] == "–"
    assert found["effect on association, AutoAugment"] == "–"
    groups = ("all runs", "without CutMix", "with CutMix")
    assert [found[f"association and min MAD, {group}"] for group in groups] == ["yes"] * 3
    # More association goes with larger distances within groups, though CutMix itself makes it seem otherwise.
    confounded = answers(of_ablation(link=1.0))
    told = [confounded[f"association and min MAD, {group}"] for group in groups]
    assert told == ["the other way round"] * 3
    assert answers(of_ablation(effect=-0.2))[CHANGE] == "the other way round"
    assert answers(of_ablation(effect=0.0))[CHANGE] not in ("yes", "the other way round")
    assert answers(of_ablation(seeds=1))[CHANGE] == "inconclusive"


def test_association_with_missing_runs() -> None:
    results = of_ablation()
    results.runs.loc[results.runs["condition"] == "Modern", "position_association"] = math.nan
    table = association_table(results)
    assert any("21 runs" in note for note in table.notes)
    assert answers(results)[CHANGE] == "yes"
    # The mean over the pairs that are left in a seed: that of Modern and −CutMix is not.
    kept = results.runs.dropna(subset="position_association")
    kept = kept[kept["condition"] != "−CutMix"].groupby(["seed", "cutmix"])["position_association"].mean().unstack()
    value = table.numbers.set_index("what").loc[CHANGE, "value"]
    assert value == pytest.approx((kept["p=0.5"] - kept["off"]).mean())
    without = only(of_ablation(), lambda runs: runs["cutmix"] == "off")
    left = answers(without)
    assert not {"effect on association, CutMix", CHANGE} & left.keys()
    assert left["association and min MAD, all runs"] == "yes"
    assert left["association and min MAD, with CutMix"] == UNTESTED
    assert "with CutMix none (n = 0)" in association_and_distance(without).caption
    without.runs["min_mad"] = math.nan
    with pytest.raises(InputError, match="and measured heads"):
        association_and_distance(without)


def on_disk(results: StudyResults, study: Study, folder: Path) -> Path:
    """The tables of results, as they are committed."""
    write_json(folder / "study.json", study.to_json())
    write_json(folder / "provenance.json", {"commit": ["abc"], "runs": len(results.runs)})
    results.write_tables(folder)
    return folder


def test_the_bridge_needs_tables_alone(tmp_path: Path) -> None:
    results = of_ablation()
    study = on_disk(results, ablation_cifar100(seeds=3), tmp_path / "study")
    paths = {str(path.relative_to(tmp_path / "bridge")) for path in write_bridge(study, tmp_path / "bridge")}
    assert paths == {
        *(
            f"tables/{name}.{kind}"
            for name in ("conditions", "position-association", "verdict")
            for kind in ("csv", "md")
        ),
        *("figures/position-association.png", "figures/position-association.svg", "figures/captions.md"),
        *("runs.csv", "verdict.md", "provenance.json"),
    }
    judged = pd.read_csv(tmp_path / "bridge" / "tables" / "verdict.csv")
    assert list(judged["verdict"]) == ["yes"] * 4
    table = pd.read_csv(tmp_path / "bridge" / "tables" / "position-association.csv")
    assert list(table["answer"][table["answer"] != "–"]) == list(judged["verdict"])
    assert list(judged["n"]) == [3] * 4
    means = results.runs.groupby("cutmix")["position_association"].mean()
    assert judged["value"][0] == pytest.approx(means["p=0.5"] - means["off"])
    within = results.runs[results.runs["cutmix"] == "off"]
    assert judged["value"][2] == pytest.approx(stats.spearmanr(within["position_association"], within["min_mad"])[0])
    text = (tmp_path / "bridge" / "verdict.md").read_text(encoding="utf-8")
    assert "Of 4 questions of our own: 4 yes. 24 runs." in text
    by_condition = pd.read_csv(tmp_path / "bridge" / "tables" / "conditions.csv").set_index("condition")
    modern = results.runs.loc[results.runs["condition"] == "Modern", "position_association"]
    assert by_condition.loc["Modern", "position_association_mean"] == pytest.approx(modern.mean())
    kept = pd.read_csv(tmp_path / "bridge" / "runs.csv")
    assert list(kept["position_association"]) == pytest.approx(list(results.runs["position_association"]))
    told = json.loads((tmp_path / "bridge" / "provenance.json").read_text(encoding="utf-8"))
    assert told == {"study": "ablation-cifar100", "commit": ["abc"], "runs": 24}


def test_a_bridge_of_half_a_study_says_what_it_cannot(tmp_path: Path) -> None:
    without = only(of_ablation(), lambda runs: runs["cutmix"] == "off")
    study = on_disk(without, ablation_cifar100(seeds=3), tmp_path / "study")
    write_bridge(study, tmp_path / "bridge")
    judged = pd.read_csv(tmp_path / "bridge" / "tables" / "verdict.csv")
    assert list(judged["verdict"]) == [UNTESTED, "yes", "yes", UNTESTED]
    assert "No complete run yet" in (tmp_path / "bridge" / "verdict.md").read_text(encoding="utf-8")
    without.runs["position_association"] = math.nan
    study = on_disk(without, ablation_cifar100(seeds=3), tmp_path / "none")
    with pytest.raises(InputError, match="no run has learned positions"):
        write_bridge(study, tmp_path / "bridge of none")
    assert not (tmp_path / "bridge of none").exists()


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
    assert "By chance it would be 0.104" in drawing.caption
    (low, high), values = panel.get_xlim(), results.runs["position_association"]
    assert 0.104 < low < values.min() < values.max() < high < 1
    assert any("← chance, 0.104" in text.get_text() for text in panel.texts)


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
