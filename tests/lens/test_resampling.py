"""Places where a model thins out, folds or subtracts: what each family of models showed to need care."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nearsight.lens.survey import survey
from nearsight.lens.trace import PlaceTrace


def follow(program: Callable[[Tensor], Tensor], side: int) -> tuple[PlaceTrace, Tensor]:
    images = torch.randn(2, 3, side, side)
    trace = PlaceTrace(images)
    with torch.no_grad(), trace:
        output = program(images)
    found = trace.of(output)
    assert found is not None
    assert not trace.lost
    return trace, found.own


@pytest.mark.parametrize(
    "thin",
    [
        lambda x: F.conv2d(x, torch.randn(3, 3, 1, 1), stride=2),
        lambda x: F.avg_pool2d(x, 1, 2),
        lambda x: F.max_pool2d(x, 1, 2),
    ],
    ids=["convolution", "average", "maximum"],
)
@pytest.mark.parametrize("side", [8, 7])
def test_every_other_pixel_stays_where_it_is(thin: Callable[[Tensor], Tensor], side: int) -> None:
    trace, own = follow(thin, side)
    rows = trace.places.centres(own)[0, 0, :, 0, 0]
    assert rows.tolist() == list(range(0, side, 2))


def centres_of_windows(side: int, size: int, step: int, margin: int, spread: int, count: int) -> list[float]:
    """By looking: the mean of the pixels that each window sees."""
    seen = [[i * step - margin + spread * t for t in range(size)] for i in range(count)]
    inside = [[pixel for pixel in window if 0 <= pixel < side] for window in seen]
    return [sum(window) / len(window) for window in inside]


@pytest.mark.parametrize(
    ("side", "size", "step", "margin", "spread"),
    [(16, 3, 2, 1, 1), (19, 4, 4, 0, 1), (23, 8, 8, 0, 1), (17, 7, 4, 3, 1), (16, 3, 4, 1, 1), (21, 3, 2, 2, 2)],
)
def test_a_window_lies_at_the_centre_of_what_it_sees(side: int, size: int, step: int, margin: int, spread: int) -> None:
    given = {"stride": step, "padding": margin, "dilation": spread}
    programs: list[Callable[[Tensor], Tensor]] = [lambda x: F.conv2d(x, torch.randn(2, 3, size, size), **given)]
    if margin <= size // 2:
        programs.append(lambda x: F.max_pool2d(x, size, **given))
        programs.append(lambda x: F.max_pool2d(x, size, **given, ceil_mode=True))
        if spread == 1:
            programs.append(lambda x: F.avg_pool2d(x, size, step, margin))
    # Padded by the model itself, as for "same" padding.
    programs.append(lambda x: F.conv2d(F.pad(x, [margin] * 4), torch.randn(2, 3, size, size), None, step, 0, spread))
    for program in programs:
        trace, own = follow(program, side)
        expected = centres_of_windows(side, size, step, margin, spread, own.shape[-1])
        found = trace.places.centres(own)[1, 0]
        torch.testing.assert_close(found[:, 1, 0].tolist(), expected, rtol=0, atol=1e-5)
        torch.testing.assert_close(found[1, :, 1].tolist(), expected, rtol=0, atol=1e-5)
        cells = trace.places.cells(own)[0, 1, 0, :, 1]  # as a grid: evenly spaced, as if there were no borders
        even = [i * step - margin + spread * (size - 1) / 2 for i in range(len(cells))]
        torch.testing.assert_close(cells.tolist(), even, rtol=0, atol=1e-5)
        assert trace.places.covers_image(trace.places.union(own[0], [0, 1, 2])).all()


def test_a_window_for_every_pixel_moves_none() -> None:
    """Whoever pads: the layer, or the model before it."""
    for program in (
        lambda x: F.conv2d(x, torch.randn(2, 3, 5, 3), padding=(2, 1)),
        lambda x: F.conv2d(F.pad(x, [1, 1, 2, 2]), torch.randn(2, 3, 5, 3)),
    ):
        trace, own = follow(program, 7)
        rows, cols = trace.places.centres(own)[1, 0].unbind(-1)
        assert rows.tolist() == [[float(i)] * 7 for i in range(7)]
        torch.testing.assert_close(rows, cols.T)


def test_the_mean_of_every_other_pixel_is_still_about_the_whole_image() -> None:
    trace, own = follow(lambda x: F.conv2d(x, torch.randn(3, 3, 1, 1), stride=4).mean((2, 3)), 8)
    assert trace.places.covers_image(own).all()


def test_a_transposed_convolution_picks_nothing() -> None:
    trace, own = follow(lambda x: F.conv_transpose2d(x, torch.randn(3, 3, 1, 1), stride=2, output_padding=1), 4)
    assert trace.places.centres(own)[0, 0, :, 0, 0].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]


def test_places_joined_in_different_orders_are_equal() -> None:
    """Rows of unequal numbers of pixels: their centres are no short binary fractions."""
    trace, own = follow(
        lambda x: F.conv2d(F.conv2d(x, torch.randn(3, 3, 3, 3), stride=2), torch.randn(3, 3, 3, 3), stride=2), 29
    )
    centres = trace.places.centres(own)[0, 0]
    assert len(centres[..., 0].unique()) == centres.shape[0]
    assert len(centres[..., 1].unique()) == centres.shape[1]


@pytest.mark.parametrize("stride", [1, 2])
def test_folded_windows_lie_where_they_were_cut(stride: int) -> None:
    def program(x: Tensor) -> Tensor:
        windows = F.unfold(x, 3, padding=1, stride=stride)
        return F.fold(windows.mean(1, keepdim=True).expand_as(windows), (8, 8), 3, padding=1, stride=stride)

    trace, own = follow(program, 8)
    rows = trace.places.centres(own)[1, 0, :, 4, 0]
    assert len(rows.unique()) == 8 // stride
    assert (rows.diff() >= 0).all()


class Pixels(nn.Module):
    """Attention between the pixels of a small image, by a function of tokens [B, N, C]."""

    def __init__(self, attend: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.attend = attend

    def forward(self, images: Tensor) -> Tensor:
        return self.attend(images.flatten(2).transpose(1, 2))


def difference_of_two_maps(x: Tensor) -> Tensor:
    one, other = ((scale * x @ x.transpose(1, 2)).softmax(-1) for scale in (1, 2))
    return (one - 0.1 * other) @ x


def between_images(x: Tensor) -> Tensor:
    flat = x.flatten(1)
    return (flat @ flat.T).softmax(-1) @ flat


@pytest.mark.parametrize(
    ("attend", "reason"),
    [(difference_of_two_maps, "not a distribution over the keys"), (between_images, "between the images of a batch")],
)
def test_what_is_no_map_between_places_is_named(attend: Callable[[Tensor], Tensor], reason: str) -> None:
    found = survey(Pixels(attend), torch.randn(3, 4, 4))
    assert not found.sites
    assert reason in found.skipped[""]


def test_a_sum_of_two_maps_is_a_map() -> None:
    def attend(x: Tensor) -> Tensor:
        one, other = ((scale * x @ x.transpose(1, 2)).softmax(-1) for scale in (1, 2))
        return (0.5 * one + 0.5 * other) @ x

    assert len(survey(Pixels(attend), torch.randn(3, 4, 4)).sites) == 1
