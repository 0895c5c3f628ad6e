"""`nearsight measure --engine ray`: shards measured by the workers of a real Ray cluster, one of which is killed."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from nearsight.cli import main
from nearsight.lens import HeadTable

pytestmark = pytest.mark.faults
ray = pytest.importorskip("ray", reason="the extra `ray` is not installed")

OWN_MODELS = """
import os, signal
from pathlib import Path
from nearsight.models import create_model

def two_layers():
    return create_model("compact_vit", depth=2, embed_dim=16, num_heads=2)

def deadly():
    model = two_layers()
    model.register_forward_pre_hook(kill_a_worker_once)
    return model

def another_elsewhere():
    return create_model("compact_vit", depth=2, embed_dim=32 if is_worker() else 16, num_heads=2)

def is_worker():
    return Path("driver").read_text() != str(os.getpid())

def kill_a_worker_once(model, inputs):
    # In the middle of measuring: what tries a model out looks at one or two images.
    if is_worker() and len(inputs[0]) > 2 and not Path("killed").exists():
        Path("killed").write_text(str(os.getpid()))
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_models_on_ray.py").write_text(OWN_MODELS)
    (tmp_path / "driver").write_text(str(os.getpid()))
    (tmp_path / "images").mkdir()
    random = np.random.default_rng(0)
    for number in range(11):
        pixels = random.integers(0, 256, (40, 40, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / "images" / f"{number:02}.png")
    yield tmp_path
    sys.modules.pop("own_models_on_ray", None)


@pytest.fixture
def cluster() -> Iterator[None]:
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    yield
    ray.shutdown()


@pytest.mark.usefixtures("cluster")
def test_the_shard_of_a_worker_that_was_killed_is_measured_again(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["measure", "own_models_on_ray:deadly", "--images", "images", "--seed", "3"]
    assert main([*asked, "--device", "cpu", "--out", "whole", "--shards", "3"]) == 0
    capsys.readouterr()
    assert main([*asked, "--device", "cpu", "--out", "out", "--shards", "3", "--engine", "ray"]) == 0
    said = capsys.readouterr().err
    assert (folder / "killed").exists()
    assert "is measured again" in said
    one, other = (HeadTable.load(folder / name / "heads.npz") for name in ("whole", "out"))
    assert other.num_images == 11
    np.testing.assert_allclose(other.mad, one.mad, rtol=1e-6)
    np.testing.assert_allclose(other.entropy, one.entropy, rtol=1e-6)
    # What a worker refuses is refused here.
    asked[1] = "own_models_on_ray:another_elsewhere"
    capsys.readouterr()
    assert main([*asked, "--device", "cpu", "--out", "other", "--shards", "2", "--engine", "ray"]) == 2
    assert "differ each time they are opened" in capsys.readouterr().err


def test_what_ray_cannot_do_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["measure", "own_models_on_ray:two_layers", "--images", "images", "--out", "out", "--engine", "ray"]
    assert main(asked) == 2
    assert "say with --shards" in capsys.readouterr().err
    assert main([*asked, "--shards", "2", "--device", "mps"]) == 2
    assert "mps" in capsys.readouterr().err
