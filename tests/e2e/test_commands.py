"""The commands as a person types them."""

import json
import os
import random
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image

import nearsight
from nearsight.cli import COMMANDS, main
from nearsight.commands.demo import NEXT, SEEN
from nearsight.commands.measure import MeasureOptions
from nearsight.commands.measuring import check_what
from nearsight.commands.options import parse
from nearsight.commands.study import RunOptions
from nearsight.data import load_dataset
from nearsight.models import load_model, zoo
from nearsight.models.factory import check_model_name
from nearsight.papers import find_study_or_simulation
from nearsight.train import RunFolder
from nearsight.version import __version__

SMALL = [
    *("--model.depth", "2", "--model.width", "16", "--model.num-heads", "2", "--model.mlp-width", "16"),
    *("--data.num-train", "300", "--data.num-test", "50", "--protocol.batch-size", "16"),
    *("--num-measured", "20", "--device", "cpu"),
]


def call(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "nearsight", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=cwd)


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    places = [shown.index(f"\n  {name} ") for name in COMMANDS]
    assert places == sorted(places)
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == __version__
    assert main([]) == 2


@pytest.mark.parametrize("command", list(COMMANDS))
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        sys.exit(main([command, "--help"]))
    assert stop.value.code == 0
    assert "usage: nearsight " + command in capsys.readouterr().out


def test_train_help_shows_every_field_with_its_text_and_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["train", "compact-cifar100", "--protocol", "modern", "--help"])
    assert stop.value.code == 0
    shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
    for words in (
        "--protocol.lr FLOAT",
        "Peak learning rate of AdamW. Assumed: not reported by the paper. (default: 0.001)",
        "--protocol.smoothing FLOAT Label smoothing ε. Assumed: not reported by the paper. (default: 0.1)",
        "--protocol.cutmix.p FLOAT Probability that it is applied. (default: 0.5)",
        "--model.depth INT Transformer blocks. (default: 8)",
        "--data.validation-fraction FLOAT",
        "--protocol {baseline,modern,locat}",
    ):
        assert words in shown


def test_train_then_measure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    train = ["train", "compact-shapes", "--protocol", "modern", "--out", str(run), *SMALL, "--protocol.max-epochs", "2"]
    assert main([*train, "--protocol.cutmix.p", "0.25", "--protocol.autoaugment.p", "0", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["folder"] == str(run)
    config = RunFolder(run).read_config()
    assert [augmentation.name for augmentation in config.protocol.augment] == ["crop", "flip", "cutmix"]
    assert config.protocol.augmentation("cutmix").p == 0.25
    assert config.protocol.smoothing == 0.1

    heads = (run / "heads.csv").read_bytes()
    assert main(["measure", str(run), "--device", "cpu"]) == 0
    shown = capsys.readouterr().out
    assert (run / "heads.csv").read_bytes() == heads
    for name in ("mad-profiles", "mad-entropy-plane", "heatmaps"):
        assert (run / "figures" / f"{name}.svg").read_text().lstrip().startswith("<?xml")
        with Image.open(run / "figures" / f"{name}.png") as picture:
            assert picture.width > 500
    assert f"{pd.read_csv(run / 'heads.csv')['mad'].min():.3f}" in shown
    assert "<!doctype html>" in (run / "report.html").read_text().lower()


def test_measure_a_timm_model_on_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "images"
    (folder / "nested").mkdir(parents=True)
    rng = np.random.default_rng(0)
    for number, shape in enumerate([(40, 60, 3), (70, 50)]):
        Image.fromarray(rng.integers(0, 256, shape, dtype=np.uint8)).save(folder / "nested" / f"{number}.png")
    out = tmp_path / "out"
    assert (
        main(["measure", "compact_vit", "--images", str(folder), "--out", str(out), "--json", "--device", "cpu"]) == 0
    )
    printed = json.loads(capsys.readouterr().out)
    assert len(printed["heads"]) == 64
    assert {row["num_images"] for row in printed["heads"]} == {2}
    assert all(Path(path).is_file() for path in printed["files"])


def test_a_run_measures_other_images_as_it_saw_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Size and normalisation are those of the run's data set, not of the architecture's default."""
    run, folder = tmp_path / "run", tmp_path / "images"
    train = ["train", "compact-shapes", "--out", str(run), *SMALL, "--protocol.max-epochs", "1"]
    assert main([*train, "--data.image-size", "64", "--model.patch-size", "8"]) == 0
    dataset = load_dataset("shapes", image_size=64, num_train=300, num_test=50)
    folder.mkdir()
    for number, pixels in enumerate(dataset.test.images_NCHW[:4]):
        Image.fromarray(pixels.permute(1, 2, 0).numpy()).save(folder / f"{number}.png")
    capsys.readouterr()
    out = tmp_path / "out"
    assert main(["measure", str(run), "--images", str(folder), "--out", str(out), "--json", "--device", "cpu"]) == 0
    measured = [row["mad"] for row in json.loads(capsys.readouterr().out)["heads"]]
    mean, std = (torch.tensor(values)[:, None, None] for values in (dataset.mean, dataset.std))
    table = nearsight.measure(load_model(run / "model.safetensors"), (dataset.test.images_NCHW[:4] / 255 - mean) / std)
    assert measured == pytest.approx(table.mad.flatten().tolist(), rel=1e-6)


def test_measure_uses_the_embedded_images_by_default(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["measure", "compact_vit", "--out", str(tmp_path), "--num-images", "4", "--json", "--device", "cpu"]
    assert main(arguments) == 0
    assert {row["num_images"] for row in json.loads(capsys.readouterr().out)["heads"]} == {4}


def test_a_small_demo_from_weights_to_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "demo"
    small = ["--epochs", "1", "--num-train", "200", "--steps", "60"]
    arguments = ["demo", "--out", str(out), *small, "--device", "cpu"]
    assert main(arguments) == 0
    shown = capsys.readouterr().out
    smallest = {
        label: pd.read_csv(out / label.lower() / "heads.csv")["mad"].min() for label in ("Baseline", "Modern", "LocAt")
    }
    for label, mad in smallest.items():
        assert f"{mad:.3f} with {label}" in shown
        # On 200 images about what the shipped table says of 5,000.
        shipped = pd.read_csv(zoo.folder(SEEN[label]) / "heads.csv")["mad"].min()
        assert mad == pytest.approx(shipped, abs=0.005)
    assert smallest["Modern"] < 0.01 < smallest["LocAt"] < 0.1 < 0.28 < smallest["Baseline"]
    assert "0.418 is uniform attention" in shown
    assert "Induced by construction." in shown
    runs = pd.read_csv(out / "induce" / "runs.csv").set_index("condition")
    assert runs.index.tolist() == ["plain", "LocAt"]
    plain, local = runs["min_mad"]
    assert f"{plain:.3f} in the plain ViT and {local:.3f} with LocAt" in shown
    found = pd.read_csv(out / "understand" / "runs.csv")
    assert f"in {int(found['exact'].sum())} of 5 seeds attention joins every patch with its partner" in shown
    for heading in ("What you saw", "What this does not show", "Next"):
        assert f"\n{heading}\n" in shown
    page = (out / "report.html").read_text()
    for name in ("explorer", "what-offsets", "induce", "understand"):
        assert f'<section id="{name}"' in page
    assert "induced by construction" in page
    assert main([*arguments, "--json"]) == 0  # nothing is trained again
    found_again = json.loads(capsys.readouterr().out)
    assert found_again["see"]["Modern"]["min_mad"] == pytest.approx(smallest["Modern"])
    assert found_again["induce"]["LocAt"]["min_mad"] == pytest.approx(local)
    assert [row["exact"] for row in found_again["understand"]] == found["exact"].tolist()


def test_what_the_demo_says_to_type_next_can_be_typed() -> None:
    kinds = {"measure": (1, MeasureOptions), "study": (2, RunOptions)}
    for typed in NEXT:
        nearsight_, command, *arguments = shlex.split(typed)
        skipped, options = kinds[command]
        parsed = parse(options, arguments[skipped - 1 :], prog=f"{nearsight_} {command}")
        if isinstance(parsed, MeasureOptions):
            for model in parsed.models:
                check_model_name(model)
            check_what(parsed.what, len(parsed.models))
        else:
            assert all(map(find_study_or_simulation, parsed.names))


def test_exit_code_and_streams_of_the_real_process(tmp_path: Path) -> None:
    done = call("train", "compact-cifr100", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == "nearsight: 'compact-cifr100' is not a known recipe; did you mean 'compact-cifar100'?\n"


def train_process(out: Path) -> subprocess.Popen[str]:
    arguments = ["train", "compact-shapes", "--out", str(out), *SMALL, "--protocol.max-epochs", "6"]
    return subprocess.Popen(
        [sys.executable, "-m", "nearsight", *arguments, "--protocol.patience", "6"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.faults
def test_killed_at_three_random_moments_it_ends_as_if_nothing_had_happened(tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    process = train_process(whole)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    epoch_seconds = pd.read_csv(whole / "history.csv")["seconds"].median()
    chance = random.Random(os.environ.get("NEARSIGHT_KILL_SEED", "0"))
    kills = 0
    for epoch in (1, 2, 4):  # after so many epochs, then at a random moment of the next
        process = train_process(killed)
        while process.poll() is None and (
            not (killed / "history.csv").exists() or len(pd.read_csv(killed / "history.csv")) < epoch
        ):
            time.sleep(0.01)
        time.sleep(chance.uniform(0, 1.2 * epoch_seconds))
        process.send_signal(signal.SIGKILL)
        process.communicate()
        kills += process.returncode == -signal.SIGKILL
    assert kills == 3
    process = train_process(killed)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    a, b = (pd.read_csv(path / "history.csv").drop(columns="seconds") for path in (whole, killed))
    pd.testing.assert_frame_equal(a, b, check_exact=True)
    for name in ("model.safetensors", "heads.csv", "heads.npz", "result.json"):
        assert (whole / name).read_bytes() == (killed / name).read_bytes()
