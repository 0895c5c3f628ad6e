"""Any order and any merging of images, windows and heads is told apart from where tokens lie."""

import itertools

import pytest
import torch
from torch import Tensor

from nearsight.lens.layout import LayoutError, find_layout

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
