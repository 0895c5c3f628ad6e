"""What users bring: any channels, dictionaries, ways to call, declared grids, videos, packed sequences.

Each is compared with the explicit maps of the same attention, by `nearsight.metrics` or plain sums.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import nearsight
from nearsight import measure
from nearsight.errors import InputError
from nearsight.metrics import attention_distance, attention_entropy

DIM, HEADS = 24, 3


class Attending(nn.Module):
    """Tokens [B, N, C] that look at each other once; what they saw is kept."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Linear(channels, DIM)
        self.qkv = nn.Linear(DIM, 3 * DIM)
        self.seen: list[Tensor] = []
        with torch.no_grad():
            self.qkv.weight.mul_(4)

    def attend(self, tokens: Tensor) -> Tensor:
        query, key, value = self.qkv(tokens).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        self.__dict__["seen"] = [(query @ key.transpose(-2, -1) / query.shape[-1] ** 0.5).softmax(-1).detach()]
        return F.scaled_dot_product_attention(query, key, value)

    def maps(self, *args: Any, **kwargs: Any) -> Tensor:
        with torch.no_grad():
            self(*args, **kwargs)
        return self.seen[0].double()


class Patches(Attending):
    """Of four pixels, behind a class token."""

    def __init__(self, in_chans: int = 3) -> None:
        super().__init__(16 * in_chans)
        self.cls = nn.Parameter(torch.randn(1, 1, DIM))

    def forward(self, pixel_values: Tensor, *, scale: Tensor | None = None) -> Tensor:
        patches = F.unfold(pixel_values, 4, stride=4).transpose(1, 2)
        x = torch.cat([self.cls.expand(len(patches), -1, -1), self.embed(patches)], dim=1)
        return self.attend(x if scale is None else x * scale[:, None, None])


def assert_measured(table: nearsight.HeadTable, maps: Tensor, grid: tuple[int, int], prefix: int = 1) -> None:
    mad = attention_distance(maps, grid, num_prefix_tokens=prefix).mean(0)
    entropy = attention_entropy(maps, num_prefix_tokens=prefix, eps=0.0).mean(0)
    np.testing.assert_allclose(table.mad[0], mad, rtol=2e-5)
    np.testing.assert_allclose(table.entropy[0], entropy, rtol=2e-5)


@pytest.mark.parametrize("in_chans", [1, 2, 4, 6, 13])
def test_any_number_of_channels(in_chans: int) -> None:
    model, images = Patches(in_chans), torch.randn(3, in_chans, 16, 24)
    assert_measured(measure(model, images), model.maps(images), (4, 6))
    assert nearsight.check_vit_adapter(model, (16, 24), channels=in_chans).layers
    assert measure(timm.create_model("compact_vit", depth=1, in_chans=in_chans), torch.randn(1, in_chans, 32, 32))


def test_dictionaries_and_ways_to_call() -> None:
    model, images = Patches(), torch.randn(5, 3, 16, 24)
    scale = torch.tensor([1.0, 2.0, 0.5, 3.0, 1.5])
    plain, scaled = model.maps(images), model.maps(images, scale=scale)
    for given, options, maps in (
        ({"pixel_values": images}, {}, plain),
        ([{"pixel_values": images[:2]}, {"pixel_values": images[2:]}], {}, plain),
        (images, {"call": "pixel_values"}, plain),
        (images, {"call": lambda model, batch: model(batch, scale=torch.ones(len(batch)))}, plain),
        ({"pixel_values": images, "scale": scale}, {"batch_size": 2}, scaled),
        (
            {"images": images, "scale": scale},
            {"call": lambda m, batch: m(batch["images"], scale=batch["scale"])},
            scaled,
        ),
    ):
        assert_measured(measure(model, given, **options), maps, (4, 6))
        (layer,) = nearsight.attention_maps(model, given, **options)
        torch.testing.assert_close(layer.full().double(), maps, rtol=1e-4, atol=1e-6)
    assert nearsight.check_vit_adapter(model, (16, 24), call="pixel_values").layers


@pytest.mark.parametrize(
    ("given", "options", "said"),
    [
        ({"one": torch.zeros(2, 3, 8, 8), "other": torch.zeros(2, 3, 8, 8)}, {}, "one, other may all be images"),
        ({"tokens": torch.zeros(2, 3)}, {}, r"images of shape \[B, C, H, W\]"),
        (torch.zeros(2, 3, 8, 8), {"call": 3}, "call is the name of an argument, or a function"),
        (torch.zeros(2, 3, 8, 8), {"prefix": 1}, "prefix goes with grid"),
        (torch.zeros(2, 3, 8, 8), {"grid": (0, 3)}, "grid is 0, but must be at least 1"),
        (
            {"x": torch.zeros(7, 4), "grid_thw": torch.tensor([[1, 2, 4]])},
            {},
            "grid_thw describes 8 patches, but there are 7",
        ),
    ],
)
def test_what_cannot_be_understood_is_named(given: Any, options: Mapping[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        measure(Patches(), given, **options)


def test_a_grid_that_the_model_does_not_tell() -> None:
    """Tokens made of the whole image, by a matrix: nobody can follow where they are."""

    class Learned(Attending):
        def __init__(self) -> None:
            super().__init__(3)
            self.tokens = nn.Linear(16 * 24, 25)

        def forward(self, images: Tensor) -> Tensor:
            return self.attend(self.embed(self.tokens(images.flatten(2)).transpose(1, 2)))

    model, images = Learned(), torch.randn(3, 3, 16, 24)
    with pytest.raises(InputError, match=r"no spatial attention that can be measured"):
        measure(model, images)
    maps = model.maps(images)
    assert_measured(measure(model, images, grid=(4, 6), prefix=1), maps, (4, 6))
    assert_measured(measure(model, images, grid=(4, 6)), maps, (4, 6))
    assert_measured(measure(model, images, grid=(5, 5), prefix=0), maps, (5, 5), prefix=0)
    with pytest.raises(InputError, match="no spatial attention"):
        measure(model, images, grid=(3, 6), prefix=1)


def test_orders_and_masks_of_each_image_are_its_own() -> None:
    """A model that puts its tokens into the order of noise that it is given: each image has its own."""

    class Shuffling(Patches):
        def forward(self, pixel_values: Tensor, noise: Tensor) -> Tensor:  # type: ignore[override]
            patches = self.embed(F.unfold(pixel_values, 4, stride=4).transpose(1, 2))
            order = noise.argsort(1)[..., None].expand_as(patches)
            return self.attend(patches.gather(1, order))

    model, images, noise = Shuffling(), torch.randn(3, 3, 16, 24), torch.rand(3, 24)
    table = measure(model, {"pixel_values": images, "noise": noise})
    place = torch.cartesian_prod(torch.arange(4.0), torch.arange(6.0)).double()
    distances = [torch.cdist(place[order], place[order]) / np.hypot(3, 5) for order in noise.argsort(1)]
    mad = (model.maps(images, noise) * torch.stack(distances)[:, None]).sum(-1).mean((0, 2))
    np.testing.assert_allclose(table.mad[0], mad, rtol=2e-5)
    with pytest.raises(InputError, match="maps are made of images of one size"):
        nearsight.attention_maps(model, {"pixel_values": images, "noise": noise})


def video_tokens(video: Tensor, patch: int = 4, tube: int = 2) -> Tensor:
    """[B, T, C, H, W] → [B, t, h, w, values]."""
    frames = video.unfold(1, tube, tube).unfold(3, patch, patch).unfold(4, patch, patch)
    return frames.permute(0, 1, 3, 4, 2, 5, 6, 7).flatten(4)


class Video(Attending):
    """Tubes of two frames and 4×4 pixels: all together, or along time, or within a frame."""

    def __init__(self, along: str, channels_first: bool = False) -> None:
        super().__init__(3 * 2 * 16)
        self.along, self.channels_first = along, channels_first

    def forward(self, video: Tensor) -> Tensor:
        x = self.embed(video_tokens(video.transpose(1, 2) if self.channels_first else video))
        if self.along == "time":
            return self.attend(x.permute(0, 2, 3, 1, 4).flatten(0, 2))
        return self.attend(x.flatten(0, 1).flatten(1, 2) if self.along == "space" else x.flatten(1, 3))


@pytest.mark.parametrize("channels_first", [False, True])
def test_a_video_has_distances_on_the_picture_and_in_time(channels_first: bool) -> None:
    frames, rows, cols = 4, 3, 5
    video = torch.randn(2, 2 * frames, 3, 4 * rows, 4 * cols)
    video = video.transpose(1, 2) if channels_first else video
    model = Video("all", channels_first)
    maps = model.maps(video)
    place = torch.cartesian_prod(*(torch.arange(size).double() for size in (frames, rows, cols)))
    picture = torch.cdist(place[:, 1:], place[:, 1:]) / np.hypot(rows - 1, cols - 1)
    time = (place[:, None, 0] - place[:, 0]).abs() / (frames - 1)
    table = measure(model, video)
    np.testing.assert_allclose(table.mad[0], (maps * picture).sum(-1).mean((0, 2)), rtol=2e-5)
    np.testing.assert_allclose(table.extra["temporal_distance"][0], (maps * time).sum(-1).mean((0, 2)), rtol=2e-5)
    entropy = -torch.special.xlogy(maps, maps).sum(-1).mean((0, 2)) / np.log(frames * rows * cols)
    np.testing.assert_allclose(table.entropy[0], entropy, rtol=2e-5)
    merged = nearsight.HeadTable.merge([measure(model, one) for one in video.split(1)])
    np.testing.assert_allclose(merged.extra["temporal_distance"], table.extra["temporal_distance"], rtol=1e-6)


def test_attention_along_time_alone_has_no_distance_on_the_picture() -> None:
    video = torch.randn(2, 8, 3, 12, 20)
    model = Video("time")
    maps = model.maps(video)
    table = measure(model, video)
    assert np.isnan(table.mad).all()
    time = (torch.arange(4.0)[:, None] - torch.arange(4.0)).abs().double() / 3
    np.testing.assert_allclose(table.extra["temporal_distance"][0], (maps * time).sum(-1).mean((0, 2)), rtol=2e-5)
    assert np.isfinite(table.entropy).all()
    assert len(table.to_frame()) == HEADS


def test_attention_within_a_frame_has_no_distance_in_time() -> None:
    video = torch.randn(2, 8, 3, 12, 20)
    model = Video("space")
    table = measure(model, video)
    assert_measured(table, model.maps(video), (3, 5), prefix=0)
    np.testing.assert_allclose(table.extra["temporal_distance"], 0.0)


class Packed(Attending):
    """A sequence of the patches of all images; each image attends to itself, by a call of its own or under a mask."""

    spatial_merge_size, patch_size = 2, 14

    def __init__(self, *, masked: bool, window: int | None = None) -> None:
        super().__init__(12)
        self.masked, self.window = masked, window

    def forward(self, hidden_states: Tensor, grid_thw: Tensor) -> Tensor:
        x = self.embed(hidden_states)
        lengths = grid_thw.prod(-1).tolist()
        if self.window is not None:
            lengths = [self.window] * (sum(lengths) // self.window)
        if not self.masked:
            return torch.cat([self.attend(part[None]) for part in x.split(lengths)], dim=2)
        image = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
        query, key, value = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(1, 2, 0, 3)
        mask = image[:, None] == image
        logits = (query @ key.transpose(-2, -1) / query.shape[-1] ** 0.5).masked_fill(~mask, -torch.inf)
        self.__dict__["seen"] = [logits.softmax(-1)[None].detach()]
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask)


def grouped(rows: int, cols: int) -> Tensor:
    """Where a patch of a sequence of 2×2 groups is: (row, column)."""
    number = torch.arange(rows * cols).view(rows // 2, 2, cols // 2, 2).permute(0, 2, 1, 3).flatten()
    return torch.stack([number // cols, number % cols], dim=-1).double()


@pytest.mark.parametrize("masked", [False, True])
def test_packed_images_have_their_own_grids(masked: bool) -> None:
    grids = [(4, 6), (2, 8), (6, 4)]
    model = Packed(masked=masked)
    patches = torch.randn(sum(rows * cols for rows, cols in grids), 12)
    batch = {"hidden_states": patches, "grid_thw": torch.tensor([[1, *grid] for grid in grids])}
    table = measure(model, batch)
    assert table.num_images == len(grids)
    assert table.layer_names == ("",)
    expected, begin = [], 0
    for rows, cols in grids:
        alone = {"hidden_states": patches[begin : begin + rows * cols], "grid_thw": torch.tensor([[1, rows, cols]])}
        place = grouped(rows, cols)
        distance = torch.cdist(place, place) / np.hypot(rows - 1, cols - 1)
        expected.append((model.maps(**alone) * distance).sum(-1).mean((0, 2)))
        begin += rows * cols
    np.testing.assert_allclose(table.mad[0], torch.stack(expected).mean(0), rtol=2e-5)


def test_windows_with_a_call_each_are_one_layer_on_the_whole_grid() -> None:
    model = Packed(masked=False, window=4)
    patches = torch.randn(24, 12)
    table = measure(model, {"hidden_states": patches, "grid_thw": torch.tensor([[1, 4, 6]])}, what=["shares"])
    assert table.layer_names == ("",)
    assert table.extra["grid_size"].tolist() == [[4, 6]]
    assert table.extra["cell_size"].tolist() == [[14, 14]]
    place, expected = grouped(4, 6), []
    for number, part in enumerate(patches.split(4)):
        maps = model.maps(part, torch.tensor([[1, 2, 2]]))
        expected.append((maps * torch.cdist(*[place[4 * number : 4 * number + 4]] * 2) / np.hypot(3, 5)).sum(-1)[0])
    np.testing.assert_allclose(table.mad[0], torch.cat(expected, dim=-1).mean(-1), rtol=2e-5)


def test_frames_with_a_call_each_are_one_layer() -> None:
    """Each frame of a video attends to itself."""

    class ByFrame(Packed):
        def forward(self, hidden_states: Tensor, grid_thw: Tensor) -> Tensor:
            lengths = torch.repeat_interleave(grid_thw[:, 1] * grid_thw[:, 2], grid_thw[:, 0]).tolist()
            return torch.cat([self.attend(part[None]) for part in self.embed(hidden_states).split(lengths)], dim=2)

    model, patches = ByFrame(masked=False), torch.randn(3 * 16, 12)
    video = {"hidden_states": patches, "grid_thw": torch.tensor([[3, 4, 4]])}
    table = measure(model, video)
    assert table.layer_names == ("",)
    place, expected = grouped(4, 4), []
    for part in patches.split(16):
        maps = model.maps(part, torch.tensor([[1, 4, 4]]))
        expected.append((maps * torch.cdist(place, place) / np.hypot(3, 3)).sum(-1).mean((0, 2)))
    np.testing.assert_allclose(table.mad[0], torch.stack(expected).mean(0), rtol=2e-5)
    np.testing.assert_allclose(table.extra["temporal_distance"], 0.0)
    picture = {"hidden_states": patches[:16], "grid_thw": torch.tensor([[1, 4, 4]])}
    with pytest.raises(InputError, match="pictures and videos cannot be averaged together"):
        measure(model, [picture, video])


def test_padded_patches_with_spatial_shapes() -> None:
    class Padded(Attending):
        def __init__(self) -> None:
            super().__init__(12)

        def forward(self, pixel_values: Tensor, pixel_attention_mask: Tensor, spatial_shapes: Tensor) -> Tensor:
            query, key, value = self.qkv(self.embed(pixel_values)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
            return F.scaled_dot_product_attention(
                query, key, value, attn_mask=pixel_attention_mask[:, None, None].bool()
            )

    model, shapes = Padded(), torch.tensor([[4, 6], [5, 3]])
    patches = torch.randn(2, 24, 12)
    mask = torch.arange(24) < shapes.prod(-1, keepdim=True)
    table = measure(model, {"pixel_values": patches, "pixel_attention_mask": mask, "spatial_shapes": shapes})
    expected = []
    for image, (rows, cols) in zip(patches, shapes.tolist(), strict=True):
        with torch.no_grad():
            model.attend(model.embed(image[None, : rows * cols]))
        expected.append(attention_distance(model.seen[0].double(), (rows, cols), num_prefix_tokens=0)[0])
    np.testing.assert_allclose(table.mad[0], torch.stack(expected).mean(0), rtol=2e-5)
    one = measure(model, {"pixel_values": patches[:1], "pixel_attention_mask": mask[:1], "spatial_shapes": shapes[:1]})
    with pytest.raises(InputError, match="distances in pixels"):  # nobody says how large its patches are
        one.mad_in("pixels")


def test_tokens_in_an_order_of_each_image_are_found_out_one_by_one_too() -> None:
    """A model that sorts its tokens puts them elsewhere for another image."""

    class Sorting(Packed):
        def forward(self, images: Tensor) -> Tensor:  # type: ignore[override]
            tokens = F.unfold(images, 2, stride=2).transpose(1, 2)
            order = tokens.sum(-1).argsort(1)
            ordered = tokens.gather(1, order[..., None].expand_as(tokens)).flatten(0, 1)
            return super().forward(ordered, torch.tensor([[1, 4, 4]] * len(images)))

    with pytest.raises(InputError, match="elsewhere in one image than in another"):
        measure(Sorting(masked=False), torch.randn(2, 3, 8, 8))


def test_parts_with_other_heads_are_layers_of_their_own() -> None:
    class Halves(Attending):
        def __init__(self) -> None:
            super().__init__(48)

        def forward(self, images: Tensor) -> Tensor:
            x = self.embed(F.unfold(images, 4, stride=4).transpose(1, 2))
            upper, lower = x.split(12, dim=1)
            few = F.scaled_dot_product_attention(lower[:, None], x[:, None], x[:, None])
            query, key = upper.unflatten(-1, (2, -1)).transpose(1, 2), x.unflatten(-1, (2, -1)).transpose(1, 2)
            return F.scaled_dot_product_attention(query, key, key).sum() + few.sum()

    table = measure(Halves(), torch.randn(2, 3, 16, 24))
    assert table.layer_names == ("", "#2")
    assert np.isnan(table.mad[0, 1])
