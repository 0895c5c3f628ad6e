"""`nearsight measure` with models and images from everywhere, alone and side by side."""

import dataclasses
import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from timm.data import create_transform
from torch import Tensor

import nearsight
from nearsight.cli import main
from nearsight.commands import measuring as command
from nearsight.lens import HeadTable
from nearsight.models import load_source
from nearsight.report import compare, read_heads
from nearsight.report.inputs import read_measured
from nearsight.report.page.folders import read_folders

OWN_MODELS = """
import torch
import torch.nn.functional as F

from nearsight.models import create_model

def two_layers():
    return create_model("compact_vit", depth=2, embed_dim=16, num_heads=2)

def three_layers():
    return create_model("compact_vit", depth=3, embed_dim=32, num_heads=4, patch_size=8)

class Unlearned(torch.nn.Module):
    def forward(self, images):
        tokens = F.avg_pool2d(images, 8).flatten(2).transpose(1, 2)[:, None]
        return F.scaled_dot_product_attention(tokens, tokens, tokens)

def without_parameters():
    return Unlearned()

def without_attention():
    model = create_model("test_resnet")
    model.pretrained_cfg["input_size"] = (3, 32, 32)
    return model
"""
TINY_RUN = [
    *("--model.depth", "1", "--model.width", "16", "--model.num-heads", "2", "--model.mlp-width", "16"),
    *("--data.num-train", "100", "--data.num-test", "20", "--protocol.max-epochs", "1", "--protocol.batch-size", "40"),
    *("--num-measured", "10", "--device", "cpu"),
]
TWO, THREE = "own_models_of_e2e:two_layers", "own_models_of_e2e:three_layers"
FEW = ("--num-images", "5", "--device", "cpu")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_models_of_e2e.py").write_text(OWN_MODELS)
    yield tmp_path
    sys.modules.pop("own_models_of_e2e", None)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the drawings, which take longer than all else: for tests of other things."""
    monkeypatch.setattr("nearsight.commands.measured.write_figures", lambda *_, **__: ())
    monkeypatch.setattr("nearsight.commands.measured.write_page", lambda path, **_: path.write_text("page"))


def result(*arguments: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["measure", *arguments, "--json"]) == 0
    printed: dict[str, Any] = json.loads(capsys.readouterr().out)
    return printed


def complaint(*arguments: str, capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    assert main(["measure", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("nearsight: ")
    assert captured.err.count("\n") == 1
    return captured.err


def files(folder: Path) -> set[str]:
    return {
        str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file() and "pycache" not in str(path)
    }


def test_a_model_without_parameters(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["measure", "own_models_of_e2e:without_parameters", "--image-size", "32", *FEW, "--out", "out"]) == 0
    assert "Page: " in capsys.readouterr().out


def test_models_of_different_shapes_side_by_side(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["measure", TWO, THREE, "compact_vit", "--out", "out", *FEW]) == 0
    shown = capsys.readouterr()
    out = folder / "out"
    names = ["own_models_of_e2e-two_layers", "own_models_of_e2e-three_layers", "compact_vit"]
    figures = {
        f"figures/{name}.{kind}"
        for name in ("heatmaps", "mad-entropy-plane", "mad-profiles")
        for kind in ("png", "svg")
    }
    tables = {f"{name}/{file}" for name in names for file in ("heads.csv", "heads.npz", "measured.json")}
    assert files(out) == {"report.html", "explorer.json", *figures, *tables}
    assert [len(read_heads(out / name / "heads.csv")) for name in names] == [4, 12, 64]
    tables_in_text = shown.out.split("\n\n")[0].splitlines()
    assert len(tables_in_text) == 3 + 8  # three lines of headings, and the layers of the deepest
    assert "–" in tables_in_text[-1]  # the others do not have that layer
    for label in (TWO, THREE, "compact_vit (random weights)"):
        assert label in tables_in_text[0]
        assert f"“{label}”" in shown.out
        assert f"{label}: 5 images measured in" in shown.err
    page = (out / "report.html").read_text()
    assert page.count("<svg") >= 4
    for label in (TWO, THREE, "compact_vit (random weights)"):
        assert label in page


def test_random_weights_are_asked_about_first_and_uniform_attention_is_given(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["measure", TWO, *FEW, "--out", "out"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[2:4]] == ["0", "1"]  # layers, as in heads.csv
    assert [line.split()[-1] for line in (lines[0], *lines[2:4])] == ["uniform", "0.418", "0.418"]
    assert lines[5] == f"“{TWO}” is indistinguishable from uniform attention: are these weights random?"
    assert lines[6].startswith("Did you mean --pretrained (in Python: pretrained=True)?")
    assert "is indistinguishable from uniform attention: are these weights random?" in (
        folder / "out" / "report.html"
    ).read_text(encoding="utf-8")
    found = result(TWO, *FEW, capsys=capsys)
    assert found["uniform"] == {"0": pytest.approx(0.417848, abs=1e-6), "1": pytest.approx(0.417848, abs=1e-6)}
    again = read_measured(folder / "out").heads  # from which a page is made later
    assert again.uniform == {0: found["uniform"]["0"], 1: found["uniform"]["1"]}


def test_random_models_of_different_grids_do_not_differ(capsys: pytest.CaptureFixture[str], quick: None) -> None:
    """Uniform attention has a distance of 0.418 on 8×8 patches and of 0.473 on 4×4: that says nothing about a model."""
    printed = result(TWO, THREE, "--out", "out", *FEW, capsys=capsys)
    assert printed["sentences"][0].startswith("No clear difference in locality")
    assert any("Their grids differ" in sentence for sentence in printed["sentences"])
    assert [model["label"] for model in printed["models"]] == [TWO, THREE]


def test_numbers_are_those_of_the_library(folder: Path, capsys: pytest.CaptureFixture[str], quick: None) -> None:
    """Prepared as the model's own config says, in whatever batches."""
    rng = np.random.default_rng(0)
    (folder / "images").mkdir()
    for number in range(5):
        pixels = rng.integers(0, 256, (50, 40 + number, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / "images" / f"{number}.png")
    torch.manual_seed(7)
    sourced = load_source("test_vit")
    prepare = create_transform(**sourced.data_config, is_training=False)
    pictures = [Image.open(path).convert("RGB") for path in sorted((folder / "images").iterdir())]
    expected = nearsight.measure(sourced.model, torch.stack([prepare(picture) for picture in pictures]))
    arguments = ("test_vit", "--images", "images", "--seed", "7", "--out", "out", "--device", "cpu")
    for batch_size in ("auto", "2"):
        printed = result(*arguments, "--batch-size", batch_size, capsys=capsys)
        frame = pd.DataFrame(printed["heads"])
        np.testing.assert_allclose(frame["mad"], expected.mad.flatten(), rtol=1e-6)
        np.testing.assert_allclose(frame["entropy"], expected.entropy.flatten(), rtol=1e-6)
        assert set(frame["num_images"]) == {5}
    table = HeadTable.load(folder / "out" / "heads.npz")
    np.testing.assert_allclose(table.mad, expected.mad, rtol=1e-6)
    assert table.layer_names == expected.layer_names
    described = ["out/measured.json", "out/explorer.json"]
    assert printed["files"] == ["out/heads.csv", "out/heads.npz", *described, "out/report.html"]


def test_random_weights_depend_on_the_seed_alone(capsys: pytest.CaptureFixture[str], quick: None) -> None:
    def heads(*arguments: str) -> list[float]:
        printed = result("compact_vit", "--out", "out", *FEW, *arguments, capsys=capsys)
        return [row["mad"] for row in printed["heads"]]

    torch.manual_seed(1)
    first = heads()
    torch.manual_seed(2)
    state = torch.get_rng_state()
    assert heads() == first
    assert torch.equal(torch.get_rng_state(), state)
    assert heads("--seed", "1") != first


@pytest.mark.parametrize("layers", [["2", "-3", "blocks.2.attn"], ["0,2"], ["blocks.0.attn, -1"]])
def test_chosen_layers_keep_their_numbers(
    layers: list[str], folder: Path, capsys: pytest.CaptureFixture[str], quick: None
) -> None:
    printed = result(THREE, "--layers", *layers, "--out", "out", *FEW, capsys=capsys)
    names = {(row["layer"], row["layer_name"]) for row in printed["heads"]}
    assert names == {(0, "blocks.0.attn"), (2, "blocks.2.attn")}
    assert HeadTable.load(folder / "out" / "heads.npz").layer_names == ("blocks.0.attn", "blocks.2.attn")
    assert set(read_heads(folder / "out" / "heads.csv")["layer"]) == {0, 2}


def test_own_weights(folder: Path, capsys: pytest.CaptureFixture[str], quick: None) -> None:
    torch.manual_seed(3)
    torch.save({"teacher": load_source(TWO).model.state_dict(), "epoch": 1}, "trained.pth")
    printed = result(TWO, "--checkpoint", "trained.pth", "--out", "out", *FEW, capsys=capsys)
    assert printed["label"] == f"{TWO} (trained.pth)"
    assert printed["notes"] == ["weights of trained.pth from the entry 'teacher'"]
    assert main(["measure", TWO, "--checkpoint", "trained.pth", "--out", "out", *FEW]) == 0
    assert "Note: own_models_of_e2e:two_layers (trained.pth): weights of trained.pth" in capsys.readouterr().out


def test_a_model_of_transformers(folder: Path, capsys: pytest.CaptureFixture[str], quick: None) -> None:
    transformers = pytest.importorskip("transformers", reason="needs transformers: pip install 'nearsight[hf]'")
    config = transformers.ViTMAEConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16, image_size=32, patch_size=8
    )
    transformers.ViTMAEModel(config).save_pretrained("saved/mae")
    printed = result("hf:saved/mae", *FEW, capsys=capsys)
    assert printed["files"][0] == "runs/measure-hf-mae/heads.csv"
    assert len(printed["heads"]) == 4
    assert "hf:saved/mae" in complaint("saved/mae", capsys=capsys)  # a folder, but not a run


def test_a_run_and_another_model(folder: Path, capsys: pytest.CaptureFixture[str], quick: None) -> None:
    assert main(["train", "compact-shapes", "--out", "a/run", *TINY_RUN]) == 0
    assert main(["train", "compact-shapes", "--out", "b/run", *TINY_RUN, "--seed", "1"]) == 0
    heads = (folder / "a" / "run" / "heads.csv").read_bytes()
    printed = result("a/run", "b/run", "--out", "out", "--device", "cpu", capsys=capsys)
    assert [model["label"] for model in printed["models"]] == ["a/run", "b/run"]  # one name in two folders
    assert (folder / "out" / "run-1" / "heads.csv").read_bytes() == heads
    assert (folder / "a" / "run" / "heads.csv").read_bytes() == heads
    assert main(["measure", "a/run", TWO, *FEW]) == 0
    note = (
        "Note: the models were measured on different images (run on shapes, test; own_models_of_e2e:two_layers on the"
    )
    assert note in capsys.readouterr().out
    assert (folder / "runs" / "measure-run-and-own_models_of_e2e-two_layers" / "run" / "heads.csv").is_file()
    assert main(["measure", "a/run", TWO, "--images", "shapes", *FEW]) == 0
    assert "different images" not in capsys.readouterr().out
    assert result("a/run", *FEW, capsys=capsys)["files"][0] == "runs/measure-run/heads.csv"
    assert (folder / "a" / "run" / "heads.csv").read_bytes() == heads  # not replaced by the table of fewer images
    assert "does not go with a/run" in complaint("a/run", "--image-size", "64", capsys=capsys)
    assert "--pretrained is for models of timm" in complaint("a/run", "b/run", "--pretrained", capsys=capsys)


def test_runs_are_compared_image_by_image(folder: Path, capsys: pytest.CaptureFixture[str], quick: None) -> None:
    """As they were trained, measured again, and on images of another kind; those without common images otherwise."""
    for name, seed in (("a", "0"), ("b", "1")):
        assert main(["train", "compact-shapes", "--out", name, *TINY_RUN, "--seed", seed]) == 0
    (found,) = result("a", "b", "--out", "out", "--device", "cpu", capsys=capsys)["comparisons"]
    assert found["models"] == ["a", "b"]
    assert found["first_layer"]["paired"] is True
    read = [read_folders([folder / name]).models[0] for name in ("a", "b", "out/a", "out/b")]
    for first, second in ((read[0], read[1]), (read[2], read[3]), (read[0], read[3])):
        difference = compare(first, second).first_layer
        assert difference.as_json() == pytest.approx(found["first_layer"])
        assert difference.estimate.value == pytest.approx(difference.a.mean - difference.b.mean, rel=1e-4)
    (found,) = result("a", TWO, "--images", "shapes", *FEW, capsys=capsys)["comparisons"]
    assert (found["first_layer"]["paired"], found["first_layer"]["n"]) == (True, 5)
    (found,) = result("a", TWO, *FEW, capsys=capsys)[
        "comparisons"
    ]  # a run on its own images, which are not the model's
    assert found["first_layer"]["paired"] is False


def test_models_that_take_images_in_other_sizes_see_the_same_ones(
    folder: Path, capsys: pytest.CaptureFixture[str], quick: None
) -> None:
    (folder / "photos").mkdir()
    pixels = np.random.default_rng(0).integers(0, 256, (6, 70, 90, 3), dtype=np.uint8)
    for number, image in enumerate(pixels):
        Image.fromarray(image).save(folder / "photos" / f"{number}.png")
    large = "vit_tiny_patch16_224"
    (found,) = result(TWO, large, "--images", "photos", "--out", "out", "--device", "cpu", capsys=capsys)["comparisons"]
    assert (found["most_local_head"]["paired"], found["most_local_head"]["n"]) == (True, 6)
    small = HeadTable.load("out/own_models_of_e2e-two_layers/heads.npz").per_image
    # Files of other names in another order are the same images.
    (folder / "others").mkdir()
    for number in range(6):
        shutil.copy(folder / "photos" / f"{number}.png", folder / "others" / f"{9 - number}.png")
    assert main(["measure", large, "--images", "others", "--out", "alone", "--device", "cpu"]) == 0
    again = HeadTable.load("alone/heads.npz").per_image
    together = HeadTable.load(f"out/{large}/heads.npz").per_image
    assert small is not None
    assert again is not None
    assert together is not None
    assert small.digests.tolist() == again.digests.tolist() == together.digests.tolist()
    np.testing.assert_allclose(again.mad, together.mad, rtol=1e-5)


def test_the_test_images_of_a_data_set(folder: Path, capsys: pytest.CaptureFixture[str], quick: None) -> None:
    """Of a tree of pictures only the test folder is read, and at its pictures' own size."""
    for part, number in (("train", 0), ("val", 3)):
        for name in ("cat", "dog"):
            (folder / "data" / part / name).mkdir(parents=True)
            Image.new("RGB", (90, 70), (number * 50, 0, 0)).save(folder / "data" / part / name / "picture.png")
    (folder / "data" / "train" / "cat" / "broken.png").write_bytes(b"not read, so not missed")
    printed = result(TWO, "--images", "image-folder", "--data-dir", "data", *FEW, capsys=capsys)
    assert {row["num_images"] for row in printed["heads"]} == {2}
    printed = result(TWO, "--images", "shapes", *FEW, capsys=capsys)
    assert {row["num_images"] for row in printed["heads"]} == {5}


def test_pictures_of_every_kind(folder: Path, capsys: pytest.CaptureFixture[str], quick: None) -> None:
    (folder / "images").mkdir()
    rgb = Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 30, 3), dtype=np.uint8))
    for mode in ("RGB", "L", "RGBA", "P", "LA", "1"):
        rgb.convert(mode).save(folder / "images" / f"{mode}.png")
    rgb.convert("CMYK").save(folder / "images" / "CMYK.jpg")
    grey = np.asarray(rgb.convert("L")).astype(np.uint16) * 257
    Image.fromarray(grey).save(folder / "images" / "16 bits.png")
    printed = result(TWO, "--images", "images", "--device", "cpu", capsys=capsys)
    assert {row["num_images"] for row in printed["heads"]} == {8}
    alone = {}
    for name in ("L.png", "16 bits.png"):
        (folder / "alone").mkdir(exist_ok=True)
        (folder / "alone" / "x.png").write_bytes((folder / "images" / name).read_bytes())
        alone[name] = result(TWO, "--images", "./alone", "--device", "cpu", capsys=capsys)["heads"]
    assert alone["L.png"] == alone["16 bits.png"]


def test_layers_that_are_not_measured_are_listed_by_reason(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, quick: None
) -> None:
    skipped = {**{f"pool.{number}": "attends over channels" for number in range(5)}, "last": "is causal"}

    def measure(*arguments: Any, **settings: Any) -> HeadTable:
        return dataclasses.replace(nearsight.measure(*arguments, **settings), skipped=skipped)

    monkeypatch.setattr(command, "measure", measure)
    assert main(["measure", TWO, "--out", "out", *FEW]) == 0
    shown = capsys.readouterr().out
    assert f"Note: {TWO}: not measured: pool.0, pool.1, pool.2 and 2 more (attends over channels)\n" in shown
    assert f"Note: {TWO}: not measured: last (is causal)\n" in shown
    assert result(TWO, "--out", "out", *FEW, capsys=capsys)["skipped"] == skipped
    assert "it is not measured (is causal)" in complaint(TWO, "--layers", "last", capsys=capsys)


def test_memory_that_runs_out_halves_the_batch(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, quick: None
) -> None:
    sizes = []

    def measure(model: Any, images: Any, *, batch_size: int, **settings: Any) -> HeadTable:
        def limited() -> Iterator[Tensor]:
            for batch in images:
                sizes.append(len(batch))
                if len(batch) > 3:
                    raise torch.OutOfMemoryError("CUDA out of memory")
                yield batch

        return nearsight.measure(model, limited(), batch_size=batch_size, **settings)

    monkeypatch.setattr(command, "measure", measure)
    arguments = (TWO, "--out", "out", "--num-images", "8", "--device", "cpu")
    printed = result(*arguments, capsys=capsys)
    assert {row["num_images"] for row in printed["heads"]} == {8}
    assert sizes == [1, 8, 4, 2, 2, 2, 2]
    assert "a batch of 8 images does not fit" in complaint(*arguments, "--batch-size", "8", capsys=capsys)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "no model is named; write nearsight measure MODEL"),
        ([TWO, TWO], f"{TWO} is named twice"),
        ([TWO, "compact_vt"], "did you mean 'compact_vit'?"),
        ([TWO, THREE, "--checkpoint", "x.pth"], "--checkpoint is for one model, but several are named"),
        ([TWO, "--checkpoint", "x.pth"], "x.pth is not there, but a file of weights is needed"),
        ([TWO, "--pretrained"], "brings its own weights"),
        ([TWO, "compact_vit", "--pretrained"], "no published weights for compact_vit"),
        (["own_models_of_e2e:without_attention"], "no attention was seen"),
        ([TWO, "own_models_of_e2e:without_attention"], "no attention was seen"),
        ([TWO, "--images", "nowhere"], "'nowhere' is not a known data set, nor a folder that is there"),
        ([TWO, "--images", "cifr100"], "did you mean 'cifar100'?"),
        ([TWO, "--images", "./nowhere"], "nowhere is not there, but a folder of images is needed"),
        ([TWO, "--images", "cifar100", "--data-dir", "."], "cifar100 is not in ."),
        ([TWO, "--layers", "2"], "--layers 2: the layers of own_models_of_e2e:two_layers count from 0 to 1"),
        ([TWO, THREE, "--layers", "2"], "--layers 2: the layers of own_models_of_e2e:two_layers count from 0 to 1"),
        ([TWO, "--layers", "block.1.attn"], "did you mean 'blocks.1.attn'?"),
        ([TWO, "--batch-size", "0"], "--batch-size is 0, but must be a number from 1 on, or auto"),
        ([TWO, "--batch-size", "many"], "--batch-size is many, but must be a number from 1 on, or auto"),
        ([TWO, "--num-images", "0"], "--num-images is 0, but must be at least 1"),
        ([TWO, "--image-size", "-4"], "--image-size is -4"),
        ([TWO, "--image-size", "48"], "fails on an image of 48×48 pixels"),
        ([TWO, "--out", "own_models_of_e2e.py"], "is a file, but a folder to write to is needed"),
        (["torchvision:vit_b16"], "did you mean 'vit_b_16'?"),
        (["no/such/model"], "no/such/model is not a folder"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_is_answered_in_one_line_and_writes_nothing(
    arguments: list[str], words: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = files(folder)
    assert words in complaint(*arguments, capsys=capsys)
    assert files(folder) == before
    assert not (folder / "runs").exists()


def test_what_else_there_is_to_see(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each further measurement writes what it says, and says the numbers of the library."""
    everything = ("shares,quantiles,offsets", "features", "cka", "rollout")
    assert main(["measure", TWO, *FEW, "--out", "out", "--what", *everything]) == 0
    printed = capsys.readouterr().out
    assert "is on the patch itself" in printed
    assert "Also: out/cka.csv" in printed
    heads, layers = pd.read_csv("out/extra-heads.csv"), pd.read_csv("out/extra-layers.csv")
    assert len(heads) == 4
    table = HeadTable.load("out/heads.npz")
    np.testing.assert_allclose(heads["share_self"], table.extra["share_self"].ravel())
    np.testing.assert_allclose(layers["locality_score"], table.extra["locality_score"])
    similarity = pd.read_csv("out/cka.csv")
    assert list(similarity.columns) == ["layer", "layer_name", "other_layer", "other_layer_name", "cka"]
    assert len(similarity) == 4
    maps = [head for layer in range(2) for head in table.offset_maps(layer)]
    marked = [head for head in maps if head.max() >= 2 * np.median(head)]
    own = sum(head.argmax() == head.size // 2 for head in marked)
    assert f"{own} of 4 heads attend most to the patch itself" in printed
    assert f"{4 - len(marked)} have nearly uniform attention." in printed
    for name in ("cka", "rollout", "offsets"):
        assert (folder / "out" / "figures" / f"{name}.png").stat().st_size > 1000


def test_kinds_of_two_models_are_strips_of_one_figure(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["measure", TWO, THREE, *FEW, "--out", "out", "--what", "kinds"]) == 0
    printed = capsys.readouterr().out
    (table,) = (HeadTable.load(path) for path in Path("out").glob("*two_layers*/heads.npz"))
    assert f"{TWO}: Of 4 heads, " in printed
    assert [path.name for path in sorted(Path("out/figures").glob("kinds*"))] == ["kinds.png", "kinds.svg"]
    (rows,) = (pd.read_csv(path) for path in Path("out").glob("*two_layers*/extra-heads.csv"))
    assert rows["kind"].tolist() == table.kinds().ravel().tolist()
    page = Path("out/report.html").read_text(encoding="utf-8")
    assert 'id="what-kinds"' in page
    assert "Where at least half of a head" in page


def test_how_images_were_prepared_is_said_and_kept(quick: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["measure", "compact_vit", *FEW, "--out", "out"]) == 0
    said = (
        "32×32 pixels (shorter side resized to 32, bicubic), mean (0.5071, 0.4865, 0.4409), "
        "std (0.2673, 0.2564, 0.2762); as the model's own configuration says"
    )
    assert f"Images: 5 of the embedded set, {said}\n" in capsys.readouterr().out
    kept = json.loads(Path("out/measured.json").read_text())["config"]["preparation"]
    assert (kept["from"], kept["crop_pct"]) == ("as the model's own configuration says", 1.0)
    assert main(["train", "compact-shapes", "--out", "run", *TINY_RUN]) == 0
    alone = result("run", "--device", "cpu", capsys=capsys)["images"]
    assert alone["preparation"].endswith("; as the run was trained")
    assert (alone["from"], alone["num"]) == ("shapes, test", 10)
    silent = "own_models_of_e2e:without_parameters"
    shapes = ("--images", "shapes", "--image-size", "32", *FEW)
    own = result(silent, *shapes, "--out", "silent", capsys=capsys)["images"]
    assert own["preparation"].endswith("std (0.229, 0.224, 0.225); assumed: the model does not say")
    other = result("run", "--images", "shapes", *FEW, "--out", "other", capsys=capsys)["images"]
    assert other["preparation"].endswith("; as its data set, shapes, says")
    assert json.loads(Path("other/measured.json").read_text())["config"]["measured_on"] == other
    capsys.readouterr()
    assert main(["measure", "run", "compact_vit", *FEW, "--out", "both"]) == 0
    printed = capsys.readouterr().out
    assert "Images of run: 5 of shapes, test, " in printed
    assert "Images of compact_vit (random weights): 5 of the embedded set, " in printed


def test_cka_between_two_models_and_rollout_of_each(quick: None) -> None:
    assert main(["measure", TWO, THREE, *FEW, "--out", "out", "--what", "cka", "rollout"]) == 0
    similarity = pd.read_csv("out/cka.csv")
    assert len(similarity) == 2 * 3
    assert len(list(Path("out/figures").glob("rollout-*.png"))) == 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([TWO, "--what", "share"], "did you mean 'shares'"),
        (
            [TWO, THREE, "compact_vit", "--what", "cka"],
            "--what cka compares the layers of one model or of two, not of 3",
        ),
    ],
)
def test_what_is_refused(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["measure", *arguments, *FEW, "--out", "out"]) == 2
    assert said in capsys.readouterr().err
    assert not Path("out").exists()
