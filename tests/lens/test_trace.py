"""Places are followed through whatever a model does to its tokens; each case is checked against its own arithmetic.

Any order and any merging of images, windows and heads is told apart from where tokens lie.
"""

import itertools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from nearsight.lens.layout import LayoutError, find_layout
from nearsight.lens.trace import PlaceTrace

SIDE = 8
ORDER = torch.tensor([3, 0, 6, 1, 7, 2, 5, 4])


def follow(program: Callable[[Tensor], Tensor], side: int = SIDE) -> tuple[PlaceTrace, Tensor]:
    """Trace a program of two images; the trace and the program's result."""
    images = torch.randn(2, 3, side, side)
    trace = PlaceTrace(images)
    with torch.no_grad(), trace:
        output = program(images)
    return trace, output


def centres(program: Callable[[Tensor], Tensor], side: int = SIDE) -> Tensor:
    """(y, x) of every element of the program's result."""
    trace, output = follow(program, side)
    found = trace.of(output)
    assert found is not None, "places were lost"
    assert found.own.shape == output.shape
    return trace.places.centres(found.own)


def pixel_grid(side: int = SIDE) -> Tensor:
    return torch.stack(torch.meshgrid(*[torch.arange(side).double()] * 2, indexing="ij"), dim=-1)


# Operations that move elements: done to coordinate planes, they must give the traced centres.
MOVES: dict[str, Callable[[Tensor], Tensor]] = {
    "view": lambda x: x.view(2, 3, SIDE // 2, 2, SIDE).flatten(2),
    "permute": lambda x: x.permute(0, 2, 3, 1).reshape(2, -1, 3),
    "roll": lambda x: torch.roll(x, (-3, 2), (2, 3)),
    "flip": lambda x: x.flip(-1),
    "stride": lambda x: x[..., ::2, 1::3],
    "stack": lambda x: torch.stack([x[..., 0, :], x[..., 5, :]], dim=1),
    "unbind": lambda x: x.unbind(2)[3],
    "chunk": lambda x: torch.cat(x.chunk(4, dim=3)[::-1], dim=3),
    "windows": lambda x: x.unflatten(3, (2, 4)).unflatten(2, (2, 4)).permute(0, 2, 4, 1, 3, 5).flatten(0, 2),
    "unfold": lambda x: x.unfold(2, 4, 2).unfold(3, 4, 2),
    "index": lambda x: x[:, :, torch.tensor([3, 1, 1])],
    "gather": lambda x: x.gather(3, torch.tensor([2, 0]).expand(2, 3, SIDE, 2)),
    "computed index": lambda x: x.gather(3, (x > 99).long()),
    "computed mask": lambda x: x[x < 99].view(2, 3, -1),
    "scatter": lambda x: torch.zeros_like(x).scatter(2, ORDER[:, None].expand_as(x), x),
    "scatter in place": lambda x: torch.zeros_like(x).scatter_(3, ORDER.expand_as(x), x),
    "index copy": lambda x: torch.zeros_like(x).index_copy(3, ORDER, x),
    "masked scatter": lambda x: torch.zeros_like(x).masked_scatter(torch.ones(SIDE, SIDE).bool(), x.flip(2)),
    "pixel unshuffle": lambda x: F.pixel_unshuffle(x, 2),
    "im2col": lambda x: F.unfold(x, 4, stride=4),
    "repeat": lambda x: x.repeat(1, 2, 1, 1),
    "repeat_interleave": lambda x: x.repeat_interleave(2, dim=2),
    "expand": lambda x: x[:, :, :, :1].expand(-1, -1, -1, 5),
}


def _written(x: Tensor) -> Tensor:
    canvas = x.new_zeros(2, 3, SIDE, SIDE)
    canvas[..., : SIDE // 2, :] = x[..., SIDE // 2 :, :]
    canvas[..., SIDE // 2 :, :] = x[..., : SIDE // 2, :]
    return canvas


def _indexed(x: Tensor) -> Tensor:
    canvas = x.new_zeros(2, 3, SIDE, SIDE)
    canvas[:, :, torch.tensor([2, 0]), torch.tensor([1, 5])] = x[:, :, 3, :2]
    return canvas[:, :, [2, 0], [1, 5]]


MOVES |= {"sliced write": _written, "indexed write": _indexed}


@pytest.mark.parametrize("program", MOVES.values(), ids=MOVES)
def test_what_moves_data_moves_places(program: Callable[[Tensor], Tensor]) -> None:
    grid = pixel_grid()
    for axis in (0, 1):
        plane = grid[..., axis].expand(2, 3, SIDE, SIDE)
        torch.testing.assert_close(centres(program)[..., axis], program(plane))


def test_elementwise_operations_leave_things_where_they_are() -> None:
    def program(x: Tensor) -> Tensor:
        x = F.gelu(x * 2 + torch.randn(3, 1, 1))
        x = F.layer_norm(x, x.shape[1:])
        gate = x.mean((2, 3), keepdim=True).sigmoid()  # about the whole image: it does not say where
        return (x * gate).masked_fill(x > 1, 0.0).clone()

    torch.testing.assert_close(centres(program)[0, 0], pixel_grid())


def test_a_patch_is_the_union_of_its_pixels_by_convolution_or_by_a_linear_layer() -> None:
    expected = 4 * pixel_grid(2) + 1.5
    by_convolution = centres(lambda x: F.conv2d(x, torch.randn(5, 3, 4, 4), stride=4))
    torch.testing.assert_close(by_convolution[0, 0], expected)

    def linear(x: Tensor) -> Tensor:
        patches = x.unflatten(3, (2, 4)).unflatten(2, (2, 4)).permute(0, 2, 4, 3, 5, 1).flatten(3)
        return F.linear(patches, torch.randn(7, 48), torch.randn(7))

    torch.testing.assert_close(centres(linear)[0, :, :, 0], expected)


@pytest.mark.parametrize(
    "pool",
    [
        lambda x: F.avg_pool2d(x, 2),
        lambda x: F.max_pool2d(x, 2),
        lambda x: F.adaptive_avg_pool2d(x, 4),
        lambda x: F.conv2d(x, torch.randn(3, 1, 2, 2), stride=2, groups=3),
        lambda x: F.interpolate(x, (4, 4), mode="bilinear"),
        lambda x: x.unflatten(3, (4, 2)).unflatten(2, (4, 2)).amax((3, 5)),
    ],
    ids=["average", "maximum", "adaptive", "convolution", "interpolation", "reduction"],
)
def test_pooled_things_lie_in_the_middle_of_what_was_pooled(pool: Callable[[Tensor], Tensor]) -> None:
    torch.testing.assert_close(centres(pool)[1, 2], 2 * pixel_grid(4) + 0.5)


def test_prefix_tokens_and_padding_are_nowhere() -> None:
    def program(x: Tensor) -> Tensor:
        tokens = x.flatten(2).transpose(1, 2)
        return torch.cat([torch.randn(1, 2, 3).expand(2, -1, -1), tokens], dim=1)

    found = centres(program)[0, :, 0]
    assert found[:2].isnan().all()
    torch.testing.assert_close(found[2:], pixel_grid().flatten(0, 1))
    padded = centres(lambda x: F.pad(x, (1, 0, 0, 2)))[0, 0]
    assert padded[:, 0].isnan().all()
    assert padded[SIDE:].isnan().all()
    torch.testing.assert_close(padded[:SIDE, 1:], pixel_grid())


def test_a_patch_that_is_padded_lies_where_its_pixels_are() -> None:
    found = centres(lambda x: F.conv2d(F.pad(x, (0, 2, 0, 0)), torch.randn(1, 3, 2, 5), stride=(2, 5)))
    torch.testing.assert_close(found[0, 0, 0, :, 1], torch.tensor([2.0, 6.0], dtype=torch.float64))


def tokens_of(x: Tensor) -> Tensor:
    return x.flatten(2).transpose(1, 2)


def test_logits_lie_at_their_query_and_look_at_their_key_and_outputs_lie_at_the_query() -> None:
    traces = {}

    def program(x: Tensor) -> Tensor:
        query, key = tokens_of(x) @ torch.randn(3, 4), tokens_of(x)[:, ::3] @ torch.randn(3, 4)
        traces["logits"] = query @ key.transpose(1, 2)
        traces["weights"] = (traces["logits"] * 2 + 1).softmax(-1)
        return traces["weights"] @ key

    trace, output = follow(program)
    pixels = trace.places.pixels[1, 0].flatten()
    for name in ("logits", "weights"):
        found = trace.of(traces[name])
        assert found is not None
        assert found.looked_at is not None
        torch.testing.assert_close(found.own[1], pixels[:, None].expand(64, 22))
        torch.testing.assert_close(found.looked_at[1], pixels[::3].expand(64, 22))
    weights, result = trace.of(traces["weights"]), trace.of(output)
    assert weights is not None
    assert weights.weights is not None
    assert trace.pairs.weights[weights.weights].softmaxes == {0}
    assert trace.pairs.weights[weights.weights].softmax_over == (22, 1)
    assert result is not None
    assert result.looked_at is None
    torch.testing.assert_close(result.own[1], pixels[:, None].expand(64, 4))


def test_values_on_the_left_of_transposed_weights() -> None:
    def program(x: Tensor) -> Tensor:
        tokens = x.flatten(2)
        attn = (tokens.transpose(1, 2) @ tokens).softmax(-1)
        return tokens @ attn.transpose(1, 2)

    torch.testing.assert_close(centres(program)[0, 1], pixel_grid().flatten(0, 1))


def test_sdpa_and_einsum_give_places_of_queries() -> None:
    expected = pixel_grid().flatten(0, 1)

    def fused(x: Tensor) -> Tensor:
        tokens = tokens_of(x)[:, None]
        return F.scaled_dot_product_attention(tokens, tokens[:, :, ::2], tokens[:, :, ::2])

    def einsum(x: Tensor) -> Tensor:
        tokens = tokens_of(x)
        attn = torch.einsum("bid,bjd->bij", tokens, tokens).softmax(-1)
        return torch.einsum("bij,bjd->bid", attn, tokens)

    torch.testing.assert_close(centres(fused)[0, 0, :, 0], expected)
    torch.testing.assert_close(centres(einsum)[0, :, 0], expected)


def test_attention_between_channels_looks_at_no_place() -> None:
    weights = []

    def program(x: Tensor) -> Tensor:
        channels = x.flatten(2)
        weights.append((channels @ channels.transpose(1, 2)).softmax(-1))
        return weights[0] @ channels

    trace, _ = follow(program)
    found = trace.of(weights[0])
    assert found is not None
    assert found.looked_at is None
    assert trace.places.covers_image(found.own).all()


@pytest.mark.parametrize("mix", ["linear", "convolution"])
def test_heads_that_are_mixed_are_noticed(mix: str) -> None:
    weights = []

    def program(x: Tensor) -> Tensor:
        heads = torch.stack([tokens_of(x), tokens_of(x) * 2], dim=1)
        attn = (heads @ heads.transpose(2, 3)).softmax(-1)
        if mix == "linear":
            attn = F.linear(attn.permute(0, 2, 3, 1), torch.randn(2, 2)).permute(0, 3, 1, 2)
        else:
            attn = F.conv2d(attn, torch.randn(2, 2, 1, 1))
        weights.append(attn)
        return attn @ heads

    trace, _ = follow(program, side=4)
    found = trace.of(weights[0])
    assert found is not None
    assert found.looked_at is not None
    assert found.weights is not None
    assert trace.pairs.weights[found.weights].softmax_over is None
    assert trace.pairs.weights[found.weights].softmaxes == {0}


def test_the_smaller_region_wins_and_images_stay_apart() -> None:
    trace, output = follow(lambda x: x.mean((2, 3), keepdim=True) + x)
    found = trace.of(output)
    assert found is not None
    torch.testing.assert_close(found.own, trace.places.pixels.expand(output.shape))
    torch.testing.assert_close(
        trace.places.image_of(found.own), torch.tensor([0, 1]).view(2, 1, 1, 1).expand(output.shape)
    )
    trace, output = follow(lambda x: x + x.mean(0, keepdim=True).flatten(1).mean())
    whole = trace.places.union(trace.places.pixels, [0, 1, 2, 3])
    assert int(trace.places.image_of(whole)) == -1
    assert trace.places.centres(whole).isnan().all()


@pytest.mark.parametrize(
    "program",
    [
        lambda x: torch.fft.fft2(x).real,
        lambda x: F.grid_sample(x, torch.rand(2, SIDE, SIDE, 2), align_corners=False),
        lambda x: torch.zeros_like(x).scatter_add(3, ORDER.expand_as(x), x),
        lambda x: torch.zeros_like(x).index_add_(3, ORDER, x),
        lambda x: torch.zeros_like(x).index_put_((torch.tensor([1, 0]),), x, accumulate=True),
        torch.zeros_like,
    ],
    ids=["fourier", "sampling", "scatter", "index", "accumulation", "zeros"],
)
def test_what_mixes_along_an_axis_is_not_taken_for_what_stays(program: Callable[[Tensor], Tensor]) -> None:
    trace, output = follow(program)
    assert trace.of(output) is None


def test_what_is_added_to_some_tokens_does_not_move_them() -> None:
    found = centres(lambda x: x.index_add(3, ORDER, torch.flip(x, [3])))
    torch.testing.assert_close(found[0, 0], pixel_grid())


def test_sorting_by_a_models_own_order_is_followed() -> None:
    order = torch.randperm(64)
    found = centres(lambda x: tokens_of(x).gather(1, order[None, :, None].expand(2, 64, 3)))
    torch.testing.assert_close(found[0, :, 0], pixel_grid().flatten(0, 1)[order])
    trace, output = follow(lambda x: torch.sort(tokens_of(x), dim=1).values)
    assert trace.of(output) is not None


WINDOWS, HEADS, TOKENS = 3, 4, 5


def canonical(batch: int) -> Tensor:
    """[B, W, H, tokens, 1]: a different number in each element."""
    return torch.arange(batch * WINDOWS * HEADS * TOKENS).view(batch, WINDOWS, HEADS, TOKENS, 1)


@pytest.mark.parametrize("merge", ["none", "first two", "last two", "all"])
@pytest.mark.parametrize(
    "order", list(itertools.permutations(range(3))), ids=lambda order: "".join("BWH"[i] for i in order)
)
def test_every_order_and_merging(order: tuple[int, int, int], merge: str) -> None:
    def models(tensor: Tensor) -> Tensor:
        """The tensor as such a model would hold it."""
        tensor = tensor.permute(*order, 3, 4)
        if merge == "first two":
            return tensor.flatten(0, 1)
        if merge == "last two":
            return tensor.flatten(1, 2)
        return tensor.flatten(0, 2) if merge == "all" else tensor

    shape = (2, WINDOWS, HEADS, TOKENS, 1)
    image = models(torch.arange(2).view(2, 1, 1, 1, 1).expand(shape))[..., 0, 0]
    window = torch.arange(WINDOWS).view(1, -1, 1, 1, 1)
    place = models((window * TOKENS + torch.arange(TOKENS).view(1, 1, 1, -1, 1)).expand(shape))[..., 0]
    layout = find_layout(image, (place, place))
    for batch in (1, 2, 7):
        torch.testing.assert_close(layout.arrange(models(canonical(batch))), canonical(batch))


def test_the_usual_layouts_are_views() -> None:
    image = torch.tensor([0, 1]).view(2, 1).expand(2, HEADS)
    place = torch.arange(TOKENS).expand(2, HEADS, TOKENS)
    tensor = torch.randn(6, HEADS, TOKENS, 2)
    arranged = find_layout(image, (place, place)).arrange(tensor)
    assert arranged.shape == (6, 1, HEADS, TOKENS, 2)
    assert arranged.data_ptr() == tensor.data_ptr()


def test_what_cannot_be_told_apart_is_said() -> None:
    place = torch.arange(TOKENS).expand(4, TOKENS)
    with pytest.raises(LayoutError, match="which image"):
        find_layout(torch.tensor([0, 1, 1, 0]), (place, place))
    with pytest.raises(LayoutError, match="elsewhere in one image"):
        find_layout(torch.tensor([0, 0, 1, 1]), (torch.arange(20).view(4, 5), place))
    irregular = torch.tensor([0, 1, 1, 0] * 2)[:, None] * TOKENS + torch.arange(TOKENS)
    with pytest.raises(LayoutError, match="no regular order"):
        find_layout(torch.tensor([0] * 4 + [1] * 4), (irregular, irregular))
