"""The page as a browser would read it."""

import base64
import hashlib
import json
import re
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser
from importlib import resources
from pathlib import Path

import pandas as pd
import pytest

from nearsight.errors import InputError
from nearsight.report.figures.style import GRID, INK, MUTED, PAPER
from nearsight.report.page.document import LIBRARIES, PAPERS
from nearsight.report.page.models import write_page
from nearsight.report.page.tables import flattened
from nearsight.report.reading import compare, describe, layer_table

VOID = {"meta", "link", "br", "hr", "img", "input", "base"}
REFERENCES = {"src", "href", "srcset", "action", "data", "poster", "background", "formaction", "xlink:href", "ping"}


class Page(HTMLParser):
    """Tags with their attributes, and the text by the tags around it."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.open, self.texts, self.styles, self.scripts = [], [], [], [], []
        self.feed(text)
        self.close()
        assert self.open == [], f"never closed: {self.open}"

    def handle_starttag(self, tag, attributes):
        names = [name for name, _ in attributes]
        assert len(names) == len(set(names)), f"{tag} has an attribute twice"
        self.tags.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] == "script":
            self.scripts.append((self.named("script")[-1], data))
        else:
            (self.styles if self.open and self.open[-1] == "style" else self.texts).append((tuple(self.open), data))

    @property
    def text(self):
        return " ".join("".join(data for _, data in self.texts).split())

    def attributes(self, name):
        return [attributes[name] for _, attributes in self.tags if name in attributes]

    def named(self, tag):
        return [attributes for found, attributes in self.tags if found == tag]


HOSTILE = {
    "script": "<script>alert('1')</script>",
    "quotes": "\"><img src=x onerror=alert(1)> ' & &amp; ]]> --> $title ${headline}",
    "long": "n" * 250 + " " + "m" * 250,
    "right to left": "نموذج \u202eמקומי",
}


def read(path, **options):
    write_page(path, **options)
    text = path.read_text(encoding="utf-8")
    return text, Page(text)


@pytest.fixture(scope="module")
def pair(make_model):
    config = {"model": {"depth": 6, "name": "compact_vit"}, "seed": 0}
    return [
        replace(
            make_model("plain", lowest=0.3, seed=1),
            test_accuracy=0.4853,
            config={**config, "cutmix": 0.0},
            provenance={"commit": "abc123", "versions": {"torch": "2.15"}},
        ),
        replace(
            make_model("cut", lowest=0.02, seed=2),
            test_accuracy=0.6338,
            config={**config, "cutmix": 0.5},
            provenance={"commit": "abc123", "versions": {"torch": "2.15"}},
        ),
    ]


@pytest.fixture(scope="module")
def page(pair, tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "report.html"
    return read(path, title="Does it help?", models=pair, grid_size=(8, 8), command="nearsight demo --seed 0")


@pytest.fixture(scope="module")
def hostile_page(tmp_path_factory, make_model):
    models = [
        replace(
            make_model(label, seed=index),
            config={label: {"nested": label}},
            provenance={"machine": label},
        )
        for index, label in enumerate(HOSTILE.values())
    ]
    path = tmp_path_factory.mktemp("hostile") / "report.html"
    return read(path, title=HOSTILE["quotes"], models=models, command=HOSTILE["script"])


@pytest.mark.parametrize("kind", ["page", "hostile_page"])
def test_the_page_asks_nothing_of_the_network(request, kind):
    text, page = request.getfixturevalue(kind)
    tags = Counter(tag for tag, _ in page.tags)
    assert not tags.keys() & {"link", "iframe", "object", "embed", "img", "base", "form", "audio", "video"}
    references = [value for name in REFERENCES for value in page.attributes(name)]
    assert references
    assert all(value.startswith(("#", "data:image/png;base64,")) for value in references)
    styles = "".join(data for _, data in page.styles) + "".join(page.attributes("style"))
    assert "@import" not in styles
    assert all(target.startswith("#") for target in re.findall(r"url\(([^)]*)\)", styles))
    assert not [name for _, attributes in page.tags for name in attributes if name.startswith("on")]
    (policy,) = (meta["content"] for meta in page.named("meta") if meta.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none'")
    assert "unsafe-eval" not in policy
    assert "'unsafe-inline'" not in policy.partition("script-src")[2].partition(";")[0]
    for _, script in page.scripts:
        text = text.replace(script, "")
    assert "http://" not in text
    assert "https://" not in text


@pytest.mark.parametrize("kind", ["page", "hostile_page"])
def test_only_our_own_scripts_may_run(request, kind):
    _, page = request.getfixturevalue(kind)
    (policy,) = (meta["content"] for meta in page.named("meta") if meta.get("http-equiv") == "Content-Security-Policy")
    allowed = re.findall(r"'sha256-([^']+)'", policy.partition("script-src")[2].partition(";")[0])
    run = [data for attributes, data in page.scripts if not attributes]
    assert allowed == [base64.b64encode(hashlib.sha256(data.encode()).digest()).decode() for data in run]
    assert [attributes for attributes, _ in page.scripts if attributes] == [
        {"type": "application/json", "id": "page-data"}
    ]


def test_vendored_files_are_those_that_were_looked_at():
    folder = resources.files("nearsight.report.page").joinpath("vendor")
    listed = dict(
        re.findall(r"^(\S+\.js) .* ([0-9a-f]{64})$", folder.joinpath("VENDORED.txt").read_text(), re.MULTILINE)
    )
    assert set(listed) == {file.name for file in folder.iterdir() if file.name.endswith(".js")} == set(LIBRARIES)
    for name, expected in listed.items():
        assert hashlib.sha256(folder.joinpath(name).read_bytes()).hexdigest() == expected


def test_charts_get_every_head_with_the_digits_that_are_printed(page, pair):
    _, parsed = page
    (data,) = (json.loads(text) for attributes, text in parsed.scripts if attributes)
    assert [group["label"] for group in data["groups"]] == [model.label for model in pair]
    frame = pd.DataFrame(data["heads"])
    for place, model in enumerate(pair):
        here, rows = frame[frame["run"] == place], model.measured()
        assert here["layer"].tolist() == rows["layer"].tolist()
        for name in ("mad", "mad_std", "entropy", "entropy_std"):
            assert [f"{value:.4f}" for value in here[name]] == [f"{value:.4f}" for value in rows[name]]
    epochs = pd.DataFrame(data["history"])
    assert len(epochs) == sum(len(model.history) for model in pair)
    assert data["course"] is None


def test_what_to_cite_is_what_the_repository_says():
    citation = (Path(__file__).parents[2] / "CITATION.cff").read_text(encoding="utf-8")
    named = re.findall(r"value: (arXiv:\S+)", citation)
    assert named == list(PAPERS)


@pytest.mark.parametrize("kind", ["page", "hostile_page"])
def test_ids_are_unique_and_every_reference_has_its_target(request, kind):
    _, page = request.getfixturevalue(kind)
    ids = page.attributes("id")
    assert [name for name, count in Counter(ids).items() if count > 1] == []
    values = [value for _, attributes in page.tags for value in attributes.values() if value]
    targets = [value[1:] for value in page.attributes("href") if value.startswith("#")]
    targets += [target for value in values for target in re.findall(r"url\(#([^)]*)\)", value)]
    targets += page.attributes("aria-labelledby")
    assert len(targets) > 20
    assert set(targets) <= set(ids)


def test_hostile_names_are_text(hostile_page):
    text, page = hostile_page
    assert text.count("<script") == text.count("</script>") == len(page.scripts)
    for _, script in page.scripts:
        text = text.replace(script, "")
    assert "<img" not in text
    (data,) = (json.loads(text) for attributes, text in page.scripts if attributes)
    assert [group["label"] for group in data["groups"]] == list(HOSTILE.values())
    assert all(len(group["short"]) <= 60 and "\u202e" not in group["short"] for group in data["groups"])
    names = [data for tags, data in page.texts if "bdi" in tags]
    assert HOSTILE["script"] in names
    assert HOSTILE["quotes"] in names
    assert HOSTILE["long"] in names
    assert "نموذج מקומי" in names  # without the character that would turn what follows
    assert (("html", "body", "div", "main", "section", "pre", "code"), HOSTILE["script"]) in page.texts
    (title,) = (data for tags, data in page.texts if tags[-1:] == ("title",))
    assert title == HOSTILE["quotes"]


def test_names_in_another_direction_are_isolated_wherever_they_stand(hostile_page):
    _, page = hostile_page
    standing = [tags for tags, data in page.texts if "مو" in data and not {"svg", "pre"} & set(tags)]
    assert {"th", "td", "summary"} <= {tag for tags in standing for tag in tags}
    assert all("bdi" in tags for tags in standing)


def test_the_finding_comes_first_with_its_numbers_and_its_figure(page, pair):
    _, parsed = page
    reading = compare(*pair)
    assert reading.clear
    headings = [
        data for tags, data in parsed.texts if tags[-1:] in (("h1",), ("h2",)) or tags[-2:-1] in (("h1",), ("h2",))
    ]
    assert headings[0] == "Does it help?"
    assert "".join(headings[1:6]) == reading.headline
    order = [parsed.text.index(part) for part in (reading.headline, *reading.sentences[1:], "Layer by layer")]
    assert order == sorted(order)
    first = next(attributes for tag, attributes in parsed.tags if tag == "svg")
    assert reading.most_local_head.a.in_words() in first["aria-label"]


def test_figures_speak_and_can_be_reached_by_keyboard(page):
    _, parsed = page
    figures = parsed.named("svg")
    assert len(figures) == 6  # of which the first is the second once more, for phones
    assert all(figure["role"] == "img" and len(figure["aria-label"]) > 40 for figure in figures)
    scrolling = [attributes for _, attributes in parsed.tags if attributes.get("class") in ("scroll", "scroll wide")]
    assert len(scrolling) == 5 + len(parsed.named("table"))
    assert all(attributes["tabindex"] == "0" and attributes["aria-label"] for attributes in scrolling)
    assert parsed.named("html") == [{"lang": "en"}]
    assert len(parsed.named("h1")) == 1


def test_every_section_is_in_the_navigation(page):
    _, parsed = page
    sections = [f"#{section['id']}" for section in parsed.named("section")]
    links = [link["href"] for link in parsed.named("a") if link["href"] != "#finding"]
    assert sections == links
    assert " ".join(sections) == (
        "#models #layers #profiles #plane #heatmaps #training #terms #differences #provenance #configuration "
        "#again #cite"
    )


def test_tables_hold_the_numbers(page, pair):
    _, parsed = page
    cells = [data for tags, data in parsed.texts if "td" in tags]
    numbers = layer_table(pair)
    for value in numbers.to_numpy().ravel():
        assert f"{value:.3f}" in cells
    assert {"48.53 %", "63.38 %", "6 × 4", "64"} <= set(cells)


def test_configuration_provenance_and_command_are_complete(page):
    _, parsed = page
    rows = [data for tags, data in parsed.texts if tags[-3:] == ("tr", "th", "bdi")]
    assert "cutmix" in rows
    assert "versions.torch" in rows
    assert "model.depth" not in rows  # the same in both models, so only in the full configuration
    code = [data for tags, data in parsed.texts if tags[-1:] == ("code",)]
    assert '"depth": 6' in code[0]
    assert code[-1] == "nearsight demo --seed 0"


def test_figures_follow_the_theme(page):
    _, parsed = page
    styles = [
        attributes["style"]
        for tag, attributes in parsed.tags
        if tag in ("path", "text", "g", "use") and "style" in attributes
    ]
    assert any("var(--ink)" in style for style in styles)
    assert any("var(--grid)" in style for style in styles)
    assert not [style for style in styles for colour in (INK, MUTED, GRID, PAPER) if colour in style]
    (sheet,) = parsed.styles  # one of a figure's own would apply to the whole page
    assert "prefers-color-scheme: dark" in sheet[1]
    assert "@media print" in sheet[1]


def test_missing_heads_are_hatched_in_the_page_too(tmp_path, make_model):
    model = make_model("gaps")
    model = replace(model, heads=model.heads[model.heads.index != 5])
    _, parsed = read(tmp_path / "report.html", title="gaps", models=[model])
    (pattern,) = (attributes["id"] for attributes in parsed.named("pattern"))
    assert pattern.startswith("figure-heatmaps-")
    # On a background of its own: thin lines on the dark page's colour would look like a low number.
    after = parsed.tags[[attributes.get("id") for _, attributes in parsed.tags].index(pattern) + 1]
    assert (after[0], after[1]["fill"]) == ("rect", "var(--grid)")
    filled = [attributes for attributes in parsed.named("path") if f"url(#{pattern})" in attributes.get("style", "")]
    assert len(filled) == 2  # the panels of distance and entropy


def test_one_model_without_a_past_has_a_shorter_page(tmp_path, make_model):
    model = replace(make_model("alone"), history=None)
    _, parsed = read(tmp_path / "report.html", title="alone", models=[model])
    assert describe(model)[0] in parsed.text
    assert [section["id"] for section in parsed.named("section")] == [
        "models",
        "layers",
        "profiles",
        "plane",
        "heatmaps",
        "terms",
        "cite",
    ]


def test_the_clearest_comparison_leads_and_the_rest_can_be_opened(tmp_path, make_model):
    first, same, far = (
        make_model(label, num_layers=2, num_heads=2, lowest=lowest)
        for label, lowest in (("first", 0.1), ("same", 0.1), ("far", 0.6))
    )
    _, parsed = read(tmp_path / "report.html", title="three", models=[first, same, far])
    assert parsed.text.index(compare(first, far).headline) < parsed.text.index(compare(first, same).headline)
    summaries = "".join(data for tags, data in parsed.texts if "summary" in tags)
    assert compare(first, same).headline in summaries
    chosen = [compare(same, first)]
    _, parsed = read(tmp_path / "report.html", title="three", models=[first, same, far], readings=chosen)
    assert chosen[0].headline in parsed.text
    assert compare(first, far).headline not in parsed.text


def test_the_same_inputs_give_the_same_page(tmp_path, pair, page):
    text, _ = page
    again, _ = read(
        tmp_path / "again.html", title="Does it help?", models=pair, grid_size=(8, 8), command="nearsight demo --seed 0"
    )
    assert again == text
    assert len(text) < 1_500_000


def test_nothing_is_written_when_the_inputs_do_not_fit(tmp_path, pair):
    with pytest.raises(InputError, match="both called"):
        write_page(tmp_path / "report.html", title="twins", models=[pair[0], pair[0]])
    assert list(tmp_path.iterdir()) == []


def test_nested_records_become_dotted_names():
    record = {"a": {"b": {"c": 1}, "d": [1, {"e": 2}]}, "f": "text", "g": {}, "h": None, "i": True}
    assert flattened(record) == {"a.b.c": "1", "a.d": '[1, {"e": 2}]', "f": "text", "g": "{}", "h": "null", "i": "true"}
