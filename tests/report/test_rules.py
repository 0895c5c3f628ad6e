"""What turns numbers into verdicts: they grow with evidence, hang on no order, and rarely find what is not there."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nearsight.report.claims import Claim, Judgement, Verdicts, judge_all, not_tested
from nearsight.report.rules import (
    NO,
    OTHER_WAY,
    YES,
    Finding,
    Verdict,
    all_of,
    described,
    judge_dissociation,
    judge_every_seed,
    judge_groups,
    judge_no_effect,
    judge_not_worse,
    judge_part,
    judge_sign,
    judge_within,
)
from nearsight.study import StudyResults
from nearsight.study.statistics import Estimate, mean_interval
from nearsight.study.statistics.intervals import difference_of

Table = dict[str, list[float]]
"""Condition → a value per seed."""
CONDITIONS = ("base", "key", "other", "both")
NOTHING = pd.DataFrame({"condition": [], "seed": []})
NO_RUNS = StudyResults("made up", {}, NOTHING, NOTHING, NOTHING, "full", {}, ())


def contrast(table: Table, first: str, second: str) -> pd.DataFrame:
    return pd.DataFrame({label: table[label] for label in (first, second)})


def estimate(table: Table, first: str, second: str) -> Estimate:
    return difference_of(contrast(table, first, second), first, second)


RULES: dict[str, Callable[[Table], Finding]] = {
    "sign": lambda t: judge_sign(estimate(t, "key", "base"), sign=-1, words=""),
    "size": lambda t: judge_sign(estimate(t, "key", "base"), sign=-1, words="", paper=-1.0),
    "within": lambda t: judge_within(estimate(t, "other", "base"), -0.5, 0.5, words=""),
    "not worse": lambda t: judge_not_worse(estimate(t, "other", "base"), words=""),
    "no effect": lambda t: judge_no_effect(estimate(t, "other", "base"), estimate(t, "key", "base"), key_sign=-1),
    "part": lambda t: judge_part(estimate(t, "other", "base"), estimate(t, "key", "base"), n=len(t["base"])),
    "dissociation": lambda t: judge_dissociation(
        estimate(t, "key", "base"),
        estimate(t, "other", "base"),
        estimate(t, "key", "other"),
        estimate(t, "both", "base"),
        estimate(t, "both", "key"),
    ),
    "groups": lambda t: judge_groups(
        pd.DataFrame(
            [
                {"seed": seed, "cutmix": "on" if label in ("key", "both") else "off", "min_mad": value}
                for label, values in t.items()
                for seed, value in enumerate(values)
            ]
        ),
        "cutmix",
        ("off", "on"),
        "min_mad",
        None,
    ),
    "every seed": lambda t: judge_every_seed(
        [key < base - 0.5 for key, base in zip(t["key"], t["base"], strict=True)],
        [key < base for key, base in zip(t["key"], t["base"], strict=True)],
        "",
    ),
}


def _said(finding: Finding, results: StudyResults) -> Finding:
    return finding


def judged(findings: Sequence[Finding]) -> list[Verdict]:
    """As one family."""
    claims = [
        Claim(id=str(place), text="It is so", source="", rule="", judge=partial(_said, finding))
        for place, finding in enumerate(findings)
    ]
    return [judgement.verdict for judgement in judge_all(claims, NO_RUNS) if judgement.verdict is not None]


SEEDS = st.integers(2, 6).flatmap(
    lambda n: st.fixed_dictionaries(
        {label: st.lists(st.floats(-3, 3).map(lambda v: round(v, 2)), min_size=n, max_size=n) for label in CONDITIONS}
    )
)
NO_WEAKER = {
    Verdict.REPRODUCED: {Verdict.REPRODUCED},
    Verdict.IN_DIRECTION: {Verdict.REPRODUCED, Verdict.IN_DIRECTION},
    Verdict.CONTRADICTED: {Verdict.CONTRADICTED},
    Verdict.INCONCLUSIVE: set(Verdict),
}


@pytest.mark.parametrize("rule", [name for name in RULES if name not in ("groups", "every seed")])
@settings(max_examples=30, deadline=None)
@given(table=SEEDS, others=SEEDS)
def test_a_seed_that_agrees_with_the_mean_never_weakens_a_verdict(rule: str, table: Table, others: Table) -> None:
    """Alone, and as one of a family whose other claims are confirmed likewise."""

    def with_one_more(seeds: Table) -> Table:
        return {label: [*values, float(np.mean(values))] for label, values in seeds.items()}

    before, after = (
        judged([RULES[rule](first), RULES["sign"](second), RULES["within"](second)])
        for first, second in ((table, others), (with_one_more(table), with_one_more(others)))
    )
    for one, other in zip(before, after, strict=True):
        assert other in NO_WEAKER[one]


@settings(max_examples=30, deadline=None)
@given(table=SEEDS)
def test_nor_does_a_seed_in_which_groups_lie_as_on_average(table: Table) -> None:
    """The seed whose difference and share of ordered pairs are nearest to the mean of all: here, all are that seed."""
    same = {label: [values[0] + 0.01 * seed for seed in range(len(values))] for label, values in table.items()}
    one_more = {label: [*values, float(np.mean(values))] for label, values in same.items()}
    (before,), (after,) = judged([RULES["groups"](same)]), judged([RULES["groups"](one_more)])
    assert after in NO_WEAKER[before]


@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=9))
def test_nor_does_a_seed_that_holds_what_most_seeds_hold(seeds: list[tuple[bool, bool]]) -> None:
    strict, weak = [one and other for one, other in seeds], [other for _, other in seeds]
    most_strict, most_weak = sum(strict) > len(seeds) / 2, sum(weak) > len(seeds) / 2
    (before,) = judged([judge_every_seed(strict, weak, "")])
    (after,) = judged([judge_every_seed([*strict, most_strict], [*weak, most_weak], "")])
    assert after in NO_WEAKER[before]


@pytest.mark.parametrize("rule", RULES)
@settings(max_examples=20, deadline=None)
@given(table=SEEDS, data=st.data())
def test_the_order_of_seeds_and_conditions_does_not_matter(rule: str, table: Table, data: st.DataObject) -> None:
    n = len(table["base"])
    order, labels = data.draw(st.permutations(range(n))), data.draw(st.permutations(CONDITIONS))
    shuffled = {label: [table[label][seed] for seed in order] for label in labels}
    first, second = RULES[rule](table), RULES[rule](shuffled)
    assert (first.value, first.p, first.p_against) == pytest.approx(
        (second.value, second.p, second.p_against), abs=1e-9
    )
    assert judged([first]) == judged([second])


@pytest.mark.parametrize("n", [2, 5])
def test_where_nothing_has_an_effect_few_families_find_one(n: int) -> None:
    """Of claims of an effect, and of claims of none where the effect is exactly at the margin."""
    random, num_draws, false = np.random.default_rng(n), 150, 0
    edge = 0
    for _ in range(num_draws):
        table = {label: list(random.standard_normal(n)) for label in CONDITIONS}
        found = judged([RULES[rule](table) for rule in ("sign", "size", "groups", "dissociation")])
        false += Verdict.REPRODUCED in found
        at_margin = mean_interval(0.5 + 0.3 * random.standard_normal(n))
        edge += judged([judge_within(at_margin, -0.5, 0.5, words="")]) == [Verdict.REPRODUCED]
    # Three standard errors above 5 %.
    assert false / num_draws < 0.05 + 3 * math.sqrt(0.05 * 0.95 / num_draws)
    assert edge / num_draws < 0.05 + 3 * math.sqrt(0.05 * 0.95 / num_draws)


def test_one_seed_decides_nothing() -> None:
    table = {"base": [0.3], "key": [0.0], "other": [0.3], "both": [0.0]}
    assert set(judged([rule(table) for rule in RULES.values()])) == {Verdict.INCONCLUSIVE}


def test_two_seeds_that_agree_are_in_direction_and_more_decide() -> None:
    two = judge_sign(mean_interval([-0.065, -0.050]), sign=-1, words="")
    three = judge_sign(mean_interval([-0.065, -0.050, -0.060]), sign=-1, words="")
    assert judged([two]) == [Verdict.IN_DIRECTION]
    assert judged([three]) == [Verdict.REPRODUCED]


def test_a_wide_interval_around_nothing_is_no_equivalence() -> None:
    narrow, wide = (mean_interval([-width, 0.0, width]) for width in (0.01, 1.0))
    assert judged([judge_within(narrow, -0.1, 0.1, words="")]) == [Verdict.REPRODUCED]
    assert judged([judge_within(wide, -0.1, 0.1, words="")]) == [Verdict.INCONCLUSIVE]
    far = mean_interval([0.99, 1.0, 1.01])
    assert judged([judge_within(far, -0.1, 0.1, words="")]) == [Verdict.CONTRADICTED]


def test_another_size_is_the_direction() -> None:
    ours = mean_interval([-0.030, -0.028, -0.032])
    assert judged([judge_sign(ours, sign=-1, words="", paper=-0.3)]) == [Verdict.IN_DIRECTION]
    assert judged([judge_sign(ours, sign=-1, words="", paper=-0.05)]) == [Verdict.REPRODUCED]
    assert judged([judge_sign(ours, sign=1, words="", paper=0.05)]) == [Verdict.CONTRADICTED]


def test_all_of_it_is_as_strong_as_its_weakest_part() -> None:
    strong, weak = (
        judge_sign(mean_interval(values), sign=1, words="") for values in ([1.0, 1.1, 0.9], [1.0, 2.0, 0.1])
    )
    against = judge_sign(mean_interval([-1.0, -1.1, -0.9]), sign=1, words="")
    assert judged([all_of([strong, strong], "", value=0.0)]) == [Verdict.REPRODUCED]
    assert judged([all_of([strong, weak], "", value=0.0)]) == [Verdict.IN_DIRECTION]
    assert judged([all_of([strong, against], "", value=0.0)]) == [Verdict.CONTRADICTED]


def answer(finding: Finding) -> Judgement:
    claim = Claim(id="a", text="Is it so?", source="", rule="", judge=lambda _: finding)
    (judgement,) = judge_all([claim], NO_RUNS)
    return judgement


def test_questions_are_answered() -> None:
    values = [1.0, 1.1, 0.9]
    assert answer(judge_sign(mean_interval(values), sign=1, words="")).words == YES
    assert answer(judge_sign(mean_interval(values), sign=-1, words="")).words == OTHER_WAY
    assert answer(judge_within(mean_interval(values), -0.1, 0.1, words="")).words == NO
    assert answer(described("epoch 36", "", value=36.0, n=2)).words == "epoch 36"
    assert answer(not_tested("no run")).verdict is Verdict.NOT_TESTED


def test_more_questions_take_more_to_be_answered() -> None:
    finding = judge_sign(mean_interval([1.0, 1.6, 1.3]), sign=1, words="")
    assert judged([finding]) == [Verdict.REPRODUCED]
    assert judged([replace(finding) for _ in range(10)]) == [Verdict.IN_DIRECTION] * 10


def test_what_is_refuted_does_not_stand_in_the_way_of_the_others() -> None:
    """Of each claim what is more likely is tested, so that Holm goes on from what is clear, whichever way it is."""
    shown, refuted = (
        judge_sign(mean_interval([sign * value for value in values]), sign=1, words="")
        for sign, values in ((1, [1.0, 1.5, 1.3]), (-1, [1.0, 1.01, 0.99]))
    )
    assert 0.025 < 2 * shown.p < 0.1
    assert judged([shown, refuted]) == [Verdict.REPRODUCED, Verdict.CONTRADICTED]


def test_how_many_seeds_would_decide_is_what_decides() -> None:
    values = [1.0, 3.0, -0.5]
    judgement = answer(judge_sign(mean_interval(values), sign=1, words=""))
    assert judgement.verdict is Verdict.IN_DIRECTION
    n, mean, std = judgement.to_decide, float(np.mean(values)), float(np.std(values, ddof=1))
    assert n is not None
    for number, expected in ((n, Verdict.REPRODUCED), (n - 1, Verdict.IN_DIRECTION)):
        spread = np.linspace(-1, 1, number)
        again = mean + std * spread / spread.std(ddof=1)  # so many seeds with this mean and spread
        assert answer(judge_sign(mean_interval(again), sign=1, words="")).verdict is expected


def test_the_table_says_what_was_tested() -> None:
    judgement = answer(judge_sign(mean_interval([1.0, 3.0, -0.5]), sign=1, words="1.2"))
    verdicts = Verdicts(judgements=[judgement], title="t", scale="full", paper=None, runs="3 runs.", notes=())
    (row,) = verdicts.table().numbers.to_dict(orient="records")
    assert row["verdict"] == "leaning yes"
    assert row["p"] == pytest.approx(judgement.finding.p)
    assert row["to_decide"] == judgement.to_decide
    words = verdicts.markdown()
    assert "**leaning yes**" in words
    assert "- **inconclusive**: none of these, as always with one seed." in words
