"""The explorer in a browser, on a page with a strict policy: what it shows is what the model does."""

import base64
import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import matplotlib as mpl
import numpy as np
import pytest
import timm
import torch
from torch import nn

from nearsight.lens import measure
from nearsight.lens.maps import LayerMaps, attention_maps
from nearsight.report import ModelHeads
from nearsight.report.explorer import Exhibit, explore, explorer_script, explorer_style

pytestmark = pytest.mark.browser

HOSTILE = "</script><img src=x onerror=alert(1)><b>\" ' \u202egnol " + "x" * 500
SHAPES: dict[str, dict[str, Any]] = {
    "vit_tiny_patch16_224": {
        "img_size": (32, 24),
        "patch_size": 4,
        "embed_dim": 24,
        "depth": 2,
        "num_heads": 3,
        "reg_tokens": 2,
    },
    "swin_tiny_patch4_window7_224": {
        "img_size": 48,
        "window_size": 4,
        "embed_dim": 24,
        "depths": (2, 1),
        "num_heads": (2, 3),
    },
}


@dataclass
class Shown:
    """A model in the page, and what it really does."""

    exhibit: Exhibit
    maps: list[LayerMaps] = field(init=False)

    def __post_init__(self) -> None:
        self.maps = attention_maps(self.exhibit.model, self.exhibit.images_BCHW, dtype=torch.float64)

    @property
    def label(self) -> str:
        return self.exhibit.heads.label

    def numbers(self, layer: int, head: int) -> tuple[str, str]:
        """Distance and entropy as the table has them."""
        rows = self.exhibit.heads.measured().set_index(["layer", "head"])
        return f"{rows.loc[(layer, head), 'mad']:.3f}", f"{rows.loc[(layer, head), 'entropy']:.3f}"


def shown(name: str, label: str) -> Shown:
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=3, **SHAPES[name])
    for module in model.modules():
        if isinstance(qkv := getattr(module, "qkv", None), nn.Linear):
            qkv.weight.data *= 20
    size = SHAPES[name]["img_size"]
    height, width = size if isinstance(size, tuple) else (size, size)
    images = torch.randn(2, 3, height, width, generator=torch.Generator().manual_seed(1))
    pictures = np.random.default_rng(0).integers(0, 256, (2, height, width, 3), dtype=np.uint8)
    heads = ModelHeads(label=label, heads=measure(model, images).to_frame().assign(epoch=0))
    return Shown(Exhibit(heads=heads, model=model, images_BCHW=images, pictures_BHWC=pictures))


@pytest.fixture(scope="module")
def models() -> list[Shown]:
    return [shown("vit_tiny_patch16_224", "ViT"), shown("swin_tiny_patch4_window7_224", HOSTILE)]


def policy_hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def page_of(models: list[Shown]) -> str:
    script, style = explorer_script(), explorer_style()
    policy = f"default-src 'none'; script-src {policy_hash(script)}; style-src {policy_hash(style)}; img-src data:"
    return (
        '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>page</title><style>{style}</style></head><body>"
        f"{explore([model.exhibit for model in models]).html()}<script>{script}</script></body></html>"
    )


@pytest.fixture(scope="module")
def html(models: list[Shown]) -> str:
    return page_of(models)


def opened(visit: Callable[..., Any], html: str, width: int = 1100) -> Any:
    page = visit(html, viewport={"width": width, "height": 900}).page
    page.wait_for_function("document.querySelector('.nsx-picker canvas').width > 8")  # pictures are there
    return page


@pytest.fixture
def page(visit: Callable[..., Any], html: str) -> Any:
    """Afterwards nothing may have gone wrong, and nothing have been asked for: `visit` sees to that."""
    return opened(visit, html)


def seen(page: Any, model: Shown, layer: int, head: int) -> Any:
    return page.evaluate(
        "([label, layer, head]) => { const row = nearsightExplorer.shown(label, layer, head);"
        "return row && {...row, weights: [...row.weights], reach: null}; }",
        [model.label, layer, head],
    )


def check(page: Any, model: Shown, picture: int, query_of: Any) -> None:
    """Every head of a model shows the row of its maps that `query_of(maps)` says."""
    for layer, maps in enumerate(model.maps):
        for head in range(maps.weights_BHQK.shape[1]):
            found, query = seen(page, model, layer, head), query_of(maps)
            exact = maps.weights_BHQK[picture, head, query].numpy()
            assert np.abs(np.array(found["weights"]) - exact).max() <= exact.max() / 255
            assert found["others"] == pytest.approx(maps.other_weights_BHQO[picture, head, query].tolist(), rel=1e-6)
            if query < math.prod(maps.query_grid):
                assert found["distance"] == pytest.approx(float(maps.distances_BHQ[picture, head, query]), rel=1e-6)


def test_a_clicked_patch_shows_where_it_looks_in_both_models(page: Any, models: list[Shown]) -> None:
    page.click('.nsx-pictures button[aria-label="Picture 2"]')
    page.wait_for_selector('.nsx-pictures button[aria-label="Picture 2"][aria-pressed=true]')
    page.click('.nsx-patches [data-row="6"][data-col="1"]')
    vit, swin = models

    def same_place(maps: LayerMaps) -> int:
        rows, cols = maps.query_grid
        return math.floor(6.5 / 8 * rows) * cols + math.floor(1.5 / 6 * cols)

    check(page, vit, 1, lambda maps: 6 * 6 + 1)
    check(page, swin, 1, same_place)
    assert "Picture 2, the patch in row 7, column 2 of 8 × 6" in page.inner_text("[role=status]")
    border = page.get_attribute(".nsx-side:nth-child(2) .nsx-window", "d")
    assert border.count("h") + border.count("v") == 16  # around a window of 4 × 4


def test_numbers_are_those_of_the_table(page: Any, models: list[Shown]) -> None:
    for side, model in enumerate(models, start=1):
        rows = model.exhibit.heads.measured()
        texts = page.locator(f".nsx-side:nth-child({side}) .nsx-head span").all_inner_texts()
        assert texts == [f"{mad:.3f}" for mad in rows["mad"]]
        for row in rows.itertuples():
            page.click(f'.nsx-side:nth-child({side}) .nsx-head[data-row="{row.layer}"][data-col="{row.head}"]')
            name, *values = page.locator(f".nsx-side:nth-child({side}) .nsx-numbers > div").all_inner_texts()
            assert name.strip() == f"Layer {row.layer}, head {row.head}"
            said = dict(value.split("\n") for value in values)
            assert (said["MAD"], said["Entropy"]) == model.numbers(row.layer, row.head)
            found = seen(page, model, row.layer, row.head)
            assert said["This patch"] == f"{found['distance']:.3f}"
            if model is models[0]:
                assert said["To CLS"] == f"{100 * found['others'][0]:.1f} %"
                assert said["To 2 registers"] == f"{100 * sum(found['others'][1:]):.1f} %"


def test_tokens_that_are_no_patches_can_look_too(page: Any, models: list[Shown]) -> None:
    for position, name in enumerate(("CLS", "register 1", "register 2")):
        page.click(f'.nsx-tokens button:text-is("{name}")')
        check(page, models[0], 0, lambda maps, position=position: 48 + position)
        assert seen(page, models[1], 0, 0) is None
        assert "No such query here" in page.inner_text(".nsx-side:nth-child(2) .nsx-numbers")
        assert page.locator(".nsx-patches [aria-selected=true]").count() == 0


def test_all_patches_aligned_explain_the_distance(page: Any, models: list[Shown]) -> None:
    page.click('.nsx-tokens button:text-is("All patches, aligned")')
    for model in models:
        for layer, maps in enumerate(model.maps):
            (rows, cols), size = maps.query_grid, math.prod(maps.query_grid)
            weights = maps.weights_BHQK[0, 1, :size].numpy()
            expected = np.zeros((2 * rows - 1, 2 * cols - 1))
            pairs = np.zeros_like(expected)
            for query in range(size):
                for key in range(size):
                    down, right = key // cols - query // cols, key % cols - query % cols
                    expected[down + rows - 1, right + cols - 1] += weights[query, key] / weights[query].sum() / size
                    if maps.reach_QK is None or maps.reach_QK[query, key]:
                        pairs[down + rows - 1, right + cols - 1] += 1
            found = seen(page, model, layer, 1)
            per_pair = expected * size / np.maximum(pairs, 1)
            np.testing.assert_allclose(np.reshape(found["weights"], expected.shape), per_pair, atol=0.01)
            steps = np.hypot(*np.meshgrid(range(1 - rows, rows), range(1 - cols, cols), indexing="ij"))
            far = (expected * steps).sum() / math.hypot(rows - 1, cols - 1)
            assert found["distance"] == pytest.approx(far, rel=1e-5)


@pytest.mark.parametrize("name", list(SHAPES))
def test_a_uniform_head_is_flat_when_its_patches_are_aligned(visit: Callable[..., Any], name: str) -> None:
    model = timm.create_model(name, num_classes=3, **SHAPES[name])
    for module in model.modules():
        if isinstance(qkv := getattr(module, "qkv", None), nn.Linear):
            nn.init.zeros_(qkv.weight), nn.init.zeros_(qkv.bias)
        if hasattr(module, "relative_position_bias_table"):
            nn.init.zeros_(module.relative_position_bias_table)
    size = SHAPES[name]["img_size"]
    images = torch.randn(1, 3, *(size if isinstance(size, tuple) else (size, size)))
    pictures = np.zeros((1, *images.shape[2:], 3), dtype=np.uint8)
    heads = ModelHeads(label="uniform", heads=measure(model, images).to_frame().assign(epoch=0))
    uniform = Shown(Exhibit(heads=heads, model=model, images_BCHW=images, pictures_BHWC=pictures))
    page = opened(visit, page_of([uniform]))
    page.click('.nsx-tokens button:text-is("All patches, aligned")')
    for layer, maps in enumerate(uniform.maps[:1]):  # no window of this one is shifted
        size = math.prod(maps.query_grid) if maps.reach_QK is None else int(maps.reach_QK[0].sum())
        weights = np.array(seen(page, uniform, layer, 0)["weights"])
        np.testing.assert_allclose(weights[weights > 0], 1 / size, rtol=1e-6)
        if maps.reach_QK is None:
            assert (weights > 0).all()


def test_keys_move_the_query_and_the_head(page: Any) -> None:
    page.click('.nsx-patches [data-row="3"][data-col="2"]')
    for key in ("ArrowRight", "ArrowDown", "ArrowDown", "Home", "ArrowLeft", "ArrowUp"):
        page.keyboard.press(key)  # to the left of the first column there is nothing
    assert page.evaluate("({...document.activeElement.dataset})") == {"row": "4", "col": "0"}
    assert page.get_attribute(".nsx-patches [aria-selected=true]", "aria-label") == "patch in row 5, column 1"
    page.click('.nsx-side:first-child .nsx-head[data-row="0"][data-col="0"]')
    for key in ("ArrowDown", "End", "ArrowRight"):
        page.keyboard.press(key)
    assert page.inner_text(".nsx-side:first-child .nsx-name").strip() == "Layer 1, head 2"
    assert page.locator(".nsx-side:first-child .nsx-head[aria-selected=true]").count() == 1
    assert page.locator(".nsx-side:first-child .nsx-heads [tabindex='0']").count() == 1
    page.click(".nsx-side:first-child .nsx-map", position={"x": 3, "y": 3})
    assert page.get_attribute(".nsx-patches [aria-selected=true]", "aria-label") == "patch in row 1, column 1"


def test_other_parts_of_the_page_can_ask_for_a_head(page: Any, models: list[Shown]) -> None:
    page.evaluate("label => nearsightExplorer.select(label, 2, 1)", HOSTILE)
    assert page.inner_text(".nsx-side:nth-child(2) .nsx-name").strip() == "Layer 2, head 1"
    for unknown in (["no such", 0, 0], [HOSTILE, 3, 0], [HOSTILE, 0, 2]):
        assert page.evaluate("which => nearsightExplorer.miniature(...which)", unknown) is None
        page.evaluate("which => nearsightExplorer.select(...which)", unknown)
    sharpest = max(range(3), key=lambda head: seen(page, models[0], 1, head)["largest"])
    row = seen(page, models[0], 1, sharpest)
    cell = int(np.argmax(row["weights"]))
    pixel = page.evaluate(
        "([label, head, row, col]) => { const map = nearsightExplorer.miniature(label, 1, head);"
        "const [x, y] = [(col + 0.5) * map.width / 6, (row + 0.5) * map.height / 8];"
        "return [...map.getContext('2d').getImageData(x, y, 1, 1).data]; }",
        ["ViT", sharpest, cell // 6, cell % 6],
    )
    top = page.evaluate("row => nearsightExplorer.parts.topOf({...row, reach: null})", row)
    colours = np.rint(255 * mpl.colormaps["magma"](np.arange(256)))[:, :3]
    assert top == row["largest"]  # then the colour is the last one, and nothing shines through
    assert pixel[:3] == colours[255].tolist()


def test_places_and_rings(page: Any) -> None:
    parts = "nearsightExplorer.parts"
    for rows, cols in ((8, 6), (1, 1), (3, 7)):
        for cell in range(rows * cols):
            centre = page.evaluate(f"([grid, cell]) => {parts}.centreOf(grid, cell)", [[rows, cols], cell])
            assert centre == pytest.approx({"y": (cell // cols + 0.5) / rows, "x": (cell % cols + 0.5) / cols})
            assert page.evaluate(f"([grid, place]) => {parts}.cellAt(grid, place)", [[rows, cols], centre]) == cell
    assert page.evaluate(f"{parts}.cellAt([4, 4], {{y: 1, x: 1}})") == 15
    # A quarter of the diagonal of 8 × 8 cells, on patches that are pooled to 4 × 4.
    layer = "{grid: [8, 8], queries: [4, 4], keys: [4, 4]}"
    ring = page.evaluate(f"{parts}.ringOf({layer}, {{y: 0.3, x: 0.9}}, 0.25)")
    radius = 0.25 * math.hypot(7, 7) / 8
    assert ring == pytest.approx({"cx": 0.875, "cy": 0.375, "rx": radius, "ry": radius})
    aligned = page.evaluate(f"{parts}.ringOf({layer}, {{aligned: true}}, 0.25)")
    assert aligned == pytest.approx({"cx": 0.5, "cy": 0.5, "rx": radius * 4 / 7, "ry": radius * 4 / 7})


@pytest.mark.parametrize("width", [390, 1100])
def test_hostile_labels_are_text_and_nothing_overflows(
    visit: Callable[..., Any], models: list[Shown], width: int
) -> None:
    third = shown("vit_tiny_patch16_224", "third")
    page = opened(visit, page_of([*models, third]), width)
    assert page.locator("img, b").count() == 0
    options = page.locator(".nsx-side:first-child option").all_text_contents()
    assert options == ["ViT", HOSTILE, "third"]
    said = page.text_content("[role=status]")
    assert f"\u2068{HOSTILE[:40]}…{HOSTILE[-19:]}\u2069 · Layer" in said  # isolated: the rest keeps its direction
    page.select_option(".nsx-side:first-child select", "2")
    assert seen(page, third, 0, 0) is not None
    page.evaluate("nearsightExplorer.select('ViT', 1, 2)")
    assert page.inner_text(".nsx-side:first-child .nsx-name").strip() == "Layer 1, head 2"
    assert page.evaluate("document.documentElement.scrollWidth") <= width
