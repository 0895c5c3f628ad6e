"""Crop, flip, resized crop and tile shuffle against torchvision or a written-out reference."""

import pytest
import torch
import torchvision.transforms.v2.functional as reference

from nearsight.augment import HorizontalFlip, RandomCrop, ResizedCrop, TileShuffle
from nearsight.augment.geometry import resize_weights
from nearsight.errors import InputError

NO_TARGETS = torch.ones(1, 1, 1)


def position_images(num_cells: int, num: int, height: int, width: int) -> torch.Tensor:
    """Images whose pixels are all different from each other and from black: rows in one channel, columns in another."""
    row = torch.arange(height).view(-1, 1).expand(height, width)
    column = torch.arange(width).expand(height, width)
    image = torch.stack((row + 1, column + 1, torch.full_like(row, 255))).to(torch.uint8)
    return image.expand(num_cells, num, -1, -1, -1)


def test_crop_is_torchvisions_at_the_drawn_place(make_draws, make_images, apply_one):
    num, padding = 300, 4
    images = make_images(num, 20, 24).unsqueeze(0)
    result = apply_one([RandomCrop(padding=padding)], images, NO_TARGETS, make_draws(1, num)).images_KBCHW[0]
    places = set()
    for before, after in zip(images[0], result, strict=True):
        padded = reference.pad(before, [padding])
        matches = [
            (top, left)
            for top in range(2 * padding + 1)
            for left in range(2 * padding + 1)
            if torch.equal(reference.crop(padded, top, left, 20, 24), after)
        ]
        assert matches
        places.add(matches[0])
    assert len(places) > 60


def test_crop_places_are_uniform(make_draws, apply_one, chi_square_p):
    num = 20_000
    images = position_images(2, num, 10, 10)
    settings = [RandomCrop(padding=4), RandomCrop(padding=1, p=0.5)]
    result = apply_one(settings, images, NO_TARGETS, make_draws(2, num)).images_KBCHW.long()
    # The pixel in the middle tells the shift of rows and of columns.
    shift = result[:, :, :2, 5, 5] - 6
    place = ((shift[0, :, 0] + 4) * 9 + shift[0, :, 1] + 4).bincount(minlength=81)
    assert chi_square_p(place, torch.full((81,), num / 81)) > 1e-3
    place = ((shift[1, :, 0] + 1) * 3 + shift[1, :, 1] + 1).bincount(minlength=9)
    expected = torch.full((9,), num / 18)
    expected[4] += num / 2
    assert chi_square_p(place, expected) > 1e-3


def test_flip(make_draws, make_images, apply_one):
    images = make_images(500, 8, 9).unsqueeze(0).expand(3, -1, -1, -1, -1)
    settings = [HorizontalFlip(), HorizontalFlip(p=1.0), None]
    result = apply_one(settings, images, NO_TARGETS, make_draws(3, 500)).images_KBCHW
    assert torch.equal(result[1], reference.horizontal_flip(images[1]))
    assert torch.equal(result[2], images[2])
    textured = (images[0] != images[0].flip(-1)).flatten(1).any(1)
    kept = (result[0] == images[0]).flatten(1).all(1)
    flipped = (result[0] == images[0].flip(-1)).flatten(1).all(1)
    assert (kept | flipped).all()
    assert abs(float(kept[textured].float().mean()) - 0.5) < 0.09


@pytest.mark.parametrize("size", [0, 16, 48])
def test_resized_crop_is_torchvisions(make_draws, make_images, stacked_draws, apply_one, size):
    num, height, width = 120, 32, 40
    images = make_images(num, height, width).unsqueeze(0)
    setting = ResizedCrop(size=size)
    result = apply_one([setting], images, NO_TARGETS, make_draws(1, num)).images_KBCHW[0]
    cells, drawn = stacked_draws([setting], num, height, width)
    crops = torch.stack(ResizedCrop.draw(cells, drawn, height, width), dim=-1)[0].tolist()
    out = [size or height, size or width]
    for image, after, (top, left, rows, columns) in zip(images[0], result, crops, strict=True):
        expected = reference.resized_crop(image, top, left, rows, columns, out, antialias=True)
        assert (after.int() - expected.int()).abs().max() <= 1
    assert len({tuple(crop) for crop in crops}) > 100


def test_resized_crop_ranges(stacked_draws):
    setting = ResizedCrop(min_area=0.3, max_area=0.6, min_ratio=0.5, max_ratio=2.0)
    cells, drawn = stacked_draws([setting], 20_000, 64, 64)
    top, left, rows, columns = ResizedCrop.draw(cells, drawn, 64, 64)
    area = rows * columns / 64**2
    assert ((area > 0.28) & (area < 0.63)).all()
    assert abs(float(area.mean()) - 0.45) < 0.02
    ratio = (columns / rows).log2()
    assert ratio.abs().max() < 1.1
    assert abs(float(ratio.mean())) < 0.02
    assert torch.equal(top + rows, (top + rows).clamp(max=64))
    assert torch.equal(left + columns, (left + columns).clamp(max=64))
    for start, side in ((top, rows), (left, columns)):
        movable = side < 60
        assert abs(float((start / (64 - side))[movable].mean()) - 0.5) < 0.01


@pytest.mark.parametrize(("height", "width", "expected"), [(20, 80, (20, 27)), (80, 20, (27, 20))])
def test_resized_crop_falls_back_to_the_centre(stacked_draws, height, width, expected):
    """Nothing of ¾…4/3 fits at full area, so torchvision takes the largest central crop that has such a shape."""
    cells, drawn = stacked_draws([ResizedCrop(min_area=1.0)], 50, height, width)
    top, left, rows, columns = ResizedCrop.draw(cells, drawn, height, width)
    assert set(zip(rows[0].tolist(), columns[0].tolist(), strict=True)) == {expected}
    assert (top == (height - expected[0]) // 2).all()
    assert (left == (width - expected[1]) // 2).all()


def test_whole_numbers_are_ratios_too(stacked_draws):
    """At full area of 32×48 next to nothing fits but the whole, whose shape of 1.5 must not be cut to 1."""
    cells, drawn = stacked_draws([ResizedCrop(min_area=1, min_ratio=1, max_ratio=2)], 200, 32, 48)
    _, _, rows, columns = ResizedCrop.draw(cells, drawn, 32, 48)
    assert set(zip(rows[0].tolist(), columns[0].tolist(), strict=True)) <= {(32, 48), (32, 47)}


def test_resize_weights_of_the_whole_are_the_unit_matrix():
    weights = resize_weights(torch.zeros(1, 1, dtype=torch.int64), torch.full((1, 1), 224), 224, 224)
    assert torch.equal(weights[0, 0], torch.eye(224))


def test_sizes_must_agree(make_draws, make_images, apply_one):
    images = make_images(8).view(2, 4, 3, 32, 32)
    with pytest.raises(InputError, match=r"resizedcrop.size differs"):
        apply_one([ResizedCrop(size=16), ResizedCrop(size=24)], images, NO_TARGETS, make_draws(2, 4))


def test_tile_shuffle_moves_whole_tiles(make_draws, apply_one):
    num, height, width = 40, 13, 16
    settings = [TileShuffle(tile=4), TileShuffle(tile=2), TileShuffle(tile=8)]
    images = position_images(3, num, height, width)
    result = apply_one(settings, images, NO_TARGETS, make_draws(3, num)).images_KBCHW
    for cell, setting in enumerate(settings):
        tile = setting.tile
        starts = [(r, c) for r in range(0, height - tile + 1, tile) for c in range(0, width - tile + 1, tile)]
        orders = set()
        for before, after in zip(images[cell], result[cell], strict=True):
            places = []
            for row, column in starts:
                moved = after[:, row : row + tile, column : column + tile]
                source = (int(moved[0, 0, 0]) - 1, int(moved[1, 0, 0]) - 1)
                assert torch.equal(moved, before[:, source[0] : source[0] + tile, source[1] : source[1] + tile])
                places.append(source)
            assert sorted(places) == starts
            orders.add(tuple(places))
            rest = height // tile * tile
            assert torch.equal(after[:, rest:], before[:, rest:])
        assert len(orders) > (1 if len(starts) == 2 else 35)


def test_tile_shuffle_is_uniform(make_draws, apply_one, chi_square_p):
    images = position_images(1, 24_000, 4, 4)
    result = apply_one([TileShuffle(tile=2)], images, NO_TARGETS, make_draws(1, 24_000)).images_KBCHW[0].long()
    corner = (result[:, 0, ::2, ::2] // 2 * 2 + result[:, 1, ::2, ::2] // 2).flatten(1)
    _, counts = corner.unique(dim=0, return_counts=True)
    assert len(counts) == 24
    assert chi_square_p(counts, torch.full((24,), 1000.0)) > 1e-3


def test_bad_settings():
    with pytest.raises(InputError, match=r"crop.padding"):
        RandomCrop(padding=-1)
    with pytest.raises(InputError, match=r"0 < min ≤ max ≤ 1"):
        ResizedCrop(min_area=0.9, max_area=0.5)
    with pytest.raises(InputError, match=r"0 < min ≤ max$"):
        ResizedCrop(min_ratio=0.0)
    with pytest.raises(InputError, match=r"tileshuffle.tile"):
        TileShuffle(tile=0)
