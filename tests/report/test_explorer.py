"""The explorer's data against the maps they were made of, decoded here by other means."""

import base64
import dataclasses
import io
import json
import re
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from torch import nn

from nearsight.augment import CutMix
from nearsight.commands.exploring import explorer_of, explorer_of_runs, explorer_of_study
from nearsight.commands.options import Request
from nearsight.commands.subjects import open_subjects
from nearsight.errors import InputError
from nearsight.lens import measure
from nearsight.lens.maps import attention_maps
from nearsight.models import ModelConfig
from nearsight.report import ModelHeads
from nearsight.report.explorer import Exhibit, Explorer, KeptMaps, explore, explorer_script, explorer_style
from nearsight.study import OFF, Study, StudyResults, run_study
from nearsight.train import DataConfig, RunConfig, baseline

CPU = torch.device("cpu")


def vit() -> nn.Module:
    shape = {"img_size": 32, "patch_size": 4, "embed_dim": 24, "depth": 2, "num_heads": 3, "reg_tokens": 2}
    return timm.create_model("vit_tiny_patch16_224", num_classes=3, **shape)


def large() -> nn.Module:
    shape = {"img_size": 72, "patch_size": 4, "embed_dim": 24, "depth": 1, "num_heads": 3}
    return timm.create_model("vit_tiny_patch16_224", num_classes=3, **shape)


def swin() -> nn.Module:
    shape = {"img_size": 48, "window_size": 4, "embed_dim": 24, "depths": (2, 1), "num_heads": (2, 3)}
    return timm.create_model("swin_tiny_patch4_window7_224", num_classes=3, **shape)


def exhibit(build: Callable[[], nn.Module] = vit, label: str = "model", num_images: int = 3) -> Exhibit:
    torch.manual_seed(0)
    model = build()
    for module in model.modules():
        if isinstance(qkv := getattr(module, "qkv", None), nn.Linear):
            qkv.weight.data *= 20
    side = {vit: 32, large: 72, swin: 48}[build]
    images = torch.randn(num_images, 3, side, side, generator=torch.Generator().manual_seed(1))
    table = measure(model, images, precision="float64")
    pictures = np.random.default_rng(0).integers(0, 256, (num_images, side, side, 3), dtype=np.uint8)
    heads = ModelHeads(label=label, heads=table.to_frame().assign(epoch=0))
    return Exhibit(heads=heads, model=model, images_BCHW=images, pictures_BHWC=pictures)


def unpacked(layer: dict, picture: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Weights [H, Q, K], their largest [H, Q], weights on other tokens [H, Q, O], distances [H, Q]."""
    heads, others = len(layer["mad"]), len(layer["others"])
    queries = layer["queries"][0] * layer["queries"][1] + len(layer["otherQueries"])
    packed = zlib.decompress(base64.b64decode(layer["maps"][picture]))
    num_floats = heads * queries * (2 + others)
    floats = np.array(struct.unpack(f"<{num_floats}f", packed[: 4 * num_floats]))
    largest, on_others, distances = np.split(floats, [heads * queries, heads * queries * (1 + others)])
    levels = np.array(list(packed[4 * num_floats :])).reshape(heads, queries, -1)
    largest = largest.reshape(heads, queries)
    weights = levels * largest[..., None] / 255
    return weights, largest, on_others.reshape(heads, queries, others), distances.reshape(heads, queries)


@pytest.mark.parametrize("build", [vit, swin])
def test_what_is_packed_comes_back(build: Callable[[], nn.Module]) -> None:
    shown = exhibit(build)
    data = explore([shown]).data
    (model,) = data["models"]
    error = 0.0
    every = attention_maps(shown.model, shown.images_BCHW, dtype=torch.float64)
    for layer, maps in zip(model["layers"], every, strict=True):
        rows = shown.heads.measured()
        rows = rows[rows["layer"] == layer["number"]]
        assert layer["name"] == rows["layer_name"].iloc[0] == maps.name
        assert layer["mad"] == list(rows["mad"])
        assert layer["entropy"] == list(rows["entropy"])
        assert (layer["grid"], layer["queries"], layer["keys"]) == (maps.grid_size, maps.query_grid, maps.key_grid)
        for picture in range(3):
            weights, largest, on_others, distances = unpacked(layer, picture)
            exact = maps.weights_BHQK[picture].numpy()
            np.testing.assert_allclose(largest, exact.max(-1), rtol=1e-6)
            assert (np.abs(weights - exact) <= largest[..., None] * (1 / 510 + 1e-6)).all()
            error = max(error, np.abs(weights - exact).max())
            np.testing.assert_allclose(on_others, maps.other_weights_BHQO[picture], rtol=1e-6)
            np.testing.assert_allclose(distances, maps.distances_BHQ[picture], rtol=1e-6)
        if maps.reach_QK is None:
            assert layer["reach"] is None
        else:
            bits = np.unpackbits(np.frombuffer(base64.b64decode(layer["reach"]), np.uint8), bitorder="little")
            np.testing.assert_array_equal(bits[: maps.reach_QK.numel()], maps.reach_QK.flatten())
    (said,) = re.findall(r"more than ([\d.]+) %", data["notes"][-1])
    assert error <= float(said) / 100 <= 2 * error
    assert error <= 1 / 510  # a weight is at most 1, and 255 levels are between it and 0


def characters(explorer: Explorer) -> int:
    return sum(len(text) for model in explorer.data["models"] for layer in model["layers"] for text in layer["maps"])


def keys_of(explorer: Explorer) -> set[tuple[int, int]]:
    return {layer["keys"] for model in explorer.data["models"] for layer in model["layers"]}


def test_pictures_are_left_out_before_anything_is_pooled() -> None:
    one = exhibit(large, "one")
    shown = [one, dataclasses.replace(one, heads=dataclasses.replace(one.heads, label="two"))]
    whole = explore(shown)
    assert keys_of(whole) == {(18, 18)}
    assert len(whole.data["notes"]) == 1
    assert explore(shown, limit=characters(whole)).data == whole.data
    fewer = explore(shown, limit=characters(whole) - 1)
    assert keys_of(fewer) == {(18, 18)}
    assert all(len(model["pictures"]) == 2 for model in fewer.data["models"])
    assert len(fewer.data["pictures"]) == 2  # which both models share
    assert "2 of 3 pictures" in fewer.data["notes"][0]
    only = explore(shown, limit=characters(whole) // 3 + 2000)
    assert (keys_of(only), len(only.data["pictures"])) == ({(18, 18)}, 1)
    pooled = explore(shown, limit=characters(only) - 1)
    assert keys_of(pooled) == {(9, 9)}
    assert "pooled to at most 9 × 9" in pooled.data["notes"][0]
    tiny = explore(shown, limit=4000)
    assert max(max(keys) for keys in keys_of(tiny)) <= 5
    for explorer, limit in ((fewer, characters(whole)), (pooled, characters(only)), (tiny, 4001)):
        assert 0 < characters(explorer) < limit
    with pytest.raises(InputError, match="do not fit"):
        explore(shown, limit=100)


@pytest.mark.parametrize("lines", [14, 16])
def test_usual_grids_are_whole(lines: int) -> None:
    """Of a model of ViT-B's shape, whatever its maps: their bytes alone are few enough for one picture."""
    shape = {"img_size": 2 * lines, "patch_size": 2, "embed_dim": 24, "depth": 12, "num_heads": 12}
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", num_classes=3, **shape)
    images = torch.randn(2, 3, 2 * lines, 2 * lines)
    heads = ModelHeads(label="wide", heads=measure(model, images).to_frame().assign(epoch=0))
    pictures = np.zeros((2, 2 * lines, 2 * lines, 3), dtype=np.uint8)
    explorer = explore([Exhibit(heads=heads, model=model, images_BCHW=images, pictures_BHWC=pictures)])
    assert keys_of(explorer) == {(lines, lines)}
    assert len(explorer.data["models"][0]["pictures"]) == 2


def test_maps_that_were_kept_are_shown_as_those_of_the_model_are() -> None:
    shown = exhibit()
    maps = attention_maps(shown.model, shown.images_BCHW, dtype=torch.float64)
    kept = KeptMaps(heads=shown.heads, layers=maps, pictures_BHWC=shown.pictures_BHWC)
    assert explore([kept]).data == explore([shown]).data
    some = attention_maps(shown.model, shown.images_BCHW, layers=[1], heads=[2, 0])
    (layer,) = explore([dataclasses.replace(kept, layers=some)]).data["models"][0]["layers"]
    rows = shown.heads.heads.set_index(["layer", "head"])["mad"]
    assert (layer["number"], layer["name"]) == (1, "blocks.1.attn")
    assert layer["mad"] == [rows.loc[1, head] for head in layer["heads"]]
    assert sorted(layer["heads"]) == [0, 2]
    with pytest.raises(InputError, match="another model"):
        explore([dataclasses.replace(kept, heads=exhibit(swin).heads)])


def test_maps_that_an_older_version_wrote_are_read(tmp_path: Path) -> None:
    explorer = explore([exhibit()])
    data = json.loads(json.dumps(dict(explorer.data)))
    data["format"] = 1
    for layer in data["models"][0]["layers"]:
        del layer["heads"]
        packed = (zlib.decompress(base64.b64decode(text)) for text in layer["maps"])
        layer["maps"] = [base64.b64encode(each).decode() for each in packed]
    (tmp_path / "explorer.json").write_text(json.dumps(data))
    assert Explorer.read(tmp_path / "explorer.json").data == json.loads(json.dumps(dict(explorer.data)))


def test_pictures_are_the_ones_given() -> None:
    shown = exhibit(num_images=1)
    (uri,) = explore([shown]).data["pictures"]
    kind, _, text = uri.partition(",")
    assert kind == "data:image/png;base64"
    with Image.open(io.BytesIO(base64.b64decode(text))) as picture:
        np.testing.assert_array_equal(np.asarray(picture), shown.pictures_BHWC[0])


HOSTILE = "</script><script>alert(1)</script><!-- \" ' & \u202egnol " + "x" * 500


def test_a_hostile_label_cannot_leave_its_place(tmp_path: Path) -> None:
    explorer = explore([exhibit(label=HOSTILE)])
    html = explorer.html()
    assert html.count("<script") == html.count("</script>") == 1
    assert "<!--" not in html
    text = html.partition('id="nearsight-explorer-data">')[2].removesuffix("</script>")
    assert json.loads(text)["models"][0]["label"] == HOSTILE
    explorer.write(tmp_path / "explorer.json")
    assert Explorer.read(tmp_path / "explorer.json").html() == html


def test_nothing_that_a_strict_policy_forbids() -> None:
    html, script, style = explore([exhibit(num_images=1)]).html(), explorer_script(), explorer_style()
    assert not re.search(r"<[^>]*\s(style|on\w+)\s*=", html)
    assert not re.search(r"\beval\(|innerHTML|outerHTML|insertAdjacentHTML|document\.write|new Function", script)
    assert set(re.findall(r"https?://[^\"\s]+", script + style)) == {"http://www.w3.org/2000/svg"}
    assert "url(" not in style
    assert "@import" not in style


def test_what_cannot_be_explored_is_refused(tmp_path: Path) -> None:
    shown = exhibit()
    with pytest.raises(InputError, match="both called"):
        explore([shown, shown])
    with pytest.raises(InputError, match="no pictures"):
        explore([dataclasses.replace(shown, images_BCHW=shown.images_BCHW[:0])])
    other = shown.heads.heads.assign(layer=shown.heads.heads["layer"] + 1)
    with pytest.raises(InputError, match="another model"):
        explore([dataclasses.replace(shown, heads=ModelHeads(label="a", heads=other))])
    for content, complaint in (
        ("{", "damaged"),
        ("[]", "damaged"),
        ("{}", "no maps"),
        ('{"format": 9}', "newer"),
        ('{"format": 1}', "damaged"),
    ):
        (tmp_path / "explorer.json").write_text(content)
        with pytest.raises(InputError, match=complaint):
            Explorer.read(tmp_path / "explorer.json")
    with pytest.raises(InputError, match="has no attention maps"):
        Explorer.read(tmp_path / "nothing.json")


def test_layers_keep_their_numbers_and_missing_heads_are_empty() -> None:
    shown = exhibit(num_images=1)
    last = shown.heads.heads[shown.heads.heads["layer"] == 1].copy()
    last.loc[last["head"] == 2, "mad"] = np.nan
    (model,) = explore([dataclasses.replace(shown, heads=ModelHeads(label="a", heads=last))]).data["models"]
    (layer,) = model["layers"]
    assert (layer["number"], layer["name"], layer["mad"][2]) == (1, "blocks.1.attn", None)
    assert layer["mad"][:2] == list(last["mad"][:2])


def test_a_measured_model_is_shown_the_pictures_it_was_measured_on() -> None:
    request = Request(models=("compact_vit",), num_images=5)
    subjects = open_subjects(request, CPU)
    images = next(subjects[0].images.batches(5))
    heads = ModelHeads(label="a", heads=measure(subjects[0].model, images).to_frame().assign(epoch=0))
    data = explorer_of(subjects, [heads], CPU).data
    assert len(data["pictures"]) == 4
    config = subjects[0].images.data_config
    for uri, image in zip(data["pictures"], images, strict=False):
        with Image.open(io.BytesIO(base64.b64decode(uri.partition(",")[2]))) as picture:
            levels = torch.from_numpy(np.array(picture)).permute(2, 0, 1) / 255
        mean, std = (torch.tensor(config[name]).view(3, 1, 1) for name in ("mean", "std"))
        torch.testing.assert_close((levels - mean) / std, image, atol=0.6 / 255 / min(config["std"]), rtol=0)


def test_a_study_shows_its_ends_as_long_as_they_are_there(tmp_path: Path) -> None:
    base = RunConfig(
        model=ModelConfig(depth=1, width=16, num_heads=2, mlp_width=16, patch_size=8),
        data=DataConfig(name="shapes", num_train=120, num_test=20),
        protocol=dataclasses.replace(baseline(), max_epochs=1, patience=1, warmup_epochs=0, batch_size=32),
        num_measured=20,
    )
    factors = {"cutmix": (OFF, CutMix(p=0.5)), "smoothing": (0.0, 0.1)}
    run_study(Study(base, factors=factors, seeds=1, name="tiny", ends=("Plain", "Full")), tmp_path)
    results = StudyResults.read(tmp_path)
    explorer = explorer_of_study(tmp_path, results, device=CPU)
    assert explorer is not None
    models = {model["label"]: model for model in explorer.data["models"]}
    assert list(models) == ["Plain", "Full"]
    for label, model in models.items():
        run = results.runs.loc[results.runs["condition"] == label, "run"].item()
        own = results.heads[results.heads["run"] == run]
        assert model["layers"][0]["mad"] == pytest.approx(list(own["mad"]))
    assert explorer_of_runs({"gone": tmp_path / "nowhere"}, device=CPU) is None
    plain = results.runs.loc[results.runs["condition"] == "Plain", "run"].item()
    (tmp_path / "runs" / plain / "model.safetensors").unlink()  # as of a run that was taken from tables
    explorer = explorer_of_study(tmp_path, results, device=CPU)
    assert explorer is not None
    assert [model["label"] for model in explorer.data["models"]] == ["Full"]
    for weights in tmp_path.glob("runs/*/model.safetensors"):
        weights.unlink()
    assert explorer_of_study(tmp_path, results, device=CPU) is None
