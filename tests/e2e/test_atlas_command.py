"""`nearsight atlas`: a list of models on the same pictures, interrupted and continued, with models that fail."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import timm
import torch
from safetensors.torch import save_file

from nearsight.cli import main
from nearsight.commands import atlasing
from nearsight.commands.atlasing import PREPARATIONS, Atlas, Job
from nearsight.commands.measuring import Prepared
from nearsight.errors import InputError
from nearsight.files import canonical_hash
from nearsight.lens import HeadTable, Shards
from nearsight.lens.perimage import PerImage
from nearsight.metrics import Moments
from nearsight.models import create_model
from nearsight.models.lists import find_list, ready_lists
from nearsight.probe.frozen import weights_hash
from nearsight.report.atlas import AtlasModel
from nearsight.report.atlas_page import AtlasReport
from nearsight.report.inputs import ModelHeads
from nearsight.study.lock import Locks
from nearsight.study.statistics import mean_interval

BASELINE, MODERN = "compact_vit.baseline_cifar100", "compact_vit.modern_cifar100"
FILES = ("atlas.csv", "atlas.md", "models.csv", "models.md", "atlas-heads.csv", "report.html")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write_list(*tables: str, name: str = "own.toml") -> str:
    Path(name).write_text("\n".join(f"[[model]]\n{table}\n" for table in tables), encoding="utf-8")
    return name


def run(*arguments: str, code: int = 0) -> None:
    assert main(["atlas", "--out", "out", "--num-images", "6", "--device", "cpu", *arguments]) == code


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The labels of the models that are measured, in this process, as they are."""
    labels: list[str] = []
    write: Callable[..., None] = Atlas._write

    def noted(self: Atlas, one: Prepared, *rest: Any) -> None:
        write(self, one, *rest)
        labels.append(one.subject.label)

    monkeypatch.setattr(Atlas, "_write", noted)
    return labels


@pytest.fixture
def shards(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Those that are measured in this process, of two pictures each."""
    said: list[str] = []
    keep: Callable[..., Path] = Shards.keep

    def noted(self: Shards, shard: int, table: HeadTable) -> Path:
        said.append(f"{self.folder.parent.name.rpartition('-')[0]} {shard}")
        return keep(self, shard, table)

    monkeypatch.setattr(Shards, "keep", noted)
    monkeypatch.setattr(atlasing, "PICTURES_PER_SHARD", 2)
    monkeypatch.setattr(atlasing, "_SECONDS_BETWEEN_LOOKS", 0.01)
    return said


def folder_of(label: str) -> Path:
    (found,) = Path("out/models").glob(f"{label}-????")
    return found


def test_the_zoo_is_measured_without_network(measured: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    run("zoo", "--preparations")
    printed = capsys.readouterr().out
    rows = pd.read_csv("out/atlas.csv").set_index("label")
    models = find_list("zoo").models
    assert list(rows.index[:3]) == [model.name for model in models]
    assert dict(rows["kind"].value_counts()) == {"trained": 3, "random": 2, "preparation": 9}
    assert "Preparation counts" in printed
    assert len(measured) == len(rows)
    for model in models:
        row, table = (
            rows.loc[model.name],
            HeadTable.load(next(Path("out/models").glob(f"{_slug(model.name)}-????")) / "heads.npz"),
        )
        layer, head = np.unravel_index(np.nanargmin(table.mad), table.mad.shape)
        assert (row["min_mad_layer"], row["min_mad_head"]) == (layer, head)
        assert row["min_mad_mean"] == pytest.approx(table.mad.min(), rel=1e-9)
        assert row["min_mad_low"] < row["min_mad_mean"] < row["min_mad_high"]
        assert row["min_mad_patches"] == pytest.approx(table.mad.min() * np.hypot(7, 7), rel=1e-9)
        assert row["min_mad_pixels"] == pytest.approx(4 * row["min_mad_patches"], rel=1e-9)
        assert table.per_image is not None
        found = mean_interval(table.per_image.mad.astype(np.float64).mean((1, 2)))
        assert (row["mean_mad_low"], row["mean_mad_high"]) == pytest.approx((found.low, found.high), rel=1e-6)
        assert row["digest"] == weights_hash(create_model(model.model, pretrained=True))
        assert row["num_images"] == 6
        assert row["less_beside"] < 0  # random weights look farther
    heads = pd.read_csv("out/atlas-heads.csv")
    assert len(heads) == 64 * len(rows)
    assert {"mad_patches", "mad_pixels", "share_self"} <= set(heads)
    prepared = pd.read_csv("out/preparations.csv")
    assert len(prepared) == 3 * len(PREPARATIONS)
    page = Path("out/report.html").read_text(encoding="utf-8")
    for text in ("What each model is", "Apache-2.0", "2605.16390", rows["digest"].iloc[0][:12], "random weights"):
        assert text in page
    certificate = json.loads(Path("out/provenance.json").read_text())
    assert certificate["weights"] == rows["digest"].to_dict()
    assert [record["num"] for record in certificate["images"]] == [6]
    assert certificate["commit"]
    assert "Without sinks" in printed
    for name in (*FILES, "figures/atlas-depth.png", "figures/atlas-depth.svg", "figures/atlas-kinds.png"):
        assert (Path("out") / name).stat().st_size > 0
    # Again: nothing is left to do, and nothing changes.
    before = {path: path.read_bytes() for path in Path("out").rglob("*") if path.is_file()}
    measured.clear()
    run("zoo", "--preparations")
    assert measured == []
    assert before == {path: path.read_bytes() for path in Path("out").rglob("*") if path.is_file()}


def _slug(name: str) -> str:
    from nearsight.commands.options import short_name

    return short_name(name)


def test_only_what_is_missing_is_measured(measured: list[str]) -> None:
    models = write_list(f'model = "{BASELINE}"\nlabel = "one"', f'model = "{MODERN}"\nlabel = "two"')
    run(models, "--no-random")
    assert measured == ["one", "two"]
    shutil.rmtree(folder_of("two"))
    run(models, "--no-random")
    assert measured == ["one", "two", "two"]
    run(models, "--no-random", "--what", "quantiles")  # something else is measured
    assert measured[3:] == ["one", "two"]
    (folder_of("one") / "heads.npz").write_bytes(b"damaged")
    run(models, "--no-random", "--what", "quantiles")
    assert measured[5:] == ["one"]


def test_what_is_said_of_a_model_needs_no_measuring(measured: list[str]) -> None:
    run(write_list(f'model = "{BASELINE}"\nlabel = "one"'), "--no-random")
    run(write_list(f'model = "{BASELINE}"\nlabel = "one"\nlicence = "MIT"'), "--no-random")
    assert measured == ["one"]
    assert "MIT" in Path("out/models.md").read_text()


def test_a_model_that_fails_is_named_and_the_others_go_on(capsys: pytest.CaptureFixture[str]) -> None:
    models = write_list('model = "vit_tinny_patch16_224"', f'model = "{MODERN}"', 'model = "resnet18"\nimage_size = 64')
    run(models, "--json", code=1)
    result = json.loads(capsys.readouterr().out)
    assert [row["label"] for row in result["models"] if row["kind"] != "failed"] == [
        MODERN,
        "compact_vit, random weights",
    ]
    assert set(result["failed"]) == {"vit_tinny_patch16_224", "resnet18"}
    assert "did you mean 'vit_tiny_patch16_224'" in result["failed"]["vit_tinny_patch16_224"]
    assert "vit_tinny_patch16_224" in Path("out/report.html").read_text(encoding="utf-8")
    rows = pd.read_csv("out/atlas.csv").set_index("label")
    assert list(rows.index[rows["kind"] == "failed"]) == ["vit_tinny_patch16_224", "resnet18"]
    assert "no attention" in rows.loc["resnet18", "problem"]


def test_if_all_fail_there_is_one_line_and_no_page(capsys: pytest.CaptureFixture[str]) -> None:
    run(write_list('model = "vit_tinny_patch16_224"'), code=2)
    assert capsys.readouterr().err.splitlines()[-1].startswith("nearsight: no model of own.toml could be measured")
    assert not Path("out/report.html").exists()


def test_an_interruption_between_models_loses_nothing(monkeypatch: pytest.MonkeyPatch, measured: list[str]) -> None:
    models = write_list(f'model = "{BASELINE}"\nlabel = "one"', f'model = "{MODERN}"\nlabel = "two"')
    opened = Atlas.opened

    def interrupted(self: Atlas, job: Job, device: torch.device) -> Prepared:
        if job.label == "two":
            raise KeyboardInterrupt
        return opened(self, job, device)

    with monkeypatch.context() as patch:
        patch.setattr(Atlas, "opened", interrupted)
        run(models, "--no-random", code=130)
    assert measured == ["one"]
    assert not Path("out/atlas.csv").exists()
    run(models, "--no-random")
    assert measured == ["one", "two"]


def test_an_interruption_within_a_model_loses_the_shard_that_was_in_work(
    monkeypatch: pytest.MonkeyPatch, shards: list[str], measured: list[str]
) -> None:
    models = write_list(f'model = "{BASELINE}"\nlabel = "one"')
    run(models, "--no-random", "--out", "whole")
    assert shards == ["one 0", "one 1", "one 2"]
    look = atlasing.measure_watched

    def interrupted(*arguments: Any) -> HeadTable:
        if len(shards) == 5:
            raise KeyboardInterrupt
        return look(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(atlasing, "measure_watched", interrupted)
        run(models, "--no-random", code=130)
    assert measured == ["one"]
    run(models, "--no-random")
    assert shards[3:] == ["one 0", "one 1", "one 2"]
    assert measured == ["one", "one"]
    assert not list(Path("out").rglob("*-of-3.*"))
    pd.testing.assert_frame_equal(pd.read_csv("out/atlas.csv"), pd.read_csv("whole/atlas.csv"))


def test_two_processes_at_one_folder_share_the_work(
    monkeypatch: pytest.MonkeyPatch, shards: list[str], measured: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """The other one begins with the last shard, and is slow with it."""
    models = write_list(f'model = "{BASELINE}"\nlabel = "one"')
    look, cell = atlasing.measure_watched, f"one-{canonical_hash('one', 4)}-2"
    other = Locks(Path("out/locks"), token="other")

    def meanwhile(*arguments: Any) -> HeadTable:
        other.take(cell)
        return look(*arguments)

    def waited(seconds: float) -> None:
        assert shards == ["one 0", "one 1"]
        assert measured == []
        other.release(cell)
        monkeypatch.setattr(atlasing.time, "sleep", pytest.fail)

    monkeypatch.setattr(atlasing, "measure_watched", meanwhile)
    monkeypatch.setattr(atlasing, "time", SimpleNamespace(sleep=waited))
    run(models, "--no-random")
    assert shards == ["one 0", "one 1", "one 2"]
    assert measured == ["one"]
    assert "one, shard 2 of 3: another process is at it; waiting" in capsys.readouterr().err


def test_processes_give_the_same_numbers() -> None:
    models = write_list(f'model = "{BASELINE}"', 'model = "no_such_model"', f'model = "{MODERN}"')
    run(models, "--no-random", code=1)
    alone = pd.read_csv("out/atlas-heads.csv")
    shutil.rmtree("out")
    run(models, "--no-random", "--engine", "processes", "--workers", "2", code=1)
    pd.testing.assert_frame_equal(pd.read_csv("out/atlas-heads.csv"), alone, rtol=1e-5)


def test_checkpoints_and_preparations_of_the_list_are_used(folder: Path) -> None:
    torch.manual_seed(3)
    model = timm.create_model("compact_vit")
    (folder / "weights").mkdir()
    save_file(model.state_dict(), folder / "weights" / "own.safetensors")
    models = write_list(
        'model = "compact_vit"\nlabel = "own"\ncheckpoint = "weights/own.safetensors"\n'
        "mean = [0.1, 0.2, 0.3]\nstd = [1.0, 1.0, 2.0]"
    )
    run(models)
    rows = pd.read_csv("out/atlas.csv").set_index("label")
    assert rows.loc["own", "digest"] == weights_hash(model)
    assert rows.loc["own", "mean"] == "0.1 0.2 0.3"
    assert rows.loc["own", "std"] == "1.0 1.0 2.0"
    assert rows.loc["compact_vit, random weights", "digest"] != weights_hash(model)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("x" * 2**20 + "x", "bytes"),
        ("[[model]\n", "not a TOML file"),
        ("\udcff", "not a TOML file"),
        ("a = " + "[" * 5000, "not a TOML file"),
        ("about = 'nothing'", "names no model"),
        ("model = 3", "names no model"),
        ("[[model]]\nmodel = 'compact_vit'\ncolour = 'red'", "colour"),
        ("[[model]]\nlabel = 'compact_vit'", "model"),
        ("[[model]]\nmodel = ''", "not named"),
        ("[[model]]\nmodel = ['compact_vit']", "model"),
        ("[[model]]\nmodel = 'os:getcwd'", "do not run code"),
        ("[[model]]\nmodel = 'compact_vit'\nimage_size = 100000", "pixels"),
        ("[[model]]\nmodel = 'compact_vit'\nmean = [0.5, 0.5, 0.5]", "std"),
        ("[[model]]\nmodel = 'compact_vit'\nnote = '" + "x" * 3000 + "'", "characters"),
        ("[[model]]\nmodel = 'compact_vit'\npretrained = true\ncheckpoint = 'a.pt'", "choose one"),
        ("[[model]]\nmodel = 'compact_vit'\n[[model]]\nmodel = 'compact_vit'", "both called"),
        ("surprise = 1\n[[model]]\nmodel = 'compact_vit'", "surprise"),
        ("[[model]]\nmodel = 'm'\n" * 1001, "1000 are the most"),
    ],
)
def test_bad_lists_are_one_line(text: str, problem: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("bad.toml").write_bytes(text.encode(errors="surrogateescape"))
    run("bad.toml", code=2)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("nearsight: bad.toml")
    assert problem in line
    assert not Path("out").exists()


@pytest.mark.parametrize("checkpoint", ["../outside.pt", "/dev/zero", "link.pt", "missing.pt"])
def test_checkpoints_outside_the_lists_folder_are_not_read(folder: Path, checkpoint: str) -> None:
    (folder / "inside").mkdir()
    torch.save({}, folder / "outside.pt")
    (folder / "inside" / "link.pt").symlink_to(folder / "outside.pt")
    models = write_list(
        f'model = "compact_vit"\nlabel = "bad"\ncheckpoint = "{checkpoint}"',
        f'model = "{MODERN}"',
        name="inside/own.toml",
    )
    run(models, "--no-random", code=1)
    rows = pd.read_csv("out/atlas.csv").set_index("label")
    assert "is not" in rows.loc["bad", "problem"]
    assert rows.loc[MODERN, "min_mad_mean"] > 0


def test_mistakes_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["zo"], ["nowhere.toml"], ["."], ["zoo", "--what", "rollout"], ["zoo", "--batch-size", "0"]):
        run(*arguments, code=2)
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("nearsight: ")
    assert main(["atlas", "zo", "--out", "out"]) == 2
    assert "did you mean 'zoo'" in capsys.readouterr().err
    assert not Path("out").exists()


def test_ready_lists_name_weights_that_timm_knows() -> None:
    known = set(timm.list_pretrained())
    for name in ready_lists():
        for model in find_list(name).models:
            assert model.model in known
            assert model.citation
            assert model.trained_on
            assert model.untrained() is not None


def test_a_small_one_says_the_same_and_is_written_again_from_its_files() -> None:
    models = write_list(f'model = "{MODERN}"\nlabel = "one"', 'model = "no_such_model"')
    run(models, "--no-random", "--out", "large", code=1)
    large = pd.read_csv("large/atlas.csv")
    assert np.isfinite(large.loc[large["kind"] != "failed", "sink_change_low"]).all()
    run(models, "--no-random", "--small", code=1)
    models = write_list(f'model = "{MODERN}"\nlabel = "one"\nnote = "corrected"', 'model = "no_such_model"')
    run(models, "--no-random", "--small", code=1)
    assert HeadTable.load(folder_of("one") / "heads.npz").per_image is None
    pd.testing.assert_frame_equal(pd.read_csv("out/atlas.csv").drop(columns="note"), large.drop(columns="note"))
    files = AtlasReport.read(Path("out")).write(Path("again"))
    for path in files:
        assert path.read_bytes() == (Path("out") / path.relative_to("again")).read_bytes(), path
    assert "corrected" in Path("again/models.md").read_text(encoding="utf-8")
    assert {path.name for path in files} >= {*FILES, "provenance.json", "atlas-kinds.svg"}
    (folder_of("one") / "pictures.npz").write_bytes(b"damaged")
    with pytest.raises(InputError, match=r"pictures\.npz is damaged"):
        AtlasReport.read(Path("out"))


def test_the_head_that_sinks_move_is_measured_on_pictures_that_did_not_choose_it() -> None:
    """By loops over pictures; one patch of every picture is a sink for all."""
    draw = np.random.default_rng(0)
    mad, change = draw.uniform(0.2, 0.4, (40, 2, 3)), draw.normal(0.02, 0.05, (40, 2, 3))
    change[:, 1, 2] -= 0.06
    kept = PerImage.of(np.arange(40, dtype=np.uint64), mad, mad, {"mad_without_sinks": mad + change})
    moments = Moments.of(mad)
    extra = {"mad_without_sinks": (mad + change).mean(0)}
    table = HeadTable(("a", "b"), moments, moments, extra=extra, per_image=kept)
    heads = ModelHeads(label="m", heads=table.to_frame().assign(epoch=0), per_image=kept)
    model = AtlasModel(heads=heads, table=table, kind="trained")
    changes = model.sink_changes
    assert changes is not None
    halves = [[number for number in range(40) if number % 2 == part] for part in (0, 1)]
    values = np.zeros(40)
    for own, other in (halves, halves[::-1]):
        best = max(range(6), key=lambda head: abs(np.mean([change[n].flat[head] for n in other])))
        values[own] = [change[n].flat[best] for n in own]
    most, local = changes
    place = int(np.abs(change.mean(0)).argmax())
    assert (most.layer, most.head) == divmod(place, 3)
    assert most.estimate.value == pytest.approx(change.mean(0).flat[place], rel=1e-9)
    assert most.estimate.half_width == pytest.approx(mean_interval(values).half_width, rel=1e-5)
    place = int(mad.mean(0).argmin())
    assert (local.layer, local.head) == divmod(place, 3)
    assert local.estimate.half_width == pytest.approx(
        mean_interval(change[:, place // 3, place % 3]).half_width, rel=1e-5
    )


def test_a_model_without_single_images_has_no_interval() -> None:
    run(write_list(f'model = "{MODERN}"\nlabel = "one"'), "--no-random")
    from dataclasses import replace

    from nearsight.report.inputs import read_measured

    heads, table = read_measured(folder_of("one")).heads, HeadTable.load(folder_of("one") / "heads.npz")
    found = AtlasModel(heads=replace(heads, per_image=None), table=table, kind="trained").all_heads()
    assert found.value == pytest.approx(table.mad.mean())
    assert not found.has_interval
