"""Figures of the further measurements show the numbers they are given."""

from pathlib import Path

import numpy as np
import pytest

from nearsight.errors import InputError
from nearsight.lens import HeadTable, LayerSimilarity
from nearsight.metrics import Moments
from nearsight.report import offset_pictures, rollout_overlays, save_figure, similarity_heatmap
from nearsight.report.figures.patches import CONTRAST, RADIUS


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
    assert (axes.get_ylabel(), axes.get_xlabel()) == ("layer of a_$b$", "layer of c")
    assert [text.get_text() for text in axes.get_xticklabels()] == ["1", "2", "3", "4", "5"]
    assert axes.get_ylim() == (-0.5, 2.5)  # the first layer at the bottom


def test_one_model_is_named_once_and_many_layers_have_few_ticks():
    axes = artist(similarity_heatmap(similarity(48, 48), label="model"), "cka").axes
    assert axes.get_title(loc="left") == "model"
    assert axes.get_xlabel() == "layer"
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
    """A layer of 20 × 3 patches with two heads, and one of 4 × 4 with a single one that looks everywhere alike."""
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
    first, flat = artist(figure, "L5-1"), artist(figure, "L8-1")
    np.testing.assert_array_equal(first.get_array(), table.offset_maps(0)[0, 19 - RADIUS : 20 + RADIUS])
    assert first.get_array().shape == (2 * RADIUS + 1, 5)
    assert first.get_clim() == (0.0, 0.9)
    np.testing.assert_array_equal(flat.get_array(), np.full((7, 7), 1 / 16))
    assert flat.get_clim() == (0.0, CONTRAST / 16)
    assert not figure.findobj(lambda candidate: candidate.get_gid() == "L8-2")
    assert [panel.get_visible() for panel in figure.axes] == [True, True, True, False]
    assert first.axes.get_title(loc="left") == f"{0.1 * np.hypot(19, 2):.1f}"
    assert (first.axes.get_ylabel(), flat.axes.get_ylabel()) == ("L5", "L8")
    (frame,) = first.axes.patches  # around the middle of the picture
    assert (*frame.get_xy(), frame.get_width()) == (1.5, RADIUS - 0.5, 1)
    assert figure.get_suptitle().startswith("a_$b$: ")


def test_pictures_of_steps_need_steps():
    table = table_of_steps()
    table.extra.pop("offset_attention")
    with pytest.raises(InputError, match="offsets"):
        offset_pictures(table, label="model")
