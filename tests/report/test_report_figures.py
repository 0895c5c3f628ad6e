"""What is drawn is what was measured: read back from the artists, not from the picture."""

import xml.etree.ElementTree as ET
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import matplotlib as mpl
import numpy as np
import pandas as pd
import pytest
from matplotlib.collections import PathCollection
from matplotlib.image import imread

from nearsight.errors import InputError
from nearsight.metrics import uniform_attention_distance
from nearsight.report.figures.heat import heatmaps
from nearsight.report.figures.looks import PALETTE, depth_of, looks, model_style, shade
from nearsight.report.figures.models import locality_spreads, mad_entropy_plane, mad_profiles, training_curves
from nearsight.report.figures.style import save_figure, svg_text
from nearsight.report.inputs import ModelHeads
from nearsight.report.reading import compare

ALL_FIGURES = (mad_profiles, mad_entropy_plane, heatmaps, locality_spreads, training_curves)


def artist(figure, name):
    (found,) = figure.findobj(lambda candidate: candidate.get_gid() == name)
    return found


def drawn(figure):
    return {candidate.get_gid() for candidate in figure.findobj() if candidate.get_gid()}


def with_padding(model):
    """The model with its second layer cut to two heads, once by NaN and once by a missing row."""
    heads = model.heads.copy()
    heads.loc[(heads["layer"] == 1) & (heads["head"] == 3), ["mad", "mad_std", "entropy", "entropy_std"]] = np.nan
    return replace(model, heads=heads[~((heads["layer"] == 1) & (heads["head"] == 2))])


@pytest.fixture
def pair(make_model):
    return [make_model("base", lowest=0.3, seed=1), make_model("local", lowest=0.02, seed=2)]


def rows_of(model, layer):
    rows = model.heads[(model.heads["layer"] == layer) & model.heads["mad"].notna()]
    return rows.sort_values("mad")


def test_profiles_are_sorted_and_their_bands_are_one_deviation_wide(pair):
    figure = mad_profiles(pair)
    lines = {name for name in drawn(figure) if name.startswith("model")}
    assert lines == {f"model{model}-layer{layer}" for model in (0, 1) for layer in (0, 1, 4, 5)}
    for index, model in enumerate(pair):
        for layer in (0, 1, 4, 5):
            expected = rows_of(model, layer)
            line = artist(figure, f"model{index}-layer{layer}")
            np.testing.assert_array_equal(line.get_xdata(), [1, 2, 3, 4])
            np.testing.assert_array_equal(line.get_ydata(), expected["mad"])
            band = artist(figure, f"band-model{index}-layer{layer}").get_paths()[0].vertices
            for rank, (mean, std) in enumerate(zip(expected["mad"], expected["mad_std"], strict=True), start=1):
                edges = band[band[:, 0] == rank, 1]
                assert edges.min() == pytest.approx(mean - std)
                assert edges.max() == pytest.approx(mean + std)


def test_profiles_leave_out_heads_that_do_not_exist(pair):
    model = with_padding(pair[0])
    line = artist(mad_profiles([model]), "model0-layer1")
    np.testing.assert_array_equal(line.get_ydata(), rows_of(model, 1)["mad"])
    assert len(line.get_ydata()) == 2


def test_profiles_tell_models_by_three_signs_and_layers_by_shade(pair):
    figure = mad_profiles(pair)
    lines = {(model, layer): artist(figure, f"model{model}-layer{layer}") for model in (0, 1) for layer in (0, 1, 4, 5)}
    for layer in (0, 1, 4, 5):
        base, local = lines[0, layer], lines[1, layer]
        assert base.get_color() != local.get_color()
        assert base.get_marker() != local.get_marker()
        assert base.is_dashed() != local.is_dashed()
    for model in (0, 1):
        lightness = [sum(mpl.colors.to_rgb(lines[model, layer].get_color())) for layer in (0, 1, 4, 5)]
        assert lightness == sorted(lightness, reverse=True)
        assert len(set(lightness)) == 4


def test_profiles_show_all_layers_of_a_shallow_model_and_any_that_are_asked_for(pair, make_model):
    shallow = mad_profiles([make_model(num_layers=4)])
    assert {name for name in drawn(shallow) if name.startswith("model")} == {f"model0-layer{n}" for n in range(4)}
    chosen = mad_profiles(pair, layers=[3])
    assert {name for name in drawn(chosen) if name.startswith("model")} == {"model0-layer3", "model1-layer3"}
    with pytest.raises(InputError, match="number 6"):
        mad_profiles(pair, layers=[6])
    with pytest.raises(InputError, match="no measured layer"):
        mad_profiles(pair, layers=[])


def test_profiles_of_many_models_have_a_panel_each_on_one_scale(make_model):
    models = [make_model(f"model {index}", seed=index) for index in range(5)]
    figure = mad_profiles(models)
    panels = [artist(figure, f"model{index}-layer0").axes for index in range(5)]
    assert len(set(panels)) == 5
    assert [panel.get_title(loc="left") for panel in panels] == [model.label for model in models]
    assert len({panel.get_ylim() for panel in panels}) == 1


def test_a_single_head_has_an_error_bar(pair, make_model):
    figure = mad_profiles([make_model(num_layers=1, num_heads=1)])
    (mean,) = artist(figure, "model0-layer0").get_ydata()
    (bar,) = figure.axes[0].containers
    low, high = bar.lines[2][0].get_segments()[0][:, 1]
    std = make_model(num_layers=1, num_heads=1).heads["mad_std"][0]
    assert (low, high) == (pytest.approx(mean - std), pytest.approx(mean + std))


def test_many_heads_have_a_plane_for_each_model(make_model):
    models = [make_model(label, num_layers=12, num_heads=12, seed=seed) for seed, label in enumerate("abcd")]
    figure = mad_entropy_plane(models, grid_size=(8, 8))
    panels = [artist(figure, f"model{index}").axes for index in range(4)]
    assert len(set(panels)) == 4
    assert [panel.get_title(loc="left") for panel in panels] == list("abcd")
    assert len({(panel.get_xlim(), panel.get_ylim()) for panel in panels}) == 1
    assert not figure.legends


def test_a_finding_for_phones_has_its_panels_below_each_other(pair):
    wide, narrow = (locality_spreads(pair, is_narrow=is_narrow) for is_narrow in (False, True))
    assert narrow.get_figwidth() < 4 < wide.get_figwidth()
    for figure in (wide, narrow):
        np.testing.assert_allclose(
            [artist(figure, f"head-mean-model{index}").get_xdata()[0] for index in range(2)],
            [model.heads["mad"].min() for model in pair],
        )
    narrow.draw_without_rendering()
    above, below = (panel.get_position() for panel in narrow.axes[:2])
    assert above.y0 > below.y1


def test_the_plane_has_one_point_per_existing_head_coloured_by_layer_from_zero(pair):
    models = [with_padding(pair[0]), pair[1]]
    figure = mad_entropy_plane(models, grid_size=(8, 8))
    for index, model in enumerate(models):
        heads = model.heads.dropna(subset=["mad"]).sort_values("layer", ascending=False, kind="stable")
        points = artist(figure, f"model{index}")
        assert isinstance(points, PathCollection)
        np.testing.assert_array_equal(np.asarray(points.get_offsets()), heads[["mad", "entropy"]])
        np.testing.assert_array_equal(points.get_array(), heads["layer"])
    anchor = artist(figure, "uniform")
    assert (anchor.get_xdata()[0], anchor.get_ydata()[0]) == (pytest.approx(0.417848, abs=1e-6), 1.0)
    assert "uniform" not in drawn(mad_entropy_plane(pair))
    bar = figure.axes[-1]
    assert [text.get_text() for text in bar.get_yticklabels()] == ["0", "1", "2", "3", "4", "5"]


@pytest.mark.parametrize(
    ("distances", "grid_size"),
    [((0.40, 0.41), (8, 8)), ((0.40, 0.41), None), ((0.5, 0.5), (8, 8)), ((0.001, 0.002), None), ((0.0, 0.0), None)],
)
def test_every_mark_of_the_plane_is_whole(distances, grid_size, make_model):
    """However narrow the range, and with every marker."""
    models = [make_model(f"model {number}", num_layers=1, num_heads=2) for number in range(9)]
    models = [replace(model, heads=model.heads.assign(mad=distances)) for model in models]
    figure = mad_entropy_plane(models, grid_size=grid_size)
    figure.draw_without_rendering()
    axes = figure.axes[0]
    points_per_pixel = 72 / figure.dpi
    inside = axes.bbox
    for index in range(len(models)):
        marks = artist(figure, f"model{index}")
        (outline,) = marks.get_paths()
        reach = np.abs(outline.vertices).max() * np.sqrt(marks.get_sizes()[0]) + marks.get_linewidths()[0] / 2
        places = axes.transData.transform(np.asarray(marks.get_offsets()))[:, 0]
        assert places.min() - inside.x0 >= reach / points_per_pixel
        assert inside.x1 - places.max() >= reach / points_per_pixel
    if grid_size is not None:
        cross = artist(figure, "uniform")
        place = axes.transData.transform((cross.get_xdata()[0], 1.0))[0]
        assert inside.x1 - place >= cross.get_markersize() / 2 / points_per_pixel


def test_heatmaps_hold_the_numbers_and_leave_missing_heads_transparent(pair, make_model):
    models = [with_padding(pair[0]), make_model("wide", num_layers=2, num_heads=6, lowest=0.5)]
    figure = heatmaps(models)
    for metric in ("mad", "entropy"):
        limits = set()
        for index, model in enumerate(models):
            image = artist(figure, f"{metric}-model{index}")
            expected = np.full((6, 6), np.nan)
            expected[model.heads["layer"], model.heads["head"]] = model.heads[metric]
            np.testing.assert_array_equal(image.get_array().filled(np.nan), expected)
            colours = image.cmap(image.norm(image.get_array()))
            np.testing.assert_array_equal(colours[..., 3] == 0, np.isnan(expected))
            assert image.axes.patch.get_hatch()
            limits.add(image.get_clim())
            texts = {text.get_position(): text.get_text() for text in image.axes.texts}
            assert texts == {
                (head, layer): f"{expected[layer, head]:.2f}" for layer, head in np.argwhere(np.isfinite(expected))
            }
        assert len(limits) == 1
    assert artist(figure, "mad-model0").get_clim() == (0.0, models[1].heads["mad"].max())
    assert artist(figure, "entropy-model0").get_clim() == (0.0, 1.0)
    panel = artist(figure, "entropy-model0").axes
    assert [text.get_text() for text in panel.get_xticklabels()] == ["0", "1", "2", "3", "4", "5"]
    assert [text.get_text() for text in panel.get_yticklabels()] == ["0", "1", "2", "3", "4", "5"]


def test_heatmaps_without_room_have_no_numbers_and_zero_is_not_missing(make_model):
    big = heatmaps([make_model(num_layers=48, num_heads=24)])
    assert not artist(big, "mad-model0").axes.texts
    still = make_model(num_layers=1, num_heads=2)
    figure = heatmaps([replace(still, heads=still.heads.assign(mad=0.0))])
    image = artist(figure, "mad-model0")
    assert not np.ma.getmaskarray(image.get_array()).any()
    assert [text.get_text() for text in image.axes.texts] == ["0.00", "0.00"]


def test_spreads_are_those_of_the_reading(pair):
    figure = locality_spreads(pair, grid_size=(8, 8))
    reading = compare(*pair)
    for name, difference in (("head", reading.most_local_head), ("layer", reading.first_layer)):
        for index, quantity in enumerate((difference.a, difference.b)):
            bar = artist(figure, f"{name}-spread-model{index}")
            mark = artist(figure, f"{name}-mean-model{index}")
            assert list(bar.get_xdata()) == [quantity.low, quantity.high]
            assert list(mark.get_xdata()) == [quantity.mean]
            assert f"{quantity.mean:.3f}" in [text.get_text() for text in mark.axes.texts]
        assert artist(figure, f"{name}-uniform").get_xdata()[0] == uniform_attention_distance((8, 8))


def test_training_curves_hold_the_history_in_the_order_of_epochs(pair, history_frame):
    shuffled = history_frame(5).sample(frac=1, random_state=1)
    models = [replace(pair[0], history=None), replace(pair[1], history=shuffled)]
    figure = training_curves(models)
    for column in ("train_loss", "val_loss", "val_acc"):
        line = artist(figure, f"{column}-model1")
        np.testing.assert_array_equal(line.get_xdata(), [1, 2, 3, 4, 5])
        np.testing.assert_array_equal(line.get_ydata(), history_frame(5)[column])
        assert line.get_color() == looks([model.label for model in pair])[pair[1].label].colour
    assert not any(name.endswith("model0") for name in drawn(figure))
    with pytest.raises(InputError, match="no model has a training history"):
        training_curves(models[:1])


def test_styles_of_many_models_all_differ():
    styles = {(style.colour, str(style.dash), style.marker) for style in map(model_style, range(200))}
    assert len(styles) == 200
    assert len({model_style(index).colour for index in range(8)}) == 8
    assert shade(PALETTE[0], 0.0) != shade(PALETTE[0], 1.0)
    assert [depth_of(layer, [3, 9, 40]) for layer in (3, 9, 40)] == [0.0, 0.5, 1.0]


@pytest.fixture
def hostile_models(make_model):
    labels = ["<script>&'\"", "_hidden $x^{$", "long " * 100, "شبكة \u202eמודל", "nul\x00 and\nline"]
    return [make_model(label, seed=index) for index, label in enumerate(labels)]


@pytest.fixture(params=["smallest", "largest", "hostile names"])
def extreme_models(request, make_model, hostile_models):
    return {
        "smallest": [make_model(num_layers=1, num_heads=1, epochs=1)],
        "largest": [make_model("deep", num_layers=48, num_heads=24), make_model("flat", num_layers=2, num_heads=3)],
        "hostile names": hostile_models,
    }[request.param]


@pytest.mark.parametrize("draw", ALL_FIGURES)
def test_extreme_models_can_be_drawn_and_written(tmp_path, draw, extreme_models):
    png, svg = save_figure(draw(extreme_models), tmp_path, "figure")
    height, width, _ = imread(png).shape
    assert min(height, width) > 200
    ET.parse(svg)


def test_labels_are_shown_as_they_are(hostile_models):
    figure = mad_entropy_plane(hostile_models)
    shown = [text.get_text() for text in figure.legends[0].get_texts()]
    assert shown[:2] == ["<script>&'\"", "_hidden $x^{$"]
    assert len(shown) == 5
    assert all(len(label) <= 30 and label.isprintable() for label in shown)


@pytest.mark.parametrize("draw", ALL_FIGURES)
def test_the_same_data_give_the_same_bytes(tmp_path, pair, draw, make_model):
    first = save_figure(draw(pair), tmp_path / "first", "figure")
    with mpl.rc_context({"font.size": 20, "axes.grid": True, "svg.hashsalt": None, "lines.linewidth": 7}):
        second = save_figure(draw([replace(model) for model in pair]), tmp_path / "second", "figure")
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]
    other = draw([pair[0], make_model("local", seed=9, epochs=5)])
    assert svg_text(other) != svg_text(draw(pair))


def test_drawing_leaves_the_users_settings_and_no_open_figures(pair, tmp_path):
    before = dict(mpl.rcParams)
    save_figure(mad_profiles(pair), tmp_path, "figure")
    assert dict(mpl.rcParams) == before
    from matplotlib import _pylab_helpers

    assert not _pylab_helpers.Gcf.figs
    assert sorted(path.name for path in tmp_path.iterdir()) == ["figure.png", "figure.svg"]


def test_threads_do_not_mix_their_figures(tmp_path, pair):
    def write(name):
        return save_figure(locality_spreads(pair), tmp_path, name)[1].read_bytes()

    alone = write("alone")
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(write, ["a", "b", "c", "d"]))
    assert together == [alone] * 4


def test_frames_from_several_epochs_draw_the_last(pair, heads_frame):
    frame = pd.concat([heads_frame(seed=5, epoch=1), heads_frame(seed=6, epoch=2)])
    figure = heatmaps([ModelHeads(label="model", heads=frame)])
    np.testing.assert_array_equal(artist(figure, "mad-model0").get_array().ravel(), heads_frame(seed=6)["mad"])
