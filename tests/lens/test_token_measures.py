"""Norms of tokens, attention received and similarity near and far, against loops over what timm's own code computed."""

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import timm
import torch
from test_extras import Window, cells, images, maps_of, pyramid, vit, windows_of_pyramid
from test_features import cosine, outputs_of
from timm.models.swin_transformer import SwinTransformer
from torch import Tensor, nn

from nearsight.cli import main
from nearsight.errors import InputError
from nearsight.lens import HeadTable, measure

TOKENS = ["norms", "sinks", "lds"]
SINKS = ("share_cls", "share_registers", "share_outliers", "share_sinks", "max_received", "gini_received")
SINKS += ("mad_without_sinks", "entropy_without_sinks", "cls_from_centre", "cls_spread")


def outliers_by_loop(norms: list[float]) -> list[bool]:
    quarter, median, three = np.quantile(norms, [0.25, 0.5, 0.75])
    return [norm > three + 3 * (three - quarter) and norm > 2 * median for norm in norms]


def inputs_of(model: nn.Module, names: list[str], batch: Tensor) -> list[Tensor]:
    seen: list[Tensor] = []
    modules = dict(model.named_modules())
    hooks = [modules[name].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0])) for name in names]
    with torch.no_grad():
        model.eval()(batch)
    for hook in hooks:
        hook.remove()
    return [tokens.double() for tokens in seen]


def sinks_by_loop(
    layer: list[Window], grid: tuple[int, int], outliers: list[set[int]] | None, side: float = math.inf
) -> np.ndarray:
    """[heads, 10]; `outliers`: for each image, the numbers of patches; `side` of windows, beyond which a mask hides."""
    batch, heads = layer[0].maps.shape[:2]
    diagonal = math.hypot(grid[0] - 1, grid[1] - 1)
    out = np.zeros((heads, len(SINKS)))
    for head in range(heads):
        for image in range(batch):
            received: dict[object, float] = {}
            queries, cls_row = 0, None
            for window in layer:
                for key in window.keys:
                    if key != "padding":
                        received.setdefault(key, 0.0)
                for i, query in enumerate(window.queries):
                    row = window.maps[image, head, i].tolist()
                    if query is None:
                        if window.keys[i] == "cls":
                            cls_row = {key: row[j] for j, key in enumerate(window.keys) if not isinstance(key, str)}
                        continue
                    queries += 1
                    for j, key in enumerate(window.keys):
                        if key != "padding":
                            received[key] += row[j]
            patches = {key: value / queries for key, value in received.items() if not isinstance(key, str)}
            mean = sum(patches.values()) / len(patches)
            sinks = {key for key, value in patches.items() if value > 10 * mean}
            distances, entropies = [], []
            for window in layer:
                for i, query in enumerate(window.queries):
                    if query is None:
                        continue
                    left = [j for j, key in enumerate(window.keys) if not isinstance(key, str) and key not in sinks]
                    seen = [j for j in left if max(abs(query[axis] - window.keys[j][axis]) for axis in (0, 1)) < side]
                    weights = [float(window.maps[image, head, i, j]) for j in seen]
                    share = [weight / sum(weights) for weight in weights]
                    pairs = zip(share, seen, strict=True)
                    distances.append(sum(part * math.dist(query, window.keys[j]) for part, j in pairs) / diagonal)
                    entropy = -sum(part * math.log(part) for part in share if part)
                    entropies.append(entropy / math.log(len(seen)) if len(seen) > 1 else 0.0)
            ordered = [patches[key] for key in sorted(patches)]
            pairs_apart = sum(abs(one - other) for one in ordered for other in ordered)
            from_centre = spread = math.nan
            if cls_row is not None:
                total = sum(cls_row.values())
                share_of = {key: weight / total for key, weight in cls_row.items()}
                centre = ((grid[0] - 1) / 2, (grid[1] - 1) / 2)
                from_centre = sum(part * math.dist(key, centre) for key, part in share_of.items()) / diagonal
                own = tuple(sum(part * key[axis] for key, part in share_of.items()) for axis in (0, 1))
                squares = sum(part * math.dist(key, own) ** 2 for key, part in share_of.items())
                spread = math.sqrt(squares) / diagonal
            out[head] += (
                np.array(
                    [
                        received.get("cls", 0.0) / queries,
                        received.get("register", 0.0) / queries,
                        math.nan if outliers is None else sum(ordered[number] for number in outliers[image]),
                        sum(patches[key] for key in sinks),
                        max(ordered),
                        pairs_apart / len(ordered) / 2 / sum(ordered),
                        np.mean(distances),
                        np.mean(entropies),
                        from_centre,
                        spread,
                    ]
                )
                / batch
            )
    return out


def check_sinks(table: HeadTable, layer: int, expected: np.ndarray, rtol: float) -> None:
    for number, name in enumerate(SINKS):
        found = table.extra[name][layer, : len(expected)]
        np.testing.assert_allclose(found, expected[:, number], rtol=rtol, atol=rtol / 100, err_msg=name)


def with_sinks(model: nn.Module, strength: float = 3.0) -> nn.Module:
    """One patch is loud, so that its norm is an outlier; many keys attract attention from everywhere."""
    model.pos_embed.data[:, -3] = 8 * model.pos_embed.data[:, -4]
    for block in model.blocks:
        block.attn.qkv.weight.data *= strength
    return model


@pytest.mark.parametrize(
    ("settings", "prefix"),
    [
        ({}, ["cls"]),
        ({"reg_tokens": 2}, ["cls", "register", "register"]),
        ({"class_token": False, "reg_tokens": 2, "global_pool": "avg"}, ["register", "register"]),
        ({"class_token": False, "global_pool": "avg"}, []),
    ],
)
def test_a_vit_in_double_precision(settings: dict[str, object], prefix: list[str]) -> None:
    model, batch = with_sinks(vit(img_size=(48, 64), **settings)).double(), images(3, (48, 64)).double()
    table = measure(model, batch, batch_size=2, precision="float64", what=TOKENS)
    names, grid, patches = ["blocks.0", "blocks.1"], (6, 8), cells(6, 8)
    all_inputs, all_outputs, maps = (
        inputs_of(model, names, batch),
        outputs_of(model, names, batch),
        maps_of(model, batch),
    )
    for layer in range(2):
        norms = all_inputs[layer].norm(dim=-1)[:, len(prefix) :]
        outliers = [set(np.nonzero(outliers_by_loop(row))[0].tolist()) for row in norms.tolist()]
        assert layer or all(outliers)
        window = Window(maps[layer], [None] * len(prefix) + patches, prefix + patches)
        expected = sinks_by_loop([window], grid, outliers)
        check_sinks(table, layer, expected, 1e-12)
        check_norms(table, layer, all_outputs[layer], prefix, grid)
        check_lds(table, layer, all_outputs[layer][:, len(prefix) :].unflatten(1, grid))
    assert (table.extra["share_sinks"] > 0).any()
    assert (table.extra["mad_without_sinks"] != table.mad).any()


def check_norms(table: HeadTable, layer: int, tokens_BNC: Tensor, prefix: list[str], grid: tuple[int, int]) -> None:
    norms = [[math.sqrt(sum(value**2 for value in token)) for token in image] for image in tokens_BNC.tolist()]
    patches = np.array(norms)[:, len(prefix) :]
    often = np.mean([outliers_by_loop(row) for row in patches.tolist()], axis=0).reshape(grid)
    by_kind = {
        kind: [image[at] for image in norms for at, name in enumerate(prefix) if name == kind]
        for kind in ("cls", "register")
    }
    expected = {
        "norm_patches": patches.mean(),
        "norm_median": np.median(patches, axis=1).mean(),
        "norm_cls": np.mean(by_kind["cls"]) if by_kind["cls"] else math.nan,
        "norm_registers": np.mean(by_kind["register"]) if by_kind["register"] else math.nan,
        "outlier_share": often.mean(),
    }
    for name, value in expected.items():
        np.testing.assert_allclose(table.extra[name][layer], value, rtol=1e-12, err_msg=name)
    np.testing.assert_array_equal(table.extra["outlier_map"][layer][: grid[0], : grid[1]], often)


def check_lds(table: HeadTable, layer: int, grid_BHWC: Tensor, atol: float = 1e-12) -> None:
    near, far = [], []
    for image in grid_BHWC:
        places = [(row, col) for row in range(image.shape[0]) for col in range(image.shape[1])]
        for number, one in enumerate(places):
            for other in places[number + 1 :]:
                steps = abs(one[0] - other[0]) + abs(one[1] - other[1])
                if steps == 1 or steps >= 6:
                    (near if steps == 1 else far).append(cosine(image[one], image[other]))
    assert table.extra["similarity_near"][layer] == pytest.approx(np.mean(near), abs=atol)
    if not far:
        assert np.isnan(table.extra["lds"][layer])
        return
    assert table.extra["similarity_far"][layer] == pytest.approx(np.mean(far), abs=atol)
    assert table.extra["lds"][layer] == pytest.approx(np.mean(near) - np.mean(far), abs=atol)


def test_fused_attention_in_single_precision_is_close_and_half_precision_near() -> None:
    model, batch = with_sinks(vit(img_size=64, reg_tokens=1), 3.0), images(2, (64, 64))
    exact = measure(model.double(), batch.double(), precision="float64", what=TOKENS)
    found = measure(model.float(), batch, what=TOKENS)
    for name in (*SINKS, "norm_patches", "norm_median", "norm_cls", "norm_registers", "outlier_share", "lds"):
        np.testing.assert_allclose(found.extra[name], exact.extra[name], rtol=1e-4, atol=1e-6, err_msg=name)
    half = measure(model.bfloat16(), batch.bfloat16(), what=["norms", "lds"])
    np.testing.assert_allclose(half.extra["norm_patches"], exact.extra["norm_patches"], rtol=0.02)
    np.testing.assert_allclose(half.extra["lds"], exact.extra["lds"], atol=0.02)


def test_windows_shifted() -> None:
    torch.manual_seed(0)
    model = SwinTransformer(img_size=32, window_size=4, embed_dim=16, depths=(2,), num_heads=(2,), num_classes=3)
    generator = torch.Generator().manual_seed(1)
    for block in model.layers[0].blocks:
        block.attn.qkv.weight.data = torch.randn(block.attn.qkv.weight.shape, generator=generator) * 1.5
    # In each window one patch differs from all others, which are the same: some heads attend to it from everywhere.
    pixels = torch.zeros(2, 3, 32, 32)
    pixels.unflatten(2, (2, 16)).unflatten(4, (2, 16))[:, :, :, 4:8, :, 4:8] = images(2, (4, 4))[:, :, None, :, None]
    model, batch = model.double(), pixels.double()
    table = measure(model, batch, precision="float64", what=TOKENS)
    names = ["layers.0.blocks.0", "layers.0.blocks.1"]
    ins, outs, found = inputs_of(model, names, batch), outputs_of(model, names, batch), maps_of(model, batch)
    for layer, (maps, block) in enumerate(zip(found, model.layers[0].blocks, strict=True)):
        numbers = torch.arange(64).view(8, 8).roll([-step for step in block.shift_size], (0, 1))
        windows = numbers.view(2, 4, 2, 4).transpose(1, 2).reshape(4, 16).tolist()
        places = [[divmod(number, 8) for number in window] for window in windows]
        split = maps.unflatten(0, (2, 4)).unbind(1)
        norms = ins[layer].norm(dim=-1).flatten(1)
        outliers = [set(np.nonzero(outliers_by_loop(row))[0].tolist()) for row in norms.tolist()]
        windows = [Window(*parts) for parts in zip(split, places, places, strict=True)]
        expected = sinks_by_loop(windows, (8, 8), outliers, 4)
        assert layer or (expected[:, SINKS.index("share_sinks")] > 0).any()
        check_sinks(table, layer, expected, 1e-11)
        check_norms(table, layer, outs[layer].flatten(1, 2), [], (8, 8))
        check_lds(table, layer, outs[layer])


def test_pooled_keys_receive_and_are_no_outliers() -> None:
    model, batch = pyramid().double(), images(2, (64, 64)).double()
    table = measure(model, batch, precision="float64", what=["sinks"])
    for layer, (window, side) in enumerate(zip(windows_of_pyramid(model, batch), (16, 8, 4, 2), strict=True)):
        expected = sinks_by_loop([window], (side, side), None)
        if layer == 3:  # its keys are not pooled, and its input is a grid of patches
            assert (table.extra["share_outliers"][layer, : len(expected)] == 0).all()
            expected[:, SINKS.index("share_outliers")] = 0
        check_sinks(table, layer, expected, 1e-11)


def test_what_is_not_known_is_nan() -> None:
    table = measure(vit(img_size=16, class_token=False, global_pool="avg"), images(2, (16, 16)), what=TOKENS)
    for name in ("norm_cls", "norm_registers", "lds", "similarity_far", "cls_from_centre", "cls_spread"):
        assert np.isnan(table.extra[name]).all(), name
    np.testing.assert_array_equal(table.extra["mad_without_sinks"], table.mad)  # among 4 patches there are no sinks
    assert (table.extra["share_cls"] == 0).all()


def test_places_of_outliers_are_of_images_of_one_size() -> None:
    model = vit(dynamic_img_size=True)
    sizes = [images(1), images(1, (32, 32))]
    assert measure(model, sizes, what=["sinks", "lds"]).num_images == 2
    with pytest.raises(InputError, match="places of outliers"):
        measure(model, sizes, what=["norms"])


@pytest.mark.parametrize("name", TOKENS)
def test_each_has_its_columns_figure_sentence_and_section(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["measure", "compact_vit", "--what", name, "--num-images", "3", "--out", str(tmp_path)]) == 0
    said: dict[str, Callable[[str], bool]] = {
        "norms": lambda text: "outliers by their norm" in text,
        "sinks": lambda text: "0 of 64 heads give more than 10% of their attention to sinks" in text,
        "lds": lambda text: "Near patches are more similar than far ones by" in text,
    }
    assert said[name](" ".join(capsys.readouterr().out.split()))
    rows = pd.read_csv(tmp_path / ("extra-heads.csv" if name == "sinks" else "extra-layers.csv"))
    columns = {"norms": ["norm_median", "outlier_share"], "sinks": list(SINKS), "lds": ["lds", "similarity_far"]}
    assert set(columns[name]) <= set(rows.columns)
    assert (tmp_path / "figures" / f"{name}.png").stat().st_size > 1000
    assert f'id="what-{name}"' in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_timm_register_models_have_registers() -> None:
    torch.manual_seed(0)
    shape = {"img_size": 56, "embed_dim": 24, "depth": 1, "num_heads": 2, "num_classes": 0}
    model = timm.create_model("vit_small_patch14_reg4_dinov2", **shape)
    table = measure(model, images(2, (56, 56)), what=["norms", "sinks"])
    assert np.isfinite(table.extra["norm_registers"]).all()
    assert (table.extra["share_registers"] > table.extra["share_cls"]).all()
