"""Do runs that train longer have a more local head? Planted links are found, and only where they were planted."""

import dataclasses
import re
from collections.abc import Mapping

import numpy as np
import pytest
from made_up_results import judgements, made_up
from scipy import stats

from nearsight.errors import InputError
from nearsight.papers import find_study
from nearsight.papers.protocol.links import LENGTH_RULE, length_and_distance, length_table
from nearsight.report.claims import OURS
from nearsight.report.studies import report_of
from nearsight.study import Cell
from nearsight.study.results import StudyResults


@pytest.fixture
def planted() -> StudyResults:
    """With CutMix the distance falls with the epochs, without it rises a little by chance alone."""
    drawn = np.random.default_rng(0)
    lengths: dict[str, int] = {}

    def numbers(cell: Cell) -> Mapping[str, float]:
        has_cutmix = cell.levels["cutmix"] != "off"
        length = lengths[cell.run] = int(drawn.integers(50, 150) + (200 * drawn.random() if has_cutmix else 0))
        return {"min_mad": 0.35 - 0.001 * length if has_cutmix else drawn.uniform(0.29, 0.33)}

    results = made_up(find_study("ablation-cifar100")(), numbers)
    results.runs["epochs"] = results.runs["run"].map(lengths)
    return results


def test_a_planted_link_is_found_where_it_is(planted: StudyResults) -> None:
    table = length_table(planted)
    numbers = table.numbers.set_index("group")
    for group, level in (("with CutMix", "on"), ("without CutMix", "off")):
        part = planted.runs[(planted.runs["cutmix"] != "off") == (level == "on")]
        assert numbers.loc[group, "correlation"] == pytest.approx(stats.spearmanr(part["epochs"], part["min_mad"])[0])
        assert numbers.loc[group, "epochs_max"] == part["epochs"].max()
        assert numbers.loc[group, "min_mad_min"] == pytest.approx(part["min_mad"].min())
    assert numbers["answer"].drop("without CutMix").to_dict() == {"all runs": "–", "with CutMix": "yes"}
    assert numbers.loc["without CutMix", "p_within"] > 0.05
    asked = {j.claim.text.partition(": ")[2]: j for j in judgements(planted) if j.claim.rule == LENGTH_RULE}
    assert asked["those with CutMix?"].words == "yes"
    assert asked["those without?"].words in ("leaning yes", "inconclusive")
    for group, judgement in (("with CutMix", asked["those with CutMix?"]), ("without CutMix", asked["those without?"])):
        assert judgement.finding.value == numbers.loc[group, "correlation_within"]
        assert min(judgement.finding.p, judgement.finding.p_against) == numbers.loc[group, "p_within"]
        assert judgement.words == numbers.loc[group, "answer"]
    shown = table.markdown()
    assert "Early stopping ended each run, not the study" in shown
    assert re.search(r"\| with CutMix \(12\) \| \d+ to \d+ \|", shown)


def test_what_distinguishes_the_conditions_is_no_link(planted: StudyResults) -> None:
    """Conditions that train longer are more local, but within a condition it is the other way round."""
    runs = planted.runs
    place = runs["condition"].map({label: place for place, label in enumerate(runs["condition"].unique())})
    runs["epochs"] = 100 * place + runs["seed"]
    runs["min_mad"] = 0.5 - 0.04 * place + 0.001 * runs["seed"]
    table = length_table(planted).numbers.set_index("group")
    assert (table["correlation"] < -0.85).all()
    assert (table["p"] < 0.05).all()
    assert table["correlation_within"].tolist() == pytest.approx([1.0] * 3)
    # All four conditions in the same order as now, or all in the opposite: of 6⁴ ways.
    assert table.loc["with CutMix", "p_within"] == pytest.approx(2 / 6**4)
    assert set(table["answer"]) == {"–", "the other way round"}
    asked = [j for j in judgements(planted) if j.claim.rule == LENGTH_RULE]
    assert [j.words for j in asked] == ["the other way round"] * 2
    assert asked[0].finding.ours.startswith(
        "rank correlation +1.00 within conditions, p = 0.0015; −0.89 over all 12 runs"
    )
    caption = length_and_distance(planted).caption
    assert "Within conditions: all runs +1.00 (n = 24, p = " in caption


def test_a_mark_per_run(planted: StudyResults) -> None:
    drawing = length_and_distance(planted)
    (panel,) = drawing.figure.axes
    marks = {line.get_gid(): line for line in panel.lines}
    for level, line in ((gid.removeprefix("runs-"), line) for gid, line in marks.items()):
        part = planted.runs[planted.runs["cutmix"] == level]
        np.testing.assert_allclose(line.get_xdata(), part["epochs"])
        np.testing.assert_allclose(line.get_ydata(), part["min_mad"])
    assert len(marks) == 2
    assert "an observation" in drawing.caption


def test_runs_that_all_train_alike_tell_nothing(planted: StudyResults) -> None:
    planted.runs["epochs"] = 100
    asked = [j.words for j in judgements(planted) if j.claim.rule == LENGTH_RULE]
    assert asked == ["not tested", "not tested"]
    assert set(length_table(planted).numbers["answer"]) == {"–", "not tested"}
    planted.runs["min_mad"] = np.nan
    with pytest.raises(InputError, match="measured heads"):
        length_table(planted)


def test_one_seed_has_no_two_runs_of_a_condition(planted: StudyResults) -> None:
    alone = dataclasses.replace(planted, runs=planted.runs[planted.runs["seed"] == 0])
    asked = [j for j in judgements(alone) if j.claim.rule == LENGTH_RULE]
    assert [j.words for j in asked] == ["not tested", "not tested"]
    assert asked[0].finding.ours == "no condition has runs to compare, or all are equal: 4 runs"


def test_studies_of_few_runs_do_not_ask() -> None:
    assert not any(claim.source == OURS for claim in report_of("protocol-cifar10").claims)
    assert sum(claim.rule == LENGTH_RULE for claim in report_of("ablation-cifar10").claims) == 2
