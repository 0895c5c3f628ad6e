"""Attention on the background, against loops over maps that timm's own code computed and over the pixels of masks."""

import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from test_extras import cells, images, maps_of, pyramid, vit
from timm.models.swin_transformer import SwinTransformer
from torch import Tensor

from nearsight.cli import main
from nearsight.commands.pictures import MaskedPictures, PreparedImages, find_pictures
from nearsight.errors import InputError
from nearsight.lens import HeadTable, Shards, measure
from nearsight.study.statistics import mean_interval

NAMES = ("background_cls", "background_patches", "background_area")


def blobs(num: int, size: tuple[int, int]) -> Tensor:
    """Foregrounds with borders inside of patches."""
    rows, cols = torch.meshgrid(*(torch.arange(side) / side for side in size), indexing="ij")
    return torch.stack([(rows - 0.3) ** 2 + (cols - 0.2 - 0.15 * n) ** 2 < 0.05 + 0.02 * n for n in range(num)])


def background_by_loop(mask: Tensor, grid: tuple[int, int]) -> list[float]:
    """Of each cell of a grid, row by row, the part of its pixels that is not foreground."""
    height, width = mask.shape[0] // grid[0], mask.shape[1] // grid[1]
    parts = []
    for row, col in cells(*grid):
        pixels = [bool(mask[row * height + y, col * width + x]) for y in range(height) for x in range(width)]
        parts.append(pixels.count(False) / len(pixels))
    return parts


def shares_by_loop(maps: Tensor, prefix: int, masks: Tensor, grid: tuple[int, int], has_cls: bool) -> np.ndarray:
    """[images, heads, 3], from maps [images, heads, queries, keys] whose first tokens are no patches."""
    found = np.full((*maps.shape[:2], 3), np.nan)
    for image, mask in enumerate(masks):
        background = background_by_loop(mask, grid)
        for head in range(maps.shape[1]):
            rows = maps[image, head].tolist()
            sums = [[0.0, 0.0], [0.0, 0.0]]
            for query, row in enumerate(rows):
                if 0 < query < prefix:
                    continue
                who = 0 if query == 0 and has_cls else 1
                if query < prefix and not has_cls:
                    continue
                for part, weight in zip(background, row[-len(background) :], strict=True):
                    sums[who][0] += part * weight
                    sums[who][1] += weight
            found[image, head] = [there / whole if whole else math.nan for there, whole in sums] + [np.mean(background)]
    return found


def check(table: HeadTable, layer: int, expected: np.ndarray, rtol: float = 1e-12) -> None:
    """Means over the images, and their intervals from single images."""
    heads = expected.shape[1]
    assert table.per_image is not None
    for number, name in enumerate(NAMES):
        np.testing.assert_allclose(table.extra[name][layer, :heads], expected[..., number].mean(0), rtol, err_msg=name)
        kept = mean_interval(table.per_image.further[name][:, layer, 0])
        assert kept.std == pytest.approx(np.std(expected[:, 0, number], ddof=1), rel=1e-4, nan_ok=True)


@pytest.mark.parametrize(
    ("settings", "prefix"),
    [({}, 1), ({"reg_tokens": 2}, 3), ({"class_token": False, "reg_tokens": 1, "global_pool": "avg"}, 1)],
    ids=["cls", "registers", "no cls"],
)
def test_a_vit_in_double_precision(settings: dict[str, object], prefix: int) -> None:
    model, batch, masks = vit(**settings).double(), images(3).double(), blobs(3, (32, 48))
    table = measure(model, batch, masks=masks, what=["background"], precision="float64", batch_size=2)
    for layer, maps in enumerate(maps_of(model, batch)):
        expected = shares_by_loop(maps, prefix, masks, (4, 6), settings.get("class_token", True) is not False)
        check(table, layer, expected)
    assert np.ptp(table.extra["background_patches"]) > 0.01


def test_keys_in_windows_and_pooled_keys() -> None:
    torch.manual_seed(0)
    swin = SwinTransformer(img_size=32, window_size=4, embed_dim=16, depths=(1,), num_heads=(2,), num_classes=3)
    batch, masks = images(2, (32, 32)).double(), blobs(2, (32, 32))
    table = measure(swin.double(), batch, masks=masks, what=["background"], precision="float64")
    (maps,) = maps_of(swin, batch)
    rows, cols = (
        torch.arange(64).view(8, 8).unflatten(0, (2, 4)).unflatten(2, (2, 4)).transpose(1, 2).reshape(4, 16),
    ) * 2
    whole = torch.zeros(2, 2, 64, 64, dtype=torch.float64)
    for window, part in enumerate(maps.unflatten(0, (2, 4)).unbind(1)):
        whole[:, :, rows[window][:, None], cols[window]] = part
    check(table, 0, shares_by_loop(whole, 0, masks, (8, 8), has_cls=False))
    model, batch, masks = pyramid().double(), images(2, (64, 64)).double(), blobs(2, (64, 64))
    table = measure(model, batch, masks=masks, what=["background"], precision="float64")
    for layer, maps in enumerate(maps_of(model, batch)):
        side = math.isqrt(maps.shape[-1])
        check(table, layer, shares_by_loop(maps, 0, masks, (side, side), has_cls=False), rtol=1e-11)


def test_one_that_looks_at_all_patches_alike_gives_the_background_its_area() -> None:
    model, masks = vit(), blobs(2, (32, 48))
    for block in model.blocks:
        block.attn.qkv.weight.data[: 2 * 24] = 0
        block.attn.qkv.bias.data[: 2 * 24] = 0
    table = measure(model, images(2), masks=masks, what=["background"])
    for name in NAMES:
        np.testing.assert_allclose(table.extra[name], (~masks).double().mean().item(), rtol=1e-6)


def test_shards_merge_to_what_all_pictures_give(tmp_path: Path) -> None:
    model, batch, masks = vit().double(), images(5).double(), blobs(5, (32, 48))
    kwargs: dict[str, object] = {"what": ["background"], "precision": "float64", "batch_size": 1}
    whole = measure(model, batch, masks=iter(masks), **kwargs)  # type: ignore[arg-type]
    shards = Shards(folder=tmp_path, record={"model": "m"}, num_images=5, num_shards=2)
    for shard in range(2):
        span = slice(shards.span(shard).start, shards.span(shard).stop)
        shards.keep(shard, measure(model, batch[span], masks=masks[span], **kwargs))  # type: ignore[arg-type]
    merged = shards.merged()
    assert whole.per_image is not None
    assert merged.per_image is not None
    for name in NAMES:
        np.testing.assert_allclose(merged.extra[name], whole.extra[name], rtol=1e-14)
        np.testing.assert_array_equal(merged.per_image.further[name], whole.per_image.further[name])
    chosen = whole.choose([1])
    assert chosen.per_image is not None
    np.testing.assert_array_equal(
        chosen.per_image.further["background_area"], whole.per_image.further["background_area"][:, 1:]
    )


def test_what_does_not_fit_is_refused() -> None:
    model, batch = vit(), images(3)
    masks = blobs(3, (32, 48))
    for wrong, problem in (
        (None, "masks="),
        (masks[:2], "more images than masks"),
        (torch.cat([masks, masks]), "more masks than images"),
        (masks[:, :16], r"of the image's shape \[32, 48\]"),
        (masks.float(), "torch.float32"),
    ):
        with pytest.raises(InputError, match=problem):
            measure(model, batch, masks=wrong, what=["background"])
    table = measure(
        vit(img_size=(36, 48), patch_size=12), images(2, (36, 48)), masks=blobs(2, (36, 48)), what=["background"]
    )
    assert np.isfinite(table.extra["background_patches"]).all()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Six pictures that are white where their masks say 1, in stripes that a crop cuts off."""
    for name in ("images", "masks"):
        (tmp_path / "own" / name).mkdir(parents=True)
    for number in range(6):
        mask = np.zeros((96, 120), dtype=np.uint8)
        mask[16:64, 40 : 56 + 8 * number] = 1
        mask[:, :8] = 255
        Image.fromarray(mask).save(tmp_path / "own" / "masks" / f"{number}.png")
        Image.fromarray(np.repeat(255 * (mask == 1)[..., None], 3, 2).astype(np.uint8)).save(
            tmp_path / "own" / "images" / f"{number}.png"
        )
    return tmp_path / "own"


def test_masks_are_prepared_as_their_pictures_are(folder: Path) -> None:
    pictures = find_pictures(str(folder), 4, None)
    assert isinstance(pictures, MaskedPictures)
    config = {
        "input_size": (3, 48, 48),
        "mean": (0.0,) * 3,
        "std": (1.0,) * 3,
        "crop_pct": 0.9,
        "interpolation": "bicubic",
    }
    prepared = PreparedImages(pictures, config)
    masks = prepared.masks()
    assert masks is not None
    (whole,) = prepared.batches(4)
    found = torch.stack(list(masks))
    assert found.shape == (4, 48, 48)
    assert ((whole[:, 0] > 0.5) == found).double().mean() > 0.97
    assert 0.1 < found.double().mean() < 0.6
    some = pictures.chosen([2, 0])
    assert (
        [path.stem for path in some.masks]
        == [path.stem for path in some.paths]
        == [pictures.paths[place].stem for place in (2, 0)]
    )
    (folder / "classes.json").write_text('{"0": "thing", "1": "background"}')
    turned = find_pictures(str(folder), 4, None)
    assert turned.digest() != pictures.digest()
    others = PreparedImages(turned, config).masks()
    assert others is not None
    assert not (torch.stack(list(others)) & found).any()


def test_on_the_command_line(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["compact_vit", "--what", "background", "--out", str(tmp_path / "out"), "--device", "cpu"]
    assert main(["measure", *arguments, "--images", str(folder)]) == 0
    assert "The background is" in capsys.readouterr().out
    heads = pd.read_csv(tmp_path / "out" / "extra-heads.csv")
    assert set(NAMES) <= set(heads)
    assert heads["num_images"].eq(6).all()
    assert (tmp_path / "out" / "figures" / "background.png").exists()
    assert main(["measure", *arguments, "--images", str(folder / "images")]) == 2
    assert "needs masks" in capsys.readouterr().err
    Image.new("L", (5, 5)).save(folder / "masks" / "0.png")
    assert main(["measure", *arguments, "--images", str(folder)]) == 2
    assert "0.png is 5×5, but its image 0.png is 120×96" in capsys.readouterr().err
