"""`nearsight maps`: the file holds what `attention_maps` returns, and its size is known before it is written."""

import json
import re
import shutil
from collections import namedtuple
from pathlib import Path

import pytest
import timm
import torch
from PIL import Image

import nearsight
from nearsight.cli import main

MODEL = "vit_tiny_patch16_224"


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    folder = tmp_path / "pictures"
    folder.mkdir()
    for number in range(3):
        pixels = torch.randint(0, 256, (32, 32, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(number))
        Image.fromarray(pixels.numpy()).save(folder / f"{number}.png")
    return folder


def call(out: Path, *options: str) -> int:
    return main(["maps", MODEL, "--out", str(out), "--image-size", "32", "--device", "cpu", *options])


def test_the_file_holds_the_maps_of_the_named_layers_heads_and_images(
    tmp_path: Path, pictures: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "new" / "maps.safetensors"
    options = ["--images", str(pictures), "--layers", "-1,", "2", "--heads", "0,2", "--num-images", "2", "--seed", "3"]
    assert call(out, *options) == 0
    printed = capsys.readouterr()
    maps = nearsight.open_maps(out)
    assert [(layer.name, layer.heads) for layer in maps] == [("blocks.2.attn", (0, 2)), ("blocks.11.attn", (0, 2))]
    torch.manual_seed(3)
    model = timm.create_model(MODEL, img_size=32)
    config = timm.data.resolve_data_config({"input_size": (3, 32, 32)}, model=model)
    prepare = timm.data.create_transform(**config)
    images = torch.stack([prepare(Image.open(pictures / f"{number}.png")) for number in range(2)])
    for found, expected in zip(
        maps, nearsight.attention_maps(model, images, layers=[2, 11], heads=[0, 2]), strict=True
    ):
        torch.testing.assert_close(found.weights_BHQK, expected.weights_BHQK, rtol=1e-4, atol=1e-7)
    # What is printed is what there is: the size, said before, and the line that opens it.
    (said,) = re.findall(r"the maps of 2 images need ([\d.]+) kB", printed.err)
    assert float(said) == pytest.approx(out.stat().st_size / 1e3, abs=0.051)
    (line,) = re.findall(r"In Python: (.*)", printed.out)
    names: dict[str, object] = {"nearsight": nearsight}
    exec(line, names)
    assert len(names["maps"]) == 2  # type: ignore[arg-type]
    assert "[2 images, 2 heads, 5 queries, 4 patches] of blocks.2.attn" in printed.out
    assert [row.split()[:3] for row in printed.out.splitlines()[1:3]] == [
        ["2", "blocks.2.attn", "2"],
        ["11", "blocks.11.attn", "2"],
    ]


def test_as_one_object(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "maps.safetensors"
    assert call(out, "--num-images", "1", "--layers", "4", "--dtype", "bfloat16", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["bytes"] == out.stat().st_size
    assert (found["num_images"], found["dtype"], found["file"]) == (1, "bfloat16", str(out))
    (layer,) = found["layers"]
    assert layer == {
        "layer": 4,
        "name": "blocks.4.attn",
        "heads": [0, 1, 2],
        "queries": [2, 2],
        "keys": [2, 2],
        "others": ["CLS"],
    }
    assert nearsight.open_maps(out)[0].weights_BHQK.dtype == torch.bfloat16


def test_what_does_not_fit_on_the_disk_is_refused_before_anything_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10_000, 0, 10_000))
    assert call(tmp_path / "new" / "maps.safetensors", "--num-images", "3") == 2
    said = capsys.readouterr().err
    assert re.search(rf"the maps need [\d.]+ kB, but {tmp_path} has 10.0 kB left; choose fewer --num-images", said)
    assert not (tmp_path / "new").exists()


def test_other_files_are_not_replaced_and_maps_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"precious")
    assert call(weights, "--num-images", "1") == 2
    assert "is there and is no file of attention maps; choose another --out" in capsys.readouterr().err
    assert weights.read_bytes() == b"precious"
    assert call(tmp_path, "--num-images", "1") == 2
    assert "is a folder; give the name of a file" in capsys.readouterr().err
    for count in (1, 2):
        assert call(tmp_path / "maps.safetensors", "--num-images", str(count)) == 0
        assert len(nearsight.open_maps(tmp_path / "maps.safetensors")[0].weights_BHQK) == count


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--heads", "two"], "--heads two: heads are named by their numbers, from 0"),
        (["--heads", "7"], "head 7 is not one of the 3 heads of blocks.0.attn, which count from 0"),
        (["--layers", "12"], "the layers of vit_tiny_patch16_224 (random weights) count from 0 to 11"),
        (["--num-images", "0"], "--num-images is 0, but must be at least 1"),
    ],
)
def test_mistakes_are_one_line_and_leave_nothing(
    tmp_path: Path, options: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(tmp_path / "maps.safetensors", *options) == 2
    assert said in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_without_a_file_to_write_there_is_nothing_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["maps", MODEL]) == 2
    assert "--out" in capsys.readouterr().err
    assert main(["maps", MODEL, "vit_small_patch16_224", "--out", "maps.safetensors"]) == 2
    assert "maps are written of one model, but 2 are named" in capsys.readouterr().err
