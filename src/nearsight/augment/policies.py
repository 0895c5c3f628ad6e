"""Tables of the policies: how strong operations are in each bin (torchvision's two ranges), and AutoAugment's pairs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from nearsight.augment.operations import Operation
from nearsight.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Range:
    """Magnitudes from the weakest bin to the strongest, evenly spaced."""

    weakest: float
    strongest: float
    signed: bool = True
    """The sign is drawn."""
    whole: bool = False
    """Rounded to whole numbers."""
    per_side: bool = False
    """A share of the image's width (horizontal) or height (vertical) instead of pixels."""


_UNUSED = Range(0.0, 0.0, signed=False)

STANDARD: dict[Operation, Range] = {
    Operation.IDENTITY: _UNUSED,
    Operation.SHEAR_X: Range(0.0, 0.3),
    Operation.SHEAR_Y: Range(0.0, 0.3),
    Operation.TRANSLATE_X: Range(0.0, 150.0 / 331.0, per_side=True),
    Operation.TRANSLATE_Y: Range(0.0, 150.0 / 331.0, per_side=True),
    Operation.ROTATE: Range(0.0, 30.0),
    Operation.BRIGHTNESS: Range(0.0, 0.9),
    Operation.COLOR: Range(0.0, 0.9),
    Operation.CONTRAST: Range(0.0, 0.9),
    Operation.SHARPNESS: Range(0.0, 0.9),
    Operation.POSTERIZE: Range(8.0, 4.0, signed=False, whole=True),
    Operation.SOLARIZE: Range(1.0, 0.0, signed=False),
    Operation.AUTOCONTRAST: _UNUSED,
    Operation.EQUALIZE: _UNUSED,
}
"""The operations of RandAugment, and the ranges of AutoAugment (which also inverts)."""

WIDE: dict[Operation, Range] = STANDARD | {
    Operation.SHEAR_X: Range(0.0, 0.99),
    Operation.SHEAR_Y: Range(0.0, 0.99),
    Operation.TRANSLATE_X: Range(0.0, 32.0),
    Operation.TRANSLATE_Y: Range(0.0, 32.0),
    Operation.ROTATE: Range(0.0, 135.0),
    Operation.BRIGHTNESS: Range(0.0, 0.99),
    Operation.COLOR: Range(0.0, 0.99),
    Operation.CONTRAST: Range(0.0, 0.99),
    Operation.SHARPNESS: Range(0.0, 0.99),
    Operation.POSTERIZE: Range(8.0, 2.0, signed=False, whole=True),
}
"""The operations and ranges of TrivialAugment (Wide)."""


def magnitude_tables(ranges: dict[Operation, Range], num_bins: int) -> dict[str, Tensor]:
    """The ranges as tensors over all operations, for `magnitudes`."""
    by_operation = [ranges.get(operation, _UNUSED) for operation in Operation]
    bins = [torch.linspace(entry.weakest, entry.strongest, num_bins) for entry in by_operation]
    return {
        "bins": torch.stack([x.round() if entry.whole else x for x, entry in zip(bins, by_operation, strict=True)]),
        "signed": torch.tensor([entry.signed for entry in by_operation]),
        "per_side": torch.tensor([entry.per_side for entry in by_operation]),
    }


def magnitudes(
    tables: dict[str, Tensor], operation_N: Tensor, bin_N: Tensor, sign_draw_N: Tensor, height: int, width: int
) -> Tensor:
    """Magnitude of each image's operation; a sign draw below ½ makes it negative where the operation has signs."""
    size_N = torch.where(operation_N == Operation.TRANSLATE_X.value, width, height)
    magnitude_N = tables["bins"][operation_N, bin_N] * torch.where(tables["per_side"][operation_N], size_N, 1)
    return torch.where(tables["signed"][operation_N] & (sign_draw_N < 0.5), -magnitude_N, magnitude_N)


Step = tuple[Operation, float, int]
"""Operation, probability, magnitude bin of 10."""

_SHEAR_X, _SHEAR_Y = Operation.SHEAR_X, Operation.SHEAR_Y
_TRANSLATE_X, _TRANSLATE_Y, _ROTATE = Operation.TRANSLATE_X, Operation.TRANSLATE_Y, Operation.ROTATE
_BRIGHTNESS, _COLOR, _CONTRAST, _SHARPNESS = (
    Operation.BRIGHTNESS,
    Operation.COLOR,
    Operation.CONTRAST,
    Operation.SHARPNESS,
)
_POSTERIZE, _SOLARIZE, _INVERT = Operation.POSTERIZE, Operation.SOLARIZE, Operation.INVERT
_AUTOCONTRAST, _EQUALIZE = Operation.AUTOCONTRAST, Operation.EQUALIZE

POLICIES: dict[str, tuple[tuple[Step, Step], ...]] = {
    "imagenet": (
        ((_POSTERIZE, 0.4, 8), (_ROTATE, 0.6, 9)),
        ((_SOLARIZE, 0.6, 5), (_AUTOCONTRAST, 0.6, 0)),
        ((_EQUALIZE, 0.8, 0), (_EQUALIZE, 0.6, 0)),
        ((_POSTERIZE, 0.6, 7), (_POSTERIZE, 0.6, 6)),
        ((_EQUALIZE, 0.4, 0), (_SOLARIZE, 0.2, 4)),
        ((_EQUALIZE, 0.4, 0), (_ROTATE, 0.8, 8)),
        ((_SOLARIZE, 0.6, 3), (_EQUALIZE, 0.6, 0)),
        ((_POSTERIZE, 0.8, 5), (_EQUALIZE, 1.0, 0)),
        ((_ROTATE, 0.2, 3), (_SOLARIZE, 0.6, 8)),
        ((_EQUALIZE, 0.6, 0), (_POSTERIZE, 0.4, 6)),
        ((_ROTATE, 0.8, 8), (_COLOR, 0.4, 0)),
        ((_ROTATE, 0.4, 9), (_EQUALIZE, 0.6, 0)),
        ((_EQUALIZE, 0.0, 0), (_EQUALIZE, 0.8, 0)),
        ((_INVERT, 0.6, 0), (_EQUALIZE, 1.0, 0)),
        ((_COLOR, 0.6, 4), (_CONTRAST, 1.0, 8)),
        ((_ROTATE, 0.8, 8), (_COLOR, 1.0, 2)),
        ((_COLOR, 0.8, 8), (_SOLARIZE, 0.8, 7)),
        ((_SHARPNESS, 0.4, 7), (_INVERT, 0.6, 0)),
        ((_SHEAR_X, 0.6, 5), (_EQUALIZE, 1.0, 0)),
        ((_COLOR, 0.4, 0), (_EQUALIZE, 0.6, 0)),
        ((_EQUALIZE, 0.4, 0), (_SOLARIZE, 0.2, 4)),
        ((_SOLARIZE, 0.6, 5), (_AUTOCONTRAST, 0.6, 0)),
        ((_INVERT, 0.6, 0), (_EQUALIZE, 1.0, 0)),
        ((_COLOR, 0.6, 4), (_CONTRAST, 1.0, 8)),
        ((_EQUALIZE, 0.8, 0), (_EQUALIZE, 0.6, 0)),
    ),
    "cifar10": (
        ((_INVERT, 0.1, 0), (_CONTRAST, 0.2, 6)),
        ((_ROTATE, 0.7, 2), (_TRANSLATE_X, 0.3, 9)),
        ((_SHARPNESS, 0.8, 1), (_SHARPNESS, 0.9, 3)),
        ((_SHEAR_Y, 0.5, 8), (_TRANSLATE_Y, 0.7, 9)),
        ((_AUTOCONTRAST, 0.5, 0), (_EQUALIZE, 0.9, 0)),
        ((_SHEAR_Y, 0.2, 7), (_POSTERIZE, 0.3, 7)),
        ((_COLOR, 0.4, 3), (_BRIGHTNESS, 0.6, 7)),
        ((_SHARPNESS, 0.3, 9), (_BRIGHTNESS, 0.7, 9)),
        ((_EQUALIZE, 0.6, 0), (_EQUALIZE, 0.5, 0)),
        ((_CONTRAST, 0.6, 7), (_SHARPNESS, 0.6, 5)),
        ((_COLOR, 0.7, 7), (_TRANSLATE_X, 0.5, 8)),
        ((_EQUALIZE, 0.3, 0), (_AUTOCONTRAST, 0.4, 0)),
        ((_TRANSLATE_Y, 0.4, 3), (_SHARPNESS, 0.2, 6)),
        ((_BRIGHTNESS, 0.9, 6), (_COLOR, 0.2, 8)),
        ((_SOLARIZE, 0.5, 2), (_INVERT, 0.0, 0)),
        ((_EQUALIZE, 0.2, 0), (_AUTOCONTRAST, 0.6, 0)),
        ((_EQUALIZE, 0.2, 0), (_EQUALIZE, 0.6, 0)),
        ((_COLOR, 0.9, 9), (_EQUALIZE, 0.6, 0)),
        ((_AUTOCONTRAST, 0.8, 0), (_SOLARIZE, 0.2, 8)),
        ((_BRIGHTNESS, 0.1, 3), (_COLOR, 0.7, 0)),
        ((_SOLARIZE, 0.4, 5), (_AUTOCONTRAST, 0.9, 0)),
        ((_TRANSLATE_Y, 0.9, 9), (_TRANSLATE_Y, 0.7, 9)),
        ((_AUTOCONTRAST, 0.9, 0), (_SOLARIZE, 0.8, 3)),
        ((_EQUALIZE, 0.8, 0), (_INVERT, 0.1, 0)),
        ((_TRANSLATE_Y, 0.7, 9), (_AUTOCONTRAST, 0.9, 0)),
    ),
    "svhn": (
        ((_SHEAR_X, 0.9, 4), (_INVERT, 0.2, 0)),
        ((_SHEAR_Y, 0.9, 8), (_INVERT, 0.7, 0)),
        ((_EQUALIZE, 0.6, 0), (_SOLARIZE, 0.6, 6)),
        ((_INVERT, 0.9, 0), (_EQUALIZE, 0.6, 0)),
        ((_EQUALIZE, 0.6, 0), (_ROTATE, 0.9, 3)),
        ((_SHEAR_X, 0.9, 4), (_AUTOCONTRAST, 0.8, 0)),
        ((_SHEAR_Y, 0.9, 8), (_INVERT, 0.4, 0)),
        ((_SHEAR_Y, 0.9, 5), (_SOLARIZE, 0.2, 6)),
        ((_INVERT, 0.9, 0), (_AUTOCONTRAST, 0.8, 0)),
        ((_EQUALIZE, 0.6, 0), (_ROTATE, 0.9, 3)),
        ((_SHEAR_X, 0.9, 4), (_SOLARIZE, 0.3, 3)),
        ((_SHEAR_Y, 0.8, 8), (_INVERT, 0.7, 0)),
        ((_EQUALIZE, 0.9, 0), (_TRANSLATE_Y, 0.6, 6)),
        ((_INVERT, 0.9, 0), (_EQUALIZE, 0.6, 0)),
        ((_CONTRAST, 0.3, 3), (_ROTATE, 0.8, 4)),
        ((_INVERT, 0.8, 0), (_TRANSLATE_Y, 0.0, 2)),
        ((_SHEAR_Y, 0.7, 6), (_SOLARIZE, 0.4, 8)),
        ((_INVERT, 0.6, 0), (_ROTATE, 0.8, 4)),
        ((_SHEAR_Y, 0.3, 7), (_TRANSLATE_X, 0.9, 3)),
        ((_SHEAR_X, 0.1, 6), (_INVERT, 0.6, 0)),
        ((_SOLARIZE, 0.7, 2), (_TRANSLATE_Y, 0.6, 7)),
        ((_SHEAR_Y, 0.8, 4), (_INVERT, 0.8, 0)),
        ((_SHEAR_X, 0.7, 9), (_TRANSLATE_Y, 0.8, 3)),
        ((_SHEAR_Y, 0.8, 5), (_AUTOCONTRAST, 0.7, 0)),
        ((_SHEAR_X, 0.7, 2), (_INVERT, 0.1, 0)),
    ),
}
"""Data set → pairs of steps, as torchvision has them (Cubuk et al. 2019, appendix); operations without a magnitude have
bin 0."""
