"""Attention of limited reach against attention by loops, as a setting, and as the lens sees it."""

import copy
import math
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

import nearsight
from nearsight.errors import InputError
from nearsight.metrics import attention_distance, attention_entropy, within_reach
from nearsight.models import ModelConfig, create_model
from nearsight.train.stacked import stack_weights, vmapped_forward, weightless

SMALL = {"img_size": (12, 20), "depth": 3, "embed_dim": 24, "num_heads": 2, "num_classes": 5}


def drawn(name: str = "compact_vit", **settings: Any) -> Any:
    """Weights far from where they start, so that attention is sharp."""
    model = create_model(name, **SMALL | settings).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.1, 0.4)
    return model


def attended(model: Any, block: Any, x_BNC: Tensor, reach: float | None) -> Tensor:
    """What an attention gives, query by query, of the keys that it may attend to and no others."""
    attention, cols = block.attn, model.patch_embed.grid_size[1]
    qkv = attention.qkv(x_BNC).unflatten(-1, (3, attention.num_heads, -1))
    prefix = model.num_prefix_tokens
    rows = []
    for query in range(x_BNC.shape[1]):
        keys = [
            key
            for key in range(x_BNC.shape[1])
            if reach is None or query < prefix or key < prefix or _apart(query - prefix, key - prefix, cols) <= reach
        ]
        logits_BHM = torch.einsum("bhd,bmhd->bhm", qkv[:, query, 0], qkv[:, keys, 1]) * attention.scale
        rows.append(torch.einsum("bhm,bmhd->bhd", logits_BHM.softmax(-1), qkv[:, keys, 2]).flatten(1))
    projected: Tensor = attention.proj(torch.stack(rows, 1))
    return projected


def _apart(one: int, other: int, cols: int) -> float:
    return math.dist(divmod(one, cols), divmod(other, cols))


def by_loops(model: Any, images: Tensor, by_block: tuple[float | None, ...]) -> Tensor:
    x = model._pos_embed(model.patch_embed(images))
    for block, reach in zip(model.blocks, by_block, strict=True):
        x = x + attended(model, block, block.norm1(x), reach)
        x = x + block.mlp(block.norm2(x))
    logits: Tensor = model.forward_head(model.norm(x))
    return logits


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize(
    ("reach", "by_block"),
    [
        (1.5, (1.5, 1.5, 1.5)),
        ((0.0,), (0.0, 0.0, 0.0)),
        ((1, None, 2.3), (1, None, 2.3)),
        ((math.inf, math.inf, 1), (None, None, 1)),
    ],
)
def test_forward_and_backward_are_those_of_loops(reach: Any, by_block: Any, fused: bool) -> None:
    model = drawn(reach=reach, reg_tokens=2)
    for block in model.blocks:
        block.attn.fused_attn = fused
    images = torch.randn(2, 3, 12, 20, dtype=torch.float64, requires_grad=True)
    found, expected = model(images), by_loops(model, images, by_block)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    inputs = [images, *model.parameters()]
    gradients = (torch.autograd.grad(result.square().sum(), inputs) for result in (found, expected))
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-8)


@torch.no_grad()
def test_no_limit_and_a_limit_beyond_the_grid_change_nothing() -> None:
    plain, images = drawn(), torch.randn(2, 3, 12, 20, dtype=torch.float64)
    for reach in ((), None, math.inf, 6.0, (None, None, None)):
        limited = drawn(reach=reach)
        limited.load_state_dict(plain.state_dict())  # masks are no part of it
        torch.testing.assert_close(limited(images), plain(images), rtol=1e-12, atol=1e-12)


@torch.no_grad()
def test_local_attention_without_strength_is_plain_attention() -> None:
    """LocAt with strengths of 0 under a mask is the same mask without LocAt, and with others it is not."""
    plain, local = drawn(reach=1.5), drawn("locat_compact_vit", reach=1.5, prr=False)
    local.load_state_dict(plain.state_dict(), strict=False)
    images = torch.randn(2, 3, 12, 20, dtype=torch.float64)
    assert not torch.allclose(local(images), plain(images))
    for block in local.blocks:
        nn.init.zeros_(block.attn.gaug.log_alpha.weight)
        nn.init.constant_(block.attn.gaug.log_alpha.bias, -1e4)
    torch.testing.assert_close(local(images), plain(images), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["compact_vit", "locat_compact_vit", "compact_vit_positional", "compact_jumbo_vit"])
def test_distant_patches_do_not_reach_a_patch(name: str) -> None:
    """By the gradient of a patch behind one block; behind a second one, CLS would have brought it all."""
    model = drawn(name, depth=1, reach=1.5)
    prefix, (rows, cols) = model.num_prefix_tokens, model.patch_embed.grid_size
    images = torch.randn(1, 3, 12, 20, dtype=torch.float64, requires_grad=True)
    tokens_BNC = model.forward_features(images)
    for patch in range(rows * cols):
        (gradient,) = torch.autograd.grad(tokens_BNC[0, prefix + patch].square().sum(), images, retain_graph=True)
        touched = gradient[0].abs().sum(0).unflatten(0, (rows, 4)).unflatten(2, (cols, 4)).sum((1, 3)) > 0
        near = within_reach((rows, cols), 1.5, num_prefix_tokens=0)[patch].view(rows, cols)
        assert torch.equal(touched, near)


@pytest.mark.parametrize("name", ["compact_vit", "locat_compact_vit", "compact_vit_positional"])
def test_the_lens_sees_the_mask(name: str) -> None:
    """Distances are of the keys that are left, and entropy is in units of the logarithm of their number."""
    reach = (0.0, 1.5, None)
    model = drawn(name, reach=reach).float()
    images = torch.randn(3, 3, 12, 20)
    table = nearsight.measure(model, images)
    assert table.uniform is not None
    maps = nearsight.attention_maps(model, images, dtype=torch.float64)
    for layer, (of_layer, number) in enumerate(zip(maps, reach, strict=True)):
        weights = of_layer.full()
        mask_NN = within_reach((3, 5), math.inf if number is None else number)
        assert not weights[..., ~mask_NN].any()
        distance = attention_distance(weights, (3, 5)).mean(0).numpy()
        assert table.mad[layer] == pytest.approx(distance, abs=1e-6)
        shares = weights[..., 1:, 1:] / weights[..., 1:, 1:].sum(-1, keepdim=True)
        most_P = mask_NN[1:, 1:].sum(-1).double().log()
        entropy = (-torch.xlogy(shares, shares).sum(-1) / most_P.clamp(min=1e-12)).mean((0, 2)).numpy()
        assert table.entropy[layer] == pytest.approx(entropy, abs=1e-5)
        near_PP = mask_NN[1:, 1:].double()
        uniform = attention_distance((near_PP / near_PP.sum(-1, keepdim=True))[None], (3, 5), num_prefix_tokens=0)
        assert table.uniform[layer] == pytest.approx(float(uniform), abs=1e-6)
    assert attention_entropy(maps[2].full()).mean(0).numpy() == pytest.approx(table.entropy[2], abs=1e-5)


@torch.no_grad()
def test_masks_follow_the_grid_and_copies_of_the_model() -> None:
    model = drawn(reach=(1.0, None, 2.0))
    resized = copy.deepcopy(model)
    resized.set_input_size(img_size=(20, 16))
    for size, one in (((20, 16), resized), ((12, 20), model)):
        images = torch.randn(2, 3, *size, dtype=torch.float64)
        expected = by_loops(one, images, (1.0, None, 2.0))
        torch.testing.assert_close(one(images), expected, rtol=1e-9, atol=1e-9)
        assert one.blocks[1].attn._forward_pre_hooks == {}


def test_stacked_by_vmap() -> None:
    cells = [drawn(reach=(1.0, None, 2.0)) for _ in range(2)]
    weights = stack_weights([dict(cell.named_parameters()) for cell in cells], torch.device("cpu"))
    weights = {name: weight.requires_grad_() for name, weight in weights.items()}
    images = torch.randn(2, 2, 3, 12, 20, dtype=torch.float64)
    outputs = vmapped_forward(weightless(cells[0]).double(), weights, images)
    gradients = torch.autograd.grad(outputs.square().sum(), list(weights.values()))
    for k, cell in enumerate(cells):
        torch.testing.assert_close(outputs[k], cell(images[k]), rtol=1e-9, atol=1e-9)
        expected = torch.autograd.grad(cell(images[k]).square().sum(), list(cell.parameters()))
        for ours, theirs in zip(gradients, expected, strict=True):
            torch.testing.assert_close(ours[k], theirs, rtol=1e-8, atol=1e-8)


def test_what_means_the_same_is_written_alike() -> None:
    assert ModelConfig(reach=(2,)).reach == ModelConfig(reach=(2.0,) * 8).reach == (2.0,)
    assert ModelConfig(reach=(None,)) == ModelConfig(reach=(math.inf,) * 8) == ModelConfig()
    assert ModelConfig(depth=2, reach=(1, math.inf)).reach == (1.0, None)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"reach": (-1.0,)}, r"reach is -1\.0, but must be a distance in patches, at least 0, or None for no limit"),
        ({"reach": (math.nan,)}, "reach is nan, but"),
        ({"reach": ("near",)}, "reach is 'near', but"),
        ({"reach": (True,)}, "reach is True, but"),
        ({"reach": (1.0, 2.0)}, "reach has 2 numbers, but there are 8 blocks; give one for all or one each"),
        (
            {"reach": (1.0,), "name": "compact_resnet18"},
            r"reach is \(1\.0,\), but compact_resnet18 has no such setting",
        ),
    ],
)
def test_impossible_reaches_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        ModelConfig(**settings)
    if "name" not in settings:
        with pytest.raises(InputError, match=message):
            timm.create_model("compact_vit", **settings)


@pytest.mark.parametrize("option", [{"dynamic_img_size": True}, {"patch_drop_rate": 0.5}])
def test_options_that_leave_no_grid_are_refused(option: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=f"{next(iter(option))} does not go with a limited reach"):
        create_model("compact_vit", reach=1.0, **option)
    create_model("compact_vit", **option)
