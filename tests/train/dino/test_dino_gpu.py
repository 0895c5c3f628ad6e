"""Pretraining on a GPU: a captured step is the step, and its numbers are those of the CPU up to rounding."""

import dataclasses
import math
from pathlib import Path

import pandas as pd
import pytest
import torch

from nearsight.data import load_dataset
from nearsight.models import ModelConfig
from nearsight.train.dino import CropsConfig, DinoConfig, DinoProtocol, DinoTraining, ImagesConfig, pretrain

pytestmark = pytest.mark.gpu

GPU = torch.device("cuda")
CONFIG = DinoConfig(
    model=ModelConfig(patch_size=4, depth=2, width=48, num_heads=2, mlp_width=96),
    data=ImagesConfig(name="shapes", num_train=256, num_test=10),
    crops=CropsConfig(num_local=3, local_size=16),
    protocol=DinoProtocol(
        epochs=3, batch_size=64, lr=2e-3, warmup_epochs=0, num_prototypes=32, hidden=32, bottleneck=16, drop_path=0.0
    ),
)


@pytest.fixture(scope="module")
def dataset():
    return load_dataset("shapes", num_train=256, num_test=10)


@pytest.fixture(autouse=True)
def exact_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)


def trained(config: DinoConfig, dataset, device: torch.device, *, captured: bool = True):
    """Two epochs, between which the prototypes begin to learn."""
    training = DinoTraining(config, dataset, device)
    if not captured:
        training._graph = lambda: training._step
    results = [training.run_epoch(epoch) for epoch in range(2)]
    assert (training._captured is not None) == (captured and device.type == "cuda")
    return results, {name: value.cpu() for name, value in training.state().items()}


def assert_near(ours, theirs, start: dict[str, torch.Tensor], *, loss: float, moved: float) -> None:
    """Losses, and where all weights went compared with how far they went."""
    for mine, expected in zip(ours[0], theirs[0], strict=True):
        assert math.isfinite(mine.loss)
        assert mine.loss == pytest.approx(expected.loss, rel=loss)
        assert mine.information == pytest.approx(expected.information, rel=0.1, abs=0.02)
    for kind in ("student/", "teacher/"):
        # Together: biases of keys have no gradient but for rounding, of which AdamW makes steps like any other.
        names = [name for name in start if name.startswith(kind)]
        here, there, before = (torch.cat([of[name].flatten() for name in names]) for of in (ours[1], theirs[1], start))
        off, way = (torch.linalg.vector_norm(difference) for difference in (here - there, there - before))
        assert off <= moved * way, f"{kind}: off by {off:.1e}, moved by {way:.1e}"
    for name in ("optimizer/steps/body", "optimizer/steps/prototypes"):
        assert torch.equal(ours[1][name], theirs[1][name]), name  # warming up leaves no trace


@pytest.mark.parametrize("locat", [False, True], ids=["plain", "locat"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("drop_path", [0.0, 0.2])
def test_a_captured_step_is_the_step(dataset, precision, drop_path: float, locat: bool) -> None:
    config = dataclasses.replace(
        CONFIG,
        precision=precision,
        model=dataclasses.replace(CONFIG.model, gaug=locat, prr=locat),
        protocol=dataclasses.replace(CONFIG.protocol, drop_path=drop_path),
    )
    start = DinoTraining(config, dataset, torch.device("cpu")).state()
    ours, theirs = (trained(config, dataset, GPU, captured=captured) for captured in (True, False))
    assert_near(ours, theirs, start, loss=1e-3, moved=0.02)


def test_a_gpu_gives_the_cpus_numbers(dataset) -> None:
    start = DinoTraining(CONFIG, dataset, torch.device("cpu")).state()
    ours, theirs = (trained(CONFIG, dataset, device) for device in (GPU, torch.device("cpu")))
    # A grey level that falls on the other side of a rounding is another image.
    assert_near(ours, theirs, start, loss=5e-3, moved=0.3)


def test_reduced_precision_stays_near(dataset) -> None:
    losses = [
        trained(dataclasses.replace(CONFIG, precision=precision), dataset, GPU)[0][-1].loss
        for precision in ("fp32", "bf16")
    ]
    assert losses[1] == pytest.approx(losses[0], rel=0.03)


def test_a_run_continues_where_it_was(dataset) -> None:
    """From another one's state, with a graph of its own."""
    config = dataclasses.replace(CONFIG, precision="bf16")
    whole, again = (DinoTraining(config, dataset, GPU) for _ in range(2))
    for epoch in range(2):
        whole.run_epoch(epoch)
    state = whole.state()
    again.run_epoch(1)  # captured before it is given the state
    again.load_state(state)
    ours, theirs = again.run_epoch(2), whole.run_epoch(2)
    assert ours.loss == pytest.approx(theirs.loss, rel=1e-3)
    assert ours.centre_norm == pytest.approx(theirs.centre_norm, rel=1e-3)


def test_images_that_do_not_fit_are_streamed(dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    resident = trained(CONFIG, dataset, GPU)[0]
    monkeypatch.setattr("nearsight.data.device.fits", lambda *_: False)
    streamed = DinoTraining(CONFIG, dataset, GPU)
    for epoch, expected in enumerate(resident):
        assert streamed.run_epoch(epoch).loss == pytest.approx(expected.loss, rel=1e-3)


def test_a_whole_run(tmp_path: Path) -> None:
    folder = pretrain(dataclasses.replace(CONFIG, precision="bf16"), tmp_path / "run", device="cuda")
    history = pd.read_csv(folder.path / "history.csv")
    assert list(history["epoch"]) == [1, 2, 3]
    assert folder.run.read_provenance()["images_per_second"] > 0
