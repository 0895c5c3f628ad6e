"""`nearsight measure --shards`: job by job or all at once, killed and continued, in processes that die."""

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from nearsight.cli import main
from nearsight.commands.measuring import ShardMeasuring
from nearsight.lens import HeadTable

OWN_MODELS = """
import multiprocessing, os, signal
from pathlib import Path
from nearsight.models import create_model

def two_layers():
    return create_model("compact_vit", depth=2, embed_dim=16, num_heads=2)

def deadly():
    model = two_layers()
    model.register_forward_pre_hook(kill_a_worker_once)
    return model

def kill_a_worker_once(model, inputs):
    # In the middle of measuring: what tries a model out looks at one or two images.
    if multiprocessing.parent_process() is not None and len(inputs[0]) > 2 and not Path("killed").exists():
        Path("killed").write_text(str(os.getpid()))
        os.kill(os.getpid(), signal.SIGKILL)
"""
TWO, DEADLY = "own_models_of_shards:two_layers", "own_models_of_shards:deadly"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_models_of_shards.py").write_text(OWN_MODELS)
    (tmp_path / "images").mkdir()
    random = np.random.default_rng(0)
    for number in range(11):
        pixels = random.integers(0, 256, (40, 40, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / "images" / f"{number:02}.png")
    for name, nothing in (("write_figures", ()), ("write_page", None), ("explorer_of", None)):
        monkeypatch.setattr(f"nearsight.commands.measured.{name}", lambda *_, nothing=nothing, **__: nothing)
    yield tmp_path
    sys.modules.pop("own_models_of_shards", None)


def run(*arguments: str) -> None:
    assert main(["measure", *arguments, "--images", "images", "--device", "cpu"]) == 0


def stored(path: str) -> dict[str, Any]:
    with np.load(path) as archive:
        return dict(archive)


def assert_equal(one: dict[str, Any], other: dict[str, Any], tolerance: float = 0.0) -> None:
    assert one.keys() == other.keys()
    for name, values in one.items():
        if values.dtype.kind == "f":
            np.testing.assert_allclose(values, other[name], rtol=tolerance, atol=tolerance, err_msg=name)
        else:
            np.testing.assert_array_equal(values, other[name])


def test_jobs_of_an_array_and_the_run_that_merges_them(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = (TWO, "compact_vit", "--what", "shares", "quantiles", "--layers", "0,1")
    run(*asked, "--out", "whole")
    for shard in (3, 1, 0):
        capsys.readouterr()
        run(*asked, "--out", "out", "--shards", "4", "--shard", str(shard), "--json")
        files = json.loads(capsys.readouterr().out)["files"]
        assert [HeadTable.load(path).num_images for path in files] == [3 if shard else 2] * 2
    assert not list(folder.glob("out/**/heads.npz"))
    assert not (folder / "out" / "report.html").exists()
    # One is damaged, one was never measured: these two are, of both models, in batches of another size, and no other.
    damaged = Path(files[1])
    damaged.write_bytes(damaged.read_bytes()[:-9])
    capsys.readouterr()
    run(*asked, "--out", "out", "--shards", "4", "--batch-size", "2")
    measured = capsys.readouterr().err.splitlines()
    expected = [f"{TWO}, shard 2 of 4", *(f"compact_vit (random weights), shard {number} of 4" for number in (0, 2))]
    assert [line.startswith(start) for line, start in zip(measured, expected, strict=True)] == [True] * 3
    for name in ("own_models_of_shards-two_layers", "compact_vit"):
        assert_equal(stored(f"out/{name}/heads.npz"), stored(f"whole/{name}/heads.npz"), tolerance=1e-6)
    before = stored("out/compact_vit/heads.npz")
    monkeypatch.setattr(ShardMeasuring, "_do", lambda *_: pytest.fail("all was done"))
    run(*asked, "--out", "out", "--shards", "4")
    assert_equal(before, stored("out/compact_vit/heads.npz"))


def test_shards_are_of_one_model_and_one_set_of_images(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def num_measured(*arguments: str) -> int:
        capsys.readouterr()
        run(*arguments, "--out", "out", "--shards", "2", "--shard", "0")
        return capsys.readouterr().err.count("images measured")

    assert num_measured("compact_vit") == 1
    assert num_measured("compact_vit") == 0
    assert num_measured("compact_vit", "--batch-size", "1") == 0
    assert num_measured("compact_vit", "--seed", "1") == 1
    assert num_measured("compact_vit", "--layers", "0") == 1
    assert num_measured("compact_vit", "--what", "shares") == 1
    (folder / "elsewhere").mkdir()
    shutil.move(folder / "images", folder / "elsewhere" / "images")
    shutil.copytree(folder / "elsewhere" / "images", folder / "images")
    assert num_measured("compact_vit") == 0  # where they are does not matter
    (folder / "images" / "03.png").rename(folder / "images" / "3.png")
    assert num_measured("compact_vit") == 1


def test_a_job_decodes_its_own_images_alone(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "images" / "07.png").write_bytes(b"no picture")
    run(TWO, "--out", "out", "--shards", "11", "--shard", "6")
    arguments = [TWO, "--images", "images", "--device", "cpu", "--out", "out", "--shards", "11"]
    assert main(["measure", *arguments]) == 2
    assert "images/07.png cannot be read" in capsys.readouterr().err
    assert len(list((folder / "out").rglob("*.npz"))) == 7


@pytest.mark.faults  # each process imports everything anew, which takes seconds
def test_the_shard_of_a_process_that_was_killed_is_measured_again(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(DEADLY, "--out", "processes", "--shards", "3", "--engine", "processes", "--workers", "1")
    said = capsys.readouterr().err
    killed = (folder / "killed").read_text()
    assert f"{DEADLY}, shard 0 of 3 is measured again, since worker process {killed} was killed by SIGKILL" in said
    assert "shard 0 of 3 measured, 3 of 3 done" in said  # it waited, and the others went on
    run(DEADLY, "--out", "local", "--shards", "3")
    assert_equal(stored("processes/heads.npz"), stored("local/heads.npz"), tolerance=1e-6)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--shard", "0"], "--shard is for images in shards; say with --shards how many"),
        (["--engine", "processes"], "--engine is for images in shards"),
        (["--shards", "0"], "--shards is 0, but must be at least 1"),
        (["--shards", "4", "--shard", "4"], "--shard is 4, but 4 shards count from 0 to 3"),
        (["--shards", "4", "--shard", "1", "--engine", "processes"], "--shard is one job, for one process"),
        (["--shards", "4", "--workers", "2"], "--workers is for --engine processes, not for local"),
        (["--shards", "4", "--address", "local"], "--address is for --engine ray, not for local"),
        (["--shards", "4", "--engine", "processes", "--address", "local"], "is for --engine ray, not for processes"),
        (["--shards", "4", "--what", "shares", "cka"], "--what cka is not divided into shards"),
        (["--shards", "12"], "11 images cannot be divided into 12 shards"),
        (["--shards", "2", "--engine", "dask"], "--engine"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_does_not_go_together_is_refused(
    arguments: list[str], words: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["measure", TWO, *arguments, "--images", "images", "--device", "cpu", "--out", "out"]) == 2
    said = capsys.readouterr().err
    assert words in said
    assert said.count("\n") == 1
    assert not (folder / "out").exists()
