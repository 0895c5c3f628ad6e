"""The page of a study: its words and numbers are those of the study's own report and tables."""

import dataclasses
import json
import re
from html import unescape
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from nearsight.cli import main
from nearsight.errors import InputError
from nearsight.report.page.charts import of_study
from nearsight.report.page.finding import locality_in_words
from nearsight.report.page.folders import read_folder
from nearsight.report.page.live import LivePage
from nearsight.report.page.results import study_page_html
from nearsight.report.writing import study_tables, study_verdicts
from nearsight.study import StudyListener

HOSTILE = "<script>alert('1')</script>"


def data_of(html):
    return json.loads(re.search(r'<script type="application/json" id="page-data">(.*?)</script>', html)[1])


def text_of(html):
    """What can be read, without scripts and marks."""
    html = re.sub(r"<(script|style)\b.*?</\1>", "", html, flags=re.DOTALL)
    return " ".join(unescape(re.sub(r"<[^>]*>", " ", html)).split())


@pytest.fixture(scope="module")
def results(make_study):
    return make_study("ablation-cifar100", seeds=2, shape=(3, 4))


@pytest.fixture(scope="module")
def html(results):
    return study_page_html(results, provenance={"commit": "abc123"}, with_stills=False)


def test_the_finding_is_that_of_the_runs(results, html):
    headline = re.search(r'<h2 class="headline">(.*?)</h2>', html)[1].replace("\N{NO-BREAK SPACE}", " ")
    told = re.fullmatch(
        r"With CutMix the most local head has a mean attention distance of (\S+) \(.*\), without CutMix (\S+) \(.*\)\.",
        headline,
    )
    by_level = results.runs.groupby("cutmix")["min_mad"].mean()
    assert [float(number) for number in told.groups()] == pytest.approx([by_level["on"], by_level["off"]], abs=5e-4)
    assert study_verdicts(results).markdown().splitlines()[2] in text_of(html)


def test_the_finding_names_where_it_holds_and_a_gap_that_is_one(make_study):
    modern = make_study("protocol-cifar100", seeds=2, noise=0.1)
    words = locality_in_words(modern)
    means = modern.runs.groupby("condition")["min_mad"].mean()
    assert means["Modern"] < means["Baseline"]
    assert words.headline.startswith(
        f"In Modern the most local head has a mean attention distance of {means['Modern']:.3f} ("
    )
    assert f", in Baseline {means['Baseline']:.3f} (" in words.headline
    by_level = modern.runs.set_index("condition")["min_mad"]
    gap = by_level["Baseline"].min() - by_level["Modern"].max()
    assert words.sentences[0] == f"Means over 2 and 2 runs. No run bridges the gap of {gap:.3f} between the two groups."

    def sentence(values, seeds):
        runs = make_study("protocol-cifar100", seeds=seeds).runs.sort_values("condition").assign(min_mad=values)
        return locality_in_words(dataclasses.replace(modern, runs=runs)).sentences[0]

    assert sentence([0.3, 0.2], 1) == "One run each."  # which a gap always parts
    assert sentence([0.3, 0.2, 0.25, 0.1], 2) == "Means over 2 and 2 runs. The runs of the two groups overlap."
    assert sentence([0.3, 0.2001, 0.2, 0.1], 2) == "Means over 2 and 2 runs."  # a gap that does not show

    rates = modern.runs.assign(lr=modern.runs["protocol"].map({"Baseline": "0.001", "Modern": "0.01"}))
    rates = rates.assign(condition="lr " + rates["lr"])
    ours = dataclasses.replace(modern, name="ours", runs=rates, factors={"lr": ("0.001", "0.01")})
    told = locality_in_words(ours).headline
    assert told.startswith("At learning rate 0.01 the most local head ")
    assert ", at learning rate 0.001 0." in told


def test_how_to_run_it_again_is_what_works(results):
    def again(**changes):
        html = study_page_html(dataclasses.replace(results, **changes), with_stills=False, with_tests=False)
        return text_of(html).split("Run it again")[-1].split("Cite it")[0]

    assert "nearsight study run ablation-cifar100 --seeds 2 " in again()
    assert "--seeds 3 --scale small " in again(seeds=(0, 1, 2), scale="small")  # asked for, though not all are done
    for changes, told in (
        ({"name": "one"}, "seeds 0, 1"),
        ({"seeds": (5, 3)}, "seeds 3, 5"),
        ({"seeds": (1,)}, "seed 1"),
    ):
        assert "nearsight study run" not in again(**changes)
        assert f"with {told}: it was run from Python, by nearsight.study.run_study" in again(**changes)


def test_tables_hold_what_the_report_says(results, html):
    text = text_of(html).replace("\N{NO-BREAK SPACE}", " ")
    for table in study_tables(results):
        for cell in table.shown.to_numpy().ravel():
            assert " ".join(str(cell).replace("*", "").split()) in text
    for run in results.runs.itertuples():
        assert f"{100 * run.test_acc:.2f}" in text
        assert f"{run.min_mad:.4f}" in text
    assert "abc123" in text
    assert "nearsight study run ablation-cifar100 --seeds 2" in text


def test_charts_get_every_head_and_effect(results, html):
    data = data_of(html)
    heads = pd.DataFrame(data["heads"])
    assert len(heads) == len(results.heads)
    order = {run: place for place, run in enumerate(results.runs["run"])}
    expected = results.heads.assign(run=results.heads["run"].map(order)).sort_values(["run", "layer", "head"])
    np.testing.assert_allclose(heads["mad"], expected["mad"], atol=5.01e-5)
    labels = [data["groups"][group]["label"] for group in data["runs"]["group"]]
    assert labels == results.runs["condition"].tolist()
    effects = next(table for table in study_tables(results) if table.name == "effects").numbers
    np.testing.assert_allclose(np.array(data["effects"]["effect"], float), effects["effect"], atol=5.01e-5)


def test_long_courses_are_thinned_to_whole_epochs(results, monkeypatch):
    monkeypatch.setattr("nearsight.report.page.charts._MOST_ROWS", 1000)
    course = pd.concat([results.heads.assign(epoch=epoch) for epoch in range(1, 40)])
    kept = pd.DataFrame(of_study(dataclasses.replace(results, course=course), None)["course"])
    assert 500 < len(kept) <= 1000 + 8 * 12
    assert kept["epoch"].max() == 39
    assert (kept.groupby(["run", "epoch"]).size() == 12).all()
    assert kept["run"].nunique() == results.runs["condition"].nunique()  # one seed of each


def test_hostile_names_of_conditions_factors_and_levels_are_text(results):
    renamed = {"Modern": HOSTILE, "Baseline": '"><img src=x onerror=alert(1)>'}
    runs = results.runs.assign(condition=results.runs["condition"].replace(renamed)).rename(columns={"cutmix": HOSTILE})
    factors = {HOSTILE if name == "cutmix" else name: levels for name, levels in results.factors.items()}
    hostile = dataclasses.replace(results, name=HOSTILE, runs=runs, factors=factors, settings={HOSTILE: HOSTILE})
    html = study_page_html(hostile, with_stills=False)
    outside = re.sub(r"<script\b[^>]*>.*?</script>", "", html, flags=re.DOTALL)
    assert "<script" not in outside
    assert "<img" not in outside
    assert HOSTILE in [group["label"] for group in data_of(html)["groups"]]


def test_a_study_of_networks_without_heads_is_about_their_accuracy(results):
    names = ["min_mad", "max_mad", "min_entropy", "max_entropy"]
    without = dataclasses.replace(
        results, name="convolutions", runs=results.runs.assign(**dict.fromkeys(names, np.nan))
    )
    html = study_page_html(dataclasses.replace(without, heads=results.heads.iloc[:0]), with_stills=False)
    best = results.runs.groupby("condition")["test_acc"].mean().idxmax()
    assert f"The test accuracy is highest in “{best}”: " in text_of(html)
    assert data_of(html)["heads"]["mad"] == []
    assert 'id="plane"' not in html


def write_study(folder, results):
    """As results are committed: tables and study.json, no run folders."""
    results.write_tables(folder)
    cells = [
        {"run": run["run"], "condition": run["condition"], "levels": {}, "seed": run["seed"], "config": {}}
        for run in results.runs.to_dict(orient="records")
    ]
    described = {"schema": 1, "name": results.name, "scale": results.scale, "design": "full factorial"}
    described |= {"factors": results.factors, "cells": cells, "settings": results.settings}
    (folder / "study.json").write_text(json.dumps({**described, "assumed": list(results.assumed)}), encoding="utf-8")


def test_a_folder_of_tables_alone_gives_the_page(results, tmp_path, capsys):
    runs = results.runs.assign(position_association=np.nan)
    write_study(tmp_path, dataclasses.replace(results, runs=runs))
    assert read_folder(tmp_path).kind == "study"
    assert main(["report", str(tmp_path), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    page = tmp_path / "report.html"
    assert told == {
        "page": str(page),
        "kind": "study",
        "title": "ablation-cifar100",
        "bytes": page.stat().st_size,
    }
    assert page.stat().st_size < 5_000_000
    assert page.read_text(encoding="utf-8").count("<figure class=still>") == 3


def test_a_study_without_a_run_has_no_page(results):
    with pytest.raises(InputError, match="no complete run"):
        study_page_html(dataclasses.replace(results, runs=results.runs.iloc[:0]))


EVENTS = [name for name in dir(StudyListener) if not name.startswith("_")]


class Heard(StudyListener):
    def __init__(self):
        self.calls = []

    def __getattribute__(self, name):
        if name in EVENTS:
            return lambda *arguments: object.__getattribute__(self, "calls").append((name, arguments))
        return object.__getattribute__(self, name)


def test_a_live_page_passes_on_all_that_can_be_heard():
    assert [name for name in EVENTS if getattr(LivePage, name) is getattr(StudyListener, name)] == []


def test_a_live_page_is_renewed_once_a_minute_and_tells_how_far_it_is(results, tmp_path):
    done = results.runs["condition"] == "Baseline"
    write_study(tmp_path, dataclasses.replace(results, runs=results.runs[done].assign(position_association=np.nan)))
    now, heard = [0.0], Heard()
    live = LivePage(tmp_path, heard, clock=lambda: now[0])
    cells = [
        SimpleNamespace(
            run=run["run"],
            condition=HOSTILE if run["condition"] == "Modern" else run["condition"],
            seed=run["seed"],
            config=SimpleNamespace(identity=run["run"], protocol=SimpleNamespace(max_epochs=10)),
        )
        for run in results.runs.to_dict(orient="records")
    ]
    missing = [cell for cell in cells if cell.condition != "Baseline"]
    page = tmp_path / "report.html"
    live.planned(cells, missing)
    first = page.read_text(encoding="utf-8")
    assert "2 of 16 cells done" in text_of(first)
    assert 'http-equiv="refresh" content="60"' in first
    at = next(cell for cell in missing if cell.condition == HOSTILE)
    live.started(at.config, 0, 5)
    for epoch in range(1, 5):
        now[0] += 14
        live.epoch(at.config, SimpleNamespace(epoch=epoch))
    assert page.read_text(encoding="utf-8") == first  # not a minute yet
    now[0] += 14
    live.epoch(at.config, SimpleNamespace(epoch=5))
    told = text_of(page.read_text(encoding="utf-8"))
    assert f"{HOSTILE} , seed {at.seed}: epoch 5 of at most 10" in told
    # 14 cells of 10 epochs are left, 5 of which took 70 seconds.
    assert f"At most {(14 * 10 - 5) * 14 / 60:.0f} min left." in told
    now[0] += 60
    live.finished(at.config, SimpleNamespace())
    assert "3 of 16 cells done" in text_of(page.read_text(encoding="utf-8"))
    assert [name for name, _ in heard.calls] == ["planned", "started", *["epoch"] * 5, "finished"]


def test_a_live_page_that_cannot_be_written_stops_nothing(tmp_path):
    (tmp_path / "file").write_text("in the way")
    live = LivePage(tmp_path / "file")
    live.planned([], [])  # nothing to do, nothing to show
    config = SimpleNamespace(identity="run", protocol=SimpleNamespace(max_epochs=1))
    cell = SimpleNamespace(run="run", condition="Modern", seed=0, config=config)
    live.planned([cell], [cell])
    live.epoch(config, SimpleNamespace(epoch=1))
    assert (tmp_path / "file").read_text() == "in the way"
