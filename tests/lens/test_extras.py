"""Shares of attention and its distribution over distances, against loops over maps that timm's own code computed."""

import math
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F
from timm.models.swin_transformer import SwinTransformer
from torch import Tensor, nn

from nearsight.errors import InputError
from nearsight.lens import WHAT, HeadTable, distribution, measure

SHARES = ("share_self", "share_neighbours", "share_cls", "share_registers")


@dataclass
class Window:
    """Attention among some tokens; keys are cells of the image, or the word for what they are instead."""

    maps: Tensor
    """[B, heads, queries, keys] float64."""
    queries: list[tuple[float, float] | None]
    keys: list[tuple[float, float] | str]


def maps_of(model: nn.Module, images: Tensor) -> list[Tensor]:
    """Every attention from timm's unfused path, read off the input of its dropout layer."""
    seen: list[Tensor] = []
    hooks = []
    for name, module in model.named_modules():
        if hasattr(module, "fused_attn"):
            module.fused_attn = False
        if name.endswith("attn_drop"):
            hooks.append(module.register_forward_hook(lambda _module, inputs, _output: seen.append(inputs[0].double())))
    with torch.no_grad():
        model.eval()(images)
    for hook in hooks:
        hook.remove()
    return seen


def cells(rows: int, cols: int) -> list[tuple[float, float]]:
    return [(row, col) for row in range(rows) for col in range(cols)]


def sharpened(model: nn.Module) -> nn.Module:
    """With weights so large that heads, images and places differ."""
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if any(part in name for part in ("qkv.weight", "attn.q.weight", "attn.kv.weight", "pos_embed", "reg_token")):
            parameter.data = torch.randn(parameter.shape, generator=generator) * (0.4 if "weight" in name else 1.0)
    return model


def vit(**settings: object) -> nn.Module:
    torch.manual_seed(0)
    settings = {"img_size": (32, 48), "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 3} | settings
    return sharpened(timm.create_model("vit_tiny_patch16_224", num_classes=3, **settings))


def images(num: int, size: tuple[int, int] = (32, 48)) -> Tensor:
    return torch.randn(num, 3, *size, generator=torch.Generator().manual_seed(0))


def shares_by_loop(layer: list[Window], coarse: tuple[float, float] = (1, 1)) -> np.ndarray:
    """[heads, 4]; cells are compared after division by `coarse`, the size of a key's or query's own cell."""
    batch, heads = layer[0].maps.shape[:2]
    out = np.zeros((heads, 4))
    for head in range(heads):
        for image in range(batch):
            rows = []
            for window in layer:
                for i, query in enumerate(window.queries):
                    if query is None:
                        continue
                    row = [0.0, 0.0, 0.0, 0.0]
                    for j, key in enumerate(window.keys):
                        weight = float(window.maps[image, head, i, j])
                        if key == "cls":
                            row[2] += weight
                        elif key == "register":
                            row[3] += weight
                        elif key != "padding":
                            down = abs(query[0] // coarse[0] - key[0] // coarse[0])
                            right = abs(query[1] // coarse[1] - key[1] // coarse[1])
                            if down == right == 0:
                                row[0] += weight
                            elif down <= 1 and right <= 1:
                                row[1] += weight
                    rows.append(row)
            out[head] += np.mean(rows, axis=0) / batch
    return out


def masses_by_loop(layer: list[Window], diagonal: float) -> list[dict[float, float]]:
    """For each head, the share of attention to patches by distance."""
    batch, heads = layer[0].maps.shape[:2]
    out: list[dict[float, float]] = [defaultdict(float) for _ in range(heads)]
    num_queries = sum(query is not None for window in layer for query in window.queries)
    for window in layer:
        for i, query in enumerate(window.queries):
            for image in range(batch if query else 0):
                for head in range(heads):
                    row = window.maps[image, head, i]
                    patches = [j for j, key in enumerate(window.keys) if not isinstance(key, str)]
                    total = float(row[patches].sum())
                    for j in patches:
                        distance = round(math.dist(query, window.keys[j]) / diagonal, 9)
                        out[head][distance] += float(row[j]) / total / num_queries / batch
    return out


def check_table(table: HeadTable, layers: list[list[Window]], coarse: list[tuple[float, float]] | None = None) -> None:
    assert len(table.layer_names) == len(layers)
    for number, layer in enumerate(layers):
        heads = layer[0].maps.shape[1]
        expected = shares_by_loop(layer, coarse[number] if coarse else (1, 1))
        measured = np.stack([table.extra[name][number, :heads] for name in SHARES], axis=-1)
        np.testing.assert_allclose(measured, expected, rtol=1e-5, atol=1e-7)
        rows, cols = table.extra["grid_size"][number] - 1
        values = table.extra["distance_values"][number]
        mass = table.extra["distance_mass"][number]
        for head, by_distance in enumerate(masses_by_loop(layer, math.hypot(rows, cols))):
            for value, share in zip(values, mass[head], strict=True):
                known = min(by_distance, key=lambda distance: abs(distance - value), default=math.inf)
                if abs(known - value) < 1e-6:
                    assert share == pytest.approx(by_distance.pop(known), rel=1e-4, abs=1e-7)
                else:
                    assert np.isnan(value) or share == 0
            assert not by_distance
        np.testing.assert_allclose(np.nansum(mass * values, -1)[:heads], table.mad[number, :heads], rtol=1e-5)


@pytest.mark.parametrize(
    ("settings", "prefix"),
    [
        ({}, ["cls"]),
        ({"reg_tokens": 2}, ["cls", "register", "register"]),
        ({"class_token": False, "reg_tokens": 2, "global_pool": "avg"}, ["register", "register"]),
        ({"class_token": False, "global_pool": "avg"}, []),
    ],
)
def test_prefix_tokens_on_a_grid_that_is_not_square(settings: dict[str, object], prefix: list[str]) -> None:
    model, batch = vit(**settings), images(3)
    table = measure(model, batch, batch_size=2, what=["shares", "quantiles"])
    patches = cells(4, 6)
    layers = [[Window(maps, [None] * len(prefix) + patches, prefix + patches)] for maps in maps_of(model, batch)]
    check_table(table, layers)
    assert (table.extra["share_cls"] == 0).all() == ("cls" not in prefix)


def test_a_distillation_token_is_a_register() -> None:
    torch.manual_seed(0)
    shape = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 1, "num_heads": 3}
    model, batch = timm.create_model("deit_tiny_distilled_patch16_224", num_classes=3, **shape), images(2, (32, 32))
    table = measure(sharpened(model), batch, what=["shares", "quantiles"])
    (maps,) = maps_of(model, batch)
    check_table(table, [[Window(maps, [None, None, *cells(4, 4)], ["cls", "register", *cells(4, 4)])]])


@pytest.mark.parametrize("side", [8, 6])
def test_windows_shifted_and_padded(side: int) -> None:
    """6 × 6 tokens in windows of 4 × 4 are padded to 8 × 8, and the padding is not hidden from the patches."""
    torch.manual_seed(0)
    size = 4 * side
    model = SwinTransformer(img_size=size, window_size=4, embed_dim=16, depths=(2,), num_heads=(2,), num_classes=3)
    model, batch = sharpened(model), images(2, (size, size))
    table = measure(model, batch, what=["shares", "quantiles"])
    layers = []
    for maps, shift in zip(maps_of(model, batch), model.layers[0].blocks, strict=True):
        numbers = torch.arange(side**2).view(side, side).roll([-step for step in shift.shift_size], (0, 1))
        numbers = F.pad(numbers, (0, 8 - side, 0, 8 - side), value=-1)
        windows = numbers.view(2, 4, 2, 4).transpose(1, 2).reshape(4, 16).tolist()
        places = [[None if number < 0 else divmod(number, side) for number in window] for window in windows]
        split = maps.unflatten(0, (2, 4)).unbind(1)
        keys = [["padding" if place is None else place for place in window] for window in places]
        layers.append([Window(*parts) for parts in zip(split, places, keys, strict=True)])
    check_table(table, layers)
    on_padding = sum(
        float(window.maps[..., [key == "padding" for key in window.keys]].sum()) for layer in layers for window in layer
    )
    assert (on_padding > 1) == (side == 6)


POOLED = (4, 2, 2, 1)
"""How many cells a key of each layer is pooled from, in each direction."""


def pyramid() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"depths": (1, 1, 1, 1), "embed_dims": (16, 16, 16, 16), "num_heads": (1, 2, 2, 2)}
    return sharpened(timm.create_model("pvt_v2_b0", num_classes=3, sr_ratios=POOLED, **sizes))


def windows_of_pyramid(model: nn.Module, batch: Tensor) -> list[Window]:
    found = []
    for maps, side, ratio in zip(maps_of(model, batch), (16, 8, 4, 2), POOLED, strict=True):
        middle = (ratio - 1) / 2
        keys = [(ratio * row + middle, ratio * col + middle) for row, col in cells(side // ratio, side // ratio)]
        found.append(Window(maps, cells(side, side), keys))
    return found


def test_pooled_keys_belong_to_the_cells_they_were_pooled_from() -> None:
    model, batch = pyramid(), images(2, (64, 64))
    table = measure(model, batch, what=["shares", "quantiles"])
    layers = [[window] for window in windows_of_pyramid(model, batch)]
    check_table(table, layers, [(ratio, ratio) for ratio in POOLED])


class PooledQueries(nn.Module):
    """Every second query in each direction, as at the transitions of MViT and Hiera."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, 8, 4, 4)
        self.maps: Tensor | None = None

    def forward(self, pixels: Tensor) -> Tensor:
        grid = self.embed(pixels)
        query = F.avg_pool2d(grid, 2).flatten(2).transpose(1, 2)[:, None]
        key = grid.flatten(2).transpose(1, 2)[:, None]
        self.maps = (3 * query @ key.transpose(-2, -1)).softmax(-1)
        return self.maps @ key


def test_a_pooled_query_is_itself_at_all_its_keys() -> None:
    torch.manual_seed(0)
    model, batch = PooledQueries(), images(2, (32, 32))
    table = measure(model, batch, what=["shares", "quantiles"])
    model(batch)
    queries = [(2 * row + 0.5, 2 * col + 0.5) for row, col in cells(4, 4)]
    check_table(table, [[Window(model.maps.detach().double(), queries, cells(8, 8))]], [(2, 2)])


def test_quantiles_are_those_of_all_attention_as_one_distribution() -> None:
    model, batch = vit(reg_tokens=1), images(4)
    table = measure(model, batch, what=["quantiles"])
    levels = (0.1, 0.25, 0.5, 0.75, 0.9)
    quantiles = table.distance_quantiles()
    for layer, maps in enumerate(maps_of(model, batch)):
        window = Window(maps, [None, None, *cells(4, 6)], ["cls", "register", *cells(4, 6)])
        for head, masses in enumerate(masses_by_loop([window], math.hypot(3, 5))):
            for level, measured in zip(levels, quantiles[layer, head], strict=True):
                reached, expected = 0.0, -1.0
                for distance in sorted(masses):
                    if reached < level:
                        expected = distance
                    reached += masses[distance]
                assert measured == pytest.approx(expected, abs=1e-6)
    assert (np.diff(quantiles, axis=-1) >= 0).all()
    np.testing.assert_array_equal(table.distance_quantiles([1.0])[..., 0], 1.0)
    np.testing.assert_array_equal(table.distance_quantiles([0.0])[..., 0], 0.0)
    with pytest.raises(InputError, match=r"levels in \[0, 1\]"):
        table.distance_quantiles([1.5])
    with pytest.raises(InputError, match="measure with what"):
        measure(model, batch[:1]).distance_quantiles()


def test_many_distances_fall_into_bins_of_equal_width(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = vit(), images(2)
    exact = measure(model, batch, what=["quantiles"])
    monkeypatch.setattr(distribution, "MOST_DISTANCES", 10)
    binned = measure(model, batch, what=["quantiles"])
    np.testing.assert_allclose(binned.extra["distance_values"], np.tile(np.arange(0.05, 1, 0.1), (2, 1)))
    for layer in range(2):
        for head in range(3):
            values, mass = exact.extra["distance_values"][layer], exact.extra["distance_mass"][layer, head]
            expected = np.histogram(values, np.linspace(0, 1, 11), weights=mass)[0]
            np.testing.assert_allclose(binned.extra["distance_mass"][layer, head], expected, atol=1e-6)
    assert (abs(binned.distance_quantiles() - exact.distance_quantiles()) <= 0.05 + 1e-9).all()


def test_batches_and_merged_tables_give_what_all_images_give() -> None:
    model, batch = vit(reg_tokens=1), images(7)
    everything = [name for name in WHAT if name not in ("cka", "rollout", "positions", "gaussians", "background")]
    whole = measure(model, batch, what=everything)
    parts = HeadTable.merge([measure(model, part, what=everything) for part in (batch[:2], batch[2:])])
    for other in (
        parts,
        measure(model, batch, batch_size=3, what=everything),
        measure(model, batch, what=everything[::-1]),
    ):
        assert other.extra.keys() == whole.extra.keys()
        for name, values in whole.extra.items():
            np.testing.assert_allclose(other.extra[name], values, rtol=1e-5, atol=1e-7, err_msg=name)
    alone = measure(model, batch)
    np.testing.assert_array_equal(alone.mad, whole.mad)
    np.testing.assert_array_equal(alone.entropy, whole.entropy)
    assert set(alone.extra) == {"grid_size", "cell_size"}
    chosen = measure(model, batch, what=everything, layers=[-1])
    for name, values in whole.extra.items():
        np.testing.assert_array_equal(chosen.extra[name], values[1:], err_msg=name)


def test_in_double_precision_they_are_exact() -> None:
    model, batch = vit().double(), images(2).double()
    table = measure(model, batch, precision="float64", what=["shares", "quantiles"])
    for layer, maps in enumerate(maps_of(model, batch)):
        expected = shares_by_loop([Window(maps, [None, *cells(4, 6)], ["cls", *cells(4, 6)])])
        measured = np.stack([table.extra[name][layer] for name in SHARES], axis=-1)
        np.testing.assert_allclose(measured, expected, rtol=1e-12)
    mean = (table.extra["distance_mass"] * table.extra["distance_values"][:, None]).sum(-1)
    np.testing.assert_allclose(mean, table.mad, rtol=1e-8)


def test_distributions_of_images_of_two_sizes_are_not_mixed() -> None:
    model = vit(dynamic_img_size=True)
    sizes = [images(1), images(1, (32, 32))]
    assert measure(model, sizes, what=["shares"]).num_images == 2
    with pytest.raises(InputError, match="images of one size"):
        measure(model, sizes, what=["quantiles"])


def test_names_are_checked() -> None:
    model = vit()
    with pytest.raises(InputError, match="did you mean 'shares'"):
        measure(model, images(1), what=["share"])
    with pytest.raises(InputError, match="layer_similarity"):
        measure(model, images(1), what=["cka"])
    with pytest.raises(InputError, match=r"give \['shares'\]"):
        measure(model, images(1), what="shares")


def steps_by_loop(layer: list[Window], grid: tuple[int, int]) -> np.ndarray:
    """[heads, 2·rows − 1, 2·cols − 1]: the mean attention of all pairs of patches that are so far apart."""
    batch, heads = layer[0].maps.shape[:2]
    paid = np.zeros((batch, heads, 2 * grid[0] - 1, 2 * grid[1] - 1))
    pairs = np.zeros_like(paid)
    for window in layer:
        patches = [j for j, key in enumerate(window.keys) if not isinstance(key, str)]
        for i, query in enumerate(window.queries):
            for j in patches if query else []:
                # To the nearest whole step; from the middle between two to the upper or left one.
                down, right = (math.ceil(window.keys[j][axis] - query[axis] - 0.5) for axis in (0, 1))
                place = (slice(None), slice(None), down + grid[0] - 1, right + grid[1] - 1)
                total = window.maps[:, :, i, patches].sum(-1)
                paid[place] += (window.maps[:, :, i, j] / total).numpy()
                pairs[place] += 1
    with np.errstate(invalid="ignore"):
        return (paid / pairs).mean(0)


@pytest.mark.parametrize("settings", [{}, {"reg_tokens": 2}, {"class_token": False, "global_pool": "avg"}])
def test_attention_by_steps(settings: dict[str, object]) -> None:
    model, batch = vit(**settings), images(3)
    table = measure(model, batch, batch_size=2, precision="float64", what=["offsets", "quantiles"])
    prefix = model.num_prefix_tokens
    for layer, maps in enumerate(maps_of(model, batch)):
        window = Window(maps, [None] * prefix + cells(4, 6), ["cls"] * prefix + cells(4, 6))
        expected = steps_by_loop([window], (4, 6))
        found = table.offset_maps(layer)
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-9)
        # What a patch pays to itself is what it pays at distance 0; all that is paid sums to 1.
        np.testing.assert_allclose(found[:, 3, 5], table.extra["distance_mass"][layer, :, 0], rtol=1e-6)
        rows, cols = (size - np.abs(np.arange(1 - size, size)) for size in (4, 6))
        np.testing.assert_allclose((found * np.outer(rows, cols)).sum((1, 2)) / 24, 1.0, rtol=1e-6)


def test_a_weight_too_small_to_tell_is_a_pair_all_the_same() -> None:
    model, batch = vit(), images(2)
    for block in model.blocks:
        block.attn.qkv.weight.data *= 6
        block.attn.fused_attn = False  # so that weights, and not their logarithms, are seen
    layers = maps_of(model, batch)
    assert all(float((maps == 0).double().mean()) > 0.05 for maps in layers)
    table = measure(model, batch, precision="float64", what=["offsets"])
    for layer, maps in enumerate(layers):
        expected = steps_by_loop([Window(maps, [None, *cells(4, 6)], ["cls", *cells(4, 6)])], (4, 6))
        assert np.isfinite(expected).all()
        np.testing.assert_allclose(table.offset_maps(layer), expected, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("sharpen", [True, False])  # flat attention leaves some of it where the mask is
def test_what_a_shifted_window_hides_is_no_step(sharpen: bool) -> None:
    torch.manual_seed(0)
    model = SwinTransformer(
        img_size=32, patch_size=2, window_size=4, embed_dim=12, depths=(2,), num_heads=(2,), num_classes=3
    )
    if sharpen:
        sharpened(model)
    batch = images(3, (32, 32))
    whole = measure(model, batch, what=["offsets"])
    parts = measure(model, batch, what=["offsets"], batch_size=2)
    np.testing.assert_allclose(parts.offset_maps(1), whole.offset_maps(1), rtol=1e-5)
    there = ~np.isnan(whole.offset_maps(1)[0])
    assert there[15 - 3 : 15 + 4, 15 - 3 : 15 + 4].all()
    assert there.sum() == 7 * 7  # and not the other side of the image, to which its windows are rolled


def test_steps_of_windows_and_of_pooled_keys() -> None:
    torch.manual_seed(0)
    model = sharpened(
        SwinTransformer(
            img_size=(16, 32), patch_size=4, window_size=4, embed_dim=12, depths=(1,), num_heads=(2,), num_classes=3
        )
    )
    batch = images(2, (16, 32))
    (maps,) = maps_of(model, batch)  # [images × windows, heads, 16, 16]
    by_window = maps.unflatten(0, (2, 2))
    layer = [
        Window(by_window[:, index], left, left)
        for index, left in enumerate([(row, col + 4 * index) for row, col in cells(4, 4)] for index in range(2))
    ]
    table = measure(model, batch, precision="float64", what=["offsets"])
    found = table.offset_maps(0)
    np.testing.assert_allclose(found, steps_by_loop(layer, (4, 8)), rtol=1e-5, atol=1e-9)
    assert np.isnan(found[:, :, :4]).all()  # no window is so wide

    pooled, batch = pyramid(), images(2, (64, 64))
    table = measure(pooled, batch, precision="float64", what=["offsets"])
    for layer, (window, side) in enumerate(zip(windows_of_pyramid(pooled, batch), (16, 8, 4, 2), strict=True)):
        found = table.offset_maps(layer)[: window.maps.shape[1]]
        np.testing.assert_allclose(found, steps_by_loop([window], (side, side)), rtol=1e-4, atol=1e-7)


def test_steps_of_parts_are_those_of_the_whole_and_sizes_are_not_mixed(tmp_path: Path) -> None:
    model, batch = vit(dynamic_img_size=True), images(5)
    whole = measure(model, batch, what=["offsets"])
    parts = HeadTable.merge(measure(model, part, what=["offsets"]) for part in batch.split([2, 3]))
    np.testing.assert_allclose(parts.offset_maps(1), whole.offset_maps(1), rtol=1e-6)
    whole.save(tmp_path / "heads.npz")
    np.testing.assert_array_equal(HeadTable.load(tmp_path / "heads.npz").offset_maps(0), whole.offset_maps(0))
    np.testing.assert_array_equal(whole.choose([1]).offset_maps(0), whole.offset_maps(1))
    with pytest.raises(InputError, match="attention by steps can be merged for images of one size only"):
        measure(model, [batch, images(1, (48, 32))], what=["offsets"])
    with pytest.raises(InputError, match=r"measure with what=\['offsets'\]"):
        measure(model, batch[:1]).offset_maps(0)
