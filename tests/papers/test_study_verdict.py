"""Verdicts: every claim of the paper with data that confirm, weaken and refute it."""

import dataclasses
from itertools import product

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_up_results import judgements
from scipy import stats

from nearsight.papers.protocol.numbers import PUBLISHED
from nearsight.report.claims import OURS, Claim, judge_all
from nearsight.report.conditions import SMALL
from nearsight.report.rules import LEANING, Verdict, judge_rates, judge_sign, weigh
from nearsight.report.studies import report_of
from nearsight.report.writing import study_verdicts
from nearsight.study.statistics import mean_interval
from nearsight.study.statistics.significance import ALPHA

YES, DIRECTION, UNSURE = Verdict.REPRODUCED, Verdict.IN_DIRECTION, Verdict.INCONCLUSIVE
NO, UNTESTED = Verdict.CONTRADICTED, Verdict.NOT_TESTED
SEEDS = 5
"""So few of which all show what is true or false in a seed."""


def found(results):
    return {judgement.claim.text: judgement for judgement in judgements(results)}


def verdict_on(results, beginning):
    """As if it were the only claim."""
    (claim,) = (claim for claim in of_paper(results.name) if claim.text.startswith(beginning))
    (judgement,) = judge_all([claim], results)
    return judgement.verdict


def of_paper(name):
    return [claim for claim in report_of(name).claims if claim.source != OURS]


def with_heads(results, condition, change):
    """The study with another distance or entropy in the heads of a condition; its runs stay as they are."""
    runs = set(results.runs.loc[results.runs["condition"] == condition, "run"])
    theirs = results.heads["run"].isin(runs)
    changed = pd.concat([change(group.copy()) for _, group in results.heads[theirs].groupby("run")])
    return dataclasses.replace(results, heads=pd.concat([results.heads[~theirs], changed], ignore_index=True))


def by_layer(values, step=0.002):
    """A change that gives every layer the same heads around its own value."""

    def change(heads):
        return heads.assign(mad=np.asarray(values)[heads["layer"]] + step * heads["head"])

    return change


# ---- a rule of our own: how often something comes, in the time there was


def rates(events, epochs, others, other_epochs, n=3):
    return judge_rates(events, epochs, others, other_epochs, words="", value=0.0, n=n)


def weighed(finding):
    return weigh(finding, finding.p, finding.p_against)


def test_rates_are_the_exact_test_of_two_counts():
    found = rates(4, 2215.0, 0, 2499.0)
    theirs = stats.binomtest(4, 4, 2215 / 4714, alternative="greater").pvalue
    assert found.p == pytest.approx(theirs)
    assert found.p_against == pytest.approx(stats.binomtest(0, 4, 2499 / 4714, alternative="greater").pvalue)
    assert weighed(found) is YES
    assert found.decides(3, 0.05)
    assert not found.decides(3, 0.01)
    # As often, but in the time of all the others: nothing is shown.
    assert weighed(rates(4, 3634.0, 0, 1080.0)) is UNSURE
    assert weighed(rates(0, 500.0, 9, 500.0)) is NO
    assert weighed(rates(2, 400.0, 0, 600.0)) is DIRECTION
    assert (rates(0, 100.0, 0, 100.0).p, rates(0, 100.0, 0, 100.0).p_against) == (1.0, 1.0)
    alone = rates(9, 100.0, 0, 100.0, n=1)
    assert (alone.p, alone.leans) == (1.0, False)


@given(*(st.integers(0, 6), st.integers(1, 900)) * 2, st.integers(2, 4))
def test_seeds_like_those_there_are_never_weaken_a_rate(events, epochs, others, other_epochs, times):
    few = rates(events, float(epochs), others, float(other_epochs), n=2)
    many = rates(times * events, float(times * epochs), times * others, float(times * other_epochs), n=2 * times)
    is_more = events * (epochs + other_epochs) > epochs * (events + others)
    is_fewer = others * (epochs + other_epochs) > other_epochs * (events + others)
    assert not is_more or many.p <= few.p + 1e-12
    assert not is_fewer or many.p_against <= few.p_against + 1e-12
    assert few.decides(2, LEANING) == (min(few.p, few.p_against) <= LEANING)


def test_what_is_open_takes_more_seeds_than_there_are(make_study):
    """One claim for which five seeds are enough alone, among others that are as open: these count for it."""
    for_it = judge_sign(mean_interval([1.0, 1.5, 0.8, 1.9, 0.6]), sign=1, words="")
    against = judge_sign(mean_interval([-1.0, -1.5, -0.8, -1.9, -0.6]), sign=1, words="")
    claims = [
        Claim(
            id=str(place), text="It is so", source="", rule="", judge=lambda _, found=found: dataclasses.replace(found)
        )
        for place, found in enumerate([for_it, *[against] * 11])
    ]
    (first, *others) = judge_all(claims, make_study(seeds=1))
    assert for_it.p * 12 > ALPHA > for_it.p
    assert first.verdict is DIRECTION
    assert first.to_decide > 5
    assert for_it.decides(first.to_decide, ALPHA / 12)
    assert not for_it.decides(first.to_decide - 1, ALPHA / 12)
    assert {judgement.verdict for judgement in others} == {UNSURE}
    assert {judgement.to_decide for judgement in others} == {first.to_decide}


# ---- the claims


def test_the_papers_own_numbers_confirm_the_paper(make_study):
    """But for one claim: in its Table 2 AutoAugment takes more than a quarter off what CutMix does."""
    judged = {j.claim.id: j for j in judgements(make_study(seeds=8, noise=0.1)) if j.claim.source != OURS}
    assert (
        judged["colour-and-cutmix"].claim.paper
        == "CutMix's −0.293 without it, −0.223 with it: +0.070; −0.258 on average"
    )
    assert judged.pop("colour-and-cutmix").verdict is NO
    judged.pop("plane")  # made-up heads are no cluster
    assert {judgement.verdict for judgement in judged.values()} == {YES}


def test_one_seed_decides_nothing(make_study):
    verdicts = {j.verdict for j in judgements(make_study(seeds=1, noise=0.0)) if j.claim.source != OURS}
    assert verdicts == {UNSURE}


SMALLER = {"min_mad": 0.2}
WITH_CUTMIX = ("Modern", "−AutoAugment", "−LabelSmoothing", "+CutMix")
# In the paper AutoAugment's change is 21 % of CutMix's, and it takes 27 % off what CutMix does: too much to be none.
CONFIRMED = {"+AutoAugment": {"min_mad": 0.31}, "−CutMix": {"min_mad": 0.3}}
WEAKENED_AND_REFUTED = {
    # beginning of the claim: what weakens it to a direction, what refutes it (published numbers of conditions replaced)
    "The Modern protocol raises": ({"Modern": {"test_acc": 0.53}}, {"Modern": {"test_acc": 0.47}}),
    "Under the Modern protocol the most local head is": ({"Modern": SMALLER}, {"Modern": {"min_mad": 0.35}}),
    "The Modern protocol gives lower": (
        {"Modern": {"min_entropy": 0.97, "max_entropy": 0.99}},
        {"Modern": {"min_mad": 0.6, "max_mad": 0.7}},
    ),
    "Modern has heads": (
        {"Modern": {"min_entropy": 0.97, "max_entropy": 0.99}},
        {"Modern": {"min_mad": 0.6, "max_mad": 0.7}},
    ),
    "CutMix separates": ({"+CutMix": {"min_mad": 0.31}}, {label: {"min_mad": 0.4} for label in WITH_CUTMIX}),
    "The effect is not limited": (
        {"+CutMix": {"min_entropy": 0.7}},
        {label: {"min_entropy": 0.85} for label in WITH_CUTMIX},
    ),
    "Removing CutMix": ({"−CutMix": {"min_mad": 0.1}}, {"−CutMix": {"min_mad": 0.004}}),
    "Adding CutMix": ({"+CutMix": SMALLER}, {"+CutMix": {"min_mad": 0.4}}),
    "AutoAugment alone": ({"+AutoAugment": {"min_mad": 0.252}}, {"+AutoAugment": {"min_mad": 0.1}}),
    "Label smoothing alone": ({"+LabelSmoothing": {"min_mad": 0.246}}, {"+LabelSmoothing": {"min_mad": 0.1}}),
    "Removing AutoAugment": ({"−AutoAugment": {"min_mad": 0.081}}, {"−AutoAugment": {"min_mad": 0.19}}),
    "Removing label": ({"−LabelSmoothing": {"min_mad": 0.084}}, {"−LabelSmoothing": {"min_mad": 0.19}}),
    "CutMix and AutoAugment alone": (
        {"+AutoAugment": {"test_acc": 0.57, "min_mad": 0.31}},
        {"+AutoAugment": {"test_acc": 0.40}},
    ),
    "AutoAugment does not change": (
        {"+AutoAugment": {"min_mad": 0.175}},
        {"+AutoAugment": {"min_mad": 0.1}, "−CutMix": {"min_mad": 0.1}},
    ),
    "Label smoothing does not change": (
        {"+LabelSmoothing": {"min_mad": 0.19}},
        {"+LabelSmoothing": {"min_mad": 0.1}, "−CutMix": {"min_mad": 0.1}},
    ),
}


@pytest.mark.parametrize("beginning", WEAKENED_AND_REFUTED)
def test_claims_that_rest_on_numbers_can_be_confirmed_weakened_and_refuted(make_study, beginning):
    weakened, refuted = WEAKENED_AND_REFUTED[beginning]
    verdicts = [
        verdict_on(make_study(seeds=SEEDS, changed=CONFIRMED | changed), beginning)
        for changed in ({}, weakened, refuted)
    ]
    assert verdicts == [YES, DIRECTION, NO]


def move_lowest(layer):
    def change(heads):
        lowest = heads["mad"].idxmin()
        other = heads.index[heads["layer"] == layer][0]
        heads.loc[[lowest, other], "mad"] = heads.loc[[other, lowest], "mad"].to_numpy()
        return heads

    return change


def test_the_layer_of_the_most_local_head(make_study):
    study, beginning = make_study(seeds=SEEDS), "Under the Modern protocol the most local head of the model"
    assert verdict_on(study, beginning) is YES
    assert verdict_on(with_heads(study, "Modern", move_lowest(1)), beginning) is DIRECTION
    assert verdict_on(with_heads(study, "Modern", move_lowest(5)), beginning) is NO


def test_the_first_layer_as_a_whole(make_study):
    study, beginning = make_study(seeds=SEEDS), "All heads of Modern's first layer"

    def one_far(heads):
        return heads.assign(mad=heads["mad"].mask((heads["layer"] == 0) & (heads["head"] == 3), 0.6))

    def all_far(heads):
        return heads.assign(mad=heads["mad"].mask(heads["layer"] == 0, 0.7))

    assert verdict_on(study, beginning) is YES
    assert verdict_on(with_heads(study, "Modern", one_far), beginning) is DIRECTION
    assert verdict_on(with_heads(study, "Modern", all_far), beginning) is NO


def test_the_order_of_layers(make_study):
    beginning = "Under the Modern protocol distance grows"
    rising, falling = np.linspace(0.1, 0.4, 8), np.linspace(0.4, 0.1, 8)
    weakly = np.array([0.1, 0.4, 0.2, 0.3, 0.15, 0.35, 0.25, 0.28])
    for modern, base, expected in ((rising, falling, YES), (rising, rising**2, NO), (weakly, falling, DIRECTION)):
        study = with_heads(with_heads(make_study(seeds=SEEDS), "Modern", by_layer(modern)), "Baseline", by_layer(base))
        assert verdict_on(study, beginning) is expected


def test_the_meeting_of_the_last_layers(make_study):
    base = np.full(8, 0.5)
    for last, expected in ((0.45, YES), (0.6, YES), (0.25, DIRECTION), (0.05, NO), (1.0, NO)):
        modern = np.linspace(0.1, last, 8)
        study = with_heads(with_heads(make_study(seeds=SEEDS), "Modern", by_layer(modern)), "Baseline", by_layer(base))
        assert verdict_on(study, "With depth") is expected


def test_the_clusters_in_the_plane(make_study):
    places = {"Baseline": 0.5, "Modern": 0.1}
    for only, without, expected in ((0.12, 0.45, YES), (0.12, 0.15, DIRECTION), (0.45, 0.15, NO)):
        study = make_study(seeds=SEEDS)
        for condition, place in {**places, "+CutMix": only, "−CutMix": without}.items():
            study = with_heads(
                study, condition, lambda heads, place=place: by_layer(np.full(8, place))(heads.assign(entropy=place))
            )
        assert verdict_on(study, "In the plane") is expected


def test_every_claim_is_covered_above():
    begun = [
        *WEAKENED_AND_REFUTED,
        "All heads of Modern's",
        "Under the Modern protocol distance",
        "With depth",
        "In the plane",
    ]
    begun.append("Under the Modern protocol the most local head of")
    for claim in of_paper("ablation-cifar100"):
        assert sum(claim.text.startswith(beginning) for beginning in begun) == 1, claim.text


# ---- incomplete studies, other studies, the file


def test_claims_without_their_runs_are_not_tested(make_study):
    missing = [("−CutMix", seed) for seed in range(3)]
    results = make_study(without=missing)
    for claim in (judged for judged in judgements(results) if judged.claim.source != OURS):
        assert (claim.verdict is UNTESTED) == ("−CutMix" in claim.claim.needs)
        if claim.verdict is UNTESTED:
            assert "−CutMix" in claim.finding.ours
    # Each condition has a run, but no seed has both.
    apart = make_study("protocol-cifar100", seeds=2, without=[("Modern", 0), ("Baseline", 1)])
    assert {judgement.verdict for judgement in found(apart).values()} == {UNTESTED}


def test_one_missing_seed_costs_one_seed(make_study):
    results = make_study(without=[("Modern", 2)])
    judged = [claim for claim in judgements(results) if claim.claim.source != OURS]
    counts = {claim.claim.text: claim.finding.n for claim in judged if "Modern" in claim.claim.needs}
    assert set(counts.values()) == {2}


def test_the_means_told_are_of_the_seeds_that_are_compared(make_study):
    results = make_study(without=[("Modern", 1), ("Modern", 2)])
    accuracy = results.runs.set_index(["condition", "seed"])["test_acc"]
    before, after = accuracy["Baseline", 0], accuracy["Modern", 0]
    assert accuracy["Baseline"].mean() != before  # else it would not show
    (told,) = (
        told.finding.ours for text, told in found(results).items() if text.startswith("The Modern protocol raises")
    )
    assert told == f"{100 * before:.2f} to {100 * after:.2f} %: {100 * (after - before):+.2f} points"


def test_where_no_seed_is_whole_it_is_said_what_lacks(make_study):
    results = make_study(without=[("Modern", 0), ("Modern", 2), ("−CutMix", 1)])
    (told,) = (judged for text, judged in found(results).items() if text.startswith("CutMix separates"))
    assert told.verdict is UNTESTED
    assert told.finding.ours == "no seed has a run of each; lacking: Modern (seeds 0, 2); −CutMix (seed 1)"


def test_protocol_studies_have_the_claims_the_paper_makes_of_their_data_set(make_study):
    for name, number in (("protocol-cifar10", 3), ("protocol-tiny-imagenet", 3), ("protocol-cifar100", 8)):
        results = make_study(name, changed={"Modern": {"min_mad": 0.05}, "Baseline": {"min_mad": 0.3}})
        accuracy, locality, *_ = found = judgements(results)
        assert len(found) == number
        assert accuracy.verdict is YES
        assert {judgement.claim.family for judgement in found} == {"protocol"}
        size_is_known = PUBLISHED[name].conditions["Modern"].min_mad is not None
        assert locality.claim.paper == ("0.316 to 0.008: −0.308" if size_is_known else "not known")
        assert locality.verdict is YES
    assert judgements(dataclasses.replace(results, name="our-own")) == []


def test_the_file_says_numbers_verdicts_and_rules(make_study):
    results = make_study(without=[("+AutoAugment", 0)])
    told = study_verdicts(results)
    text = told.markdown()
    lines = text.splitlines()
    assert lines[0] == "# ablation-cifar100: what reproduces"
    verdicts = [j.verdict for j in told.judgements if j.claim.source != OURS]
    counts = ", ".join(f"{verdicts.count(verdict)} {verdict}" for verdict in Verdict if verdict in verdicts)
    # The grid of patches is not known.
    ours = "Of 6 questions of our own: 1 inconclusive, 4 not tested, 1 leaning yes."
    assert lines[2] == f"Of 20 claims of S1 (arXiv 2605.16390): {counts}. {ours} 23 runs, 2 to 3 seeds per condition."
    for number, judgement in enumerate(told.judgements, start=1):
        (row,) = (line for line in lines if line.startswith(f"| {number} |"))
        for part in (judgement.claim.text, judgement.claim.source, judgement.claim.paper, judgement.finding.ours):
            assert part in row
        assert f"| **{judgement.words}** |" in row
        assert judgement.claim.rule in text
        if judgement.claim.readings:
            assert all(reading in text for reading in judgement.claim.readings)
    assert "Small scale" not in text
    assert "+AutoAugment (seed 0)" in text
    assert "protocol.lr = 0.001" in text
    assert "| +14.85 points |".strip("| ") in text


def test_a_small_study_says_first_that_it_is_no_result(make_study):
    results = make_study(seeds=2, scale="small")
    text = study_verdicts(results).markdown()
    title, first, second, *_ = text.splitlines()
    assert title == "# ablation-cifar100: what reproduces"
    assert (first, second) == (SMALL, "16 runs, 2 seeds per condition.")
    assert "claims of S1" not in text
    assert "questions of our own" not in text


def test_the_numbers_in_the_file_are_those_of_the_runs(make_study):
    results = make_study()
    table = study_verdicts(results).table().numbers
    runs = results.runs.set_index(["condition", "seed"])
    gains = [runs.loc[("Modern", s), "test_acc"] - runs.loc[("Baseline", s), "test_acc"] for s in range(3)]
    half = 4.302652729911275 * np.std(gains, ddof=1) / np.sqrt(3)
    assert table.loc[0, "value"] == pytest.approx(np.mean(gains))
    assert (table.loc[0, "low"], table.loc[0, "high"]) == pytest.approx((np.mean(gains) - half, np.mean(gains) + half))
    assert f"{100 * np.mean(gains):+.2f} ± {100 * half:.2f} points" in table.loc[0, "ours"]
    cutmix = results.runs["cutmix"] == "on"
    apart = results.runs.loc[cutmix, "min_mad"].mean() - results.runs.loc[~cutmix, "min_mad"].mean()
    assert table.set_index("claim")["value"].filter(like="CutMix separates").item() == pytest.approx(apart)


def test_an_interaction_is_a_difference_of_differences_in_every_seed(make_study):
    results = make_study()
    mad = results.runs.set_index(["condition", "seed"])["min_mad"]
    changes = []
    for seed in range(3):
        with_it = mad["Modern", seed] - mad["−CutMix", seed] + mad["−LabelSmoothing", seed] - mad["+AutoAugment", seed]
        without = (
            mad["−AutoAugment", seed] - mad["+LabelSmoothing", seed] + mad["+CutMix", seed] - mad["Baseline", seed]
        )
        changes.append((with_it - without) / 2)
    theirs = stats.ttest_1samp(changes, 0)
    interval = theirs.confidence_interval(0.95)
    (ours,) = (j.finding for j in judgements(results) if j.claim.id == "colour-and-cutmix")
    assert (ours.value, ours.low, ours.high) == pytest.approx((np.mean(changes), interval.low, interval.high))
    assert f": {ours.value:+.3f} ± {ours.high - ours.value:.3f} (p = {theirs.pvalue:.2g});" in ours.ours
    # CutMix's own effect is the mean of both, a quarter of which is the margin.
    on_average = results.runs.groupby(["cutmix", "seed"])["min_mad"].mean().unstack("cutmix")
    margin = abs((on_average["on"] - on_average["off"]).mean()) / 4
    sides = (stats.ttest_1samp(changes, side * margin, alternative=way) for side, way in ((-1, "greater"), (1, "less")))
    assert ours.p == pytest.approx(max(side.pvalue for side in sides))
    # The other part's effect is of other pairs.
    (smoothing,) = (j.finding for j in judgements(results) if j.claim.id == "smoothing-and-cutmix")
    assert smoothing.value != pytest.approx(ours.value)


def test_claims_of_the_parts_are_one_family(make_study):
    families = {}
    for judgement in judgements(make_study()):
        families.setdefault((judgement.claim.is_question, judgement.claim.family), []).append(judgement.claim.id)
    assert {key: len(ids) for key, ids in families.items()} == {
        (False, "protocol"): 8,
        (False, "parts"): 12,
        (True, "length"): 2,
        (True, "own patch"): 4,
    }
    assert {"plane", "dissociation", "colour-and-cutmix"} <= set(families[False, "parts"])


def test_the_papers_numbers_agree_with_each_other():
    ablation, protocol = PUBLISHED["ablation-cifar100"].conditions, PUBLISHED["protocol-cifar100"].conditions
    assert {name: ablation[name] for name in protocol} == protocol
    gains = {"protocol-cifar10": 6.38, "protocol-cifar100": 14.85, "protocol-tiny-imagenet": 7.03}
    for name, gain in gains.items():
        rows = PUBLISHED[name].conditions
        assert 100 * (rows["Modern"].test_acc - rows["Baseline"].test_acc) == pytest.approx(gain)
    for row, (low, high) in product(ablation.values(), (("min_mad", "max_mad"), ("min_entropy", "max_entropy"))):
        assert 0 < getattr(row, low) < getattr(row, high) < 1
    (groups,) = (claim for claim in of_paper("ablation-cifar100") if claim.text.startswith("CutMix separates"))
    means = [
        np.mean([ablation[label].min_mad for label in ablation if (label in WITH_CUTMIX) == side]) for side in (1, 0)
    ]
    assert groups.paper == f"−{means[1] - means[0]:.3f}; with ≤ 0.024, without ≥ 0.210"


def test_claims_about_heads_that_could_not_be_measured_are_not_tested(make_study):
    whole = make_study(seeds=2)
    lost = whole.runs.index[(whole.runs["condition"] == "Modern") & (whole.runs["seed"] == 1)]
    runs = whole.runs.copy()
    runs.loc[lost, ["min_mad", "max_mad", "min_entropy", "max_entropy"]] = np.nan
    heads = whole.heads[~whole.heads["run"].isin(runs.loc[lost, "run"])]
    told = [judgement.finding.ours for judgement in judgements(dataclasses.replace(whole, runs=runs, heads=heads))]
    assert "no head of Modern, seed 1, could be measured" in told
    parted = next(words for words in told if "with ≤ " in words)
    assert "100 % of pairs in order" in parted
    assert "–" not in parted
