"""The rules that judge S3's simulations, on made-up seeds."""

import math

import pandas as pd
import pytest

from nearsight.errors import InputError
from nearsight.papers.structure import simulation_rules as rules
from nearsight.papers.structure.simulation_numbers import KEPT, SCRATCH, advantage, fewer_times, samples_needed
from nearsight.report.rules import Verdict
from nearsight.study import SimulationResults
from nearsight.study.statistics import mean_interval


def seeds(exact: list[int], associated: float | list[float], accuracy: float, best: float = 0.9) -> pd.DataFrame:
    return pd.DataFrame({"exact": exact, "associated": associated, "test_acc": accuracy, "best_acc": best})


@pytest.mark.parametrize(
    ("exact", "associated", "expected"),
    [
        ([1] * 9 + [0], 0.95, Verdict.REPRODUCED),
        ([0] * 10, 0.9, Verdict.IN_DIRECTION),
        ([0] * 10, 0.3, Verdict.NOT_REPRODUCED),
    ],
)
def test_association_is_judged_by_its_rule(exact: list[int], associated: float, expected: Verdict) -> None:
    assert rules.judge_associated(seeds(exact, associated, 0.9), 0.1).verdict == expected


@pytest.mark.parametrize(
    ("exact", "associated", "expected"),
    [
        ([0] * 10, 0.15, Verdict.REPRODUCED),
        ([0] * 10, 0.4, Verdict.IN_DIRECTION),
        ([0] * 9 + [1], 0.1, Verdict.NOT_REPRODUCED),
    ],
)
def test_none_is_judged_by_its_rule(exact: list[int], associated: float, expected: Verdict) -> None:
    assert rules.judge_none(seeds(exact, associated, 0.9), 0.1).verdict == expected


def test_accuracies_are_judged_by_their_rules() -> None:
    up, unsure = mean_interval([0.05, 0.06, 0.05]), mean_interval([0.05, -0.05, 0.01])
    near, far = seeds([1] * 3, 1.0, 0.895), seeds([1] * 3, 1.0, 0.87)
    assert rules.judge_generalises(near, unsure).verdict == Verdict.REPRODUCED
    assert rules.judge_generalises(far, up).verdict == Verdict.IN_DIRECTION
    assert rules.judge_generalises(far, unsure).verdict == Verdict.NOT_REPRODUCED
    assert rules.judge_without(seeds([0] * 3, 0.1, 0.895)).verdict == Verdict.REPRODUCED
    assert rules.judge_without(seeds([0] * 3, 0.1, 0.8)).verdict == Verdict.IN_DIRECTION
    assert rules.judge_without(seeds([0, 0, 1], 0.1, 0.895)).verdict == Verdict.NOT_REPRODUCED
    assert rules.judge_error(seeds([0] * 3, 0.1, 0.935), 0.06).verdict == Verdict.REPRODUCED
    assert rules.judge_error(seeds([0] * 3, 0.1, 0.9), 0.06).verdict == Verdict.IN_DIRECTION
    assert rules.judge_error(seeds([0] * 3, 0.1, 0.8), 0.06).verdict == Verdict.NOT_REPRODUCED


def test_seeds_that_diverged_are_left_out() -> None:
    """Verdicts, words and numbers of seeds are those of the others."""
    others = seeds([0] * 3, 0.1, 0.94)
    others["test_acc"] = [0.93, 0.94, 0.945]
    diverged = pd.concat([others, seeds([0], 0.1, math.nan)], ignore_index=True)
    gain = mean_interval([0.1, 0.11])
    for judge in (
        lambda runs: rules.judge_error(runs, 0.06),
        lambda runs: rules.judge_generalises(runs, gain),
        rules.judge_without,
    ):
        found, expected = judge(diverged), judge(others)
        assert (found.verdict, found.value, found.n) == (Verdict.REPRODUCED, expected.value, 3)
        with pytest.raises(InputError, match="every seed has diverged"):
            judge(diverged.iloc[3:])


def test_sweeps_are_judged_by_their_rules() -> None:
    all_, none, half = (pd.DataFrame({"exact": exact}) for exact in ([1] * 10, [0] * 10, [1, 0] * 5))
    assert rules.judge_enough({10: none, 100: all_}).verdict == Verdict.REPRODUCED
    assert rules.judge_enough({10: none, 100: half}).verdict == Verdict.IN_DIRECTION
    assert rules.judge_enough({10: half, 100: half}).verdict == Verdict.NOT_REPRODUCED
    assert rules.judge_rare({0.0: all_, 0.4: all_, 0.8: none}, 0.46).verdict == Verdict.REPRODUCED
    assert rules.judge_rare({0.0: all_, 0.4: half, 0.8: none}, 0.46).verdict == Verdict.IN_DIRECTION
    assert rules.judge_rare({0.0: none, 0.4: all_}, 0.46).verdict == Verdict.NOT_REPRODUCED
    for judge in (lambda: rules.judge_enough({100: all_}), lambda: rules.judge_rare({0.6: none}, 0.46)):
        with pytest.raises(InputError, match="done"):
            judge()


def transferred(scratch: dict[int, list[float]], kept: dict[int, list[float]]) -> SimulationResults:
    """A study of transfer with these accuracies of two seeds, by the number of samples."""
    rows, levels = [], {}
    for way, table in ((SCRATCH, scratch), (KEPT, kept)):
        for size, accuracies in table.items():
            levels[f"{way} {size}"] = {"descent.num_samples": size}
            rows += [
                {
                    "run": f"{way}{size}{seed}",
                    "condition": f"{way} {size}",
                    "seed": seed,
                    "test_acc": a,
                    "best_acc": 0.91,
                }
                for seed, a in enumerate(accuracies)
            ]
    settings: dict[str, object] = {}
    return SimulationResults(
        name="transfer",
        scale="full",
        responses={},
        settings=settings,
        assumed=(),
        configs={},
        levels=levels,
        cells=(),
        tables={"runs": pd.DataFrame(rows)},
    )


def test_samples_needed_are_the_least_that_reach_the_accuracy() -> None:
    results = transferred(
        {10: [0.8, 0.8], 100: [0.85, 0.91], 1000: [0.905, 0.89]},
        {10: [0.91, 0.89], 100: [0.88, 0.9], 1000: [0.91, 0.91]},
    )
    scratch, kept = (samples_needed(results, way, 0.9) for way in (SCRATCH, KEPT))
    assert scratch.samples.tolist() == [1000, 100]
    assert kept.samples.tolist() == [10, 100]
    times = fewer_times(results, KEPT, 0.9)
    assert times.mean == pytest.approx(10.0)  # of 100 and 1
    assert times.low < 1 < times.high
    assert rules.judge_fewer(times, "").verdict == Verdict.IN_DIRECTION
    assert rules.judge_fewer(mean_interval([0.9, 1.0]), "").verdict == Verdict.NOT_REPRODUCED
    assert rules.judge_fewer(mean_interval([2.0, 2.1]), "").verdict == Verdict.REPRODUCED
    assert samples_needed(results, SCRATCH, 0.99).in_words() == "more than 1,000 in 2 of 2 seeds"
    assert samples_needed(results, KEPT, 0.5).in_words() == "10 or fewer in all 2 seeds"
    assert rules.judge_fewer(fewer_times(results, KEPT, 0.95), "").verdict == Verdict.NOT_REPRODUCED
    assert fewer_times(results, KEPT, 0.907).mean == pytest.approx((1000 / 10 * 100 / 1000) ** 0.5)


def test_the_advantage_is_within_seeds_and_judged_everywhere() -> None:
    results = transferred({10: [0.8, 0.7], 100: [0.9, 0.88]}, {10: [0.9, 0.81], 100: [0.9, 0.87]})
    found = advantage(results, KEPT)
    assert {size: interval.mean for size, interval in found.items()} == pytest.approx({10: 0.105, 100: -0.005})
    judged = rules.judge_everywhere(found)
    assert judged.verdict == Verdict.NOT_REPRODUCED
    assert "not at 100" in judged.ours
    assert rules.judge_everywhere({10: found[10]}).verdict == Verdict.REPRODUCED
    assert rules.judge_everywhere({10: found[10], 20: found[10], 100: found[100]}).verdict == Verdict.IN_DIRECTION


def test_one_seed_has_no_interval_and_reproduces_nothing_that_needs_one() -> None:
    results = transferred({10: [0.8], 100: [0.89]}, {10: [0.91], 100: [0.91]})
    judged = rules.judge_everywhere(advantage(results, KEPT))
    assert (judged.verdict, judged.n) == (Verdict.IN_DIRECTION, 1)
    below = seeds([1], 1.0, 0.87)
    assert rules.judge_generalises(below, mean_interval([0.05])).verdict == Verdict.IN_DIRECTION
    assert samples_needed(results, KEPT, 0.9).in_words() == "10 or fewer in 1 seed"
    assert samples_needed(results, SCRATCH, 0.9).in_words() == "more than 100 in 1 of 1 seed"
    with pytest.raises(InputError, match="no number of samples has a seed that is done both ways"):
        advantage(transferred({10: [0.8]}, {100: [0.9]}), KEPT)
