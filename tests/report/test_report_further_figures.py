"""Figures of the further measurements, of learned positions and of segmentations show what they are given."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure

from nearsight.errors import InputError
from nearsight.lens import HeadTable, LayerSimilarity, PositionGram
from nearsight.metrics import KindShares, Moments
from nearsight.report.figures.heat import similarity_heatmap
from nearsight.report.figures.kinds import COLOURS, WORDS, kind_strips
from nearsight.report.figures.patches import CONTRAST, RADIUS, offset_pictures, position_maps
from nearsight.report.figures.pictures import class_colours, rollout_overlays, segmentation_pictures
from nearsight.report.figures.style import save_figure


def artist(figure, name):
    (found,) = figure.findobj(lambda candidate: candidate.get_gid() == name)
    return found


def similarity(rows=3, cols=5):
    matrix = np.random.default_rng(0).uniform(-0.1, 1, (rows, cols))
    matrix[1, 2] = np.nan
    return LayerSimilarity(tuple(f"blocks.{i}" for i in range(rows)), tuple(f"layers.{i}" for i in range(cols)), matrix)


def test_the_heatmap_shows_the_matrix_on_a_fixed_scale():
    figure = similarity_heatmap(similarity(), label="a_$b$", other_label="c")
    image = artist(figure, "cka")
    np.testing.assert_array_equal(image.get_array().filled(np.nan), similarity().matrix)
    assert image.get_clim() == (0.0, 1.0)
    assert image.get_cmap().name == "viridis"
    axes = image.axes
    assert (axes.get_ylabel(), axes.get_xlabel()) == ("layer (from 0) of a_$b$", "layer (from 0) of c")
    assert [text.get_text() for text in axes.get_xticklabels()] == ["0", "1", "2", "3", "4"]
    assert axes.get_ylim() == (-0.5, 2.5)  # the first layer at the bottom


def test_one_model_is_named_once_and_many_layers_have_few_ticks():
    axes = artist(similarity_heatmap(similarity(48, 48), label="model"), "cka").axes
    assert axes.get_title(loc="left") == "model"
    assert axes.get_xlabel() == "layer (from 0)"
    assert len(axes.get_yticks()) == 16


def pictures(num):
    return list(np.random.default_rng(0).integers(0, 256, (num, 12, 20, 3), dtype=np.uint8))


def test_each_map_lies_over_its_picture():
    maps = np.random.default_rng(1).uniform(size=(5, 3, 5))
    figure = rollout_overlays(pictures(5), maps, label="model")
    for index in range(5):
        overlay = artist(figure, f"rollout{index}")
        np.testing.assert_allclose(overlay.get_array(), maps[index] / maps[index].max())
        assert tuple(overlay.get_extent()) == (-0.5, 19.5, 11.5, -0.5)
        np.testing.assert_allclose(artist(figure, f"picture{index}").get_array(), pictures(5)[index] / 255)
        assert overlay.axes is not artist(figure, f"picture{index}").axes


def test_pictures_and_maps_must_fit():
    with pytest.raises(InputError, match="for each picture"):
        rollout_overlays(pictures(2), np.ones((3, 2, 2)), label="model")
    with pytest.raises(InputError, match="for each picture"):
        rollout_overlays([], np.ones((0, 2, 2)), label="model")
    with pytest.raises(InputError, match=r"\[H, W, 3\]"):
        rollout_overlays([np.ones((3, 8, 8))], np.ones((1, 2, 2)), label="model")


def test_both_are_saved_alike_each_time(tmp_path: Path):
    for name, draw in {
        "cka": lambda: similarity_heatmap(similarity(), label="model"),
        "rollout": lambda: rollout_overlays(pictures(2), np.zeros((2, 2, 2)), label="model"),
    }.items():
        first = [path.read_bytes() for path in save_figure(draw(), tmp_path, name)]
        again = [path.read_bytes() for path in save_figure(draw(), tmp_path, name)]
        assert first == again
        assert first[0].startswith(b"\x89PNG")


def table_of_steps():
    """A layer of 20 × 3 patches with two heads, and one of 4 × 4 with a single one of uniform attention."""
    numbers = np.random.default_rng(2)
    maps = np.full((2, 2, 39, 7), np.nan)
    maps[0, :, :, :5] = numbers.uniform(0, 0.1, (2, 39, 5))
    maps[0, 0, 19, 2] = 0.9
    maps[1, 0, :7, :7] = 1 / 16
    mad = np.array([[0.1, 0.2], [0.3, np.nan]])
    moments = Moments(1, mad, np.zeros_like(mad))
    extra = {"offset_attention": maps, "grid_size": np.array([[20.0, 3.0], [4.0, 4.0]])}
    return HeadTable(("a", "b"), moments, moments, {}, extra)


def test_every_head_is_a_picture_of_where_it_looks():
    table = table_of_steps()
    figure = offset_pictures(table, label="a_$b$", layers=[4, 7])
    first, flat = artist(figure, "L4-0"), artist(figure, "L7-0")
    np.testing.assert_array_equal(first.get_array(), table.offset_maps(0)[0, 19 - RADIUS : 20 + RADIUS])
    assert first.get_array().shape == (2 * RADIUS + 1, 5)
    assert first.get_clim() == (0.0, 0.9)
    np.testing.assert_array_equal(flat.get_array(), np.full((7, 7), 1 / 16))
    assert flat.get_clim() == (0.0, CONTRAST / 16)
    darkest, brightest = (sum(first.get_cmap()(end)[:3]) for end in (0.0, 1.0))
    assert darkest < brightest  # bright is more, as in every other map
    assert not figure.findobj(lambda candidate: candidate.get_gid() == "L7-1")
    assert [panel.get_visible() for panel in figure.axes] == [True, True, True, False]
    assert first.axes.get_title(loc="left") == f"{0.1 * np.hypot(19, 2):.1f}"
    assert (first.axes.get_ylabel(), flat.axes.get_ylabel()) == ("L4", "L7")
    (frame,) = first.axes.patches  # around the middle of the picture
    assert (*frame.get_xy(), frame.get_width()) == (1.5, RADIUS - 0.5, 1)
    assert figure.get_suptitle().startswith("a_$b$: ")


def test_pictures_of_steps_need_steps():
    table = table_of_steps()
    table.extra.pop("offset_attention")
    with pytest.raises(InputError, match="offsets"):
        offset_pictures(table, label="model")


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
    assert figure.get_suptitle() == f"a_$b$: {share:.0%} of neighbours are among the most similar (44% by chance)"


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


def drawn(figure: Figure, gid: str) -> np.ndarray:
    (image,) = [image for panel in figure.axes for image in panel.images if image.get_gid() == gid]
    return np.asarray(image.get_array())


def test_colours_are_those_of_voc_and_all_differ() -> None:
    colours = class_colours(171)
    published = {0: (0, 0, 0), 1: (128, 0, 0), 8: (64, 0, 0), 15: (192, 128, 128), 20: (0, 64, 128)}
    assert {label: tuple(colours[label].tolist()) for label in published} == published
    assert len({tuple(colour) for colour in colours.tolist()}) == 171


def test_image_truth_and_prediction_stand_side_by_side() -> None:
    generator = np.random.default_rng(0)
    names = [f"$name_{label}$" for label in range(6)]
    pictures = []
    for rows, columns in ((4, 6), (7, 5), (3, 3)):
        truth = generator.choice([0, 2, 255], (rows, columns))
        prediction = generator.choice([0, 5], (rows, columns))
        pictures.append((generator.integers(0, 256, (rows, columns, 3), dtype=np.uint8), truth, prediction))
    figure = segmentation_pictures(pictures, names, ignore_index=255, label="a $model")
    table = np.concatenate([class_colours(6), np.zeros((249, 3), np.uint8), np.full((1, 3), 255, np.uint8)])
    for number, (image, truth, prediction) in enumerate(pictures):
        assert (drawn(figure, f"image{number}") == image).all()
        assert (drawn(figure, f"truth{number}") == table[truth]).all()
        assert (drawn(figure, f"prediction{number}") == table[prediction]).all()
    (legend,) = figure.legends
    shown = [text.get_text() for text in legend.get_texts()]
    assert shown == ["$name_0$", "$name_2$", "$name_5$", "no class (ignored)"]
    headings = [panel.get_title(loc="center") for panel in figure.axes[:6]]
    assert headings == ["image", "truth", "prediction"] * 2


def test_nothing_cannot_be_drawn() -> None:
    with pytest.raises(InputError, match="no pictures"):
        segmentation_pictures([], ["a"], ignore_index=255, label="")


def table_of_kinds(kinds: list[list[str]], numbers: tuple[int, ...] | None = None) -> HeadTable:
    """A table whose heads are of these kinds; "" for one that does not exist."""
    shares = {"own patch": "own", "neighbour": "near", "row/column": "row", "global": "breadth"}
    shape = len(kinds), max(map(len, kinds))
    extra = {f"kind_{name}": np.full(shape, np.nan) for name in KindShares._fields}
    for layer, names in enumerate(kinds):
        for head, kind in enumerate(names):
            for name in KindShares._fields if kind else ():
                extra[f"kind_{name}"][layer, head] = 0.9 if shares.get(kind, kind) == name else 0.1
    values = np.where(np.isnan(extra["kind_own"]), np.nan, 0.3)
    moments = Moments(2, values, values * 0)
    names = tuple(f"blocks.{layer}.attn" for layer in range(shape[0]))
    return HeadTable(names, moments, moments, extra=extra, numbers=numbers)


def test_a_strip_has_a_cell_per_head_in_the_order_of_the_legend():
    first = [["global", "own patch", "sink"], ["edge", "other", ""], ["", "", ""]]
    second = [["neighbour"] * 2] * 30
    tables = {"a_$b$": table_of_kinds(first), "deep": table_of_kinds(second, tuple(range(10, 40)))}
    figure = kind_strips(tables)
    order = list(COLOURS)
    for layer, expected in enumerate((["own patch", "sink", "global"], ["edge", "other"])):
        cells = artist(figure, f"kinds-0-layer{layer}")
        assert [order[int(code)] for code in cells.get_array().ravel()] == expected
        assert cells.get_clim() == (-0.5, len(order) - 0.5)
        assert [cells.cmap(place) for place in range(len(order))] == [to_rgba(COLOURS[kind]) for kind in order]
    assert not figure.findobj(lambda found: found.get_gid() == "kinds-0-layer2")  # hatched, as nothing was measured
    top, bottom = figure.axes
    assert top.get_ylabel() == "a_$b$\n5 heads"
    assert (top.get_xlim(), bottom.get_xlim()) == ((0, 3), (0, 30))
    assert [text.get_text() for text in bottom.get_xticklabels()][:2] == ["10", "12"]
    (legend,) = figure.legends
    shown = ["own patch", "neighbour", "edge", "sink", "global", "other"]
    assert [text.get_text() for text in legend.get_texts()] == [WORDS[kind] for kind in shown]
    with pytest.raises(InputError, match="at least one"):
        kind_strips({})


def test_kinds_differ_in_lightness_too():
    """From the most local to the least; no two that are neighbours in the legend look the same in grey."""
    grey = [float(np.dot(to_rgba(colour)[:3], (0.2126, 0.7152, 0.0722))) for colour in COLOURS.values()]
    assert grey[0] == min(grey)
    assert max(grey) == grey[list(COLOURS).index("global")]
    assert min(abs(one - other) for one, other in pairwise(grey)) > 0.05
