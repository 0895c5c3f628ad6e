"""Shuffled tiles: an exact permutation, the same for every image, and nothing but that."""

import copy
import dataclasses
import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import nearsight
from nearsight.data import load_dataset
from nearsight.errors import InputError
from nearsight.models import ModelConfig, load_model, save_model
from nearsight.models.shuffledtiles import ShuffledTiles, shuffled_pixels
from nearsight.train import DataConfig, RunConfig, baseline, measure_on_test, train_run
from nearsight.train.engine import initial_model
from nearsight.train.stacked import runs_as_one_batch, stack_weights, stacked_forward, verify_stacking, weightless

VIT = ModelConfig(depth=2, width=32, num_heads=4, mlp_width=48, patch_size=4)
RESNET = ModelConfig(name="compact_resnet18", channels=4)


def tiles(images: Tensor, num: int) -> Tensor:
    """[B, g², C, h, w], tile by tile: a loop that nobody could get wrong."""
    height, width = images.shape[-2] // num, images.shape[-1] // num
    cut = [
        images[:, :, row * height : (row + 1) * height, col * width : (col + 1) * width]
        for row in range(num)
        for col in range(num)
    ]
    return torch.stack(cut, dim=1)


@given(num=st.integers(1, 6), rows=st.integers(1, 4), cols=st.integers(1, 4), seed=st.integers(0, 2**40))
def test_whole_tiles_change_places_alike_in_every_image(num: int, rows: int, cols: int, seed: int) -> None:
    size = (num * rows, num * cols)
    images = torch.arange(2 * 3 * size[0] * size[1], dtype=torch.float32).view(2, 3, *size)
    shuffled = ShuffledTiles(size, num, seed)(images)
    before, after = tiles(images, num), tiles(shuffled, num)
    # Pixels are all different: a tile is known by its first.
    source = [before[0, :, 0, 0, 0].tolist().index(first) for first in after[0, :, 0, 0, 0].tolist()]
    assert sorted(source) == list(range(num**2))
    assert torch.equal(after, before[:, source])


def test_the_inverse_restores_an_image() -> None:
    images, index = torch.randn(2, 3, 32, 32), shuffled_pixels((32, 32), 8, 3)
    shuffled = ShuffledTiles((32, 32), 8, 3)(images).flatten(-2)
    assert torch.equal(shuffled[..., index.argsort()].view_as(images), images)


def test_the_permutation_follows_from_its_seed_alone() -> None:
    torch.manual_seed(1)
    first = shuffled_pixels((32, 32), 4, 0)
    torch.manual_seed(2)
    assert torch.equal(first, shuffled_pixels((32, 32), 4, 0))
    assert not torch.equal(first, shuffled_pixels((32, 32), 4, 1))
    assert torch.equal(shuffled_pixels((32, 32), 1, 5), torch.arange(1024))
    # Written down: runs on another machine, or of another year, must see the same images.
    assert first.view(4, 8, 4, 8)[:, 0, :, 0].flatten().tolist() == [
        *(16, 8, 768, 784),
        *(520, 536, 272, 256),
        *(264, 24, 512, 528),
        *(0, 280, 776, 792),
    ]


@pytest.mark.parametrize("config", [VIT, RESNET, dataclasses.replace(VIT, gaug=True, prr=True)], ids=lambda c: c.name)
def test_a_model_gives_what_it_would_give_of_shuffled_images(config: ModelConfig, tmp_path: Path) -> None:
    def built(num: int, permutation_seed: int = 0) -> nn.Module:
        torch.manual_seed(0)
        changed = dataclasses.replace(config, shuffled_tiles=num, permutation_seed=permutation_seed)
        return changed.build((32, 32), 5).eval()

    images, plain, model = torch.randn(2, 3, 32, 32), built(1), built(4, 7)
    expected = plain(ShuffledTiles((32, 32), 4, 7)(images))
    assert torch.equal(model(images), expected)
    assert torch.equal(copy.deepcopy(model)(images), expected)
    assert torch.equal(model.forward_head(model.forward_features(images)), expected)
    assert not torch.allclose(expected, plain(images), atol=1e-4)
    assert model.state_dict().keys() == plain.state_dict().keys()
    saved = dataclasses.replace(config, shuffled_tiles=4, permutation_seed=7)
    save_model(tmp_path / "m.safetensors", model.state_dict(), saved, (32, 32), 5)
    assert torch.equal(load_model(tmp_path / "m.safetensors")(images), expected)


def test_a_vit_with_patches_within_tiles_has_its_tokens_in_another_order() -> None:
    """With its positions moved along, it gives the same and looks as far: why S3's ViT does not mind."""
    torch.manual_seed(0)
    plain = VIT.build((32, 32), 5).eval()
    with torch.no_grad():
        for block in plain.blocks:
            block.attn.qkv.weight.mul_(20)  # so that it does not look everywhere alike
    shuffled = dataclasses.replace(VIT, shuffled_tiles=4).build((32, 32), 5).eval()
    weights = plain.state_dict()
    order = shuffled_pixels((8, 8), 4, 0)  # of the tokens: patches of 4 pixels, two to a tile's side
    weights["pos_embed"] = torch.cat([weights["pos_embed"][:, :1], weights["pos_embed"][:, 1:][:, order]], dim=1)
    shuffled.load_state_dict(weights)
    images = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(shuffled(images), plain(images), rtol=1e-4, atol=1e-5)
    ours, theirs = nearsight.measure(shuffled, images), nearsight.measure(plain, images)
    assert theirs.mad.std() > 1e-3
    np.testing.assert_allclose(ours.mad, theirs.mad, atol=1e-6)


def test_patches_of_pixels_from_everywhere_have_no_distances() -> None:
    model = dataclasses.replace(VIT, shuffled_tiles=32).build((32, 32), 5)
    with pytest.raises(InputError, match="has no spatial attention that can be measured"):
        nearsight.measure(model, torch.randn(2, 3, 32, 32))


@torch.no_grad()
def test_a_stack_of_them_runs_as_one_batch() -> None:
    config = dataclasses.replace(VIT, shuffled_tiles=8)
    cells = [config.build((32, 32), 5) for _ in range(2)]
    skeleton = weightless(cells[0])
    verify_stacking(skeleton, cells, (32, 32))
    assert runs_as_one_batch(skeleton)
    images = torch.randn(2, 3, 3, 32, 32)
    weights = stack_weights([dict(cell.named_parameters()) for cell in cells], torch.device("cpu"))
    outputs = stacked_forward(skeleton.to("meta"), weights, images)
    for output, cell, batch in zip(outputs, cells, images, strict=True):
        torch.testing.assert_close(output, cell(batch), rtol=1e-4, atol=1e-6)


def test_a_run_is_measured_while_it_trains_and_after(tmp_path: Path) -> None:
    """By the stack's code, which keeps no weights but the permutation, and by the saved model."""
    config = RunConfig(
        model=dataclasses.replace(VIT, shuffled_tiles=4, permutation_seed=2),
        data=DataConfig(name="shapes", num_train=40, num_test=12),
        protocol=dataclasses.replace(baseline(), max_epochs=2, warmup_epochs=1, batch_size=16),
        num_measured=12,
        measure_every=1,
        num_measured_during=12,
    )
    folder = train_run(config, tmp_path / "run")
    dataset = load_dataset("shapes", num_train=40, num_test=12)
    heads = pd.read_csv(folder.heads)
    for epoch, model in ((0, initial_model(config, dataset)), (folder.read_result()["best_epoch"], folder.model)):
        model = load_model(model) if isinstance(model, Path) else model
        table = measure_on_test(model, dataset, 12, torch.device("cpu"))
        found = heads.loc[heads["epoch"] == epoch, "mad"].to_numpy().reshape(table.mad.shape)
        np.testing.assert_allclose(found, table.mad, rtol=1e-6)


def test_what_cannot_be_shuffled_is_refused() -> None:
    with pytest.raises(InputError, match="5×5 tiles do not divide an image of 32×32 pixels"):
        ModelConfig(shuffled_tiles=5).build((32, 32), 5)
    with pytest.raises(InputError, match="shuffled_tiles is 0, but must be at least 1"):
        ModelConfig(shuffled_tiles=0)
    with pytest.raises(InputError, match="permutation_seed is 1, but shuffled_tiles is 1: none are shuffled"):
        ModelConfig(permutation_seed=1)
    with pytest.raises(InputError, match=r"tiles of \(32, 32\) pixels are shuffled, not of \(40, 40\)"):
        dataclasses.replace(RESNET, shuffled_tiles=4).build((32, 32), 5)(torch.randn(1, 3, 40, 40))


def test_identities_tell_what_is_shuffled_and_how() -> None:
    models = [
        ModelConfig(),
        ModelConfig(shuffled_tiles=4),
        ModelConfig(shuffled_tiles=32),
        ModelConfig(shuffled_tiles=4, permutation_seed=1),
        RESNET,
        dataclasses.replace(RESNET, shuffled_tiles=4),
    ]
    assert len({RunConfig(model=model).identity for model in models}) == len(models)
    assert len({model.shape for model in models}) == len(models)
    for model in models:
        stored = json.loads(json.dumps(RunConfig(model=model).to_json()))
        assert RunConfig.from_json(stored, "config.json").model == model
    assert RunConfig(model=ModelConfig(shuffled_tiles=1, permutation_seed=0)).identity == "142647aea0aba225"
