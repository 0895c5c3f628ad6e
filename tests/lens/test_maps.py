"""Whole attention maps against a model's own unfused code, put in place by loops."""

import json
import math
import struct
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F
from safetensors.numpy import load_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchvision.models import VisionTransformer

import nearsight
from nearsight.errors import InputError
from nearsight.lens import LayerMaps, attention_maps, measure, open_maps


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


def pvt() -> nn.Module:
    """Its keys are pooled from its queries, in all stages but the last."""
    torch.manual_seed(0)
    return timm.create_model("pvt_v2_b0", num_classes=3)


def with_fused(model: nn.Module, fused: bool) -> nn.Module:
    for module in model.modules():
        if hasattr(module, "fused_attn"):
            module.fused_attn = fused
    return model


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


@pytest.mark.parametrize("fused", [True, False])
def test_shifted_windows_are_put_in_their_place(fused: bool) -> None:
    model, batch = with_fused(swin(), fused), images(2, 32, 32)
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
    both = (attention_maps(model, batch, dtype=torch.float64, most_lines=most) for most in (None, 8))
    for whole, pooled in zip(*both, strict=True):
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


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize(
    ("build", "size"),
    [
        (vit, (16, 24)),
        (lambda: vit(reg_tokens=2), (16, 24)),
        (lambda: vit(class_token=False, global_pool="avg"), (16, 24)),
        (pvt, (64, 64)),
    ],
    ids=["CLS", "registers", "patches alone", "pooled keys"],
)
def test_full_maps_are_the_models_own(build: Callable[[], nn.Module], size: tuple[int, int], fused: bool) -> None:
    model, batch = with_fused(build().double(), fused), images(3, *size).double()
    found = nearsight.attention_maps(model, batch, dtype=torch.float64, batch_size=2)
    own = softmaxes(model, batch)
    assert len(found) == len(own)
    for layer, expected_BHNM in zip(found, own, strict=True):
        np.testing.assert_allclose(layer.full().numpy(), expected_BHNM, atol=1e-12)
        np.testing.assert_array_equal(layer.full(slice(1, 2)).numpy(), layer.full()[1:2].numpy())
        patches = layer.weights_BHQK[:, :, : math.prod(layer.query_grid)]
        num_others = len(layer.others)
        np.testing.assert_allclose(patches.numpy(), expected_BHNM[:, :, num_others:, num_others:], atol=1e-12)


def test_layers_without_one_map_of_all_tokens_say_so() -> None:
    windows, pooled = (
        attention_maps(swin(), images(1, 32, 32))[0],
        attention_maps(vit(), images(1, 16, 24), most_lines=2)[0],
    )
    for layer in (windows, pooled):
        with pytest.raises(InputError, match=rf"{layer.name} has no one map of all its tokens: .*; take weights_BHQK"):
            layer.full()


class Unusual(nn.Module):
    """CLS comes last and the patches in no order; the first patch sees CLS alone, the second itself alone."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.cls_token = nn.Conv2d(3, 8, 4, 4), nn.Parameter(torch.randn(1, 1, 8))
        self.register_buffer("order", torch.randperm(16, generator=torch.Generator().manual_seed(3)))
        mask = torch.ones(17, 17, dtype=torch.bool)
        mask[0, :16] = False
        mask[1] = torch.arange(17) == 1
        self.register_buffer("mask", mask)
        self.seen: list[Tensor] = []

    def forward(self, batch: Tensor) -> Tensor:
        patches = self.embed(batch).flatten(2).transpose(1, 2)[:, self.order]
        tokens = torch.cat([patches, self.cls_token.expand(len(batch), 1, 8)], dim=1)[:, None]
        logits = (tokens.double() @ tokens.double().transpose(-2, -1) / math.sqrt(8)).masked_fill(~self.mask, -math.inf)
        self.seen.append(logits.softmax(-1).detach())
        return F.scaled_dot_product_attention(tokens, tokens, tokens, attn_mask=self.mask)


def test_tokens_in_any_order_and_queries_that_see_no_patch() -> None:
    model, batch = Unusual(), images(2, 16, 16)
    (layer,) = attention_maps(model, batch, batch_size=2)
    expected = model.seen[-1]
    torch.testing.assert_close(layer.full().double(), expected, atol=1e-6, rtol=0)
    places = model.order.argsort()  # of the patches, row by row, among the tokens
    by_row = expected[:, :, [*places.tolist(), 16]]
    torch.testing.assert_close(layer.weights_BHQK.double(), by_row[..., places], atol=1e-6, rtol=0)
    torch.testing.assert_close(layer.other_weights_BHQO.double(), by_row[..., 16:], atol=1e-6, rtol=0)
    blind, alone = int(model.order[0]), int(model.order[1])
    assert layer.other_weights_BHQO[:, :, blind].eq(1).all()
    assert layer.distances_BHQ[:, :, blind].isnan().all()
    assert layer.distances_BHQ[:, :, alone].eq(0).all()
    assert int(layer.distances_BHQ[0, 0].isnan().sum()) == 2  # and that of CLS


# Choosing


@pytest.mark.parametrize(("build", "size"), [(lambda: vit(reg_tokens=1), (16, 24)), (swin, (32, 32)), (pvt, (64, 64))])
@pytest.mark.parametrize("fused", [True, False])
def test_chosen_layers_and_heads_are_parts_of_all(
    build: Callable[[], nn.Module], size: tuple[int, int], fused: bool
) -> None:
    model, batch = with_fused(build(), fused), images(2, *size)
    every = attention_maps(model, batch, dtype=torch.float64)
    last = len(every) - 1
    assert every[last].heads == tuple(range(every[last].weights_BHQK.shape[1]))
    first, second = attention_maps(model, batch, layers=[-1, every[0].name], heads=[0], dtype=torch.float64)
    assert_part(first, every[last], [0])
    assert_part(second, every[0], [0])
    heads = [len(every[last].heads) - 1, 0]
    by_layer = {every[last].name: heads, 0: None}
    first, second = attention_maps(model, batch, heads=by_layer, dtype=torch.float64)
    assert_part(first, every[last], heads)
    assert_part(second, every[0], list(every[0].heads))


def assert_part(part: LayerMaps, whole: LayerMaps, heads: list[int]) -> None:
    assert (part.name, part.heads) == (whole.name, tuple(heads))
    for field in ("weights_BHQK", "other_weights_BHQO", "distances_BHQ"):
        torch.testing.assert_close(
            getattr(part, field), getattr(whole, field)[:, heads], atol=1e-12, rtol=0, equal_nan=True
        )
    if whole.reach_QK is not None:
        assert torch.equal(part.reach_QK, whole.reach_QK)


def test_a_forward_ends_with_the_last_chosen_layer_unless_somebody_watches_it() -> None:
    model, batch = vit(depth=3).eval(), images(2, 16, 24)
    before = model(batch)
    runs: list[nn.Module] = []
    watched = model.blocks[1].mlp.fc1
    own = type(watched).forward
    counted = type("Counted", (nn.Linear,), {"forward": lambda self, tokens: (runs.append(self), own(self, tokens))[1]})
    for module in (model.blocks[0].mlp.fc1, watched):
        module.__class__ = counted
    attention_maps(model, batch, layers=[1])
    survey = runs.count(watched)
    assert runs.count(model.blocks[0].mlp.fc1) == survey + 1
    assert torch._C._len_torch_function_stack() == 0
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    runs.clear()
    handle = model.blocks[2].register_forward_hook(lambda *_: None)
    attention_maps(model, batch, layers=[1])
    assert runs.count(watched) == survey + 1
    handle.remove()
    torch.testing.assert_close(model(batch), before, atol=0, rtol=0)


def test_torchs_own_attention_is_seen_and_may_be_broken() -> None:
    torch.manual_seed(0)
    model, batch = VisionTransformer(32, 8, 3, 2, 16, 32).eval(), images(2, 32, 32)
    (layer,) = attention_maps(model, batch, layers=[1], heads=[1])
    seen: list[Tensor] = []
    block = model.encoder.layers[1]
    block.register_forward_pre_hook(lambda _, tokens: seen.append(block.ln_1(tokens[0])))
    with torch.no_grad():
        model(batch)
    _, expected = block.self_attention(seen[0], seen[0], seen[0], need_weights=True, average_attn_weights=False)
    torch.testing.assert_close(layer.full(), expected[:, 1:], atol=1e-6, rtol=0)
    model.encoder.layers[0].self_attention.in_proj_weight.data[0, 0] = torch.nan
    with torch.device("cpu"), pytest.raises(InputError, match=r"encoder_layer_0\.self_attention is NaN or infinite"):
        attention_maps(model, batch)
    assert torch._C._len_torch_function_stack() == 0


def test_layers_that_depend_on_what_a_model_sees_are_named() -> None:
    class Moody(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = vit()

        def forward(self, batch: Tensor) -> Tensor:
            return self.model(batch) if batch.abs().mean() > 1e-3 else batch

    with pytest.raises(InputError, match=r"Moody computes other attentions .*model\.blocks\.0\.attn is missing"):
        attention_maps(Moody(), [images(1, 16, 24), images(1, 16, 24) * 1e-6])


# Types


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float64, 2e-6), (torch.float32, 2e-6), (torch.float16, 5e-4), (torch.bfloat16, 4e-3)],
)
def test_maps_are_of_the_type_that_is_asked_for(dtype: torch.dtype, tolerance: float) -> None:
    """Computed in full precision and rounded once: by half a unit in the last place of a number below 1."""
    model, batch = vit(reg_tokens=2), images(2, 16, 24)
    given = attention_maps(model, batch, dtype=dtype)
    assert attention_maps(model, batch)[0].weights_BHQK.dtype == torch.float32
    for layer, full, expected in zip(given, attention_maps(model, batch), softmaxes(model, batch), strict=True):
        assert {layer.weights_BHQK.dtype, layer.other_weights_BHQO.dtype, layer.full().dtype} == {dtype}
        assert layer.distances_BHQ.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        np.testing.assert_allclose(layer.full().double().numpy(), expected, atol=tolerance, rtol=0)
        if dtype != torch.float64:
            assert torch.equal(layer.full(), full.full().to(dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["vit", "swin", "pvt"])
@pytest.mark.parametrize("most_lines", [None, 3])
def test_maps_from_a_gpu_are_those_from_the_cpu(tmp_path: Path, name: str, most_lines: int | None) -> None:
    model, batch = built(name)
    settings: dict[str, Any] = {"heads": [0], "dtype": torch.float64, "most_lines": most_lines}
    expected = attention_maps(model.double(), batch.double(), **settings)
    for out in (None, tmp_path / "maps.safetensors"):
        found = attention_maps(model, batch.double(), device="cuda", out=out, **settings)
        for one, other in zip(found, expected, strict=True):
            assert_part(one, other, [0])


# Files


SHAPES = ("vit", "swin", "pvt")
EVERYTHING = ("weights_BHQK", "other_weights_BHQO", "distances_BHQ", "reach_QK", "query_order_N", "key_order_M")


def built(name: str) -> tuple[nn.Module, Tensor]:
    builds: dict[str, tuple[Callable[[], nn.Module], tuple[int, int]]] = {
        "vit": (lambda: vit(reg_tokens=2), (16, 24)), "swin": (swin, (32, 32)), "pvt": (pvt, (64, 64))
    }  # fmt: skip
    build, size = builds[name]
    return build(), images(5, *size)


def assert_same(found: list[LayerMaps], expected: list[LayerMaps]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        for field, value in vars(other).items():
            if isinstance(value, Tensor):
                torch.testing.assert_close(getattr(one, field), value, atol=0, rtol=0, equal_nan=True)
            else:
                assert getattr(one, field) == value, field


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("name", SHAPES)
def test_a_file_holds_what_memory_would(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    model, batch = built(name)
    path = tmp_path / "new" / "maps.safetensors"
    expected = attention_maps(model, batch, dtype=dtype, batch_size=2)
    assert_same(attention_maps(model, batch, dtype=dtype, batch_size=2, out=path), expected)
    assert_same(open_maps(str(path)), expected)
    assert [file.name for file in path.parent.iterdir()] == ["maps.safetensors"]


@pytest.mark.parametrize("given", ["generator", "loader", "list"])
def test_batches_of_images_that_nobody_has_counted(tmp_path: Path, given: str) -> None:
    def coming() -> Any:
        if given == "loader":
            return DataLoader(TensorDataset(batch, torch.arange(5)), batch_size=2)
        return list(batch.split(2)) if given == "list" else iter(batch.split(2))

    for name in SHAPES:
        model, batch = built(name)
        expected = attention_maps(model, batch, heads=[0], batch_size=2)
        assert_same(attention_maps(model, coming(), heads=[0]), expected)
        path = tmp_path / "maps.safetensors"
        assert_same(attention_maps(model, coming(), heads=[0], out=path), expected)
        assert [file.name for file in tmp_path.iterdir()] == ["maps.safetensors"]


def test_files_of_chosen_and_pooled_maps(tmp_path: Path) -> None:
    model, batch = built("swin")
    for settings in ({"layers": [2, 0], "heads": [1]}, {"most_lines": 3}):
        expected = attention_maps(model, batch, **settings)
        assert_same(attention_maps(model, batch, out=tmp_path / "maps", **settings), expected)


def test_a_file_is_plain_safetensors_and_is_not_changed_by_its_readers(tmp_path: Path) -> None:
    model, batch = built("vit")
    path = tmp_path / "maps.safetensors"
    (layer,) = attention_maps(model, batch, layers=[1], out=path)
    np.testing.assert_array_equal(load_file(path)["blocks.1.attn/weights_BHQK"], layer.weights_BHQK.numpy())
    before = path.read_bytes()
    layer.weights_BHQK.zero_()
    assert path.read_bytes() == before
    kept = open_maps(path)[0].weights_BHQK
    attention_maps(model, -batch, layers=[1], out=path)  # who has the old file open keeps it
    np.testing.assert_array_equal(kept.numpy().copy(), open_maps_of(before, tmp_path)[0].weights_BHQK.numpy())


def open_maps_of(content: bytes, folder: Path) -> list[LayerMaps]:
    path = folder / "copy.safetensors"
    path.write_bytes(content)
    return open_maps(path)


def test_what_fails_midway_leaves_the_old_file(tmp_path: Path) -> None:
    model, batch = built("vit")
    path = tmp_path / "maps.safetensors"

    def broken() -> Iterator[Tensor]:
        yield batch[:2]
        raise RuntimeError("the network has gone")

    path.write_bytes(b"old")
    with pytest.raises(RuntimeError, match="network"):
        attention_maps(model, broken(), out=path)
    batch[4, 0, 0, 0] = torch.nan
    with pytest.raises(InputError, match="NaN"):
        attention_maps(model, batch, batch_size=2, out=path)
    assert path.read_bytes() == b"old"
    assert [file.name for file in tmp_path.iterdir()] == ["maps.safetensors"]


def in_a_process(code: str, *arguments: object) -> str:
    """What is printed. `given(number, counted)`: so many images of 1,025 tokens, as a tensor or one by one."""
    begin = """
        import os, resource, signal, sys
        import timm, torch
        from nearsight import attention_maps
        torch.set_num_threads(1)
        torch.manual_seed(0)
        model = timm.create_model(
            "vit_tiny_patch16_224", img_size=64, patch_size=2, embed_dim=24, depth=2, num_heads=3, num_classes=0
        )
        def given(number, counted):
            return torch.randn(number, 3, 64, 64) if counted else (torch.randn(1, 3, 64, 64) for _ in range(number))
    """
    command = [sys.executable, "-c", textwrap.dedent(begin) + textwrap.dedent(code), *map(str, arguments)]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout


def test_memory_does_not_grow_with_the_number_of_images(tmp_path: Path) -> None:
    """25 MB per image: 1,025 tokens, 3 heads, 2 layers."""
    code = """
        def peak(number, counted):
            maps = attention_maps(model, given(number, counted), batch_size=1, out=sys.argv[1])
            assert len(maps[1].weights_BHQK) == number and maps[1].weights_BHQK[-1, -1, -1].sum() > 0.5
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        few = max(peak(2, counted) for counted in (True, False))
        for counted in (True, False):
            print(peak(10, counted) - few, os.path.getsize(sys.argv[1]))
    """
    for line in in_a_process(code, tmp_path / "maps.safetensors").splitlines():
        grown, size = map(int, line.split())
        assert size > 10 * 25e6
        assert grown * 1024 < 25e6


def test_a_kill_midway_leaves_no_file(tmp_path: Path) -> None:
    code = """
        class Killing(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.model, self.left = model, 8
            def forward(self, images):
                self.left -= 1
                if not self.left:
                    os.kill(os.getpid(), signal.SIGKILL)
                return self.model(images)
        for counted in (True, False):
            if not os.fork():
                attention_maps(Killing(), given(9, counted), batch_size=1, out=sys.argv[1])
                os._exit(0)
            print(os.WTERMSIG(os.wait()[1]))
    """
    path = tmp_path / "maps.safetensors"
    assert in_a_process(code, path).split() == ["9", "9"]
    assert not path.exists()
    # What the first left has gone with the second's first write.
    assert len(list(tmp_path.glob(".maps.safetensors.*.tmp.safetensors"))) == len(list(tmp_path.iterdir())) == 1


@pytest.fixture(scope="module")
def content(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("maps") / "maps.safetensors"
    attention_maps(*built("vit"), layers=[0], out=path)
    return path.read_bytes()


def changed(change: Callable[[dict[str, Any], dict[str, Any]], object]) -> Callable[[bytes], bytes]:
    """Gives a file another header; `change` gets it, and what it says of the maps."""

    def damage(content: bytes) -> bytes:
        (length,) = struct.unpack("<Q", content[:8])
        header = json.loads(content[8 : 8 + length])
        described = json.loads(header["__metadata__"]["nearsight"])
        change(header, described)
        header["__metadata__"]["nearsight"] = json.dumps(described)
        text = json.dumps(header).encode()
        return struct.pack("<Q", len(text)) + text + content[8 + length :]

    return damage


def layer_with(**changes: Any) -> Callable[[bytes], bytes]:
    return changed(lambda _, described: described["layers"][0].update(changes))


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda _: b"", "is damaged or is not a file of attention maps"),
        (lambda content: content[:-1], "is damaged"),
        (lambda content: content[:100], "is damaged"),
        (lambda content: content[:8] + b"[" * 500 + content[508:], "is damaged"),
        (lambda content: b"\xff" * 8 + content[8:], "is damaged"),
        (changed(lambda _, described: described.update(kind="weights")), "holds no attention maps; attention_maps"),
        (changed(lambda _, described: described.update(format=2)), r"by a newer nearsight \(format 2\); update it"),
        (changed(lambda _, described: described.pop("layers")), "is damaged"),
        (changed(lambda header, _: header.pop("blocks.0.attn/distances_BHQ")), "is damaged"),
        (layer_with(name="blocks.1.attn"), "is damaged"),
        (layer_with(heads=[0]), "is damaged"),
        (layer_with(key_grid=[24]), "does not have two sides"),
        (layer_with(key_grid=[9**9, 9**9]), "is damaged"),
    ],
)
def test_damaged_files_are_named(tmp_path: Path, content: bytes, damage: Callable[[bytes], bytes], said: str) -> None:
    assert len(open_maps_of(content, tmp_path)) == 1
    path = tmp_path / "damaged.safetensors"
    path.write_bytes(damage(content))
    with pytest.raises(InputError, match=said) as refused:
        open_maps(path)
    assert str(path) in str(refused.value)
    assert "\n" not in str(refused.value)


def test_files_that_are_not_there() -> None:
    with pytest.raises(InputError, match=r"nowhere\.safetensors does not exist"):
        open_maps("nowhere.safetensors")


# What is refused


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"layers": [2]}, "layer 2 is not one of the 2 layers: blocks.0.attn, blocks.1.attn"),
        ({"layers": ["blocks.7.attn"]}, "layer 'blocks.7.attn' is not one of the 2 layers"),
        ({"layers": 0}, r"layers is a list of positions and names, not 0; give \[0\]"),
        ({"layers": [0, "blocks.0.attn"]}, "a layer is chosen twice"),
        ({"layers": []}, "layers is empty"),
        ({"heads": [3]}, "head 3 is not one of the 3 heads of blocks.0.attn, which count from 0"),
        ({"heads": ["a"]}, "head 'a' is not one of the 3 heads of blocks.0.attn"),
        ({"heads": 2}, r"heads is a list of positions, not 2; give \[2\]"),
        ({"heads": []}, "no head of blocks.0.attn is chosen"),
        ({"heads": {1: [0, 5]}}, "head 5 is not one of the 3 heads of blocks.1.attn"),
        ({"heads": {4: [0]}}, "layer 4 is not one of the 2 layers"),
        ({"heads": {1: [0]}, "layers": [1]}, "give layers, or heads by layer, not both"),
        ({"dtype": torch.int8}, "dtype is one of torch.float32, .*, not torch.int8"),
        ({"dtype": "float32"}, "dtype is one of torch.float32, .*, not 'float32'"),
        ({"most_lines": 0}, "most_lines is 0"),
        ({"batch_size": 0}, "batch_size is 0"),
    ],
)
def test_what_cannot_be_chosen_is_said_in_a_line(settings: dict[str, Any], said: str, tmp_path: Path) -> None:
    for out in (None, tmp_path / "maps.safetensors"):
        with pytest.raises(InputError, match=said) as refused:
            attention_maps(vit(), images(1, 16, 24), out=out, **settings)
        assert "\n" not in str(refused.value)
    assert not list(tmp_path.iterdir())


def test_an_out_that_cannot_be_written_is_known_before_anything_is_computed(tmp_path: Path) -> None:
    def never() -> Iterator[Tensor]:
        raise AssertionError("nothing is to be computed")
        yield

    (tmp_path / "file").touch()
    with pytest.raises(InputError, match=r"file is a file, but a folder to write to is needed"):
        attention_maps(vit(), never(), out=tmp_path / "file" / "maps.safetensors")
    with pytest.raises(InputError, match=r"is a folder; give the name of a file, such as .*maps\.safetensors"):
        attention_maps(vit(), never(), out=tmp_path)


def test_images_of_several_sizes_are_refused() -> None:
    model = vit(img_size=16, dynamic_img_size=True)
    with pytest.raises(InputError, match="images of one size"):
        attention_maps(model, [images(1, 16, 16), images(1, 24, 24)])


@pytest.mark.parametrize("given", [torch.zeros(3), torch.tensor(1.0), torch.zeros(2, 16, 24)])
def test_what_is_no_images_is_named(given: Tensor) -> None:
    with pytest.raises(InputError, match=r"images of shape \[B, C, H, W\] .* are needed"):
        attention_maps(vit(), given)


def test_no_images_are_refused() -> None:
    with pytest.raises(InputError, match="no images"):
        attention_maps(vit(), images(0, 16, 24))
