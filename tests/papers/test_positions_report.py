"""S3's studies on images: planted effects are found by their reports, and their recipes are what they should be."""

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from made_up_results import drawn, made_up, noise, only
from scipy import stats

from nearsight.errors import InputError
from nearsight.papers import find_study
from nearsight.papers.structure.permuted import CURVES, permutation_curves, permutation_table, permuted_cifar100
from nearsight.papers.structure.positional import (
    PAIRS,
    positional_cifar100,
    positional_svhn,
    positional_table,
    seeds_of_both,
)
from nearsight.report import writing
from nearsight.report.marks import Drawing
from nearsight.report.rules import Verdict
from nearsight.report.studies import report_of
from nearsight.report.writing import study_verdicts, write_study_report
from nearsight.study import Cell, StudyResults
from nearsight.train import RunConfig
from nearsight.train.engine import Stack
from nearsight.train.planning import cell_bytes
from nearsight.train.runner import load_data

REPRODUCED, DIRECTION, OPEN, CONTRADICTED, UNTESTED = tuple(Verdict)
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
    return [judgement.words for judgement in study_verdicts(results).judgements]


# permuted-cifar100


def test_shuffled_tiles_are_judged_by_what_was_planted() -> None:
    # Per size of tiles: the ViT keeps, the ResNet loses, and more than the ViT; then, positions alone keep as much.
    assert verdicts(of_permuted()) == [REPRODUCED] * 6 + ["yes"] * 2
    lost = of_permuted(ViT={"32×32": 0.38}, Positional={"4×4": 0.38})
    assert verdicts(lost) == [REPRODUCED] * 3 + [CONTRADICTED, REPRODUCED, REPRODUCED, "no", "yes"]
    robust = of_permuted(ResNet={"4×4": 0.65 + 0.01, "32×32": 0.66})
    assert verdicts(robust) == [REPRODUCED, CONTRADICTED, CONTRADICTED] * 2 + ["yes"] * 2
    noisy = of_permuted(seeds=2, spread=0.02, ViT={"4×4": 0.45})
    assert verdicts(noisy)[0] == DIRECTION
    one_seed = of_permuted(seeds=1)
    assert verdicts(one_seed) == [OPEN] * 8


def test_the_drops_are_paired_within_seeds() -> None:
    results = of_permuted()
    table = permutation_table(results).numbers.set_index(["network", "tiles"])
    wide = results.runs.pivot(index="seed", columns=["model", "tiles"], values="test_acc")
    ours = table.loc[("ResNet-18", "4×4")]
    difference = wide["ResNet-18", "4×4"] - wide["ResNet-18", "1×1"]
    assert ours["change_mean"] == pytest.approx(difference.mean())
    excess = (wide["ResNet-18", "32×32"] - wide["ResNet-18", "1×1"]) - (wide["ViT", "32×32"] - wide["ViT", "1×1"])
    assert table.loc[("ResNet-18", "32×32"), "change_beyond_vit_mean"] == pytest.approx(excess.mean())
    assert table.loc[("ResNet-18", "32×32"), "paper_change"] == pytest.approx(-0.23)
    assert table["paper_change"].notna().sum() == 2  # the ViT's and the ResNet's, of single pixels
    assert table.loc[("ViT", "1×1"), ["change_mean", "change_beyond_vit_mean"]].isna().all()
    shown = permutation_table(results).shown.set_index(["network", "tiles"])["paper's accuracy"]
    assert list(shown["ViT"]) == ["64", "–", "64"]
    assert list(shown["ResNet-18"]) == ["80", "–", "57"]


def test_two_seeds_have_intervals_from_the_spread_of_all_conditions() -> None:
    results = of_permuted(seeds=2, spread=0.004)
    table = permutation_table(results).numbers.set_index(["network", "tiles"])
    wide = results.runs.pivot(index="seed", columns=["model", "tiles"], values="test_acc")
    # Two seeds: what is left within them is how far each condition's difference is from that of all conditions.
    between = wide.loc[1] - wide.loc[0]
    within_seeds = ((between - between.mean()) ** 2 / 2).sum() / 8
    within_conditions = (between**2 / 2).sum() / 9
    halves = {
        "change": stats.t.ppf(0.975, 8) * math.sqrt(2 * within_seeds / 2),
        "change_beyond_vit": stats.t.ppf(0.975, 8) * math.sqrt(4 * within_seeds / 2),
        "test_acc": stats.t.ppf(0.975, 9) * math.sqrt(within_conditions / 2),
    }
    row = table.loc[("ResNet-18", "32×32")]
    for name, half in halves.items():
        ends = (row[f"{name}_mean"] - half, row[f"{name}_mean"] + half)
        assert (row[f"{name}_low"], row[f"{name}_high"]) == pytest.approx(ends), name
    assert all("±" in words for words in permutation_table(results).shown["test accuracy, %"])
    # The verdicts rest on the same spread: that of a change is of two runs, that of a difference of changes of four.
    findings = [judgement.finding for judgement in study_verdicts(results).judgements]
    kept = (wide["ViT", "4×4"] - wide["ViT", "1×1"]).mean()
    lost = (wide["ResNet-18", "4×4"] - wide["ResNet-18", "1×1"]).mean()
    assert findings[0].p == pytest.approx(stats.t.sf((kept + 0.02) / math.sqrt(within_seeds), 8))
    assert findings[0].p_against == pytest.approx(1 - findings[0].p)
    assert findings[1].p == pytest.approx(2 * stats.t.cdf(lost / math.sqrt(within_seeds), 8))
    assert findings[2].p == pytest.approx(2 * stats.t.cdf((lost - kept) / math.sqrt(2 * within_seeds), 8))
    # Seeds without a condition in common tell nothing of pairs, and one seed of everything nothing at all.
    apart = only(results, lambda runs: (runs["seed"] == 0) == (runs["model"] == "ViT"))
    assert permutation_table(apart).numbers["change_low"].isna().all()
    alone = permutation_table(only(results, lambda runs: runs["seed"] == 0)).numbers
    assert alone[["test_acc_low", "change_low"]].isna().all(axis=None)


def test_conditions_are_called_after_networks_and_tiles() -> None:
    names = [cell.condition for cell in permuted_cifar100(seeds=1).cells]
    tiles = ("", ", tiles 4×4", ", tiles 32×32")
    assert names == [f"{network}{which}" for network in PERMUTED for which in tiles]


def test_the_papers_claims_and_our_questions_are_counted_apart() -> None:
    results = of_permuted(ViT={"32×32": 0.38})
    text = study_verdicts(results).markdown()
    summary = text.splitlines()[2]
    assert summary.startswith("Of 6 claims of S3 (arXiv 2210.09221): 5 reproduced, 1 contradicted.")
    assert "Of 2 questions of our own: 2 yes. 27 runs, 3 seeds per condition." in summary
    assert "| claim or question | asked | paper | ours |" in text
    assert "estimated from all runs" in text
    positional = of_positional()
    summary = study_verdicts(positional).markdown().splitlines()[2]
    claims, questions = "1 claim of S3 (arXiv 2210.09221): 1 reproduced", "1 yes, 2 the other way round"
    assert f"Of {claims}. Of 3 questions of our own: {questions}." in summary


@pytest.mark.parametrize("made", ["permuted", "positional"])
def test_what_says_nothing_of_networks_is_left_out(made: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def undrawn(_: StudyResults) -> Drawing:
        raise InputError("it takes its time")

    monkeypatch.setattr(writing, "FIGURES", dict.fromkeys(writing.FIGURES, undrawn))
    results = of_permuted(seeds=2) if made == "permuted" else of_positional()
    write_study_report(results, tmp_path)
    own = {"permuted": "permutation", "positional": "positional"}[made]
    assert {path.stem for path in (tmp_path / "tables").iterdir()} == {"conditions", "verdict", own}
    captions = (tmp_path / "figures" / "captions.md").read_text(encoding="utf-8")
    numbers = {"permuted": "45", "positional": "1234"}[made]
    assert [number for number in "12345" if f"**figure-{number}-" in captions] == list(numbers)


def test_missing_conditions_leave_the_rest() -> None:
    results = only(of_permuted(), lambda runs: ~((runs["model"] == "ResNet-18") & (runs["tiles"] == "1×1")))
    assert verdicts(results) == [REPRODUCED, UNTESTED, UNTESTED] * 2 + ["yes"] * 2
    reasons = [judgement.finding.ours for judgement in study_verdicts(results).judgements]
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
        (band,) = [shape for shape in ours.collections if shape.get_gid() == f"band-accuracy-{network}"]
        at_pixels = 100 * results.runs.loc[results.runs["condition"] == f"{network}, tiles 32×32", "test_acc"]
        edges = band.get_paths()[0].vertices
        last = edges[np.isclose(edges[:, 0], numbers[-1]), 1]
        assert (last.min(), last.max()) == pytest.approx((at_pixels.min(), at_pixels.max()))
    changes = [drawn(change, f"paper-change-{name}")[1][0] for name in CURVES]
    assert changes == pytest.approx([0, -23, -29])
    assert drawn(papers, "paper-ResNet-18") == ([2, 32], [80, pytest.approx(57)])
    assert drawn(papers, "paper-VGG") == ([2, 32], [76, 47])
    assert ours.get_ylim() == papers.get_ylim()
    assert ours.get_xscale() == "log"
    assert "few epochs" in drawing.caption


def test_two_seeds_of_a_network_are_dots_beside_their_mean() -> None:
    results = only(of_permuted(), lambda runs: runs["seed"] < 2)
    drawing = permutation_curves(results)
    ours, _, change = drawing.figure.axes
    assert not any(str(shape.get_gid()).startswith("band") for shape in (*ours.collections, *change.collections))
    assert not any(str(line.get_gid()).startswith("interval") for line in (*ours.lines, *change.lines))
    wide = 100 * results.runs.pivot(index="seed", columns=["model", "tiles"], values="test_acc")
    after, before = (wide["ViT", tiles] for tiles in ("32×32", "1×1"))
    _, values = drawn(ours, "seeds-accuracy-ViT")
    assert values[-2:] == pytest.approx(list(after))
    _, values = drawn(change, "seeds-change-ViT")
    assert values[-2:] == pytest.approx(list(after - before))
    assert "mean over 2 seeds; dots: seeds." in drawing.caption
    assert "bars" not in drawing.caption


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
    assert verdicts(of_positional()) == [REPRODUCED, "the other way round", "the other way round", "yes"]
    other = of_positional(accuracy=-0.03, distance=-0.1, association=-0.1)
    assert verdicts(other) == [CONTRADICTED, "yes", "yes", "the other way round"]
    assert verdicts(of_positional(association=0.0))[3] not in ("yes", "the other way round")
    accuracies = of_positional().runs.pivot(index="seed", columns="model", values="test_acc")
    apart = accuracies["Positional ViT"] - accuracies["ViT"]
    on_par = study_verdicts(of_positional()).judgements[0]
    sides = ((-0.01, "greater"), (0.01, "less"))
    assert on_par.p == pytest.approx(max(stats.ttest_1samp(apart, end, alternative=side).pvalue for end, side in sides))
    # With a large spread over seeds nothing is shown, and nothing is ruled out.
    wide = of_positional()
    wide.runs.loc[wide.runs["model"] == "ViT", "test_acc"] += np.array([0.04, -0.04, 0.0, 0.03, -0.03])
    assert verdicts(wide)[0] == OPEN
    far = of_positional(accuracy=0.02)
    far.runs.loc[far.runs["model"] == "ViT", "test_acc"] += np.array([0.04, -0.04, 0.0, 0.03, -0.03])
    assert verdicts(far)[0] == OPEN
    assert verdicts(only(of_positional(), lambda runs: runs["seed"] == 0)) == [OPEN] * 4
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
    svhn = report_of(positional_svhn().name).claims[0]
    assert svhn.paper == "98.20 to 97.30 %: −0.90 points"
    assert set(PAIRS) == {f"positional-{name}" for name in ("cifar10", "cifar100", "svhn", "tiny-imagenet")}


def test_the_boxes_are_the_seeds() -> None:
    results = of_positional()
    panels = {panel.get_title(loc="left"): panel for panel in seeds_of_both(results).figure.axes}
    assert len(panels) == 5
    panel = panels["test accuracy, %"]
    values = 100 * results.runs.loc[results.runs["model"] == "ViT", "test_acc"]
    assert drawn(panel, "median-test_acc-ViT")[1] == pytest.approx([values.median()] * 2)
    assert drawn(panel, "seeds-test_acc-ViT")[1] == pytest.approx(list(values))
    assert [drawn(panel, f"paper-{model}") for model in ("ViT", "Positional ViT")] == [([0], [68]), ([1], [68])]
    low, high = panel.get_ylim()
    assert low < values.min() < 68 < high
    difference = panels["difference, points"]
    wide = 100 * results.runs.pivot(index="seed", columns="model", values="test_acc")
    ours = wide["Positional ViT"] - wide["ViT"]
    assert drawn(difference, "seeds-difference")[1] == pytest.approx(list(ours))
    assert drawn(difference, "mean-difference")[1] == pytest.approx([ours.mean()] * 2)
    assert drawn(difference, "paper-difference")[1] == [0]
    results.runs["position_association"] = math.nan
    assert len(seeds_of_both(results).figure.axes) == 4
    lonely = only(results, lambda runs: runs["model"] == "ViT")
    assert "difference, points" not in {panel.get_title(loc="left") for panel in seeds_of_both(lonely).figure.axes}
    two = seeds_of_both(only(results, lambda runs: runs["seed"] < 2))
    assert not any(str(line.get_gid()).startswith("median") for panel in two.figure.axes for line in panel.lines)
    assert "Boxes" not in two.caption
    assert "95 % interval" not in two.caption
    one_seed = only(results, lambda runs: runs["seed"] == 0)
    assert "1 seed" in seeds_of_both(one_seed).caption


# the recipes: which networks, which images, and that they run at any size


def test_every_network_sees_every_shuffle() -> None:
    study = find_study("permuted-cifar100")()
    found = {
        (cell.levels["model"], cell.levels["tiles"], cell.seed): (model.name, model.patch_size, model.shuffled_tiles)
        for cell in study.cells
        for model in [cell.config.model]
    }
    networks = {
        "ViT": ("compact_vit", 2),
        "Positional ViT": ("compact_vit_positional", 2),
        "ResNet-18": ("compact_resnet18", 4),
    }
    tiles = {"1×1": 1, "4×4": 4, "32×32": 32}
    assert found == {
        (label, name, seed): (*network, num)
        for label, network in networks.items()
        for name, num in tiles.items()
        for seed in range(2)
    }
    assert {cell.config.model.permutation_seed for cell in study.cells} == {0}
    assert len({(cell.config.data, cell.config.protocol, cell.config.precision) for cell in study.cells}) == 1


def test_all_tilings_go_on_from_three_of_them() -> None:
    study, runs = find_study("permuted-tilings-cifar100")(), {cell.run for cell in permuted_cifar100(seeds=3).cells}
    cells = {(cell.levels["model"], cell.config.model.shuffled_tiles, cell.seed): cell for cell in study.cells}
    networks = "ViT", "Positional ViT", "ResNet-18", "VGG"
    assert cells.keys() == {
        (network, tiles, seed) for network in networks for tiles in (1, 2, 4, 8, 16, 32) for seed in range(3)
    }
    assert runs <= {cell.run for cell in study.cells}
    vgg = cells["VGG", 8, 0].config.model.build((32, 32), 5)
    assert any(isinstance(module, torch.nn.BatchNorm2d) for module in vgg.modules())
    assert vgg(torch.randn(2, 3, 32, 32)).shape == (2, 5)


def test_a_vgg_is_judged_as_a_resnet_is() -> None:
    planted = {**PERMUTED, "VGG": {"1×1": 0.6, "4×4": 0.5, "32×32": 0.3}}

    def numbers(cell: Cell) -> dict[str, float]:
        row = planted[cell.levels["model"]]
        return {"test_acc": row.get(cell.levels["tiles"], row["1×1"]) + 0.01 * cell.seed + noise(cell, 0.001)}

    results = made_up(find_study("permuted-tilings-cifar100")(), numbers)
    assert verdicts(results) == [REPRODUCED] * 10 + ["yes"] * 2
    table = permutation_table(results)
    assert "VGG" in set(table.numbers["network"])
    assert not any("third network" in note for note in table.notes)
    assert "VGG (the paper's)" not in str(permutation_curves(results).figure.legends[0].texts)


@pytest.mark.parametrize("data", ["cifar10", "cifar100", "svhn", "tiny-imagenet"])
def test_positional_attention_is_all_that_differs(data: str) -> None:
    study = find_study(f"positional-{data}")()
    cells = {(cell.condition, cell.seed): cell.config for cell in study.cells}
    seeds = range(3 if data == "tiny-imagenet" else 5)
    assert cells.keys() == {(condition, seed) for condition in ("ViT", "Positional ViT") for seed in seeds}
    for (condition, seed), config in cells.items():
        assert config.data.name == data
        assert config.model.name == ("compact_vit" if condition == "ViT" else "compact_vit_positional")
        alike = dataclasses.replace(cells["ViT", seed].model, name=config.model.name)
        assert dataclasses.replace(cells["ViT", seed], model=alike) == config
    augmentations = [augmentation.name for augmentation in study.base.protocol.augment]
    others = {"svhn": ["crop", "cutmix"], "tiny-imagenet": ["crop", "flip", "colorjitter", "cutmix"]}
    assert augmentations == others.get(data, ["crop", "flip", "autoaugment", "cutmix"])


@pytest.mark.parametrize("name", ["permuted-cifar100", "permuted-tilings-cifar100", *PAIRS])
def test_all_epochs_are_trained(name: str) -> None:
    for cell in find_study(name)().cells:
        assert cell.config.protocol.patience == cell.config.protocol.max_epochs


def test_a_seed_of_any_network_fits_on_a_gpu_many_times() -> None:
    networks = {cell.config.model.name: cell.config for cell in find_study("permuted-cifar100")().cells}
    for config in networks.values():
        assert 2**30 < cell_bytes(config) < 20 * 2**30


def test_small_runs_of_every_network_train() -> None:
    study = find_study("permuted-cifar100")(seeds=1).small()
    configs = [cell.config for cell in study.cells if cell.levels["tiles"] == "32×32"]
    dataset = load_data(configs[0].data)
    kinds: dict[object, list[RunConfig]] = {}
    for config in configs:
        kinds.setdefault(config.stack_key, []).append(config)
    for cells in kinds.values():
        stack = Stack.start(cells, dataset, torch.device("cpu"))
        for result in stack.run_epoch():
            assert 1.5 < result.train_loss < 4.0
