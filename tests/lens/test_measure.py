"""Measuring an unmodified model: right numbers, and nothing left behind."""

import random

import numpy as np
import pytest
import timm
import torch
from torch import Tensor, nn

import nearsight
from nearsight.errors import InputError
from nearsight.lens import Attention, AttentionTap, HeadTable, measure
from nearsight.metrics import attention_distance, attention_entropy


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    vit = timm.create_model("compact_vit", depth=3, embed_dim=48, num_heads=4, num_classes=5, position_std=1.0)
    for block in vit.blocks:  # sharp enough that heads and images differ
        block.attn.qkv.weight.data *= 20
    return vit


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
    for module in model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks


def test_outputs_with_and_without_the_lens_are_bit_identical(model: nn.Module) -> None:
    model.eval()
    batch = images(2)
    with torch.no_grad():
        plain = model(batch)
        with AttentionTap(model, lambda attention: attention.log_weights(0, attention.num_tokens)):
            watched = model(batch)
    assert torch.equal(plain, watched)


def test_hooks_go_even_when_the_forward_fails(model: nn.Module) -> None:
    with pytest.raises(AssertionError):
        measure(model, torch.randn(1, 3, 48, 48))
    assert not any(module._forward_hooks for module in model.modules())


def test_the_tap_names_the_layer(model: nn.Module) -> None:
    seen: list[Attention] = []
    with AttentionTap(model, seen.append), torch.no_grad():
        model(images(1))
        torch.nn.functional.scaled_dot_product_attention(*torch.randn(3, 1, 1, 2, 4))  # not the model's
    assert [attention.layer_name for attention in seen] == ["blocks.0.attn", "blocks.1.attn", "blocks.2.attn"]


class Recorder(nn.Module):
    """One attention call with whatever arguments a test wants."""

    def __init__(self, **kwargs: object) -> None:
        super().__init__()
        self.kwargs = kwargs

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, **self.kwargs)


@pytest.mark.parametrize(
    "kwargs",
    [
        {},
        {"scale": 0.3},
        {"is_causal": True},
        {"attn_mask": torch.randn(9, 9)},
        {"attn_mask": torch.rand(9, 9) > 0.4},
        {"enable_gqa": True},
    ],
    ids=lambda kwargs: ",".join(kwargs) or "plain",
)
def test_what_the_tap_recomputes_is_what_sdpa_used(kwargs: dict[str, object]) -> None:
    """With one-hot values the output of attention is the attention itself."""
    torch.manual_seed(1)
    if isinstance(mask := kwargs.get("attn_mask"), Tensor) and mask.dtype == torch.bool:
        mask.fill_diagonal_(True)
    query = torch.randn(2, 4, 9, 6)
    num_key_heads = 2 if kwargs.get("enable_gqa") else 4
    key, value = torch.randn(2, num_key_heads, 9, 6), torch.eye(9).expand(2, num_key_heads, 9, 9)
    recorder = Recorder(**kwargs)
    seen: list[Tensor] = []
    with AttentionTap(
        recorder, lambda attention: seen.extend(attention.log_weights(row, row + 3) for row in (0, 3, 6))
    ):
        used = recorder(query, key, value)
    torch.testing.assert_close(torch.cat(seen, dim=2).softmax(-1), used.double(), rtol=1e-5, atol=1e-6)


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
    with pytest.raises(InputError, match=r"\[B, 3, H, W\] are needed, not \[4, 1, 32, 32\]"):
        measure(model, torch.randn(4, 1, 32, 32))
    with pytest.raises(InputError, match="no images"):
        measure(model, [])
    with pytest.raises(InputError, match=r"attention of blocks\.0\.attn is NaN"):
        measure(model, torch.full((1, 3, 32, 32), torch.nan))


class Unlabelled(nn.Module):
    """A user's own attention, without any of timm's attributes."""

    def forward(self, tokens: Tensor) -> Tensor:
        batch = tokens.shape[0]
        x = tokens.flatten(2).transpose(1, 2)[:, None, : self.num_tokens]
        attn = (x @ x.transpose(-2, -1)).softmax(-1)
        return (attn @ x).reshape(batch, -1)

    def __init__(self, num_tokens: int) -> None:
        super().__init__()
        self.num_tokens = num_tokens


def test_a_plain_module_gets_a_square_grid_or_an_error() -> None:
    assert measure(Unlabelled(16), torch.randn(2, 3, 8, 8)).mad.shape == (1, 1)
    assert measure(Unlabelled(17), torch.randn(2, 3, 8, 8)).mad.shape == (1, 1)
    with pytest.raises(InputError, match="fit no square grid"):
        measure(Unlabelled(15), torch.randn(2, 3, 8, 8))


def test_a_second_attention_in_a_module_is_a_second_layer() -> None:
    class Twice(Unlabelled):
        def forward(self, tokens: Tensor) -> Tensor:
            return super().forward(tokens) + super().forward(tokens * 3)

    table = measure(Twice(16), torch.randn(2, 3, 8, 8))
    assert table.layer_names == ("", "#2")
    assert not np.allclose(table.mad[0], table.mad[1])


def test_the_public_name_is_the_same_function() -> None:
    assert nearsight.measure is measure
    assert nearsight.HeadTable is HeadTable
