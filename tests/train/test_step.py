"""Parts of a step. Stochastic depth: which branches go, how often, and that a cell's coins are its own. Distillation:
what the teacher says is what is learned, and teachers that do not fit are refused.
"""

import dataclasses
from pathlib import Path

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nearsight.configuration import field_docs
from nearsight.data import Dataset, load_dataset
from nearsight.errors import InputError
from nearsight.models import ModelConfig, load_model, save_model
from nearsight.models.sources import SourcedModel
from nearsight.randomness import Draws
from nearsight.train import DataConfig, Protocol, RunConfig, RunFolder, baseline, step, train_run
from nearsight.train.dino import CropsConfig, DinoConfig, DinoFolder
from nearsight.train.dropping import DropPath, PathDropping
from nearsight.train.engine import Stack, initial_model
from nearsight.train.stacked import stack_weights, stacked_forward, vmapped_forward, weightless
from nearsight.train.step import Teacher

CPU = torch.device("cpu")


def model(seed: int = 0, name: str = "compact_vit", depth: int = 3) -> nn.Module:
    torch.manual_seed(seed)
    return timm.create_model(name, depth=depth, embed_dim=32, num_heads=4, num_classes=5)


def draws(num_cells: int, num_samples: int, seed: int = 0) -> Draws:
    index = torch.arange(num_samples).expand(num_cells, -1)
    seeds = seed + torch.arange(num_cells)
    return Draws(seeds, torch.zeros((), dtype=torch.int64), torch.zeros((), dtype=torch.int64), index)


def test_the_rates_are_timms() -> None:
    depth, rate = 5, 0.4
    dropping = PathDropping.install(model(depth=depth), [0.0, rate], CPU)
    theirs = timm.create_model("vit_tiny_patch16_224", depth=depth, drop_path_rate=rate)
    expected = [
        1 - getattr(getattr(block, name), "drop_prob", 0.0)
        for block in theirs.blocks
        for name in ("drop_path1", "drop_path2")
    ]
    torch.testing.assert_close(dropping.keep_Kn, torch.tensor([[1.0] * 2 * depth, expected]))


def test_a_single_block_drops_nothing() -> None:
    """It is the first, as in timm; the protocol says so."""
    assert (PathDropping.install(model(depth=1), [0.5], CPU).keep_Kn == 1).all()
    assert "a model of one block skips nothing" in field_docs(Protocol)["drop_path"]


def test_factors_have_mean_1_and_drop_as_often_as_they_should() -> None:
    num_samples = 20_000
    factors = PathDropping.install(model(), [0.0, 0.6], CPU)(draws(2, num_samples))
    keep = {"blocks.0": 1.0, "blocks.1": 0.7, "blocks.2": 0.4}
    for name, factor_KB in factors.items():
        assert (factor_KB[0] == 1).all()
        kept = keep[name.rpartition(".drop_path")[0]]
        assert all(value in (0.0, pytest.approx(1 / kept)) for value in factor_KB[1].unique().tolist())
        error = 4 * ((1 - kept) / kept / num_samples) ** 0.5
        assert float(factor_KB[1].mean()) == pytest.approx(1, abs=error + 1e-6)
    first, second = (factors[f"blocks.2.drop_path{number}.factor"][1] > 0 for number in (1, 2))
    assert float((first == second).float().mean()) == pytest.approx(0.4**2 + 0.6**2, abs=0.02)  # independent


@pytest.mark.parametrize("name", ["compact_vit", "compact_jumbo_vit"])
@pytest.mark.parametrize("forward", [stacked_forward, vmapped_forward])
def test_a_stack_drops_what_its_models_would_drop(name: str, forward: object) -> None:
    """Against timm's blocks with their branches switched off sample by sample."""
    num_samples = 4
    cells = [model(seed, name).double() for seed in range(2)]
    skeleton = weightless(cells[0])
    dropping = PathDropping.install(skeleton, [0.5, 0.9], CPU)
    factors = {name: factor.double() for name, factor in dropping(draws(2, num_samples)).items()}
    assert any((factor == 0).any() for factor in factors.values())
    weights = stack_weights([dict(cell.named_parameters()) for cell in cells], CPU)
    images = torch.randn(2, num_samples, 3, 32, 32, dtype=torch.float64)
    outputs = forward(skeleton, weights | factors, images)
    for k, cell in enumerate(cells):
        for b in range(num_samples):
            handles = []
            for buffer, factor in factors.items():

                def scaled(_module: nn.Module, _inputs: object, branch: Tensor, by: Tensor = factor[k, b]) -> Tensor:
                    return branch * by

                place = cell.get_submodule(buffer.removesuffix(".factor"))
                handles.append(place.register_forward_hook(scaled))
            torch.testing.assert_close(outputs[k, b], cell(images[k, b : b + 1])[0], rtol=1e-9, atol=1e-11)
            for handle in handles:
                handle.remove()


def test_nothing_is_dropped_without_factors() -> None:
    cell = model()
    images = torch.randn(2, 3, 32, 32)
    expected = cell(images)
    PathDropping.install(cell, [0.9], CPU)
    assert isinstance(cell.blocks[0].drop_path1, DropPath)
    assert torch.equal(cell(images), expected)
    assert not any("drop_path" in name for name in cell.state_dict())


def test_a_model_without_a_place_for_it_is_refused() -> None:
    with pytest.raises(InputError, match="drop_path cannot be used: Linear has no blocks"):
        PathDropping.install(nn.Linear(2, 2), [0.1], CPU)


def config(rate: float, seed: int) -> RunConfig:
    protocol = dataclasses.replace(baseline(), batch_size=16, max_epochs=3, warmup_epochs=0, lr=1e-2)
    return RunConfig(
        model=ModelConfig(depth=2, width=16, num_heads=2, mlp_width=16, patch_size=8),
        data=DataConfig(name="shapes", num_train=100, num_test=20),
        protocol=dataclasses.replace(protocol, drop_path=rate),
        seed=seed,
    )


@pytest.fixture(scope="module")
def dataset() -> Dataset:
    return load_dataset("shapes", num_train=100, num_test=20)


def test_a_cells_coins_do_not_depend_on_its_neighbours(dataset: Dataset) -> None:
    configs = [config(0.2, 0), config(0.6, 1), config(0.6, 2)]
    stack = Stack.start(configs, dataset, CPU)
    stack.run_epoch()
    together = stack.select([0, 2])  # one leaves after an epoch
    results = together.run_epoch()
    for result, position in zip(results, (0, 2), strict=True):
        alone = Stack.start([configs[position]], dataset, CPU)
        alone.run_epoch()
        (expected,) = alone.run_epoch()
        assert result.train_loss == pytest.approx(expected.train_loss, abs=1e-6)
        assert result.val_loss == pytest.approx(expected.val_loss, abs=1e-6)
    without = Stack.start([config(0.0, 0)], dataset, CPU)
    without.run_epoch()
    assert abs(without.run_epoch()[0].train_loss - results[0].train_loss) > 1e-3


def test_runs_with_and_without_it_are_no_stack() -> None:
    """They are different programs, which round differently; so that adding a cell changes no other."""
    assert config(0.2, 0).stack_key == config(0.6, 1).stack_key != config(0.0, 0).stack_key


def distilling(**changes: object) -> RunConfig:
    protocol = dataclasses.replace(baseline(), batch_size=16, max_epochs=1, warmup_epochs=0, lr=1e-2, augment=())
    return RunConfig(
        model=ModelConfig(depth=1, width=16, num_heads=2, mlp_width=16, patch_size=8),
        data=DataConfig(name="shapes", num_train=100, num_test=20),
        protocol=dataclasses.replace(protocol, **changes),
        num_measured=20,
    )


@pytest.fixture(scope="module")
def taught(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder."""
    folder: RunFolder = train_run(distilling(), tmp_path_factory.mktemp("runs") / "teacher")
    return folder.path


def test_the_first_loss_is_the_divergence_plus_the_teachers_entropy(taught: Path, dataset: Dataset) -> None:
    pupil = distilling(teacher=str(taught))
    stack = Stack.start([pupil], dataset, CPU)
    losses: list[float] = []
    stack.run_epoch(lambda _: losses.append(float(stack.losses_so_far)))
    model, teaching = initial_model(pupil, dataset).eval(), load_model(taught / "model.safetensors")
    index = Stack.start([pupil], dataset, CPU)._epoch().index_SKB[0, 0]
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (dataset.mean, dataset.std))
    images = (dataset.train.images_NCHW[index].float() / 255 - mean) / std
    with torch.no_grad():
        wanted, given = F.log_softmax(teaching(images), -1), F.log_softmax(model(images), -1)
    divergence = F.kl_div(given, wanted, reduction="batchmean", log_target=True)
    entropy = -(wanted.exp() * wanted).sum(-1).mean()
    assert losses[0] == pytest.approx(float(divergence + entropy), abs=1e-5)


def test_labels_do_not_matter(taught: Path, dataset: Dataset) -> None:
    """The pupil's weights are the same if every training image has another label, up to which are held out."""
    shuffled = dataset.train.labels_N.clone()
    pupil = distilling(teacher=str(taught))
    stack = Stack.start([pupil], dataset, CPU)
    changed = dataclasses.replace(
        dataset, train=dataclasses.replace(dataset.train, labels_N=(shuffled + 1) % dataset.num_classes)
    )
    other = Stack.start([pupil], changed, CPU)
    other.training_N, other.validation_N = stack.training_N, stack.validation_N
    stack.run_epoch()
    other.run_epoch()
    assert torch.equal(stack.optimizer.weights_KP, other.optimizer.weights_KP)
    by_labels = Stack.start([distilling()], dataset, CPU)
    by_labels.run_epoch()
    assert not torch.allclose(by_labels.optimizer.weights_KP, stack.optimizer.weights_KP, atol=1e-3)


def test_it_sees_images_as_it_was_taught_to(monkeypatch: pytest.MonkeyPatch, dataset: Dataset) -> None:
    """A model from elsewhere normalises otherwise than the data set."""
    seen: list[torch.Tensor] = []

    class Watching(nn.Module):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            seen.append(images)
            return images.flatten(1)[:, : dataset.num_classes]

    settings = {"mean": (0.1, 0.2, 0.3), "std": (0.5, 0.6, 0.7), "input_size": (3, 32, 32)}
    sourced = SourcedModel(label="x", model=Watching(), data_config=settings)
    monkeypatch.setattr(step, "load_source", lambda name, pretrained: sourced)
    loaded = Teacher.load("some_vit", dataset, CPU)
    grey = torch.rand(2, 5, 3, 32, 32)
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (dataset.mean, dataset.std))
    answer = loaded((grey - mean) / std)
    own_mean, own_std = (torch.tensor(settings[name]).view(3, 1, 1) for name in ("mean", "std"))
    torch.testing.assert_close(seen[-1].view(grey.shape), (grey - own_mean) / own_std, rtol=1e-5, atol=1e-5)
    assert answer.shape == (2, 5, dataset.num_classes)
    torch.testing.assert_close(answer.sum(-1), torch.ones(2, 5))


def test_teachers_that_do_not_fit_are_refused(taught: Path, tmp_path: Path, dataset: Dataset) -> None:
    with pytest.raises(InputError, match="teacher is empty"):  # and not a run that learns labels
        distilling(teacher="")
    with pytest.raises(InputError, match="'vit_tny' is not a model timm knows"):
        Stack.start([distilling(teacher="vit_tny")], dataset, CPU)
    with pytest.raises(InputError, match="not a complete run folder"):
        Stack.start([distilling(teacher=str(tmp_path))], dataset, CPU)
    small = ModelConfig(depth=1, width=16, num_heads=2, mlp_width=16, patch_size=8)
    (tmp_path / "config.json").write_text((taught / "config.json").read_text())
    for side, classes, message in ((32, 7, "knows 7 classes, but shapes has 10"), (64, 10, "does not take images of")):
        model = small.build((side, side), classes)
        save_model(tmp_path / "model.safetensors", model.state_dict(), small, (side, side), classes)
        with pytest.raises(InputError, match=message):
            Stack.start([distilling(teacher=str(tmp_path))], dataset, CPU)


def test_models_without_classes_are_no_teachers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dataset: Dataset
) -> None:
    """Though as many features as there are classes would pass for these."""
    wide = ModelConfig(depth=1, width=dataset.num_classes, num_heads=2, mlp_width=16, patch_size=8)
    backbone = wide.build(dataset.image_size, 0)
    DinoFolder(tmp_path / "dino").claim(DinoConfig(model=wide, crops=CropsConfig(num_local=0)))
    save_model(tmp_path / "dino" / "model.safetensors", backbone.state_dict(), wide, dataset.image_size, 0)
    with pytest.raises(InputError, match="was pretrained without labels and has no classes"):
        Stack.start([distilling(teacher=str(tmp_path / "dino"))], dataset, CPU)
    sourced = SourcedModel(label="x", model=backbone, data_config={"mean": (0.5,) * 3, "std": (0.5,) * 3})
    monkeypatch.setattr(step, "load_source", lambda name, pretrained: sourced)
    with pytest.raises(InputError, match="teacher some_vit has no classifier"):
        Teacher.load("some_vit", dataset, CPU)


def test_pupils_of_different_teachers_are_no_stack(taught: Path) -> None:
    assert distilling(teacher=str(taught)).stack_key != distilling().stack_key
