"""The report of S3's simulations: rules on made-up seeds, numbers against closed forms, files from small runs."""

import dataclasses
from itertools import permutations
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import stats

from nearsight.data.structured import StructuredPatches
from nearsight.errors import InputError
from nearsight.metrics import patch_association
from nearsight.recipes import find_study_or_simulation
from nearsight.report.structure import rules, write_structure_report
from nearsight.report.structure.chance import chance_of_association
from nearsight.report.structure.claims import CLAIMS
from nearsight.report.structure.dynamics import PHASE_CLAIMS
from nearsight.report.structure.numbers import share_in_words, share_interval
from nearsight.report.structure.sweep import sweep_line
from nearsight.report.structure.transfer import KEPT, SCRATCH, advantage, fewer_times, samples_needed
from nearsight.report.structure.verdict import judge_claims, verdict_markdown
from nearsight.report.structure.writing import FIGURES
from nearsight.report.study.rules import Verdict
from nearsight.study import Simulation, SimulationResults, run_simulation
from nearsight.study.statistics import mean_interval

NAMES = ("association", "association-control", "association-sweep", "transfer")


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Every study at small scale, run once; not to be changed."""
    folders = {}
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    for name in NAMES:
        study = find_study_or_simulation(name)().small()
        assert isinstance(study, Simulation)
        folders[name] = run_simulation(study, tmp_path_factory.mktemp(name) / name).path
    torch.set_num_threads(before)
    return folders


@pytest.mark.parametrize("name", NAMES)
def test_every_study_has_tables_figures_and_a_verdict(name: str, small: dict[str, Path], tmp_path: Path) -> None:
    results = SimulationResults.read(small[name])
    written = write_structure_report(results, tmp_path)
    for figure in FIGURES[name]:
        assert {path.suffix for path in (tmp_path / "figures").glob(f"{figure}.*")} == {".png", ".svg"}
        assert f"**{figure}**" in (tmp_path / "figures" / "captions.md").read_text()
    assert "not drawn" not in (tmp_path / "figures" / "captions.md").read_text()
    verdict = (tmp_path / "verdict.md").read_text()
    assert "Small scale" in verdict
    for claim in CLAIMS[name]:
        assert claim.text in verdict
        assert claim.rule in verdict
    table = pd.read_csv(tmp_path / "tables" / "conditions.csv")
    assert table["condition"].tolist() == list(results.levels)
    means = results.runs.groupby("condition", sort=False)["test_acc"].mean()
    assert table["test_acc"].tolist() == pytest.approx(means.tolist())
    if name == "association":
        before = {path: path.read_bytes() for path in written}
        assert {path: path.read_bytes() for path in write_structure_report(results, tmp_path)} == before


def test_an_unfinished_study_says_what_it_cannot(small: dict[str, Path], tmp_path: Path) -> None:
    whole = SimulationResults.read(small["association"])
    runs = whole.runs[whole.runs["condition"] == "fixed sample"]
    part = dataclasses.replace(whole, tables={**whole.tables, "runs": runs})
    verdicts = [str(judgement.finding.verdict) for judgement in judge_claims(part)]
    assert (verdicts[1], verdicts[3]) == ("not tested", "not tested")
    assert verdicts.count("not tested") == 2
    assert "2 of 4 cells are not done yet" in verdict_markdown(part, judge_claims(part))
    with pytest.raises(InputError, match="nothing to report"):
        write_structure_report(dataclasses.replace(whole, tables={"runs": runs.iloc[:0]}), tmp_path)


def test_the_interval_of_a_share_is_clopper_and_pearsons() -> None:
    for k, n in ((0, 10), (9, 10), (10, 10), (3, 8)):
        found = share_interval([1] * k + [0] * (n - k))
        low = 0.0 if k == 0 else stats.beta.ppf(0.025, k, n - k + 1)
        high = 1.0 if k == n else stats.beta.ppf(0.975, k + 1, n - k)
        assert (found.mean, found.low, found.high) == pytest.approx((k / n, low, high))
    assert share_in_words(share_interval([1] * 9 + [0])) == "9 of 10 seeds (55 to 100 %)"


def test_chance_is_that_of_all_orders() -> None:
    """Every order of a row's other entries, below the diagonal's."""
    data = StructuredPatches(num_sets=2, set_size=3, dim=20, probability=0.1, partition="contiguous")
    found = []
    for order in permutations(range(5)):
        row = torch.tensor([9.0, *order])
        gram = torch.stack([row, *torch.eye(6)[1:]])
        found.append(bool(patch_association(gram, data.sets()).per_patch[0]))
    assert chance_of_association(data) == pytest.approx(np.mean(found))


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


def test_sweeps_are_judged_by_their_rules() -> None:
    all_, none, half = (pd.DataFrame({"exact": exact}) for exact in ([1] * 10, [0] * 10, [1, 0] * 5))
    assert rules.judge_enough({10: none, 100: all_}).verdict == Verdict.REPRODUCED
    assert rules.judge_enough({10: none, 100: half}).verdict == Verdict.IN_DIRECTION
    assert rules.judge_enough({10: half, 100: half}).verdict == Verdict.NOT_REPRODUCED
    assert rules.judge_rare({0.0: all_, 0.4: all_, 0.8: none}, 0.46).verdict == Verdict.REPRODUCED
    assert rules.judge_rare({0.0: all_, 0.4: half, 0.8: none}, 0.46).verdict == Verdict.IN_DIRECTION
    assert rules.judge_rare({0.0: none, 0.4: all_}, 0.46).verdict == Verdict.NOT_REPRODUCED


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


def test_a_sweeps_lines_hold_the_base_and_nothing_else_varied(small: dict[str, Path]) -> None:
    results = SimulationResults.read(small["association-sweep"])
    line = sweep_line(results, "data.probability")
    assert list(line.points) == sorted(line.points)
    assert line.base in line.points
    assert len(line.points) == 7
    assert sum(len(sweep_line(results, name).points) - 1 for name in results.levels["base"]) == len(results.levels) - 1


def test_phases_are_judged_by_the_curves(small: dict[str, Path]) -> None:
    """Curves in which A moves only after v, and those in which it moves with it."""
    results = SimulationResults.read(small["association"])
    steps = np.arange(11)

    def with_curves(gap: np.ndarray, risk: np.ndarray) -> SimulationResults:
        one = {"step": steps, "alpha": np.minimum(steps / 3, 1), "gamma": gap, "rho": 0 * gap, "test_risk": risk}
        frames = [pd.DataFrame({"condition": "fixed sample", "seed": seed, **one}) for seed in (0, 1)]
        return dataclasses.replace(results, tables={**results.tables, "curves": pd.concat(frames)})

    first, _, third = (claim.judge("fixed sample") for claim in PHASE_CLAIMS)
    late, early = np.maximum(steps - 3, 0) / 7, np.minimum(steps / 3, 1)
    down = np.linspace(0.7, float(results.runs["best_risk"].iloc[0]), 11)
    assert first(with_curves(late, down)).verdict == Verdict.REPRODUCED
    assert first(with_curves(early, down)).verdict == Verdict.NOT_REPRODUCED
    assert third(with_curves(late, down)).verdict == Verdict.REPRODUCED
    assert third(with_curves(late, down + 0.2)).verdict != Verdict.REPRODUCED
