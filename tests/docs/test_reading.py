"""The numbers of docs/reading.md are what the library computes."""

import importlib.util
import math
import re
from pathlib import Path
from types import ModuleType

import numpy as np
import pandas as pd
import pytest
import torch
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD

from nearsight import HeadTable, create_model, measure
from nearsight.data import load_dataset
from nearsight.lens.kinds import Kinds
from nearsight.metrics import (
    attention_distance,
    edge_attention_distance,
    grid_distances,
    least_share_on_itself,
    next_patch_distance,
    own_patch_head,
    uniform_attention_distance,
)
from nearsight.models import zoo

DOCS = Path(__file__).parents[2] / "docs"
TEXT = re.sub(r"\s+", " ", (DOCS / "reading.md").read_text(encoding="utf-8"))  # lines may break anywhere
LINES = (DOCS / "reading.md").read_text(encoding="utf-8").splitlines()
GRID = (8, 8)


def rows_of(first_cell: str) -> list[list[str]]:
    """The cells of the tables' rows whose first cell matches."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in LINES if line.startswith("| ")]
    return [row for row in rows if re.fullmatch(first_cell, row[0])]


def test_uniform_attention_on_common_grids() -> None:
    rows = rows_of(r"\d+×\d+")
    assert len(rows) == 6
    for grid, _, *told in rows:
        side = int(grid.partition("×")[0])
        distances = grid_distances((side, side))
        near = (distances * math.hypot(side - 1, side - 1) < 1.5).double()
        around = (near / near.sum(1, keepdim=True) * distances).sum(1).mean()
        from_corner, from_centre = distances[0].mean(), distances[side // 2 * side + side // 2].mean()
        uniform, next_one = uniform_attention_distance((side, side)), next_patch_distance((side, side))
        assert told == [f"{value:.3f}" for value in (uniform, next_one, around, from_corner, from_centre)], grid


def test_the_shipped_models() -> None:
    rows = rows_of(r"`[\w.]+_cifar100`")
    assert [row[0].strip("`") for row in rows] == list(zoo.MODELS)
    for name, *told in rows:
        heads = pd.read_csv(zoo.folder(name.strip("`")) / "heads.csv")
        heads = heads[heads["epoch"] == heads["epoch"].max()]
        assert set(heads["num_images"]) == {5000}
        first, second, *_, last = sorted(heads["mad"])
        assert told == [f"{value:.3f}" for value in (first, second, heads["mad"].mean(), last)], name
        if "baseline" in name:
            farthest = heads.loc[heads["mad"].idxmax()]
            assert f"layer {farthest['layer']}, head {farthest['head']} is at {farthest['mad']:.3f}" in TEXT
            spread = float(heads["mad_std"].median())
            few, many = (1.96 * spread / math.sqrt(number) for number in (200, 5000))
            words = f"is {spread:.3f}, so 200 images give its mean to ± {few:.4f} (95 %), and 5,000 to ± {many:.4f}"
            assert words in TEXT
    runs = pd.read_csv(zoo.CARD.with_name("runs.csv"))
    smallest = [f"{value:.3f}" for value in runs.loc[runs["condition"] == "Modern"].sort_values("seed")["min_mad"]]
    assert f"seed are at {smallest[0]}, {smallest[1]} and {smallest[2]}." in TEXT


def test_random_weights_are_near_uniform() -> None:
    torch.manual_seed(0)
    table = measure(create_model("compact_vit"), torch.randn(8, 3, 32, 32))
    low, high, entropy = map(
        float, re.findall(r"between ([\d.]+) and ([\d.]+) and an entropy above ([\d.]+)\.", TEXT)[0]
    )
    assert table.mad.size == 64
    assert low < table.mad.min() < uniform_attention_distance(GRID) < table.mad.max() < high
    assert table.entropy.min() > entropy
    assert high - low < 0.005  # or it would say little


def test_own_patch_heads() -> None:
    least, evenly = least_share_on_itself(0.008, GRID), own_patch_head(0.008, GRID, leak="everywhere").share
    assert f"at least {least:.0%} of".replace("%", " %") in TEXT
    assert f"others evenly, {evenly:.0%}".replace("%", " %") in TEXT


def test_half_of_the_attention_on_cls() -> None:
    attention = torch.full((1, 65, 65), 0.5 / 64, dtype=torch.float64)
    attention[..., 0] = 0.5
    kept, cut = (float(attention_distance(attention, GRID, renormalize=again)) for again in (True, False))
    assert f"its MAD is {kept:.3f}, that of uniform attention" in TEXT
    assert f"would be {cut:.3f} and seem local" in TEXT


def test_a_sink_and_a_window() -> None:
    distances = grid_distances(GRID)
    corner, centre = distances[:, 0].mean(), distances[:, 8 * 4 + 4].mean()
    assert f"patch: {corner:.3f} for a corner of an 8×8 grid, {centre:.3f} for its centre" in TEXT
    window = uniform_attention_distance((7, 7)) * math.hypot(6, 6) / math.hypot(55, 55)
    assert (
        f"has a MAD of {window:.3f}; uniform attention over all of it, {uniform_attention_distance((56, 56)):.3f}"
        in TEXT
    )


def test_the_three_heads_of_the_figure() -> None:
    script = load(DOCS / "site" / "same_distance.py")
    for attention in script.heads().values():
        distance, entropy, _ = script.numbers(attention)
        assert f"MAD {distance:.3f}, entropy {entropy:.2f}" in TEXT


def load(script: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(script.stem, script)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_edge_seeking_heads() -> None:
    of_8, of_14 = "a MAD of {:.3f} if it attends to all of them alike, and of {:.3f} if", "it is {:.3f} and {:.3f}."
    for side, words in ((8, of_8), (14, of_14)):
        distances = (edge_attention_distance((side, side), nearest=nearest) for nearest in (False, True))
        assert words.format(*distances) in TEXT


@pytest.mark.slow
def test_kinds_and_preparation_of_the_shipped_models() -> None:
    """The table of kinds in measure.md, and that of normalisations here: on the embedded pictures of CIFAR-100."""
    pixels = load_dataset(zoo.IMAGES, num_train=0).test.images_NCHW / 255
    assert len(pixels) == 200
    models = {name: create_model(name, pretrained=True).eval() for name in zoo.MODELS}
    own = models["compact_vit.baseline_cifar100"].pretrained_cfg
    ways = {
        r"own: CIFAR-100's": (own["mean"], own["std"]),
        r"ImageNet's": (IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD),
        r"0\.5 and 0\.5": ((0.5,) * 3, (0.5,) * 3),
        r"none": ((0.0,) * 3, (1.0,) * 3),
    }
    first: HeadTable | None = None
    for way, per_channel in ways.items():
        mean, std = (torch.tensor(values).view(3, 1, 1) for values in per_channel)
        what = ["kinds"] if first is None else []
        baseline, modern, locat = (measure(model, (pixels - mean) / std, what=what) for model in models.values())
        ((_, *told),) = rows_of(way)
        smallest = [np.sort(table.mad, axis=None) for table in (baseline, modern, locat)]
        expected = [f"{value:.3f}" for value in (smallest[0][0], smallest[1][1], smallest[2][0])]
        expected.append("" if first is None else f"{np.abs(locat.mad - first.mad).max():.3f}")
        assert told == expected, way
        if first is None:
            first = locat
            described = (DOCS / "measure.md").read_text(encoding="utf-8")
            for name, table in zip(models, (baseline, modern, locat), strict=True):
                assert f"| `{name}` | {Kinds.summary(table, range(8))} |" in described
            kinds = baseline.kinds()
            for place in (baseline.mad.argmin(), baseline.mad.argmax()):
                assert kinds.flat[place] == "edge"
