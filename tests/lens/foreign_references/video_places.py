"""Where and when the tokens of video models are.

Distance on the picture is that between places, whatever the frame. Distance in time is that between times, whatever
the place. A token made of several frames counts as one time.
"""

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from vit_references.dense import Layer
from vit_references.maps import Recorded
from vit_references.mechanisms import Mechanism, Size, window_centres

from foreign_references.places import cut

FRAMES = 4
PATCH = 16


@dataclass(frozen=True, kw_only=True)
class VideoLayer(Layer):
    """Where and when the tokens of one attention are."""

    num_times: int
    query_times_WN: Tensor
    """Counted in tokens; NaN for one that is no patch."""
    key_times_WM: Tensor
    is_along_time: bool = False
    """Whether each token sees its own place alone, so that there is no distance on the picture."""

    @property
    def in_time(self) -> Layer:
        """The same attention on a picture that has a row for each time, and one column."""
        places = (
            torch.stack([times, torch.where(times.isnan(), torch.nan, 0.0)], dim=-1)
            for times in (self.query_times_WN, self.key_times_WM)
        )
        return Layer((self.num_times, 1), *places, self.axes, self.allowed_WNM)


def layer_of(
    found: Recorded,
    sizes: tuple[int, int, int],
    queries_WN3: Tensor,
    keys_WM3: Tensor | None = None,
    axes: str = "b h",
    allowed_WNM: Tensor | None = None,
    is_along_time: bool = False,
) -> VideoLayer:
    """From (time, row, column) of each token, in cells of so many times, rows and columns."""
    keys_WM3 = queries_WN3 if keys_WM3 is None else keys_WM3
    wanted, got = (queries_WN3.shape[1], keys_WM3.shape[1]), tuple(found.attention.shape[-2:])
    assert got == wanted, f"{found.name} has {got} queries and keys, not {wanted}"
    return VideoLayer(
        sizes[1:],
        queries_WN3[..., 1:],
        keys_WM3[..., 1:],
        axes,
        allowed_WNM,
        num_times=sizes[0],
        query_times_WN=queries_WN3[..., 0],
        key_times_WM=keys_WM3[..., 0],
        is_along_time=is_along_time,
    )


def cubes(times: int, image_size: Size, patch: int = PATCH) -> Tensor:
    """[times, rows, columns, 3] of a video in patches."""
    return on_lines([range(side) for side in (times, image_size[0] // patch, image_size[1] // patch)])


def on_lines(axes: list[range] | list[list[float]]) -> Tensor:
    lines = [torch.tensor(list(axis), dtype=torch.float64) for axis in axes]
    return torch.stack(torch.meshgrid(*lines, indexing="ij"), dim=-1)


def with_others(tokens_WN3: Tensor, prefix: int = 0, suffix: int = 0) -> Tensor:
    """With tokens that are no patches before and behind."""
    return F.pad(tokens_WN3, (0, 0, prefix, suffix), value=torch.nan)


# Patches that look at all times, at one or along them


def tubes(times: int, prefix: int = 0) -> Mechanism:
    """All patches of all times look at each other: those of one time after the other."""

    def places(found: Recorded, image_size: Size) -> Layer:
        video = cubes(times, image_size)
        return layer_of(found, video.shape[:3], with_others(video.reshape(1, -1, 3), prefix))

    return places


def times_of_each_place(times: int, prefix: int = 0) -> Mechanism:
    """As `tubes`, but those of one place after the other."""

    def places(found: Recorded, image_size: Size) -> Layer:
        video = cubes(times, image_size)
        return layer_of(found, video.shape[:3], with_others(video.permute(1, 2, 0, 3).reshape(1, -1, 3), prefix))

    return places


def frame_by_frame(times: int, prefix: int = 0, suffix: int = 0) -> Mechanism:
    """Patches look at those of the same time."""

    def places(found: Recorded, image_size: Size) -> Layer:
        video = cubes(times, image_size)
        return layer_of(found, video.shape[:3], with_others(video.flatten(1, 2), prefix, suffix), axes="bw h")

    return places


def along_time(times: int, prefix: int = 0) -> Mechanism:
    """Patches look at those of the same place; before the places come some rows of tokens that have none."""

    def places(found: Recorded, image_size: Size) -> Layer:
        video = cubes(times, image_size)
        lines = video.flatten(1, 2).transpose(0, 1)  # [places, times, 3]
        lines = F.pad(lines, (0, 0, 0, 0, prefix, 0), value=torch.nan)
        return layer_of(found, video.shape[:3], lines, axes="bw h", is_along_time=True)

    return places


def among_masks(times: int) -> Mechanism:
    """V-JEPA 2's predictor: all patches and a mask token for each, in the order in which it sorts them."""

    def places(found: Recorded, image_size: Size) -> Layer:
        video = cubes(times, image_size)
        tokens = video.reshape(-1, 3)
        order = torch.argsort(torch.arange(len(tokens)).repeat(2)[None], dim=1)[0]
        both = torch.cat([tokens, torch.full_like(tokens, torch.nan)])
        return layer_of(found, video.shape[:3], both[order][None])

    return places


# torchvision's


def shifted_boxes(found: Recorded, image_size: Size) -> Layer:
    """Video Swin: boxes of 2×4×4 tokens that every other block shifts by half, where there is more than one."""
    stage = int(found.name.split(".")[1]) // 2
    video = cubes(FRAMES, image_size, 4 * 2**stage)
    sizes, box = video.shape[:3], (2, 4, 4)
    is_shifted = found.name.split(".")[2] == "1"
    shift = [side // 2 if is_shifted and size > side else 0 for size, side in zip(sizes, box, strict=True)]
    padded = [size + -size % side for size, side in zip(sizes, box, strict=True)]
    margins = [0, 0] + [
        margin for size, full in zip(sizes[::-1], padded[::-1], strict=True) for margin in (0, full - size)
    ]
    parts = boxes(torch.roll(F.pad(video, margins, value=torch.nan), [-step for step in shift], (0, 1, 2)), box)
    beyond = torch.stack(
        [
            torch.arange(size).reshape([-1 if other == axis else 1 for other in range(3)]).expand(padded)
            >= size - shift[axis]
            for axis, size in enumerate(padded)
        ],
        dim=-1,
    )
    regions = boxes(beyond, box)
    allowed = (regions[:, :, None] == regions[:, None]).all(-1)
    return layer_of(found, sizes, parts, axes="bw h", allowed_WNM=allowed)


def boxes(video: Tensor, box: tuple[int, int, int]) -> Tensor:
    """[boxes, tokens of each, …] of [times, rows, columns, …], in order."""
    flat = [cut(part, box[1:]) for part in video]  # [times][windows, 16, …]
    stacked = torch.stack(flat).unflatten(0, (-1, box[0]))  # [boxes in time, 2, windows, 16, …]
    return stacked.transpose(1, 2).flatten(2, 3).flatten(0, 1)


def pooled_tubes(found: Recorded, image_size: Size) -> Layer:
    """MViT: queries and keys by strided convolutions over time, rows and columns, behind CLS."""
    sizes = (FRAMES // 2, image_size[0] // 4, image_size[1] // 4)
    for block in list(found.model.blocks)[: int(found.name.split(".")[1])]:
        sizes = tuple(len(line) for line in _pooled(sizes, block.attn.pool_q))
    lines = [_pooled(sizes, pool) for pool in (found.module.pool_q, found.module.pool_k)]
    finer = max(lines, key=lambda axes: len(axes[1]))
    tokens = [
        with_others(on_lines([_in_cells(*pair) for pair in zip(axes, finer, strict=True)]).reshape(1, -1, 3), 1)
        for axes in lines
    ]
    return layer_of(found, tuple(map(len, finer)), *tokens)


def _pooled(sizes: tuple[int, ...], pool: torch.nn.Module | None) -> list[list[float]]:
    return [window_centres(side, pool.pool if pool else None, axis) for axis, side in enumerate(sizes)]


def _in_cells(positions: list[float], lines: list[float]) -> list[float]:
    """In cells of the finer grid, whose lines are evenly apart but for its edges."""
    return np.interp(positions, lines, range(len(lines))).tolist()
