"""The whole report of a study: its files, their bytes, and what becomes of incomplete studies."""

import dataclasses
import xml.etree.ElementTree as ET

import pandas as pd
import pytest
from made_up_results import made_up
from matplotlib.image import imread

from nearsight.errors import InputError
from nearsight.files import write_json
from nearsight.papers.protocol.ablation import protocol_cifar10
from nearsight.report import writing
from nearsight.report.conditions import with_attention
from nearsight.report.writing import study_tables, write_results, write_study_report
from nearsight.study import StudyResults

TABLES = {"conditions", "gain", "effects", "effects-by-layer", "separation", "dissociation", "correlation", "verdict"}
TABLES |= {"training-length"}
SMALL_MODEL = (3, 2)
FIGURES = {
    "figure-1-profiles",
    "figure-2-plane",
    "figure-3-heatmaps",
    "figure-4-minimum-mad",
    "figure-5-key-conditions",
    "training-length",
}


def written_under(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def report(make_study, tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    paths = write_study_report(make_study(), folder)
    return folder, paths


def test_all_files_are_there_and_can_be_read(report):
    folder, paths = report
    files = written_under(folder)
    expected = {f"tables/{name}.{kind}" for name in TABLES for kind in ("csv", "md")}
    expected |= {f"figures/{name}.{kind}" for name in FIGURES for kind in ("png", "svg")}
    expected |= {"figures/captions.md", "verdict.md"}
    assert set(files) == expected
    assert {str(path.relative_to(folder)) for path in paths} == expected
    for path in paths:
        if path.suffix == ".csv":
            assert len(pd.read_csv(path))
        elif path.suffix == ".svg":
            ET.parse(path)
        elif path.suffix == ".png":
            assert min(imread(path).shape[:2]) > 400
        else:
            assert path.read_text(encoding="utf-8").startswith("# ablation-cifar100")
    captions = files["figures/captions.md"].decode()
    assert all(f"**{name}**" in captions for name in FIGURES)


def test_the_same_results_give_the_same_bytes_over_the_old_files(report, make_study):
    folder, _ = report
    before = written_under(folder)
    write_study_report(make_study(), folder)
    assert written_under(folder) == before


def test_an_incomplete_study_gives_what_it_can_and_says_what_is_missing(make_study, tmp_path):
    without = [("Modern", seed) for seed in range(2)] + [("Baseline", seed) for seed in range(2)] + [("+CutMix", 1)]
    write_study_report(make_study(seeds=2, without=without, shape=SMALL_MODEL), tmp_path)
    files = written_under(tmp_path)
    assert "figures/figure-4-minimum-mad.png" in files
    assert "figures/figure-1-profiles.png" not in files
    captions = files["figures/captions.md"].decode()
    assert "**figure-1-profiles**: not drawn; it compares" in captions
    assert "No complete run yet: Baseline; Modern." in captions
    assert "+CutMix (seed 1)" in captions
    assert "not tested" in files["verdict.md"].decode()
    assert "tables/gain.md" not in files


@pytest.mark.parametrize("keep", [0, 5])
def test_a_single_run_is_enough(make_study, tmp_path, keep):
    whole = make_study(seeds=1, shape=SMALL_MODEL)
    run = whole.runs["run"].iloc[keep]
    one = dataclasses.replace(
        whole, runs=whole.runs[whole.runs["run"] == run], heads=whole.heads[whole.heads["run"] == run]
    )
    paths = write_study_report(one, tmp_path)
    assert tmp_path / "tables" / "conditions.md" in paths
    assert tmp_path / "figures" / "figure-4-minimum-mad.png" in paths


def test_no_run_is_an_error_that_says_so(make_study, tmp_path):
    study = make_study(seeds=1)
    with pytest.raises(InputError, match="no complete run"):
        write_study_report(dataclasses.replace(study, runs=study.runs.iloc[:0], heads=study.heads.iloc[:0]), tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_protocol_study_has_table_1_and_no_figure_5(make_study, tmp_path):
    write_study_report(make_study("protocol-cifar100", scale="small", shape=SMALL_MODEL), tmp_path)
    files = written_under(tmp_path)
    assert "+14.85" in files["tables/gain.md"].decode()
    assert "figures/figure-5-key-conditions.png" not in files
    assert "Figure 2 shows the same conditions" in files["figures/captions.md"].decode()
    assert all("Small scale" in content.decode() for name, content in files.items() if name.endswith(".md"))


def test_a_study_of_our_own_has_no_verdict(make_study, tmp_path):
    write_study_report(dataclasses.replace(make_study(seeds=1, shape=SMALL_MODEL), name="our-own"), tmp_path)
    assert not (tmp_path / "verdict.md").exists()
    assert (tmp_path / "tables" / "conditions.md").exists()


def test_networks_without_attention_are_left_out_of_what_is_about_heads(make_study, tmp_path):
    results = make_study(seeds=2)
    runs = results.runs.copy()
    heads = ["min_mad", "max_mad", "min_entropy", "max_entropy"]
    without = runs["cutmix"] == "on"
    runs.loc[without, heads] = float("nan")
    kept = results.heads[~results.heads["run"].isin(runs.loc[without, "run"])]
    mixed = dataclasses.replace(results, name="networks", runs=runs, heads=kept)
    tables = {table.name: table for table in study_tables(mixed)}
    assert list(tables["conditions"].shown["MAD, min to max"]).count("–") == 4
    assert "Without 8 runs whose heads could not be measured." in tables["effects"].notes
    measured = with_attention(mixed)
    assert len(measured.runs) == 8
    assert set(measured.factors) == {"autoaugment", "smoothing"}
    none = dataclasses.replace(mixed, runs=runs[without], heads=kept.iloc[:0])
    write_study_report(none, tmp_path)
    captions = (tmp_path / "figures" / "captions.md").read_text(encoding="utf-8")
    assert captions.count("no network of the study has attention") == 5


def test_what_is_kept_of_a_study(tmp_path, monkeypatch):
    monkeypatch.setattr(writing, "FIGURES", {})
    planned = protocol_cifar10(seeds=2)
    results, description = made_up(planned, lambda cell: {"test_acc": 0.5 + 0.01 * cell.seed}), planned.to_json()
    study, folder = tmp_path / "study", tmp_path / "results" / "kept"
    write_json(study / "study.json", description)
    write_json(study / "provenance.json", {"runs": 4})
    results.write_tables(study)
    (folder / "tables").mkdir(parents=True)
    (folder / "tables" / "of-old.md").write_text("a table that is not written any more", encoding="utf-8")
    paths = {str(path.relative_to(folder)) for path in write_results(study, folder)}
    assert paths == set(written_under(folder))
    kept = {"study.json", "provenance.json", "verdict.md", "runs.csv", "heads.csv", "tables/conditions.md"}
    assert kept < paths
    again = StudyResults.read(folder)
    pd.testing.assert_frame_equal(again.runs, results.runs, check_dtype=False)
    before = written_under(folder)
    write_results(folder, folder)  # from what was kept, in its place
    assert written_under(folder) == before
    write_json(study / "study.json", {**description, "scale": "small"})
    with pytest.raises(InputError, match="of small scale, which tests the path"):
        write_results(study, tmp_path / "results" / "small")
    assert not (tmp_path / "results" / "small").exists()
