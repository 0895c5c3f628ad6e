"""`nearsight report`: what kind of folder it is, what the page of it says, and what is refused."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from nearsight.cli import main
from nearsight.errors import InputError
from nearsight.papers import declare_all
from nearsight.report.inputs import read_measured, write_measured
from nearsight.report.page.folders import read_folder, read_folders
from nearsight.report.simulations import simulation_verdicts
from nearsight.study import SimulationResults
from nearsight.train.dino import DinoConfig
from nearsight.train.recipes import find_run

RESULTS = Path(__file__).parents[2] / "results"

declare_all()


def write_run(folder, model):
    """A complete run as far as its files for people go; its weights are elsewhere."""
    folder.mkdir(parents=True)
    config = find_run("compact-shapes")("baseline")
    (folder / "config.json").write_text(json.dumps(config.to_json()))
    (folder / "result.json").write_text(json.dumps({"best_epoch": 3, "test_acc": 0.4853}))
    (folder / "provenance.json").write_text(json.dumps({"commit": "abc123"}))
    model.heads.to_csv(folder / "heads.csv", index=False)
    model.history.to_csv(folder / "history.csv", index=False)


@pytest.fixture
def folder(tmp_path, make_model, monkeypatch):
    write_run(tmp_path / "plain", make_model("plain", lowest=0.3, seed=1))
    write_run(tmp_path / "cut", make_model("cut", lowest=0.02, seed=2))
    measured = tmp_path / "measured"
    measured.mkdir()
    model = make_model("a model", lowest=0.2, seed=3)
    model.heads.to_csv(measured / "heads.csv", index=False)
    model = replace(model, grids=dict.fromkeys(model.layers(), (8, 8)), config={"seed": 7}, history=None)
    write_measured(measured, model, "nearsight measure 'a model'")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def complaint(*arguments, capsys):
    capsys.readouterr()
    assert main(["report", *map(str, arguments)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("nearsight: ")
    assert captured.err.count("\n") == 1
    return captured.err


def test_a_run_gives_its_numbers_and_the_command_that_trains_it_again(folder, make_model):
    contents = read_folder(folder / "plain")
    assert (contents.kind, contents.title, list(contents.runs)) == ("run", "plain", ["plain"])
    (model,) = contents.models
    assert model.measured()["mad"].tolist() == make_model("plain", lowest=0.3, seed=1).measured()["mad"].tolist()
    assert model.test_accuracy == 0.4853
    assert contents.command == "nearsight train compact-shapes --protocol baseline"


def test_a_run_that_no_options_say_is_trained_again_from_its_config(folder):
    config = find_run("compact-shapes")("modern")
    backwards = replace(config, protocol=replace(config.protocol, augment=config.protocol.augment[::-1]))
    (folder / "plain" / "config.json").write_text(json.dumps(backwards.to_json()))
    command = read_folder(folder / "plain").command
    assert command.startswith("python -c ")
    assert "train_run(RunFolder(Path(" in command


def test_a_pretrained_run_has_no_command_that_would_train_another(folder):
    (folder / "plain" / "config.json").write_text(json.dumps(DinoConfig().to_json()))
    assert read_folder(folder / "plain").command is None


def test_a_measured_model_comes_back_as_it_was_written(folder):
    measured = read_measured(folder / "measured")
    assert measured.heads.label == "a model"
    assert measured.heads.grids == dict.fromkeys(range(6), (8, 8))
    assert measured.heads.config == {"seed": 7}
    assert measured.command == "nearsight measure 'a model'"
    (folder / "measured" / "measured.json").unlink()  # of an older nearsight
    assert read_measured(folder / "measured").heads.label == "measured"


def test_the_command_writes_one_page_and_says_where(folder, capsys):
    assert main(["report", "measured", "--out", "elsewhere", "--json", "--device", "cpu"]) == 0
    told = json.loads(capsys.readouterr().out)
    page = folder / "elsewhere" / "report.html"
    assert told == {
        "page": "elsewhere/report.html",
        "kind": "measured",
        "title": "a model",
        "bytes": page.stat().st_size,
    }
    assert [path.name for path in (folder / "elsewhere").iterdir()] == ["report.html"]
    assert "nearsight measure &#x27;a model&#x27;" in page.read_text(encoding="utf-8")


def test_the_page_of_what_measure_leaves_is_the_page_that_measure_wrote(tmp_path, monkeypatch):
    """Down to the byte, the attention explorer included."""
    monkeypatch.setattr("nearsight.commands.measured.write_figures", lambda *_, **__: ())
    monkeypatch.chdir(tmp_path)
    assert main(["measure", "compact_vit", "--num-images", "2", "--out", "measured", "--device", "cpu"]) == 0
    page = tmp_path / "measured" / "report.html"
    before = page.read_bytes()
    assert b"nearsight-explorer" in before
    page.unlink()
    assert main(["report", "measured", "--device", "cpu"]) == 0
    assert page.read_bytes() == before


def test_several_side_by_side_have_labels_of_their_own(folder, make_model):
    write_run(folder / "other" / "cut", make_model("cut", lowest=0.1, seed=4))
    contents = read_folders([Path("cut"), Path("other/cut"), Path("measured")])
    assert contents.kind == "several"
    assert [model.label for model in contents.models] == ["cut", "other/cut", "a model"]
    assert contents.command == "nearsight report --compare cut other/cut measured"
    assert [model.label for model in read_folder(folder).models] == ["cut", "a model", "plain"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "no folder is named"),
        (("nowhere",), "nowhere is not a folder"),
        (("empty",), "holds nothing to report on"),
        (("plain", "cut"), "takes one folder"),
        (("--compare", "plain"), "needs two folders or more"),
        (("plain", "--compare", "plain", "cut"), "do not go together"),
        (("plain", "--out", "plain/heads.csv"), "is a file"),
        (("half",), "is not a complete run folder"),
        (("damaged",), "measured.json is damaged"),
        (("newer",), "update nearsight"),
        (("--compare", "plain", "study"), "not a single run"),
        (("--compare", "plain", "cut", "./plain"), "names plain more than once; name each folder once"),
    ],
)
def test_bad_input_is_one_line_and_writes_nothing(folder, arguments, words, capsys):
    for name in ("empty", "half", "damaged", "newer", "study"):
        (folder / name).mkdir()
    (folder / "half" / "config.json").write_text("{}")
    (folder / "study" / "study.json").write_text("{}")
    for name, text in (("damaged", "{"), ("newer", '{"schema": 99}')):
        (folder / name / "heads.csv").write_text("epoch\n")
        (folder / name / "measured.json").write_text(text)
    before = sorted(folder.rglob("*"))
    assert words in complaint(*arguments, capsys=capsys)
    assert sorted(folder.rglob("*")) == before


def test_a_committed_simulation_gives_its_verdict():
    source = RESULTS / "spatial-structure" / "transfer"
    contents = read_folder(source)
    assert contents.kind == "simulation"
    html = contents.html()
    results = SimulationResults.read(source)
    assert simulation_verdicts(results).markdown().splitlines()[2] in html
    assert "nearsight study run transfer --seeds" in html
    assert "vega" not in re.sub(r"<(script|style)\b.*?</\1>", "", html, flags=re.DOTALL)
    assert len(html) < 1_000_000  # without charts, without their library


def test_a_study_that_is_damaged_is_refused(tmp_path):
    (tmp_path / "study.json").write_text("[]")
    with pytest.raises(InputError, match="does not describe a study"):
        read_folder(tmp_path)


def test_a_run_without_measured_heads_says_how_to_measure_them(folder, capsys):
    (folder / "plain" / "heads.csv").unlink()
    assert "nearsight measure plain does, with a page" in complaint("plain", capsys=capsys)
