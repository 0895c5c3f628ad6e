"""Tables of heads: round trips, frames and merging."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from nearsight.errors import InputError
from nearsight.lens import HeadTable
from nearsight.metrics import Moments


def table(seed: int = 0, num_images: int = 4, layers: int = 2) -> HeadTable:
    values = np.random.default_rng(seed).uniform(size=(2, num_images, layers, 3))
    values[:, :, 0, 2] = np.nan  # the first layer has two heads
    names = tuple(f"blocks.{i}.attn" for i in range(layers))
    return HeadTable(names, Moments.of(values[0]), Moments.of(values[1]), {"norm": "not attention"})


def test_round_trip(tmp_path: Path) -> None:
    original = table()
    original.extra["quantiles"] = np.arange(6.0).reshape(2, 3)
    original.save(tmp_path / "heads.npz")
    loaded = HeadTable.load(tmp_path / "heads.npz")
    for name in ("mad", "mad_std", "entropy", "entropy_std"):
        np.testing.assert_array_equal(getattr(loaded, name), getattr(original, name))
    assert loaded.layer_names == original.layer_names
    assert loaded.num_images == 4
    assert dict(loaded.skipped) == {"norm": "not attention"}
    np.testing.assert_array_equal(loaded.extra["quantiles"], original.extra["quantiles"])
    assert list(tmp_path.iterdir()) == [tmp_path / "heads.npz"]


def test_printed_it_says_what_it_is_of() -> None:
    shown = repr(replace(table(), label="a ViT", uniform=np.array([0.4, 0.375]), extra={"rollout": np.zeros(2)}))
    values = np.random.default_rng(0).uniform(size=(2, 4, 2, 3))[0].mean(0)
    assert values[1, 0] == min(values[0, 0], values[0, 1], *values[1])
    assert shown == (
        f"HeadTable(a ViT: 2 layers × 3 heads, 4 images, 1 skipped; most local [1, 0]: MAD {values[1, 0]:.3f} "
        "(uniform 0.375); .mad, .entropy, .to_frame(), .plot(), .compare(other), .report(path), .extra['rollout'])"
    )


def test_frame_has_a_row_per_head_that_exists() -> None:
    frame = table().to_frame()
    assert list(frame.columns) == [
        "layer",
        "layer_name",
        "head",
        "mad",
        "mad_std",
        "entropy",
        "entropy_std",
        "num_images",
    ]
    assert list(zip(frame["layer"], frame["head"], strict=True)) == [(0, 0), (0, 1), (1, 0), (1, 1), (1, 2)]
    assert not frame.isna().any().any()
    assert frame["mad"][4] == table().mad[1, 2]


def with_extra(original: HeadTable, seed: int = 0) -> HeadTable:
    """With arrays like those of every measurement; values depend on the seed, distances do not."""
    random = np.random.default_rng(seed)
    absent = np.isnan(original.mad)
    mass = random.dirichlet(np.ones(4), size=absent.shape)
    mass[absent] = np.nan
    mass[0, :, 3] = np.nan  # the first layer has three distances
    extra = {
        "grid_size": np.array([[2.0, 2.0], [2.0, 3.0]]),
        "cell_size": np.full((2, 2), 8.0),
        "share_self": np.where(absent, np.nan, random.uniform(size=absent.shape)),
        "locality_score": random.uniform(size=2),
        "distance_mass": mass,
        "distance_values": np.array([[0.0, 0.5, 1.0, np.nan], [0.0, 0.4, 0.6, 1.0]]),
    }
    return replace(original, extra=extra)


def test_extra_frames_have_a_row_per_head_and_per_layer() -> None:
    original = with_extra(table())
    heads = original.extra_frame()
    levels = ["distance_q10", "distance_q25", "distance_q50", "distance_q75", "distance_q90"]
    assert list(heads.columns) == ["layer", "layer_name", "head", "share_self", *levels, "num_images"]
    assert list(zip(heads["layer"], heads["head"], strict=True)) == [(0, 0), (0, 1), (1, 0), (1, 1), (1, 2)]
    assert heads["share_self"][4] == original.extra["share_self"][1, 2]
    np.testing.assert_array_equal(heads[levels].iloc[3], original.distance_quantiles()[1, 1])
    layers = original.extra_frame("layer")
    places = ["grid_rows", "grid_cols", "cell_height", "cell_width"]
    assert list(layers.columns) == ["layer", "layer_name", *places, "locality_score", "num_images"]
    assert list(layers["grid_cols"]) == [2, 3]
    np.testing.assert_array_equal(layers["locality_score"], original.extra["locality_score"])
    assert not heads.isna().any().any()


def test_extra_frames_of_a_plain_table() -> None:
    assert list(table().extra_frame().columns) == ["layer", "layer_name", "head", "num_images"]
    assert len(table().extra_frame("layer")) == 2


def test_quantiles_of_a_known_distribution() -> None:
    original = with_extra(table())
    original.extra["distance_mass"][1, 0] = [0.1, 0.4, 0.25, 0.25]
    levels = [0.05, 0.1, 0.11, 0.5, 0.51, 0.75, 0.9, 1.0]
    np.testing.assert_array_equal(original.distance_quantiles(levels)[1, 0], [0.0, 0.0, 0.4, 0.4, 0.6, 0.6, 1.0, 1.0])
    assert np.isnan(original.distance_quantiles()[0, 2]).all()  # a head that does not exist
    assert np.nanmax(original.distance_quantiles([1.0])[0]) == 1.0  # not the bin that the layer does not have


def test_extras_merge_as_weighted_means_and_survive_choice_and_storage(tmp_path: Path) -> None:
    small, large = with_extra(table(0, 2), 0), with_extra(table(1, 6), 1)
    merged = HeadTable.merge([small, large])
    for name in merged.extra:
        expected = (2 * small.extra[name] + 6 * large.extra[name]) / 8
        np.testing.assert_allclose(merged.extra[name], expected, rtol=1e-14)
    merged.save(tmp_path / "heads.npz")
    stored, chosen = HeadTable.load(tmp_path / "heads.npz"), merged.choose([1])
    for name, values in merged.extra.items():
        np.testing.assert_array_equal(stored.extra[name], values)
        np.testing.assert_array_equal(chosen.extra[name], values[1:])
    np.testing.assert_array_equal(chosen.distance_quantiles()[0], merged.distance_quantiles()[1])


def test_merging_needs_the_same_measurements_and_distances() -> None:
    one, other = with_extra(table(0)), with_extra(table(1))
    with pytest.raises(InputError, match="different things were measured"):
        HeadTable.merge([one, table(1)])
    other.extra["distance_values"][1, 2] = 0.7
    with pytest.raises(InputError, match="images of one size"):
        HeadTable.merge([one, other])


def test_merging_needs_the_same_model() -> None:
    with pytest.raises(InputError, match="different models"):
        HeadTable.merge([table(layers=2), table(layers=3)])
    with pytest.raises(InputError, match="no tables"):
        HeadTable.merge([])


@pytest.mark.parametrize("content", [b"", b"not an archive", b"PK\x03\x04 cut short"])
def test_a_damaged_file_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "heads.npz"
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"heads\.npz is damaged"):
        HeadTable.load(path)


def test_missing_and_newer_files(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="does not exist"):
        HeadTable.load(tmp_path / "none.npz")
    table().save(tmp_path / "t.npz")
    with np.load(tmp_path / "t.npz") as archive:
        stored = {**archive, "format": np.array(99)}
    np.savez(tmp_path / "t.npz", **stored)
    with pytest.raises(InputError, match="newer nearsight"):
        HeadTable.load(tmp_path / "t.npz")


def test_pickled_objects_are_not_loaded(tmp_path: Path) -> None:
    np.savez(tmp_path / "t.npz", format=np.array([object()], dtype=object))
    with pytest.raises(InputError, match="damaged"):
        HeadTable.load(tmp_path / "t.npz")


def test_what_is_of_one_size_has_no_mean() -> None:
    """One layer has another grid in the other table; a second one the same grid, but of larger patches."""
    parts = [replace(table(seed, layers=3), extra={}) for seed in range(2)]
    grids = [[[2, 2], [4, 4], [8, 8]], [[2, 2], [8, 4], [8, 8]]]
    cells = [[[16, 16], [8, 8], [4, 4]], [[16, 16], [8, 8], [8, 8]]]
    for part, grid, cell in zip(parts, grids, cells, strict=True):
        part.extra.update(grid_size=np.array(grid, dtype=float), cell_size=np.array(cell, dtype=float))
        part.extra["sigma_most"] = np.array(grid, dtype=float).prod(-1)
    merged = HeadTable.merge(part for part in parts)
    again = HeadTable.merge([HeadTable.merge([merged, parts[0]]), parts[1]])
    for one in (merged, again):
        np.testing.assert_array_equal(one.extra["grid_size"], [[2, 2], [np.nan, np.nan], [8, 8]])
        np.testing.assert_array_equal(one.extra["cell_size"], [[16, 16], [8, 8], [np.nan, np.nan]])
        np.testing.assert_array_equal(one.extra["sigma_most"], [4, np.nan, 64])
    for unit in ("patches", "pixels"):
        with pytest.raises(InputError, match=f"distances in {unit} are known for images of one size only"):
            merged.mad_in(unit)
    alike = merged.choose([0, 2])
    np.testing.assert_allclose(alike.mad_in("patches"), alike.mad * np.array([[2**0.5], [98**0.5]]))
    with pytest.raises(InputError, match="distances in pixels are known for images of one size"):
        alike.mad_in("pixels")
    with pytest.raises(InputError, match="distances are in diagonal, patches, pixels, not in 'meters'"):
        alike.mad_in("meters")


def test_layers_are_chosen_by_numbers_and_names() -> None:
    original = table(layers=3)
    some = original.choose(np.array([2, -3]))
    assert some.layer_names == ("blocks.2.attn", "blocks.0.attn")
    for wrong in ("blocks.0.attn", 1):
        with pytest.raises(InputError, match=r"layers is a list of positions and names, not .*; give \["):
            original.choose(wrong)
    for wrong in (3, -4, 1.0, None, "attn"):
        with pytest.raises(InputError, match="is not one of the 3 layers"):
            original.choose([wrong])


def test_a_table_is_itself_alone() -> None:
    one, other = table(), table()
    assert one == one
    assert one != other
    assert len({one, other}) == 2


def with_words(seed: int = 0, num_images: int = 4) -> HeadTable:
    return replace(table(seed, num_images), uniform=np.array([0.25, 0.375]), numbers=(3, 7), label="a ViT")


def test_uniform_attention_numbers_and_label_survive_storage_choice_and_merging(tmp_path: Path) -> None:
    with_words().save(tmp_path / "heads.npz")
    loaded = HeadTable.load(tmp_path / "heads.npz")
    chosen, merged = with_words().choose([1]), HeadTable.merge([with_words(0, 2), with_words(1, 6)])
    for found, places in ((loaded, [0, 1]), (chosen, [1]), (merged, [0, 1])):
        assert found.uniform is not None
        assert found.uniform.tolist() == [[0.25, 0.375][place] for place in places]
        assert found.numbers == tuple([3, 7][place] for place in places)
        assert found.label == "a ViT"
    assert table().choose([1]).numbers == (1,)
    # Images of two sizes: the mean over the images, as of every head.
    small = replace(with_words(0, 2), uniform=np.array([0.5, np.nan]))
    other = HeadTable.merge([small, with_words(1, 6)]).uniform
    assert other is not None
    assert other[0] == (2 * 0.5 + 6 * 0.25) / 8
    assert np.isnan(other[1])
    assert HeadTable.merge([table(0), with_words(1)]).uniform is None


def test_files_of_earlier_versions_are_read(tmp_path: Path) -> None:
    """They have neither of these."""
    table().save(tmp_path / "heads.npz")
    with np.load(tmp_path / "heads.npz") as archive:
        assert not {"uniform", "layer_numbers", "label"} & set(archive.files)
    old = HeadTable.load(tmp_path / "heads.npz")
    assert (old.uniform, old.numbers, old.label, old.maps) == (None, None, None, None)
    assert "uniform" not in repr(old)


@pytest.mark.parametrize("name", ["uniform", "layer_numbers"])
def test_what_does_not_fit_the_layers_is_refused(tmp_path: Path, name: str) -> None:
    with_words().save(tmp_path / "heads.npz")
    with np.load(tmp_path / "heads.npz") as archive:
        arrays = dict(archive)
    np.savez(tmp_path / "other.npz", **{**arrays, name: arrays[name][:1]})
    with pytest.raises(InputError, match=rf"other.npz is damaged: {name} is not an array of (float|int)64 \[2\]"):
        HeadTable.load(tmp_path / "other.npz")
