"""When heads become local: the epochs, layers, leads and returns that were planted are found, and shown."""

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest
from made_up_results import judgements, made_up
from PIL import Image
from scipy import stats

from nearsight.errors import InputError
from nearsight.papers.protocol.course import LASTING, LOCAL, Course, courses, half_way
from nearsight.papers.protocol.emergence import course_table, emergence_cifar100, emergence_fitted_cifar100
from nearsight.papers.protocol.emergence_figures import (
    MOST_FRAMES,
    chosen,
    heads_in_motion,
    layers_by_epoch,
    layers_over_epochs,
    over_epochs,
)
from nearsight.report.marks import LAST_FRAME
from nearsight.report.writing import study_verdicts
from nearsight.study import Cell, StudyResults

EPOCHS = 20
FALLS = {"Baseline": math.inf, "+CutMix": 8, "Modern": 5}


def course(cell: Cell, epoch: int) -> dict[str, float]:
    """The first head falls from 0.4 to 0.1 at an epoch; accuracy is half way at epoch 2."""
    is_local = epoch >= FALLS[cell.condition] + cell.seed
    return {"min_mad": 0.1 if is_local else 0.4 - 0.001 * epoch, "val_acc": min(epoch / 4, 1.0) * 0.6}


@pytest.fixture(scope="module")
def results() -> StudyResults:
    return made_up(emergence_cifar100(), lambda _: {"early_mad": 0.5, "max_mad": 0.6}, epochs=EPOCHS, course=course)


def test_the_line_is_the_papers_and_half_of_uniform_attention() -> None:
    assert LOCAL == 0.210
    assert pytest.approx(0.417848 / 2, abs=0.002) == LOCAL


def test_the_first_local_head(results: StudyResults) -> None:
    firsts = {(run.condition, run.seed): run.first_local() for run in courses(results)}
    assert firsts == {
        **{("Baseline", seed): None for seed in (0, 1)},
        **{("+CutMix", seed): (8 + seed, 0, 1) for seed in (0, 1)},
        **{("Modern", seed): (5 + seed, 0, 1) for seed in (0, 1)},
    }
    table = course_table(results)
    shown = table.shown.set_index(["condition", "seed"])["first local head"]
    assert shown["+CutMix", "1"] == "epoch 9, L0"
    assert shown["Baseline", "0"] == "never"


def test_the_answers(results: StudyResults) -> None:
    judged = judgements(results)
    answers = ["leaning yes", "yes", "epoch 5 to 9, L0", "leaning yes", "no", "never"]
    assert [judgement.words for judgement in judged] == answers
    given = [judgement.finding for judgement in judged]
    assert given[0].ours == "4 of 4 runs with CutMix, 0 of 2 without; strict reading in 2, weak in 2 of 2 seeds"
    # Half of the way from 0.4 to 0.1, on a straight line through the epoch of the fall; accuracy at epoch 2.
    lags = []
    for fall in (8, 9, 5, 6):
        before = 0.4 - 0.001 * (fall - 1)
        lags.append(fall - 1 + (before - 0.25) / (before - 0.1) - 2)
    assert given[3].value == pytest.approx(np.mean(lags))
    # The runs of a seed count once.
    test = stats.ttest_1samp([(lags[0] + lags[2]) / 2, (lags[1] + lags[3]) / 2], 0)
    interval = test.confidence_interval(0.95)
    assert (given[3].low, given[3].high, given[3].p) == pytest.approx((interval.low, interval.high, test.pvalue))
    assert given[3].n == 2
    # No table has this interval, so the verdict says itself whose mean it is.
    verdicts = study_verdicts(results)
    assert verdicts is not None
    told = verdicts.markdown()
    assert "over seeds (Student's t) of what a seed's runs have on average" in told
    assert "Strict: every run of the seed with CutMix has a local head at some time" in told
    assert "the tables say how" not in told


def test_a_head_that_turns_to_its_own_patch() -> None:
    """It is next to it from epoch 6 on, and there from epoch 9 on, in the runs of Modern."""

    def turning(cell: Cell, epoch: int) -> dict[str, float]:
        numbers = course(cell, epoch)
        if cell.condition != "Modern" or epoch < 6:
            return {**numbers, "min_mad": max(numbers["min_mad"], 0.11)}
        return {**numbers, "min_mad": 0.09 if epoch < 9 + cell.seed else 0.002}

    turned = made_up(emergence_cifar100(), lambda _: {"early_mad": 0.5, "max_mad": 0.6}, epochs=EPOCHS, course=turning)
    found = judgements(turned)[-1].finding
    assert found.answer == "epoch 9 to 10, L0, in 2 of 4 runs"
    assert "+CutMix 0: never" in found.ours
    assert "Modern 0: epoch 9, L0, within 4 epochs" in found.ours
    assert "Modern 1: epoch 10, L0, within 5 epochs" in found.ours
    shown = course_table(turned).shown.set_index(["condition", "seed"])["to its own patch"]
    assert shown["Modern", "1"] == "epoch 10, L0"
    assert shown["Baseline", "0"] == "never"
    # Below half of the step alone, and for a while: a flicker is none.
    (run,) = [run for run in courses(turned) if (run.condition, run.seed) == ("Modern", 0)]
    flicker = run.mad_ELH.copy()
    flicker[11::3, 0, 0] = 0.2
    assert dataclasses.replace(run, mad_ELH=flicker).first_own_patch(0.101) is None
    near = np.full_like(run.mad_ELH, 0.05)
    at_once = dataclasses.replace(run, mad_ELH=near).first_own_patch(0.101)
    assert at_once is not None
    assert (at_once.epoch, math.isnan(at_once.lasted)) == (0, True)


def test_a_first_local_head_of_some_runs_says_of_how_many() -> None:
    def of_modern(cell: Cell, epoch: int) -> dict[str, float]:
        numbers = course(cell, epoch)
        return numbers if cell.condition == "Modern" else {**numbers, "min_mad": 0.4}

    some = made_up(emergence_cifar100(), lambda _: {"early_mad": 0.5, "max_mad": 0.6}, epochs=EPOCHS, course=of_modern)
    given = [judgement.words for judgement in judgements(some)]
    # In both seeds more with CutMix than without, in none all of them.
    assert given[0] == "leaning yes"
    assert given[2] == "epoch 5 to 6, L0, in 2 of 4 runs"


def test_no_condition_without_cutmix_is_left_out() -> None:
    falls = {**FALLS, "−CutMix": 3}

    def with_a_local_head(cell: Cell, epoch: int) -> dict[str, float]:
        return {"min_mad": 0.1 if epoch >= falls[cell.condition] else 0.4, "val_acc": min(epoch / 4, 1.0) * 0.6}

    made = made_up(
        emergence_fitted_cifar100(),
        lambda _: {"early_mad": 0.5, "max_mad": 0.6},
        epochs=EPOCHS,
        course=with_a_local_head,
    )
    (first, *_) = judgements(made)
    expected = "4 of 4 runs with CutMix, 2 of 4 without; strict reading in 0, weak in 2 of 2 seeds"
    assert (first.words, first.finding.ours) == ("leaning yes", expected)


def test_no_effect_of_cutmix_on_whether_there_are_local_heads() -> None:
    """As many without it as with it, in every one of seven seeds: the opposite of more with it."""

    def all_local(_: Cell, epoch: int) -> dict[str, float]:
        return {"min_mad": 0.1 if epoch >= 5 else 0.4, "val_acc": 0.5}

    made = made_up(
        emergence_cifar100(seeds=7), lambda _: {"early_mad": 0.5, "max_mad": 0.6}, epochs=EPOCHS, course=all_local
    )
    (first, *_) = judgements(made)
    assert (first.words, first.finding.p_against) == ("no", 0.5**7)


def test_a_run_that_never_becomes_local_has_no_lag(results: StudyResults) -> None:
    ids = results.runs.set_index(["condition", "seed"])["run"]
    course = results.course.copy()
    course.loc[course["run"].isin([ids["Modern", 0], ids["+CutMix", 0]]), "mad"] = 0.4
    lead = judgements(dataclasses.replace(results, course=course))[3]
    assert lead.finding.ours.endswith("epochs, in 2 of 4 runs")
    assert (lead.finding.n, lead.words) == (1, "inconclusive")
    course["mad"] = 0.4
    none = judgements(dataclasses.replace(results, course=course))
    assert none[3].words == "not tested"
    assert none[4].words == "none was local"


def test_cutmix_after_equally_many_epochs() -> None:
    """Runs are held against those of their seed that differ from them in CutMix alone, at the last epoch of both."""
    ends = {"Baseline": 0.30, "+CutMix": 0.20, "−CutMix": 0.25, "Modern": 0.10}

    def falling(cell: Cell, epoch: int) -> dict[str, float]:
        lower = {"+CutMix": 0.03, "−CutMix": 0.01}.get(cell.condition, 0.0)
        return {"min_mad": ends[cell.condition] - lower * cell.seed, "val_acc": 0.5}

    made = made_up(
        emergence_fitted_cifar100(), lambda _: {"early_mad": 0.5, "max_mad": 0.6}, epochs=EPOCHS, course=falling
    )
    found = judgements(made)[1].finding
    # +CutMix and Modern of a seed, against what lacks CutMix alone: the mean of both counts.
    changes = [(-0.10 - 0.15) / 2, (-0.13 - 0.14) / 2]
    test = stats.ttest_1samp(changes, 0)
    interval = test.confidence_interval(0.95)
    assert (found.value, found.low, found.high) == pytest.approx((np.mean(changes), interval.low, interval.high))
    assert (found.p, found.n) == (pytest.approx(test.pvalue), 2)
    assert found.ours == f"0.273 to 0.143: −0.130 (−0.135, −0.125) at epoch {EPOCHS}, 4 pairs of runs"

    later = (made.course["epoch"] > 10) & (
        made.course["run"] == made.runs.set_index(["condition", "seed"])["run"]["Modern", 0]
    )
    shorter = judgements(dataclasses.replace(made, course=made.course[~later]))[1].finding
    assert "at epoch 10," in shorter.ours
    alone = dataclasses.replace(made, runs=made.runs[made.runs["condition"].isin(["Baseline", "Modern"])])
    assert judgements(alone)[1].words == "not tested"


def run_of(mad: list[float]) -> Course:
    """One layer of two heads, of which one stays at 0.4."""
    mad_ELH = np.stack([np.array(mad), np.full(len(mad), 0.4)], axis=-1)[:, None]
    (made, *_) = courses(made_up(emergence_cifar100(), lambda _: {}, epochs=2, course=lambda *_: {"val_acc": 0.5}))
    return dataclasses.replace(made, epochs_E=np.arange(len(mad), dtype=float), mad_ELH=mad_ELH)


@pytest.mark.parametrize(
    ("mad", "turned"),
    [
        ([0.4, *[0.1] * LASTING, *[0.1] * LASTING], (1, 0)),
        ([0.4, *[0.1] * LASTING, *[0.4] * LASTING], (1, 1)),
        ([0.4, *[0.1] * LASTING, *[LOCAL + 0.01] * LASTING], (1, 0)),  # just across the line is not global again
        ([0.4, *[0.1] * (LASTING - 1), *[0.4] * LASTING], (0, 0)),  # a flicker
        ([0.4, *[0.1] * LASTING, *[0.4] * (LASTING - 1), 0.1], (1, 0)),
    ],
)
def test_turning_back(mad: list[float], turned: tuple[int, int]) -> None:
    assert run_of(mad).turned() == turned


def test_half_way() -> None:
    epochs = np.arange(6.0)
    assert half_way(epochs, epochs**2) == pytest.approx(3 + (12.5 - 9) / 7)
    assert half_way(epochs, -(epochs**2)) == pytest.approx(3 + (12.5 - 9) / 7)
    assert math.isnan(half_way(epochs, np.ones(6)))
    assert math.isnan(run_of([0.3, 0.35, 0.4, 0.45]).locality_half())


def test_runs_without_a_course_are_not_judged(results: StudyResults) -> None:
    without = dataclasses.replace(results, course=results.course.iloc[:0])
    for judgement in judgements(without):
        assert judgement.words == "not tested"
        assert "measured while it trained" in judgement.finding.ours


def test_runs_of_another_depth_are_not_judged(results: StudyResults) -> None:
    course = results.course
    shallow = (course["run"] == course["run"].iloc[0]) & (course["layer"] == course["layer"].max())
    mixed = dataclasses.replace(results, course=course[~shallow])
    with pytest.raises(InputError, match=r"same number of layers, but these differ: Baseline, seed 0, 7 and .*, 8"):
        layers_by_epoch(mixed)
    for judgement in judgements(mixed):
        assert judgement.words == "not tested"


def test_figures_show_every_run(results: StudyResults) -> None:
    lines = {line.get_gid() for axes in over_epochs(results).figure.axes for line in axes.lines}
    assert {f"smallest-{label}-{seed}" for label in FALLS for seed in (0, 1)} <= lines
    (left, _) = over_epochs(results).figure.axes
    (drawn,) = (line for line in left.lines if line.get_gid() == "smallest-Modern-0")
    run = next(run for run in courses(results) if (run.condition, run.seed) == ("Modern", 0))
    assert np.array_equal(drawn.get_ydata(), run.smallest)
    layers = {line.get_gid(): line for axes in layers_over_epochs(results).figure.axes for line in axes.lines}
    assert {f"+CutMix-{layer}" for layer in range(8)} <= set(layers)
    seeds = [layers[f"seeds-Modern-3-{seed}"].get_ydata() for seed in (0, 1)]
    assert np.allclose(seeds[0], run.mad_ELH[:, 3].mean(axis=1))
    assert np.allclose(np.mean(seeds, axis=0), layers["Modern-3"].get_ydata())
    meshes = [mesh for axes in layers_by_epoch(results).figure.axes for mesh in axes.collections]
    mean = np.mean([run.mad_ELH.mean(axis=2) for run in courses(results) if run.condition == "Baseline"], axis=0)
    assert np.allclose(meshes[0].get_array(), mean.T)


def test_the_film_is_short_small_and_the_same_twice(results: StudyResults, tmp_path: Path) -> None:
    short = dataclasses.replace(results, course=results.course[results.course["epoch"] < 3])
    first, second = (path for name in ("a", "b") for path in heads_in_motion(short).save(tmp_path, name))
    assert first.read_bytes() == second.read_bytes()
    with Image.open(first) as film:
        assert film.n_frames == 3
        film.seek(2)
        assert film.info["duration"] == LAST_FRAME
    assert first.stat().st_size * MOST_FRAMES / 3 < 2e6
    every = list(range(151))
    kept = chosen(every)
    assert len(kept) <= MOST_FRAMES
    assert (kept[0], kept[-1]) == (0, 150)
    assert sum(epoch < 50 for epoch in kept) > sum(epoch >= 100 for epoch in kept)
    assert kept == sorted(set(kept))
