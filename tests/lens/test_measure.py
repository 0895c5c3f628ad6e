"""Measuring an unmodified model: right numbers, and nothing left behind."""

import random

import numpy as np
import pytest
import timm
import torch
from torch import Tensor, nn

import nearsight
from nearsight.errors import InputError
from nearsight.lens import HeadTable, measure
from nearsight.metrics import attention_distance, attention_entropy


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    vit = timm.create_model("compact_vit", depth=3, embed_dim=48, num_heads=4, num_classes=5, position_std=1.0)
    for block in vit.blocks:  # sharp enough that heads and images differ
        block.attn.qkv.weight.data *= 20
    return vit


def global_hooks() -> list[object]:
    hooks = torch.nn.modules.module
    return [*hooks._global_forward_hooks, *hooks._global_forward_pre_hooks]


def images(num: int, seed: int = 0) -> Tensor:
    return torch.randn(num, 3, 32, 32, generator=torch.Generator().manual_seed(seed))


def attention_by_timms_own_code(model: nn.Module, batch: Tensor) -> list[Tensor]:
    """Every block's attention from timm's unfused path, read off the input of its dropout layer."""
    seen: list[Tensor] = []
    for block in model.blocks:
        block.attn.fused_attn = False
        block.attn.attn_drop.register_forward_hook(lambda _module, inputs, _output: seen.append(inputs[0]))
    with torch.no_grad():
        model.eval()(batch)
    return seen


def test_numbers_equal_timms_unfused_attention(model: nn.Module) -> None:
    batch = images(6)
    table = measure(model, batch, batch_size=4)
    maps = attention_by_timms_own_code(model, batch)
    mad = torch.stack([attention_distance(attn, (8, 8)) for attn in maps], dim=1).numpy()
    entropy = torch.stack([attention_entropy(attn) for attn in maps], dim=1).numpy()
    np.testing.assert_allclose(table.mad, mad.mean(0), rtol=1e-5)
    np.testing.assert_allclose(table.mad_std, mad.std(0), rtol=1e-3)
    np.testing.assert_allclose(table.entropy, entropy.mean(0), rtol=1e-5)
    np.testing.assert_allclose(table.entropy_std, entropy.std(0), rtol=1e-3)
    assert table.layer_names == ("blocks.0.attn", "blocks.1.attn", "blocks.2.attn")
    assert table.num_images == 6
    assert table.mad.std() > 0.01  # the model was made so that heads differ


def test_explicit_softmax_is_seen_as_fused_attention_is(model: nn.Module) -> None:
    fused = measure(model, images(3))
    for block in model.blocks:
        block.attn.fused_attn = False
    unfused = measure(model, images(3))
    np.testing.assert_allclose(fused.mad, unfused.mad, rtol=1e-5)
    assert fused.layer_names == unfused.layer_names


def test_registers_and_a_grid_that_is_not_square() -> None:
    vit = timm.create_model("vit_tiny_patch16_224", img_size=(32, 64), depth=1, reg_tokens=4, num_classes=0)
    batch = torch.randn(2, 3, 32, 64)
    table = measure(vit, batch)
    (attn,) = attention_by_timms_own_code(vit, batch)
    expected = attention_distance(attn, (2, 4), num_prefix_tokens=5).mean(0)
    np.testing.assert_allclose(table.mad[0], expected.numpy(), rtol=1e-5)


def test_batching_and_streaming_change_nothing(model: nn.Module) -> None:
    batch = images(7)
    whole = measure(model, batch, batch_size=7)
    streamed = measure(model, iter([batch[:3], batch[3:3], batch[3:]]), batch_size=2)
    np.testing.assert_allclose(streamed.mad, whole.mad, rtol=1e-6)
    np.testing.assert_allclose(streamed.mad_std, whole.mad_std, rtol=1e-4)
    assert streamed.num_images == 7


def test_tables_of_parts_merge_to_the_table_of_all(model: nn.Module) -> None:
    batch = images(8)
    whole = measure(model, batch, batch_size=1)
    merged = HeadTable.merge([measure(model, batch[:3], batch_size=1), measure(model, batch[3:], batch_size=1)])
    for name in ("mad", "mad_std", "entropy", "entropy_std"):
        np.testing.assert_allclose(getattr(merged, name), getattr(whole, name), rtol=1e-9, atol=1e-15)
    assert merged.num_images == 8


def test_the_model_and_the_world_are_left_as_found(model: nn.Module) -> None:
    model.train()
    model.blocks[1].eval()
    modes = [module.training for module in model.modules()]
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    grad_enabled = torch.is_grad_enabled()
    measure(model, images(2))
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert (np.random.get_state()[1] == before[2]).all()
    assert torch.is_grad_enabled() == grad_enabled
    assert not global_hooks()
    for module in model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
        assert "forward" not in module.__dict__


def test_hooks_go_even_when_the_forward_fails(model: nn.Module) -> None:
    with pytest.raises(
        InputError, match=r"VisionTransformer|CompactViT.* fails on images of 48×48 pixels: Input height"
    ):
        measure(model, torch.randn(1, 3, 48, 48))
    assert not global_hooks()


def test_choosing_layers(model: nn.Module) -> None:
    every = measure(model, images(2))
    some = measure(model, images(2), layers=[-1, "blocks.0.attn"])
    assert some.layer_names == ("blocks.2.attn", "blocks.0.attn")
    np.testing.assert_array_equal(some.mad, every.mad[[2, 0]])
    for wrong in ([7], ["blocks.9.attn"]):
        with pytest.raises(InputError, match="is not one of the 3 layers"):
            measure(model, images(1), layers=wrong)


def test_a_model_without_attention_says_what_was_looked_at() -> None:
    with pytest.raises(InputError, match=r"no attention was seen.*Conv2d"):
        measure(timm.create_model("resnet10t", num_classes=2), torch.randn(1, 3, 64, 64))


def test_bad_images_are_named() -> None:
    model = timm.create_model("compact_vit", depth=1)
    with pytest.raises(InputError, match="fails on images of 32×32 pixels and 1 channels"):
        measure(model, torch.randn(4, 1, 32, 32))
    with pytest.raises(InputError, match="no images"):
        measure(model, [])
    with pytest.raises(InputError, match=r"attention of blocks\.0\.attn is NaN"):
        measure(model, torch.full((1, 3, 32, 32), torch.nan))


class Bare(nn.Module):
    """A user's own attention, without any of timm's attributes: pixels of the image are its tokens."""

    def forward(self, images: Tensor) -> Tensor:
        x = images.flatten(2).transpose(1, 2)[:, None]
        attn = (x @ x.transpose(-2, -1)).softmax(-1)
        return attn @ x


def test_a_second_attention_in_a_module_is_a_second_layer() -> None:
    class Twice(Bare):
        def forward(self, images: Tensor) -> Tensor:
            return super().forward(images) + super().forward(images * 3)

    table = measure(Twice(), torch.randn(2, 3, 8, 6))
    assert table.layer_names == ("", "#2")
    assert not np.allclose(table.mad[0], table.mad[1])


def test_both_precisions(model: nn.Module) -> None:
    single, double = (measure(model, images(3), precision=precision) for precision in ("float32", "float64"))
    np.testing.assert_allclose(single.mad, double.mad, rtol=1e-6)
    np.testing.assert_allclose(single.entropy, double.entropy, rtol=1e-6)
    assert not np.array_equal(single.mad, double.mad)


def test_distances_in_patches_and_pixels() -> None:
    vit = timm.create_model("vit_tiny_patch16_224", img_size=(32, 64), depth=1, num_classes=0)
    table = measure(vit, torch.randn(2, 3, 32, 64))
    np.testing.assert_array_equal(table.extra["grid_size"], [[2, 4]])
    np.testing.assert_array_equal(table.extra["cell_size"], [[16, 16]])
    np.testing.assert_allclose(table.mad_in("patches"), table.mad * np.hypot(1, 3))
    np.testing.assert_allclose(table.mad_in("pixels"), table.mad * np.hypot(16, 48))


def test_a_model_that_computes_otherwise_for_other_images() -> None:
    class Fickle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = Bare(), Bare()

        def forward(self, images: Tensor) -> Tensor:
            return (self.one if images.mean() > 0 else self.other)(images)

    batches = [torch.ones(1, 3, 4, 4), -torch.ones(1, 3, 4, 4)]
    with pytest.raises(InputError, match=r"other attentions for these images than for the first \(one is missing\)"):
        measure(Fickle(), batches)


def test_a_compiled_model_is_measured_as_what_it_was_compiled_from(model: nn.Module) -> None:
    np.testing.assert_array_equal(measure(torch.compile(model), images(2)).mad, measure(model, images(2)).mad)


def test_the_public_name_is_the_same_function() -> None:
    assert nearsight.measure is measure
    assert nearsight.HeadTable is HeadTable
