"""What the lens sees in models with LocAt: maps with their bias, and the widths and strengths themselves."""

from typing import Any

import numpy as np
import pytest
import torch
from locat_models import attention_names, excite, papers, plain_model
from locat_paper import PaperAttention, written_down

from nearsight import add_locat, check_vit_adapter, measure
from nearsight.metrics import attention_distance, attention_entropy


def local_and_paper(family: str, batch: torch.Tensor, **variant: Any) -> tuple[Any, Any]:
    local = add_locat(plain_model(family), **variant)
    excite(local)
    return local, written_down(local, plain_model(family), papers(local, batch, **variant))


@pytest.mark.parametrize("size", [(40, 40), (64, 48)])
@pytest.mark.parametrize("family", ["vit", "registers", "rope"])
def test_measured_maps_have_the_bias(family: str, size: tuple[int, int]) -> None:
    batch = torch.randn(3, 3, *size)
    local, paper = local_and_paper(family, batch)
    table = measure(local.double(), batch.double(), precision="float64", batch_size=2)
    with torch.no_grad():
        paper(batch.double())
    grid = (size[0] // 8, size[1] // 8)
    assert table.layer_names == tuple(attention_names(local))
    for layer, name in enumerate(table.layer_names):
        (maps,) = paper.get_submodule(name).maps
        prefix = local.num_prefix_tokens
        mad = attention_distance(maps, grid, num_prefix_tokens=prefix).mean(0)
        entropy = attention_entropy(maps, num_prefix_tokens=prefix).mean(0)
        np.testing.assert_allclose(table.mad[layer], mad, rtol=1e-9)
        np.testing.assert_allclose(table.entropy[layer], entropy, rtol=1e-9)


@pytest.mark.parametrize("kernel", ["gaussian", "laplace"])
def test_measured_windows_have_the_bias(kernel: str) -> None:
    """Their distances are over the whole image's grid, and shifted windows hide keys."""
    batch = torch.randn(2, 3, 56, 56)
    local, paper = local_and_paper("swin", batch, kernel=kernel)
    table = measure(local, batch)
    modules = {name: paper.get_submodule(name) for name in table.layer_names}
    assert all(isinstance(module, PaperAttention) for module in modules.values())
    with torch.no_grad():
        paper(batch.double())
    (maps,) = modules["layers.1.blocks.0.attn"].maps  # one window of 7×7, which is the image
    np.testing.assert_allclose(table.mad[2], attention_distance(maps, (7, 7), num_prefix_tokens=0).mean(0), rtol=1e-4)
    (maps,) = modules["layers.0.blocks.0.attn"].maps  # four windows, of an image of 14×14
    within = attention_distance(maps, (7, 7), num_prefix_tokens=0).mean(0) * np.hypot(6, 6) / np.hypot(13, 13)
    np.testing.assert_allclose(table.mad[0, :2], within, rtol=1e-4)


@pytest.mark.parametrize("family", ["vit", "rope", "swin"])
def test_the_lens_leaves_such_models_as_they_are(family: str) -> None:
    model = add_locat(plain_model(family))
    excite(model)
    check_vit_adapter(model, 56 if family == "swin" else 40)


def test_tiles_are_seen_as_one_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = add_locat(plain_model("vit")), torch.randn(2, 3, 40, 40)
    excite(model)
    at_once = measure(model, batch)
    monkeypatch.setattr("nearsight.locat.attend.TILE_BYTES", 2000)
    in_tiles = measure(model, batch)
    assert in_tiles.layer_names == at_once.layer_names
    np.testing.assert_allclose(in_tiles.mad, at_once.mad, rtol=1e-5)


@pytest.mark.parametrize(
    "variant",
    [{}, {"isotropic": True}, {"width": "input"}, {"width": 1.5}, {"scale": "none"}, {"scale": "auto"}],
    ids=str,
)
@pytest.mark.parametrize("family", ["registers", "swin"])
def test_widths_and_strengths(family: str, variant: dict[str, Any]) -> None:
    """Against the heads written down in float64, of any variant, in windows too, and of some blocks alone."""
    size = (56, 56) if family == "swin" else (64, 48)
    batch = torch.randn(2, 3, *size)
    local, paper = local_and_paper(family, batch, **variant)
    extra = measure(local, batch, what=["gaussians"]).extra
    seen: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    for name in attention_names(local):
        module = paper.get_submodule(name)

        def look(attention: PaperAttention, inputs: tuple[torch.Tensor], name: str = name) -> None:
            query, key, _ = (heads[:, :, attention.paper.prefix :] for heads in attention._heads(inputs[0]))
            patches = inputs[0][:, attention.paper.prefix :]
            shape = (*query.shape[:3], 2)
            variance = attention._variance(query, patches, max(attention.paper.initial)).expand(shape)
            ratio = min(attention.paper.grid) / min(attention.paper.initial)
            seen[name] = (variance * ratio).sqrt(), attention._alpha(query, key).expand(shape)[..., 0]

        module.register_forward_pre_hook(look)
    with torch.no_grad():
        paper(batch.double())
    for layer, (sigma, alpha) in enumerate(seen.values()):
        num_heads = sigma.shape[1]
        rows, cols = sigma.mean((0, 2)).T
        np.testing.assert_allclose(extra["sigma_rows"][layer, :num_heads], rows, rtol=1e-4)
        np.testing.assert_allclose(extra["sigma_cols"][layer, :num_heads], cols, rtol=1e-4)
        np.testing.assert_allclose(extra["alpha"][layer, :num_heads], alpha.mean((0, 2)), rtol=1e-4)
        assert extra["sigma_mass"][layer, :num_heads].sum(-1) == pytest.approx(1)


def test_blocks_without_a_bias_have_no_widths() -> None:
    model = add_locat(plain_model("vit"), blocks=[1])
    extra = measure(model, torch.randn(1, 3, 40, 40), what=["gaussians"]).extra
    assert np.isnan(extra["alpha"][0]).all()
    assert np.isfinite(extra["alpha"][1]).all()
