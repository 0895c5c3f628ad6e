"""The segmentation probe from images to results: it learns, is repeatable, can be stopped, and says what is wrong."""

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image

from nearsight.commands import probe_segment
from nearsight.data.segmentation import SegmentationSet, load_segmentation
from nearsight.errors import InputError
from nearsight.metrics import confusion_matrix, mean_iou
from nearsight.models import create_model
from nearsight.probe.frozen import FrozenModel, Preparation
from nearsight.probe.segmentation.config import SegmentConfig
from nearsight.probe.segmentation.head import LossRow, Prediction
from nearsight.probe.segmentation.probing import ProbeStoppedError, SegmentListener, probe_segmentation
from nearsight.probe.segmentation.result import SegmentFolder
from nearsight.train import Stop

PREPARATION = Preparation(size=(32, 32), mean=(0.3,) * 3, std=(0.3,) * 3)
COLOURS = np.array([[40, 40, 40], [220, 40, 40], [40, 220, 40], [40, 40, 220]])
"""Of background and the first three objects of VOC."""


@pytest.fixture
def data_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A VOC whose objects are rectangles with a colour each."""
    monkeypatch.delenv("NEARSIGHT_DATA", raising=False)
    folder, generator = tmp_path / "data" / "voc-small", np.random.default_rng(0)
    for name in ("JPEGImages", "SegmentationClass", "ImageSets/Segmentation"):
        (folder / name).mkdir(parents=True)
    for part, num in (("train", 12), ("val", 5)):
        names = [f"{part}{number}" for number in range(num)]
        (folder / "ImageSets" / "Segmentation" / f"{part}.txt").write_text("\n".join(names))
        for name in names:
            rows, columns = generator.integers(34, 50, 2)
            mask = np.zeros((rows, columns), dtype=np.uint8)
            for label in (1, 2, 3):
                top, left = generator.integers(0, rows - 16), generator.integers(0, columns - 16)
                mask[top : top + 16, left : left + 16] = label
            pixels = COLOURS[mask] + generator.integers(-30, 31, (rows, columns, 3))
            mask[:1] = 255
            Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(folder / "JPEGImages" / f"{name}.jpg")
            Image.fromarray(mask).save(folder / "SegmentationClass" / f"{name}.png")
    return tmp_path / "data"


@pytest.fixture
def dataset(data_dir: Path) -> SegmentationSet:
    return load_segmentation("voc-small", data_dir)


def frozen(seed: int = 0) -> FrozenModel:
    torch.manual_seed(seed)
    model = create_model("compact_vit", depth=1, embed_dim=48, num_heads=2)
    return FrozenModel(label="small", model=model, preparation=PREPARATION)


def config(**changes: object) -> SegmentConfig:
    settings = {"iterations": 60, "batch_size": 4, "crop": 32, "shortest": 36, "longest": 60, "width": 32, "lr": 3e-3}
    return SegmentConfig(**{**settings, "photometric": False, **changes})  # type: ignore[arg-type]


class StopsAt(SegmentListener):
    def __init__(self, stop: Stop, *, step: int = -1, tested: int = -1) -> None:
        self._stop, self._at_step, self._at_tested = stop, step, tested

    def step(self, steps_done: int, last: LossRow | None) -> None:
        if steps_done == self._at_step:
            self._stop.request("SIGTERM")

    def tested(self, num_done: int, num_images: int) -> None:
        if num_done == self._at_tested:
            self._stop.request("SIGTERM")


def weights(folder: SegmentFolder) -> bytes:
    return folder.head.read_bytes()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_it_learns_and_its_numbers_are_those_of_its_predictions(
    tmp_path: Path, dataset: SegmentationSet, device: str
) -> None:
    shown: list[Prediction] = []
    folder = probe_segmentation(frozen(), dataset, config(), tmp_path / "out", show=shown.extend, device=device)
    result, classes = folder.read_result(), folder.read_per_class()
    # 18 of the 21 classes are never there; two in three pixels are background.
    assert result["miou"] > 0.5 > 0.2 > result["miou_of_one_class"]
    assert result["pixel_accuracy"] > 0.8
    assert len(shown) == len(dataset.test)
    total = sum(confusion_matrix(one.prediction_HW.cpu(), one.truth_HW, 21, 255) for one in shown)
    assert result["miou"] == pytest.approx(float(mean_iou(total)))
    assert classes["iou"].mean() == pytest.approx(result["miou"])
    assert classes["truth_pixels"].tolist() == total.sum(1).tolist()
    assert list(classes["name"][:2]) == ["background", "aeroplane"]
    assert len(result["classes_not_tested"]) == 17
    assert result["classes_tested_but_not_trained"] == []
    history = pd.read_csv(folder.path / "history.csv")
    assert history["iteration"].tolist() == list(range(1, 61))
    assert history["loss"].iloc[-5:].mean() < history["loss"].iloc[:5].mean() / 2
    assert not folder.checkpoint.exists()
    told = json.loads((folder.path / "provenance.json").read_text())
    assert {"commit", "versions", "hardware", "seed", "wall_seconds"} <= set(told)


def test_its_numbers_are_those_of_scikit_learn(tmp_path: Path, dataset: SegmentationSet) -> None:
    metrics = pytest.importorskip("sklearn.metrics", reason="needs scikit-learn: pip install 'nearsight[dev]'")
    shown: list[Prediction] = []
    folder = probe_segmentation(frozen(), dataset, config(iterations=15), tmp_path / "out", show=shown.extend)
    truth, taken = (
        np.concatenate([getattr(one, name)[one.truth_HW != 255].numpy() for one in shown])
        for name in ("truth_HW", "prediction_HW")
    )
    labels = sorted({*truth, *taken})
    ious = metrics.jaccard_score(truth, taken, labels=labels, average=None)
    result, classes = folder.read_result(), folder.read_per_class()
    assert result["miou"] == pytest.approx(ious.mean(), abs=1e-12)
    assert result["pixel_accuracy"] == pytest.approx(metrics.accuracy_score(truth, taken), abs=1e-12)
    assert classes["iou"].dropna().tolist() == pytest.approx(ious.tolist(), abs=1e-12)
    assert classes["iou"].dropna().index.tolist() == labels
    assert result["miou_low"] < result["miou"] < result["miou_high"]


def test_a_stopped_probe_goes_on_as_if_nothing_had_been(tmp_path: Path, dataset: SegmentationSet) -> None:
    settings = config(iterations=10, photometric=True)
    whole = probe_segmentation(frozen(), dataset, settings, tmp_path / "whole")
    for name, moment, words in (("a", {"step": 4}, "after iteration 4;"), ("b", {"tested": 2}, "after iteration 10;")):
        stop = Stop()
        with pytest.raises(ProbeStoppedError, match=f"stopped by SIGTERM {words} the same command continues") as caught:
            probe_segmentation(
                frozen(), dataset, settings, tmp_path / name, stop=stop, listener=StopsAt(stop, **moment)
            )
        assert caught.value.by == "SIGTERM"
        again = probe_segmentation(frozen(), dataset, settings, tmp_path / name)
        assert weights(again) == weights(whole)
        assert again.read_result() == whole.read_result()
        assert (again.path / "history.csv").read_text() == (whole.path / "history.csv").read_text()
    before = (whole.path / "result.json").stat().st_mtime_ns
    probe_segmentation(frozen(), dataset, settings, tmp_path / "whole")
    assert (whole.path / "result.json").stat().st_mtime_ns == before  # read, not repeated


def test_images_of_a_batch_may_be_taken_a_few_at_a_time(
    tmp_path: Path, dataset: SegmentationSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = []
    for name, most in (("together", 2**27), ("apart", 1)):
        monkeypatch.setattr("nearsight.probe.segmentation.head.LOGITS_AT_ONCE", most)
        folder = probe_segmentation(frozen(), dataset, config(iterations=5), tmp_path / name)
        results.append(pd.read_csv(folder.path / "history.csv")["loss"].to_numpy())
    assert results[0] == pytest.approx(results[1], rel=1e-4)


def test_a_folder_is_one_probes(tmp_path: Path, dataset: SegmentationSet) -> None:
    settings = config(iterations=2)
    probe_segmentation(frozen(), dataset, settings, tmp_path / "out")
    for model, other in ((frozen(seed=1), settings), (frozen(), config(iterations=3))):
        with pytest.raises(InputError, match="out holds something else"):
            probe_segmentation(model, dataset, other, tmp_path / "out")


def test_what_does_not_fit_is_said_before_anything_is_written(tmp_path: Path, dataset: SegmentationSet) -> None:
    out = tmp_path / "out"
    with pytest.raises(InputError, match="takes multiples of 4; use --crop 36"):
        probe_segmentation(frozen(), dataset, config(crop=33), out)
    with pytest.raises(InputError, match="has no block 5: they count from 0 to 0"):
        probe_segmentation(frozen(), dataset, config(block=5), out)
    positional = create_model("compact_vit_positional", depth=1, embed_dim=48, num_heads=2)
    one_size = FrozenModel(label="p", model=positional, preparation=PREPARATION)
    with pytest.raises(InputError, match=r"p cannot be read at 32×32 and 32×36 pixels.* use --square --crop 32"):
        probe_segmentation(one_size, dataset, config(), out)
    assert not out.exists()
    for _, mask in dataset.test.pairs:
        Image.fromarray(np.full(np.asarray(Image.open(mask)).shape, 255, dtype=np.uint8)).save(mask)
    with pytest.raises(InputError, match="every pixel of the 5 test masks is ignored"):
        probe_segmentation(frozen(), dataset, config(), out)
    assert not out.exists()


def test_models_of_one_size_are_tested_on_squares(tmp_path: Path, dataset: SegmentationSet) -> None:
    positional = create_model("compact_vit_positional", depth=1, embed_dim=48, num_heads=2)
    one_size = FrozenModel(label="p", model=positional, preparation=PREPARATION)
    folder = probe_segmentation(one_size, dataset, config(iterations=2, square=True, crop=40), tmp_path / "out")
    assert 0 <= folder.read_result()["miou"] <= 1


def test_classes_that_were_never_trained_are_named(tmp_path: Path, dataset: SegmentationSet) -> None:
    for _, path in dataset.train.pairs:
        mask = np.array(Image.open(path))
        mask[mask == 2] = 0
        Image.fromarray(mask).save(path)
    folder = probe_segmentation(frozen(), dataset, config(iterations=4), tmp_path / "out")
    assert folder.read_result()["classes_tested_but_not_trained"] == ["bicycle"]


def test_a_damaged_file_on_the_way_is_named_and_costs_nothing(tmp_path: Path, dataset: SegmentationSet) -> None:
    path = dataset.train.pairs[3][1]
    mask = path.read_bytes()
    Image.fromarray(np.zeros((2, 2), dtype=np.uint8)).save(path)
    with pytest.raises(InputError, match=f"{path.name} is 2×2, but its image"):
        probe_segmentation(frozen(), dataset, config(iterations=6), tmp_path / "out")
    assert not (tmp_path / "out" / "result.json").exists()
    path.write_bytes(mask)


SMALL_MODELS = """
from nearsight.models import create_model

def plain():
    return create_model("compact_vit", depth=1, embed_dim=48, num_heads=2)

def positional():
    return create_model("compact_vit_positional", depth=1, embed_dim=48, num_heads=2)
"""


def test_the_command(
    tmp_path: Path, data_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "segment_models.py").write_text(SMALL_MODELS)
    plain, positional = "segment_models:plain", "segment_models:positional"
    quick = ["--iterations", "2", "--batch-size", "2", "--crop", "32", "--data-dir", str(data_dir), "--device", "cpu"]
    assert probe_segment.main([plain, "--data", "voc-small", "--json", *quick]) == 0
    (told,) = json.loads(capsys.readouterr().out)["models"]
    out = tmp_path / told["folder"]
    assert told["miou"] == json.loads((out / "result.json").read_text())["miou"]
    assert (told["model"], told["data"], told["iterations"]) == (plain, "voc-small", 2)
    assert Image.open(out / "figures" / "predictions.png").width > 500
    settings = json.loads((out / "config.json").read_text())["settings"]
    assert (settings["crop"], settings["shortest"], settings["batch_size"], settings["lr"]) == (32, 73, 2, 1e-3)
    assert probe_segment.main([plain, positional, "--square", "--out", "two", *quick]) == 0
    shown = capsys.readouterr().out
    assert f"{positional} on voc-small: mIoU" in shown
    assert "not there" in shown
    assert pd.read_csv(tmp_path / "two" / "table.csv")["miou"].between(0, 1).all()
    assert (tmp_path / "two" / "segment_models-positional" / "per_class.csv").is_file()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "no model is named"),
        (["compact_vit", "--data", "voc"], "did you mean 'voc2012'|did you mean 'voc-small'"),
        (["compact_vit", "--data", "ade20k"], "ade20k is not in"),
        (["compact_vt"], "did you mean 'compact_vit'"),
        (["compact_vit", "compact_vit"], "named twice"),
        (["compact_vit", "--crop", "30"], "takes multiples of 4; use --crop 32"),
        (["compact_vit", "--iterations", "0"], "iterations is 0"),
        (["runs/nowhere"], "there is no run there"),
    ],
)
def test_the_command_says_what_is_wrong(
    arguments: list[str], words: str, data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=words):
        probe_segment.main([*arguments, "--data-dir", str(data_dir), "--device", "cpu"])
    assert not (tmp_path / "runs").exists()
