"""Whole attention maps against a model's own unfused code, put in place by loops."""

import math

import numpy as np
import pytest
import timm
import torch
from torch import Tensor, nn

from nearsight.errors import InputError
from nearsight.lens import measure
from nearsight.lens.maps import attention_maps


def sharpened(model: nn.Module) -> nn.Module:
    """With maps that differ between heads, queries and images."""
    for module in model.modules():
        if isinstance(qkv := getattr(module, "qkv", None), nn.Linear):
            qkv.weight.data *= 20
    return model


def vit(**settings: object) -> nn.Module:
    torch.manual_seed(0)
    settings = {"img_size": (16, 24), "patch_size": 4, "embed_dim": 24, "depth": 2, "num_heads": 3} | settings
    return sharpened(timm.create_model("vit_tiny_patch16_224", num_classes=3, **settings))


def swin() -> nn.Module:
    torch.manual_seed(0)
    shape = {"img_size": 32, "window_size": 4, "embed_dim": 24, "depths": (2, 1), "num_heads": (2, 3)}
    return sharpened(timm.create_model("swin_tiny_patch4_window7_224", num_classes=3, **shape))


def images(num: int, *size: int) -> Tensor:
    return torch.randn(num, 3, *size, generator=torch.Generator().manual_seed(1))


def softmaxes(model: nn.Module, batch: Tensor) -> list[np.ndarray]:
    """What went into each attention's dropout, by timm's own unfused code."""
    seen: list[np.ndarray] = []
    hooks = []
    for module in model.modules():
        if hasattr(module, "fused_attn"):
            module.fused_attn = False
            keep = lambda _module, inputs, _output: seen.append(inputs[0].double().numpy())  # noqa: E731
            hooks.append(module.attn_drop.register_forward_hook(keep))
    with torch.no_grad():
        model.eval()(batch)
    for hook in hooks:
        hook.remove()
    return seen


def test_a_vit_with_registers_on_a_grid_that_is_not_square() -> None:
    model, batch = vit(reg_tokens=2), images(2, 16, 24)
    found = attention_maps(model, batch)
    assert model.training
    for layer, expected_BHNN in zip(found, softmaxes(model, batch), strict=True):
        assert layer.grid_size == layer.query_grid == layer.key_grid == (4, 6)
        assert layer.others == layer.other_queries == ("CLS", "register 1", "register 2")
        assert layer.reach_QK is None
        patches_first = [*range(3, 27), 0, 1, 2]
        rows = expected_BHNN[:, :, patches_first]
        np.testing.assert_allclose(layer.weights_BHQK.numpy(), rows[..., 3:], atol=2e-6)
        np.testing.assert_allclose(layer.other_weights_BHQO.numpy(), rows[..., :3], atol=2e-6)
        for query in (0, 9, 23):
            patches = expected_BHNN[1, 2, 3 + query, 3:]
            steps = [math.hypot(query // 6 - key // 6, query % 6 - key % 6) for key in range(24)]
            far = float(patches @ np.array(steps) / patches.sum() / math.hypot(3, 5))
            assert layer.distances_BHQ[1, 2, query].item() == pytest.approx(far, rel=1e-4)
        assert layer.distances_BHQ[..., 24:].isnan().all()


def place(number: int, inside: int, side: int, window: int, shift: int) -> tuple[int, int]:
    """Row and column on the image of a token of a window, after the image was rolled back."""
    row = number // (side // window) * window + inside // window
    col = number % (side // window) * window + inside % window
    return (row + shift) % side, (col + shift) % side


def test_shifted_windows_are_put_in_their_place() -> None:
    model, batch = swin(), images(2, 32, 32)
    found = attention_maps(model, batch)
    assert [layer.grid_size for layer in found] == [(8, 8), (8, 8), (4, 4)]
    for layer, shift, expected in zip(found, (0, 2, 0), softmaxes(model, batch), strict=True):
        side, window = layer.grid_size[0], 4
        across = side // window
        weights = np.zeros(layer.weights_BHQK.shape)
        reach = np.zeros(weights.shape[2:], dtype=bool)

        for image in range(2):
            for number in range(across**2):
                for query in range(window**2):
                    for key in range(window**2):
                        (query_row, query_col), (key_row, key_col) = (
                            place(number, inside, side, window, shift) for inside in (query, key)
                        )
                        cell = query_row * side + query_col, key_row * side + key_col
                        weights[image, :, *cell] = expected[image * across**2 + number, :, query, key]
                        # A rolled window joins opposite sides of the image, which may not see each other.
                        reach[cell] = abs(query_row - key_row) < window and abs(query_col - key_col) < window
        np.testing.assert_allclose(layer.weights_BHQK.numpy(), weights, atol=2e-6)
        if across > 1:
            np.testing.assert_array_equal(layer.reach_QK, reach)
        else:  # one window is the whole image
            assert layer.reach_QK is None
        assert layer.others == layer.other_queries == ()


@pytest.mark.parametrize(("size", "lines"), [((48, 32), (6, 8)), ((44, 52), (8, 8))])
def test_pooled_queries_are_means_and_pooled_keys_sums(size: tuple[int, int], lines: tuple[int, int]) -> None:
    model, batch = vit(img_size=size), images(1, *size)
    for whole, pooled in zip(attention_maps(model, batch), attention_maps(model, batch, most_lines=8), strict=True):
        (rows, cols), num_patches = whole.grid_size, math.prod(whole.grid_size)
        assert (pooled.query_grid, pooled.key_grid, pooled.whole_key_grid) == (lines, lines, (rows, cols))
        cell = [
            row * lines[0] // rows * lines[1] + col * lines[1] // cols for row in range(rows) for col in range(cols)
        ]
        sums = np.zeros((3, math.prod(lines) + 1, math.prod(lines)))
        far, counts = np.zeros((3, math.prod(lines))), np.bincount(cell)
        for query, query_cell in enumerate([*cell, math.prod(lines)]):
            for key in range(num_patches):
                sums[:, query_cell, cell[key]] += whole.weights_BHQK[0, :, query, key].numpy()
            if query < num_patches:
                far[:, query_cell] += whole.distances_BHQ[0, :, query].numpy()
        means = sums / np.array([*counts, 1])[None, :, None]
        np.testing.assert_allclose(pooled.weights_BHQK[0].numpy(), means, atol=1e-12)
        np.testing.assert_allclose(pooled.distances_BHQ[0, :, :-1].numpy(), far / counts, atol=1e-12)
        everything = pooled.weights_BHQK.sum(-1) + pooled.other_weights_BHQO.sum(-1)
        np.testing.assert_allclose(everything.numpy(), 1.0, atol=1e-12)


@pytest.mark.parametrize("name", ["swin", "pvt_v2_b0", "vit"])
def test_the_distances_of_all_queries_are_the_measured_distance(name: str) -> None:
    torch.manual_seed(0)
    model = {"swin": swin, "vit": lambda: vit(img_size=32)}.get(name, lambda: timm.create_model(name, num_classes=3))()
    size = 64 if name == "pvt_v2_b0" else 32
    batch = images(2, size, size)
    table = measure(model, batch, precision="float64")
    found = attention_maps(model, batch)
    assert tuple(layer.name for layer in found) == table.layer_names
    for layer, mad in zip(found, table.mad, strict=True):
        num_patches = math.prod(layer.query_grid)
        own = layer.distances_BHQ[..., :num_patches].mean((0, 2)).numpy()
        np.testing.assert_allclose(own, mad[: len(own)], rtol=1e-6)


def test_no_images_are_refused() -> None:
    with pytest.raises(InputError, match="no images"):
        attention_maps(vit(), images(0, 16, 24))
