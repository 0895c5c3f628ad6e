"""Vision models of Hugging Face transformers, with random weights, against the attentions they give out themselves."""

import copy
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from vit_references.checking import unsettle
from vit_references.dense import Layer, head_numbers, with_shuffled_keys
from vit_references.mechanisms import cells

from nearsight import measure
from nearsight.errors import InputError

transformers = pytest.importorskip("transformers")

SMALL = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 64, "patch_size": 16}


@dataclass(frozen=True)
class Example:
    prefix: int
    """How many tokens stand before the patches."""
    settings: dict[str, Any]
    image_size: tuple[int, int] = (64, 96)
    gain: float = 10.0
    """What queries and keys are multiplied with, so that heads look somewhere."""


WIDE = {**SMALL, "image_size": (64, 96)}
SQUARE = {**SMALL, "image_size": 64}
EXAMPLES = {
    "ViT": Example(1, WIDE),
    "DeiT": Example(2, WIDE),
    "Dinov2": Example(1, {**SQUARE, "mlp_ratio": 2}),  # fits its positions to images of another shape
    "Dinov2WithRegisters": Example(5, {**SQUARE, "mlp_ratio": 2}),
    "CLIPVision": Example(1, SQUARE, (64, 64)),
    "SiglipVision": Example(0, SQUARE, (64, 64), gain=2),
    "Beit": Example(1, {**WIDE, "use_relative_position_bias": True}),
    "ViTMAE": Example(1, {**SQUARE, "mask_ratio": 0.0}, (64, 64)),
    "Swin": Example(
        0,
        {
            "image_size": (64, 96),
            "patch_size": 4,
            "embed_dim": 24,
            "depths": [2, 2],
            "num_heads": [2, 3],
            "window_size": 4,
        },
    ),
}


class InOrder(nn.Module):
    """ViT-MAE shuffles its patches by random noise; with noise that rises they stay in order."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor, **kwargs: Any) -> Any:
        num_patches = images.shape[-2] * images.shape[-1] // 16**2
        noise = torch.arange(num_patches, dtype=images.dtype).expand(len(images), -1)
        return self.model(images, noise=noise, **kwargs)


def build(name: str, implementation: str) -> nn.Module:
    torch.manual_seed(0)
    example = EXAMPLES[name]
    config = getattr(transformers, f"{name}Config")(**example.settings)
    model = getattr(transformers, f"{name}Model")._from_config(config, attn_implementation=implementation)
    unsettle(model, example.gain)
    return InOrder(model.eval()) if name == "ViTMAE" else model.eval()


def with_maps(model: nn.Module, images: Tensor) -> list[Tensor]:
    with torch.no_grad():
        return list(copy.deepcopy(model).double()(images.double(), output_attentions=True).attentions)


def compare(model: nn.Module, images: Tensor, maps: list[Tensor], layers: list[Layer]) -> None:
    table = measure(model, images)
    assert len(table.layer_names) == len(maps) == len(layers)
    for number, (attention, layer) in enumerate(zip(maps, layers, strict=True)):
        mad, entropy = (values.mean(0).numpy() for values in head_numbers(attention, layer, len(images)))
        np.testing.assert_allclose(table.mad[number, : len(mad)], mad, rtol=1e-5)
        np.testing.assert_allclose(table.entropy[number, : len(mad)], entropy, rtol=1e-5)
        elsewhere, _ = head_numbers(attention, with_shuffled_keys(layer), len(images))
        assert np.abs(elsewhere.mean(0).numpy() / mad - 1).max() > 1e-3  # wrong places would show


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("name", [name for name in EXAMPLES if name != "Swin"])
def test_a_model_is_measured_as_its_own_attentions_say(name: str, implementation: str) -> None:
    example = EXAMPLES[name]
    images = torch.randn(3, 3, *example.image_size)
    maps = with_maps(build(name, "eager"), images)
    grid = example.image_size[0] // 16, example.image_size[1] // 16
    places = torch.cat([torch.full((example.prefix, 2), torch.nan).double(), cells(*grid).flatten(0, 1)])[None]
    compare(build(name, implementation), images, maps, [Layer(grid, places, places)] * len(maps))


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_swin(implementation: str) -> None:
    images = torch.randn(2, 3, 64, 96)
    maps = maps_of_modules(build("Swin", "eager"), images)
    layers = []
    for grid in ((16, 24), (8, 12)):
        for shift in (0, 2):
            parts = windows_of_4(torch.roll(cells(*grid), (-shift, -shift), (0, 1)))
            layers.append(Layer(grid, parts, parts, "bw h", None if shift == 0 else same_side_of_the_seam(grid)))
    compare(build("Swin", implementation), images, maps, layers)


def windows_of_4(grid: Tensor) -> Tensor:
    """[windows, 16, …] of [rows, columns, …], in row-major order."""
    rows, cols = grid.shape[:2]
    return grid.reshape(rows // 4, 4, cols // 4, 4, -1).transpose(1, 2).reshape(-1, 16, grid.shape[-1])


def same_side_of_the_seam(grid: tuple[int, int]) -> Tensor:
    """Rolled by 2, the last two rows come from the other end and may not meet those above; so do columns."""
    region = cells(*grid) >= torch.tensor(grid) - 2
    parts = windows_of_4(region)
    return (parts[:, :, None] == parts[:, None]).all(-1)


def maps_of_modules(model: nn.Module, images: Tensor) -> list[Tensor]:
    """Swin gives out one map per stage; its attention modules return all. Outer modules hand on the inner ones'."""
    maps: list[Tensor] = []

    def keep(_module: nn.Module, _inputs: Any, output: Any) -> None:
        for part in output[1:2] if isinstance(output, tuple) else ():
            is_map = isinstance(part, Tensor) and part.dim() == 4 and part.shape[-1] == part.shape[-2] == 16
            if is_map and not any(part is other for other in maps):
                maps.append(part)

    model = copy.deepcopy(model).double()
    for module in model.modules():
        module.register_forward_hook(keep)
    with torch.no_grad():
        model(images.double(), output_attentions=True)
    return maps


def test_attention_pooling_is_named() -> None:
    table = measure(build("SiglipVision", "sdpa"), torch.randn(2, 3, 64, 64))
    (reason,) = table.skipped.values()
    assert "queries are not patches" in reason


def test_patches_in_random_order_are_named() -> None:
    shuffling = build("ViTMAE", "sdpa").model
    with pytest.raises(InputError, match="lie elsewhere in one image than in another"):
        measure(shuffling, torch.randn(2, 3, 64, 64))
