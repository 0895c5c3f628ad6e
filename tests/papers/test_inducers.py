"""What ways to make attention local gain against what they cost: numbers by hand, in tables, figures and verdicts."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from made_up_results import made_up
from scipy import stats

from nearsight.errors import InputError
from nearsight.papers import declare_all
from nearsight.papers.locat.inducers import (
    WAYS,
    gains_figure,
    gains_table,
    inducers_cifar100,
    inducers_tiny_imagenet,
)
from nearsight.report.probe_tables import probe_verdicts, write_probe_report
from nearsight.report.probes import ProbedModel, ProbeResults
from nearsight.report.writing import study_verdicts

declare_all()
GAINS = dict(zip(WAYS, (0.02, 0.01, 0.03, -0.01, 0.0, -0.02, 0.04, 0.05), strict=True))
TIMES = dict(zip(WAYS, (1.1, 1.1, 1.05, 0.8, 1.5, 1.4, 2.0, 1.2), strict=True))
"""Of the plain model's."""
DISTANCES = dict(zip(WAYS, (0.15, 0.18, 0.12, 0.05, 0.2, 0.25, 0.28, 0.1), strict=True))


def way_of(condition: str) -> str:
    return condition.partition(" + CutMix")[0]


def studied(study):
    results = made_up(
        study,
        lambda cell: {
            "test_acc": 0.5 + 0.01 * cell.seed + GAINS.get(way_of(cell.condition), 0.0),
            "min_mad": DISTANCES.get(way_of(cell.condition), 0.3),
        },
    )
    condition = results.history["run"].map(results.runs.set_index("run")["condition"])
    times = condition.map(lambda label: 4.0 * TIMES.get(way_of(label), 1.0))
    return replace(results, history=results.history.assign(seconds=times))


def probed(study, *, with_times=True):
    def model(cell):
        way = way_of(cell.condition)
        return ProbedModel(
            model=f"{cell.condition}, seed {cell.seed}",
            condition=cell.condition,
            seed=cell.seed,
            num_parameters=2_417_956,
            image_size=64,
            trained_on="tiny-imagenet",
            min_mad=DISTANCES.get(way, 0.3) if with_times else None,
            epoch_seconds=4.0 * TIMES.get(way, 1.0) if with_times else None,
        )

    def scores(cell):
        value = 0.2 + 0.01 * cell.seed + 0.5 * GAINS.get(way_of(cell.condition), 0.0)
        about = {"low": value - 0.01, "high": value + 0.01, "num_images": 321, "identity": "0123456789abcdef"}
        return [{"probe": "segment", "data": "voc-small", "measure": "segment_miou", "value": value, **about}]

    found = [(model(cell), scores(cell)) for cell in study.cells]
    planned = tuple(dict.fromkeys(cell.condition for cell in study.cells))
    return ProbeResults.of(found, name=study.name, planned=planned)


def test_gains_and_times_are_those_of_the_plain_model_with_the_same_mixing():
    table = gains_table(studied(inducers_cifar100())).numbers.set_index(["score", "way"])
    assert len(table) == 16
    for way, gain in GAINS.items():
        for score, name in (("test accuracy", way), ("test accuracy, + CutMix", f"{way} + CutMix")):
            row = table.loc[score, name]
            assert row["gain_mean"] == pytest.approx(100 * gain)
            assert row["longer_mean"] == pytest.approx(100 * (TIMES[way] - 1))
            if TIMES[way] > 1:
                assert row["per_percent"] == pytest.approx(gain / (TIMES[way] - 1))
            else:
                assert row["per_percent"] is None or np.isnan(row["per_percent"])


def test_a_study_without_two_sides_has_no_such_table():
    results = studied(inducers_tiny_imagenet())
    alone = replace(results, runs=results.runs[results.runs["condition"] == "ViT"])
    with pytest.raises(InputError, match="no seed has a run"):
        gains_table(alone)


def test_the_figure_has_a_point_for_each_way():
    results = studied(inducers_cifar100())
    panels = gains_figure(results).figure.axes
    assert [panel.get_title(loc="left") for panel in panels] == ["test accuracy", "test accuracy, + CutMix"]
    points = {
        line.get_gid(): line.get_xydata()[0] for line in panels[0].lines if (line.get_gid() or "").startswith("mean")
    }
    assert len(points) == 8
    for way, gain in GAINS.items():
        assert points[f"mean-test accuracy-{way}"] == pytest.approx((100 * (TIMES[way] - 1), 100 * gain))


def test_all_questions_of_both_studies_are_answered():
    for make in (inducers_cifar100, inducers_tiny_imagenet):
        verdicts = study_verdicts(studied(make()))
        assert verdicts is not None
        assert not verdicts.table().numbers["verdict"].isin(["not tested"]).any()


def test_probes_answer_in_miou(tmp_path):
    results = probed(inducers_tiny_imagenet())
    table = gains_table(results).numbers.set_index("way")
    assert table.loc["GAug", "gain_mean"] == pytest.approx(2.5)
    assert table.loc["GAug", "per_percent"] == pytest.approx(2.5 / 20)
    rows = probe_verdicts(results).table().numbers.set_index("claim")
    local = rows.loc["Are the more local models those with the better features: segmentation mIoU?"]
    distances, gains = (
        [known.get(way, other) for way in results.planned] for known, other in ((DISTANCES, 0.3), (GAINS, 0))
    )
    assert np.sign(local["value"]) == np.sign(stats.spearmanr(distances, gains).statistic)
    results.write(tmp_path)
    again = ProbeResults.read(tmp_path)
    pd.testing.assert_frame_equal(again.rows, results.rows)
    assert again.models == results.models
    names = {path.name for path in write_probe_report(again, tmp_path)}
    assert {"cost.csv", "cost.md", "cost.png", "cost.svg"} <= names


def test_models_without_times_have_no_such_columns(tmp_path):
    results = probed(inducers_tiny_imagenet(), with_times=False)
    results.write(tmp_path)
    assert "epoch_seconds" not in (tmp_path / "probes.csv").read_text()
    assert ProbeResults.read(tmp_path).models == results.models
    with pytest.raises(InputError, match="with their study"):
        gains_figure(results)
