"""Tables of shards: they merge to the table of all images, in any order to the same bits, and only if undamaged."""

import json
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from nearsight import files
from nearsight.errors import InputError
from nearsight.lens import HeadTable, Shards, measure
from nearsight.metrics import Moments
from nearsight.models import create_model

Array = NDArray[np.float64]
GRID = np.array([[7.0, 7.0], [7.0, 7.0]])
DISTANCES = np.array([[0.0, 1 / 3, 1.0], [0.1, 0.7, np.nan]])


def table_of(values_NLH: Array) -> HeadTable:
    """Of images with these distances; entropies and extras are functions of them. One head does not exist."""
    values_NLH = values_NLH.copy()
    values_NLH[:, 0, 1] = np.nan
    extra = {"grid_size": GRID, "distance_values": DISTANCES, "share_self": np.cos(values_NLH).mean(0)}
    return HeadTable(("a", "b"), Moments.of(values_NLH), Moments.of(1 - values_NLH**2), {"c": "why"}, extra)


def arrays(table: HeadTable) -> list[Array]:
    moments = (table.mad_moments, table.entropy_moments)
    return [value for one in moments for value in (one.mean, one.squared_deviations)] + list(table.extra.values())


def bits(table: HeadTable) -> tuple[int, list[bytes]]:
    return table.num_images, [value.tobytes() for value in arrays(table)]


@st.composite
def divided(draw: st.DrawFn) -> tuple[Array, list[int], list[int]]:
    """Values of some images, how many are in each part, and an order of the parts."""
    sizes = draw(st.lists(st.integers(1, 9), min_size=1, max_size=12))
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    scale, middle = draw(st.sampled_from([(1.0, 0.0), (1e-9, 0.4), (0.0, 0.3), (1e-3, 1.0)]))
    values = middle + scale * random.uniform(size=(sum(sizes), 2, 2))
    return values, sizes, draw(st.permutations(range(len(sizes))))


@settings(max_examples=150, deadline=None)
@given(divided())
def test_parts_merge_to_the_whole_and_to_the_same_bits_in_any_order(drawn: tuple[Array, list[int], list[int]]) -> None:
    values, sizes, order = drawn
    whole, parts = table_of(values), [table_of(part) for part in np.split(values, np.cumsum(sizes)[:-1])]
    merged = HeadTable.merge(parts)
    for found, expected in zip(arrays(merged), arrays(whole), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-14)
    assert merged.num_images == len(values)
    assert bits(HeadTable.merge([parts[position] for position in order])) == bits(merged)
    # What does not depend on the images stays what it is, to the bit.
    np.testing.assert_array_equal(merged.extra["grid_size"], GRID)
    np.testing.assert_array_equal(merged.extra["distance_values"], DISTANCES)


@settings(max_examples=50, deadline=None)
@given(divided())
def test_the_merged_mean_is_that_of_rational_numbers(drawn: tuple[Array, list[int], list[int]]) -> None:
    """However many parts there are: errors do not add up."""
    values, sizes, _ = drawn
    parts = [table_of(part) for part in np.split(values, np.cumsum(sizes)[:-1])]
    merged = HeadTable.merge(parts).mad
    for layer, head in ((0, 0), (1, 0), (1, 1)):
        exact = sum(Fraction(part.mad[layer, head]) * part.num_images for part in parts) / len(values)
        assert merged[layer, head] == pytest.approx(float(exact), rel=4e-16, abs=1e-300)


@given(st.integers(1, 500), st.integers(1, 60))
def test_spans_are_all_images_once_in_their_order_and_alike_in_length(num_images: int, num_shards: int) -> None:
    num_shards = min(num_images, num_shards)
    shards = Shards(folder=Path("x"), record={}, num_images=num_images, num_shards=num_shards)
    spans = [shards.span(shard) for shard in range(num_shards)]
    assert [place for span in spans for place in span] == list(range(num_images))
    assert all(before.stop == after.start for before, after in pairwise(spans))
    assert {len(span) for span in spans} <= {num_images // num_shards, -(-num_images // num_shards)}


def test_a_model_measured_in_shards_is_the_model_measured_at_once(tmp_path: Path) -> None:
    """In float64, so that what the model computes does not depend on which images are together in a batch."""
    torch.manual_seed(0)
    model = create_model("compact_vit", depth=2, embed_dim=16, num_heads=2).double()
    images = torch.randn(11, 3, 32, 32, dtype=torch.float64)

    def look(some: torch.Tensor, batch_size: int) -> HeadTable:
        what = ["shares", "quantiles", "features"]
        return measure(model, some, batch_size=batch_size, precision="float64", what=what)

    shards = Shards(folder=tmp_path, record={"model": "m"}, num_images=11, num_shards=4)
    for shard in (2, 0, 3, 1):
        span = shards.span(shard)
        shards.keep(shard, look(images[span.start : span.stop], batch_size=2))
    whole, merged = look(images, batch_size=11), shards.merged()
    assert merged.extra.keys() == whole.extra.keys()
    for found, expected in zip(arrays(merged), arrays(whole), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-13)
    np.testing.assert_array_equal(merged.distance_quantiles(), whole.distance_quantiles())


def kept(folder: Path, record: dict[str, object], num_images: int = 6) -> Shards:
    """Three shards, all done."""
    values = np.random.default_rng(0).uniform(size=(num_images, 2, 2))
    shards = Shards(folder=folder, record=record, num_images=num_images, num_shards=3)
    for shard in range(3):
        shards.keep(shard, table_of(values[shards.span(shard).start : shards.span(shard).stop]))
    return shards


def done(shards: Shards) -> Sequence[bool]:
    return [shards.is_done(shard) for shard in range(shards.num_shards)]


def test_no_damage_is_taken_for_a_shard(tmp_path: Path) -> None:
    """One byte changed, or all from there on cut: detected, or nothing that counts was touched."""
    shards = kept(tmp_path, {"model": "m"})
    before = bits(shards.read(1))
    detected = 0
    for path in (shards.path(1), shards.path(1).with_suffix(".json")):
        content = path.read_bytes()
        for place in range(0, len(content), 23):
            for damaged in (content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :], content[:place]):
                path.write_bytes(damaged)
                if shards.is_done(1):
                    assert bits(shards.read(1)) == before
                else:
                    detected += 1
        path.write_bytes(content)
    assert detected > 50
    shards.path(1).unlink()
    with pytest.raises(InputError, match=r"1-of-3\.npz cannot be read"):
        shards.merged()
    assert done(shards) == [True, False, True]


def test_only_shards_of_the_same_model_images_and_options_are_taken(tmp_path: Path) -> None:
    shards = kept(tmp_path, {"model": "m", "what": ["shares"]})
    assert done(replace(shards, record={"what": ["shares"], "model": "m"})) == [True, True, True]
    assert not any(done(replace(shards, record={"model": "other", "what": ["shares"]})))
    assert not any(done(replace(shards, num_images=7)))
    other = kept(tmp_path, {"model": "other"})
    assert shards.path(0).parent != other.path(0).parent
    # Even where somebody has put it into the wrong folder, or under the wrong number.
    for end in (".npz", ".json"):
        shards.path(1).with_suffix(end).write_bytes(other.path(1).with_suffix(end).read_bytes())
        shards.path(2).with_suffix(end).write_bytes(shards.path(0).with_suffix(end).read_bytes())
    assert done(shards) == [True, False, False]
    with pytest.raises(InputError, match="is of another model"):
        shards.read(1)


def test_a_shard_is_done_when_the_last_of_its_files_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kill at any moment of a write leaves a shard that is done, or one that is measured again."""
    moments: list[bool] = []

    class KilledError(BaseException):
        pass

    def end_at(count: int) -> None:
        def disturb(moment: files.Moment, path: Path) -> None:
            moments.append(True)
            if len(moments) == count:
                raise KilledError

        moments.clear()
        monkeypatch.setattr(files, "disturb", disturb)

    for count in range(1, 7):  # three in each of two files
        shards = Shards(folder=tmp_path / str(count), record={}, num_images=2, num_shards=1)
        end_at(count)
        with pytest.raises(KilledError):
            shards.keep(0, table_of(np.ones((2, 2, 2))))
        monkeypatch.setattr(files, "disturb", None)
        assert shards.is_done(0) == (count == 6)
        shards.keep(0, table_of(np.ones((2, 2, 2))))
        assert shards.is_done(0)
        held = json.loads(shards.path(0).with_suffix(".json").read_text())
        assert (held["shard"], held["num_shards"], held["num_images"]) == (0, 1, 2)


def test_more_shards_than_images_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="3 images cannot be divided into 4 shards"):
        Shards(folder=tmp_path, record={}, num_images=3, num_shards=4)
    with pytest.raises(InputError, match="the number of shards is 0"):
        Shards(folder=tmp_path, record={}, num_images=3, num_shards=0)
