"""How strong an operation is at each of the bins a policy counts in: torchvision's two ranges."""

from dataclasses import dataclass

import torch
from torch import Tensor

from nearsight.augment.operations import Operation


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
