"""What a study can show: its own verdicts on made-up runs, against the closed form where there is one."""

import json
import math

import numpy as np
import pytest
from scipy import stats

from nearsight.commands.study import main
from nearsight.errors import InputError
from nearsight.papers import declare_all, find_study
from nearsight.report.claims import Claim
from nearsight.report.power import (
    TYPICAL_SPREAD,
    USUAL,
    Assumed,
    made_up_runs,
    of_paper,
    of_runs,
    one_row_each,
    power_table,
    verdict_rates,
)
from nearsight.report.rules import SIGN, Verdict, judge_sign
from nearsight.study.statistics import paired_difference

declare_all()
NUM_DRAWS = 120


@pytest.fixture(scope="module")
def study():  # type: ignore[no-untyped-def]
    return find_study("protocol-cifar100")()


def about_accuracy() -> Claim:
    def judge(results):  # type: ignore[no-untyped-def]
        ours = paired_difference(results.runs, "Modern", "Baseline", "test_acc")
        return judge_sign(ours, sign=1, words="")

    return Claim(id="accuracy", text="Modern is better", source="", rule=SIGN, judge=judge)


@pytest.mark.parametrize("n", [2, 5])
def test_the_rate_is_that_of_students_t(study, n: int) -> None:  # type: ignore[no-untyped-def]
    effect, spread = 0.03, 0.02
    means = {"Baseline": USUAL, "Modern": {**USUAL, "test_acc": USUAL["test_acc"] + effect}}
    assumed = Assumed(means=means, spread={**TYPICAL_SPREAD, "test_acc": spread}, words="made up")
    rate = verdict_rates([about_accuracy()], one_row_each(study), assumed, n, num_draws=NUM_DRAWS)["accuracy"]
    # Of a difference of two runs, over n seeds.
    away = effect / (spread * math.sqrt(2 / n))
    expected = stats.nct.sf(stats.t.ppf(0.975, n - 1), n - 1, away)
    error = math.sqrt(expected * (1 - expected) / NUM_DRAWS)
    assert rate[Verdict.REPRODUCED] / NUM_DRAWS == pytest.approx(expected, abs=4 * error)
    nothing = verdict_rates([about_accuracy()], one_row_each(study), assumed.without_effects, n, num_draws=NUM_DRAWS)
    assert nothing["accuracy"][Verdict.REPRODUCED] / NUM_DRAWS < 0.025 + 4 * math.sqrt(0.025 * 0.975 / NUM_DRAWS)


def test_runs_are_drawn_around_the_papers_means(study) -> None:  # type: ignore[no-untyped-def]
    assumed = of_paper(study)
    assert assumed.means["Modern"]["min_mad"] == 0.008
    drawn = made_up_runs(one_row_each(study), assumed, 2000, np.random.default_rng(0)).runs
    of_modern = drawn.loc[drawn["condition"] == "Modern", "min_mad"]
    assert of_modern.mean() == pytest.approx(0.008, abs=4 * TYPICAL_SPREAD["min_mad"] / math.sqrt(2000))
    assert of_modern.std() == pytest.approx(TYPICAL_SPREAD["min_mad"], rel=0.1)
    assert set(map(frozenset, drawn.groupby("seed")["condition"].agg(list))) == {frozenset(("Baseline", "Modern"))}


def test_earlier_runs_give_means_and_spread(study) -> None:  # type: ignore[no-untyped-def]
    pilot = made_up_runs(one_row_each(study), of_paper(study), 3, np.random.default_rng(1))
    assumed = of_runs(pilot)
    by_condition = pilot.runs.groupby("condition")["test_acc"]
    assert assumed.means["Modern"]["test_acc"] == pytest.approx(by_condition.mean()["Modern"])
    assert assumed.spread["test_acc"] == pytest.approx(math.sqrt(by_condition.var().mean()))
    with pytest.raises(InputError, match="one seed per condition"):
        of_runs(made_up_runs(one_row_each(study), of_paper(study), 1, np.random.default_rng(1)))


def test_the_table_has_every_claim_or_says_why_not(study) -> None:  # type: ignore[no-untyped-def]
    table = power_table(study, of_paper(study), seeds=(2, 5), num_draws=5)
    ids = set(table.numbers["id"])
    assert {"accuracy", "most-local-head"} <= ids
    assert "early-layers" not in ids
    assert any("early layers" in note for note in table.notes)
    row = table.numbers.set_index("id").loc["accuracy"]
    assert row["reproduced_5"] == 1.0  # 15 points with a spread of 1.5
    assert 0 <= row["false_2"] <= row["reproduced_2"] + row["in_direction_2"] <= 1


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["power", "protocol-cifar10", "--draws", "2", "--seeds", "2", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["study"] == "protocol-cifar10"
    assert [claim["id"] for claim in told["claims"]] == ["accuracy", "most-local-head"]
    for name, reason in (("mixing-cifar100", "no paper has numbers"), ("association", "simulates its own data")):
        with pytest.raises(InputError, match=reason):
            main(["power", name])
