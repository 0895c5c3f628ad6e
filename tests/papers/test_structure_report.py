"""The report of S3's simulations: numbers against closed forms, files from small runs."""

import dataclasses
import math
from collections.abc import Sequence
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
from nearsight.papers import find_study_or_simulation
from nearsight.papers.locat.dense import CLAIMS
from nearsight.papers.structure.simulation_figures import sweep_panels
from nearsight.papers.structure.simulation_numbers import PHASE_CLAIMS, gain_since_moving, sweep_line
from nearsight.papers.structure.simulation_rules import chance_of_association
from nearsight.report.page.simulation import simulation_page_html
from nearsight.report.rules import Verdict
from nearsight.report.simulations import share_in_words, share_interval, write_simulation_report
from nearsight.study import Simulation, SimulationResults, run_simulation
from nearsight.study.statistics import mean_interval
from nearsight.train.structure import PositionalModel

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
    written = write_simulation_report(results, tmp_path)
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
        assert {path: path.read_bytes() for path in write_simulation_report(results, tmp_path)} == before


def test_an_unfinished_study_says_what_it_cannot(small: dict[str, Path], tmp_path: Path) -> None:
    whole = SimulationResults.read(small["association"])
    runs = whole.runs[whole.runs["condition"] == "fixed sample"]
    part = dataclasses.replace(whole, tables={**whole.tables, "runs": runs})
    verdicts = [str(judgement.finding.verdict) for judgement in judge_claims(part)]
    assert (verdicts[1], verdicts[3]) == ("not tested", "not tested")
    assert verdicts.count("not tested") == 2
    assert "2 of 4 cells are not done yet" in verdict_markdown(part, judge_claims(part))
    with pytest.raises(InputError, match="nothing to report"):
        write_simulation_report(dataclasses.replace(whole, tables={"runs": runs.iloc[:0]}), tmp_path)


def test_a_sweep_with_nothing_but_its_base_tests_nothing(small: dict[str, Path]) -> None:
    whole = SimulationResults.read(small["association-sweep"])
    base = dataclasses.replace(whole, tables={"runs": whole.runs[whole.runs["condition"] == "base"]})
    assert {str(judgement.finding.verdict) for judgement in judge_claims(base)} == {"not tested"}
    assert judge_claims(base)[2].finding.ours == "no seed of q = 0 is done"
    with_zero = dataclasses.replace(
        whole, tables={"runs": whole.runs[whole.runs["condition"].isin(["base", "q = 0.0"])]}
    )
    assert [str(j.finding.verdict) == "not tested" for j in judge_claims(with_zero)] == [True, False, False]


def test_the_caption_of_a_sweep_says_where_q_is_above_s3s(small: dict[str, Path]) -> None:
    results = SimulationResults.read(small["association-sweep"])
    dim, q = 16, 0.46
    above = [f"L = {n}" for n in (2, 3, 5, 8) if q > math.log(dim) / (2 * n)]
    above += [f"C = {n}" for n in (2, 3, 4) if q > math.log(dim) / (5 * n)]
    assert f"With {', '.join(above)}, q stays 0.46, which is above S3's" in sweep_panels(results).caption


def test_a_simulation_of_ones_own_is_told_by_its_responses(tmp_path: Path) -> None:
    def totals(config: PositionalModel, seeds: Sequence[int], *_: object) -> dict[str, pd.DataFrame]:
        return {"runs": pd.DataFrame({"seed": seeds, "total": [config.slope + seed for seed in seeds]})}

    conditions = {f"slope {slope}": PositionalModel(slope=slope) for slope in (0.5, 2.0)}
    study = Simulation(
        name="mine",
        conditions=conditions,
        simulate=totals,
        shrink=lambda c: c,
        responses={"total": "the total"},
        seeds=3,
    )
    folder = run_simulation(study, tmp_path).path
    results = SimulationResults.read(folder)
    assert write_simulation_report(results, folder)
    table = pd.read_csv(folder / "tables" / "conditions.csv")
    expected = mean_interval([0.5, 1.5, 2.5])
    first = table.loc[0, ["condition", "slope", "n", "total", "total_low", "total_high"]].tolist()
    assert first[:3] == ["slope 0.5", 0.5, 3]
    assert first[3:] == pytest.approx([1.5, expected.low, expected.high])
    assert "| slope 2.0 | 3 | 3.000 ± " in (folder / "tables" / "conditions.md").read_text()
    assert "the total" in simulation_page_html(results)


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


def test_a_seed_that_diverged_has_no_gain(small: dict[str, Path]) -> None:
    results = SimulationResults.read(small["association"])
    curves = results.tables["curves"].copy()
    of_fixed = curves["condition"] == "fixed sample"
    runs = results.runs.assign(phase_2=curves["step"].iloc[1])
    curves.loc[of_fixed & (curves["seed"] == 1) & (curves["step"] == curves["step"].max()), "test_acc"] = math.nan
    one = curves[of_fixed & (curves["seed"] == 0)]["test_acc"]
    found = gain_since_moving(dataclasses.replace(results, tables={"runs": runs, "curves": curves}), "fixed sample")
    assert (found.n, found.mean) == (1, pytest.approx(one.iloc[-1] - one.iloc[1]))
