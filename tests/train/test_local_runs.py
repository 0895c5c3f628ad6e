"""Runs of models that inducers made local: in a stack as alone, saved, loaded, trained on, from the command line."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from nearsight.cli import main
from nearsight.data import load_dataset
from nearsight.lens import localities
from nearsight.locat.inducers import LOCALITIES
from nearsight.models import ModelConfig, create_model, load_model
from nearsight.tensorfile import load_tensors
from nearsight.train import DataConfig, RunConfig, RunFolder, baseline, train_run
from nearsight.train.runner import train_stack

SETTINGS = {"neighborhood": "neighborhood:radius=1.5", "gaussian": "gaussian:gate=1.0,width=1.5"}


def config(name: str, seed: int) -> RunConfig:
    small = {"depth": 2, "width": 16, "num_heads": 2, "mlp_width": 32, "patch_size": 8}
    return RunConfig(
        model=ModelConfig(**small, locality=(SETTINGS.get(name, name),)),  # type: ignore[arg-type]
        data=DataConfig(name="shapes", num_train=128, num_test=40),
        protocol=dataclasses.replace(baseline(), max_epochs=2, warmup_epochs=1, batch_size=32, lr=2e-3),
        num_measured=8,
        seed=seed,
    )


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n == "relpos" else pytest.mark.slow) for n in LOCALITIES])
def test_a_local_run_is_the_same_in_a_stack_and_is_loaded_as_it_was(name: str, tmp_path: Path) -> None:
    cells = [config(name, seed) for seed in (0, 1)]
    folders = [RunFolder(tmp_path / f"stacked-{seed}") for seed in (0, 1)]
    dataset = load_dataset("shapes", num_train=128, num_test=40)
    train_stack(cells, folders, dataset=dataset, device=torch.device("cpu"))
    alone = train_run(cells[1], tmp_path / "alone")
    results = [folder.read_result() for folder in (alone, folders[1])]
    assert results[0]["test_loss"] == pytest.approx(results[1]["test_loss"], rel=1e-5)
    assert results[0]["min_mad"] == pytest.approx(results[1]["min_mad"], rel=1e-4)
    kept, stacked = (load_tensors(folder.model)[0] for folder in (alone, folders[1]))
    assert all(torch.allclose(kept[part], stacked[part], atol=1e-5) for part in kept)
    loaded = load_model(alone.model)
    assert localities(loaded) == [name]
    assert set(kept) == set(loaded.state_dict())
    written = json.loads((alone.path / "config.json").read_text())["config"]["model"]["locality"]
    assert written == list(cells[1].model.locality)


@pytest.mark.slow
def test_a_trained_model_is_finetuned_with_an_inducer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    small = ("--epochs", "1", "--num-train", "80", "--num-test", "40", "--num-images", "30", "--batch-size", "32")
    call = ("finetune", "compact_vit.modern_cifar100", "--data", "shapes", *small, "--add", "alibi2d", "--out", "out")
    assert main((*call, "--device", "cpu")) == 0
    trained = load_tensors(Path("out/run/model.safetensors"))[0]
    gates = torch.stack([weight for name, weight in trained.items() if name.endswith("locality.alibi2d.gate")])
    assert gates.shape == (8, 8)
    assert 1e-4 < float(gates.abs().max()) < 0.5  # from 0, after three steps
    names = set(create_model("compact_vit.modern_cifar100").state_dict())
    assert names < set(trained)
