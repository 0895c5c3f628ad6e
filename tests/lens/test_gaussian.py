"""σ and α of a model in the layout of LocAt's published checkpoints, against loops over what its layers return."""

import math

import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nearsight.errors import InputError
from nearsight.lens import HeadTable, measure
from nearsight.lens.gaussian import NUM_BINS, sigma_quantiles
from nearsight.locat import add_locat


class Gaug(nn.Module):
    def __init__(self, head_dim: int, axes: int) -> None:
        super().__init__()
        self.log_var, self.log_alpha = nn.Linear(head_dim, axes), nn.Linear(head_dim, 1)


class GaugAttention(nn.Module):
    """A ViT's attention with S2's Gaussian bias, on the patches alone or on all tokens."""

    def __init__(self, attention: nn.Module, axes: int, all_tokens: bool) -> None:
        super().__init__()
        self.qkv, self.proj = attention.qkv, attention.proj
        self.heads, self.all_tokens = attention.num_heads, all_tokens
        self.gaug = Gaug(attention.head_dim, axes)
        self.returned: dict[str, Tensor] = {}

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        query, key, value = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        asking = query if self.all_tokens else query[:, :, 1:]
        self.returned = {name: getattr(self.gaug, name)(asking) for name in ("log_var", "log_alpha")}
        strength = F.softplus(self.returned["log_alpha"])[:, :, -16:]
        bias = F.pad(strength.expand(-1, -1, -1, 16), (1, 0, 1, 0))
        out = F.scaled_dot_product_attention(query, key, value, bias)
        return self.proj(out.transpose(1, 2).flatten(2))


def locat(axes: int = 2, all_tokens: bool = True) -> nn.Module:
    torch.manual_seed(0)
    model = timm.create_model("compact_vit", depth=3, embed_dim=32, num_heads=4, patch_size=8, num_classes=2)
    for block in list(model.blocks)[1:]:  # the first layer has none
        block.attn = GaugAttention(block.attn, axes, all_tokens)
        for parameter in block.attn.gaug.parameters():
            nn.init.normal_(parameter)
    return model.eval()


@pytest.mark.parametrize("all_tokens", [True, False])
@pytest.mark.parametrize("axes", [1, 2])
def test_against_loops(axes: int, all_tokens: bool) -> None:
    model, images = locat(axes, all_tokens), torch.randn(5, 3, 32, 32)
    extra = measure(model, images, what=["gaussians"]).extra
    assert np.isnan(extra["sigma_rows"][0]).all()
    with torch.no_grad():
        model(images)
    most = 16.0  # of a 4×4 grid
    np.testing.assert_allclose(extra["sigma_most"], 4.0)
    for layer in (1, 2):
        returned = model.blocks[layer].attn.returned
        for head in range(4):
            sigmas, alphas = [], []
            for image in range(5):
                for patch in range(16):
                    raw = returned["log_var"][image, head, -16:][patch].tolist()
                    raw = raw * 2 if axes == 1 else raw
                    sigmas.append([math.sqrt(most / (1 + math.exp(-(x - math.log(most - 1))))) for x in raw])
                    alphas.append(math.log1p(math.exp(float(returned["log_alpha"][image, head, -16:][patch]))))
            rows, cols = np.mean(sigmas, axis=0)
            assert extra["sigma_rows"][layer, head] == pytest.approx(rows, rel=1e-6)
            assert extra["sigma_cols"][layer, head] == pytest.approx(cols, rel=1e-6)
            assert extra["alpha"][layer, head] == pytest.approx(np.mean(alphas), rel=1e-6)
            median = sigma_quantiles(extra["sigma_mass"], extra["sigma_most"], np.array([0.5]))[layer, head, 0]
            assert median == pytest.approx(np.median(sigmas), abs=2 * 4.0 / NUM_BINS)


def test_a_raw_zero_is_a_sigma_of_one_and_an_alpha_of_ln_two() -> None:
    model = locat()
    for parameter in (p for name, p in model.named_parameters() if "gaug" in name):
        nn.init.zeros_(parameter)
    extra = measure(model, torch.randn(1, 3, 32, 32), what=["gaussians"]).extra
    np.testing.assert_allclose(extra["sigma_rows"][1:], 1.0)
    np.testing.assert_allclose(extra["alpha"][1:], math.log(2))


def test_the_grid_a_model_was_made_for_decides_the_widest() -> None:
    model = locat()
    model.blocks[1].attn.gaug.grid_size = (14, 14)
    assert measure(model, torch.randn(1, 3, 32, 32), what=["gaussians"]).extra["sigma_most"].tolist() == [4, 14, 4]


@pytest.mark.parametrize("width", [2.5, 4.0, 20.0])
def test_a_width_that_is_given_may_lie_beyond_the_grid(width: float) -> None:
    model = timm.create_model("compact_vit", depth=2, embed_dim=32, num_heads=4, patch_size=8, num_classes=2)
    add_locat(model, width=width)
    for size, factor in ((32, 1.0), (64, 2.0)):  # the variance grows with the grid
        if size == 64:
            model.set_input_size(img_size=size)
        extra = measure(model, torch.randn(2, 3, size, size), what=["gaussians"]).extra
        sigma = width * math.sqrt(factor)
        np.testing.assert_allclose(extra["sigma_rows"], sigma, rtol=1e-6)
        np.testing.assert_allclose(extra["sigma_most"], max(4.0, width) * math.sqrt(factor))
        quantiles = sigma_quantiles(extra["sigma_mass"], extra["sigma_most"], np.array([0.0, 0.5, 1.0]))
        np.testing.assert_allclose(quantiles, sigma, atol=extra["sigma_most"][0] / NUM_BINS)


def test_quantiles_are_of_bins_that_anything_lies_in() -> None:
    mass = np.zeros((1, 3, 10))
    mass[0, 0, [2, 4, 7]] = 0.2, 0.5, 0.3
    mass[0, 1] = 0.1  # whose sums round
    mass[0, 2] = np.nan
    found = sigma_quantiles(mass, np.array([10.0]), np.array([0.0, 0.2, 0.3, 0.7, 0.8, 1.0]))
    assert found[0, 0].tolist() == [2.5, 2.5, 4.5, 4.5, 7.5, 7.5]
    assert found[0, 1].tolist() == [0.5, 1.5, 2.5, 6.5, 7.5, 9.5]
    assert np.isnan(found[0, 2]).all()


def test_parts_merge_to_the_whole_and_columns_are_written() -> None:
    model, images = locat(), torch.randn(6, 3, 32, 32)
    whole = measure(model, images, what=["gaussians"])
    parts = HeadTable.merge(
        [measure(model, images[:2], what=["gaussians"]), measure(model, images[2:], what=["gaussians"])]
    )
    for name, values in whole.extra.items():
        np.testing.assert_allclose(parts.extra[name], values, rtol=1e-6, atol=1e-12)
    assert {"sigma_rows", "sigma_cols", "alpha"} <= set(whole.extra_frame("head").columns)


def test_models_without_gaussians_are_refused() -> None:
    with pytest.raises(InputError, match="no Gaussian-augmented attention"):
        measure(timm.create_model("compact_vit", depth=1), torch.randn(1, 3, 32, 32), what=["gaussians"])
