"""The figure of learned positions shows the numbers it is given."""

from pathlib import Path

import numpy as np
import torch

from nearsight.lens import PositionGram
from nearsight.report import position_maps, save_figure


def artist(figure, name):
    (found,) = figure.findobj(lambda candidate: candidate.get_gid() == name)
    return found


def positions(rows=3, cols=4):
    drawn = torch.randn(rows * cols, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return PositionGram("pos_embed", (rows, cols), drawn)


def test_matrix_threshold_and_maps_are_those_of_the_positions():
    given = positions()
    figure = position_maps(given, label="a_$b$", threshold=0.2)
    gram, cosine = given.gram.numpy(), given.cosine.numpy()
    np.testing.assert_array_equal(artist(figure, "gram").get_array(), gram)
    shown = artist(figure, "threshold").get_array()
    np.testing.assert_array_equal(shown.mask, gram < 0.2)
    np.testing.assert_array_equal(shown[gram >= 0.2], gram[gram >= 0.2])
    maps = artist(figure, "maps").get_array().filled(np.nan)
    assert maps.shape == (3 * 3 + 2, 4 * 4 + 3)  # a gap of one between maps
    for patch in range(12):
        row, col = divmod(patch, 4)
        tile = maps[row * 4 : row * 4 + 3, col * 5 : col * 5 + 4]
        np.testing.assert_array_equal(tile, cosine[patch].reshape(3, 4))
    assert np.isnan(maps[3]).all()
    assert np.isnan(maps[:, 4]).all()
    for name in ("gram", "threshold", "maps"):
        assert artist(figure, name).get_clim() == (-1.0, 1.0)
    ticks = artist(figure, "gram").axes.get_yticks()
    assert ticks.tolist() == [0, 4, 8]  # where rows of the image begin
    share = float(given.neighbours.fraction)
    assert figure.get_suptitle() == f"a_$b$: {share:.0%} of neighbours are among the most alike (44% by chance)"


def test_a_large_grid_has_maps_of_some_patches():
    given = positions(20, 30)
    figure = position_maps(given, label="model")
    maps = artist(figure, "maps").get_array().filled(np.nan)
    assert maps.shape == (7 * 22 - 2, 10 * 32 - 2)  # every third patch
    third = given.cosine.numpy()[3 * 30 + 6].reshape(20, 30)  # row 3, column 6: the second row's third map
    np.testing.assert_array_equal(maps[22:42, 64:94], third)
    assert artist(figure, "maps").axes.get_title(loc="left") == "cosine similarities of every third patch"
    assert len(artist(figure, "gram").axes.get_xticks()) <= 8


def test_it_is_saved_alike_each_time(tmp_path: Path):
    first, again = (
        [path.read_bytes() for path in save_figure(position_maps(positions(), label="model"), tmp_path, "positions")]
        for _ in range(2)
    )
    assert first == again
