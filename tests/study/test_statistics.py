"""The statistics of a study against scipy, against slow loops and against numbers worked out by hand."""

from itertools import combinations, product

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from nearsight.errors import InputError
from nearsight.study.statistics import (
    by_condition,
    correlations,
    dissociations,
    energy_distance,
    factorial_effects,
    layer_responses,
    mean_interval,
    paired_difference,
    permutation,
    separation,
    sorted_heads,
)
from nearsight.study.statistics.effects import UNBALANCED
from nearsight.study.statistics.intervals import ALIKE, SAME_ACCURACY, SAME_LOCALITY, TOGETHER, UNSURE

OFF_ON = ("off", "on")


def factorial_runs(num_factors=3, num_seeds=3, seed=0, effects=None):
    """A full factorial of synthetic runs; the response is a sum of known effects plus noise."""
    random = np.random.default_rng(seed)
    rows = []
    for levels in product((0, 1), repeat=num_factors):
        for number in range(num_seeds):
            signs = dict(zip("abcdef", (2 * level - 1 for level in levels), strict=False))
            value = random.normal(scale=0.1)
            for term, effect in (effects or {}).items():
                value += effect / 2 * np.prod([signs[name] for name in term])
            row = {name: OFF_ON[int(sign > 0)] for name, sign in signs.items()}
            rows.append({**row, "seed": number, "condition": str(levels), "y": value})
    return pd.DataFrame(rows), dict.fromkeys("abcdef"[:num_factors], OFF_ON)


# ---- intervals


@given(st.lists(st.floats(-10, 10), min_size=2, max_size=9), st.sampled_from([0.8, 0.95, 0.99]))
def test_the_interval_is_students(values, level):
    interval = mean_interval(values, level)
    scale = stats.sem(values)
    low, high = (
        stats.t.interval(level, len(values) - 1, loc=np.mean(values), scale=scale) if scale else (np.mean(values),) * 2
    )
    assert interval.n == len(values)
    assert (interval.value, interval.low, interval.high) == pytest.approx((np.mean(values), low, high), abs=1e-9)
    assert interval.half_width == pytest.approx((high - low) / 2, abs=1e-9)


def test_one_run_has_no_interval_and_none_has_no_mean():
    one = mean_interval([0.3])
    assert (one.n, one.value, one.has_interval) == (1, 0.3, False)
    assert np.isnan([one.std, one.low, one.high, one.half_width]).all()
    assert not one.contains(0.3)
    assert not one.excludes_zero
    assert np.isnan(mean_interval([]).value)
    assert mean_interval([1.0, 1.1, 0.9]).excludes_zero
    assert not mean_interval([1.0, -1.1, 0.9]).excludes_zero


def test_conditions_are_summarised_in_their_order():
    runs = pd.DataFrame({"condition": ["z", "a", "z", "z"], "y": [1.0, 7.0, 2.0, 6.0]})
    table = by_condition(runs, "y")
    assert list(table["condition"]) == ["z", "a"]
    assert list(table["n"]) == [3, 1]
    assert list(table["mean"]) == [3.0, 7.0]
    low, high = stats.t.interval(0.95, 2, loc=3, scale=stats.sem([1, 2, 6]))
    assert tuple(table.loc[0, ["low", "high"]]) == pytest.approx((low, high))
    assert table.loc[1, ["std", "low", "high"]].isna().all()


def test_differences_are_taken_within_seeds():
    runs = pd.DataFrame(
        {
            "condition": ["a", "a", "a", "b", "b", "b", "c"],
            "seed": [0, 1, 2, 2, 0, 3, 9],
            "y": [1.0, 2.0, 4.0, 4.5, 1.25, 80.0, 0.0],
        }
    )
    difference = paired_difference(runs, "b", "a", "y")
    result = stats.ttest_rel([1.25, 4.5], [1.0, 4.0]).confidence_interval(0.95)
    assert difference.n == 2
    assert (difference.value, difference.low, difference.high) == pytest.approx((0.375, result.low, result.high))
    assert paired_difference(runs, "c", "a", "y").n == 0
    assert paired_difference(runs, "unknown", "a", "y").n == 0


# ---- effects


def test_a_two_by_two_example_worked_out_by_hand():
    # Two replicates: means (off, off) 1.1, (on, off) 3.2, (off, on) 2.0, (on, on) 8.1; residuals ±0.1 or ±0.2 each.
    runs = pd.DataFrame(
        {
            "a": ["off", "off", "on", "on", "off", "off", "on", "on"],
            "b": ["off", "off", "off", "off", "on", "on", "on", "on"],
            "y": [1.0, 1.2, 3.0, 3.4, 2.0, 2.0, 8.0, 8.2],
        }
    )
    fitted = factorial_effects(runs, {"a": OFF_ON, "b": OFF_ON}, "y")
    table = fitted.table.set_index("term")
    assert list(table.index) == ["a", "b", "a × b"]
    assert list(table["effect"]) == pytest.approx([(3.2 + 8.1 - 1.1 - 2.0) / 2, (2.0 + 8.1 - 1.1 - 3.2) / 2, 2.0])
    assert list(table["coefficient"]) == pytest.approx([2.05, 1.45, 1.0])
    assert fitted.mean == pytest.approx(3.6)
    # Residual squares: 0.02 + 0.08 + 0 + 0.02 over 8 − 4 = 4 degrees of freedom; an effect's variance is s²·4/8.
    error = np.sqrt(0.12 / 4 * 4 / 8)
    assert list(table["standard_error"]) == pytest.approx([error] * 3)
    assert list(table["t"]) == pytest.approx([4.1 / error, 2.9 / error, 2.0 / error])
    assert table.loc["a", "low"] == pytest.approx(4.1 - 2.7764451 * error)
    assert (fitted.num_runs, fitted.residual_df, fitted.notes) == (8, 4, ())
    assert list(fitted.residuals) == pytest.approx([-0.1, 0.1, -0.2, 0.2, 0.0, 0.0, -0.1, 0.1])


@pytest.mark.parametrize("num_factors", [1, 2, 3, 4])
def test_effects_are_those_of_least_squares_written_differently(num_factors):
    runs, factors = factorial_runs(num_factors, 3, seed=num_factors, effects={"a": 1.0})
    fitted = factorial_effects(runs, factors, "y")
    names = list(factors)
    columns = [np.ones(len(runs))]
    for size in range(1, num_factors + 1):
        columns += [runs[list(term)].eq("on").mul(2).sub(1).prod(axis=1) for term in combinations(names, size)]
    design, y = np.array(columns).T, runs["y"].to_numpy()
    q, r = np.linalg.qr(design)
    beta = np.linalg.solve(r, q.T @ y)
    residual = y - design @ beta
    df = len(y) - len(beta)
    errors = np.sqrt(residual @ residual / df * (np.linalg.inv(r) ** 2).sum(axis=1))
    np.testing.assert_allclose(fitted.table["coefficient"], beta[1:], atol=1e-12)
    np.testing.assert_allclose(fitted.table["effect"], 2 * beta[1:], atol=1e-12)
    np.testing.assert_allclose(fitted.table["standard_error"], 2 * errors[1:], rtol=1e-9)
    np.testing.assert_allclose(fitted.table["p"], 2 * stats.t.sf(np.abs(beta / errors)[1:], df), rtol=1e-7)
    half = stats.t.ppf(0.975, df) * 2 * errors[1:]
    np.testing.assert_allclose(fitted.table[["low", "high"]], np.c_[2 * beta[1:] - half, 2 * beta[1:] + half])
    assert fitted.residual_df == df
    assert list(fitted.table["order"]) == [term.count("×") + 1 for term in fitted.table["term"]]


def test_one_factor_is_a_regression_on_it():
    runs, factors = factorial_runs(1, 5, effects={"a": 0.3})
    line = stats.linregress(np.where(runs["a"] == "on", 1.0, -1.0), runs["y"])
    (row,) = factorial_effects(runs, factors, "y").table.itertuples()
    assert (row.coefficient, row.standard_error / 2, row.p) == pytest.approx((line.slope, line.stderr, line.pvalue))


def test_known_effects_are_found_again():
    true = {"a": 1.0, "b": -0.5, "c": 0.0, "ab": 0.7, "abc": 0.0}
    runs, factors = factorial_runs(3, 40, effects=true)
    table = factorial_effects(runs, factors, "y").table.set_index("term")
    for term, effect in true.items():
        row = table.loc[" × ".join(term)]
        assert abs(row["effect"] - effect) < 4 * row["standard_error"]
        assert (row["p"] < 1e-6) == (effect != 0)


def test_one_seed_gives_up_the_highest_order_and_says_so():
    runs, factors = factorial_runs(3, 1, effects={"a": 1.0, "abc": 0.4})
    fitted = factorial_effects(runs, factors, "y")
    assert list(fitted.table["term"]) == ["a", "b", "c", "a × b", "a × c", "b × c"]
    assert fitted.residual_df == 1
    assert fitted.table["p"].notna().all()
    (note,) = fitted.notes
    assert "interactions of 3 factors are left out" in note
    full = np.array([np.prod(signs) for signs in product((-1, 1), repeat=3)]) @ runs["y"] / 8
    # What is given up is all there is of the noise: its coefficient, once in every run.
    np.testing.assert_allclose(fitted.table["standard_error"], 2 * abs(full))


def test_two_runs_give_an_effect_without_interval():
    runs = pd.DataFrame({"a": ["off", "on"], "y": [1.0, 4.0]})
    fitted = factorial_effects(runs, {"a": OFF_ON}, "y")
    assert list(fitted.table["effect"]) == pytest.approx([3.0])
    assert fitted.table[["standard_error", "t", "p", "low", "high"]].isna().all(axis=None)
    assert any("without interval" in note for note in fitted.notes)


def test_runs_that_agree_to_the_last_digit_have_neither_effect_nor_p_value():
    # Bit for bit the same at both levels of b, which least squares returns with an effect of rounding.
    near, far = 0.47257832892257917, 0.4726401406671147
    runs = pd.DataFrame({"a": ["off", "on"] * 2, "b": ["off"] * 2 + ["on"] * 2, "y": [near, far] * 2})
    factors = {"a": OFF_ON, "b": OFF_ON}
    table = factorial_effects(runs, factors, "y").table.set_index("term")
    assert table.loc["a", "effect"] == pytest.approx(far - near)
    assert table.loc["b", "effect"] == 0
    assert np.isnan(table.loc["b", "p"])
    same = factorial_effects(runs.assign(y=0.15), factors, "y").table
    assert (same["effect"] == 0).all()
    assert same["p"].isna().all()


def test_unequal_numbers_of_runs_are_said_where_effects_are_no_differences_of_plain_means():
    runs, factors = factorial_runs(2, 3, effects={"a": 1.0, "b": 2.0})
    assert factorial_effects(runs, factors, "y").notes == ()
    lacking = runs.drop(index=runs[(runs["a"] == "on") & (runs["b"] == "on")].index[:2])
    fitted = factorial_effects(lacking, factors, "y")
    assert fitted.notes == (UNBALANCED,)
    # With all terms every condition counts as much as the others, however many runs it has.
    means = lacking.groupby(["a", "b"])["y"].mean()
    effect = fitted.table.set_index("term").loc["a", "effect"]
    assert effect == pytest.approx(means["on"].mean() - means["off"].mean())
    plain = lacking.groupby("a")["y"].mean()
    assert abs(effect - (plain["on"] - plain["off"])) > 0.1
    # Of one factor they are just that.
    alone = factorial_effects(lacking, {"a": OFF_ON}, "y")
    assert alone.notes == ()
    assert alone.table["effect"].item() == pytest.approx(plain["on"] - plain["off"])


def test_aliased_terms_are_left_out_and_missing_conditions_do_not_bias_the_rest():
    runs, factors = factorial_runs(3, 2, effects={"a": 1.0})
    signs = runs[["a", "b", "c"]].eq("on") * 2 - 1
    half = runs[signs.prod(axis=1) == 1]  # c is a × b
    fitted = factorial_effects(half, factors, "y")
    assert list(fitted.table["term"]) == ["a", "b", "c"]
    assert [note.split(" are")[0] for note in fitted.notes] == [
        "interactions of 3 factors",
        "interactions of 2 factors",
    ]
    assert "cannot be distinguished from other terms" in fitted.notes[1]
    assert abs(fitted.table["effect"][0] - 1.0) < 0.3
    without_one = factorial_effects(runs[runs["condition"] != "(1, 1, 1)"], factors, "y")
    assert list(without_one.table["order"]) == [1, 1, 1, 2, 2, 2]
    assert any("3 factors" in note for note in without_one.notes)


def test_what_cannot_be_estimated_is_named():
    runs, factors = factorial_runs(2, 2)
    constant = factorial_effects(runs[runs["b"] == "on"], factors, "y")
    assert list(constant.table["term"]) == ["a"]
    assert "b does not vary" in constant.notes[0]
    together = runs[runs["a"] == runs["b"]]
    fitted = factorial_effects(together, factors, "y")
    assert fitted.table.empty
    assert any("main effects are left out" in note for note in fitted.notes)
    assert fitted.mean == pytest.approx(together["y"].mean())
    with pytest.raises(InputError, match="3 levels"):
        factorial_effects(runs, {"a": ("off", "low", "high")}, "y")
    with pytest.raises(InputError, match="'on'"):
        factorial_effects(runs, {"a": ("off", "high")}, "y")


# ---- separation


def two_groups(with_, without, seeds=None):
    return pd.DataFrame(
        {
            "cutmix": ["on"] * len(with_) + ["off"] * len(without),
            "min_mad": [*with_, *without],
            "seed": seeds if seeds is not None else 0,
        }
    )


def scipys(with_, without, alternative="two-sided"):
    return stats.permutation_test(
        (with_, without),
        lambda a, b, axis: a.sum(axis=axis),  # orders dealings as the means' difference does; exact for whole numbers
        vectorized=True,
        n_resamples=np.inf,
        alternative=alternative,
    ).pvalue


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(0, 12), min_size=2, max_size=5),
    st.lists(st.integers(0, 12), min_size=2, max_size=5),
)
def test_the_p_value_is_scipys_exact_one_with_ties_too(with_, without):
    expected = scipys(with_, without)
    with_, without = [value / 7 for value in with_], [value / 7 for value in without]
    found = separation(two_groups(with_, without), "cutmix", OFF_ON, "min_mad")
    assert found.p == pytest.approx(expected, abs=1e-12)
    assert found.exact
    assert found.difference == pytest.approx(np.mean(with_) - np.mean(without))


@pytest.mark.parametrize("blocks", [(), ("seed",)])
def test_runs_without_a_response_are_left_out(blocks):
    random = np.random.default_rng(0)
    runs = two_groups(random.random(6), random.random(6) + 0.3, [0, 1, 2, 3, 4, 5] * 2)
    runs.loc[[1, 8], "min_mad"] = np.nan
    found = separation(runs, "cutmix", OFF_ON, "min_mad", blocks=blocks)
    assert found == separation(runs.dropna(), "cutmix", OFF_ON, "min_mad", blocks=blocks)
    assert (found.num_with, found.num_without) == (5, 5)
    assert 0 < found.p <= 1
    one = separation(two_groups([1.0, np.nan], [2.0, 3.0]), "cutmix", OFF_ON, "min_mad")
    assert one.p == pytest.approx(2 / 3)  # one of three dealings is as low
    with pytest.raises(InputError, match="one of the groups is empty"):
        separation(two_groups([np.nan], [2.0, 3.0]), "cutmix", OFF_ON, "min_mad")


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 4), st.integers(1, 4), st.integers(2, 3), st.integers(0, 10**6))
def test_dealing_within_blocks_is_the_slow_loop(num_with, num_without, num_blocks, seed):
    random = np.random.default_rng(seed)
    with_, without = random.integers(0, 9, (num_blocks, num_with)), random.integers(3, 12, (num_blocks, num_without))
    seeds = np.repeat(np.arange(num_blocks), num_with).tolist() + np.repeat(np.arange(num_blocks), num_without).tolist()
    runs = two_groups(with_.ravel() / 3, without.ravel() / 3, seeds).sample(frac=1, random_state=seed)
    found = separation(runs, "cutmix", OFF_ON, "min_mad", blocks=["seed"])

    blocks = [np.concatenate([with_[block], without[block]]) for block in range(num_blocks)]
    dealings = list(product(*(combinations(range(num_with + num_without), num_with) for _ in blocks)))
    at_most = at_least = complete = 0
    for dealing in dealings:
        chosen = [blocks[b][i] for b, places in enumerate(dealing) for i in places]
        rest = [value for b, places in enumerate(dealing) for i, value in enumerate(blocks[b]) if i not in places]
        at_most += sum(chosen) <= with_.sum()
        at_least += sum(chosen) >= with_.sum()
        complete += max(chosen) < min(rest) or min(chosen) > max(rest)
    assert found.num_dealings == len(dealings)
    assert found.p == pytest.approx(min(1, 2 * min(at_most, at_least) / len(dealings)))
    assert found.p_complete == pytest.approx(complete / len(dealings))


def test_complete_separation_of_24_runs():
    random = np.random.default_rng(0)
    with_, without = random.uniform(0.0, 0.1, 12), random.uniform(0.2, 0.4, 12)
    seeds = list(np.tile([0, 1, 2], 4)) * 2
    runs = two_groups(with_, without, seeds)
    free = separation(runs, "cutmix", OFF_ON, "min_mad")
    assert free.num_dealings == 2704156
    assert free.p == pytest.approx(2 / 2704156)
    assert free.p_complete == pytest.approx(2 / 2704156)
    assert free.clean
    assert free.margin == pytest.approx(without.min() - with_.max())
    within = separation(runs, "cutmix", OFF_ON, "min_mad", blocks=["seed"])
    assert (within.num_dealings, within.p) == (70**3, pytest.approx(2 / 70**3))
    runs["pair"] = list(range(12)) * 2
    pairs = separation(runs, "cutmix", OFF_ON, "min_mad", blocks=["pair"])
    assert (pairs.num_dealings, pairs.p, pairs.p_complete) == (2**12, pytest.approx(2**-11), pytest.approx(2**-11))


def test_the_margin_is_signed_whichever_group_is_lower():
    lower = separation(two_groups([0.1, 0.2], [0.5, 0.9]), "cutmix", OFF_ON, "min_mad")
    upper = separation(two_groups([0.5, 0.9], [0.1, 0.2]), "cutmix", OFF_ON, "min_mad")
    mixed = separation(two_groups([0.1, 0.6], [0.5, 0.9]), "cutmix", OFF_ON, "min_mad")
    touching = separation(two_groups([0.1, 0.5], [0.5, 0.9]), "cutmix", OFF_ON, "min_mad")
    assert (lower.margin, upper.margin) == (pytest.approx(0.3), pytest.approx(0.3))
    assert (lower.difference, upper.difference) == (pytest.approx(-0.55), pytest.approx(0.55))
    assert (mixed.margin, mixed.clean) == (pytest.approx(-0.1), False)
    assert (touching.margin, touching.clean) == (0.0, False)
    assert (lower.lowest_with, lower.highest_with, lower.lowest_without, lower.highest_without) == (0.1, 0.2, 0.5, 0.9)


def test_too_many_dealings_are_drawn_at_random_and_this_is_said(monkeypatch):
    random = np.random.default_rng(1)
    runs = two_groups(random.normal(0.0, 1, 8), random.normal(0.8, 1, 8), list(np.tile([0, 1], 8)))
    for blocks in ((), ("seed",)):
        exact = separation(runs, "cutmix", OFF_ON, "min_mad", blocks=blocks)
        with monkeypatch.context() as patch:
            patch.setattr(permutation, "MOST_SUMS", 16)
            drawn = separation(runs, "cutmix", OFF_ON, "min_mad", blocks=blocks)
        assert (exact.exact, drawn.exact) == (True, False)
        assert drawn.num_dealings == permutation.NUM_DRAWN + 1
        assert drawn.p == pytest.approx(exact.p, abs=4 * np.sqrt(exact.p / permutation.NUM_DRAWN) + 1e-5)
        assert drawn.p_complete == exact.p_complete


def test_an_empty_group_is_an_error():
    with pytest.raises(InputError, match="'cutmix'"):
        separation(two_groups([0.1], []), "cutmix", OFF_ON, "min_mad")
    with pytest.raises(InputError, match="'cutmix'"):
        separation(two_groups([0.1], [0.2]), "cutmix", ("on",), "min_mad")


# ---- dissociation


def test_pairs_of_conditions_are_told_apart_by_what_differs():
    conditions = {"base": (0.50, 0.30), "cut": (0.60, 0.02), "auto": (0.605, 0.28), "both": (0.70, 0.03)}
    runs = pd.DataFrame(
        [
            {"condition": name, "seed": seed, "test_acc": acc + 0.001 * seed, "min_mad": mad}
            for name, (acc, mad) in conditions.items()
            for seed in (0, 1)
        ]
    )
    table = dissociations(runs).set_index(["first", "second"])
    assert len(table) == 6
    assert table.loc[("base", "cut"), "kind"] == TOGETHER
    assert table.loc[("cut", "auto"), "kind"] == SAME_ACCURACY
    assert table.loc[("base", "auto"), "kind"] == SAME_LOCALITY
    assert table.loc[("cut", "both"), "kind"] == SAME_LOCALITY
    assert table.loc[("cut", "auto"), "test_acc_difference"] == pytest.approx(0.005)
    assert table.loc[("cut", "auto"), "min_mad_difference"] == pytest.approx(0.26)
    assert dissociations(runs, accuracy_margin=0.2, locality_margin=0.5)["kind"].eq(ALIKE).all()
    one_seed = dissociations(runs[runs["seed"] == 0])
    assert one_seed[["test_acc_low", "min_mad_high"]].isna().all(axis=None)
    other_seeds = runs[
        ((runs["condition"] == "base") & (runs["seed"] == 0)) | ((runs["condition"] == "cut") & (runs["seed"] == 1))
    ]
    assert dissociations(other_seeds).empty


def test_a_pair_differs_only_where_the_seeds_agree_that_it_does():
    values = {("base", 0): (0.50, 0.30), ("base", 1): (0.50, 0.30), ("cut", 0): (0.50, 0.02), ("cut", 1): (0.50, 0.26)}
    runs = pd.DataFrame(
        [
            {"condition": name, "seed": seed, "test_acc": acc, "min_mad": mad}
            for (name, seed), (acc, mad) in values.items()
        ]
    )
    (row,) = dissociations(runs).to_dict("records")
    assert abs(row["min_mad_difference"]) > 0.05
    assert row["min_mad_low"] < 0 < row["min_mad_high"]
    assert row["kind"] == UNSURE
    assert dissociations(runs[runs["seed"] == 0])["kind"].tolist() == [SAME_ACCURACY]  # one seed has no interval
    assert dissociations(runs.assign(min_mad=np.nan))["kind"].tolist() == [UNSURE]  # a model without attention


def test_correlations_are_scipys_over_all_runs_and_within_levels():
    random = np.random.default_rng(3)
    runs = pd.DataFrame({"cutmix": ["off"] * 6 + ["on"] * 6, "test_acc": random.normal(size=12)})
    runs["min_mad"] = random.normal(size=12) - 5 * (runs["cutmix"] == "on")
    table = correlations(runs, "cutmix", OFF_ON).set_index("group")
    assert list(table.index) == ["all runs", "cutmix: off", "cutmix: on"]
    for name, group in (("all runs", runs), ("cutmix: off", runs[:6]), ("cutmix: on", runs[6:])):
        r, rho = (
            np.corrcoef(group["test_acc"], group["min_mad"])[0, 1],
            group[["test_acc", "min_mad"]].rank().corr().iloc[0, 1],
        )
        assert table.loc[name, "pearson"] == pytest.approx(r)
        assert table.loc[name, "spearman"] == pytest.approx(rho)
        df = len(group) - 2
        assert table.loc[name, "pearson_p"] == pytest.approx(2 * stats.t.sf(abs(r) * np.sqrt(df / (1 - r**2)), df))
    few = correlations(runs.iloc[[0, 1, 6]], "cutmix", OFF_ON).set_index("group")
    assert few.loc[["cutmix: off", "cutmix: on"], "pearson"].isna().all()
    flat = correlations(runs.assign(min_mad=0.3), "cutmix", OFF_ON)
    assert flat[["pearson", "spearman_p"]].isna().all(axis=None)


# ---- heads


def test_numbers_per_layer_and_ranks_within_it_are_the_slow_loop():
    random = np.random.default_rng(5)
    heads = pd.DataFrame(
        [
            {"run": run, "layer": layer, "head": head, "mad": random.random(), "entropy": random.random()}
            for run in "ab"
            for layer in range(3)
            for head in range(4)
        ]
    )
    heads.loc[7, ["mad", "entropy"]] = np.nan  # a head that does not exist
    numbers = layer_responses(heads).set_index(["run", "layer"])
    ranked = sorted_heads(heads, "entropy")
    assert len(ranked) == len(heads) - 1
    for run, layer in product("ab", range(3)):
        rows = [row for row in heads.to_dict("records") if row["run"] == run and row["layer"] == layer]
        mads = [row["mad"] for row in rows if row["mad"] == row["mad"]]
        entropies = [row["entropy"] for row in rows if row["entropy"] == row["entropy"]]
        found = numbers.loc[(run, layer)]
        assert found["mean_mad"] == pytest.approx(sum(mads) / len(mads))
        assert (found["min_mad"], found["max_mad"]) == (min(mads), max(mads))
        assert found["mean_entropy"] == pytest.approx(sum(entropies) / len(entropies))
        assert found["min_entropy"] == min(entropies)
        mine = ranked[(ranked["run"] == run) & (ranked["layer"] == layer)].sort_values("rank")
        assert list(mine["rank"]) == list(range(len(entropies)))
        assert list(mine["entropy"]) == sorted(entropies)
        for row in mine.to_dict("records"):  # a head keeps its own numbers
            assert row in [{**other, "rank": row["rank"]} for other in rows]


def test_the_distance_of_clouds_is_the_slow_loop_and_scipys_on_a_line():
    random = np.random.default_rng(7)
    first, second = random.normal(size=(6, 2)), random.normal(0.5, 1, size=(9, 2))

    def mean_distance(a, b):
        return np.mean([np.hypot(*(x - y)) for x in a for y in b])

    expected = 2 * mean_distance(first, second) - mean_distance(first, first) - mean_distance(second, second)
    assert energy_distance(pd.DataFrame(first), pd.DataFrame(second)) == pytest.approx(expected)
    assert energy_distance(pd.DataFrame(first), pd.DataFrame(first[::-1])) == pytest.approx(0, abs=1e-12)
    line = energy_distance(pd.DataFrame(first[:, :1]), pd.DataFrame(second[:, :1]))
    assert line == pytest.approx(stats.energy_distance(first[:, 0], second[:, 0]) ** 2)
