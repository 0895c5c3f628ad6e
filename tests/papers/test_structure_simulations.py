"""S3's simulations: files from small runs, numbers against closed forms, and the rules on made-up seeds."""

import dataclasses
import math
from collections.abc import Sequence
from itertools import permutations
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from nearsight.data.structured import StructuredPatches
from nearsight.errors import InputError
from nearsight.metrics import patch_association
from nearsight.papers import find_study_or_simulation
from nearsight.papers.structure.association import gain_since_moving, judge_generalises, phase_claims
from nearsight.papers.structure.association_control import judge_error, judge_none, judge_without
from nearsight.papers.structure.association_sweep import judge_enough, judge_rare, sweep_line, sweep_panels
from nearsight.papers.structure.simulated import (
    chance_of_association,
    judge_associated,
    judge_proved,
    judge_readings,
)
from nearsight.papers.structure.transfer import (
    KEPT,
    SCRATCH,
    advantage,
    fewer_times,
    judge_everywhere,
    judge_fewer,
    log_times,
    samples_needed,
)
from nearsight.report.claims import Verdicts
from nearsight.report.page.results import simulation_page_html
from nearsight.report.rules import Finding, Verdict, judge_sign, judge_within, seeds_to_decide, weigh
from nearsight.report.simulations import share_in_words, simulation_verdicts, write_simulation_report
from nearsight.report.studies import report_of
from nearsight.study import Simulation, SimulationResults, run_simulation
from nearsight.study.statistics import Estimate, mean_interval
from nearsight.study.statistics.significance import share_interval
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


def verdicts_of(results: SimulationResults) -> Verdicts:
    found = simulation_verdicts(results)
    assert found is not None
    return found


@pytest.mark.parametrize("name", NAMES)
def test_every_study_has_tables_figures_and_a_verdict(name: str, small: dict[str, Path], tmp_path: Path) -> None:
    results = SimulationResults.read(small[name])
    written = write_simulation_report(results, tmp_path)
    assert report_of(name).figures
    for figure in report_of(name).figures:
        assert {path.suffix for path in (tmp_path / "figures").glob(f"{figure}.*")} == {".png", ".svg"}
        assert f"**{figure}**" in (tmp_path / "figures" / "captions.md").read_text()
    assert "not drawn" not in (tmp_path / "figures" / "captions.md").read_text()
    verdict = (tmp_path / "verdict.md").read_text()
    assert "Small scale" in verdict
    for claim in report_of(name).claims_of(results):
        assert claim.text in verdict
        assert claim.rule in verdict
    table = pd.read_csv(tmp_path / "tables" / "conditions.csv")
    assert table["condition"].tolist() == list(results.levels)
    means = results.runs.groupby("condition", sort=False)["test_acc"].mean()
    assert table["test_acc"].tolist() == pytest.approx(means.tolist())
    if name == "association":
        before = {path: path.read_bytes() for path in written}
        assert {path: path.read_bytes() for path in write_simulation_report(results, tmp_path)} == before


def test_two_seeds_are_drawn_as_they_are(small: dict[str, Path]) -> None:
    results = SimulationResults.read(small["association"])
    drawing = report_of("association").figures["phases"](results)
    (lines, *_) = ({line.get_gid(): line for line in axes.lines} for axes in drawing.figure.axes)
    seeds = [lines[f"seeds-alpha-fixed sample-{seed}"].get_ydata() for seed in (0, 1)]
    assert np.allclose(np.mean(seeds, axis=0), lines["alpha-fixed sample"].get_ydata())
    assert not np.allclose(*seeds)
    assert "mean over 2 seeds; thin: seeds." in drawing.caption
    assert "bands" not in drawing.caption
    for name, figure, column in (("association-sweep", "sweep", "associated"), ("transfer", "transfer", "test_acc")):
        results = SimulationResults.read(small[name])
        drawing = report_of(name).figures[figure](results)
        assert "dots: seeds" in drawing.caption
        assert "bars" not in drawing.caption
        dots = [
            line
            for axes in drawing.figure.axes
            for line in axes.lines
            if str(line.get_gid()).startswith(("seeds-associated", "seeds-accuracy"))
        ]
        shown = {float(value) for line in dots for value in line.get_ydata()}
        assert shown == set(results.runs[column])


def test_an_unfinished_study_says_what_it_cannot(small: dict[str, Path], tmp_path: Path) -> None:
    whole = SimulationResults.read(small["association"])
    runs = whole.runs[whole.runs["condition"] == "fixed sample"]
    part = dataclasses.replace(whole, tables={**whole.tables, "runs": runs})
    judged = verdicts_of(part)
    verdicts = [judgement.words for judgement in judged.judgements]
    assert (verdicts[1], verdicts[3]) == ("not tested", "not tested")
    assert verdicts.count("not tested") == 2
    assert "2 of 4 cells are not done yet" in judged.markdown()
    with pytest.raises(InputError, match="nothing to report"):
        write_simulation_report(dataclasses.replace(whole, tables={"runs": runs.iloc[:0]}), tmp_path)


def test_a_sweep_with_nothing_but_its_base_tests_nothing(small: dict[str, Path]) -> None:
    whole = SimulationResults.read(small["association-sweep"])
    base = dataclasses.replace(whole, tables={"runs": whole.runs[whole.runs["condition"] == "base"]})
    assert {judgement.words for judgement in verdicts_of(base).judgements} == {"not tested"}
    assert verdicts_of(base).judgements[2].finding.ours == "no seed of q = 0 is done"
    with_zero = dataclasses.replace(
        whole, tables={"runs": whole.runs[whole.runs["condition"].isin(["base", "q = 0.0"])]}
    )
    assert [judgement.words == "not tested" for judgement in verdicts_of(with_zero).judgements] == [True, False, False]


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
        assert (found.value, found.low, found.high) == pytest.approx((k / n, low, high))
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
        frames = [pd.DataFrame({"condition": "fixed sample", "seed": seed, **one}) for seed in range(6)]
        runs = pd.concat([results.runs[results.runs["seed"] == 0].assign(seed=seed) for seed in range(6)])
        return dataclasses.replace(results, tables={**results.tables, "runs": runs, "curves": pd.concat(frames)})

    first, _, third = (claim.judge for claim in phase_claims("fixed sample"))
    late, early = np.maximum(steps - 3, 0) / 7, np.minimum(steps / 3, 1)
    down = np.linspace(0.7, float(results.runs["best_risk"].iloc[0]), 11)
    assert verdict_of(first(with_curves(late, down))) == Verdict.REPRODUCED
    assert verdict_of(first(with_curves(early, down))) == Verdict.CONTRADICTED
    assert verdict_of(third(with_curves(late, down))) == Verdict.REPRODUCED
    assert verdict_of(third(with_curves(late, down + 0.2))) != Verdict.REPRODUCED


def test_a_seed_that_diverged_has_no_gain(small: dict[str, Path]) -> None:
    results = SimulationResults.read(small["association"])
    curves = results.tables["curves"].copy()
    of_fixed = curves["condition"] == "fixed sample"
    runs = results.runs.assign(phase_2=curves["step"].iloc[1])
    curves.loc[of_fixed & (curves["seed"] == 1) & (curves["step"] == curves["step"].max()), "test_acc"] = math.nan
    one = curves[of_fixed & (curves["seed"] == 0)]["test_acc"]
    found = gain_since_moving(dataclasses.replace(results, tables={"runs": runs, "curves": curves}), "fixed sample")
    assert (found.n, found.value) == (1, pytest.approx(one.iloc[-1] - one.iloc[1]))


def verdict_of(finding: Finding) -> Verdict:
    """Of a claim that is the only one of its family."""
    return weigh(finding, finding.p, finding.p_against)


def seeds(exact: list[int], associated: float | list[float], accuracy: float, best: float = 0.9) -> pd.DataFrame:
    """Seeds of one condition, with a little noise where only a mean is given."""
    around = 0.001 * np.where(np.arange(len(exact)) % 2, 1, -1)
    shares = associated if isinstance(associated, list) else associated + around
    return pd.DataFrame({"exact": exact, "associated": shares, "test_acc": accuracy + around, "best_acc": best})


@pytest.mark.parametrize(
    ("exact", "associated", "expected"),
    [
        ([1] * 10, 0.95, Verdict.REPRODUCED),
        ([1] * 9 + [0], 0.95, Verdict.REPRODUCED),
        ([1] * 17 + [0] * 3, 0.95, Verdict.IN_DIRECTION),  # shown in most seeds, but not in 90 %
        ([0] * 10, 0.9, Verdict.IN_DIRECTION),
        ([1, 1], 1.0, Verdict.IN_DIRECTION),
        ([1], 1.0, Verdict.INCONCLUSIVE),
        ([0] * 10, [0.9] * 4 + [0.3] * 6, Verdict.INCONCLUSIVE),
        ([0] * 10, 0.3, Verdict.CONTRADICTED),
    ],
)
def test_association_is_judged_by_its_rule(exact: list[int], associated: float, expected: Verdict) -> None:
    found = judge_associated(seeds(exact, associated, 0.9), 0.1)
    assert verdict_of(found) == expected
    assert found.p == pytest.approx(stats.binomtest(sum(exact), len(exact), alternative="greater").pvalue)
    share = stats.binomtest(sum(exact), len(exact)).proportion_ci()
    assert (found.value, found.low, found.high) == pytest.approx((np.mean(exact), share.low, share.high))


@pytest.mark.parametrize(
    ("exact", "associated", "expected"),
    [
        ([0] * 10, 0.15, Verdict.REPRODUCED),
        ([0] * 10, 0.4, Verdict.IN_DIRECTION),
        ([1] * 2 + [0] * 8, [1.0] * 2 + [0.1] * 8, Verdict.IN_DIRECTION),
        ([1] * 5 + [0] * 5, [1.0] * 5 + [0.1] * 5, Verdict.INCONCLUSIVE),
        ([1] * 10, 1.0, Verdict.CONTRADICTED),
    ],
)
def test_none_is_judged_by_its_rule(exact: list[int], associated: float | list[float], expected: Verdict) -> None:
    runs = seeds(exact, associated, 0.9)
    found = judge_none(runs, 0.1)
    assert verdict_of(found) == expected
    assert found.p == pytest.approx(stats.ttest_1samp(runs["associated"], 0.2, alternative="less").pvalue)


def test_accuracies_are_judged_by_their_rules() -> None:
    up, unsure, down = (
        mean_interval(gains) for gains in ([0.05, 0.06, 0.05], [0.05, -0.06, 0.0], [-0.05, -0.06, -0.05])
    )
    near, far = seeds([1] * 4, 1.0, 0.895), seeds([1] * 4, 1.0, 0.87)
    for gain in (up, unsure, down):
        assert verdict_of(judge_generalises(near, gain)) == Verdict.REPRODUCED
    found = judge_generalises(near, up)
    assert found.p == pytest.approx(stats.ttest_1samp(near["test_acc"], 0.89, alternative="greater").pvalue)
    assert verdict_of(judge_generalises(far, up)) == Verdict.IN_DIRECTION
    assert verdict_of(judge_generalises(far, unsure)) == Verdict.INCONCLUSIVE
    assert verdict_of(judge_generalises(far, down)) == Verdict.CONTRADICTED
    for accuracy, expected in ((0.895, Verdict.REPRODUCED), (0.8, Verdict.IN_DIRECTION), (0.7, Verdict.CONTRADICTED)):
        assert verdict_of(judge_without(seeds([0] * 6, 0.1, accuracy))) == expected
    assert verdict_of(judge_without(seeds([0] * 4, 0.1, 0.895))) == Verdict.IN_DIRECTION  # four seeds show no share
    assert verdict_of(judge_without(seeds([1] * 6, 0.1, 0.895))) == Verdict.CONTRADICTED
    for accuracy, expected in ((0.935, Verdict.REPRODUCED), (0.89, Verdict.REPRODUCED), (0.87, Verdict.CONTRADICTED)):
        assert verdict_of(judge_error(seeds([0] * 3, 0.1, accuracy), 0.06)) == expected


def test_seeds_that_diverged_are_left_out() -> None:
    """Evidence, words and numbers of seeds are those of the others."""
    others = seeds([0] * 3, 0.1, 0.94)
    others["test_acc"] = [0.93, 0.94, 0.945]
    diverged = pd.concat([others, seeds([0], 0.1, math.nan)], ignore_index=True)
    gain = mean_interval([0.1, 0.11])
    for judge in (
        lambda runs: judge_error(runs, 0.06),
        lambda runs: judge_generalises(runs, gain),
        judge_without,
    ):
        found, expected = judge(diverged), judge(others)
        assert (found.value, found.low, found.high, found.n) == (expected.value, expected.low, expected.high, 3)
        with pytest.raises(InputError, match="every seed has diverged"):
            judge(diverged.iloc[3:])
    assert judge_error(diverged, 0.06).p == judge_error(others, 0.06).p


def test_sweeps_are_judged_by_their_rules() -> None:
    all_, none, half = (pd.DataFrame({"exact": exact}) for exact in ([1] * 10, [0] * 10, [1, 0] * 5))
    assert verdict_of(judge_enough({10: none, 100: all_})) == Verdict.REPRODUCED
    assert verdict_of(judge_enough({10: none, 100: half})) == Verdict.IN_DIRECTION
    assert verdict_of(judge_enough({10: half, 100: half})) == Verdict.INCONCLUSIVE
    assert verdict_of(judge_enough({10: all_, 100: all_})) == Verdict.INCONCLUSIVE  # nobody tried too few
    assert verdict_of(judge_enough({10: all_, 100: none})) == Verdict.CONTRADICTED
    # Of the seeds that differ, all five gain: McNemar's exact test, one-sided.
    assert judge_enough({10: half, 100: all_}).p == pytest.approx(stats.binomtest(5, 5, alternative="greater").pvalue)
    assert verdict_of(judge_rare({0.0: all_, 0.4: all_, 0.8: none}, 0.46)) == Verdict.REPRODUCED
    assert verdict_of(judge_rare({0.0: all_, 0.4: half, 0.8: none}, 0.46)) == Verdict.IN_DIRECTION
    assert verdict_of(judge_rare({0.0: half, 0.4: half}, 0.46)) == Verdict.INCONCLUSIVE
    assert verdict_of(judge_rare({0.0: none, 0.4: all_}, 0.46)) == Verdict.CONTRADICTED
    assert judge_rare({0.0: all_, 0.4: half}, 0.46).p == pytest.approx(
        stats.binomtest(5, 10, alternative="greater").pvalue
    )
    for judge in (lambda: judge_enough({100: all_}), lambda: judge_rare({0.6: none}, 0.46)):
        with pytest.raises(InputError, match="done"):
            judge()


ORDER = [Verdict.CONTRADICTED, Verdict.INCONCLUSIVE, Verdict.IN_DIRECTION, Verdict.REPRODUCED]
"""From the weakest to the strongest."""
TRUTHS = st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=30)
"""Of each seed: whether the strict reading holds, and whether the weak one does."""


@given(TRUTHS)
def test_a_seed_in_which_it_holds_never_weakens_what_is_proved(seeds_of: list[tuple[bool, bool]]) -> None:
    def judged(truths: list[tuple[bool, bool]]) -> Finding:
        strict, weak = zip(*truths, strict=True)
        return judge_proved(strict, weak, "")

    before, after, turned = judged(seeds_of), judged([*seeds_of, (True, True)]), judged(seeds_of[::-1])
    assert ORDER.index(verdict_of(after)) >= ORDER.index(verdict_of(before))
    assert max(before.p, before.p_against) > 0.05  # never both
    assert (turned.p, turned.p_against, turned.leans, turned.fits) == (
        before.p,
        before.p_against,
        before.leans,
        before.fits,
    )


@given(st.lists(st.sampled_from([(0, 1), (0, 0), (1, 1), (1, 0)]), min_size=2, max_size=20), st.randoms())
def test_a_seed_that_gains_never_weakens_enough_and_order_does_not_matter(pairs: list[tuple[int, int]], random) -> None:
    def judged(of_seeds: list[tuple[int, int]]) -> Finding:
        return judge_enough(
            {size: pd.DataFrame({"exact": exact}) for size, exact in enumerate(zip(*of_seeds, strict=True))}
        )

    before, after = judged(pairs), judged([*pairs, (0, 1)])
    assert ORDER.index(verdict_of(after)) >= ORDER.index(verdict_of(before))
    mixed = list(pairs)
    random.shuffle(mixed)
    assert (judged(mixed).p, judged(mixed).p_against) == (before.p, before.p_against)


def test_more_seeds_decide_a_reading_only_the_way_it_leans() -> None:
    """Where the strict reading fails and the weak one holds, none is enough; where seeds are few, some number is."""
    far, near = mean_interval([0.8, 0.81, 0.79]), mean_interval([0.88, 0.91, 0.9])
    weak = judge_sign(mean_interval([0.1, 0.11, 0.1]), sign=1, words="")
    refuted = judge_readings(judge_within(far, 0.89, math.inf, words=""), weak, far, "")
    assert (verdict_of(refuted), seeds_to_decide(refuted)) == (Verdict.IN_DIRECTION, None)
    open_ = judge_readings(judge_within(near, 0.89, math.inf, words=""), weak, near, "")
    number = seeds_to_decide(open_)
    assert verdict_of(open_) == Verdict.IN_DIRECTION
    assert number is not None

    def p_of(n: int) -> float:
        return float(stats.t.sf((near.value - 0.89) / (near.std / math.sqrt(n)), n - 1))

    assert p_of(number) <= 0.05 < p_of(number - 1)


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
    assert times.value == pytest.approx(10.0)  # of 100 and 1
    assert times.low < 1 < times.high
    found = judge_fewer(log_times(results, KEPT, 0.9), "")
    assert (found.value, found.low, found.high) == (times.value, times.low, times.high)
    assert found.p == pytest.approx(stats.ttest_1samp([2.0, 0.0], 0.0).pvalue)
    assert samples_needed(results, SCRATCH, 0.99).in_words() == "more than 1,000 in 2 of 2 seeds"
    assert samples_needed(results, KEPT, 0.5).in_words() == "10 or fewer in all 2 seeds"
    assert math.isnan(fewer_times(results, KEPT, 0.95).value)
    assert verdict_of(judge_fewer(log_times(results, KEPT, 0.95), "")) == Verdict.INCONCLUSIVE
    assert fewer_times(results, KEPT, 0.907).value == pytest.approx((1000 / 10 * 100 / 1000) ** 0.5)


def logarithms(values: list[float]) -> Estimate:
    return mean_interval(np.log10(values))


def test_seeds_that_agree_on_few_numbers_show_no_more_than_their_signs() -> None:
    """Without any spread, Student's t would be sure of two seeds."""
    assert verdict_of(judge_fewer(logarithms([10.0] * 2), "")) == Verdict.IN_DIRECTION
    assert verdict_of(judge_fewer(logarithms([10.0] * 5), "")) == Verdict.REPRODUCED
    assert verdict_of(judge_fewer(logarithms([0.1] * 5), "")) == Verdict.CONTRADICTED
    assert verdict_of(judge_fewer(logarithms([1.0] * 5), "")) == Verdict.INCONCLUSIVE
    assert judge_fewer(logarithms([10.0] * 5), "").p == pytest.approx(0.5**5)
    assert seeds_to_decide(judge_fewer(logarithms([10.0] * 2), "")) == 5


@given(st.lists(st.sampled_from([0.4, 1.0, 2.5, 10.0]), min_size=2, max_size=12))
def test_a_seed_at_the_mean_never_weakens_fewer(ratios: list[float]) -> None:
    before = judge_fewer(logarithms(ratios), "")
    after = judge_fewer(logarithms([*ratios, before.value]), "")
    lower = min if before.value < 1 else max  # of a claim that is contradicted, the same the other way
    assert lower(verdict_of(before), verdict_of(after), key=ORDER.index) == verdict_of(after)


def test_the_advantage_is_within_seeds_and_judged_everywhere() -> None:
    results = transferred({10: [0.8, 0.7], 100: [0.9, 0.88]}, {10: [0.9, 0.81], 100: [0.9, 0.87]})
    found = advantage(results, KEPT)
    assert {size: interval.value for size, interval in found.items()} == pytest.approx({10: 0.105, 100: -0.005})
    judged = judge_everywhere(found)
    assert verdict_of(judged) == Verdict.INCONCLUSIVE
    assert "not at 100" in judged.ours
    assert (judged.value, judged.low, judged.high) == (found[100].value, found[100].low, found[100].high)
    assert verdict_of(judge_everywhere({10: found[10]})) == Verdict.REPRODUCED
    slightly, clearly = mean_interval([0.01, 0.03, -0.005]), mean_interval([-0.02, -0.021, -0.02])
    assert judge_everywhere({10: found[10], 20: slightly}).p == pytest.approx(
        stats.ttest_1samp([0.01, 0.03, -0.005], 0.0).pvalue
    )
    assert verdict_of(judge_everywhere({10: found[10], 20: slightly})) == Verdict.IN_DIRECTION
    # One number at which it is shown to be lower is enough, with a p-value that counts once for each.
    against = judge_everywhere({10: found[10], 20: slightly, 100: clearly})
    assert against.p_against == pytest.approx(3 * stats.ttest_1samp([-0.02, -0.021, -0.02], 0.0).pvalue)
    assert verdict_of(against) == Verdict.CONTRADICTED


def test_one_seed_has_no_interval_and_reproduces_nothing_that_needs_one() -> None:
    results = transferred({10: [0.8], 100: [0.89]}, {10: [0.91], 100: [0.91]})
    judged = judge_everywhere(advantage(results, KEPT))
    assert (verdict_of(judged), judged.n) == (Verdict.INCONCLUSIVE, 1)
    near = seeds([1], 1.0, 0.899)
    assert verdict_of(judge_generalises(near, mean_interval([0.05]))) == Verdict.INCONCLUSIVE
    assert verdict_of(judge_fewer(log_times(results, KEPT, 0.9), "")) == Verdict.INCONCLUSIVE
    assert samples_needed(results, KEPT, 0.9).in_words() == "10 or fewer in 1 seed"
    assert samples_needed(results, SCRATCH, 0.9).in_words() == "more than 100 in 1 of 1 seed"
    with pytest.raises(InputError, match="no number of samples has a seed with both runs"):
        advantage(transferred({10: [0.8]}, {100: [0.9]}), KEPT)
