"""The page as people use it: what it shows after a click, a drag or a key is what the run folder holds."""

import csv
import io
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import timm
import torch

import nearsight
from nearsight.report.explorer import Exhibit, explore
from nearsight.report.inputs import ModelHeads
from nearsight.report.page.models import page_html
from nearsight.report.page.results import study_page_html

pytestmark = pytest.mark.browser

HOSTILE = {
    "script": "<script>alert('1')</script>",
    "quotes": "\"><img src=x onerror=alert(1)> ' & &amp; ]]> --> ${data}",
    "long": "n" * 250 + " " + "m" * 250,
    "right to left": "نموذج \u202eמקומי",
}
COPIED = "() => { window.copied = []; navigator.clipboard.writeText = async (text) => { window.copied.push(text); }; }"


@pytest.fixture(scope="module")
def pair(make_heads):
    return [make_heads("plain", lowest=0.2, seed=1), make_heads("cut", lowest=0.02, seed=2)]


@pytest.fixture(scope="module")
def html(pair):
    return page_html(title="Two models", models=pair, grid_size=(8, 8), command="nearsight demo")


def rows_of(table: Any) -> list[list[str]]:
    """The text of the rows that are shown."""
    shown = "[...table.tBodies[0].rows].filter((row) => row.offsetParent !== null)"
    found: list[list[str]] = table.evaluate(
        f"(table) => {shown}.map((row) => [...row.cells].map((cell) => cell.innerText.trim()))"
    )
    return found


def expected_rows(models) -> list[list[str]]:
    """The heads as their table shows them, the most local first."""
    found = [
        (
            row.mad,
            [model.label, str(row.layer), str(row.head)]
            + [f"{value:.4f}" for value in (row.mad, row.mad_std, row.entropy, row.entropy_std)],
        )
        for model in models
        for row in model.measured().itertuples()
    ]
    return [cells for _, cells in sorted(found, key=lambda pair: pair[0])]


def on_screen(drawing: Any, mad: float, entropy: float) -> tuple[float, float]:
    """Where a point of the plane is: two ticks of each axis say how numbers become pixels."""
    texts = drawing.locator("svg .role-axis-label text").all()
    ticks = []
    for text in texts:
        box = text.bounding_box()
        ticks.append(
            (float(text.text_content().replace("−", "-")), box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
        )
    lowest = max(y for _, _, y in ticks)
    along = [tick for tick in ticks if abs(tick[2] - lowest) < 3]
    up = [tick for tick in ticks if abs(tick[2] - lowest) >= 3]

    def place(value, ticks, axis):
        (a, *first), (b, *second) = min(ticks), max(ticks)
        return first[axis] + (value - a) / (b - a) * (second[axis] - first[axis])

    return place(mad, along, 0), place(entropy, up, 1)


def test_hovering_a_head_says_what_the_folder_says(visit, html, pair):
    visited = visit(html)
    drawing = visited.section("plane").locator(".drawing").first
    drawing.scroll_into_view_if_needed()
    row = pair[1].measured().sort_values("mad").iloc[0]
    x, y = on_screen(drawing, row["mad"], row["entropy"])
    visited.page.mouse.move(x - 30, y - 30)
    visited.page.mouse.move(x, y)
    card = visited.page.locator(".card")
    card.wait_for()
    told = card.inner_text()
    assert "cut" in told
    assert f"layer {row['layer']}, head {row['head']}" in told
    assert f"{row['mad']:.4f} ± {row['mad_std']:.4f}" in told
    assert f"{row['entropy']:.4f} ± {row['entropy_std']:.4f}" in told
    visited.page.keyboard.press("Escape")
    assert card.is_hidden()


def test_a_brush_selects_heads_in_the_table_and_in_all_charts(visit, html, pair):
    visited = visit(html)
    section = visited.section("plane")
    expected = expected_rows(pair)
    table = section.locator("table.heads")
    assert rows_of(table) == expected
    drawing = section.locator(".drawing").first
    drawing.scroll_into_view_if_needed()
    local = [row for row in expected if float(row[3]) < 0.15]
    assert 0 < len(local) < len(expected)
    low, high = on_screen(drawing, 0.005, 0.01), on_screen(drawing, 0.15, 0.99)
    # The lower edge of the plane is above entropy 0, so the drag begins inside it.
    visited.page.mouse.move(low[0], on_screen(drawing, 0, min(float(row[5]) for row in expected) - 0.02)[1])
    visited.page.mouse.down()
    visited.page.mouse.move(high[0], high[1], steps=4)
    visited.page.mouse.up()
    section.locator(".count", has_text=f"{len(local)} of {len(expected)} heads").wait_for()
    assert rows_of(table) == local
    dots = visited.section("profiles").locator("svg .mark-symbol.role-mark path")
    assert dots.count() == len(local)
    cells = visited.section("heatmaps").locator("svg .mark-rect.role-mark path").all()
    faded = [cell for cell in cells if float(cell.get_attribute("opacity") or 1) < 0.5]
    assert len(cells) - len(faded) == 2 * len(local)  # distance and entropy
    section.get_by_role("button", name="Clear selection").click()
    section.locator(".count", has_text=f"{len(expected)} of {len(expected)} heads").wait_for()


def test_typed_ranges_and_arrow_keys_do_what_the_pointer_does(visit, html, pair):
    visited = visit(html)
    section = visited.section("plane")
    section.get_by_label("largest distance").fill("0.15")
    section.get_by_label("largest distance").press("Enter")
    local = [row for row in expected_rows(pair) if float(row[3]) <= 0.15]
    section.locator(".count", has_text=f"{len(local)} of").wait_for()
    assert rows_of(section.locator("table.heads")) == local
    section.locator(".drawing").first.focus()
    visited.page.keyboard.press("ArrowRight")
    told = visited.page.locator(".card").inner_text()
    assert any(f"{row[3]} ± {row[4]}" in told for row in local)


def test_hiding_a_model_hides_it_everywhere(visit, html, pair):
    visited = visit(html)
    section = visited.section("plane")
    button = section.locator(".legend button", has_text="plain")
    button.focus()
    visited.page.keyboard.press("Enter")
    section.locator(".count", has_text="12 of 24 heads").wait_for()
    assert {row[0] for row in rows_of(section.locator("table.heads"))} == {"cut"}
    pressed = [
        each.get_attribute("aria-pressed") for each in visited.page.locator(".legend button", has_text="plain").all()
    ]
    assert len(pressed) == 4
    assert set(pressed) == {"false"}
    assert visited.section("heatmaps").locator("h3:visible").all_inner_texts() == ["cut"]


def test_tables_sort_and_copy(visit, html, pair):
    visited = visit(html)
    visited.page.evaluate(COPIED)
    table = visited.page.locator("#layers table")
    heading = table.get_by_role("button", name="min MAD").first
    heading.focus()
    for direction, is_descending in (("ascending", False), ("descending", True)):
        visited.page.keyboard.press("Enter")
        assert table.locator("[aria-sort]").get_attribute("aria-sort") == direction
        numbers = [float(row[1]) for row in rows_of(table)]
        assert numbers == sorted(numbers, reverse=is_descending)
    visited.page.locator("#layers .copy").click()
    visited.page.locator("#layers .copy", has_text="Copied").wait_for()
    head, *rows = csv.reader(io.StringIO(visited.page.evaluate("window.copied[0]")))
    assert head[:2] == ["layer", "plain: min MAD"]
    assert rows == rows_of(table)
    expected = pair[0].measured().groupby("layer")["mad"].min()
    assert {row[0]: row[1] for row in rows} == {str(layer): f"{mad:.3f}" for layer, mad in expected.items()}
    visited.page.locator("#plane .copy").click()
    visited.page.locator("#plane .copy", has_text="Copied").wait_for()
    assert list(csv.reader(io.StringIO(visited.page.evaluate("window.copied[1]"))))[1:] == expected_rows(pair)


def test_the_slider_shows_the_heads_of_each_epoch(visit, make_heads):
    models = [make_heads("a", seed=1, epochs=(1, 2, 4)), make_heads("b", seed=2, epochs=(1, 2, 4))]
    visited = visit(page_html(title="courses", models=models))
    section = visited.section("training")
    slider = section.get_by_label("Epoch", exact=True)
    for key, epoch in (("End", 4), ("Home", 1), ("ArrowRight", 2)):
        slider.press(key)
        assert section.locator("output").inner_text() == f"after epoch {epoch}"
        for row, model in zip(rows_of(section.locator("table.course")), models, strict=True):
            heads = model.heads[model.heads["epoch"] == epoch].sort_values("mad").iloc[0]
            accuracy = model.history.set_index("epoch").loc[epoch, "val_acc"]
            place = f"layer {heads['layer']}, head {heads['head']}"
            assert row == [model.label, "–", f"{100 * round(accuracy, 4):.2f} %", f"{heads['mad']:.4f}", place]


def test_light_dark_and_without_scripts(visit, html):
    dark = visit(html, color_scheme="dark")
    background = "getComputedStyle(document.body).backgroundColor"
    first = dark.page.evaluate(background)
    dark.page.get_by_role("button", name="Show the page light").click()
    assert dark.page.evaluate(background) == "rgb(255, 255, 255)" != first
    plain = visit(html, java_script_enabled=False)
    assert plain.page.locator("#finding .wide svg").is_visible()
    assert plain.page.locator("#plane .still svg").is_visible()
    assert plain.page.locator("#models table").is_visible()
    assert plain.page.locator(".chart:visible").count() == 0


def test_a_phone_scrolls_only_down_and_paper_gets_the_still_figures(visit, html):
    phone = visit(html, viewport={"width": 360, "height": 800})
    (finding,) = phone.page.locator("#finding svg:visible").all()
    box = finding.bounding_box()
    assert box["x"] >= 0
    assert box["x"] + box["width"] <= 360  # whole, and not cut off at the edge
    for name in ("profiles", "plane", "heatmaps", "training"):
        phone.section(name)
    assert phone.page.evaluate("document.documentElement.scrollWidth") <= 360
    phone.page.emulate_media(media="print")
    assert phone.page.locator("#finding svg:visible").count() == 1
    assert phone.page.locator("#configuration").is_hidden()
    assert phone.page.locator("#plane .still svg").is_visible()
    assert phone.page.locator("#plane .chart").is_hidden()


def test_hostile_names_are_text_in_charts_and_cards(visit, make_heads):
    models = [
        replace(make_heads(label, seed=place), provenance={label: label})
        for place, label in enumerate(HOSTILE.values())
    ]
    visited = visit(page_html(title=HOSTILE["script"], models=models, command=HOSTILE["quotes"]))
    dialogs: list[str] = []
    visited.page.on("dialog", lambda dialog: (dialogs.append(dialog.message), dialog.dismiss()))
    for name in ("profiles", "plane", "heatmaps", "training"):
        visited.section(name)
    visited.page.locator("#plane .drawing").first.focus()
    visited.page.keyboard.press("ArrowRight")
    assert visited.page.locator(".card b").inner_text() == HOSTILE["script"]
    names = visited.page.locator("#plane .legend button").all_inner_texts()
    assert names[:2] == [HOSTILE["script"], HOSTILE["quotes"]]
    assert "\u202e" not in "".join(names)
    assert visited.page.locator("img, #plane script, main script").count() == 0
    assert dialogs == []
    assert visited.page.evaluate("document.documentElement.scrollWidth") <= 1200


def test_a_study_shows_its_runs_effects_and_hostile_levels_and_filters_them(visit, make_results):
    bad = HOSTILE["script"]
    levels = {"Baseline": ("off", "off"), "+CutMix": ("p=0.5", "off"), bad: ("off", "on"), "Modern": ("p=0.5", "on")}
    results = make_results({name: {"cutmix": a, bad: b} for name, (a, b) in levels.items()}, seeds=3)
    visited = visit(study_page_html(results, with_stills=False))
    runs = rows_of(visited.page.locator("#runs table"))
    assert {row[0] for row in runs} == set(levels)
    for row, run in zip(runs, results.runs.itertuples(), strict=True):
        assert row[5:7] == [f"{100 * run.test_acc:.2f}", f"{run.min_mad:.4f}"]
    visited.page.locator("#runs").get_by_role("searchbox").fill("modern p=0.5")
    assert [row[0] for row in rows_of(visited.page.locator("#runs table"))] == ["Modern"] * 3
    assert visited.page.locator("#runs .count").inner_text() == "3 of 12 rows"
    assert visited.page.locator(".headline").inner_text().startswith("With CutMix the most local head")
    effects = visited.section("effects")
    assert effects.locator("svg").count() == 3
    assert {"CutMix", f"CutMix × {bad}"} <= set(effects.locator("svg").first.locator("text").all_text_contents())
    plane = visited.section("plane")
    plane.get_by_label("Colour by").select_option(bad)
    assert bad in plane.locator(".drawing svg").first.locator(".role-legend text").all_text_contents()


def test_a_head_of_the_plane_opens_in_the_explorer(visit):
    torch.manual_seed(0)
    shape = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 2, "num_classes": 3}
    model = timm.create_model("vit_tiny_patch16_224", **shape)
    images = torch.randn(2, 3, 32, 32)
    pictures = np.random.default_rng(0).integers(0, 256, (2, 32, 32, 3), dtype=np.uint8)
    heads = ModelHeads(label=HOSTILE["quotes"], heads=nearsight.measure(model, images).to_frame().assign(epoch=0))
    explorer = explore([Exhibit(heads=heads, model=model, images_BCHW=images, pictures_BHWC=pictures)])
    visited = visit(page_html(title="explored", models=[heads], explorer=explorer))
    visited.section("plane").locator(".drawing").first.focus()
    for _ in range(4):
        visited.page.keyboard.press("ArrowRight")
    assert "layer 1, head 1" in visited.page.locator(".card").inner_text()
    assert visited.page.locator(".card canvas").is_visible()
    visited.page.keyboard.press("Enter")
    visited.page.locator("#explorer").get_by_text("Layer 1, head 1", exact=True).first.wait_for()


def test_five_hundred_runs_open_at_once_in_five_megabytes(visit, make_results):
    conditions = {f"condition {number}": {"size": f"level {number}"} for number in range(25)}
    results = make_results(conditions, seeds=20, shape=(8, 8), num_epochs=50)
    html = study_page_html(results, with_stills=False)
    assert len(html.encode()) < 5_000_000
    visited = visit("<!DOCTYPE html><title>empty</title>")
    devtools = visited.page.context.new_cdp_session(visited.page)
    devtools.send("Performance.enable", {"timeDomain": "threadTicks"})
    path = visited.page.url.removeprefix("file://")
    with open(path, "w", encoding="utf-8") as file:
        file.write(html)
    visited.page.reload()
    told = {each["name"]: each["value"] for each in devtools.send("Performance.getMetrics")["metrics"]}
    # Time of the page's own thread, which other processes at work on this machine do not lengthen.
    assert told["TaskDuration"] < 2.0
    section = visited.section("plane")
    assert section.locator(".drawing canvas").is_visible()
    assert "32,000 of 32,000 heads" in section.locator(".count").inner_text()
    visited.page.wait_for_timeout(500)  # what is above has been drawn too, and moves nothing any more
    box = section.locator(".drawing canvas").bounding_box()
    visited.page.mouse.move(box["x"] + 0.2 * box["width"], box["y"] + 0.2 * box["height"])
    visited.page.mouse.down()
    visited.page.mouse.move(box["x"] + 0.6 * box["width"], box["y"] + 0.8 * box["height"], steps=3)
    visited.page.mouse.up()
    section.locator(".count", has_not_text="32,000 of").wait_for()
    low, high = (float(section.get_by_label(f"{end} distance").input_value()) for end in ("least", "largest"))
    rows = rows_of(section.locator("table.heads"))
    assert len(rows) == 200
    assert all(low - 6e-4 <= float(row[4]) <= high + 6e-4 for row in rows)
    visited.requests.pop()  # of the reload


def test_every_chart_is_drawn_without_scrolling_to_it(visit, html):
    page = visit(html).page
    page.locator(".drawing:not(:has(svg, canvas))").first.wait_for(state="detached")
    assert page.evaluate("scrollY") == 0
    boxes = page.locator(".drawing").all()
    assert len(boxes) > 5
    assert all(box.bounding_box()["height"] > 50 for box in boxes)


def test_the_explorer_follows_the_finding(visit, make_heads):
    class Explorer:
        def html(self) -> str:
            return "<p>explorer</p>"

    page = visit(page_html(title="explored", models=[make_heads("a")], explorer=Explorer())).page
    assert page.locator("main > section").first.get_attribute("id") == "explorer"
