"""Attention rollout against the product of maps that timm's own code computed."""

import numpy as np
import pytest
import timm
import torch
from torch import Tensor, nn

from nearsight.errors import InputError
from nearsight.lens import attention_rollout


def vit(**settings: object) -> nn.Module:
    torch.manual_seed(0)
    settings = {"img_size": (16, 24), "patch_size": 8, "embed_dim": 24, "depth": 3, "num_heads": 3} | settings
    model = timm.create_model("vit_tiny_patch16_224", num_classes=3, **settings)
    for block in model.blocks:
        block.attn.qkv.weight.data *= 20
    return model


def images(num: int, size: tuple[int, int] = (16, 24)) -> Tensor:
    return torch.randn(num, 3, *size, generator=torch.Generator().manual_seed(0))


def maps_of(model: nn.Module, batch: Tensor) -> list[Tensor]:
    seen: list[Tensor] = []
    for block in model.blocks:
        block.attn.fused_attn = False
        block.attn.attn_drop.register_forward_hook(lambda _module, inputs, _output: seen.append(inputs[0].double()))
    with torch.no_grad():
        model.eval()(batch)
    return seen


def rollout_by_loop(maps: list[Tensor], image: int, residual: float, fusion: str, discard: float) -> np.ndarray:
    """[N, N] for one image, entry by entry."""
    num = maps[0].shape[-1]
    product = np.eye(num)
    for layer in maps:
        heads = layer[image].numpy()
        fused = {"mean": heads.mean(0), "max": heads.max(0), "min": heads.min(0)}[fusion]
        for place in np.argsort(fused, axis=None)[: int(discard * num * num)]:
            fused[np.unravel_index(place, fused.shape)] = 0
        step = np.zeros((num, num))
        for i in range(num):
            for j in range(num):
                step[i, j] = (1 - residual) * fused[i, j] + residual * (i == j)
            step[i] /= step[i].sum()
        product = step @ product
    return product


@pytest.mark.parametrize(
    ("residual", "fusion", "discard"),
    [(0.5, "mean", 0.0), (0.0, "mean", 0.0), (0.3, "max", 0.0), (0.5, "min", 0.0), (0.5, "mean", 0.6)],
)
@pytest.mark.parametrize("registers", [0, 2])
def test_from_cls(residual: float, fusion: str, discard: float, registers: int) -> None:
    model, batch = vit(reg_tokens=registers), images(3)
    rolled = attention_rollout(model, batch, residual=residual, head_fusion=fusion, discard=discard, batch_size=2)
    assert rolled.shape == (3, 2, 3)
    maps = maps_of(model, batch)
    for image in range(3):
        expected = rollout_by_loop(maps, image, residual, fusion, discard)[0, 1 + registers :].reshape(2, 3)
        np.testing.assert_allclose(rolled[image], expected, rtol=1e-4, atol=1e-7)


def test_without_cls_it_is_the_mean_over_patches() -> None:
    model, batch = vit(class_token=False, reg_tokens=1, global_pool="avg"), images(2)
    rolled = attention_rollout(model, batch)
    maps = maps_of(model, batch)
    for image in range(2):
        expected = rollout_by_loop(maps, image, 0.5, "mean", 0.0)[1:, 1:].mean(0).reshape(2, 3)
        np.testing.assert_allclose(rolled[image], expected, rtol=1e-5)
    whole = attention_rollout(vit(class_token=False, global_pool="avg"), batch)
    np.testing.assert_allclose(whole.sum((1, 2)), 1, rtol=1e-5)  # no token but the patches


def test_batches_of_an_iterable() -> None:
    model, batch = vit(), images(5)
    whole = attention_rollout(model, batch)
    torch.testing.assert_close(attention_rollout(model, iter([batch[:2], batch[2:]]), batch_size=2), whole)


@pytest.mark.parametrize(
    ("name", "settings", "reason"),
    [
        (
            "swin_tiny_patch4_window7_224",
            {"img_size": 32, "window_size": 4, "embed_dim": 12, "depths": (1, 1), "num_heads": (1, 2)},
            r"layers\.0\.blocks\.0\.attn attends within windows",
        ),
        (
            "pvt_v2_b0",
            {"depths": (1, 1, 1, 1), "sr_ratios": (2, 2, 2, 1)},
            r"stages\.0\.blocks\.0\.attn has keys that are not",
        ),
        ("pit_ti_224", {"img_size": 64}, r"has other tokens than transformers\.0\.blocks\.0\.attn"),
        ("vit_base_patch16_siglip_224", {"img_size": 64, "depth": 1}, "through attn_pool: its queries are not patches"),
    ],
)
def test_layers_must_share_their_tokens(name: str, settings: dict[str, object], reason: str) -> None:
    model = timm.create_model(name, num_classes=3, **settings)
    side = settings.get("img_size", 64)
    with pytest.raises(InputError, match=reason):
        attention_rollout(model, images(1, (side, side)))


def test_bad_input() -> None:
    model = vit()
    with pytest.raises(InputError, match="mean, max, min"):
        attention_rollout(model, images(1), head_fusion="sum")
    with pytest.raises(InputError, match=r"residual is 1\.0"):
        attention_rollout(model, images(1), residual=1.0)
    with pytest.raises(InputError, match=r"discard is -0\.1"):
        attention_rollout(model, images(1), discard=-0.1)
    with pytest.raises(InputError, match="no images"):
        attention_rollout(model, [])
    with pytest.raises(InputError, match="one size only"):
        attention_rollout(vit(dynamic_img_size=True), [images(1), images(1, (24, 24))])
