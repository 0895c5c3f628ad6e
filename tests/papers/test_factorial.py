"""The factorial of record: its cells, its effects against plain means, and its answers against what was planted."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from made_up_results import judgements, made_up, noise
from scipy import stats

from nearsight.papers.protocol.factorial import (
    ASKED,
    Factorial,
    at_risk,
    effects_figure,
    effects_table,
    factorial_cifar10,
    factorial_cifar100,
    factorial_tiny_imagenet,
    of_seeds,
)
from nearsight.report.own_patch import HEADS
from nearsight.report.studies import report_of
from nearsight.report.writing import study_tables, study_verdicts
from nearsight.study import Cell, Study, StudyResults, run_study
from nearsight.study.recipes import StudyRecipe

EPOCHS = 110
"""So that the epoch at which locality is to predict accuracy is among them."""


@pytest.mark.parametrize(
    ("make", "num_conditions", "num_seeds", "epochs"),
    [(factorial_cifar100, 8, 5, 300), (factorial_cifar10, 4, 5, 150), (factorial_tiny_imagenet, 4, 3, 80)],
)
def test_all_train_equally_long_with_cutmix_in_every_batch_or_in_none(
    make: StudyRecipe, num_conditions: int, num_seeds: int, epochs: int
) -> None:
    study = make()
    assert study.design == "full factorial"
    assert study.seed_list == tuple(range(num_seeds))
    assert len(study.cells) == num_conditions * num_seeds
    for cell in study.cells:
        protocol, cutmix = cell.config.protocol, cell.config.protocol.augmentation("cutmix")
        assert protocol.max_epochs == protocol.patience == epochs
        assert (cell.config.measure_every, epochs % 10, cell.config.precision) == (10, 0, "bf16")
        assert (cutmix.p if cutmix else 0.0) == float(cell.levels["cutmix"] == "on")
    assert len({cell.config.stack_key for cell in study.cells}) == 1  # so that all can train in one stack
    # A part of the seeds is the same runs.
    assert [cell.run for cell in make(seeds=2).cells] == [cell.run for cell in study.cells][: 2 * num_conditions]


def planted(cell: Cell, *, interaction: float, smoothing: float = 0.0) -> dict[str, float]:
    cutmix, colour = (cell.levels[name] == "on" for name in ("cutmix", "autoaugment"))
    smooth = cell.levels.get("smoothing", "0") != "0"
    mad = 0.34 - 0.12 * cutmix - interaction * (cutmix and colour) - smoothing * smooth + 0.004 * cell.seed
    accuracy = 0.5 + 0.1 * cutmix + 0.06 * colour - 0.03 * (cutmix and colour) + noise(cell, 0.002)
    return {"min_mad": mad + noise(cell, 0.004), "early_mad": mad + 0.08, "test_acc": accuracy}


def answers(results: StudyResults) -> dict[str, str]:
    return {judgement.claim.id: str(judgement.words) for judgement in judgements(results)}


def of(study: Study, numbers: Callable[[Cell], dict[str, float]]) -> StudyResults:
    return made_up(study, numbers)


@pytest.fixture(scope="module")
def with_interaction() -> StudyResults:
    return of(factorial_cifar100(), lambda cell: planted(cell, interaction=0.06))


def test_an_interaction_is_found_and_smoothing_does_nothing(with_interaction: StudyResults) -> None:
    given = answers(with_interaction)
    for id in ("cutmix-min-mad", "colour-min-mad", "colour-and-cutmix-min-mad", "cutmix-early", "cutmix-accuracy"):
        assert given[id] == "yes", id
    for id in ("smoothing-min-mad", "smoothing-and-cutmix-min-mad", "colour-without-cutmix-min-mad"):
        assert given[id] == "yes", id  # it leaves it as it is
    assert (given["colour-accuracy"], given["colour-and-cutmix-accuracy"]) == ("yes", "yes")
    assert given["smoothing-accuracy"] == "yes"


def test_without_an_interaction_none_is_found() -> None:
    given = answers(of(factorial_cifar100(), lambda cell: planted(cell, interaction=0.0)))
    assert given["cutmix-min-mad"] == "yes"
    assert given["colour-min-mad"] != "yes"
    assert given["colour-and-cutmix-min-mad"] != "yes"
    # The other way round.
    given = answers(of(factorial_cifar100(), lambda cell: planted(cell, interaction=-0.06)))
    assert given["colour-and-cutmix-min-mad"] == "the other way round"


def test_smoothing_that_does_something_is_no() -> None:
    given = answers(of(factorial_cifar100(), lambda cell: planted(cell, interaction=0.0, smoothing=0.08)))
    assert given["smoothing-min-mad"] == "no"
    assert given["smoothing-and-cutmix-min-mad"] == "yes"


def test_effects_are_means_of_differences_within_seeds(with_interaction: StudyResults) -> None:
    """Against loops over the runs."""
    runs = with_interaction.runs
    effects = Factorial.of(factorial_cifar100()).effects()
    main, interaction = [], []
    for _, seed in runs.groupby("seed"):
        mean = seed.groupby(["cutmix", "autoaugment"])["min_mad"].mean()
        main.append(mean["on"].mean() - mean["off"].mean())
        interaction.append((mean["on", "on"] - mean["off", "on"]) - (mean["on", "off"] - mean["off", "off"]))
    for id, expected in (("cutmix", main), ("colour-and-cutmix", interaction)):
        np.testing.assert_allclose(of_seeds(with_interaction, effects[id], "min_mad"), expected, atol=1e-12)
    (judged,) = [each for each in judgements(with_interaction) if each.claim.id == "colour-and-cutmix-min-mad"]
    assert judged.finding.p == pytest.approx(stats.ttest_1samp(interaction, 0).pvalue)


def test_the_share_of_local_heads_counts_them(with_interaction: StudyResults) -> None:
    heads, design = with_interaction.heads, Factorial.of(factorial_cifar100())
    shares = {
        run: float(np.mean([mad < 0.21 for mad in heads.loc[heads["run"] == run, "mad"]])) for run in heads["run"]
    }
    runs = with_interaction.runs.assign(share=with_interaction.runs["run"].map(shares))
    by_level = runs.groupby(["seed", "cutmix"])["share"].mean().unstack()
    found = of_seeds(with_interaction, design.effects()["cutmix"], "local_heads")
    np.testing.assert_allclose(found, by_level["on"] - by_level["off"], atol=1e-12)


def test_nothing_is_judged_before_all_seeds_are_there(with_interaction: StudyResults) -> None:
    runs = with_interaction.runs
    part = dataclasses.replace(with_interaction, runs=runs[runs["seed"] < 2])
    assert set(answers(part).values()) == {"not tested"}
    first = judgements(part)[0].finding.ours
    assert first.startswith("−0.15")
    assert first.endswith("; with 2 of 5 seeds, judged when all are complete")
    # A seed that lacks a condition is not there.
    lacking = dataclasses.replace(with_interaction, runs=runs[(runs["seed"] < 4) | (runs["condition"] != "Modern")])
    assert "with 4 of 5 seeds" in judgements(lacking)[0].finding.ours


def test_families_are_those_of_the_numbers() -> None:
    claims = report_of("factorial-cifar100").claims
    families = {family: sum(claim.family == family for claim in claims) for family in {c.family for c in claims}}
    titles = [asked.title for asked in ASKED.values()]
    expected = {**dict.fromkeys(titles, 6), "accuracy": 5, "own patch": 4, "prediction": 3}
    assert families == expected


def test_tables_and_figures(with_interaction: StudyResults) -> None:
    design = Factorial.of(factorial_cifar100())
    table = effects_table(design, with_interaction)
    row = table.numbers.set_index("effect").loc["cutmix"]
    expected = of_seeds(with_interaction, design.effects()["cutmix"], "min_mad")
    assert (row["min_mad_mean"], row["min_mad_n"]) == pytest.approx((expected.mean(), 5))
    drawing = effects_figure(design, "min_mad", with_interaction)
    labels = [label.get_text() for label in drawing.figure.axes[0].get_yticklabels()]
    assert labels == [contrast.name for contrast in design.effects().values()]


# Over the epochs


def turning(cell: Cell, epoch: int) -> dict[str, float]:
    """With both parts, a head turns to its own patch at epoch 40, in all seeds but the last."""
    both = cell.levels["cutmix"] == cell.levels["autoaugment"] == "on"
    turned = both and cell.seed < 4 and epoch >= 40
    return {"min_mad": 0.002 if turned else 0.3 + noise(cell, 0.01), "val_acc": 0.4 - 0.1 * noise(cell, 0.01)}


@pytest.fixture(scope="module")
def turned() -> StudyResults:
    """The final model is that of the last epoch; its accuracy is the higher, the smaller the distance at epoch 50."""
    return made_up(
        factorial_cifar10(),
        lambda cell: {**turning(cell, EPOCHS), "test_acc": 0.5 - turning(cell, 50)["min_mad"]},
        epochs=60,
        course=turning,
    )


def test_epochs_count_until_a_head_turns(turned: StudyResults) -> None:
    runs = at_risk(turned).set_index(["condition", "seed"])
    assert runs.loc[("CutMix+AutoAugment", 0), [HEADS, "epochs"]].tolist() == [1, 40]
    assert runs.loc[("CutMix+AutoAugment", 4), [HEADS, "epochs"]].tolist() == [0, 60]
    judged = {judgement.claim.id: judgement for judgement in judgements(turned)}
    found = judged["own-patch-both"].finding
    exposure = 4 * 40 + 60
    assert found.p == pytest.approx((exposure / (exposure + 15 * 60)) ** 4)
    assert judged["own-patch-both"].words == "yes"
    assert "4 of 5 runs with both CutMix and AutoAugment" in found.ours


def test_heads_other_than_own_patch_heads_are_asked_about(turned: StudyResults, with_interaction: StudyResults) -> None:
    assert answers(turned)["cutmix-others"] != "not tested"
    assert answers(with_interaction)["cutmix-others"] == "not tested"


def test_locality_that_predicts_accuracy_is_found(turned: StudyResults) -> None:
    judged = {judgement.claim.id: judgement for judgement in judgements(turned)}
    assert judged["local-then-accurate"].words == "yes"
    assert judged["local-then-accurate"].finding.value == pytest.approx(-1.0)
    reverse = dataclasses.replace(turned, runs=turned.runs.assign(test_acc=1 - turned.runs["test_acc"]))
    assert answers(reverse)["local-then-accurate"] == "the other way round"
    early = dataclasses.replace(turned, course=turned.course[turned.course["epoch"] < 50])
    found = {judgement.claim.id: judgement.finding.ours for judgement in judgements(early)}
    assert found["local-then-accurate"] == "no run was measured after epoch 50"


@pytest.mark.slow
def test_it_runs_at_small_scale_and_is_reported(tmp_path: Path) -> None:
    study = factorial_cifar10().small()
    results = run_study(study, tmp_path, device="cpu").write_tables()
    assert "factorial" in {table.name for table in study_tables(results)}
    verdicts = study_verdicts(results)
    assert verdicts is not None
    assert {judgement.words for judgement in verdicts.judgements} == {"not tested"}
