"""Where the tokens of an attention are found to lie, and what is said of attention that is not spatial."""

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nearsight.errors import InputError
from nearsight.lens import measure
from nearsight.lens.survey import Site, Survey, survey


class Program(nn.Module):
    """A forward given as a function."""

    def __init__(self, program: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.program = program

    def forward(self, images: Tensor) -> Tensor:
        return self.program(images)


def look(program: Callable[[Tensor], Tensor], height: int = 8, width: int = 8) -> Survey:
    return survey(Program(program).eval(), torch.randn(3, height, width))


def only_site(found: Survey) -> Site:
    assert not found.skipped
    (site,) = found.sites.values()
    return site


def attend(query: Tensor, key: Tensor) -> Tensor:
    """[B, N, d] and [B, M, d], one head."""
    return F.scaled_dot_product_attention(query[:, None], key[:, None], key[:, None])


def tokens(images: Tensor, patch: int = 1) -> Tensor:
    return F.avg_pool2d(images, patch).flatten(2).transpose(1, 2)


def with_prefix(x: Tensor, count: int) -> Tensor:
    return torch.cat([torch.zeros(len(x), count, x.shape[-1]), x], dim=1)


def raster(rows: int, cols: int) -> Tensor:
    grid = torch.meshgrid(torch.arange(rows).double(), torch.arange(cols).double(), indexing="ij")
    return torch.stack(grid, dim=-1).flatten(0, 1)


@pytest.mark.parametrize("prefix", [0, 1, 5])
def test_a_plain_vit_of_any_shape(prefix: int) -> None:
    def program(images: Tensor) -> Tensor:
        x = with_prefix(tokens(images, 2), prefix)
        return attend(x, x)

    geometry = only_site(look(program, 8, 12)).geometry
    assert geometry.grid_size == (4, 6)
    assert geometry.cell_size == (2, 2)
    assert geometry.diagonal == pytest.approx(math.hypot(3, 5))
    assert geometry.num_queries == 24
    for places in (geometry.query_places_WN2, geometry.key_places_WM2):
        assert places[0, :prefix].isnan().all()
        torch.testing.assert_close(places[0, prefix:], raster(4, 6))


def test_prefix_tokens_may_come_last() -> None:
    def program(images: Tensor) -> Tensor:
        x = tokens(images)
        x = torch.cat([x, torch.zeros(len(x), 2, 3)], dim=1)
        return attend(x, x)

    places = only_site(look(program)).geometry.query_places_WN2
    assert places[0, -2:].isnan().all()
    torch.testing.assert_close(places[0, :-2], raster(8, 8))


def test_shifted_windows_with_padding() -> None:
    """8×8 tokens padded to 9×9, rolled by one, in nine windows of 3×3: as Swin and SAM do."""

    def partition(planes: Tensor) -> Tensor:
        """[B, C, 9, 9] → [B·9, 9, C]."""
        return planes.unflatten(3, (3, 3)).unflatten(2, (3, 3)).permute(0, 2, 4, 3, 5, 1).flatten(3, 4).flatten(0, 2)

    def program(images: Tensor) -> Tensor:
        x = partition(torch.roll(F.pad(images, (0, 1, 0, 1)), (-1, -1), (2, 3)))
        return attend(x, x)

    geometry = only_site(look(program)).geometry
    coordinates = F.pad(raster(8, 8).view(8, 8, 2).permute(2, 0, 1), (0, 1, 0, 1), value=math.nan)
    expected = partition(torch.roll(coordinates, (-1, -1), (1, 2))[None])
    torch.testing.assert_close(geometry.query_places_WN2, expected, equal_nan=True)
    torch.testing.assert_close(geometry.key_places_WM2, expected, equal_nan=True)
    assert geometry.grid_size == (8, 8)
    assert geometry.num_queries == 64


def test_pooled_keys_lie_at_the_centre_of_what_they_are_pooled_from() -> None:
    geometry = only_site(look(lambda images: attend(tokens(images), tokens(images, 4)))).geometry
    assert geometry.grid_size == (8, 8)
    torch.testing.assert_close(geometry.query_places_WN2[0], raster(8, 8))
    torch.testing.assert_close(geometry.key_places_WM2[0], 4 * raster(2, 2) + 1.5)


def test_keys_pooled_to_more_places_than_there_are_tokens_lie_between_these() -> None:
    """As PVT v2's linear attention does it on small images: 3×5 tokens pooled to 7×7 overlapping pieces."""

    def program(images: Tensor) -> Tensor:
        x = F.avg_pool2d(images, 4)
        return attend(tokens(x), tokens(F.adaptive_avg_pool2d(x, 7)))

    geometry = only_site(look(program, 12, 20)).geometry
    assert geometry.grid_size == (3, 5)
    assert geometry.cell_size == (4, 4)
    torch.testing.assert_close(geometry.query_places_WN2[0], raster(3, 5))
    assert geometry.key_places_WM2[0, ::7, 0].tolist() == [0, 0, 0.5, 1, 1.5, 2, 2]
    assert geometry.key_places_WM2[0, :7, 1].tolist() == [0, 0.5, 1.5, 2, 2.5, 3.5, 4]


def kernel(channels: int, size: int) -> Tensor:
    return torch.randn(3, channels, size, size)


@pytest.mark.parametrize(
    ("size", "step", "margin", "expected"),
    [
        (3, 4, 1, [0.5, 4.0, 8.0]),  # MViTv2's: rows 0–1, 3–5, 7–9
        (5, 5, 0, [2.0, 7.0]),  # rows 10 and 11 are seen by none
        (6, 2, 2, [1.5, 2.5, 4.5, 6.5, 8.5, 9.5]),
    ],
)
def test_a_pooled_key_lies_at_the_centre_of_what_its_window_sees(
    size: int, step: int, margin: int, expected: list[float]
) -> None:
    """Behind a stem whose own windows overlap and are cut at the borders, which moves no cell of the grid."""

    def program(images: Tensor) -> Tensor:
        x = F.conv2d(images, kernel(3, 7), stride=4, padding=3)
        keys = F.conv2d(x, kernel(3, size), stride=step, padding=margin)
        return attend(tokens(x), tokens(keys))

    geometry = only_site(look(program, 48, 45)).geometry
    assert geometry.grid_size == (12, 12)
    assert geometry.cell_size == (4, 4)
    torch.testing.assert_close(geometry.query_places_WN2[0], raster(12, 12))
    assert geometry.key_places_WM2[0, :: len(expected), 0].tolist() == pytest.approx(expected, abs=1e-5)
    assert geometry.key_places_WM2[0, : len(expected), 1].tolist() == pytest.approx(expected, abs=1e-5)


def test_queries_and_keys_of_the_same_windows_lie_at_the_same_places() -> None:
    def program(images: Tensor) -> Tensor:
        query, key = (tokens(F.conv2d(images, kernel(3, 3), stride=step, padding=1)) for step in (2, 4))
        summary = query.mean(1, keepdim=True)
        return attend(query, torch.cat([key, summary], dim=1))

    geometry = only_site(look(program, 16, 16)).geometry
    torch.testing.assert_close(geometry.key_places_WM2[0, :-1], 2 * raster(4, 4))


def test_a_summary_beside_the_patches_moves_none_of_them() -> None:
    def program(images: Tensor) -> Tensor:
        x = tokens(F.conv2d(images, kernel(3, 7), stride=4, padding=3))
        return attend(x, torch.cat([x, x.mean(1, keepdim=True)], dim=1))

    places = only_site(look(program, 16, 16)).geometry.key_places_WM2[0]
    torch.testing.assert_close(places[:-1], raster(4, 4))
    assert places[-1].isnan().all()


@pytest.mark.parametrize(("size", "step", "side"), [(14, 14, 64), (16, 16, 79), (32, 16, 64), (16, 8, 64), (4, 4, 9)])
def test_the_size_of_a_cell_is_the_step_from_patch_to_patch(size: int, step: int, side: int) -> None:
    def program(images: Tensor) -> Tensor:
        x = tokens(F.conv2d(images, kernel(3, size), stride=step))
        return attend(x, x)

    assert only_site(look(program, side, side)).geometry.cell_size == (step, step)


def test_subsampled_queries_lie_where_they_were_taken() -> None:
    geometry = only_site(look(lambda images: attend(tokens(images[..., ::2, ::2]), tokens(images)))).geometry
    assert geometry.grid_size == (8, 8)
    torch.testing.assert_close(geometry.query_places_WN2[0], 2 * raster(4, 4))


def test_an_image_that_the_patches_do_not_divide() -> None:
    """Ten pixels in patches of four: the model pads, and the last row of patches holds two rows of pixels."""

    def program(images: Tensor) -> Tensor:
        x = tokens(F.pad(images, (0, 2, 0, 2)), 4)
        return attend(x, x)

    geometry = only_site(look(program, 10, 10)).geometry
    assert geometry.grid_size == (3, 3)
    assert geometry.cell_size == (4, 4)
    torch.testing.assert_close(geometry.query_places_WN2[0], raster(3, 3))


def test_one_patch_is_a_grid() -> None:
    def program(images: Tensor) -> Tensor:
        x = with_prefix(tokens(images, 8), 1)
        return attend(x, x)

    geometry = only_site(look(program)).geometry
    assert geometry.grid_size == (1, 1)
    assert geometry.diagonal == 1
    assert measure(Program(program), torch.randn(2, 3, 8, 8)).mad.tolist() == [[0.0]]


def test_a_summary_of_the_image_is_no_patch() -> None:
    def program(images: Tensor) -> Tensor:
        x = tokens(images, 2)
        x = torch.cat([x.mean(1, keepdim=True), x], dim=1)
        return attend(x, x)

    assert only_site(look(program)).geometry.query_places_WN2[0, 0].isnan().all()


def softmax_attention(query: Tensor, key: Tensor) -> Tensor:
    return (query @ key.transpose(-2, -1)).softmax(-1) @ key


NOT_SPATIAL: dict[str, Callable[[Tensor], Tensor]] = {
    "queries are not patches": lambda images: attend(torch.zeros(len(images), 1, 3), tokens(images)),
    "keys are not patches": lambda images: attend(
        tokens(images), tokens(images, 8).repeat(1, 2, 1) * 0 + torch.ones(3)
    ),
    "between channels": lambda images: attend(images.flatten(2), images.flatten(2)),
    "attention between channels": lambda images: softmax_attention(images.flatten(2), images.flatten(2)),
    "pooling by scores": lambda images: tokens(images).softmax(1).sum(1),
    "one token alone": lambda images: (tokens(images) @ torch.ones(3, 5)).softmax(-1) @ torch.ones(5, 2),
    "do not multiply values": lambda images: (
        (tokens(images) @ images.flatten(2)).softmax(-1)[..., None] * tokens(images)[:, None]
    ).sum(2),
    "global queries": lambda images: attend(
        F.avg_pool2d(images, 2).flatten(2).transpose(1, 2).repeat_interleave(4, 0), _quarters(images)
    ),
    "another image": lambda images: attend(tokens(images).flip(0), tokens(images)),
    "fit no grid": lambda images: attend(tokens(images)[:, :13], tokens(images)[:, :13]),
    "lie at only": lambda images: attend(tokens(images).repeat(1, 2, 1), tokens(images)),
    "elsewhere in one image": lambda images: attend(_largest_first(images), _largest_first(images)),
    "elsewhere in one image than in another": lambda images: attend(tokens(images), _largest_first(images)[:, :16]),
}


def _largest_first(images: Tensor) -> Tensor:
    """In an order of the image's own, as models have it that drop tokens, or let each query choose its keys."""
    x = tokens(images)
    return x.gather(1, x.norm(dim=-1).argsort(descending=True).unsqueeze(-1).expand_as(x))


def _quarters(images: Tensor) -> Tensor:
    halves = images.unflatten(3, (2, 4)).unflatten(2, (2, 4))
    return halves.permute(0, 2, 4, 3, 5, 1).flatten(3, 4).flatten(0, 2)


@pytest.mark.parametrize("reason", NOT_SPATIAL)
def test_what_is_not_spatial_attention_is_named(reason: str) -> None:
    found = look(NOT_SPATIAL[reason])
    assert not found.sites
    ((name, said),) = found.skipped.items()
    assert name == ""
    assert reason in said
    with pytest.raises(InputError, match="no spatial attention that can be measured"):
        measure(Program(NOT_SPATIAL[reason]), torch.randn(2, 3, 8, 8))


def test_talking_heads_are_named() -> None:
    def program(images: Tensor) -> Tensor:
        x = torch.stack([tokens(images, 2), tokens(images, 2) * 2], dim=1)
        weights = (x @ x.transpose(2, 3)).softmax(-1)
        return F.linear(weights.permute(0, 2, 3, 1), torch.randn(2, 2)).permute(0, 3, 1, 2) @ x

    assert "not a distribution over the keys" in look(program).skipped[""]


def test_some_layers_measured_and_some_named() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.spatial = Program(lambda images: attend(tokens(images), tokens(images)))
            self.channels = Program(NOT_SPATIAL["between channels"])

        def forward(self, images: Tensor) -> Tensor:
            self.channels(images)
            return self.spatial(images)

    table = measure(Both(), torch.randn(2, 3, 4, 4))
    assert table.layer_names == ("spatial",)
    assert list(table.skipped) == ["channels"]


def test_explicit_attention_in_any_layout_gives_the_same_numbers() -> None:
    """Heads merged with images, weights transposed, an einsum: what is measured does not change."""
    torch.manual_seed(0)
    weight = torch.randn(3, 8) * 3

    def heads(images: Tensor) -> Tensor:
        return (tokens(images, 2) @ weight).unflatten(-1, (2, 4)).transpose(1, 2)

    def transposed(images: Tensor) -> Tensor:
        x = heads(images).transpose(2, 3)
        attn = (x.transpose(2, 3) @ x).softmax(-1)
        return x @ attn.transpose(2, 3)

    def merged(images: Tensor) -> Tensor:
        x = heads(images).flatten(0, 1)
        return torch.bmm(torch.baddbmm(torch.zeros(()), x, x.transpose(1, 2)).softmax(-1), x)

    def einsum(images: Tensor) -> Tensor:
        x = heads(images)
        attn = torch.einsum("bhid,bhjd->bijh", x, x).softmax(2)
        return torch.einsum("bijh,bhjd->bhid", attn, x)

    images = torch.randn(3, 3, 8, 12)
    expected = measure(Program(lambda x: F.scaled_dot_product_attention(*[heads(x)] * 3, scale=1.0)), images)
    for program in (transposed, merged, einsum):
        table = measure(Program(program), images)
        torch.testing.assert_close(table.mad, expected.mad, rtol=1e-5, atol=0)
        torch.testing.assert_close(table.entropy, expected.entropy, rtol=1e-5, atol=0)


def test_one_softmax_in_several_products_and_keys_first() -> None:
    """By queries it is one layer, by heads each part is one, the same weights twice are one; keys may come first."""
    torch.manual_seed(0)
    weight = torch.randn(3, 8, 3) * 3

    def heads(images: Tensor) -> tuple[Tensor, ...]:
        return tuple((tokens(images, 2) @ part).unflatten(-1, (2, 4)).transpose(1, 2) for part in weight.unbind(2))

    def weights(x: Tensor) -> tuple[Tensor, Tensor]:
        query, key, value = heads(x)
        return (query @ key.transpose(2, 3)).softmax(-1), value

    def keys_first(x: Tensor) -> tuple[Tensor, Tensor]:
        query, key, value = heads(x)
        return (key @ query.transpose(2, 3)).softmax(-2), value

    def by_queries(x: Tensor) -> Tensor:
        attn, value = weights(x)
        return torch.cat([part @ value for part in attn.split(8, dim=2)], dim=2)

    def by_heads(x: Tensor) -> Tensor:
        return torch.stack([attn @ value for attn, value in zip(*(y.unbind(1) for y in weights(x)), strict=True)], 1)

    def twice(x: Tensor) -> Tensor:
        attn, value = weights(x)
        return attn @ value + attn @ (value * 2)

    def on_the_right(x: Tensor) -> Tensor:
        attn, value = keys_first(x)
        return value.transpose(2, 3) @ attn

    def einsum(x: Tensor) -> Tensor:
        attn, value = keys_first(x)
        return torch.einsum("bhmn,bhmd->bhnd", attn, value)

    images = torch.randn(3, 3, 8, 12)
    whole = measure(Program(lambda x: F.scaled_dot_product_attention(*heads(x), scale=1.0)), images)
    for program in (twice, on_the_right, einsum):
        table = measure(Program(program), images)
        torch.testing.assert_close(table.mad, whole.mad, rtol=1e-5, atol=0)
        torch.testing.assert_close(table.entropy, whole.entropy, rtol=1e-5, atol=0)
    parts = measure(Program(by_queries), images, what=["shares", "quantiles", "offsets"])
    assert parts.layer_names == ("",)
    torch.testing.assert_close(parts.mad, whole.mad, rtol=1e-5, atol=0)
    torch.testing.assert_close(parts.entropy, whole.entropy, rtol=1e-5, atol=0)
    at_once = measure(Program(lambda x: torch.matmul(*weights(x))), images, what=["shares", "quantiles", "offsets"])
    for name, values in at_once.extra.items():
        torch.testing.assert_close(parts.extra[name], values, rtol=1e-5, atol=1e-7, equal_nan=True)
    torch.testing.assert_close(measure(Program(by_heads), images).mad.T, whole.mad, rtol=1e-5, atol=0)


def test_what_comes_out_of_keys_first_attention_lies_at_the_queries() -> None:
    """So that the next layer's queries are known to be few."""

    def program(images: Tensor) -> Tensor:
        x, few = tokens(images), tokens(images, 2)
        y = x.transpose(1, 2) @ (x @ few.transpose(1, 2)).softmax(-2)
        return attend(y.transpose(1, 2), x)

    first, second = look(program).sites.values()
    for site in (first, second):
        torch.testing.assert_close(site.geometry.query_places_WN2[0], 2 * raster(4, 4) + 0.5)
        torch.testing.assert_close(site.geometry.key_places_WM2[0], raster(8, 8))


def test_finding_many_attentions_takes_no_longer_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention in chunks of queries is many in one module."""
    comparisons: list[None] = []
    equal = torch.equal
    monkeypatch.setattr(torch, "equal", lambda *tensors: comparisons.append(None) or equal(*tensors))

    def compared(num_chunks: int) -> int:
        comparisons.clear()
        found = look(
            lambda images: torch.cat([attend(part, tokens(images)) for part in tokens(images).chunk(num_chunks, dim=1)])
        )
        names = [site.name for site in found.sites.values()]
        assert names == ["", *(f"#{number}" for number in range(2, num_chunks + 1))]
        return len(comparisons)

    assert compared(32) < 3 * compared(16)
