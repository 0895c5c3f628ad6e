"""Colour operations that look at more than one number of a pixel: saturation, sharpness, hue.

Each follows the torchvision.transforms.v2.functional operation of that name on uint8 tensors. Strengths are given as
the change: torchvision's factor less 1. `addcmul` is for exactness: like torchvision's blend it rounds once. Steps are
in place where they can be: on a CPU fresh memory costs more than the arithmetic.

Shape suffixes: N images, C channels (1 or 3), H rows, W columns.
"""

import torch
from torch import Tensor


def greyscale(images_NCHW: Tensor) -> Tensor:
    """ITU-R 601 luma cut to whole levels, float32 [N, 1, H, W]."""
    if images_NCHW.shape[1] == 1:
        return images_NCHW.to(torch.float32)
    red, green, blue = images_NCHW.unsqueeze(2).unbind(1)
    return (red * 0.2989).add_(green, alpha=0.587).add_(blue, alpha=0.114).floor_()


def mean_grey(images_NCHW: Tensor) -> Tensor:
    return greyscale(images_NCHW).mean(dim=(-3, -2, -1))


def saturation(images_NCHW: Tensor, change_N: Tensor) -> Tensor:
    """Away from the grey image: -1 is grey, 0 the original."""
    if images_NCHW.shape[1] == 1:
        return images_NCHW
    change = change_N[:, None, None, None]
    blend = (images_NCHW * (1 + change)).addcmul_(greyscale(images_NCHW), -change)
    return blend.clamp_(0, 255).to(torch.uint8)


def sharpness(images_NCHW: Tensor, change_N: Tensor) -> Tensor:
    """Away from a 3×3 smoothing (centre 5, neighbours 1, of 13): -1 is smooth, 0 the original; the border stays."""
    height, width = images_NCHW.shape[-2:]
    if height <= 2 or width <= 2:
        return images_NCHW
    # Neighbours by shifts of the flattened image, which are contiguous. A shift that runs into the next row is wrong,
    # but only at the left and right border, which stay as they are.
    flat = images_NCHW.flatten(-2).to(torch.int16)
    columns = flat[..., : -2 * width] + flat[..., width:-width] + flat[..., 2 * width :]
    inner = flat[..., width + 1 : -width - 1]
    # Sums of nine levels and 4 centres are whole numbers, and thirteenths are never halfway: rounding has no ties.
    total = columns[..., :-2] + columns[..., 1:-1] + columns[..., 2:] + 4 * inner
    gain = total.to(torch.float32).mul_(1.0 / 13.0).round_().sub_(inner)
    sharp = inner.to(torch.float32).addcmul_(gain, -change_N[:, None, None]).clamp_(0, 255).to(torch.uint8)
    framed = torch.nn.functional.pad(sharp, (width + 1, width + 1)).view_as(images_NCHW)
    return torch.where(_interior(height, width, images_NCHW.device), framed, images_NCHW)


def _interior(height: int, width: int, device: torch.device) -> Tensor:
    row_H1 = torch.arange(height, device=device).unsqueeze(-1)
    column_W = torch.arange(width, device=device)
    return (row_H1 > 0) & (row_H1 < height - 1) & (column_W > 0) & (column_W < width - 1)


def hue(images_NCHW: Tensor, shift_N: Tensor) -> Tensor:
    """Turns the hue by `shift` of a full circle."""
    if images_NCHW.shape[1] == 1:
        return images_NCHW
    angle, chroma_share, value = _hue_saturation_value(images_NCHW.to(torch.float32) * (1.0 / 255.0))
    sixth = (angle + shift_N[:, None, None]).remainder(1.0) * 6
    # RGB from HSV without a table: each channel falls from `value` by the chroma over a trapezoid of the hue circle.
    corner = (5 - 2 * torch.arange(3, device=images_NCHW.device))[:, None, None]
    position = (sixth.unsqueeze(1) + corner).remainder(6.0)
    depth = torch.minimum(position, 4 - position).clamp(0, 1)
    rgb = value.unsqueeze(1) * (1 - chroma_share.unsqueeze(1) * depth)
    # torchvision's way back from [0, 1] to uint8.
    return (rgb * (256.0 - 1e-3)).to(torch.uint8)


def _hue_saturation_value(rgb_NCHW: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Each [N, H, W], in [0, 1]; grey pixels have hue and saturation 0."""
    red, green, blue = rgb_NCHW.unbind(1)
    darkest, brightest = rgb_NCHW.amin(1), rgb_NCHW.amax(1)
    chroma = brightest - darkest
    grey = chroma == 0
    divisor = torch.where(grey, 1.0, chroma)
    sector = torch.where(
        brightest == red,
        (green - blue) / divisor,
        torch.where(brightest == green, 2 + (blue - red) / divisor, 4 + (red - green) / divisor),
    )
    angle = (sector * (1.0 / 6.0)).remainder(1.0)
    return angle, chroma / torch.where(grey, 1.0, brightest), brightest
