"""What a table of heads shows of itself: the numbers in it are the table's own."""

import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import matplotlib as mpl
import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from torch import nn

from nearsight import HeadTable, create_model, measure
from nearsight.data import make_shapes
from nearsight.errors import InputError
from nearsight.metrics import Moments
from nearsight.report import compare
from nearsight.report.face import as_model


def images(num: int = 6, size: int = 32) -> torch.Tensor:
    return make_shapes(num, image_size=size, split="test").images_NCHW / 127.5 - 1


def sharpened(factor: float, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    model = create_model("compact_vit", depth=3, embed_dim=32, num_heads=4)
    with torch.no_grad():
        for block in model.blocks:
            block.attn.qkv.weight.mul_(factor)
    return model


@pytest.fixture(scope="module")
def table() -> HeadTable:
    return measure(sharpened(10.0), images(), label="sharp <b>", keep="maps", what=["shares"])


def uneven() -> HeadTable:
    """Two layers, the first with two heads of three, windows in it."""
    values = np.random.default_rng(0).uniform(0.1, 0.4, size=(2, 5, 2, 3))
    values[:, :, 0, 2] = np.nan
    names = ("blocks.0.attn", "blocks.1.attn")
    extra = {"grid_size": np.array([[8.0, 8.0], [4.0, 4.0]])}
    moments = Moments.of(values[0]), Moments.of(values[1])
    return HeadTable(names, *moments, {"pool": "no queries"}, extra, uniform=np.array([0.25, 0.473]))


class TestInANotebook:
    def test_every_head_is_a_cell_with_its_numbers_and_its_colour(self, table: HeadTable) -> None:
        svg = re.search(r"<svg.*</svg>", table._repr_html_(), re.DOTALL)
        assert svg is not None
        tree = ElementTree.fromstring(svg.group())
        cells = [group for group in tree.iter("{http://www.w3.org/2000/svg}g") if group[0].tag.endswith("title")]
        assert len(cells) == 3 * 4
        largest = max(table.mad.max(), table.uniform.max())
        for cell, (layer, head) in zip(cells, np.ndindex(3, 4), strict=True):
            assert cell[0].text == (
                f"layer {layer} (blocks.{layer}.attn), head {head}: distance {table.mad[layer, head]:.3f}, "
                f"uniform 0.418, entropy {table.entropy[layer, head]:.3f}"
            )
            colour = mpl.colors.to_hex(mpl.colormaps["viridis"](table.mad[layer, head] / largest))
            assert cell[1].get("fill") == colour
            assert cell[2].text == f"{table.mad[layer, head]:.2f}"

    def test_the_scale_marks_uniform_attention_where_it_is(self, table: HeadTable) -> None:
        html = table._repr_html_()
        (mark,) = re.findall(r'<path d="M([\d.]+) \d+v14"', html)
        largest = max(table.mad.max(), table.uniform.max())
        assert float(mark) == pytest.approx(56 + 220 * 0.417848 / largest, abs=0.06)
        assert "│ uniform attention: 0.418" in html
        assert "│ uniform attention: 0.250 to 0.473" in uneven()._repr_html_()
        assert len(re.findall(r'<path d="M', uneven()._repr_html_())) == 2
        assert "uniform" not in replace(uneven(), uniform=None, extra={})._repr_html_()

    def test_it_says_what_the_page_says_and_runs_nothing(self, table: HeadTable) -> None:
        html = table._repr_html_()
        assert "<strong>sharp &lt;b&gt;</strong>: 3 layers × 4 heads, 6 images" in html
        place = np.unravel_index(table.mad.argmin(), table.mad.shape)
        assert f"It is layer {place[0]}, head {place[1]}, measured on 6 images." in html
        for word in ("<script", "<b>", "http-equiv", "url("):
            assert word not in html
        assert "1 layers skipped" in uneven()._repr_html_()

    def test_heads_that_do_not_exist_have_no_cell_and_none_at_all_is_said(self) -> None:
        assert uneven()._repr_html_().count("<title>") == 5
        void = HeadTable(("a",), *[Moments.of(np.full((2, 1, 2), np.nan))] * 2)
        assert "no head has a distance on the image" in void._repr_html_()

    def test_layers_keep_the_numbers_they_have_in_the_model(self) -> None:
        part = measure(sharpened(10.0), images(), layers=[2, 1])
        assert part.numbers == (2, 1)
        assert part.layer_names == ("blocks.2.attn", "blocks.1.attn")
        assert "layer 2 (blocks.2.attn), head 0" in part._repr_html_()
        assert "(from layer 1 on)" in part._repr_html_()

    def test_random_weights_are_asked_about_first(self) -> None:
        random = measure(sharpened(1.0), images())
        first = re.findall(r"<strong>([^<]*)</strong>", random._repr_html_())[1]  # behind the model's name
        assert first == "“compact_vit” is indistinguishable from uniform attention: are these weights random?"

    def test_many_heads_are_small_cells(self) -> None:
        values = np.random.default_rng(0).uniform(0.1, 0.4, size=(2, 5, 48, 32))
        many = HeadTable(tuple(map(str, range(48))), Moments.of(values[0]), Moments.of(values[1]))
        html = many._repr_html_()
        width = re.search(r'<svg[^>]* width="(\d+)"', html)
        assert width is not None
        assert int(width.group(1)) < 720
        assert html.count("<title>") == 48 * 32


class TestPlot:
    def test_panels_hold_the_tables_numbers_and_the_uniform_line(self, table: HeadTable) -> None:
        figure = table.plot()
        assert isinstance(figure, Figure)
        distance, entropy, *bars = figure.axes
        np.testing.assert_array_equal(distance.images[0].get_array(), table.mad)
        np.testing.assert_array_equal(entropy.images[0].get_array(), table.entropy)
        assert entropy.images[0].get_clim() == (0.0, 1.0)
        marks = [[line.get_ydata()[0] for line in bar.lines if line.get_gid() == "uniform"] for bar in bars]
        assert marks == [[pytest.approx(0.417848, abs=1e-6)], [1.0]]
        assert [tick.get_text() for tick in distance.get_yticklabels()] == ["0", "1", "2"]
        assert figure._repr_png_().startswith(b"\x89PNG")  # what a notebook shows
        assert sys.modules.get("matplotlib.pyplot") is None or not mpl.pyplot.get_fignums()  # nobody's figures

    def test_one_of_them_in_axes_that_are_given(self, table: HeadTable) -> None:
        axes = Figure().subplots()
        assert table.plot(ax=axes) is axes
        np.testing.assert_array_equal(axes.images[0].get_array(), table.mad)
        other = Figure().subplots()
        assert table.plot("share_self", ax=other) is other
        np.testing.assert_array_equal(other.images[0].get_array(), table.extra["share_self"])

    def test_what_cannot_be_drawn_is_refused(self, table: HeadTable) -> None:
        with pytest.raises(InputError, match="'madd' is not a known array of layers × heads; did you mean 'mad'"):
            table.plot("madd")
        with pytest.raises(InputError, match="ax takes one heat map, but 2 are asked for"):
            table.plot(["mad", "entropy"], ax=Figure().subplots())

    def test_layers_of_windows_have_marks_of_their_own(self) -> None:
        figure = uneven().plot("mad")
        assert [line.get_ydata()[0] for line in figure.axes[1].lines if line.get_gid() == "uniform"] == [0.25, 0.473]


class TestCompare:
    def test_it_is_the_paired_reading_of_the_report(self, table: HeadTable) -> None:
        other = measure(sharpened(1.0, seed=1), images(), label="random")
        reading = table.compare(other)
        assert reading.sentences == compare(as_model(table), as_model(other)).sentences
        assert reading.most_local_head.is_paired
        assert reading.first_layer.estimate.n == 6
        # By hand: the mean over the heads of the first layer, image by image.
        per_image = [dict(zip(one.per_image.digests, one.per_image.mad[:, 0], strict=True)) for one in (table, other)]
        differences = [(per_image[0][key] - per_image[1][key]).mean() for key in per_image[0]]
        assert reading.first_layer.estimate.value == pytest.approx(np.mean(differences), rel=1e-5)

    def test_models_of_one_name_are_told_apart(self, table: HeadTable) -> None:
        said = str(table.compare(table))
        assert "“sharp <b> (this)” and “sharp <b> (the other)” differ by less than 0.02" in said


class TestReport:
    def test_the_page_has_the_words_and_the_explorer_of_the_kept_maps(self, table: HeadTable, tmp_path: Path) -> None:
        path = table.report(tmp_path)
        assert path == tmp_path / "report.html"
        page = path.read_text(encoding="utf-8")
        assert "sharp &lt;b&gt;" in page
        (text,) = re.findall(r'id="nearsight-explorer-data">(.*?)</script>', page)
        data = json.loads(text)
        assert [len(model["pictures"]) for model in data["models"]] == [4]
        layers = data["models"][0]["layers"]
        assert [layer["number"] for layer in layers] == [0, 1, 2]
        np.testing.assert_allclose([layer["mad"] for layer in layers], table.mad, rtol=1e-12)

    def test_without_maps_there_is_no_explorer(self, table: HeadTable, tmp_path: Path) -> None:
        table.save(tmp_path / "heads.npz")
        loaded = HeadTable.load(tmp_path / "heads.npz")
        assert loaded.maps is None
        assert loaded.label == "sharp <b>"
        path = loaded.report(tmp_path / "page.html")
        assert 'id="nearsight-explorer-data"' not in path.read_text(encoding="utf-8")

    def test_a_folder_that_is_not_there_is_made(self, table: HeadTable, tmp_path: Path) -> None:
        assert replace(table, maps=None).report(tmp_path / "new" / "page.html").exists()


def test_xarray_has_names_numbers_and_single_images(table: HeadTable) -> None:
    pytest.importorskip("xarray")
    found = table.choose([2, 0]).to_xarray()
    assert dict(found.sizes) == {"layer": 2, "head": 4, "image": 6}
    assert found["layer"].values.tolist() == [2, 0]
    assert found["layer_name"].values.tolist() == ["blocks.2.attn", "blocks.0.attn"]
    assert float(found["mad"].sel(layer=0, head=3)) == table.mad[0, 3]
    assert float(found["share_self"].sel(layer=2, head=1)) == table.extra["share_self"][2, 1]
    np.testing.assert_allclose(found["uniform_mad"], 0.417848, atol=1e-6)
    assert found["grid_rows"].values.tolist() == [8, 8]
    np.testing.assert_allclose(found["mad_per_image"].mean("image"), table.mad[[2, 0]], rtol=1e-5)
    assert found.attrs["num_images"] == 6
    assert found.attrs["label"] == "sharp <b>"


@pytest.mark.parametrize(
    ("method", "name", "extra"), [("to_xarray", "xarray", "xarray"), ("explore", "anywidget", "notebook")]
)
def test_what_is_not_installed_is_named(
    table: HeadTable, method: str, name: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(
        InputError, match=rf"^{name} is needed .*; install it with: pip install 'nearsight\[{extra}\]'$"
    ):
        getattr(table, method)()


def test_the_widget_has_the_explorers_data_and_needs_maps(table: HeadTable) -> None:
    pytest.importorskip("anywidget")
    widget = table.explore()
    assert [len(layer["maps"]) for layer in widget.data["models"][0]["layers"]] == [4, 4, 4]
    assert "nearsightExplorer.mount" in str(widget._esm)
    with pytest.raises(InputError, match="measure with keep='maps'"):
        replace(table, maps=None).explore()
