"""Tables of a study: their numbers against slow loops over the runs, their words against their numbers."""

import dataclasses

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from nearsight.augment import AutoAugment, CutMix
from nearsight.papers.protocol.numbers import PUBLISHED
from nearsight.report.conditions import key_factor, level_in_words, missing_notes, roles
from nearsight.report.page.results import study_page_html
from nearsight.report.tables import Table, probability, rounded, seeds_in_words, with_interval
from nearsight.report.writing import study_tables
from nearsight.study import OFF, Study
from nearsight.study.statistics import mean_interval
from nearsight.train import RunConfig


def tables_of(results):
    return {table.name: table for table in study_tables(results)}


def markdown_rows(table):
    """The Markdown's cells, as a frame."""
    lines = [line for line in table.markdown().splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    return pd.DataFrame(cells[2:], columns=[name.strip() for name in cells[0]])


@pytest.fixture(scope="module")
def study(make_study):
    return make_study()


@pytest.fixture(scope="module")
def tables(study):
    return tables_of(study)


def test_table_2_has_our_means_and_the_papers_numbers(study, tables):
    numbers = tables["conditions"].numbers.set_index("condition")
    shown = markdown_rows(tables["conditions"]).set_index("condition")
    assert list(numbers.index) == list(PUBLISHED["ablation-cifar100"].conditions)
    for label, paper in PUBLISHED["ablation-cifar100"].conditions.items():
        runs = study.runs[study.runs["condition"] == label]
        row = numbers.loc[label]
        for response in ("test_acc", "min_mad", "max_mad", "min_entropy", "max_entropy"):
            values = runs[response].to_numpy()
            low, high = stats.t.interval(0.95, 2, loc=values.mean(), scale=stats.sem(values))
            assert row[f"{response}_mean"] == pytest.approx(values.mean())
            assert (row[f"{response}_low"], row[f"{response}_high"]) == pytest.approx((low, high))
            assert row[f"paper_{response}"] == getattr(paper, response)
        assert (row["seeds"], row["mean_epochs"], row["scale"]) == (3, runs["epochs"].mean(), "full")
        half = 100 * (row["test_acc_high"] - row["test_acc_low"]) / 2
        words = f"{100 * row['test_acc_mean']:.2f} ± {half:.2f}"
        assert shown.loc[label, "test accuracy, %"] == words
        assert shown.loc[label, "paper's accuracy"] == f"{100 * paper.test_acc:.2f}"
        assert shown.loc[label, "paper's MAD"] == f"{paper.min_mad:.3f} to {paper.max_mad:.3f}"
        assert shown.loc[label, "MAD, min to max"].startswith(f"{row['min_mad_mean']:.3f} ± ")
    levels = numbers.loc["−AutoAugment", ["cutmix", "autoaugment", "smoothing"]]
    assert list(levels) == ["on", "off", "0.1"]


def test_table_1_has_the_gain_within_seeds(make_study):
    results = make_study("protocol-cifar10")
    row = tables_of(results)["gain"].numbers.iloc[0]
    runs = results.runs.set_index(["condition", "seed"])["test_acc"]
    gains = np.array([runs["Modern", seed] - runs["Baseline", seed] for seed in range(3)])
    assert row["gain_mean"] == pytest.approx(gains.mean())
    assert row["gain_high"] - row["gain_low"] == pytest.approx(2 * stats.t.ppf(0.975, 2) * stats.sem(gains))
    assert (row["paper_Baseline"], row["paper_Modern"]) == (0.7846, 0.8484)
    assert row["paper_gain"] == pytest.approx(0.0638)
    shown = markdown_rows(tables_of(results)["gain"]).iloc[0]
    assert shown["paper's gain"] == "+6.38"
    assert shown["data set"] == "CIFAR-10"


def test_a_gain_that_is_not_the_difference_of_the_means_beside_it_says_why(make_study):
    def told(*without):
        return tables_of(make_study("protocol-cifar10", without=without))["gain"].notes

    assert "The gain is taken within seeds." in told()
    assert any("over the 1 seed that both have" in note for note in told(("Modern", 0), ("Modern", 1)))
    assert any("none in common" in note for note in told(("Modern", 0), ("Baseline", 1), ("Baseline", 2)))


def test_effects_are_differences_of_means_in_the_full_design(study, tables):
    numbers = tables["effects"].numbers.set_index(["response", "term"])
    for response in ("test_acc", "min_mad", "min_entropy"):
        for factor, (off, on) in study.factors.items():
            means = study.runs.groupby(factor)[response].mean()
            assert numbers.loc[(response, factor), "effect"] == pytest.approx(means[on] - means[off])
    cells = study.runs.groupby(["cutmix", "autoaugment"])["min_mad"].mean()
    with_ = cells["on", "on"] - cells["on", "off"]
    without = cells["off", "on"] - cells["off", "off"]
    assert numbers.loc[("min_mad", "cutmix × autoaugment"), "effect"] == pytest.approx((with_ - without) / 2)
    assert (numbers["residual_df"] == 16).all()
    shown = markdown_rows(tables["effects"]).set_index("term")
    assert list(shown.index)[:4] == ["CutMix", "AutoAugment", "label smoothing", "CutMix × AutoAugment"]
    accuracy = numbers.loc[("test_acc", "cutmix")]
    assert shown.loc["CutMix", "test accuracy, points"].startswith(f"{100 * accuracy['effect']:+.2f} ± ")


def test_effects_per_layer_are_those_of_the_layers_heads(study, tables):
    numbers = tables["effects-by-layer"].numbers
    assert sorted(set(numbers["layer"])) == list(range(8))
    heads = study.heads.merge(study.runs[["run", "cutmix"]], on="run")
    for layer in (0, 5):
        here = heads[heads["layer"] == layer]
        for response, values in {
            "mean_mad": here.groupby(["cutmix", "run"])["mad"].mean(),
            "min_mad": here.groupby(["cutmix", "run"])["mad"].min(),
            "mean_entropy": here.groupby(["cutmix", "run"])["entropy"].mean(),
        }.items():
            row = numbers[
                (numbers["layer"] == layer) & (numbers["response"] == response) & (numbers["term"] == "cutmix")
            ]
            assert row["effect"].item() == pytest.approx(values["on"].mean() - values["off"].mean())
    shown = markdown_rows(tables["effects-by-layer"])
    assert set(shown["layer"]) == {f"L{number}" for number in range(8)}


def test_separation_has_every_factor_and_three_ways_to_deal(study, tables):
    numbers = tables["separation"].numbers
    assert len(numbers) == 3 * 2 * 3
    cutmix = numbers[(numbers["factor"] == "cutmix") & (numbers["response"] == "min_mad")].set_index("blocks")
    has = study.runs["cutmix"] == "on"
    margin = study.runs.loc[~has, "min_mad"].min() - study.runs.loc[has, "min_mad"].max()
    assert cutmix["margin"].to_list() == pytest.approx([margin] * 3)
    assert cutmix["p"].to_list() == pytest.approx([2 / 2704156, 2 / 70**3, 2 / 2**12])
    shown = markdown_rows(tables["separation"]).set_index(["factor", "response"])
    assert shown.loc[("CutMix", "min MAD"), "margin"] == f"{margin:+.3f}"
    assert shown.loc[("CutMix", "min MAD"), "p, within pairs"] == "0.00049"
    assert shown.loc[("AutoAugment", "min MAD"), "margin"].startswith("−")


def test_dissociation_shows_only_pairs_of_which_one_thing_differs(tables):
    numbers, shown = tables["dissociation"].numbers, markdown_rows(tables["dissociation"])
    assert len(numbers) == 28
    one = numbers[numbers["kind"].str.contains("close")]
    assert len(shown) == len(one)
    row = shown.set_index(["first", "second"]).loc[("+CutMix", "+AutoAugment")]
    assert row["what differs"] == "close accuracy, different locality"
    assert set(numbers["accuracy_margin"]) == {0.01}


def test_correlations_are_over_all_runs_and_within_levels(study, tables):
    numbers, shown = tables["correlation"].numbers, markdown_rows(tables["correlation"])
    assert list(shown["runs"]) == ["all runs", "without CutMix", "with CutMix"]
    expected = np.corrcoef(study.runs["test_acc"], study.runs["min_mad"])[0, 1]
    assert numbers.loc[0, "pearson"] == pytest.approx(expected)
    assert list(numbers["n"]) == [24, 12, 12]


def test_every_table_says_its_scale_and_what_was_assumed(make_study):
    for name in ("ablation-cifar100", "protocol-cifar10"):
        small, full = (tables_of(make_study(name, seeds=2, scale=scale)) for scale in ("small", "full"))
        assert small.keys() == full.keys()
        for table in small.values():
            assert "Small scale" in table.markdown()
            assert set(table.numbers["scale"]) == {"small"}
        for table in full.values():
            assert "Small scale" not in table.markdown()
            assert "protocol.lr = 0.001" in table.markdown()
    assert "smoothing = 0 or 0.1" in tables_of(make_study(seeds=1))["conditions"].markdown()


def test_one_seed_gives_means_without_interval(make_study):
    tables = tables_of(make_study(seeds=1))
    numbers = tables["conditions"].numbers
    assert numbers[["test_acc_low", "min_mad_high"]].isna().all(axis=None)
    assert not any("±" in cell for row in markdown_rows(tables["conditions"]).to_numpy() for cell in row)
    assert "nteractions of 3 factors are left out" in tables["effects"].markdown()


def test_the_aliases_of_a_fraction_stand_where_its_effects_are_read(make_study):
    whole = make_study(seeds=3)
    signs = [np.where(whole.runs[name] == levels[-1], 1, -1) for name, levels in whole.factors.items()]
    kept = whole.runs[signs[2] == signs[0] * signs[1]]
    assert not any("alias" in note for table in study_tables(whole) for note in table.notes)
    factors = {"cutmix": (OFF, CutMix()), "autoaugment": (OFF, AutoAugment()), "smoothing": (0.0, 0.1)}
    design = Study(RunConfig(), factors=factors).fraction("C=AB").design
    part = dataclasses.replace(whole, runs=kept, heads=whole.heads[whole.heads["run"].isin(kept["run"])], design=design)
    tables = tables_of(part)
    for name in ("effects", "effects-by-layer"):
        assert "A CutMix, B AutoAugment, C LabelSmoothing; I = ABC, " in tables[name].markdown()
        assert (
            "aliases: A = BC; B = AC; C = AB. These runs cannot separate an effect from its aliases"
            in tables[name].markdown()
        )
        assert len(tables[name].numbers)
    assert study_page_html(part, with_stills=False).count("aliases: A = BC; B = AC; C = AB") == 2


def test_what_is_missing_is_said_and_the_papers_row_stays(make_study):
    gone = [("−CutMix", seed) for seed in range(3)]
    results = make_study(without=[*gone, ("Modern", 1)])
    table = tables_of(results)["conditions"]
    row = markdown_rows(table).set_index("condition").loc["−CutMix"]
    assert (row["seeds"], row["test accuracy, %"], row["MAD, min to max"]) == ("0", "–", "–")
    assert row["paper's accuracy"] == "55.60"
    assert "No complete run yet: −CutMix." in table.markdown()
    assert "Modern (seed 1)" in table.markdown()
    assert missing_notes(make_study()) == []
    ours = dataclasses.replace(results, name="our-own")
    assert missing_notes(ours)[0] == "No complete run yet: cutmix off, autoaugment on, smoothing 0.1."


def test_a_study_of_our_own_has_no_paper_beside_it(make_study):
    tables = tables_of(dataclasses.replace(make_study(seeds=2), name="our-own"))
    for table in tables.values():
        assert not any("paper" in name for name in [*table.numbers.columns, *table.shown.columns])


def test_factors_of_three_levels_have_no_effects_and_this_is_said(make_study):
    results = make_study(seeds=2)
    factors = {**results.factors, "cutmix": ("off", "half", "on")}
    tables = tables_of(dataclasses.replace(results, factors=factors))
    assert "effects" not in tables
    assert "No table of effects" in tables["conditions"].markdown()
    assert "separation" in tables


def test_roles_follow_from_the_levels(make_study):
    results = make_study(seeds=1)
    found = roles(results)
    assert (found.base, found.full, found.only_key, found.without_key) == ("Baseline", "Modern", "+CutMix", "−CutMix")
    assert key_factor(results) == "cutmix"
    ours = dataclasses.replace(results, name="our-own")
    assert key_factor(ours) == "cutmix"  # it moves the smallest distance most
    moved = results.runs.assign(min_mad=np.where(results.runs["smoothing"] == "0", 0.1, 0.5))
    assert key_factor(dataclasses.replace(ours, runs=moved)) == "smoothing"
    assert level_in_words("cutmix", ("off", "on"), "on") == "with CutMix"
    assert level_in_words("smoothing", ("0", "0.1"), "0") == "without label smoothing"
    assert level_in_words("protocol", ("Baseline", "Modern"), "Modern") == "protocol: Modern"


def test_numbers_in_words():
    assert rounded(-0.0004) == rounded(0.0004, signed=True) == "0.000"
    assert rounded(-0.0126, 2, signed=True) == "−0.01"
    assert rounded(0.0126, 2, signed=True) == "+0.01"
    assert rounded(float("nan")) == rounded(None) == "–"
    assert with_interval(mean_interval([1.0, 2.0, 3.0]), digits=1) == "2.0 ± 2.5"
    assert with_interval(mean_interval([2.0])) == "2.000"
    assert [probability(p) for p in (7.4e-7, 0.012, 0.35, float("nan"))] == ["7.4e-07", "0.012", "0.35", "–"]
    assert [seeds_in_words(counts) for counts in ([3, 3], [1], [1, 3])] == ["3 seeds", "1 seed", "1 to 3 seeds"]
    empty = Table(name="t", title="T", numbers=pd.DataFrame(), shown=pd.DataFrame(columns=["a"]), notes=("said",))
    assert empty.markdown() == "# T\n\nNone.\n\n- said\n"
    odd = Table(name="t", title="T", numbers=pd.DataFrame(), shown=pd.DataFrame({"a": ["x|y"]}), notes=())
    assert "| x\\|y |" in odd.markdown()
