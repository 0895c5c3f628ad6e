"""Values of single images: which they are, whose they are, and that neither order nor parts nor numbers change them."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor, nn

from nearsight.errors import InputError
from nearsight.lens import HeadTable, Shards, attention_maps, measure, perimage
from nearsight.lens.perimage import KeptImages, PerImage, digests_of_names, digests_of_pixels
from nearsight.metrics import Moments, attention_distance, attention_entropy
from nearsight.models import create_model


@pytest.fixture(scope="module")
def model() -> nn.Module:
    """In float64, so that what it computes hardly depends on which images are together in a batch; with large weights,
    so that heads and images differ."""
    torch.manual_seed(0)
    model = create_model("compact_vit", depth=2, embed_dim=16, num_heads=2).double()
    for name, parameter in model.named_parameters():
        if "qkv" in name:
            parameter.data.mul_(30)
    return model


@pytest.fixture(scope="module")
def images() -> Tensor:
    return torch.randn(11, 3, 32, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def look(model: nn.Module, images: Tensor, **options: object) -> HeadTable:
    return measure(model, images, **({"batch_size": 1, "precision": "float64"} | options))  # type: ignore[arg-type]


def kept(table: HeadTable) -> PerImage:
    assert table.per_image is not None
    return table.per_image


def bits(values: PerImage) -> tuple[bytes, bytes, bytes]:
    return values.digests.tobytes(), values.mad.tobytes(), values.entropy.tobytes()


def test_they_are_those_of_the_maps_by_the_digest_of_each_image(model: nn.Module, images: Tensor) -> None:
    values = kept(look(model, images, batch_size=4))
    order = np.argsort(digests_of_pixels(images).numpy().view(np.uint64))
    for layer, maps in enumerate(attention_maps(model, images, dtype=torch.float64)):
        attention = maps.full()
        np.testing.assert_allclose(
            values.mad[:, layer], attention_distance(attention, (8, 8)).numpy()[order], rtol=1e-6
        )
        np.testing.assert_allclose(values.entropy[:, layer], attention_entropy(attention).numpy()[order], rtol=1e-6)
    assert (values.mad.dtype, values.entropy.dtype) == (np.float32, np.float32)


def test_the_moments_are_what_they_were_and_those_of_the_values(model: nn.Module, images: Tensor) -> None:
    table = look(model, images, batch_size=3)
    np.testing.assert_allclose(kept(table).mad.mean(0), table.mad, rtol=1e-6)
    np.testing.assert_allclose(kept(table).entropy.std(0), table.entropy_std, rtol=1e-3)
    assert table.entropy_std.min() > 1e-3
    assert repr(table).endswith(", .per_image)")


def test_neither_the_order_of_images_nor_shards_change_a_bit(model: nn.Module, images: Tensor, tmp_path: Path) -> None:
    whole = kept(look(model, images))
    turned = torch.randperm(len(images), generator=torch.Generator().manual_seed(2))
    assert bits(kept(look(model, images[turned]))) == bits(whole)
    shards = Shards(folder=tmp_path, record={"model": "m"}, num_images=len(images), num_shards=4)
    for shard in (2, 0, 3, 1):
        span = shards.span(shard)
        shards.keep(shard, look(model, images[span.start : span.stop]))
    assert bits(kept(shards.merged())) == bits(whole)
    parts = [look(model, images[4:]), look(model, images[:4])]
    assert bits(kept(HeadTable.merge(parts))) == bits(whole)


def test_layers_are_chosen_and_files_keep_them(model: nn.Module, images: Tensor, tmp_path: Path) -> None:
    table, last = look(model, images), look(model, images, layers=[1])
    np.testing.assert_array_equal(kept(last).mad, kept(table).mad[:, 1:])
    np.testing.assert_array_equal(kept(table.choose([1, 0])).entropy, kept(table).entropy[:, ::-1])
    table.save(tmp_path / "heads.npz")
    assert bits(kept(HeadTable.load(tmp_path / "heads.npz"))) == bits(kept(table))


def test_tables_of_earlier_versions_load_and_merge_without_them(
    model: nn.Module, images: Tensor, tmp_path: Path
) -> None:
    table = look(model, images)
    table.save(tmp_path / "new.npz")
    with np.load(tmp_path / "new.npz") as archive:
        stored = dict(archive)
    np.savez(tmp_path / "old.npz", **{name: array for name, array in stored.items() if "per_image" not in name})
    old = HeadTable.load(tmp_path / "old.npz")
    assert old.per_image is None
    assert ".per_image" not in repr(old)
    np.testing.assert_array_equal(old.mad, table.mad)
    assert HeadTable.merge([table, old]).per_image is None
    wrong = {
        "digests": stored["per_image/digests"].astype(np.int64),
        "mad": stored["per_image/mad"][:, :1],
        "entropy": stored["per_image/entropy"][:-1],
    }
    for name, array in wrong.items():
        np.savez(tmp_path / "wrong.npz", **{**stored, f"per_image/{name}": array})
        with pytest.raises(InputError, match=r"wrong\.npz is damaged .*single images"):
            HeadTable.load(tmp_path / "wrong.npz")
    more = {name: np.concatenate([stored[f"per_image/{name}"]] * 2) for name in wrong}
    np.savez(tmp_path / "wrong.npz", **{**stored, **{f"per_image/{name}": array for name, array in more.items()}})
    with pytest.raises(InputError, match="at most 11 images"):
        HeadTable.load(tmp_path / "wrong.npz")
    del stored["per_image/mad"]
    np.savez(tmp_path / "wrong.npz", **stored)
    with pytest.raises(InputError, match=r"wrong\.npz is damaged"):
        HeadTable.load(tmp_path / "wrong.npz")


class TestIds:
    def test_by_which_images_of_other_sizes_are_the_same(self, model: nn.Module, images: Tensor) -> None:
        names = [f"{number}.png" for number in range(11)]
        small = kept(look(model, images, ids=names))
        torch.manual_seed(3)
        other = create_model("compact_vit", depth=1, embed_dim=16, num_heads=2, img_size=64, patch_size=8)
        large = torch.nn.functional.interpolate(images.float(), 64)
        batches = (part for part in large.flip(0).split(4))
        np.testing.assert_array_equal(small.digests, kept(measure(other, batches, ids=reversed(names))).digests)
        assert not set(small.digests) & set(kept(measure(other, large)).digests)

    def test_one_for_each_image(self, model: nn.Module, images: Tensor) -> None:
        with pytest.raises(InputError, match="more images than ids; give one for each"):
            look(model, images[:3], ids=["a", "b"])
        with pytest.raises(InputError, match="more ids than images, which are 3; give one for each"):
            look(model, images[:3], ids="abcd")

    def test_names_numbers_and_bytes(self) -> None:
        digests = digests_of_names(["a", b"a", "b", 3, "3", "ä"]).tolist()
        assert digests[0] == digests[1]
        assert digests[3] == digests[4]
        assert len(set(digests)) == 4


def by_hand(image: Tensor) -> int:
    """The digest of an image, in whole numbers without end."""

    def signed(number: int) -> int:
        number %= 2**64
        return number - 2**64 if number >= 2**63 else number

    content = image.numpy().tobytes()
    content += bytes(-len(content) % 8)
    words = [int.from_bytes(content[place : place + 8], "little", signed=True) for place in range(0, len(content), 8)]
    total = len(words)
    for place, word in enumerate(words, start=1):
        factor = signed(place * -7046029254386353131)
        spread = signed(word * (signed((factor ^ (factor >> 30)) * -4658895280553007687) | 1))
        total += spread ^ (spread >> 32)
    return signed(total)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 2**32),
    st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]),
    st.sampled_from([(3, 7, 5), (1, 1, 1), (3, 8, 8), (2, 3, 4, 4)]),
    st.data(),
)
def test_a_digest_is_of_every_bit(seed: int, dtype: torch.dtype, shape: tuple[int, ...], data: st.DataObject) -> None:
    images = torch.randn(4, *shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
    found = digests_of_pixels(images)
    if dtype != torch.bfloat16:  # which NumPy does not know
        assert found.tolist() == [by_hand(image) for image in images]
    assert found[2:].tolist() == digests_of_pixels(images[2:]).tolist()
    flat = images.clone().flatten(1).view(torch.uint8)
    place, bit = data.draw(st.integers(0, flat.shape[1] - 1)), data.draw(st.integers(0, 7))
    flat[1, place] ^= 1 << bit
    changed = digests_of_pixels(flat.view(dtype).unflatten(1, shape))
    assert (changed == found).tolist() == [True, False, True, True]


def test_a_digest_does_not_depend_on_where_pixels_lie_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    images = torch.randn(5, 3, 8, 8)
    found = digests_of_pixels(images)
    assert torch.equal(digests_of_pixels(images.to(memory_format=torch.channels_last)), found)
    moved = torch.empty(1 + images.numel())[1:].view_as(images).copy_(images)
    assert torch.equal(digests_of_pixels(moved), found)
    monkeypatch.setattr(perimage, "_WORDS_IN_CACHE", 200)  # two images at a time
    assert torch.equal(digests_of_pixels(images), found)
    twins = torch.zeros(2, 3, 8, 8), torch.zeros(2, 3, 8, 16)
    assert len({*digests_of_pixels(twins[0]).tolist(), *digests_of_pixels(twins[1]).tolist()}) == 2


Raw = tuple[NDArray[np.uint64], NDArray[np.float32], NDArray[np.float32]]


def made_up(digests: list[int], seed: int) -> Raw:
    values = np.random.default_rng(seed).uniform(size=(2, len(digests), 2, 3)).astype(np.float32)
    values[:, :, 0, 2] = np.nan
    return np.array(digests, dtype=np.uint64), values[0], values[1]


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 40), min_size=1, max_size=9), min_size=1, max_size=9),
    st.randoms(use_true_random=False),
    st.integers(1, 30),
    st.integers(0, 5),
)
def test_parts_in_any_order_keep_the_same_images(drawn: list[list[int]], order: object, most: int, fewest: int) -> None:
    """Those with the smallest digests, some of which may be equal, and never many more than there is room for."""
    raw = [made_up(digests, seed) for seed, digests in enumerate(drawn)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(perimage, "MOST_VALUES", 6 * most)
        patch.setattr(perimage, "_FEWEST_JOINED", fewest)
        whole = PerImage.of(*(np.concatenate(arrays) for arrays in zip(*raw, strict=True)))
        order.shuffle(raw)  # type: ignore[attr-defined]
        together = KeptImages()
        for part in raw:
            together.add(PerImage.of(*part))
            held = sum(len(piece) for piece in together._parts)
            assert held <= most + max(most, fewest)
        found = together.values()
    assert whole.digests.tolist() == sorted(digest for digests in drawn for digest in digests)[:most]
    assert found is not None
    assert bits(found) == bits(whole)


def test_memory_is_bounded_and_the_table_says_so(
    model: nn.Module, images: Tensor, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    whole = look(model, images)
    monkeypatch.setattr(perimage, "MOST_VALUES", 4 * 5 + 3)  # of four heads five images
    some = look(model, images.flip(0))
    assert bits(kept(some))[0] == kept(whole).digests[:5].tobytes()
    np.testing.assert_array_equal(kept(some).mad, kept(whole).mad[:5])
    np.testing.assert_array_equal(some.mad, look(model, images.flip(0)).mad)
    assert some.num_images == 11
    assert repr(some).endswith(", .per_image of 5)")
    some.save(tmp_path / "some.npz")
    assert len(kept(HeadTable.load(tmp_path / "some.npz"))) == 5


def test_what_is_not_known_of_some_is_not_known_of_all() -> None:
    moments = Moments.of(np.full((2, 1, 1), 0.5))
    values = PerImage(*(np.zeros((2, *shape), kind) for shape, kind in (((), "u8"), ((1, 1), "f4"), ((1, 1), "f4"))))
    known, unknown = (HeadTable(("a",), moments, moments, per_image=part) for part in (values, None))
    for tables in ([known, unknown], [unknown, known], [unknown]):
        assert HeadTable.merge(tables).per_image is None
    assert len(kept(HeadTable.merge([known, known]))) == 4
