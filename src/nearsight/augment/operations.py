"""One operation per image, chosen image by image: the engine behind AutoAugment, RandAugment and ColorJitter.

On an accelerator every kind of work is done for the whole batch and each image keeps what it needs: shapes never depend
on the draws, so the step can be captured in a graph. On the CPU, where work costs more than waiting, images are sorted
by operation and only what is needed is done. Both give the same bits.

Magnitudes mean what they mean in torchvision's policies: degrees, pixels, blend factors less 1, bits kept, the solarize
threshold as a share of 255, a share of the hue circle.

Shape suffixes: N images, C channels, H rows, W columns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from enum import IntEnum
from typing import TYPE_CHECKING, TypeVar

from nearsight.augment import pixels
from nearsight.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


class Operation(IntEnum):
    """What can be done to an image: first those that move pixels, then those that map levels, then those that blend."""

    IDENTITY = 0
    SHEAR_X = 1
    SHEAR_Y = 2
    TRANSLATE_X = 3
    TRANSLATE_Y = 4
    ROTATE = 5
    BRIGHTNESS = 6
    CONTRAST = 7
    POSTERIZE = 8
    SOLARIZE = 9
    SOLARIZE_ADD = 10
    AUTOCONTRAST = 11
    EQUALIZE = 12
    INVERT = 13
    COLOR = 14
    SHARPNESS = 15
    HUE = 16


def apply_operations(
    images_NCHW: Tensor, operation_N: Tensor, magnitude_N: Tensor, fill_C: Tensor, possible: frozenset[Operation]
) -> Tensor:
    """uint8 images after their operations; `possible` names all operations that can occur."""
    if images_NCHW.device.type == "cpu" and not torch.compiler.is_compiling():
        return only_what_is_needed(images_NCHW, operation_N, magnitude_N, fill_C)
    return everything_and_select(images_NCHW, operation_N, magnitude_N, fill_C, possible)


def apply_in_turn(
    images_KBCHW: Tensor,
    operation_Nn: Tensor,
    magnitude_Nn: Tensor,
    possible: frozenset[Operation],
    fill_C: Tensor | None = None,
) -> Tensor:
    """uint8 images [K, B, C, H, W] after their n operations [K · B, n]; uncovered pixels are black unless filled."""
    if fill_C is None:
        fill_C = torch.zeros(images_KBCHW.shape[2], dtype=torch.uint8, device=images_KBCHW.device)
    result = images_KBCHW.flatten(0, 1)
    for operation_N, magnitude_N in zip(operation_Nn.unbind(-1), magnitude_Nn.unbind(-1), strict=True):
        result = apply_operations(result, operation_N, magnitude_N, fill_C, possible)
    return result.view_as(images_KBCHW)


Entry = TypeVar("Entry")
Matrices = Callable[["Tensor", int, int], "Tensor"]
Table = Callable[["Tensor", "Tensor"], "Tensor"]
Blend = Callable[["Tensor", "Tensor"], "Tensor"]

_MATRICES: dict[Operation, Matrices] = {
    Operation.SHEAR_X: lambda m, height, width: pixels.shear_x_matrices(m, height),
    Operation.SHEAR_Y: lambda m, height, width: pixels.shear_y_matrices(m, width),
    Operation.TRANSLATE_X: lambda m, height, width: pixels.translate_matrices(m, torch.zeros_like(m)),
    Operation.TRANSLATE_Y: lambda m, height, width: pixels.translate_matrices(torch.zeros_like(m), m),
    Operation.ROTATE: lambda m, height, width: pixels.rotate_matrices(m),
}
_TABLES: dict[Operation, Table] = {
    Operation.BRIGHTNESS: lambda images, m: pixels.brightness_table(m),
    Operation.CONTRAST: lambda images, m: pixels.contrast_table(m, pixels.mean_grey(images)),
    Operation.POSTERIZE: lambda images, m: pixels.posterize_table(m.round().to(torch.int64)),
    Operation.SOLARIZE: lambda images, m: pixels.solarize_table(255 * m),
    Operation.SOLARIZE_ADD: lambda images, m: pixels.solarize_add_table(m.trunc()),
    Operation.AUTOCONTRAST: lambda images, m: pixels.autocontrast_table(images),
    Operation.EQUALIZE: lambda images, m: pixels.equalize_table(images),
    Operation.INVERT: lambda images, m: pixels.invert_table(images.device),
}
_BLENDS: dict[Operation, Blend] = {
    Operation.COLOR: pixels.saturation,
    Operation.SHARPNESS: pixels.sharpness,
    Operation.HUE: pixels.hue,
}


def everything_and_select(
    images_NCHW: Tensor, operation_N: Tensor, magnitude_N: Tensor, fill_C: Tensor, possible: frozenset[Operation]
) -> Tensor:
    """Fixed shapes, and the host does not read the draws. Images with another operation pass each kind unchanged."""
    height, width = images_NCHW.shape[-2:]
    images = images_NCHW
    if matrices := _possible(_MATRICES, possible):
        matrix_N23 = pixels.identity_matrices(len(images), images.device)
        for operation, build in matrices.items():
            here = (operation_N == operation.value)[:, None, None]
            matrix_N23 = torch.where(here, build(magnitude_N, height, width), matrix_N23)
        images = pixels.sample_nearest(images, matrix_N23, fill_C)
    result = images
    if lookups := _possible(_TABLES, possible):
        table_NC256 = pixels.identity_table(images.device)
        for operation, tabulate in lookups.items():
            table_NC256 = torch.where(
                (operation_N == operation.value)[:, None, None], tabulate(images, magnitude_N), table_NC256
            )
        result = pixels.look_up(images, table_NC256)
    for operation, blend in _possible(_BLENDS, possible).items():
        result = torch.where((operation_N == operation.value)[:, None, None, None], blend(images, magnitude_N), result)
    return result


def only_what_is_needed(images_NCHW: Tensor, operation_N: Tensor, magnitude_N: Tensor, fill_C: Tensor) -> Tensor:
    """Images sorted by operation, so that those with the same work to do lie side by side; then back in their order."""
    channels, height, width = images_NCHW.shape[-3:]
    order_N = operation_N.argsort(stable=True)
    ends = [0, *torch.bincount(operation_N, minlength=len(Operation)).cumsum(0).tolist()]
    sorted_images, sorted_magnitude = images_NCHW.index_select(0, order_N), magnitude_N[order_N]

    def members(operations: Iterable[Operation]) -> Iterator[tuple[Operation, Tensor, Tensor]]:
        """The operations that occur, with their images and magnitudes."""
        for operation in operations:
            here = slice(ends[operation], ends[operation + 1])
            if here.start < here.stop:
                yield operation, sorted_images[here], sorted_magnitude[here]

    done = [sorted_images[: ends[Operation.IDENTITY + 1]]]
    moved = sorted_images[ends[min(_MATRICES)] : ends[max(_MATRICES) + 1]]
    if len(moved):
        matrices = [_MATRICES[operation](magnitude, height, width) for operation, _, magnitude in members(_MATRICES)]
        done.append(pixels.sample_nearest(moved, torch.cat(matrices), fill_C))
    mapped = sorted_images[ends[min(_TABLES)] : ends[max(_TABLES) + 1]]
    if len(mapped):
        lookups = [
            _TABLES[operation](images, magnitude).expand(len(images), channels, -1)
            for operation, images, magnitude in members(_TABLES)
        ]
        done.append(pixels.look_up(mapped, torch.cat(lookups)))
    done += [_BLENDS[operation](images, magnitude) for operation, images, magnitude in members(_BLENDS)]
    return torch.cat(done).index_select(0, order_N.argsort())


def _possible(table: dict[Operation, Entry], possible: frozenset[Operation]) -> dict[Operation, Entry]:
    return {operation: entry for operation, entry in table.items() if operation in possible}
