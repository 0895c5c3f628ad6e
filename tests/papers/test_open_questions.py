"""What the protocol study left open: estimates against references, answers against what was planted."""

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from made_up_results import judgements, made_up, noise
from scipy import stats

from nearsight.errors import InputError
from nearsight.papers import STUDIES
from nearsight.papers.protocol import emergence, mixing, size, unreported
from nearsight.papers.protocol.ablation import ablation_cifar10, ablation_cifar100, ablation_tiny_imagenet
from nearsight.papers.protocol.emergence import course_table
from nearsight.papers.protocol.mixing import CONTRASTS, WHOLE
from nearsight.papers.protocol.numbers import PUBLISHED
from nearsight.papers.protocol.unreported import (
    best_fitting_levels,
    firmness,
    fit_table,
    fits,
    levels_in_words,
    main_effects,
    settings_beside_the_paper,
    settings_effects,
    settings_table,
    step_in_words,
    what_moves_it,
)
from nearsight.report.claims import OURS
from nearsight.report.contrasts import condition_means
from nearsight.report.responses import with_early_layers
from nearsight.report.rules import Verdict, judge_part, weigh
from nearsight.report.studies import report_of
from nearsight.report.tables import Table
from nearsight.report.writing import FIGURES, study_tables, study_verdicts
from nearsight.study import Cell, Study, StudyResults, run_study
from nearsight.study.statistics import Estimate, least_squares

Respond = Callable[[Cell], dict[str, float]]


def answers(results: StudyResults) -> dict[str, str]:
    return {judgement.claim.text: str(judgement.words) for judgement in judgements(results)}


def own_table(results: StudyResults) -> Table:
    """The one that the study has beside those of all studies."""
    (make,) = report_of(results.name).tables
    return make(results)


def only(study: Study, *conditions: str) -> Study:
    """A study of which some conditions are done."""
    cells = tuple(cell for cell in study.cells if cell.condition in conditions)
    part = dataclasses.replace(study)
    part.__dict__["cells"] = cells  # what is cached
    return part


# The fits


def test_two_conditions_give_the_paired_t_test() -> None:
    random = np.random.default_rng(0)
    first, second = random.normal(0.3, 0.1, 5), random.normal(0.2, 0.1, 5)
    runs = pd.DataFrame(
        {"condition": ["a"] * 5 + ["b"] * 5, "seed": [*range(5)] * 2, "min_mad": np.concatenate([first, second])}
    )
    ours = condition_means(runs, "min_mad").estimate({"b": 1.0, "a": -1.0})
    theirs = stats.ttest_rel(second, first)
    interval = theirs.confidence_interval(0.95)
    assert ours.value == pytest.approx((second - first).mean())
    assert (ours.low, ours.high) == pytest.approx((interval.low, interval.high))


def test_a_line_is_scipys() -> None:
    random = np.random.default_rng(1)
    x = random.normal(size=12)
    y = 2 * x + random.normal(size=12)
    fit = least_squares(pd.DataFrame({"mean": 1.0, "x": x}), y)
    theirs = stats.linregress(x, y)
    half = stats.t.ppf(0.975, 10) * theirs.stderr
    ours = fit.estimate({"x": 1.0})
    assert (ours.value, ours.low, ours.high) == pytest.approx((theirs.slope, theirs.slope - half, theirs.slope + half))


def test_what_cannot_be_told_apart_is_said() -> None:
    with pytest.raises(InputError, match="its effects cannot be separated"):
        least_squares(pd.DataFrame({"a": [1.0, 2.0, 3.0], "b": [2.0, 4.0, 6.0]}), [1.0, 2.0, 3.0])
    one_seed = pd.DataFrame({"condition": ["a", "b"], "seed": [0, 0], "min_mad": [0.3, 0.2]})
    fit = condition_means(one_seed, "min_mad")
    assert not fit.estimate({"a": 1.0}).has_interval
    with pytest.raises(InputError, match="no run has c"):
        fit.estimate({"c": 1.0})


def of(value: float, half: float, df: int = 12) -> Estimate:
    """An estimate by a fit, with half of its 95 % interval."""
    error = half / float(stats.t.ppf(0.975, df))
    return Estimate(value=value, low=value - half, high=value + half, error=error, df=df)


@pytest.mark.parametrize(
    ("part", "whole", "verdict"),
    [
        (of(-0.10, 0.05), of(-0.15, 0.02), Verdict.REPRODUCED),
        (of(-0.07, 0.05), of(-0.15, 0.02), Verdict.REPRODUCED),
        (of(-0.01, 0.02), of(-0.15, 0.02), Verdict.CONTRADICTED),
        (of(-0.02, 0.01), of(-0.15, 0.02), Verdict.CONTRADICTED),  # its sign is shown, but it is next to nothing
        (of(-0.01, 0.09), of(-0.15, 0.02), Verdict.INCONCLUSIVE),
        (of(-0.10, 0.12), of(-0.15, 0.02), Verdict.IN_DIRECTION),
        (of(0.08, 0.02), of(-0.15, 0.02), Verdict.CONTRADICTED),
        (of(-0.10, 0.05), of(-0.15, 0.20), Verdict.INCONCLUSIVE),  # CutMix itself does nothing for sure
        (of(0.10, 0.05), of(0.15, 0.02), Verdict.REPRODUCED),
        (Estimate(value=-0.10), Estimate(value=-0.15), Verdict.INCONCLUSIVE),
    ],
)
def test_a_part_is_judged_by_the_whole(part: Estimate, whole: Estimate, verdict: Verdict) -> None:
    found = judge_part(part, whole, n=2)
    assert weigh(found, found.p, found.p_against) is verdict


def test_a_part_that_is_none_is_no_and_one_of_the_other_sign_the_other_way_round() -> None:
    none, other = (judge_part(of(value, 0.01), of(-0.15, 0.02), n=2) for value in (-0.01, 0.08))
    assert (none.opposite, other.opposite) == ("no", "the other way round")


# mixing-cifar100

PLANTED = {
    **{
        "None of these": 0.33,
        "Mixup": 0.32,
        "CutOut": 0.33,
        "Random erasing": 0.32,
        "Noise box": 0.28,
        "Mean box": 0.30,
    },
    **{"Noise box, mixed labels": 0.29, "Mean box, mixed labels": 0.29, "CutMix, own labels": 0.28, "CutMix": 0.18},
    **{"Patch-aligned CutMix": 0.18, "Feathered CutMix": 0.26, "Tile shuffle": 0.15},
}


def of_mixing(cell: Cell) -> dict[str, float]:
    return {"min_mad": PLANTED[cell.condition] + 0.03 * cell.seed + noise(cell, 0.002), "early_mad": 0.4}


def test_the_cut_the_mix_and_the_label() -> None:
    results = made_up(mixing.mixing_cifar100(), of_mixing)
    table = own_table(results)
    found = table.numbers[table.numbers["response"] == "min_mad"].set_index("name")["estimate"]
    assert found["the cut"] == pytest.approx(-0.04, abs=0.005)
    assert found["its label"] == pytest.approx(-0.10, abs=0.005)
    parts = ["the cut", "the other image", "its label"]
    assert found[parts].sum() == pytest.approx(found["CutMix"])
    assert list(answers(results).values()) == [
        *("yes", "no", "yes"),  # the cut, the image, the label
        *("no", "no", "no"),  # the label alone, in either box, and their difference
        *("no", "no", "yes", "no", "no", "yes"),  # the mix, across patches, a sharp edge, CutOut, erasing, tiles
    ]


def test_a_label_that_does_something_in_one_box_alone_is_not_pooled() -> None:
    """Pooled over both boxes it would seem to do something where it does nothing."""

    def respond(cell: Cell) -> dict[str, float]:
        lower = 0.08 if cell.condition == "Mean box, mixed labels" else 0.0
        numbers = of_mixing(cell)
        return {**numbers, "min_mad": numbers["min_mad"] - lower}

    results = made_up(mixing.mixing_cifar100(), respond)
    judged = {judgement.claim.id: judgement for judgement in judgements(results)}
    ids = ("a label in a mean box", "a label in a noise box", "the label × the box")
    assert [judged[id].words for id in ids] == ["yes", "no", "yes"]
    mean = results.runs.groupby("condition")["min_mad"].mean()
    in_mean, in_noise = (mean[f"{box}, mixed labels"] - mean[box] for box in ("Mean box", "Noise box"))
    assert [judged[id].finding.value for id in ids] == pytest.approx([in_mean, in_noise, in_mean - in_noise])
    # The pooled one stays in the table, and is none of the questions, nor drawn.
    assert "a label without its image" not in judged
    table = own_table(results).numbers
    pooled = table[(table["response"] == "min_mad") & (table["name"] == "a label without its image")]
    assert pooled["estimate"].item() == pytest.approx((in_mean + in_noise) / 2)
    drawing = report_of(results.name).figures["mixing-contrasts"](results)
    drawn = [label.get_text() for label in drawing.figure.axes[0].get_yticklabels()]
    assert "a label without its image" not in drawn
    assert "a label in a mean box" in drawn


def test_contrasts_without_their_runs_are_left_out() -> None:
    part = only(mixing.mixing_cifar100(), "None of these", "CutMix", "Mixup")
    results = made_up(part, of_mixing)
    assert set(own_table(results).shown["what"]) == {"CutMix", "the mix without a cut"}
    given = answers(results)
    assert sum(answer == "not tested" for answer in given.values()) == len(CONTRASTS) - 1
    assert condition_means(results.runs, "min_mad").estimate(WHOLE.weights).value == pytest.approx(-0.15, abs=0.005)
    with pytest.raises(InputError, match="no two conditions"):
        own_table(made_up(only(mixing.mixing_cifar100(), "None of these"), of_mixing))


def test_a_run_that_lacks_leaves_the_others_in_the_fit_and_the_answers_their_intervals() -> None:
    whole = made_up(mixing.mixing_cifar100(), of_mixing)
    lacking = (whole.runs["condition"] == "CutMix") & (whole.runs["seed"] == 1)
    results = dataclasses.replace(whole, runs=whole.runs[~lacking])
    table = own_table(results).numbers
    tabled = table[table["response"] == "min_mad"].set_index("contrast")
    for judgement in judgements(results):
        row = tabled.loc[judgement.claim.source.removeprefix("min MAD; ")]
        finding = judgement.finding
        assert (finding.value, finding.low, finding.high) == pytest.approx((row["estimate"], row["low"], row["high"]))
    assert answers(results) == answers(whole)


def test_the_long_mixing_is_judged_when_all_six_seeds_are_there() -> None:
    def respond(cell: Cell) -> dict[str, float]:
        return {"min_mad": PLANTED[cell.condition] + 0.003 * cell.seed + noise(cell, 0.002), "early_mad": 0.4}

    whole = made_up(mixing.mixing_long_cifar100(), respond)
    assert list(answers(whole).values()) == [
        *("yes", "the other way round", "the other way round", "yes"),  # CutMix, CutOut, own labels, their difference
        *("yes", "yes", "yes", "yes"),  # a mean box, the label alone, Mixup, label × content
    ]
    table = own_table(whole).numbers
    found = table[table["response"] == "min_mad"].set_index("name")["estimate"]
    mean = whole.runs.groupby("condition")["min_mad"].mean()
    by_label = mean["CutMix"] - mean["CutMix, own labels"], mean["Mean box, mixed labels"] - mean["Mean box"]
    assert found["the label × what is in the box"] == pytest.approx(by_label[0] - by_label[1])
    part = dataclasses.replace(whole, runs=whole.runs[whole.runs["seed"] < 3])
    assert set(answers(part).values()) == {"not tested"}
    assert all("with 3 of 6 seeds" in judgement.finding.ours for judgement in judgements(part))


# unreported-cifar100


def of_unreported(cell: Cell) -> dict[str, float]:
    levels = cell.levels
    cell = dataclasses.replace(cell, condition=" ".join(levels.values()))  # so that names do not move the noise
    with_it = levels["cutmix"] != "off"
    mad = 0.24 if with_it else 0.32
    mad -= with_it * (0.09 * (levels["weight_decay"] == "0") + 0.04 * (levels["position_std"] == "1"))
    mad -= 0.03 * (levels["cutmix"] == "p=1")
    accuracy = 0.55 + 0.06 * with_it - 0.06 * (levels["position_std"] == "1") + 0.03 * (levels["cutmix"] == "p=1")
    return {"min_mad": mad + noise(cell, 0.003), "test_acc": accuracy + noise(cell, 0.001)}


def test_settings_that_move_the_smallest_distance_are_found() -> None:
    results = made_up(unreported.unreported_cifar100(), of_unreported)
    found = main_effects(results)
    planted = {"weight_decay": -0.09, "position_std": -0.04, "cutmix": -0.03, "lr": 0.0, "init": 0.0}
    for factor, effect in planted.items():
        assert found[factor].low <= effect <= found[factor].high
        assert found[factor].value == pytest.approx(effect, abs=0.006)
    # A reference: in a balanced design a main effect is a difference of two means.
    runs = results.runs[results.runs["cutmix"] != "off"]
    by_level = runs.groupby("weight_decay")["min_mad"].mean()
    assert found["weight_decay"].value == pytest.approx(by_level["0"] - by_level["0.05"])
    words = what_moves_it(results)
    assert words.index("weight decay 0.05 → 0 (−0.0") < words.index("positions' deviation") < words.index("Not shown")
    given = list(answers(results).values())
    assert given[1:2] + given[3:4] + given[5:] == ["no", "yes", "yes", "yes"]
    assert {given[2], given[4]} <= {"inconclusive", "leaning yes"}
    assert {"with CutMix", "without CutMix"} == set(settings_table(results).shown["runs"])


def test_the_distance_to_the_paper_is_the_one_that_is_said() -> None:
    results = made_up(unreported.unreported_cifar100(), of_unreported)
    table = fits(results)
    assert len(table) == 16
    assert table["distance"].is_monotonic_increasing
    paper = PUBLISHED["ablation-cifar100"].conditions
    for _, row in table.iterrows():
        here = results.runs
        for name in ("lr", "weight_decay", "init", "position_std"):
            here = here[here[name] == row[name]]
        squares = []
        for label, level in (("Baseline", "off"), ("+CutMix", row["cutmix"])):
            (run,) = here[here["cutmix"] == level].to_dict("records")
            for response in ("test_acc", "min_mad", "max_mad"):
                unit = getattr(paper["+CutMix"], response) - getattr(paper["Baseline"], response)
                squares.append(((run[response] - getattr(paper[label], response)) / unit) ** 2)
        assert row["distance"] == pytest.approx(math.sqrt(sum(squares) / 6))
    assert len(fit_table(results).shown) == 17


def test_one_setting_has_no_others_beside_it() -> None:
    results = made_up(only(unreported.unreported_cifar100(), "Baseline", "+CutMix p=1"), of_unreported)
    (nearest, *_) = judgements(results)
    distance = fits(results)["distance"].item()
    assert nearest.finding.ours == f"distance {distance:.2f}; no other has runs yet"
    assert math.isnan(firmness(results))


def test_how_firm_the_choice_of_a_setting_is() -> None:
    """Against a loop: noise on every run, the distances anew."""
    results = made_up(
        unreported.unreported_cifar100(), lambda cell: {**of_unreported(cell), "max_mad": 0.5 + noise(cell, 0.02)}
    )
    runs, columns = results.runs, ["test_acc", "min_mad", "max_mad"]
    residuals, df = [], 0
    for part in (runs[runs["cutmix"] == "off"], runs[runs["cutmix"] != "off"]):
        names = [name for name in results.factors if part[name].nunique() > 1]
        design = np.column_stack([np.ones(len(part)), *(part[name] == part[name].iloc[0] for name in names)])
        residuals.append(part[columns] - design @ np.linalg.lstsq(design, part[columns].to_numpy())[0])
        df += len(part) - design.shape[1]
    left_over = pd.concat(residuals).to_numpy()
    random, num_draws, stays = np.random.default_rng(7), 300, 0
    best = best_fitting_levels(results)
    for _ in range(num_draws):
        noises = random.multivariate_normal(np.zeros(3), left_over.T @ left_over / df, len(runs))
        noised = dataclasses.replace(results, runs=runs.assign(**(runs[columns] + noises)))
        stays += best_fitting_levels(noised) == best
    # Four standard errors of both shares of draws.
    assert 0.05 < stays / num_draws < 0.95
    assert firmness(results) == pytest.approx(stays / num_draws, abs=4 * 0.5 / num_draws**0.5)
    (nearest, *_) = judgements(results)
    assert nearest.finding.ours.endswith(f"it stays the closest in {100 * firmness(results):.0f} % of the draws")
    # Without any noise nothing else could be the closest.
    exact = made_up(
        unreported.unreported_cifar100(), lambda cell: {"test_acc": 0.5 + 0.1 * (cell.levels["cutmix"] == "p=1")}
    )
    assert firmness(exact) == 1.0


def test_the_best_setting_becomes_an_ablation() -> None:
    results = made_up(unreported.unreported_cifar100(), of_unreported)
    levels = best_fitting_levels(results)
    assert (levels["weight_decay"], levels["position_std"]) == ("0", "1")
    study = unreported.ablation_under(levels)
    assert len(study.cells) == 24
    modern = next(cell.config for cell in study.cells if cell.condition == "Modern")
    assert (modern.protocol.weight_decay, modern.model.position_std) == (0.0, 1.0)
    assert (modern.protocol.max_epochs, modern.protocol.patience) == (600, 20)
    assert report_of(study.name).claims


def test_the_fitted_ablation_has_the_settings_that_the_committed_results_give() -> None:
    found = best_fitting_levels(StudyResults.read(Path(__file__).parents[2] / "results" / "unreported-cifar100"))
    assert found == unreported.NEAREST
    usual = {cell.run for cell in ablation_cifar100().cells if cell.levels["cutmix"] == "off"}
    fitted = unreported.ablation_fitted_cifar100().cells
    assert {cell.run for cell in fitted if cell.levels["cutmix"] == "off"} == usual
    assert {cell.config.protocol.augmentation("cutmix").p for cell in fitted if cell.levels["cutmix"] != "off"} == {1.0}


def test_the_papers_own_numbers_are_at_distance_zero() -> None:
    paper = PUBLISHED["ablation-cifar100"].conditions

    def exact(cell: Cell) -> dict[str, float]:
        row = paper["Baseline" if cell.levels["cutmix"] == "off" else "+CutMix"]
        assert row.min_mad is not None
        assert row.max_mad is not None
        between = (row.min_mad + row.max_mad) / 2
        return {"min_mad": row.min_mad, "max_mad": row.max_mad, "early_mad": between, "test_acc": row.test_acc}

    results = made_up(unreported.unreported_cifar100(), exact)
    assert fits(results)["distance"].max() == pytest.approx(0, abs=1e-9)
    assert list(answers(results).values())[1] == "yes"


# size-cifar100

EFFECTS = {"width": 0.02, "depth": -0.01, "cutmix": -0.09, "more": -0.03, "fewer": 0.02, "wc": 0.02, "wf": 0.0}


def of_size(cell: Cell) -> dict[str, float]:
    levels = cell.levels
    width, depth = math.log2(int(levels["width"]) / 192), math.log2(int(levels["depth"]) / 8)
    cutmix, fewer = (levels["cutmix"] != "off") - 0.5, (levels["images"] != "all") - 0.5
    more = float(levels["cutmix"] == "p=1")
    early = 0.35 + EFFECTS["width"] * width + EFFECTS["depth"] * depth + EFFECTS["cutmix"] * cutmix
    early += EFFECTS["more"] * more + EFFECTS["fewer"] * fewer + EFFECTS["wc"] * width * cutmix
    return {"early_mad": early + noise(cell, 0.002), "min_mad": 0.1}


def test_size_images_and_cutmix_are_told_apart() -> None:
    results = made_up(size.size_cifar100(), of_size)
    fit = size.fit_of(results, "early_mad")
    found = {question.name: fit.estimate(question.weights) for question in size.CONTRASTS}
    planted = [0.02 - 0.5 * 0.02, -0.09, 0.02, 0.0, 0.0, 0.0, -0.03]
    for estimate, effect in zip(found.values(), planted, strict=True):
        assert estimate.value == pytest.approx(effect, abs=0.006)
    given = list(answers(results).values())
    assert given[:3] + given[6:] == ["yes"] * 4
    assert set(given[3:6]) <= {"inconclusive", "leaning yes"}
    assert len(own_table(results).shown) == len(size.CONTRASTS)


def test_size_says_what_it_can_of_some_runs() -> None:
    part = only(size.size_cifar100(), "Baseline", "+CutMix p=0.5", "+width 384", "width 384+CutMix p=0.5")
    results = made_up(part, of_size)
    given = answers(results)
    # Four runs and four effects leave none over to estimate the noise.
    assert given["Does CutMix have less effect in a wider model, so that it needs more of it?"] == "inconclusive"
    assert given["Does CutMix have less effect in a deeper model?"] == "not tested"


# ablation-cifar10 and ablation-tiny-imagenet


@pytest.mark.parametrize("study", [ablation_cifar10(), ablation_tiny_imagenet()])
def test_ablations_elsewhere_have_no_numbers_of_the_paper_to_meet(study: Study) -> None:
    def respond(cell: Cell) -> dict[str, float]:
        local = cell.levels["cutmix"] != "off"
        return {"min_mad": 0.02 if local else 0.3, "min_entropy": 0.1 if local else 0.6, "test_acc": 0.7 + 0.05 * local}

    def noised(cell: Cell) -> dict[str, float]:
        return {name: value + noise(cell, 0.001) for name, value in respond(cell).items()}

    results = made_up(dataclasses.replace(study, seeds=3), noised)
    judged = {judgement.claim.text: judgement for judgement in judgements(results)}
    gap = next(judgement for text, judgement in judged.items() if text.startswith("CutMix separates"))
    assert gap.words == "reproduced"  # there is no size to agree with
    assert gap.claim.paper == "not known"
    assert gap.claim.source.endswith("there on CIFAR-100")
    asked = {judgement.claim.source for judgement in judged.values() if judgement.words == "not tested"}
    assert asked == {OURS}  # made-up runs all have as many epochs
    colour = "ColorJitter" if "tiny" in study.name else "AutoAugment"
    assert judged[f"{colour} alone has no effect on locality"].words == "reproduced"
    assert judged[f"{colour} does not change what CutMix does to locality"].words == "reproduced"
    tables = {table.name: table for table in study_tables(results)}
    assert len(tables["conditions"].shown) == 8


# What all have in common


def test_what_is_registered_does_not_collide() -> None:
    for name in STUDIES:
        parts = report_of(name)
        names = [*FIGURES, *parts.figures, *parts.animations]
        assert len(names) == len(set(names)), name
        texts = [claim.text for claim in parts.claims]
        assert len(texts) == len(set(texts)), name


def test_figures_show_what_the_tables_say() -> None:
    for seeds in (2, 3):
        mixed = made_up(mixing.mixing_cifar100(seeds=seeds), of_mixing)
        drawing = report_of(mixed.name).figures["mixing-contrasts"](mixed)
        drawn = {line.get_gid(): line for line in drawing.figure.axes[0].lines}
        estimate = condition_means(mixed.runs, "min_mad").estimate(CONTRASTS[0].weights)
        assert drawn["value-the cut"].get_xdata()[0] == estimate.value
        by_hand = [
            sum(weight * _of(mixed.runs, label, seed) for label, weight in CONTRASTS[0].weights.items())
            for seed in range(seeds)
        ]
        assert list(drawn["seeds-the cut"].get_xdata()) == pytest.approx(by_hand)
        assert np.mean(by_hand) == pytest.approx(estimate.value)
        assert ("interval-the cut" in drawn) == (seeds == 3)
        assert ("bars" in drawing.caption) == (seeds == 3)
        assert f"{seeds} seeds per condition; dots: seeds" in drawing.caption
    assert list(drawn["interval-the cut"].get_xdata()) == [estimate.low, estimate.high]
    searched = made_up(unreported.unreported_cifar100(), of_unreported)
    drawing = settings_beside_the_paper(searched)
    (paper,) = (line for line in drawing.figure.axes[0].lines if line.get_gid() == "paper")
    assert list(paper.get_ydata()) == [0.316, 0.021]
    assert levels_in_words(best_fitting_levels(searched)) in drawing.caption
    effects = [label.get_text() for label in settings_effects(searched).figure.axes[0].get_yticklabels()]
    assert effects == [step_in_words(searched, factor) for factor in main_effects(searched)]
    sizes = made_up(size.size_cifar100(), of_size)
    figure = size.distance_by_size(sizes).figure
    lines = {line.get_gid(): line for axes in figure.axes for line in axes.lines}
    assert len(lines) == 2 * (5 + 5)
    runs = with_early_layers(sizes).set_index("condition")["early_mad"]
    shown = dict(zip(*lines["early_mad-width-off-25 %"].get_data(), strict=True))
    assert shown == {
        192.0: runs["+images 25 %"],
        96.0: runs["width 96+images 25 %"],
        384.0: runs["width 384+images 25 %"],
    }


def _of(runs: pd.DataFrame, condition: str, seed: int) -> float:
    (value,) = runs.loc[(runs["condition"] == condition) & (runs["seed"] == seed), "min_mad"]
    return float(value)


def test_seeds_of_a_setting_are_dots() -> None:
    searched = made_up(unreported.unreported_cifar100(seeds=2), of_unreported)
    drawing = settings_beside_the_paper(searched)
    lines = {line.get_gid(): line for line in drawing.figure.axes[0].lines}
    dots = [lines[f"seeds-{level}"].get_data() for level in searched.factors["cutmix"]]
    shown = {point for data in dots for point in zip(*data, strict=True)}
    assert shown == set(zip(100 * searched.runs["test_acc"], searched.runs["min_mad"], strict=True))
    assert "dots: seeds" in drawing.caption
    one = settings_beside_the_paper(made_up(unreported.unreported_cifar100(), of_unreported))
    assert not any(str(line.get_gid()).startswith("seeds") for line in one.figure.axes[0].lines)
    assert "dots" not in one.caption


def test_seeds_of_a_size_are_dots() -> None:
    sizes = made_up(size.size_cifar100(seeds=2), of_size)
    drawing = size.distance_by_size(sizes)
    dots = {line.get_gid(): line for axes in drawing.figure.axes for line in axes.lines}["seeds-min_mad-depth-off-all"]
    runs = sizes.runs[
        (sizes.runs["width"] == "192") & (sizes.runs["cutmix"] == "off") & (sizes.runs["images"] == "all")
    ]
    expected = sorted(zip(runs["depth"].astype(float), runs["min_mad"], strict=True))
    assert sorted(zip(*dots.get_data(), strict=True)) == expected
    assert "2 seeds per point; dots: seeds." in drawing.caption


def test_questions_are_not_called_claims() -> None:
    results = made_up(size.size_cifar100(), of_size)
    told = study_verdicts(results)
    assert told is not None
    text = told.markdown()
    assert "Of 7 questions: 2 inconclusive, 4 yes, 1 leaning yes." in text
    assert "| question | asked | numbers | seeds | p | answer | to decide |" in text
    assert list(told.table().numbers["verdict"]) == list(answers(results).values())
    unfinished = dataclasses.replace(results, runs=results.runs.iloc[:1])
    assert set(answers(unfinished).values()) == {"not tested"}


def test_from_the_recipe_to_the_answers(tmp_path: Path) -> None:
    study = emergence.emergence_cifar100(seeds=1).small()
    run_study(study, tmp_path)
    results = StudyResults.read(tmp_path)
    assert set(results.course["epoch"]) == {0, 1, 2}
    table = course_table(results)
    assert list(table.numbers["condition"]) == ["Baseline", "+CutMix", "Modern"]
    assert "not tested" not in answers(results).values()
