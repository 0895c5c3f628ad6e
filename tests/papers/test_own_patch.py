"""Heads that look at their own patch: planted ones are found, and left out of what is asked of the others."""

import dataclasses
import re
from collections.abc import Mapping

import numpy as np
import pandas as pd
import pytest
import torch
from made_up_results import drawn, made_up, noise
from matplotlib.patches import Rectangle
from scipy import stats

from nearsight.errors import InputError
from nearsight.metrics import attention_distance, attention_entropy, grid_distances, next_patch_distance
from nearsight.papers import find_study
from nearsight.papers.protocol.ablation import ABLATIONS
from nearsight.papers.protocol.numbers import PUBLISHED, WITH_CUTMIX
from nearsight.papers.protocol.own_patch import every_head, own_patch_questions, own_patch_table
from nearsight.papers.protocol.own_patch_model import entropy_by_distance, own_patch_model, own_patch_pairs
from nearsight.report.claims import Judgement, judge_all
from nearsight.report.own_patch import (
    HEADS,
    OTHERS,
    own_patch_bound,
    with_own_patch,
)
from nearsight.report.page.finding import locality_in_words
from nearsight.study import Cell
from nearsight.study.results import StudyResults

STEP = next_patch_distance((8, 8))


def planted(*, others_with_cutmix: float, name: str = "ablation-cifar100", own_patch: bool = True) -> StudyResults:
    """With CutMix and without label smoothing a head turns to its own patch; the others are as given."""

    def numbers(cell: Cell) -> Mapping[str, float]:
        has_cutmix = cell.levels["cutmix"] != "off"
        return {"min_mad": (others_with_cutmix if has_cutmix else 0.3) + noise(cell, 0.004)}

    results = made_up(find_study(name)(seeds=3), numbers)
    turned = results.runs[(results.runs["cutmix"] != "off") & (results.runs["smoothing"] == "0")]["run"]
    if own_patch:
        here = results.heads["run"].isin(turned) & (results.heads["layer"] == 0) & (results.heads["head"] == 5)
        results.heads.loc[here, "mad"] = np.linspace(0.001, 0.004, int(here.sum()))
    results.runs["min_mad"] = results.runs["run"].map(results.heads.groupby("run")["mad"].min())
    return results


def asked(results: StudyResults) -> list[Judgement]:
    """Each as if it were the only question."""
    return [judge_all([claim], results)[0] for claim in own_patch_questions(ABLATIONS[results.name])]


def answers(results: StudyResults) -> list[str]:
    return [judgement.words for judgement in asked(results)]


def test_planted_heads_are_found_and_left_out() -> None:
    results = planted(others_with_cutmix=0.2)
    runs = with_own_patch(results)
    turned = (runs["cutmix"] != "off") & (runs["smoothing"] == "0")
    assert own_patch_bound(results) == pytest.approx(STEP / 2)
    assert runs[HEADS].tolist() == turned.astype(int).tolist()
    by_hand = [
        min(mad for mad in results.heads.loc[results.heads["run"] == run, "mad"] if mad >= STEP / 2)
        for run in runs["run"]
    ]
    np.testing.assert_array_equal(runs[OTHERS], by_hand)
    table = own_patch_table(results)
    rows = table.numbers.set_index("condition")
    assert rows["runs_with_own_patch"].to_dict() == {
        label: 3 if label in ("+CutMix", "−LabelSmoothing") else 0 for label in rows.index
    }
    assert rows.loc["+CutMix", "least_share"] == pytest.approx(
        1 - results.heads["mad"][_own(results, "+CutMix")].max() / STEP
    )
    assert rows.loc["Modern", "paper_least_share"] == pytest.approx(1 - 0.008 / STEP)
    assert np.isnan(rows.loc["Baseline", "least_share"])
    results.runs.loc[turned, "max_share_self"] = 0.97
    assert own_patch_table(results).shown.set_index("condition").loc["+CutMix", "measured"] == "97 %"


def _own(results: StudyResults, condition: str) -> "pd.Series[bool]":
    runs = results.runs.loc[results.runs["condition"] == condition, "run"]
    return results.heads["run"].isin(runs) & (results.heads["mad"] < STEP / 2)


def test_what_is_asked_is_answered_by_the_others() -> None:
    # Three of six are in runs with both, a quarter of all.
    assert answers(planted(others_with_cutmix=0.2)) == ["yes", "yes", "not tested", "leaning yes"]
    # The smallest distances separate the runs, those of the other heads do not.
    assert answers(planted(others_with_cutmix=0.3))[:3] == ["yes", "inconclusive", "not tested"]
    assert answers(planted(others_with_cutmix=0.4))[1] == "the other way round"
    none = planted(others_with_cutmix=0.2, own_patch=False)
    assert answers(none) == ["inconclusive", "not tested", "not tested", "inconclusive"]


def test_own_patch_heads_are_counted_in_the_time_there_was_for_them() -> None:
    """As many in runs that train four times as long are what time alone would give."""
    results = planted(others_with_cutmix=0.2)
    has_cutmix = results.runs["cutmix"] != "off"
    results.runs["epochs"] = np.where(has_cutmix, 400, 100)
    (judged, _, _, with_both) = asked(results)
    # All six of 24 are with CutMix, which has 4800 of 6000 epochs.
    assert judged.finding.p == pytest.approx(0.8**6)
    assert judged.words == "inconclusive"
    low, high = stats.binomtest(6, 12).proportion_ci()
    expected = (
        f"6 of 12 runs with CutMix ({100 * low:.0f} % to {100 * high:.0f} %), in 4800 epochs; 0 of 12 runs without"
    )
    assert judged.finding.ours.startswith(expected)
    # Six pairs of twelve differ, all one way.
    assert judged.finding.ours.endswith(f"p = {2 / 2**6:.2g} of the shares alone, by exact permutation in pairs")
    # Half of the six are where both are, in 2400 of 6000 epochs.
    assert with_both.finding.p == pytest.approx(stats.binom.sf(2, 6, 0.4))
    assert with_both.finding.value == pytest.approx(3 / 6 - 3 / 18)
    # One seed, all of whose runs may do the same, shows nothing.
    results.runs["epochs"] = 100
    alone = dataclasses.replace(results, runs=results.runs[results.runs["seed"] == 0])
    assert answers(alone)[0] == "inconclusive"


def test_modern_is_held_against_baseline_without_its_own_patch_heads() -> None:
    for others, answer in ((0.2, "yes"), (0.4, "the other way round")):
        results = planted(others_with_cutmix=others)
        of_modern = results.runs.loc[results.runs["condition"] == "Modern", "run"]
        one = results.heads["run"].isin(of_modern) & (results.heads["layer"] == 0) & (results.heads["head"] == 5)
        results.heads.loc[one, "mad"] = 0.002
        assert answers(results)[2] == answer


def test_the_page_says_it_below_its_headline() -> None:
    results = planted(others_with_cutmix=0.2)
    off, on = results.factors["cutmix"]
    means = with_own_patch(results).groupby("cutmix")[OTHERS].mean()
    (told,) = [words for words in locality_in_words(results).sentences if "own patch" in words]
    assert told.startswith("In 6 of 24 runs that head attends to its own patch")
    assert re.search(rf"the most local has {means[on]:.3f} ± \S+ with CutMix and {means[off]:.3f} ± \S+ w", told)
    none = planted(others_with_cutmix=0.2, own_patch=False)
    assert not any("own patch" in words for words in locality_in_words(none).sentences)


def test_every_head_is_drawn_where_it_is() -> None:
    results = planted(others_with_cutmix=0.2, name="ablation-tiny-imagenet")
    drawing = every_head(results)
    (panel,) = drawing.figure.axes
    labels = [label.get_text() for label in panel.get_yticklabels()]
    means = results.runs.groupby("condition")["min_mad"].mean()
    assert labels == list(means.sort_values().index)
    heads = results.heads.merge(results.runs[["run", "condition"]], on="run")
    for (label, layer), here in heads.groupby(["condition", "layer"]):
        across, rows = drawn(panel, f"heads-{label}-{layer}")
        np.testing.assert_array_equal(across, here["mad"])
        assert {round(row) for row in rows} == {labels.index(str(label))}
    (band,) = [patch for patch in panel.patches if patch.get_gid() == "own-patch"]
    assert isinstance(band, Rectangle)
    assert band.get_x() + band.get_width() == pytest.approx(STEP / 2)
    assert "in 6 of 24 runs" in drawing.caption


def test_heads_of_two_grids_are_not_held_against_one() -> None:
    """Where the size of the images is a factor, no run's grid is that of all."""
    results = planted(others_with_cutmix=0.2)
    del results.settings["data.image_size"]  # type: ignore[attr-defined]
    with pytest.raises(InputError, match="one grid"):
        with_own_patch(results)
    assert not any("own patch" in words for words in locality_in_words(results).sentences)


def test_runs_whose_heads_all_look_at_their_own_patch_and_runs_of_several() -> None:
    results = planted(others_with_cutmix=0.2)
    turned = results.runs.loc[results.runs["condition"] == "+CutMix", "run"]
    two = (
        results.heads["run"].isin(results.runs["run"])
        & (results.heads["layer"] == 0)
        & results.heads["head"].isin([5, 6])
    )
    results.heads.loc[two, "mad"] = 0.002
    results.heads.loc[results.heads["run"].isin(turned), "mad"] = 0.001
    assert not any("own patch" in words for words in locality_in_words(results).sentences)
    assert own_patch_table(results).shown.set_index("condition").loc["+CutMix", "min MAD of the others"] == "–"
    results.heads["mad"] = 0.001
    assert answers(results)[2] == "not tested"


def test_without_one_grid_or_any_heads_nothing_is_said() -> None:
    results = planted(others_with_cutmix=0.2)
    results.heads["mad"] = np.nan
    with pytest.raises(InputError, match="no run has measured heads"):
        own_patch_table(results)
    results = planted(others_with_cutmix=0.2)
    del results.settings["model.patch_size"]  # type: ignore[attr-defined]
    with pytest.raises(InputError, match="one grid"):
        own_patch_table(results)
    assert answers(results) == ["not tested"] * 4


def leaking(share: float, *, to_neighbours: bool) -> tuple[float, float]:
    """MAD and entropy of an attention map on 8 × 8 patches that keeps the share on the diagonal."""
    steps = grid_distances((8, 8)) / STEP
    rest = ((steps > 0) & (steps < 1.1 if to_neighbours else steps > 0)).double()
    attn = (1 - share) * rest / rest.sum(1, keepdim=True) + share * torch.eye(64, dtype=torch.float64)
    distance = attention_distance(attn[None], (8, 8), num_prefix_tokens=0)
    return float(distance), float(attention_entropy(attn[None], num_prefix_tokens=0, eps=0.0))


def test_the_papers_pairs_are_those_of_a_uniform_rest() -> None:
    results = planted(others_with_cutmix=0.2, own_patch=False)
    pairs = {pair.condition: pair for pair in own_patch_pairs(results)}
    assert set(pairs) == set(WITH_CUTMIX)
    expected = {
        "Modern": (0.981, 0.041, 0.090),
        "−LabelSmoothing": (0.979, 0.046, 0.099),
        "+CutMix": (0.951, 0.097, 0.185),
        "−AutoAugment": (0.943, 0.109, 0.202),
    }
    for label, numbers in expected.items():
        pair, published = pairs[label], PUBLISHED[results.name].conditions[label]
        assert (pair.distance, pair.entropy) == (published.min_mad, published.min_entropy)
        assert (*pair.everywhere, pair.to_neighbours.entropy) == pytest.approx(numbers, abs=6e-4)
        assert pair.everywhere.entropy == pytest.approx(pair.entropy, abs=0.009)
        assert pair.to_neighbours.entropy > 1.8 * pair.entropy
        assert pair.is_closer_to_everywhere
    table = own_patch_model(results)
    assert any("4 of 4 entropies are closer to the prediction of a uniform rest" in note for note in table.notes)
    assert any("that both are of one head is an assumption." in note for note in table.notes)


@pytest.mark.parametrize("to_neighbours", [False, True])
def test_planted_leaks_are_told_apart(to_neighbours: bool) -> None:
    results = planted(others_with_cutmix=0.2)
    own = results.heads["mad"] < STEP / 2
    shares = np.linspace(0.9, 0.99, int(own.sum()))
    made = [leaking(float(share), to_neighbours=to_neighbours) for share in shares]
    results.heads.loc[own, ["mad", "entropy"]] = made
    turned = results.runs["run"].isin(results.heads.loc[own, "run"])
    results.runs.loc[turned, "max_share_self"] = 0.93
    ours = own_patch_model(results).numbers.query("whose == 'ours'")
    assert len(ours) == 6
    predicted = ours["entropy_to_neighbours" if to_neighbours else "entropy_everywhere"]
    np.testing.assert_allclose(predicted, ours["entropy"].astype(float), atol=1e-9)
    found = ours["least_share" if to_neighbours else "share_everywhere"].astype(float)
    np.testing.assert_allclose(sorted(found), shares)
    assert set(ours["share_measured"]) == {0.93}
    for row in ours.itertuples():
        (run,) = results.runs.loc[
            (results.runs["condition"] == row.condition) & (results.runs["seed"] == row.seed), "run"
        ]
        assert row.next_mad == sorted(results.heads.loc[results.heads["run"] == run, "mad"])[1]
    closer = 4 if to_neighbours else 10
    told = " ".join(own_patch_model(results).notes)
    assert f"{closer} of 10 entropies are closer" in told
    assert "Of ours, 6 of 6 have the smallest entropy of their run." in told


def test_a_second_own_patch_head_is_not_given_the_share_of_the_first() -> None:
    results = planted(others_with_cutmix=0.2)
    (run, *_) = results.heads.loc[results.heads["mad"] < STEP / 2, "run"]
    second = (results.heads["run"] == run) & (results.heads["layer"] == 1) & (results.heads["head"] == 2)
    results.heads.loc[second, ["mad", "entropy"]] = 0.03, 0.2
    results.runs["max_share_self"] = 0.97
    (of_run,) = results.runs[results.runs["run"] == run].itertuples()
    pairs = (
        pair for pair in own_patch_pairs(results) if (pair.condition, pair.seed) == (of_run.condition, of_run.seed)
    )
    first, last = (pair for pair in pairs if pair.whose == "ours")
    assert (first.measured, first.next_distance) == (0.97, 0.03)
    assert np.isnan(last.measured)
    assert (last.layer, last.distance) == (1, 0.03)
    assert (first.is_most_focused, last.is_most_focused) == (False, True)


def test_the_plane_of_the_model_shows_every_pair() -> None:
    results = planted(others_with_cutmix=0.2)
    drawing = entropy_by_distance(results)
    (panel,) = drawing.figure.axes
    pairs = own_patch_pairs(results)
    papers = [pair for pair in pairs if pair.whose != "ours"]
    assert drawn(panel, "paper") == ([pair.distance for pair in papers], [pair.entropy for pair in papers])
    on = results.factors["cutmix"][1]
    assert sorted(drawn(panel, f"own-{on}")[0]) == sorted(pair.distance for pair in pairs if pair.whose == "ours")
    names = [f"{name}-{level}" for name in ("own", "others") for level in results.factors["cutmix"]]
    shown = sum(len(drawn(panel, name)[0]) for name in names)
    assert shown == len(results.heads)
    for leak in ("everywhere", "to neighbours"):
        distances, entropies = drawn(panel, f"curve-{leak}")
        for place in (10, 100):
            near = leak == "to neighbours"
            share = 1 - distances[place] / leaking(0.0, to_neighbours=near)[0]
            assert entropies[place] == pytest.approx(leaking(share, to_neighbours=near)[1])
    (left, right), (bottom, top) = panel.get_xlim(), panel.get_ylim()
    for pair in pairs:
        assert left < pair.distance < right
        assert bottom < pair.entropy < top
    assert "is an assumption" in drawing.caption


def test_without_an_own_patch_head_there_is_no_model() -> None:
    results = planted(others_with_cutmix=0.2, own_patch=False, name="ablation-cifar10")
    for make in (own_patch_model, entropy_by_distance):
        with pytest.raises(InputError, match="neither the paper nor a run"):
            make(results)
