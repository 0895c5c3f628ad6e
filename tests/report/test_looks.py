"""One look per condition: by its name, whatever stands beside it, in figures, charts and chips alike."""

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.colors import to_rgb

from nearsight.papers.protocol.numbers import BASELINE, MODERN
from nearsight.report import ModelHeads
from nearsight.report.conditions import level_looks
from nearsight.report.figures.looks import BASE, PALETTE, level_markers, looks
from nearsight.report.figures.models import locality_spreads, mad_profiles
from nearsight.report.page import charts, tables

ABLATION = ["Baseline", "+CutMix", "+AutoAugment", "+LabelSmoothing", "−CutMix", "−AutoAugment", "−LabelSmoothing"]
ABLATION.append("Modern")


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("CutMix", "+CutMix"),
        ("CutMix", "with CutMix"),
        ("CutMix", "+CutMix p=0.5"),
        ("CutMix", "CutMix: p=0.5"),
        ("Modern", "compact_vit.modern_cifar100"),
        ("Baseline", "runs/baseline"),
        ("Baseline", "ViT"),
        ("Baseline", "None of these"),
        ("Baseline", "without CutMix"),
        ("LocAt", "locat_compact_vit.modern_cifar100"),
        ("+GAug", "ViT + GAug"),
        ("+LabelSmoothing", "label smoothing: 0.1"),
        ("CutMix + LocAt", "CutMix and LocAt"),
    ],
)
def test_names_of_the_same_thing_look_the_same(one: str, other: str) -> None:
    alone, beside = looks([one])[one], looks(["something else", other, "a third"])[other]
    assert alone == beside


def test_known_conditions_keep_their_look_whatever_stands_beside_them() -> None:
    whole = looks(ABLATION)
    for pair in combinations(ABLATION, 2):
        assert looks(pair) == {label: whole[label] for label in pair}
        assert looks(["first", *pair, "last"])[pair[0]] == whole[pair[0]]
    assert len({style.colour for style in whole.values()}) == len({str(style) for style in whole.values()}) == 8
    assert whole["Baseline"].colour != whole["+CutMix"].colour != whole["Modern"].colour


def test_colours_can_be_told_apart_on_white_and_on_dark_paper() -> None:
    def luminance(colour: tuple[float, float, float]) -> float:
        channels = np.asarray(colour)
        linear = np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)
        return float(linear @ (0.2126, 0.7152, 0.0722))

    labels = [*ABLATION, "LocAt", "+GAug", "+PRR", "CutMix + LocAt", "+ColorJitter", "CutMix p=1"]
    dark_paper = luminance(to_rgb("#14171b"))
    for style in looks(labels).values():
        shown_in_dark = tuple(0.75 * channel + 0.25 for channel in to_rgb(style.colour))  # as charts.js does
        assert 1.05 / (luminance(to_rgb(style.colour)) + 0.05) > 2.0
        assert (luminance(shown_in_dark) + 0.05) / (dark_paper + 0.05) > 3.0


@given(st.lists(st.text(max_size=20), min_size=1, max_size=9, unique=True))
def test_any_names_are_told_apart(labels: list[str]) -> None:
    found = looks(labels)
    assert list(found) == labels
    assert len({(style.colour, str(style.dash), style.marker) for style in found.values()}) == len(labels)


def test_of_many_conditions_those_with_cutmix_share_its_colour() -> None:
    settings = ["lr 0.0003", "init pytorch", "lr 0.0003+init pytorch", "width 96+depth 4"]
    labels = ["Baseline", "+CutMix p=0.5", "+CutMix p=1"]
    labels += [name if "+" in name else f"+{name}" for name in settings]
    labels += [f"{name}+CutMix {dose}" for name in settings for dose in ("p=0.5", "p=1")]
    found = looks(labels)
    for label in labels:
        expected = found["+CutMix p=1"] if "p=1" in label else found["+CutMix p=0.5"] if "p=0.5" in label else BASE
        assert found[label].colour == expected.colour
    assert len({found[dose].colour for dose in labels[:3]}) == 3


def test_levels_look_like_the_conditions_they_make() -> None:
    found = level_looks("cutmix", ("off", "p=0.5", "p=1"))
    assert found == {"off": BASE, **{dose: looks([f"+CutMix {dose}"])[f"+CutMix {dose}"] for dose in ("p=0.5", "p=1")}}
    assert level_looks("cutmix", ("off", "on"))["on"] == looks(["+CutMix"])["+CutMix"]
    rates = level_looks("lr", ("0.001", "0.0003"))
    assert [style.colour for style in rates.values()] == list(PALETTE[:2])
    assert level_markers(("off", "on")) == {"on": "o", "off": "^"}


def test_figures_charts_and_chips_have_the_same_colours(make_model) -> None:
    models: list[ModelHeads] = [make_model(MODERN), make_model(BASELINE, seed=1), make_model("other", seed=2)]
    expected = [style.colour for style in looks([MODERN, BASELINE, "other"]).values()]
    assert [group["colour"] for group in charts.of_models(models, None)["groups"]] == expected
    assert [name.split("--colour: ")[1][:7] for name in tables.names_html(models)] == expected
    marks = {artist.get_gid(): artist for axes in locality_spreads(models).axes for artist in axes.lines}
    assert [marks[f"head-mean-model{place}"].get_color() for place in range(3)] == expected
    lines = mad_profiles(models[:2]).axes[0].lines
    # Of any layer, the channel order of the colour stays: blue is bluest, grey has none.
    last = {line.get_gid(): to_rgb(line.get_color()) for line in lines}
    blue, grey = last["model0-layer5"], last["model1-layer5"]
    assert blue[2] == max(blue) > min(blue)
    assert max(grey) - min(grey) < 0.01
