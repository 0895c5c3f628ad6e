"""Kinds of heads as the lens measures them, against loops over maps that timm's own code computed, in windows and on
pooled keys, too; and the reach of heads beside references."""

import math

import numpy as np
import pytest
import timm
import torch
from test_extras import (
    POOLED,
    PooledQueries,
    Window,
    cells,
    images,
    maps_of,
    pyramid,
    sharpened,
    vit,
    windows_of_pyramid,
)
from test_inputs import Video
from timm.models.swin_transformer import SwinTransformer
from torch import Tensor, nn

from nearsight.errors import InputError
from nearsight.lens import HeadTable, attention_maps, measure
from nearsight.lens.kinds import Kinds
from nearsight.metrics import KindShares, edge_attention_distance, kind_shares, uniform_attention_distance
from nearsight.models import create_model, with_fresh_weights


def by_loop(layer: list[Window], coarse_grid: tuple[int, int], coarse: float = 1) -> np.ndarray:
    """[heads, 7] of windows on a grid of cells, each of `coarse` × `coarse` tokens of the finer side."""
    batch, heads = layer[0].maps.shape[:2]
    out = np.zeros((heads, 7))
    for head in range(heads):
        shares = np.zeros((batch, 5))
        uniforms, sinks, breadths = np.zeros(5), np.zeros(batch), np.zeros(batch)
        uniform_sink = 0.0
        num_queries = sum(query is not None for window in layer for query in window.queries)
        for window in layer:
            patches = [j for j, key in enumerate(window.keys) if not isinstance(key, str)]
            others = [j for j, key in enumerate(window.keys) if key in ("cls", "register")]
            few = math.ceil(len(patches) / 50)
            received, received_uniform = np.zeros((batch, len(window.keys))), np.zeros(len(window.keys))
            for i, query in enumerate(window.queries):
                if query is None:
                    continue
                rows = window.maps[:, head, i].numpy()
                seen = [j for j in patches if rows[0, j] > 1e-30]  # Swin's masks push weights down to some 1e-44
                row, col = (place // coarse for place in query)
                for j in patches:
                    key_row, key_col = (place // coarse for place in window.keys[j])
                    there = [
                        (row, col) == (key_row, key_col),
                        abs(row - key_row) <= 1 and abs(col - key_col) <= 1,
                        row == key_row,
                        col == key_col,
                        key_row in (0, coarse_grid[0] - 1) or key_col in (0, coarse_grid[1] - 1),
                    ]
                    for image in range(batch):
                        shares[image] += np.array(there) * rows[image, j] / rows[image, patches].sum() / num_queries
                        received[image, j] += rows[image, j]
                    if j in seen:
                        uniforms += np.array(there) / len(seen) / num_queries
                        received_uniform[j] += 1 / len(seen)
                if not any(
                    key[0] // coarse in (0, coarse_grid[0] - 1) or key[1] // coarse in (0, coarse_grid[1] - 1)
                    for key in (window.keys[j] for j in seen)
                ):
                    uniforms[4] = math.nan
                for image in range(batch):
                    share = rows[image, patches] / rows[image, patches].sum()
                    entropy = -sum(p * math.log(p) for p in share if p > 0)
                    breadths[image] += (math.exp(entropy) - 1) / (len(seen) - 1) / num_queries
                    sinks[image] += rows[image, others].sum() / num_queries
            sinks += np.sort(received, axis=1)[:, ::-1][:, :few].sum(1) / num_queries
            uniform_sink += np.sort(received_uniform)[::-1][:few].sum() / num_queries
        with np.errstate(invalid="ignore", divide="ignore"):
            beyond = (shares.mean(0) - uniforms) / np.where(uniforms < 1 - 1e-9, 1 - uniforms, math.nan)
        sink = (sinks.mean() - uniform_sink) / (1 - uniform_sink)
        out[head] = [*beyond, sink, breadths.mean()]
    return out


def check(table: HeadTable, layer: int, expected: np.ndarray) -> None:
    found = np.stack([table.extra[f"kind_{name}"][layer, : len(expected)] for name in KindShares._fields], axis=-1)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=2e-7)


@pytest.mark.parametrize(
    ("settings", "prefix"),
    [
        ({}, ["cls"]),
        ({"reg_tokens": 2}, ["cls", "register", "register"]),
        ({"class_token": False, "global_pool": "avg"}, []),
    ],
)
def test_prefix_tokens_on_a_grid_that_is_not_square(settings: dict[str, object], prefix: list[str]) -> None:
    model, batch = vit(**settings), images(3)
    table = measure(model, batch, what=["kinds"])
    for layer, maps in enumerate(maps_of(model, batch)):
        window = Window(maps, [None] * len(prefix) + cells(4, 6), prefix + cells(4, 6))
        check(table, layer, by_loop([window], (4, 6)))


@pytest.mark.parametrize("side", [8, 6])
def test_windows_shifted_and_padded(side: int) -> None:
    """An inner window does not see the image's edge: no head of these layers is called after it."""
    torch.manual_seed(0)
    size = 4 * side
    model = SwinTransformer(img_size=size, window_size=4, embed_dim=16, depths=(2,), num_heads=(2,), num_classes=3)
    model, batch = sharpened(model), images(2, (size, size))
    table = measure(model, batch, what=["kinds"])
    for number, (maps, block) in enumerate(zip(maps_of(model, batch), model.layers[0].blocks, strict=True)):
        places = torch.arange(side**2).view(side, side).roll([-step for step in block.shift_size], (0, 1))
        places = nn.functional.pad(places, (0, 8 - side, 0, 8 - side), value=-1)
        windows = places.view(2, 4, 2, 4).transpose(1, 2).reshape(4, 16).tolist()
        queries = [[None if place < 0 else divmod(place, side) for place in window] for window in windows]
        keys = [["padding" if place is None else place for place in window] for window in queries]
        split = maps.unflatten(0, (2, 4)).unbind(1)
        expected = by_loop([Window(*parts) for parts in zip(split, queries, keys, strict=True)], (side, side))
        check(table, number, expected)


def test_the_edge_of_windows_that_do_not_see_it_is_no_place() -> None:
    torch.manual_seed(0)
    model = SwinTransformer(img_size=64, window_size=4, embed_dim=16, depths=(2,), num_heads=(2,), num_classes=3)
    table = measure(model, images(1, (64, 64)), what=["kinds"])
    assert np.isnan(table.extra["kind_edge"]).all()
    assert np.isfinite(table.extra["kind_own"]).all()
    assert set(table.kinds().ravel()) == {"global"}
    reach = table.reach("patches")
    assert reach[["edge", "nearest_edge"]].isna().all().all()
    assert reach["uniform"].to_numpy() == pytest.approx(np.repeat(table.uniform, 2) * math.hypot(15, 15))


def test_pooled_keys_and_pooled_queries() -> None:
    model, batch = pyramid(), images(2, (64, 64))
    table = measure(model, batch, what=["kinds"])
    for layer, (window, ratio, side) in enumerate(
        zip(windows_of_pyramid(model, batch), POOLED, (16, 8, 4, 2), strict=True)
    ):
        check(table, layer, by_loop([window], (side // ratio, side // ratio), ratio))
    torch.manual_seed(0)
    pooled, batch = PooledQueries(), images(2, (32, 32))
    table = measure(pooled, batch, what=["kinds"])
    pooled(batch)
    queries = [(2 * row + 0.5, 2 * col + 0.5) for row, col in cells(4, 4)]
    check(table, 0, by_loop([Window(pooled.maps.detach().double(), queries, cells(8, 8))], (4, 4), 2))


def test_in_double_precision_they_are_those_of_the_metric() -> None:
    model, batch = vit(reg_tokens=1), images(3)
    table = measure(model.double(), batch.double(), what=["kinds"], precision="float64")
    for layer, maps in enumerate(attention_maps(model, batch.double(), dtype=torch.float64)):
        expected = kind_shares(maps.full(), (4, 6), num_prefix_tokens=2)
        for name, values in expected._asdict().items():
            np.testing.assert_allclose(table.extra[f"kind_{name}"][layer], values.mean(0), rtol=0, atol=1e-12)


def test_tiles_do_not_change_them(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = vit(), images(3)
    whole = measure(model, batch, what=["kinds"])
    monkeypatch.setattr("nearsight.lens.stream._CACHED_BYTES", 1)
    monkeypatch.setattr("nearsight.lens.stream._FEWEST_QUERIES", 2)
    tiled = measure(model, batch, what=["kinds"])
    for name in Kinds.columns:
        np.testing.assert_allclose(tiled.extra[name], whole.extra[name], rtol=1e-5, atol=1e-7)


class OneThing(nn.Module):
    """Heads whose maps are given, on a grid of 8 × 8."""

    def __init__(self, maps_HNN: Tensor) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, 4, 4, 4)
        self.register_buffer("maps", maps_HNN.float())

    def forward(self, pixels: Tensor) -> Tensor:
        value = self.embed(pixels).flatten(2).transpose(1, 2)[:, None].expand(-1, len(self.maps), -1, -1)
        # The logarithm of weights, so that their softmax is the map: of a bias, as of relative positions.
        logits = self.maps.log() + 0.0 * (value @ value.transpose(-2, -1))
        return logits.softmax(-1) @ value


def test_pure_heads_in_a_model_have_their_names_and_the_sentence_counts_them() -> None:
    places = torch.tensor(cells(8, 8))
    apart = (places[:, None] - places).abs()
    edge = ((places == 0) | (places == 7)).any(-1).expand(64, -1)
    sink = (torch.arange(64) == 27).expand(64, -1)
    near = apart.amax(-1) <= 1
    patterns = [apart.amax(-1) == 0, near, apart[..., 0] == 0, apart[..., 1] == 0, edge, sink, torch.ones(64, 64)]
    maps = torch.stack([pattern / pattern.sum(-1, keepdim=True) for pattern in patterns])
    table = measure(OneThing(0.9 * maps + 0.1 / 64), images(2, (32, 32)), what=["kinds"])
    names = ["own patch", "neighbour", "row/column", "row/column", "edge", "sink", "global"]
    assert table.kinds().tolist() == [names]
    assert Kinds.summary(table, [0]) == (
        "Of 7 heads, 1 is sink, 1 own patch, 1 neighbour, 2 row/column, 1 edge, 1 global."
    )
    frame = table.extra_frame()
    assert frame["kind"].tolist() == names
    assert frame["kind_edge"][4] == pytest.approx(0.9, abs=1e-6)


def test_heads_that_look_along_time_alone_have_no_kind() -> None:
    table = measure(Video("time"), torch.randn(2, 8, 3, 12, 20), what=["kinds"])
    assert set(table.kinds().ravel()) == {""}
    assert Kinds.summary(table, [0]) == "No head attends between places."


def test_kinds_need_to_be_measured() -> None:
    model = create_model("compact_vit", depth=1, embed_dim=24, num_heads=2)
    with pytest.raises(InputError, match=r"measure with what=\['kinds'\]"):
        measure(model, images(1, (32, 32))).kinds()


def test_reach_is_the_same_in_all_units_beside_its_references() -> None:
    model = timm.create_model("vit_tiny_patch16_224", img_size=(96, 128), depth=2, embed_dim=24, num_heads=3)
    table = measure(model, images(2, (96, 128)))
    patches = math.hypot(5, 7)
    for unit, diagonal in (("diagonal", 1.0), ("patches", patches), ("pixels", 16 * patches)):
        reach = table.reach(unit)
        assert list(reach.columns) == [
            "layer", "layer_name", "head", "mad", "uniform", "next_patch", "edge", "nearest_edge",
        ]  # fmt: skip
        np.testing.assert_allclose(reach["mad"], table.mad.ravel() * diagonal)
        np.testing.assert_allclose(reach["mad"], table.mad_in(unit).ravel())
        expected = {
            "uniform": uniform_attention_distance((6, 8)),
            "next_patch": 1 / patches,
            "edge": edge_attention_distance((6, 8)),
            "nearest_edge": edge_attention_distance((6, 8), nearest=True),
        }
        for name, distance in expected.items():
            np.testing.assert_allclose(reach[name], distance * diagonal)


@pytest.mark.parametrize("name", ["compact_vit.modern_cifar100", "locat_compact_vit.modern_cifar100"])
def test_fresh_weights_are_those_of_an_untrained_model(name: str) -> None:
    trained, state = create_model(name, pretrained=True), torch.get_rng_state()
    before = {key: weight.clone() for key, weight in trained.state_dict().items()}
    fresh, again, other = (with_fresh_weights(trained, seed=seed) for seed in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), state)
    for key, weight in trained.state_dict().items():
        assert torch.equal(weight, before[key])
        assert torch.equal(fresh.state_dict()[key], again.state_dict()[key])
    learned = [key for key, weight in trained.named_parameters() if weight.numel() > 1 and weight.std() > 0]
    assert not any(torch.equal(fresh.get_parameter(key), before[key]) for key in learned)
    drawn = [key for key in learned if fresh.get_parameter(key).std() > 0]
    assert len(drawn) > len(learned) // 4
    assert not any(torch.equal(fresh.get_parameter(key), other.get_parameter(key)) for key in drawn)
    untrained = create_model(name.partition(".")[0])
    for key, weight in untrained.named_parameters():
        if weight.numel() > 1000:  # fewer have a deviation of their own
            assert fresh.get_parameter(key).std().item() == pytest.approx(weight.std().item(), rel=0.1)
    table = measure(fresh, images(4, (32, 32)), what=["kinds"])
    assert set(table.kinds().ravel()) == {"global"}
    assert np.abs(table.mad - table.uniform[:, None]).max() < 0.03


class WithoutInit(nn.Module):
    """A model whose token nothing initialises again."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.scale = nn.Parameter(torch.ones(1, 8) * torch.arange(8)), nn.Parameter(torch.full((8,), 3.0))
        self.linear = nn.Linear(8, 8)


def test_what_nothing_initialises_is_drawn_unless_it_is_one_number() -> None:
    model = WithoutInit()
    fresh = with_fresh_weights(model)
    assert fresh.token.abs().max() < 0.2
    assert torch.equal(fresh.scale, model.scale)
    assert not torch.equal(fresh.linear.weight, model.linear.weight)
