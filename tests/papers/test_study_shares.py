"""The largest shares of attention in a study's tables: against loops over the runs, and gone where a run lacks them."""

import dataclasses
import math
from itertools import product
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from made_up_results import made_up, noise
from scipy import stats

from nearsight.papers import find_study
from nearsight.report.study_tables import conditions_table
from nearsight.report.tables import Table
from nearsight.report.writing import study_tables
from nearsight.study import StudyResults

SHARES = {"max_share_self": "max share on itself", "max_share_near": "max share on 3×3"}
RESULTS = Path(__file__).parents[2] / "results"


def without_shares(name: str, seeds: int) -> StudyResults:
    """As an earlier version left it: the columns are there once it is read, and empty."""
    study = find_study(name)(seeds=seeds)
    return made_up(study, lambda cell: {"min_mad": 0.3 + noise(cell, 0.02), "test_acc": 0.5 + noise(cell, 0.1)})


def with_shares(results: StudyResults) -> StudyResults:
    random = np.random.default_rng(5)
    drawn = {name: random.uniform(0.02, 0.6, len(results.runs)) for name in SHARES}
    return dataclasses.replace(results, runs=results.runs.assign(**drawn))


def tables_of(results: StudyResults) -> dict[str, Table]:
    return {table.name: table for table in study_tables(results)}


def in_words(values: "pd.Series[float]", *, signed: bool) -> str:
    """The mean of two seeds' fractions and both of them, in per cent."""
    sign = "+" if signed else ""
    both = ", ".join(f"{100 * value:{sign}.2f}" for value in sorted(values.dropna()))
    return f"{100 * values.mean():{sign}.2f} ({both})".replace("-", "−")


def test_conditions_effects_and_pairs_of_an_ablation() -> None:
    results = with_shares(without_shares("ablation-cifar100", 2))
    runs, tables = results.runs, tables_of(results)
    conditions = tables["conditions"].shown.set_index("condition")
    effects = tables["effects"].numbers.set_index(["response", "term"])
    shown_effects = tables["effects"].shown.set_index("term")
    groups = tables["separation"].shown.set_index(["factor", "response"])
    for column, title in SHARES.items():
        for label, of_condition in runs.groupby("condition"):
            assert conditions.loc[label, f"{title}, %"] == in_words(of_condition[column], signed=False)
        by_level = {level: part[column].to_numpy() for level, part in runs.groupby("cutmix")}
        off, on = (by_level[level] for level in results.factors["cutmix"])
        effect = effects.loc[(column, "cutmix")]
        assert effect["effect"] == pytest.approx(on.mean() - off.mean())
        # In a full design the noise is that within the eight conditions.
        noise_of_a_run = runs.groupby("condition")[column].var().mean()
        p = 2 * stats.t.sf(abs(effect["effect"]) / math.sqrt(4 * noise_of_a_run / 16), 8)
        assert effect["p"] == pytest.approx(p)
        told = f"{100 * effect['effect']:+.2f} ± ".replace("-", "−")
        assert shown_effects.loc["CutMix", f"{title}, points"].startswith(told)
        row = groups.loc[("CutMix", f"{title}, %")]
        assert row["with it"] == f"{100 * on.min():.2f} to {100 * on.max():.2f}"
        wide = runs.pivot(index=["seed", "autoaugment", "smoothing"], columns="cutmix", values=column)
        differences = (wide[results.factors["cutmix"][1]] - wide[results.factors["cutmix"][0]]).to_numpy()
        dealt = [np.dot(signs, differences) for signs in product((-1, 1), repeat=8)]
        below, above = (
            np.mean([sign * each >= sign * differences.sum() - 1e-12 for each in dealt]) for sign in (-1, 1)
        )
        p = min(1.0, 2 * min(below, above))
        assert row["p, within pairs"] == (f"{p:.2f}" if p >= 0.1 else f"{p:.2g}")


def test_locat_tables_take_differences_within_seeds() -> None:
    results = with_shares(without_shares("locat-cutmix-cifar100", 2))
    runs, tables = results.runs, tables_of(results)
    locality = tables["locality"].shown.set_index("condition")
    changes = tables["differences-to-baseline"].shown.set_index("condition")
    beside = tables["cutmix-beside-locat"].shown.set_index(["effect of", "where"])
    for column, title in SHARES.items():
        wide = runs.pivot(index="seed", columns="condition", values=column)
        for label in wide:
            assert locality.loc[label, f"{title}, %"] == in_words(wide[label], signed=False)
        assert changes.loc["+GAug", f"{title}, points"] == in_words(wide["+GAug"] - wide["Baseline"], signed=True)
        told = in_words(wide["−PRR"] - wide["+GAug"], signed=True)
        assert beside.loc[("CutMix", "with GAug"), f"{title}, points"] == told


@pytest.mark.parametrize(
    ("study", "seeds", "table", "row", "of", "apart"),
    [
        (
            *("mixing-cifar100", 2, "contrasts", {"what": "its label"}),
            *("mixing", ("CutMix", "CutMix, own labels")),
        ),
        (
            *("unreported-cifar100", 1, "settings", {"runs": "with CutMix", "change": "weight decay 0.05 → 0"}),
            *("weight_decay", ("0", "0.05")),
        ),
        (
            *("positional-cifar100", 4, "positional", {"model": "Positional ViT minus ViT"}),
            *("model", ("Positional ViT", "ViT")),
        ),
    ],
)
def test_other_studies_estimate_the_difference_of_means(
    study: str, seeds: int, table: str, row: dict[str, str], of: str, apart: tuple[str, str]
) -> None:
    results = with_shares(without_shares(study, seeds))
    shown = tables_of(results)[table].shown
    for name, value in row.items():
        shown = shown[shown[name] == value]
    runs = results.runs[results.runs["cutmix"] != "off"] if "cutmix" in results.factors else results.runs
    for column, title in SHARES.items():
        after, before = (runs.loc[runs[of] == level, column].mean() for level in apart)
        unit = "%" if table == "positional" else "points"
        told = f"{100 * (after - before):+.2f} ± ".replace("-", "−")
        assert shown[f"{title}, {unit}"].item().startswith(told)


@pytest.mark.parametrize("name", ["ablation-cifar100", "locat-cutmix-cifar100", "mixing-cifar100", "size-cifar100"])
def test_shares_are_added_where_every_run_has_them_and_change_nothing_else(name: str) -> None:
    earlier = without_shares(name, 1 if name == "size-cifar100" else 2)
    later = with_shares(earlier)
    mixed = dataclasses.replace(later, runs=later.runs.copy())
    mixed.runs.loc[3, "max_share_near"] = math.nan  # a run that was taken over from an earlier study
    expected, told = tables_of(earlier), tables_of(later)
    assert not any("share on" in table.markdown() for table in expected.values())
    assert [table.markdown() for table in study_tables(mixed)] == [table.markdown() for table in expected.values()]
    assert list(told) == list(expected)
    for table, before in zip(told.values(), expected.values(), strict=True):
        kept = table.shown[[title for title in table.shown if "share on" not in title]]
        if table.name == "separation":
            kept = kept[~kept["response"].str.contains("share on")].reset_index(drop=True)
        pd.testing.assert_frame_equal(kept, before.shown)
        assert any("Max share" in note for note in table.notes) == (table.markdown() != before.markdown())
    own = {"locat-cutmix-cifar100": "locality", "mixing-cifar100": "contrasts", "size-cifar100": "size"}
    for table_name in ("conditions", "separation", own.get(name, "effects")):
        assert SHARES["max_share_near"] in told[table_name].markdown()


def test_networks_without_heads_do_not_hide_the_shares_of_others() -> None:
    results = with_shares(without_shares("ablation-cifar100", 1))
    headless = results.runs["condition"] == "Baseline"
    results.runs.loc[headless, ["min_mad", "max_mad", "min_entropy", "max_entropy", *SHARES]] = math.nan
    shown = conditions_table(results).shown.set_index("condition")["max share on itself, %"]
    assert shown["Baseline"] == "–"
    assert (shown.drop("Baseline") != "–").all()


def test_even_attention_is_counted_on_the_models_grid() -> None:
    results = with_shares(without_shares("ablation-cifar100", 1))
    cells = list(product(range(8), repeat=2))  # 32 pixels, patches of 4
    near = [sum(max(abs(a - c), abs(b - d)) <= 1 for c, d in cells) / 64 for a, b in cells]
    assert f"it would be {100 / 64:.2f} and {100 * np.mean(near):.2f} %" in conditions_table(results).markdown()


@pytest.mark.parametrize("name", ["ablation-cifar100", "protocol-cifar100", "spatial-structure/permuted-cifar100"])
def test_what_is_committed_is_still_what_its_runs_give(name: str, tmp_path: Path) -> None:
    """Runs of an earlier version, their table and the tables made of it."""
    results = StudyResults.read(RESULTS / name)
    results.write_tables(tmp_path)
    assert (tmp_path / "runs.csv").read_bytes() == (RESULTS / name / "runs.csv").read_bytes()
    for table in study_tables(results):
        assert table.markdown() == (RESULTS / name / "tables" / f"{table.name}.md").read_text(encoding="utf-8")
