"""`nearsight probe`: knn and linear of a model, alone and side by side, and what is said when something is wrong."""

import csv
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from nearsight.cli import main
from nearsight.commands.probe import open_frozen
from nearsight.commands.probe_all import find_origins
from nearsight.files import canonical_hash
from nearsight.models import ModelConfig, save_model
from nearsight.train import DataConfig, RunConfig, RunFolder
from nearsight.train.dino import DinoConfig, ImagesConfig

SETTINGS = ["--data", "shapes", "--num-train", "120", "--num-test", "40", "--device", "cpu"]


@pytest.fixture
def factory(tmp_path, monkeypatch):
    """Two small models in a module of the current folder, one of them with a weight that differs."""
    lines = [
        "import torch, nearsight",
        "def build(seed):",
        "    torch.manual_seed(seed)",
        "    return nearsight.create_model('compact_vit', depth=1, embed_dim=24, num_heads=3)",
        "def one(): return build(0)",
        "def other(): return build(1)",
        "import timm",
        "def small(): return timm.create_model('vit_tiny_patch16_224', img_size=16, patch_size=8, embed_dim=48,",
        "    depth=1, num_heads=3, num_classes=0)",
        "class Silent(torch.nn.Module):",
        "    def __init__(self):",
        "        super().__init__()",
        "        self.inner = small()",
        "    def forward(self, images): return self.inner(images)",
    ]
    (tmp_path / "probed_models.py").write_text("\n".join(lines))
    monkeypatch.chdir(tmp_path)
    return ["probed_models:one", "probed_models:other"]


@pytest.fixture(autouse=True)
def cache_home(tmp_path, monkeypatch):
    """Features of patches are kept without being asked for."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def run(arguments, capsys):
    code = main(["probe", *arguments])
    return code, capsys.readouterr()


def test_knn_of_two_models(factory, tmp_path, capsys):
    out = tmp_path / "out"
    command = ["knn", *factory, *SETTINGS, "--ks", "5", "100", "--out", str(out), "--cache-dir", str(tmp_path / "c")]
    code, printed = run([*command, "--json"], capsys)
    assert code == 0, printed.err
    result = json.loads(printed.out)
    assert [set(model["accuracy"]) for model in result["models"]] == [{"5", "100"}] * 2
    assert result["models"][0]["weights"] != result["models"][1]["weights"]
    assert (result["models"][0]["place"], result["models"][0]["tokens"]) == ("norm", "cls")
    rows = list(csv.DictReader((out / "table.csv").open()))
    assert [float(row["accuracy_k5"]) for row in rows] == [model["accuracy"]["5"] for model in result["models"]]
    assert {path.name for path in out.iterdir()} == {"result.json", "table.csv", "table.md", "provenance.json"}
    assert len(list((tmp_path / "c").iterdir())) == 4  # train and test of each
    _, again = run(command, capsys)  # from the cache, as text
    for row in rows:
        assert f"{100 * float(row['accuracy_k5']):.2f}" in again.out


def test_linear_with_and_without_random_crops(factory, tmp_path, capsys):
    for extra in ([], ["--random-crops"]):
        command = ["linear", factory[0], *SETTINGS, "--num-epochs", "2", "--head-batch-size", "50", *extra]
        code, printed = run([*command, "--out", "out", "--cache-dir", str(tmp_path / "c"), "--json"], capsys)
        assert code == 0, printed.err
        (model,) = json.loads(printed.out)["models"]
        assert len(model["heads"]) == 7
        assert 0 <= model["test_accuracy"] <= 1
        assert model["best"] in model["heads"]


@pytest.fixture
def voc(tmp_path):
    """A data folder with a VOC of six images; a picture's colours follow its classes."""
    folder, generator = tmp_path / "data" / "voc-small", np.random.default_rng(0)
    for name in ("JPEGImages", "SegmentationClass", "ImageSets/Segmentation"):
        (folder / name).mkdir(parents=True)
    for part in ("train", "val"):
        names = [f"{part}{number}" for number in range(3)]
        (folder / "ImageSets" / "Segmentation" / f"{part}.txt").write_text("\n".join(names))
        for name in names:
            mask = generator.integers(0, 3, (5, 6), dtype=np.uint8).repeat(8, 0).repeat(8, 1)
            pixels = 80 * mask[..., None] + generator.integers(0, 90, (40, 48, 3), dtype=np.uint8)
            Image.fromarray(pixels.astype(np.uint8)).save(folder / f"JPEGImages/{name}.jpg")
            Image.fromarray(mask).save(folder / f"SegmentationClass/{name}.png")
    return tmp_path / "data"


def test_retrieval_on_a_small_voc(factory, voc, capsys):
    command = ["retrieve", factory[0], "--data-dir", str(voc), "--memory-size", "60", "--out", "out"]
    code, printed = run([*command, "--device", "cpu", "--json"], capsys)
    assert code == 0, printed.err
    result = json.loads(printed.out)
    assert result["models"][0]["memory_patches"] == 60
    assert 0 <= result["models"][0]["mean_iou"] <= 1
    assert "aeroplane" not in result["models"][0]["unseen"]  # class 1
    assert "person" in result["models"][0]["unseen"]
    assert "person" in result["notes"][0]
    assert len(Path("out/per_class.csv").read_text().splitlines()) == 1 + 21
    code, printed = run([*command, "--k", "61"], capsys)
    assert (code, "60 patches in the memory, but 61" in printed.err) == (2, True)
    larger = ["retrieve", factory[0], "--data-dir", str(voc), "--device", "cpu", "--json", "--image-size"]
    (found,) = json.loads(run([*larger, "48"], capsys)[1].out)["models"]
    assert found["image_size"] == [48, 48]
    assert found["memory_patches"] == 12 * 12 * 3
    code, printed = run([*larger, "50"], capsys)
    assert (code, "takes multiples of 4; use --image-size 52" in printed.err) == (2, True)


@pytest.fixture
def street(voc, tmp_path):
    """The images of that VOC as a folder of one's own, of three classes."""
    folder = tmp_path / "street"
    shutil.copytree(voc / "voc-small" / "JPEGImages", folder / "images")
    shutil.copytree(voc / "voc-small" / "SegmentationClass", folder / "masks")
    (folder / "classes.json").write_text('["road", "sky", "tree"]')
    return folder


def test_images_and_masks_of_ones_own(factory, street, tmp_path, capsys):
    own = ["--data", str(street), "--device", "cpu", "--test-share", "0.5", "--json"]
    code, printed = run(["retrieve", factory[0], *own], capsys)
    assert code == 0, printed.err
    result = json.loads(printed.out)
    assert (result["data"]["name"], result["data"]["num_test"]) == ("street", 3)
    assert list(result["models"][0]["per_class_iou"]) == ["road", "sky", "tree"]
    assert result["folder"].startswith("runs/retrieve-street-")
    # The same images as two folders, with numbers that are not those of the classes.
    (street / "masks").rename(tmp_path / "labels")
    for path in (tmp_path / "labels").iterdir():
        numbers = np.asarray(Image.open(path))
        Image.fromarray(1000 * numbers.astype(np.uint16)).save(path)
    (tmp_path / "names.json").write_text('{"0": "road", "1000": "sky", "2000": "tree"}')
    (street / "classes.json").unlink()
    two = ["--masks", str(tmp_path / "labels"), "--classes", str(tmp_path / "names.json")]
    code, printed = run(["retrieve", factory[0], *own, *two, "--out", "again"], capsys)
    assert code == 0, printed.err
    assert json.loads(printed.out)["models"][0]["mean_iou"] == result["models"][0]["mean_iou"]
    steps = ["--iterations", "2", "--batch-size", "2"]
    code, printed = run(["segment", factory[0], *own, *two, *steps], capsys)
    assert code == 0, printed.err
    (found,) = json.loads(printed.out)["models"]
    assert (found["data"], found["num_train"], found["num_test"]) == (tmp_path.name, 3, 3)
    dense = ["--dense-data", str(street), *own[2:], *two, "--probes", "retrieve", "segment"]
    quick = ["--segment-iterations", "2", "--segment-batch-size", "2", "--out", "all"]
    code, printed = run(["all", factory[0], *dense, *quick], capsys)
    assert code == 0, printed.err
    scores = {row["measure"]: row["value"] for row in json.loads(printed.out)["results"]}
    assert scores == {"retrieve_miou": result["models"][0]["mean_iou"], "segment_miou": found["miou"]}


def test_retrieval_by_the_protocol_of_hummingbird(factory, voc, cache_home, capsys):
    command = ["retrieve", factory[0], "--data-dir", str(voc), "--device", "cpu", "--seed", "3"]
    hummingbird = [*command, "--protocol", "hummingbird", "--augmentation-epochs", "2", "--out", "out"]
    code, printed = run([*hummingbird, "--json"], capsys)
    assert code == 0, printed.err
    result = json.loads(printed.out)
    (model,) = result["models"]
    assert (result["settings"]["protocol"], result["settings"]["augmentation_epochs"]) == ("hummingbird", 2)
    assert (model["place"], model["memory_patches"]) == ("norm", 2 * 3 * 64)
    assert len(model["per_class_iou"]) == 21
    assert model["per_class_iou"]["person"] == 0  # absent, and counts
    assert model["mean_iou"] == pytest.approx(np.mean(list(model["per_class_iou"].values())))
    assert model["mean_iou_low"] <= model["mean_iou"] <= model["mean_iou_high"]
    assert not list(cache_home.glob("nearsight/features/*"))  # crops are not kept
    assert "by the protocol hummingbird" in run(hummingbird, capsys)[1].out
    code, printed = run([*hummingbird, "--place", "block", "--json"], capsys)
    assert json.loads(printed.out)["models"][0]["place"] == "block"
    code, printed = run([*command, "--augmentation-epochs", "2"], capsys)
    assert (code, "--augmentation-epochs is for --protocol hummingbird" in printed.err) == (2, True)


def test_the_same_options_everywhere(capsys):
    """What several probes have is one option, with one text."""
    texts = {}
    for probe in ("knn", "linear", "segment", "retrieve", "all"):
        with pytest.raises(SystemExit):
            main(["probe", probe, "--help"])
        shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
        for option in ("--num-train", "--num-test", "--cache-dir"):
            start = shown.index(f" {option} ")
            texts.setdefault(option, set()).add(shown[start : shown.index("(default:", start)])
    assert {option: len(found) for option, found in texts.items()} == dict.fromkeys(texts, 1), texts


def test_maps_of_patches_are_kept(factory, voc, cache_home, capsys, monkeypatch):
    retrieval = ["retrieve", factory[0], "--data-dir", str(voc), "--device", "cpu", "--json", "--num-train", "2"]
    steps = ["--iterations", "2", "--batch-size", "2"]
    segmentation = [
        "segment",
        factory[0],
        "--data-dir",
        str(voc),
        "--device",
        "cpu",
        "--json",
        "--num-test",
        "2",
        *steps,
    ]

    def numbers(command, name):
        code, printed = run(command, capsys)
        assert code == 0, printed.err
        return json.loads(printed.out)["models"][0][name], printed.err

    first, told = numbers(retrieval, "mean_iou")
    assert "train features: 2 images measured" in told
    kept = {path: path.stat().st_mtime_ns for path in cache_home.glob("nearsight/features/*/features.npy")}
    assert len(kept) == 2
    again, told = numbers(retrieval, "mean_iou")
    assert (again, "train features: 0 images measured" in told) == (first, True)
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    segmented, _ = numbers([*segmentation, "--out", "one"], "miou")
    assert len(list(cache_home.glob("nearsight/features/*/features.npy"))) == 3  # all test images have one size
    # As much as nothing is kept where nobody asked for it, and all of it in a folder that was named.
    monkeypatch.setattr("nearsight.probe.cache.MAPS_BYTES", 1000)
    monkeypatch.setenv("XDG_CACHE_HOME", "elsewhere")
    assert numbers(retrieval, "mean_iou")[0] == first
    assert numbers([*segmentation, "--out", "two"], "miou")[0] == segmented
    assert not Path("elsewhere").exists()
    assert numbers([*segmentation, "--out", "three", "--cache-dir", "named"], "miou")[0] == segmented
    assert numbers([*segmentation, "--out", "four", "--cache-dir", "named"], "miou")[0] == segmented
    assert len(list(Path("named").glob("*/features.npy"))) == 1
    assert numbers([*retrieval, "--cache-dir", "named"], "mean_iou")[0] == first
    # A place that cannot be written to matters only to who named it.
    monkeypatch.setattr("nearsight.probe.cache.MAPS_BYTES", 2**30)
    Path("taken").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", "taken")
    assert numbers(retrieval, "mean_iou")[0] == first
    assert numbers([*segmentation, "--out", "five"], "miou")[0] == segmented
    code, printed = run([*retrieval, "--cache-dir", "taken"], capsys)
    assert (code, "lies below taken, which is a file" in printed.err) == (2, True), printed.err


def test_bad_folders_of_ones_own_are_one_line(factory, street, voc, capsys):
    Image.new("RGB", (48, 40)).save(street / "masks" / "train0.png")
    cases = [
        (["--data", "stret"], "'stret' is not a known data set with masks, nor a folder that is there"),
        (["--data", "./stret"], "stret is not there, but a folder with images and masks is needed"),
        (["--data", str(street)], "train0.png is a picture in colours (RGB)"),
        (["--data", str(street / "images")], "has no folder 'images'; put pictures into images"),
        (["--data", str(street), "--test-share", "1"], "the share of test images is 1.0"),
        (["--data", "voc-small", "--data-dir", str(voc), "--ignore-value", "0"], "--ignore-value is for a folder of"),
    ]
    for probe in ("retrieve", "segment"):
        for options, message in cases:
            code, printed = run([probe, factory[0], *options], capsys)
            assert (code, message in printed.err, printed.err.count("\n")) == (2, True, 1), printed.err
    assert not Path("runs").exists()


def test_models_of_other_sizes_and_those_that_do_not_say_theirs(factory, voc, tmp_path, capsys):
    of_classes = [*SETTINGS, "--ks", "5", "--cache-dir", str(tmp_path / "c")]
    of_patches = ["--data-dir", str(voc), "--device", "cpu"]
    retrieval = ["--memory-size", "12", "--k", "3", *of_patches]
    probes = {"knn": of_classes, "retrieve": retrieval, "segment": of_patches, "all": [*of_classes, "--probes", "knn"]}
    for probe, options in probes.items():
        code, printed = run([probe, "probed_models:Silent", *options], capsys)
        assert (code, "does not say which images it takes; say so with --image-size" in printed.err) == (2, True)
        if probe in ("segment", "all"):  # long in the whole: that the size reaches the model is enough
            code, printed = run([probe, "probed_models:small", *options, "--image-size", "24"], capsys)
            assert (code, "fails on an image of 24×24 pixels" in printed.err) == (2, True), printed.err
            continue
        for model in (["probed_models:Silent", "--image-size", "16"], ["probed_models:small"]):
            code, printed = run([probe, *model, *options, "--json"], capsys)
            assert code == 0, printed.err
            assert json.loads(printed.out)["models"][0]["image_size"] == [16, 16]
    code, printed = run(["retrieve", "probed_models:small", *retrieval, "--json", "--image-size", "24"], capsys)
    assert json.loads(printed.out)["models"][0]["image_size"] == [24, 24], printed.err  # opened at 16, then resized
    code, printed = run(["knn", factory[0], *of_classes, "--image-size", "0"], capsys)
    assert (code, "--image-size is 0, but must be at least 1" in printed.err) == (2, True)


def test_bad_input_is_one_line(factory, tmp_path, capsys):
    run_folder = tmp_path / "run"
    save_model(run_folder / "model.safetensors", {}, ModelConfig(), (32, 32), 10)
    cases = [
        (["nn", factory[0]], "'nn' is not a known probe"),
        (["knn", *SETTINGS], "no model is named"),
        (["knn", factory[0], *SETTINGS], "120 training images of shapes, but 200 neighbours"),
        (["knn", factory[0], *SETTINGS, "--ks", "5", "--block", "3"], "no block 3"),
        (["knn", factory[0], *SETTINGS, "--ks", "5", "--place", "prr"], "does not refine its patches"),
        (["knn", str(run_folder)], "not a complete run folder"),
        (["knn", "init:nowhere"], "nowhere is not a folder, so there is no run there"),
        (["linear", factory[0], *SETTINGS, "--num-epochs", "0"], "num_epochs is 0"),
        (["linear", factory[0], *SETTINGS, "--crop-pct", "0"], "crop_pct is 0"),
        (
            ["linear", factory[0], *SETTINGS, "--learning-rates", "0.1", "inf"],
            "learning_rates is inf, but must be finite",
        ),
        (["linear", factory[0], *SETTINGS, "--seed", "99999999999999999999"], "--seed is 99999999999999999999"),
        (["retrieve", factory[0], "--temperature=inf"], "--temperature is inf, but must be finite"),
        (["retrieve", factory[0], "--temperature=nan"], "--temperature is nan, but must be greater than 0"),
        (["knn", factory[0], "--data", "voc-small"], "has masks and no class for each image"),
    ]
    for arguments, message in cases:
        code, printed = run([*arguments, *(["--cache-dir", str(tmp_path / "c")] if len(arguments) > 3 else [])], capsys)
        assert (code, message in printed.err, printed.err.count("\n")) == (2, True, 1), printed.err
    assert not (tmp_path / "runs").exists()
    assert main(["probe", "--help"]) == 0


def test_options_of_votes_are_looked_at_before_any_model(capsys, monkeypatch):
    def nothing(*_, **__):
        raise AssertionError("a model is opened")

    monkeypatch.setattr("nearsight.commands.probe.open_frozen", nothing)
    for options, message in (
        (["--ks"], "k-NN needs at least one k"),
        (["--ks", "5", "0"], "k is 0"),
        (["--temperature", "inf"], "the temperature is inf, but must be finite"),
        (["--temperature", "0"], "the temperature is 0.0, but must be greater than 0"),
    ):
        code, printed = run(["knn", "anything", *options, *SETTINGS], capsys)
        assert (code, message in printed.err, printed.err.count("\n")) == (2, True, 1), printed.err


def all_of(models, voc, out, *more):
    quick = ["--ks", "5", "20", "--linear-epochs", "2", "--segment-iterations", "2", "--segment-batch-size", "2"]
    places = ["--data-dir", str(voc), "--out", str(out), "--cache-dir", str(voc / "cache")]
    return ["all", *models, *SETTINGS, *quick, *places, *more]


def test_all_probes_of_two_models_agree_with_each_alone(factory, voc, tmp_path, capsys):
    out = tmp_path / "all"
    code, printed = run(all_of(factory, voc, out, "--json"), capsys)
    assert code == 0, printed.err
    told = json.loads(printed.out)
    found = {(row["model"], row["measure"]): row for row in told["results"]}
    measures = ("knn_5", "knn_20", "linear", "retrieve_miou", "segment_miou")
    assert list(found) == [(model, measure) for model in factory for measure in measures]
    assert all(0 <= row["low"] <= row["value"] <= row["high"] <= 1 for row in found.values())
    assert {row["num_images"] for row in found.values()} == {40, 3}
    # The features of both probes of classes are those of one pass: two parts of each model. Retrieval keeps maps of
    # both parts, segmentation those of the test images.
    assert len(list((voc / "cache").iterdir())) == 2 * (2 + 2 + 1)
    rows = list(csv.DictReader((out / "probes.csv").open()))
    assert [float(row["value"]) for row in rows] == [row["value"] for row in found.values()]
    assert (out / "probes.md").read_text().count("probed_models:") == 2
    assert {path.name for path in (out / "figures").iterdir()} == {"probes.png", "probes.svg", "captions.md"}
    assert not (out / "verdict.md").exists()  # nobody said which of them is LocAt
    common = [*SETTINGS, "--cache-dir", str(voc / "cache"), "--json"]
    _, printed = run(["knn", factory[1], *common, "--ks", "5", "20", "--out", "knn"], capsys)
    (alone,) = json.loads(printed.out)["models"]
    row = found[factory[1], "knn_20"]
    assert (alone["accuracy"]["20"], alone["interval"]["20"]) == (row["value"], [row["low"], row["high"]])
    _, printed = run(["linear", factory[1], *common, "--num-epochs", "2", "--out", "linear"], capsys)
    assert json.loads(printed.out)["models"][0]["test_accuracy"] == found[factory[1], "linear"]["value"]
    dense = ["--data-dir", str(voc), "--device", "cpu", "--json"]
    _, printed = run(["retrieve", factory[1], *dense, "--out", "retrieve"], capsys)
    assert json.loads(printed.out)["models"][0]["mean_iou"] == found[factory[1], "retrieve_miou"]["value"]
    steps = ["--iterations", "2", "--batch-size", "2"]
    _, printed = run(["segment", factory[1], *dense, *steps, "--out", "segment"], capsys)
    assert json.loads(printed.out)["models"][0]["miou"] == found[factory[1], "segment_miou"]["value"]


def test_all_probes_do_only_what_is_missing(factory, voc, tmp_path, capsys):
    out = tmp_path / "all"
    results = out / "results"
    assert run(all_of(factory[:1], voc, out, "--probes", "knn", "segment"), capsys)[0] == 0
    first = {path.name: path.stat().st_mtime_ns for path in results.iterdir()}
    assert {name.split("-")[0] for name in first} == {"knn", "segment"}
    before = (out / "probes.csv").read_bytes()
    assert run(all_of(factory[:1], voc, out, "--probes", "knn", "segment"), capsys)[0] == 0
    assert {path.name: path.stat().st_mtime_ns for path in results.iterdir()} == first
    assert (out / "probes.csv").read_bytes() == before
    # Another probe, another model, another setting and a damaged file are each computed, and nothing else.
    (knn,) = (name for name in first if name.startswith("knn"))
    (results / knn).write_text('{"probe": "knn", "scores": {')
    assert run(all_of(factory, voc, out, "--probes", "knn", "retrieve"), capsys)[0] == 0
    second = {path.name: path.stat().st_mtime_ns for path in results.iterdir()}
    assert len(second) == 5  # segment of the first, knn and retrieve of both
    assert {name for name in first if second[name] != first[name]} == {knn}
    assert run(all_of(factory[:1], voc, out, "--probes", "knn", "--temperature", "0.1"), capsys)[0] == 0
    assert len(list(results.iterdir())) == 6
    # The name of a model is not part of what it is, but its number of heads is, which no weight shows.
    lines = [
        (tmp_path / "probed_models.py").read_text(),
        "def same(): return build(0)",
        "def heads():",
        "    torch.manual_seed(0)",
        "    return nearsight.create_model('compact_vit', depth=1, embed_dim=24, num_heads=2)",
    ]
    (tmp_path / "renamed_models.py").write_text("\n".join(lines))
    assert run(all_of(["renamed_models:same"], voc, out, "--probes", "knn"), capsys)[0] == 0
    assert len(list(results.iterdir())) == 6
    elsewhere = ["--cache-dir", str(tmp_path / "other")]
    assert run(all_of(["renamed_models:heads"], voc, out, "--probes", "knn", *elsewhere), capsys)[0] == 0
    assert len(list(results.iterdir())) == 7


def test_probes_of_other_folders_are_taken_over(factory, voc, tmp_path, capsys):
    """As a cluster makes them, a model in each; nothing is computed again, and what was not there is."""
    parts = [tmp_path / "first", tmp_path / "second"]
    for model, part in zip(factory, parts, strict=True):
        assert run(all_of([model], voc, part, "--probes", "knn", "segment"), capsys)[0] == 0
    # What is taken is what stands there, as this number shows, and a head comes along.
    (knn,) = (parts[0] / "results").glob("knn-*.json")
    held = json.loads(knn.read_text())
    held["scores"]["knn_5"]["value"] = 0.123
    # It is of an earlier version, whose folders said where they were made, not their results.
    certificate = held.pop("provenance")
    knn.write_text(json.dumps(held))
    (parts[0] / "provenance.json").write_text(json.dumps({**certificate, "commit": "an earlier one"}))
    out = tmp_path / "together"
    reuse = ["--reuse", *map(str, parts)]
    code, printed = run(all_of(factory, voc, out, "--json", "--probes", "knn", "retrieve", "segment", *reuse), capsys)
    assert code == 0, printed.err
    assert "training" not in printed.err
    rows = {(row["model"], row["measure"]): row["value"] for row in json.loads(printed.out)["results"]}
    assert rows[factory[0], "knn_5"] == 0.123
    assert (factory[1], "retrieve_miou") in rows
    heads = [sorted(path.name for path in folder.glob("segment/*/*")) for folder in (*parts, out)]
    assert heads[2] == sorted(heads[0] + heads[1])
    told = json.loads((out / "provenance.json").read_text())
    assert told["commit"] == ["an earlier one", certificate["commit"]]
    assert told["hardware"] == [certificate["hardware"]]
    assert "probed_models:one, segment: taken from" in printed.err
    assert (out / "plan.json").read_text() == (parts[0] / "plan.json").read_text()  # planned before the first of them
    # A head that was damaged since, or lost a file, is not taken over; the next folder may have it, else it is trained.
    (head,) = parts[1].glob("segment/*")
    (head / "figures").mkdir()
    (head / "figures" / "predictions.png").write_bytes(b"drawn")
    shutil.copytree(parts[1], tmp_path / "copy")
    (head / "per_class.csv").write_text("class")
    again = all_of(factory[1:], voc, tmp_path / "other", "--probes", "segment", *reuse)
    assert run([*again, str(tmp_path / "copy")], capsys)[0] == 0
    (taken,) = (tmp_path / "other").glob("segment/*")
    assert (taken / "figures" / "predictions.png").read_bytes() == b"drawn"
    shutil.rmtree(tmp_path / "other")
    (tmp_path / "copy" / "segment" / head.name / "head.safetensors").unlink()
    code, printed = run([*again, str(tmp_path / "copy")], capsys)
    assert (code, "training 2/2" in printed.err) == (0, True)
    # An earlier version's folder keeps what it says of where it was made.
    (old,) = (parts[0] / "results").glob("knn-*.json")
    assert run(all_of(factory[:1], voc, parts[0], "--probes", "knn", "segment"), capsys)[0] == 0
    assert json.loads(old.read_text())["provenance"]["commit"] == "an earlier one"
    assert "an earlier one" in json.loads((parts[0] / "provenance.json").read_text())["commit"]
    code, printed = run(all_of(factory, voc, tmp_path / "other", "--reuse", str(tmp_path / "no")), capsys)
    assert (code, "has no probes to reuse" in printed.err) == (2, True)


def test_models_of_one_name_have_a_folder_each(voc, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for place, with_locat in (("a", False), ("b", True), ("c", False)):
        finished_run(tmp_path / place / "m", 0 if place < "c" else 1, with_locat=with_locat)
    steps = ["--iterations", "2", "--batch-size", "2", "--data-dir", str(voc), "--device", "cpu"]
    code, printed = run(["segment", "a/m", "b/m", "--data", "voc-small", *steps, "--out", "out", "--json"], capsys)
    assert code == 0, printed.err
    told = json.loads(printed.out)
    assert (told["probe"], told["folder"]) == ("segment", "out")
    assert [model["folder"] for model in told["models"]] == ["out/m-1", "out/m-2"]
    # A folder of another is found before the first is trained.
    shutil.rmtree(tmp_path / "out" / "m-1")
    code, printed = run(["segment", "a/m", "c/m", "--data", "voc-small", *steps, "--out", "out"], capsys)
    assert (code, "out/m-2 holds something else" in printed.err, (tmp_path / "out/m-1").exists()) == (2, True, False)


def test_fewer_test_images_leave_the_runs_training_images(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    finished_run(tmp_path / "run", 0, with_locat=False)  # of 120 images
    common = ["--ks", "5", "--json", "--device", "cpu", "--cache-dir", "cache"]
    for more, numbers in (([], (120, 40)), (["--num-test", "20"], (120, 20)), (["--num-train", "60"], (60, 40))):
        code, printed = run(["knn", "run", *common, *more, "--out", "out"], capsys)
        assert code == 0, printed.err
        data = json.loads(printed.out)["data"]
        assert (data["num_train"], data["num_test"]) == numbers


def test_bad_input_of_all_probes_is_one_line(factory, voc, tmp_path, capsys):
    """The list of what users get wrong: each is named, with exit code 2, and nothing is written."""
    model, pictures, masks = factory[:1], voc / "voc-small" / "JPEGImages", voc / "voc-small" / "SegmentationClass"
    whole = {path: path.read_bytes() for path in masks.iterdir()}

    def save(name, mask):
        Image.fromarray(mask.astype(np.uint8)).save(masks / name)

    def swallow():
        for path in masks.glob("val*.png"):
            save(path.name, np.full((40, 48), 255))

    knn, dense = ("--probes", "knn"), ("--probes", "retrieve", "segment")
    cases = [
        (lambda: save("train1.png", np.zeros((20, 20))), dense, "train1.png is 20×20, but its image"),
        (lambda: save("train1.png", np.full((40, 48), 77)), dense, "labels out of range: 77"),
        (swallow, dense, "every pixel of the 3 test masks is ignored"),
        (lambda: None, (*knn, "--ks", "121"), "120 training images of shapes, but 121 neighbours"),
        (lambda: None, (*knn, "--num-train", "4"), "of the test samples are never seen in training"),
        (lambda: None, ("--probes", "linear", "--linear-epochs", "0"), "num_epochs is 0"),
        (lambda: None, (*dense, "--memory-size", "20"), "20 patches in the memory, but 30 neighbours"),
        (lambda: None, (*dense, "--dense-data", "shapes"), "'shapes' is not a known data set with masks"),
        (lambda: None, (*knn, "--data", "voc-small"), "voc-small has masks"),
        (lambda: None, ("--probes", "knm"), "invalid choice"),
        ((pictures / "val2.jpg").unlink, dense, "val2.jpg missing"),
    ]
    for break_it, arguments, message in cases:
        for path, content in whole.items():
            path.write_bytes(content)
        break_it()
        quick = [] if "--ks" in arguments else ["--ks", "3"]
        code, printed = run([*all_of(model, voc, tmp_path / "out"), *quick, *arguments], capsys)
        last = printed.err.strip().splitlines()[-1]
        assert (code, message in last, last.startswith("nearsight: ")) == (2, True, True), printed.err
        assert not (tmp_path / "out" / "results").exists(), arguments
    # Features of another model than the cache was made with: the same weights and settings, but its code does more.
    lines = [
        "import torch, nearsight",
        "def plain():",
        "    torch.manual_seed(0)",
        "    return nearsight.create_model('compact_vit', depth=1, embed_dim=24, num_heads=3)",
        "def turned():",
        "    model = plain()",
        "    model.patch_embed.register_forward_pre_hook(lambda module, inputs: (inputs[0].flip(-1),))",
        "    return model",
    ]
    (tmp_path / "bold_models.py").write_text("\n".join(lines))
    assert run([*all_of(["bold_models:plain"], voc, tmp_path / "out"), *knn], capsys)[0] == 0
    code, printed = run([*all_of(["bold_models:turned"], voc, tmp_path / "elsewhere"), *knn], capsys)
    assert code == 2
    assert "of another model, although its weights and settings are the same; remove that folder" in printed.err


def finished_run(path, seed, *, with_locat, **changes):
    """The folder of a run that was never trained."""
    small = {"depth": 1, "width": 24, "num_heads": 3, "mlp_width": 24}
    model_config = ModelConfig(**small, gaug=with_locat, prr=with_locat, **changes)
    config = RunConfig(model=model_config, data=DataConfig(num_train=120, num_test=40), seed=seed)
    RunFolder(path).claim(config)
    torch.manual_seed(seed)
    model = model_config.build((32, 32), 10)
    save_model(path / "model.safetensors", model.state_dict(), model_config, (32, 32), 10)
    (path / "provenance.json").write_text("{}")
    return config


def test_all_runs_of_a_study_are_compared(voc, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    study, cells = tmp_path / "study", []
    for seed in (0, 1, 2):
        for condition in ("ViT", "LocAt"):
            run_name = canonical_hash([condition, seed])
            if seed < 2 or condition == "ViT":
                finished_run(study / "runs" / run_name, seed, with_locat=condition == "LocAt")
            cell = {"run": run_name, "condition": condition, "levels": {"model": condition}, "seed": seed}
            cells.append({**cell, "config": {}})
    described = {"schema": 1, "name": "pairs", "scale": "small", "design": "full factorial", "cells": cells}
    described |= {"factors": {"model": ["ViT", "LocAt"]}, "settings": {}, "assumed": []}
    (study / "study.json").write_text(json.dumps(described))
    quick = ["--ks", "5", "--probes", "knn", "retrieve", "--data-dir", str(voc), "--cache-dir", str(tmp_path / "c")]
    code, printed = run(["all", str(study), *quick, "--device", "cpu", "--out", "out", "--json"], capsys)
    assert code == 0, printed.err
    told = [row for row in json.loads(printed.out)["results"] if row["measure"] == "retrieve_miou"]
    assert {row["trained_on"] for row in told} == {"shapes"}
    value = {(row["condition"], row["seed"]): row["value"] for row in told}
    assert list(value) == [("ViT", 0), ("LocAt", 0), ("ViT", 1), ("LocAt", 1), ("ViT", 2)]
    difference = np.mean([value["LocAt", seed] - value["ViT", seed] for seed in (0, 1)])
    rows = list(csv.DictReader(Path("out/tables/differences.csv").read_text().splitlines()))
    (found,) = (row for row in rows if row["measure"] == "retrieve_miou")
    assert (found["condition"], found["n"]) == ("LocAt", "2")
    assert float(found["mean"]) == pytest.approx(difference, abs=1e-12)
    verdict = Path("out/verdict.md").read_text()
    assert "Of 1 claim of S2" in verdict  # of retrieval; segmentation was not asked for
    assert "11.10" in verdict  # Table 4: 39.2 to 50.3
    assert "32 pixels, trained on shapes; probed on 3 images of voc-small" in verdict
    assert "Small scale" in verdict
    assert "LocAt (seed 2)" in verdict  # what others have and it lacks
    planned = Path("out/plan.json").read_text()
    (entry,) = json.loads(planned)["plans"]
    assert (entry["finished"], entry["conditions"], entry["seeds"]) == (0, ["ViT", "LocAt"], [0, 1, 2])
    assert {row["asked"] for row in csv.DictReader(Path("out/tables/verdict.csv").read_text().splitlines())} == {
        "planned"
    }
    # The same runs, named one by one, find their results and each other.
    runs = [
        str(study / "runs" / canonical_hash([condition, seed])) for seed in (0, 1) for condition in ("ViT", "LocAt")
    ]
    again = [path.stat().st_mtime_ns for path in sorted(Path("out/results").iterdir())]
    code, printed = run(["all", *runs, *quick, "--device", "cpu", "--out", "out", "--json"], capsys)
    assert code == 0, printed.err
    assert [path.stat().st_mtime_ns for path in sorted(Path("out/results").iterdir())] == again
    assert Path("out/plan.json").read_text() == planned
    named = {(row["condition"], row["seed"]) for row in json.loads(printed.out)["results"]}
    assert named == {("ViT", 0), ("LocAt", 0), ("ViT", 1), ("LocAt", 1)}
    for arguments, message in (
        ([str(study), runs[0]], "is a study; name it on its own"),
        ([str(tmp_path)], "config.json"),
    ):
        code, printed = run(["all", *arguments, *quick, "--out", "nowhere"], capsys)
        assert (code, message in printed.err, printed.err.count("\n")) == (2, True, 1), printed.err


def test_runs_are_grouped_where_nothing_but_locat_and_the_seed_differs(tmp_path):
    for seed in (0, 1):
        for name, with_locat in (("vit", False), ("locat", True)):
            finished_run(tmp_path / f"{name}{seed}", seed, with_locat=with_locat)
    names = ("vit0", "locat0", "vit1", "locat1")
    origins = find_origins([str(tmp_path / name) for name in names]).models
    assert [origin.label for origin in origins] == ["ViT, seed 0", "LocAt, seed 0", "ViT, seed 1", "LocAt, seed 1"]
    # Pretrained by DINO they are conditions of their own, which have other settings, but the same model and data set.
    small = {"depth": 1, "width": 24, "num_heads": 3, "mlp_width": 24}
    locat = {**small, "gaug": True, "prr": True}
    for name, model in (("dino_vit", small), ("dino_locat", locat), ("dino_wide", {**small, "width": 48})):
        config = DinoConfig(model=ModelConfig(**model), data=ImagesConfig(name="shapes"), seed=3)
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config.to_json()))
    origins = find_origins([str(tmp_path / name) for name in ("vit0", "dino_vit", "dino_locat")]).models
    assert [origin.label for origin in origins] == ["ViT, seed 0", "DINO ViT, seed 3", "DINO LocAt, seed 3"]
    # Before training they are others again, of which a pair says what training gave.
    texts = [f"{prefix}{tmp_path / name}" for name in ("vit0", "vit1") for prefix in ("init:", "")]
    labels = [origin.label for origin in find_origins(texts).models]
    assert labels == ["untrained ViT, seed 0", "ViT, seed 0", "untrained ViT, seed 1", "ViT, seed 1"]
    untrained, trained, *_ = open_frozen(texts, pretrained=False, checkpoint=None, seed=0, device=torch.device("cpu"))
    assert (untrained.label, trained.label) == ("untrained vit0", "vit0")
    # This run is as it started, too, so that all weights have to be the same.
    weights, others = untrained.model.state_dict(), trained.model.state_dict()
    assert list(weights) == list(others)
    assert all(torch.equal(weights[name], others[name]) for name in weights)
    texts = [str(tmp_path / name) for name in ("vit0", "dino_wide")]
    assert [origin.label for origin in find_origins(texts).models] == [None, None]
    # Another patch size, the same place twice, and what is no run: they stand for themselves.
    finished_run(tmp_path / "coarse", 0, with_locat=True, patch_size=8)
    finished_run(tmp_path / "again", 0, with_locat=False)
    for others in (["coarse"], ["again"], ["../compact_vit"]):
        texts = [str(tmp_path / name) for name in ("vit0", "locat1", *others)]
        assert {(origin.condition, origin.seed) for origin in find_origins(texts).models} == {(None, None)}
