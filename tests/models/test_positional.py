"""Attention from positions alone: its definition, timm's ways, stacks, and what the lens sees of it."""

import copy
import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from torch import Tensor

import nearsight
from nearsight import add_locat
from nearsight.data import load_dataset
from nearsight.errors import InputError
from nearsight.metrics import attention_distance, attention_entropy
from nearsight.models import ModelConfig, create_model, load_model, save_model
from nearsight.train import DataConfig, RunConfig, baseline, measure_stack
from nearsight.train.engine import Stack, initial_model
from nearsight.train.stacked import (
    runs_as_one_batch,
    stack_weights,
    stacked_forward,
    verify_stacking,
    vmapped_forward,
    weightless,
)

CPU = torch.device("cpu")
SMALL = ModelConfig(name="compact_vit_positional", depth=2, width=24, num_heads=3, mlp_width=32, patch_size=8)


def positional(seed: int = 0, *, image_size: tuple[int, int] = (32, 32), **settings: Any) -> Any:
    """A small one as if trained: what starts at 0 or 1, or near it, does not hide anything."""
    torch.manual_seed(seed)
    settings = {"depth": 2, "embed_dim": 24, "num_heads": 3, "patch_size": 8, "num_classes": 5, **settings}
    model = create_model("compact_vit_positional", img_size=image_size, **settings)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.add_((1.0 if name == "pos_embed" else 0.3) * torch.randn_like(parameter))
    return model.eval()


def attention_maps(model: Any, block: int) -> list[list[list[float]]]:
    """Def. 3.2 head by head, query by query, key by key."""
    attn = model.blocks[block].attn
    positions = model.pos_embed[0].tolist()
    weight, bias = attn.qkv.weight.tolist(), attn.qkv.bias.tolist()

    def projected(position: list[float], row: int) -> float:
        return bias[row] + sum(w * p for w, p in zip(weight[row], position, strict=True))

    maps = []
    for head in range(attn.num_heads):
        channels = range(head * attn.head_dim, (head + 1) * attn.head_dim)
        queries = [[projected(p, c) for c in channels] for p in positions]
        keys = [[projected(p, attn.attn_dim + c) for c in channels] for p in positions]
        rows = []
        for query in queries:
            logits = [sum(a * b for a, b in zip(query, key, strict=True)) / math.sqrt(attn.head_dim) for key in keys]
            total = sum(math.exp(logit) for logit in logits)
            rows.append([math.exp(logit) / total for logit in logits])
        maps.append(rows)
    return maps


@torch.no_grad()
@pytest.mark.parametrize("training", [False, True])
def test_the_forward_is_that_of_the_definition(training: bool) -> None:
    model = positional(reg_tokens=1).double().train(training)
    images = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    patches = model.patch_embed(images)  # values are made of these, without positions
    for image in range(2):
        tokens = torch.cat([model.cls_token[0], model.reg_token[0], patches[image]])
        for number, block in enumerate(model.blocks):
            attn = block.attn
            maps = torch.tensor(attention_maps(model, number), dtype=torch.float64)
            normed = block.norm1(tokens)
            attended = []
            for token in range(len(tokens)):
                heads = []
                for head in range(attn.num_heads):
                    rows = slice(
                        2 * attn.attn_dim + head * attn.head_dim, 2 * attn.attn_dim + (head + 1) * attn.head_dim
                    )
                    values = [attn.qkv.weight[rows] @ other + attn.qkv.bias[rows] for other in normed]
                    heads.append(sum(maps[head, token, j] * value for j, value in enumerate(values)))
                attended.append(attn.proj.weight @ torch.cat(heads) + attn.proj.bias)
            tokens = tokens + torch.stack(attended)
            tokens = tokens + block.mlp(block.norm2(tokens))
        logits = model.head(model.norm(tokens)[0])
        torch.testing.assert_close(model(images)[image], logits, rtol=1e-10, atol=1e-11)


@torch.no_grad()
def test_content_does_not_move_attention_and_the_lens_sees_the_maps() -> None:
    model = positional(image_size=(32, 40))
    table = nearsight.measure(model, torch.randn(5, 3, 32, 40))
    assert table.layer_names == ("blocks.0.attn", "blocks.1.attn")
    assert not table.skipped
    for block in range(2):
        maps = torch.tensor(attention_maps(model, block))
        np.testing.assert_allclose(table.mad[block], attention_distance(maps, (4, 5)), atol=1e-5)
        np.testing.assert_allclose(table.entropy[block], attention_entropy(maps), atol=1e-5)
    assert np.abs(table.mad_std).max() < 1e-6  # the same for every image
    assert np.ptp(table.mad) > 1e-3


def test_it_is_the_compact_vit_with_the_same_parameters() -> None:
    models = []
    for name in ("compact_vit", "compact_vit_positional"):
        torch.manual_seed(1)
        models.append(create_model(name, depth=2).eval())
    ordinary, other = (model.state_dict() for model in models)
    assert list(ordinary) == list(other)
    assert all(torch.equal(ordinary[name], other[name]) for name in ordinary)
    images = torch.randn(2, 3, 32, 32)
    assert not torch.allclose(models[0](images), models[1](images))
    full = timm.create_model("compact_vit_positional")
    assert sum(parameter.numel() for parameter in full.parameters()) == 2_417_956
    assert full.pretrained_cfg["input_size"] == (3, 32, 32)


@torch.no_grad()
def test_timms_ways_lead_where_they_should() -> None:
    model, images = positional(), torch.randn(2, 3, 32, 32)
    features = model.forward_features(images)
    assert torch.equal(model.forward_head(features), model(images))
    last, intermediates = model.forward_intermediates(images, norm=False)
    assert torch.equal(last, features)
    assert [tuple(tensor.shape) for tensor in intermediates] == [(2, 24, 4, 4)] * 2
    tokens = model.get_intermediate_layers(images, n=1)[0]
    torch.testing.assert_close(tokens.transpose(1, 2).unflatten(2, (4, 4)), intermediates[-1])
    model.reset_classifier(7, "avg")
    assert model(images).shape == (2, 7)
    cut = timm.create_model("compact_vit_positional", depth=2, features_only=True, out_indices=(0, 1))
    assert [tuple(tensor.shape[2:]) for tensor in cut(images)] == [(8, 8)] * 2
    masked = torch.zeros(17, 17, dtype=torch.bool)
    masked[:, 0] = True  # all look at CLS alone
    seen = model.blocks[0].attn(torch.randn(2, 17, 24), attn_mask=masked)
    torch.testing.assert_close(seen, seen[:, :1].expand_as(seen))


@torch.no_grad()
def test_copies_and_resampled_models_attend_by_their_own_positions() -> None:
    model, images = positional(), torch.randn(2, 3, 32, 32)
    before = model(images)
    twin = copy.deepcopy(model)
    twin.pos_embed.add_(torch.randn_like(twin.pos_embed))
    assert torch.equal(model(images), before)
    assert not torch.allclose(twin(images), before)
    twin.set_input_size((48, 48))
    assert twin(torch.randn(1, 3, 48, 48)).shape == (1, 5)
    assert twin.pos_embed.shape == (1, 37, 24)


@torch.no_grad()
def test_a_config_is_built_saved_and_loaded(tmp_path: Path) -> None:
    model = SMALL.build((32, 32), 5).eval()
    model.pos_embed.normal_()
    save_model(tmp_path / "m.safetensors", model.state_dict(), SMALL, (32, 32), 5)
    images = torch.randn(2, 3, 32, 32)
    assert torch.equal(load_model(tmp_path / "m.safetensors")(images), model(images))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"pos_embed": "none"}, "pos_embed is 'none', but positional attention is made of learned positions"),
        ({"no_embed_class": True}, "no_embed_class leaves CLS without a position"),
        ({"dynamic_img_size": True}, "dynamic_img_size does not go with positional attention.*set_input_size"),
        ({"patch_drop_rate": 0.5}, "patch_drop_rate does not go with positional attention"),
        ({"gaug": True}, "gaug does not go with positional attention: LocAt reads its Gaussians off"),
        ({"patch_size": 5}, "patch size 5 does not divide"),
    ],
)
def test_what_makes_no_sense_is_refused(settings: dict[str, object], said: str) -> None:
    with pytest.raises(InputError, match=said):
        create_model("compact_vit_positional", **settings)


def test_configs_that_make_no_sense_are_refused() -> None:
    with pytest.raises(InputError, match="made of learned positions"):
        dataclasses.replace(SMALL, positions=False).build((32, 32), 5)
    with pytest.raises(InputError, match=r"(?i)positional"):
        dataclasses.replace(SMALL, gaug=True).build((32, 32), 5)
    with pytest.raises(InputError, match="LocAt cannot be added to PositionalAttention"):
        add_locat(SMALL.build((32, 32), 5))


@pytest.mark.parametrize("forward", [stacked_forward, vmapped_forward])
@pytest.mark.parametrize("settings", [{}, {"reg_tokens": 2, "global_pool": "avg"}, {"qkv_bias": False}], ids=str)
@pytest.mark.parametrize("training", [False, True])
def test_a_stack_gives_what_its_models_give(settings: dict[str, Any], forward: Any, training: bool) -> None:
    """Outputs and gradients, both as one batch and by vmap; in training by one map for all images."""
    cells = [positional(seed, **settings).double() for seed in range(3)]
    skeleton = weightless(cells[0]).train(training)
    images = torch.randn(3, 2, 3, 32, 32, dtype=torch.float64)
    weights = stack_weights([dict(cell.named_parameters()) for cell in cells], CPU)
    weights = {name: weight.requires_grad_() for name, weight in weights.items()}
    outputs = forward(skeleton, weights, images)
    gradients = torch.autograd.grad(outputs.square().sum(), list(weights.values()), allow_unused=True)
    for k, cell in enumerate(cells):
        output = cell(images[k])
        torch.testing.assert_close(outputs[k], output, rtol=1e-9, atol=1e-11)
        expected = torch.autograd.grad(output.square().sum(), list(cell.parameters()), allow_unused=True)
        for name, ours, theirs in zip(weights, gradients, expected, strict=True):
            assert (ours is None) == (theirs is None), name
            if ours is not None and theirs is not None:
                torch.testing.assert_close(ours[k], theirs, rtol=1e-8, atol=1e-9)
    positions = dict(zip(weights, gradients, strict=True))["pos_embed"]
    assert positions is not None
    assert float(positions.abs().min(-1).values.max()) > 0


@pytest.mark.parametrize("num", [1, 3])
def test_it_runs_as_one_batch_and_is_measured_so(num: int) -> None:
    cells = [positional(seed) for seed in range(num)]
    skeleton = weightless(cells[0])
    verify_stacking(skeleton, cells, (32, 32))
    assert runs_as_one_batch(skeleton)
    weights = stack_weights([dict(cell.named_parameters()) for cell in cells], CPU)
    batches = [torch.randn(3, 3, 32, 32), torch.randn(2, 3, 32, 32)]
    tables = measure_stack(positional(9), weights, batches, skeleton=skeleton)
    assert runs_as_one_batch(skeleton)
    for cell, table in zip(cells, tables, strict=True):
        alone = nearsight.measure(cell, batches)
        for name in ("mad", "mad_std", "entropy", "entropy_std"):
            np.testing.assert_allclose(getattr(table, name), getattr(alone, name), atol=1e-6)
    exact = torch.stack([cell(batches[0]).detach() for cell in cells])
    for training in (False, True):
        skeleton.train(training)
        reduced = stacked_forward(skeleton, weights, batches[0].expand(num, -1, -1, -1, -1), dtype=torch.bfloat16)
        assert float((reduced - exact).norm() / exact.norm()) < 0.05
    assert runs_as_one_batch(skeleton)


def test_training_in_a_stack_equals_training_alone() -> None:
    """Three cells of different seeds and learning rates, an epoch in float32; and all of them learn."""
    protocol = dataclasses.replace(baseline(), max_epochs=2, warmup_epochs=0, batch_size=24)
    configs = [
        RunConfig(
            model=SMALL,
            data=DataConfig(name="shapes", num_train=120, num_test=24),
            protocol=dataclasses.replace(protocol, lr=1e-3 * (1 + seed)),
            seed=seed,
        )
        for seed in range(3)
    ]
    dataset = load_dataset("shapes", num_train=120, num_test=24)
    together = Stack.start(configs, dataset, CPU)
    results = together.run_epoch()
    assert runs_as_one_batch(together.skeleton)
    for k, config in enumerate(configs):
        alone = Stack.start([config], dataset, CPU)
        result = alone.run_epoch()[0]
        assert result.train_loss == pytest.approx(results[k].train_loss, rel=1e-5)
        for name, weight in alone.weights.items():
            torch.testing.assert_close(together.weights[name][k], weight[0], rtol=1e-3, atol=2e-5)
        start = dict(initial_model(config, dataset).named_parameters())["pos_embed"]
        assert float((alone.weights["pos_embed"][0] - start.detach()).abs().max()) > 1e-3  # positions learn, too


def test_positions_are_shared_by_all_blocks_and_belong_to_the_model_alone() -> None:
    model = positional()
    assert [name for name, _ in model.named_parameters() if "pos" in name] == ["pos_embed"]
    gradient: Tensor = torch.autograd.grad(model(torch.randn(1, 3, 32, 32)).sum(), model.pos_embed)[0]
    assert (gradient.abs().amax(-1) > 0).all()  # CLS's and every patch's


def test_the_public_checks_of_models_accept_it() -> None:
    assert len(nearsight.check_vit_adapter(positional(), 32).layers) == 2
