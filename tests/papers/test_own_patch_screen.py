"""The screen for own-patch heads: its design against its definition, its tests against closed forms, its answers."""

import itertools
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from made_up_results import judgements, made_up, noise, only
from scipy import stats

from nearsight.papers.protocol.own_patch_screen import (
    COLOUR,
    FACTORS,
    SETTINGS,
    effect_on_events,
    main_effects,
    own_patch_screen_cifar100,
    screen_figure,
    screen_table,
    with_events,
)
from nearsight.report.own_patch import HEADS
from nearsight.report.writing import study_tables, study_verdicts
from nearsight.study import Cell, StudyResults, run_study
from nearsight.study.fractions import folded_plackett_burman

SCREEN = own_patch_screen_cifar100()


def test_the_design_is_plackett_and_burmans_folded() -> None:
    rows = np.array(folded_plackett_burman())
    assert rows.shape == (24, 11)
    assert "".join("+" if sign > 0 else "-" for sign in rows[0]) == "++-+++---+-"  # Plackett & Burman (1946), N = 12
    assert (rows[11] == -1).all()
    for half in (rows[:12], rows[12:]):
        assert (half.T @ half == 12 * np.eye(11)).all()
    assert (rows[12:] == -rows[:12]).all()
    which_half = np.repeat((1, -1), 12)
    pairs = np.array([rows[:, i] * rows[:, j] for i, j in itertools.combinations(range(11), 2)])
    assert not (pairs @ rows).any()  # resolution IV
    assert not (which_half @ rows).any()
    assert not (pairs @ which_half).any()
    shared = np.abs(pairs @ pairs.T / 24)[~np.eye(len(pairs), dtype=bool)]
    assert set(shared.round(9)) == {0.0, round(1 / 3, 9)}


def test_the_screen_is_that_design_with_and_without_autoaugment() -> None:
    assert len(SCREEN.cells) == 48
    assert len({cell.config.stack_key for cell in SCREEN.cells}) == 24
    assert "resolution IV" in SCREEN.design
    labels = SCREEN.labels
    found = [
        tuple(1 if cell.levels[name] != labels[name][0] else -1 for name in SETTINGS)
        for cell in SCREEN.cells
        if cell.levels[COLOUR] == "off"
    ]
    assert found == folded_plackett_burman()
    finer = [cell.levels["precision"] for cell in SCREEN.cells]
    assert (finer[:24].count("fp32"), finer[24:].count("fp16"), finer.count("bf16")) == (12, 12, 24)
    for cell in SCREEN.cells:
        protocol, model = cell.config.protocol, cell.config.model
        cutmix = protocol.augmentation("cutmix")
        assert cutmix is not None
        assert cutmix.p == 1
        assert (protocol.augmentation("autoaugment") is not None) == (cell.levels[COLOUR] == "on")
        assert protocol.max_epochs == protocol.patience == 100
        assert protocol.max_epochs % cell.config.measure_every == 0
        assert (model.head_size, model.qk_std, protocol.batch_size) == (
            {"24": None, "64": 64}[cell.levels["head_size"]],
            float(cell.levels["qk_std"]),
            int(cell.levels["batch_size"]),
        )


def turning(cell: Cell, epoch: int) -> dict[str, float]:
    """With dropout, in 11 of 12 settings, a head turns at epoch 3, with and without AutoAugment; and nowhere else."""
    has = cell.levels["dropout"] == "0.1" and cell.levels["qk_std"] + cell.levels["batch_size"] != "0.005256"
    return {"min_mad": 0.004 if has and epoch >= 3 else 0.25, "val_acc": 0.3}


def planted(cell: Cell) -> dict[str, float]:
    smaller = cell.levels["final_norm"] == "off"
    return {"min_mad": 0.3 - 0.05 * smaller + noise(cell, 0.01), "test_acc": 0.5 + 0.04 * (cell.levels[COLOUR] == "on")}


@pytest.fixture(scope="module")
def results() -> StudyResults:
    return made_up(SCREEN, planted, epochs=6, course=turning)


def test_what_turns_heads_is_found_and_nothing_else(results: StudyResults) -> None:
    judged = {judgement.claim.id: judgement for judgement in judgements(results)}
    assert len(judged) == 1 + 2 * 12
    events = {name: judged[f"own-patch-{name}"] for name in FACTORS}
    turned = with_events(results)
    by_setting = turned.groupby(list(SETTINGS))[HEADS].mean()
    num = int(by_setting.sum())
    assert by_setting.isin([0, 1]).all()
    assert 6 <= num < 12
    # Of so many settings with the event, all have dropout: a closed form, twice the one-sided probability.
    expected = 2 * stats.hypergeom.sf(num - 1, 24, num, 12)
    assert events["dropout"].finding.p == pytest.approx(expected)
    assert events["dropout"].words == "yes"
    assert {name for name, each in events.items() if each.words in ("yes", "the other way round")} == {"dropout"}
    assert judged["in-both"].words == "yes"
    assert (
        f"{num} of 24 runs with CutMix alone; {num} of 24 runs with AutoAugment, too" in judged["in-both"].finding.ours
    )
    assert judged["min-mad-final_norm"].words == "yes"
    other = "min-mad-activation"
    assert judged[other].finding.p_against > 0.01


def test_autoaugment_is_compared_within_settings(results: StudyResults) -> None:
    """By the sign test, where each setting has the event with it or without it alone."""
    runs = with_events(results)
    settings = runs.groupby(list(SETTINGS)).ngroup()
    runs[HEADS] = ((runs[COLOUR] == "on") & (settings < 7)) | ((runs[COLOUR] == "off") & (settings == 7))
    difference, p = effect_on_events(runs.astype({HEADS: "int64"}), COLOUR, ("off", "on"))
    assert difference == pytest.approx(6 / 24)
    assert p == pytest.approx(2 * stats.binom.sf(6, 8, 0.5))


def test_main_effects_are_differences_of_means(results: StudyResults) -> None:
    """Which they are in an orthogonal design."""
    found = main_effects(results, "min_mad")
    assert list(found) == list(FACTORS)
    runs = results.runs
    for name, estimate in found.items():
        is_first = runs[name] == SCREEN.labels[name][0]
        expected = runs.loc[~is_first, "min_mad"].mean() - runs.loc[is_first, "min_mad"].mean()
        assert estimate.value == pytest.approx(expected)
        assert estimate.df == 48 - 13
    table = screen_table(results)
    row = table.numbers.set_index("factor").loc["autoaugment"]
    assert row["test_acc"] == pytest.approx(0.04)
    assert "11 of 24" not in table.shown.set_index("change").loc["activation gelu → relu", "runs with the event"]
    labels = [label.get_text() for label in screen_figure(results).figure.axes[0].get_yticklabels()]
    assert labels[0] == "final norm on → off"
    assert len(labels) == 12


def test_runs_that_are_missing_leave_the_rest(results: StudyResults) -> None:
    part = only(results, lambda runs: pd.Series(range(len(runs))) < 40)
    judged = {judgement.claim.id: judgement for judgement in judgements(part)}
    assert judged["min-mad-final_norm"].words == "yes"
    assert judged["in-both"].words == "yes"
    assert len(screen_table(part).numbers) == 12
    nothing = made_up(SCREEN, planted, epochs=6, course=lambda cell, epoch: {"min_mad": 0.3, "val_acc": 0.3})
    quiet = {judgement.claim.id: judgement for judgement in judgements(nothing)}
    assert quiet["in-both"].words == "no"
    assert {quiet[f"own-patch-{name}"].words for name in FACTORS} == {"inconclusive"}


@pytest.mark.slow
def test_it_runs_at_small_scale_and_is_reported(tmp_path: Path) -> None:
    results = run_study(SCREEN.small(), tmp_path, device="cpu").write_tables()
    assert {"screen", "screen-precision", "own-patch"} <= {table.name for table in study_tables(results)}
    verdicts = study_verdicts(results)
    assert verdicts is not None
    assert len(verdicts.judgements) == 25
