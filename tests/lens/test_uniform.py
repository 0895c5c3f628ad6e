"""Uniform attention: what a layer has that attends alike to all it may, and how close random weights are to it."""

import itertools

import numpy as np
import pytest
import timm
import torch
from torch import Tensor, nn

from nearsight import measure
from nearsight.data import make_shapes
from nearsight.metrics import uniform_attention_distance
from nearsight.report.face import as_model
from nearsight.report.reading import ALIKE, is_uniform


def images(size: int, num: int = 2) -> Tensor:
    shapes = make_shapes(num, image_size=32, split="test").images_NCHW / 127.5 - 1
    return nn.functional.interpolate(shapes, size=(size, size), mode="bilinear")


def without_preference(model: nn.Module) -> nn.Module:
    """Queries of 0 and no bias by position: its attention is uniform over whatever it may attend to."""
    with torch.no_grad():
        for module in model.modules():
            for name in ("q", "q_proj", "qkv"):
                if isinstance(layer := getattr(module, name, None), nn.Linear):
                    for parameter in layer.parameters():
                        parameter.zero_()
            if isinstance(bias := getattr(module, "relative_position_bias_table", None), nn.Parameter):
                bias.zero_()
    return model


SMALL = {
    "vit_tiny_patch16_224": {"img_size": 64},
    "vit_small_patch14_reg4_dinov2": {"img_size": 70, "depth": 2},  # CLS and registers
    "swin_tiny_patch4_window7_224": {"img_size": 56, "window_size": 7, "depths": (2, 2), "num_heads": (3, 6)},
    "swinv2_tiny_window8_256": {"img_size": 64, "window_size": 4, "depths": (2, 2), "num_heads": (3, 6)},
    "pvt_v2_b0": {},  # pooled keys
    "eva02_tiny_patch14_224": {"img_size": 70, "depth": 2},
}


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("name", SMALL)
def test_it_is_what_a_model_without_preference_has(name: str, fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In windows, shifted ones with their masks, too, and on pooled keys: distance as said, entropy 1."""
    monkeypatch.setattr("timm.layers.config._USE_FUSED_ATTN", int(fused))
    options = SMALL[name]
    model = without_preference(timm.create_model(name, **options))
    if name.startswith("swinv2"):  # cosine attention: its bias by position is a network of its own
        for module in model.modules():
            if hasattr(module, "cpb_mlp"):
                nn.init.zeros_(module.cpb_mlp[-1].weight)
    table = measure(model, images(options.get("img_size", 64)))
    assert table.uniform is not None
    np.testing.assert_allclose(table.mad, np.where(np.isnan(table.mad), np.nan, table.uniform[:, None]), atol=3e-7)
    np.testing.assert_allclose(table.entropy[~np.isnan(table.entropy)], 1.0, atol=1e-6)


def test_of_a_whole_grid_it_is_the_closed_form() -> None:
    table = measure(timm.create_model("vit_tiny_patch16_224", img_size=(48, 80), depth=2), torch.randn(2, 3, 48, 80))
    assert table.uniform is not None
    np.testing.assert_allclose(table.uniform, uniform_attention_distance((3, 5)), rtol=1e-12)


def test_of_shifted_windows_it_is_a_loop_over_what_their_masks_show() -> None:
    """By hand: an 8×8 grid, windows of 4, shifted by 2; a query sees its window without what was rolled in."""
    side, window, shift = 8, 4, 2
    model = timm.create_model(
        "swin_tiny_patch4_window7_224", img_size=32, window_size=4, depths=(2,), num_heads=(2,), embed_dim=16
    )
    table = measure(model, images(32))

    def group(place: int, moved: int) -> tuple[int, bool]:
        rolled = (place - moved) % side
        return rolled // window, place < moved  # which window, and whether it came from the other end

    for layer, moved in enumerate((0, shift)):
        means = []
        for row, col in itertools.product(range(side), repeat=2):
            seen = [
                np.hypot(row - other_row, col - other_col)
                for other_row, other_col in itertools.product(range(side), repeat=2)
                if (group(row, moved), group(col, moved)) == (group(other_row, moved), group(other_col, moved))
            ]
            means.append(np.mean(seen))
        assert table.uniform is not None
        assert table.uniform[layer] == pytest.approx(np.mean(means) / np.hypot(7, 7), rel=1e-12)


class MaskedByImage(nn.Module):
    """Hides another patch on each image."""

    def __init__(self) -> None:
        super().__init__()
        self.model = timm.create_model("vit_tiny_patch16_224", img_size=64, depth=1)
        self.hidden = nn.Parameter(torch.zeros(1))

    def forward(self, pixels: Tensor) -> Tensor:
        tokens = self.model.patch_embed(pixels)
        heads = self.model.blocks[0].attn.qkv(tokens).unflatten(-1, (3, 3, 64)).permute(2, 0, 3, 1, 4)
        mask = torch.ones(len(pixels), 1, 1, 16, dtype=torch.bool)
        mask[torch.arange(len(pixels)), ..., torch.arange(len(pixels)) % 16] = False
        return nn.functional.scaled_dot_product_attention(*heads, attn_mask=mask)


def test_where_images_see_different_patches_it_is_not_known() -> None:
    table = measure(MaskedByImage(), images(64, 3))
    assert table.uniform is not None
    assert np.isnan(table.uniform).all()
    assert as_model(table).uniform_distance(0) is None


RANDOM = (
    "compact_vit",
    "vit_tiny_patch16_224",
    "vit_small_patch16_224",
    "deit3_small_patch16_224",
    "vit_small_patch14_reg4_dinov2",
    "eva02_tiny_patch14_224",
    "swin_tiny_patch4_window7_224",
    "pvt_v2_b0",
)


@pytest.mark.parametrize("name", RANDOM)
def test_random_weights_are_about_uniform(name: str) -> None:
    """What `describe` says of random weights, and the tolerance it calls indistinguishable."""
    torch.manual_seed(1)
    size = 32 if name == "compact_vit" else 224
    model = timm.create_model(name, **({"img_size": size} if "dinov2" in name else {}))
    table = measure(model, images(size))
    assert table.uniform is not None
    assert np.nanmax(np.abs(table.mad - table.uniform[:, None])) < ALIKE
    assert np.nanmin(table.entropy) > 1 - ALIKE
    assert is_uniform(as_model(table))


def test_a_model_with_one_head_that_chooses_is_not_indistinguishable() -> None:
    torch.manual_seed(0)
    model = timm.create_model("compact_vit")
    with torch.no_grad():
        for first in (0, 192):  # queries and keys of one head
            model.blocks[2].attn.qkv.weight[first : first + 24].mul_(8)
    assert not is_uniform(as_model(measure(model, images(32))))
