"""`nearsight probe accuracy`: classes found by their names, right answers as a plain loop counts them."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from timm.data import ImageNetInfo, create_transform, resolve_data_config

from nearsight.augment import ResizedCrop
from nearsight.cli import main
from nearsight.errors import InputError
from nearsight.models import ModelConfig
from nearsight.probe.accuracy import answers, places_of
from nearsight.train import DataConfig, RunConfig, baseline, train_run

WNIDS = ("n01440764", "n02102040", "n03445777", "n03394916", "n01443537", "n02979186", "n03000684")


def write_pictures(folder: Path, classes: tuple[str, ...], per_class: int = 3) -> list[tuple[Path, int]]:
    generator = np.random.default_rng(0)
    written = []
    for label, name in enumerate(sorted(classes)):
        (folder / name).mkdir(parents=True)
        for number in range(per_class):
            coarse = Image.fromarray(generator.integers(0, 256, (4, 4, 3), dtype=np.uint8))
            written.append((folder / name / f"{number}.png", label))
            coarse.resize((50 + 9 * number, 60), Image.Resampling.BICUBIC).save(written[-1][0])
    return written


def test_classes_are_found_by_their_names() -> None:
    names = ImageNetInfo("imagenet-1k").label_names()
    places = places_of(sorted(WNIDS), 1000)
    assert [names[place] for place in places] == sorted(WNIDS)
    assert torch.equal(places_of(names, 1000), torch.arange(1000))
    assert torch.equal(places_of(["cat", "dog"], 2), torch.arange(2))
    assert len(places_of(sorted(WNIDS), 21841)) == 7
    with pytest.raises(InputError, match=r"the model has 1000 classes and the data 2 \('cat', 'dog', …\)"):
        places_of(["cat", "dog"], 1000)


@pytest.mark.parametrize("num_classes", [3, 7])
def test_answers_are_those_of_a_loop(num_classes: int) -> None:
    torch.manual_seed(0)
    logits_NC, labels_N = torch.randn(40, 20), torch.randint(num_classes, (40,))
    places_c = torch.randperm(20)[:num_classes]
    model = torch.nn.Identity()
    found = answers(model, logits_NC.split(9), labels_N, places_c, torch.device("cpu"))
    for number, label in enumerate(labels_N.tolist()):
        own = [(float(logits_NC[number, place]), place) for place in places_c]
        rank = sum(value > float(logits_NC[number, places_c[label]]) for value, _ in own)
        assert bool(found.top1[number]) == (rank == 0)
        assert bool(found.top5[number]) == (rank < 5)
        assert bool(found.of_all[number]) == (int(logits_NC[number].argmax()) == int(places_c[label]))


def test_a_folder_of_some_of_imagenets_classes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Against timm's own preparation, picture by picture."""
    written = write_pictures(tmp_path / "some", WNIDS)
    name = "test_vit3.r160_in1k"
    command = ["probe", "accuracy", name, "--data", str(tmp_path / "some"), "--out", str(tmp_path / "out"), "--json"]
    assert main([*command, "--seed", "3", "--batch-size", "4", "--crop-pct", "0.875", "--image-size", "64"]) == 0
    found = json.loads(capsys.readouterr().out)
    torch.manual_seed(3)
    model = timm.create_model(name, img_size=64).eval()
    wanted = resolve_data_config({"input_size": (3, 64, 64), "crop_pct": 0.875}, model=model)
    transform = create_transform(**wanted)
    places = places_of(sorted(WNIDS), 1000)
    right = []
    for path, label in written:
        with torch.no_grad():
            logits = model(transform(Image.open(path).convert("RGB")).unsqueeze(0))[0]
        right.append((int(logits[places].argmax()) == label, label in logits[places].topk(5).indices))
    (told,) = found["models"]
    assert told["top1"] == pytest.approx(sum(one for one, _ in right) / len(right))
    assert told["top5"] == pytest.approx(sum(five for _, five in right) / len(right))
    assert found["data"] == {"name": str(tmp_path / "some"), "num_test": 21, "num_classes": 7}
    assert "shorter side resized to 73" in found["notes"][0]
    assert (tmp_path / "out" / "table.csv").exists()


def test_a_streamed_run_has_the_accuracy_that_it_was_tested_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for part in ("train", "val"):
        write_pictures(tmp_path / "data" / part, ("a", "b", "c"), per_class=12)
    protocol = dataclasses.replace(baseline(), max_epochs=2, warmup_epochs=1, batch_size=8, augment=(ResizedCrop(),))
    run = RunConfig(
        model=ModelConfig(depth=1, width=16, num_heads=2, mlp_width=16, patch_size=8),
        data=DataConfig(name="image-folder", image_size=32, stream=True, crop_pct=0.8),
        protocol=dataclasses.replace(protocol, lr=5e-3),
        num_measured=4,
    )
    folder = train_run(run, tmp_path / "run", data_dir=tmp_path / "data")
    options = ["--data-dir", str(tmp_path / "data"), "--out", str(tmp_path / "out"), "--json"]
    assert main(["probe", "accuracy", str(folder.path), *options]) == 0
    (told,) = json.loads(capsys.readouterr().out)["models"]
    assert told["top1"] == folder.read_result()["test_acc"]
    assert told["top1"] == told["of_all"]
    assert "shorter side resized to 40" in told["preparation"]
    assert main(["probe", "knn", str(folder.path), *options[:2], "--out", str(tmp_path / "knn"), "--ks", "3"]) == 0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--crop-pct", "1.5", "--data", "shapes"], "--crop-pct is 1.5, but must be greater than 0 and at most 1"),
        (["--num-train", "3", "--data", "shapes"], "--num-train does not go with probe accuracy"),
        ([], "say with --data on which images"),
        (["--data", "no-such"], "'no-such' is not a known data set"),
    ],
)
def test_what_cannot_be_asked(
    options: list[str], said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["probe", "accuracy", "vit_tiny_patch16_224", *options, "--out", str(tmp_path / "out")]) == 2
    assert said in capsys.readouterr().err
