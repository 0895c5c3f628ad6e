"""What an atlas says of its models, on tables made by hand; and that each thing is made once."""

import re
from html import unescape
from pathlib import Path

import numpy as np
import pytest

from nearsight.lens import HeadTable
from nearsight.lens.perimage import PerImage
from nearsight.metrics import Moments
from nearsight.report import atlas_page
from nearsight.report.atlas import AtlasModel, Kind
from nearsight.report.atlas_page import AtlasReport
from nearsight.report.inputs import ModelHeads


def model(label: str, lowest: float, *, kind: Kind = "trained", change: float = 0.0, own: float = 0.1) -> AtlasModel:
    """Two layers of three heads on 30 pictures; the last head moves by `change` without sinks."""
    draw = np.random.default_rng(0)
    mad = np.array([[lowest, 0.3, 0.35], [0.38, 0.39, 0.4]]) + draw.normal(0, 0.002, (30, 2, 3))
    without = mad.copy()
    without[:, 1, 2] += change + draw.normal(0, 0.01, 30) * bool(change)
    kept = PerImage.of(np.arange(30, dtype=np.uint64), mad, mad, {"mad_without_sinks": without})
    extra = {
        "mad_without_sinks": without.mean(0),
        "share_self": np.full((2, 3), own),
        "outlier_share": np.array([0.0, 0.02]),
        "grid_size": np.full((2, 2), 8.0),
        "cell_size": np.full((2, 2), 4.0),
    }
    table = HeadTable(("a", "b"), Moments.of(mad), Moments.of(mad), extra=extra, per_image=kept)
    beside = f"{label}, random weights" if kind == "trained" else None
    heads = ModelHeads(
        label=label, heads=table.to_frame().assign(epoch=0), per_image=kept, config={"digest": "d" * 64, "model": label}
    )
    return AtlasModel(heads=heads, table=table, kind=kind, beside=beside)


MODELS = [
    model("one", 0.1, change=-0.1),
    model("two", 0.05, own=0.9),
    model("one, random weights", 0.29, kind="random"),
    model("two, random weights", 0.05, kind="random"),
]
SAID = {"command": "nearsight atlas mine.toml", "title": "Atlas: mine", "about": "Two & two"}


def test_the_headline_is_short_and_the_sentences_say_the_rest() -> None:
    report = AtlasReport.of(MODELS, {"three": "it is not there"}, SAID)
    assert report.headline == (
        "Mean attention distance of the most local heads: 0.050 to 0.100 in 2 models, 0.050 to 0.290 with random "
        "weights."
    )
    local, own, depth, sinks = report.sentences
    assert local.startswith("The lowest is that of “two”, the highest that of “one”.")
    assert "In 1 of 2 models it is lower than with random weights" in local
    assert "in 1 of 2 models, “two” (layer 0, head 0: 90 %)." in own
    assert own.endswith("The most that a head pays to it in the others: “one” 10 %.")
    assert depth.endswith("in 2 of 2 models.")
    assert re.search(r": in “one” the distance of layer 1, head 2 changes by −0\.\d{3} ± 0\.00\d, that of the", sinks)
    assert "most local head by 0.000 ± 0.000, and up to 2 % of the patches are outliers by the norm" in sinks
    assert sinks.endswith("token. In the others no head changes by more than 0.000.")
    alone = AtlasReport.of([MODELS[0]], {}, SAID)
    assert alone.headline == "Mean attention distance of the most local head of “one”: 0.100."
    quiet = AtlasReport.of([MODELS[1]], {}, SAID).sentences[-1]
    assert quiet.endswith("ten times the mean: no head changes by more than 0.000.")


def test_figures_and_sentences_are_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    for name in ("depth_figure", "strips_figure", "sentences", "headline", "overview"):
        make = getattr(atlas_page, name)
        monkeypatch.setattr(atlas_page, name, lambda *given, make=make, name=name: made.append(name) or make(*given))
    report = AtlasReport.of(MODELS, {}, SAID)
    files = report.write(tmp_path)
    assert report.as_json(files)["sentences"][0] == report.headline
    assert report.headline in report.as_text(files)
    assert sorted(made) == ["depth_figure", "headline", "overview", "sentences", "strips_figure"]


def test_no_line_of_the_page_ends_within_a_number() -> None:
    page = AtlasReport.of(MODELS, {}, SAID).page().html()
    text = unescape(re.sub(r"<(script|style|svg)\b.*?</\1>|<[^>]+>", "", page, flags=re.DOTALL))
    assert "90\N{NO-BREAK SPACE}%" in text
    assert not re.search(r"\d [%±]|± \d", text.split("How to read this")[0].split("Atlas: mine")[-1])
    assert "Two & two" in text
