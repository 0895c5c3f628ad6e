"""The report on probes: intervals against scipy, S2's numbers against its text, verdicts on made-up scores, files."""

import re
from dataclasses import replace
from html import unescape

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from nearsight.errors import InputError
from nearsight.files import write_json
from nearsight.papers.locat import numbers as s2
from nearsight.papers.locat.backbones import accuracy_and_segmentation, features_table
from nearsight.papers.locat.dense import all_claims, claims_about
from nearsight.report.page.folders import read_folder
from nearsight.report.probe_tables import (
    conditions_table,
    difference_over_images,
    differences,
    differences_of_conditions,
    differences_table,
    models_table,
    probe_verdicts,
    scores_of_models,
    write_probe_report,
)
from nearsight.report.probes import ProbedModel, ProbeResults, main_measures, ordered, title_of
from nearsight.report.rules import Verdict

GAINS = {s2.VIT: 0.0, s2.GAUG: 0.02, s2.PRR: 0.03, s2.LOCAT: 0.05, s2.GAP: 0.04}
"""By how much a condition is above ViT in segmentation, but for noise."""


def made_up(seeds=(0, 1, 2), conditions=tuple(GAINS), noise=0.002, scale="full", lacking=()):
    random = np.random.default_rng(7)
    found = []
    for seed in seeds:
        for condition in conditions:
            model = ProbedModel(
                model=f"{condition}, seed {seed}",
                condition=condition,
                seed=seed,
                num_parameters=2_417_956,
                image_size=32,
                trained_on="cifar100",
            )
            scores = {
                "segment_miou": 0.2 + 0.01 * seed + GAINS[condition] + noise * random.standard_normal(),
                # A difference of which nobody can be sure, and which has both signs.
                "retrieve_miou": 0.1 + 0.01 * (-1) ** seed * (condition == s2.LOCAT),
                "knn_20": 0.5,
                "knn_100": 0.45,
                "linear": 0.6,
            }
            rows = [
                {
                    "probe": measure.split("_")[0],
                    "data": "voc-small" if "miou" in measure else "cifar100",
                    "measure": measure,
                    "value": value,
                    "low": None if measure == "linear" else value - 0.01,
                    "high": None if measure == "linear" else value + 0.02,
                    "num_images": 321,
                    "identity": "0123456789abcdef",
                }
                for measure, value in scores.items()
                if (condition, seed, measure) not in lacking
            ]
            found.append((model, rows))
    return ProbeResults.of(found, name="pairs", scale=scale, planned=conditions)


def test_measures_are_named_and_one_of_each_probe_stands_for_it():
    names = ["segment_miou", "knn_100", "knn_20", "linear", "knn_9"]
    assert ordered(names) == ["knn_9", "knn_20", "knn_100", "linear", "segment_miou"]
    assert main_measures(names) == ["knn_20", "linear", "segment_miou"]
    assert main_measures(["knn_100", "knn_9"]) == ["knn_9"]
    assert title_of("knn_100") == "k-NN, k = 100"


def test_means_and_differences_are_those_of_scipy():
    results = made_up()
    values = results.rows[results.rows["measure"] == "segment_miou"].pivot_table(
        index="seed", columns="condition", values="value"
    )
    means = conditions_table(results).numbers.set_index(["condition", "measure"])
    for condition in GAINS:
        row = means.loc[condition, "segment_miou"]
        expected = stats.t.interval(0.95, 2, values[condition].mean(), stats.sem(values[condition]))
        assert (row["mean"], row["low"], row["high"]) == pytest.approx((values[condition].mean(), *expected))
    found = differences(results, "segment_miou")
    assert list(found) == [condition for condition in GAINS if condition != s2.VIT]
    for condition, interval in found.items():
        test = stats.ttest_rel(values[condition], values[s2.VIT])
        ends = test.confidence_interval(0.95)
        assert (interval.low, interval.high, interval.n) == pytest.approx((ends.low, ends.high, 3))
    # Pairs that are not whole count in no difference.
    fewer = differences(made_up(lacking={(s2.LOCAT, 1, "segment_miou")}), "segment_miou")
    assert {condition: interval.n for condition, interval in fewer.items()} == {
        condition: 2 if condition == s2.LOCAT else 3 for condition in found
    }
    shown = differences_table(results).shown.set_index("condition")
    assert shown.loc[s2.LOCAT, "segmentation mIoU"].startswith(f"+{100 * found[s2.LOCAT].value:.2f} ± ")


def test_a_difference_of_one_seed_has_an_interval_over_images():
    """The ends against two independent bootstraps; where a score has no interval, or seeds speak, there is none."""
    random = np.random.default_rng(3)
    num_images, low, high = 2000, {}, {}
    draws = {s2.VIT: random.binomial(num_images, 0.1, 40_000), s2.LOCAT: random.binomial(num_images, 0.4, 40_000)}
    results = made_up(seeds=(0,), conditions=(s2.VIT, s2.LOCAT))
    rows = results.rows[results.rows["measure"] == "knn_20"].copy()
    for condition, drawn in draws.items():
        low[condition], high[condition] = np.quantile(drawn / num_images, [0.025, 0.975])
    rows["value"] = rows["condition"].map({s2.VIT: 0.1, s2.LOCAT: 0.4})
    rows["low"], rows["high"] = rows["condition"].map(low), rows["condition"].map(high)
    results = replace(results, rows=pd.concat([rows, results.rows[results.rows["measure"] != "knn_20"]]))
    found = differences(results, "knn_20")[s2.LOCAT]
    expected = np.quantile((draws[s2.LOCAT] - draws[s2.VIT]) / num_images, [0.025, 0.975])
    assert (found.low, found.high) == pytest.approx(expected, abs=1e-3)
    assert (found.n, found.interval_over) == (1, "test images")
    # Ends that are not as far on both sides: down, what the one may be lower and the other higher; up, the other way.
    rows["low"], rows["high"] = rows["value"] - [0.01, 0.03], rows["value"] + [0.04, 0.02]
    uneven = differences(replace(results, rows=rows), "knn_20")[s2.LOCAT]
    assert (uneven.low, uneven.high) == pytest.approx((0.3 - np.hypot(0.03, 0.04), 0.3 + np.hypot(0.02, 0.01)))
    linear = differences(results, "linear")[s2.LOCAT]
    assert (linear.interval_over, np.isnan(linear.low)) == ("", True)
    table = differences_table(results)
    assert re.fullmatch(
        r"\+30\.00 \(\+27\.\d\d to \+32\.\d\d\)", table.shown.set_index("condition").loc[s2.LOCAT, "k-NN, k = 20"]
    )
    assert table.shown.set_index("condition").loc[s2.LOCAT, "linear"] == "0.00"
    assert any(note.startswith("In brackets: 95 % over test images") for note in table.notes)
    assert "over test images, since there is one seed" in differences_of_conditions(results, "knn_20").caption
    several = differences_table(made_up())
    assert set(several.numbers["interval_over"]) == {"seeds"}
    assert not any("In brackets" in note for note in several.notes)


def test_the_papers_numbers_are_those_of_its_text():
    texts = {claim.text: claim.paper for _, claim in all_claims(made_up())}
    segments = texts["LocAt's frozen features segment better than ViT's"]
    # S2 §5.2: "+6.17%, +4.86%, and +5.86%, over ViT on ADE20K, PASCAL Context, and COCO Stuff" (Tiny).
    for gain, dataset in (("+6.17, Base +4.24 (ADE20K)", 0), ("+4.86, Base +2.25 (PASCAL Context)", 1), ("+5.86", 2)):
        assert f"Tiny {gain}" in segments.split("; ")[dataset]
    # Everything it claims holds in its own tables, in every size and on every data set.
    assert len(texts) == 15 + 2 * 4  # and of four backbones beside ViT
    for text, paper in texts.items():
        gains = re.findall(r"(?:Tiny|Small|Base) (\S+\d)", paper)
        assert gains, text
        assert all(float(gain.replace("−", "-")) > 0 for gain in gains), text


def test_backbones_have_a_table_a_figure_and_verdicts(tmp_path, monkeypatch):
    """S2's Table 1 and Figure 2, of those that were probed both without LocAt and with it."""
    gains = {"Swin": 0.1, "Swin + LocAt": 0.16, "RegViT": 0.02, s2.VIT: 0.0, s2.LOCAT: 0.05}
    monkeypatch.setattr(f"{__name__}.GAINS", gains)
    results = made_up(conditions=tuple(gains), noise=0.0005)
    write_probe_report(results, tmp_path)
    table = pd.read_csv(tmp_path / "tables" / "backbones.csv").set_index("backbone")
    assert list(table.index) == [s2.VIT, "Swin"]  # RegViT has no pair
    assert table.loc["Swin", "segment_miou_difference"] == pytest.approx(0.06, abs=0.002)
    assert (tmp_path / "figures" / "backbones.svg").exists()
    drawing = accuracy_and_segmentation(results)
    marks = {line.get_gid(): line.get_xydata()[0].tolist() for line in drawing.figure.axes[0].lines}
    assert marks["mean-Swin + LocAt"] == [pytest.approx(60), pytest.approx(37, abs=0.2)]
    found = judged(results)
    assert found["LocAt in Swin: frozen features segment better"].verdict == Verdict.REPRODUCED
    assert "LocAt in Jumbo: frozen features segment better" not in found
    with pytest.raises(InputError, match="fewer than two backbones"):
        features_table(made_up(conditions=(s2.VIT, s2.LOCAT)))
    monkeypatch.undo()
    write_probe_report(made_up(), tmp_path)  # on other models: what is no longer true goes
    assert not list(tmp_path.glob("*/backbones*"))


def judged(results):
    return {one.claim.text: one for one in probe_verdicts(results).judgements}


SEGMENTS, GAUG = "LocAt's frozen features segment better than ViT's", "GAug alone makes features segment better"
RETRIEVES = "LocAt's patches retrieve better than ViT's, without training"


def test_verdicts_follow_the_scores():
    results = made_up(noise=0.0005)
    found = judged(results)
    assert len(found) == len(claims_about(results)) == 6  # no kernels, no DINO, nothing without positions
    assert found[SEGMENTS].verdict == Verdict.REPRODUCED
    assert found[RETRIEVES].verdict == Verdict.INCONCLUSIVE
    assert found[GAUG].verdict == Verdict.REPRODUCED
    beyond = found["Together they make them better than the better of the two alone"]
    assert (beyond.verdict, round(beyond.finding.value, 2)) == (Verdict.REPRODUCED, 0.02)
    gap = found["PRR makes features segment better than average pooling (GAP)"]
    assert (gap.verdict, round(gap.finding.value, 2)) == (Verdict.CONTRADICTED, -0.01)
    assert "2.4 M parameters, 32 pixels, trained on cifar100; probed on 321 images of voc-small" in gap.finding.ours
    planned = made_up(conditions=(s2.VIT, s2.GAUG))
    unfinished = ProbeResults(name="pairs", scale="full", planned=tuple(GAINS), rows=planned.rows)
    assert judged(unfinished)["PRR alone makes features segment better"].verdict == Verdict.NOT_TESTED
    text = probe_verdicts(results).markdown()
    assert (
        "Of 6 claims of S2 (arXiv 2603.04892): 4 reproduced, 1 inconclusive, 1 contradicted. 15 models, 3 seeds" in text
    )
    assert "ViT-T and ViT-B, 6 and 86 M parameters, 224 pixels, trained on ImageNet-1K" in text
    assert "LocAt's features (Tables 1 and 4): 1, 2; parts (Table 5): 3, 4, 5, 6." in text


def test_verdicts_are_of_a_t_test_over_seeds_corrected_for_the_table_of_the_paper():
    results = made_up(noise=0.01)
    values = results.rows[results.rows["measure"] == "segment_miou"].pivot_table(
        index="seed", columns="condition", values="value"
    )
    found = judged(results)
    pairs = {
        GAUG: (s2.GAUG, s2.VIT),
        "PRR alone makes features segment better": (s2.PRR, s2.VIT),
        "PRR makes features segment better than average pooling (GAP)": (s2.PRR, s2.GAP),
    }
    ps = {}
    for text, (condition, reference) in pairs.items():
        test = stats.ttest_rel(values[condition], values[reference])
        finding = found[text].finding
        assert (finding.p, finding.p_against) == pytest.approx(
            (test.pvalue, 1) if test.statistic > 0 else (1, test.pvalue)
        )
        ps[text] = finding.p
    both = [stats.ttest_rel(values[s2.LOCAT], values[part]) for part in (s2.GAUG, s2.PRR)]
    together = "Together they make them better than the better of the two alone"
    ps[together] = found[together].finding.p
    assert ps[together] == pytest.approx(max(1 if test.statistic < 0 else test.pvalue for test in both))
    so_far = 0
    for place, text in enumerate(sorted(ps, key=ps.__getitem__)):
        so_far = max(so_far, min(1, (4 - place) * ps[text]))
        assert found[text].p == pytest.approx(so_far)


def test_one_seed_decides_nothing_and_images_stand_in_brackets():
    one = judged(made_up(seeds=(0,)))
    assert {judgement.verdict for judgement in one.values()} == {Verdict.INCONCLUSIVE}
    gaug = one[GAUG].finding  # 0.02 above, of scores that may be 0.01 less or 0.02 more
    assert (gaug.low, gaug.high) == pytest.approx((gaug.value - 0.02236, gaug.value + 0.02236), abs=1e-4)
    assert re.search(r"%: \+\d\.\d\d \(−0\.\d\d to \+\d\.\d\d\) points: 2.4 M", gaug.ours)
    # Of several seeds their spread decides, however little other images tell.
    results = made_up()
    several = judged(results)[GAUG]
    assert several.verdict == Verdict.REPRODUCED
    over_images = difference_over_images(results, s2.GAUG, s2.VIT, "segment_miou")
    assert over_images.low < 0 < several.finding.low
    ends = " to ".join(f"{100 * end:+.2f}".replace("-", "−") for end in (over_images.low, over_images.high))
    assert f" ± {100 * (several.finding.high - several.finding.value):.2f} ({ends}) points" in several.finding.ours
    for seeds, kinds in (((0,), ["In brackets"]), ((0, 1, 2), ["± is half", "In brackets"])):
        notes = " ".join(probe_verdicts(made_up(seeds=seeds)).notes)
        assert [words for words in ("± is half", "In brackets") if words in notes] == kinds
    linear = made_up(conditions=(s2.VIT, s2.LOCAT))
    without_ends = replace(linear, rows=linear.rows.assign(low=None, high=None).astype({"low": float, "high": float}))
    assert "In brackets" not in " ".join(probe_verdicts(without_ends).notes)
    assert "(" not in judged(without_ends)[SEGMENTS].finding.ours


def test_files_can_be_read_again_and_are_the_same(tmp_path):
    whole = made_up(seeds=(0, 1), conditions=(s2.VIT, s2.LOCAT), scale="small")
    results = replace(whole, rows=whole.rows[whole.rows["measure"] == "segment_miou"].reset_index(drop=True))
    written = write_probe_report(results, tmp_path)
    names = {str(path.relative_to(tmp_path)) for path in written}
    assert {"probes.csv", "probes.md", "probes.json", "verdict.md", "tables/differences.md"} <= names
    assert {"figures/probes.png", "figures/differences-segment-miou.svg"} <= names
    assert {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()} == names
    for name in ("verdict.md", "probes.md", "tables/conditions.md"):
        assert "Small scale" in (tmp_path / name).read_text()
    read = ProbeResults.read(tmp_path)
    pd.testing.assert_frame_equal(read.rows, results.rows, check_dtype=False)
    assert read.models == results.models
    assert (read.name, read.scale, read.planned) == (results.name, results.scale, results.planned)
    texts = {name: (tmp_path / name).read_bytes() for name in names if not name.endswith("png")}
    write_probe_report(read, tmp_path)
    assert {name: (tmp_path / name).read_bytes() for name in texts} == texts


def test_figures_show_the_numbers_with_their_intervals():
    results = made_up(seeds=(0, 1, 2))
    lines = {line.get_gid(): line for axes in scores_of_models(results).figure.axes for line in axes.lines}
    scores = results.scores("segment_miou")
    for place, model in enumerate(results.models):
        score = scores[model.model]
        assert lines[f"segment_miou-model{place}"].get_xdata()[0] == pytest.approx(100 * score.value)
        assert list(lines[f"interval-segment_miou-model{place}"].get_xdata()) == pytest.approx(
            [100 * score.low, 100 * score.high]
        )
        assert f"interval-linear-model{place}" not in lines  # which has none
    (axes,) = differences_of_conditions(results, "segment_miou").figure.axes
    bars = {line.get_gid(): line for line in axes.lines}
    found = differences(results, "segment_miou")[s2.LOCAT]
    assert bars["value-LocAt"].get_xdata()[0] == pytest.approx(100 * found.value)
    assert list(bars["interval-LocAt"].get_xdata()) == pytest.approx([100 * found.low, 100 * found.high])
    values = results.as_study().runs.pivot(index="seed", columns="condition", values="segment_miou")
    by_hand = 100 * (values[s2.LOCAT] - values[s2.VIT])
    assert list(bars["seeds-LocAt"].get_xdata()) == pytest.approx(list(by_hand))


@pytest.mark.parametrize(
    ("seeds", "dots", "bars", "words"),
    [
        ((0,), False, True, "The difference within a seed; bars: 95 % intervals (in brackets) over test images"),
        ((0, 1), True, False, "mean over 2 seeds; dots: seeds; ± is half the 95 % interval."),
        ((0, 1, 2), True, True, "mean over 3 seeds; dots: seeds; bars: 95 % intervals over seeds."),
    ],
)
def test_bars_are_over_images_or_over_three_seeds(seeds, dots, bars, words):
    drawing = differences_of_conditions(made_up(seeds=seeds), "segment_miou")
    names = {line.get_gid() for line in drawing.figure.axes[0].lines}
    assert ("seeds-LocAt" in names, "interval-LocAt" in names) == (dots, bars)
    assert words in drawing.caption


def test_models_without_a_condition_stand_side_by_side(tmp_path):
    rows = made_up(seeds=(0,), conditions=(s2.VIT, s2.LOCAT), noise=0).rows
    alone = ProbeResults(name="two", scale="full", planned=(), rows=rows.assign(condition="", seed=pd.NA))
    assert probe_verdicts(alone) is None
    for stale in ("verdict.md", "tables/differences.csv", "figures/differences-linear.svg", "figures/mine.svg"):
        (tmp_path / stale).parent.mkdir(exist_ok=True)
        (tmp_path / stale).write_text("of other models")
    write_probe_report(alone, tmp_path)
    names = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    of_figures = {f"figures/{name}" for name in ("probes.png", "probes.svg", "captions.md", "mine.svg")}
    assert names == {"probes.csv", "probes.json", "probes.md", *of_figures}
    line = "| LocAt, seed 0 | 50.00 (49.00 to 52.00) | 60.00 | 11.00 (10.00 to 13.00) | 25.00 (24.00 to 27.00) |"
    assert line in models_table(alone).markdown().splitlines()
    assert ProbeResults.read(tmp_path).models[0].seed is None


def test_the_page_says_what_the_files_say(tmp_path):
    results = made_up()
    write_probe_report(results, tmp_path)
    write_json(tmp_path / "provenance.json", {"commit": "abc123", "command": "nearsight probe all 'a <b>'"})
    contents = read_folder(tmp_path)
    assert (contents.kind, contents.title) == ("probes", results.name)
    page = words_of(contents.html())
    assert "nearsight probe all 'a <b>'" in page
    for table in (models_table(results), conditions_table(results), probe_verdicts(results).table()):
        for cell in table.shown.iloc[0]:
            assert cell.strip("*") in page
    (tmp_path / "alone").mkdir()
    alone = made_up(seeds=(0,), conditions=tuple(GAINS)[:1])
    write_probe_report(alone, tmp_path / "alone")
    ((model, score),) = alone.scores(main_measures(alone.measures)[0]).items()
    assert f"“{model}” with {100 * score.value:.1f} %" in words_of(read_folder(tmp_path / "alone").html())


def words_of(page):
    return unescape(re.sub("<[^>]*>", "", page)).replace("\N{NO-BREAK SPACE}", " ")


def test_what_cannot_be_read_is_named(tmp_path):
    with pytest.raises(InputError, match=r"holds no probes: probes\.json is missing"):
        ProbeResults.read(tmp_path)
    made_up(seeds=(0,), conditions=(s2.VIT,)).write(tmp_path)
    (tmp_path / "probes.csv").write_text("model,value\nvit,0.5\n")
    with pytest.raises(InputError, match="are damaged"):
        ProbeResults.read(tmp_path)
    empty = made_up(seeds=())
    with pytest.raises(InputError, match="no model has been probed"):
        write_probe_report(empty, tmp_path)


@pytest.mark.parametrize("name", ["knn_1.5", "knn_", "knn_" + "9" * 5000, "nothing"])
def test_a_score_of_nothing_known_is_refused(tmp_path, name):
    made_up().write(tmp_path)
    text = (tmp_path / "probes.csv").read_text()
    (tmp_path / "probes.csv").write_text(text.replace("knn_20", name))
    with pytest.raises(InputError, match=r"are damaged: '.*' is not a measure"):
        ProbeResults.read(tmp_path)
