"""What operations do to pixels, each as torchvision.transforms.v2.functional does it on uint8 tensors.

Three kinds: those that move pixels (shear, translate, rotate) are an inverse matrix per image and one gather for all;
those that map grey levels are a table of 256 entries per image and channel and one lookup for all, so that images of a
batch can differ in what is done to them; those that look at more than one number of a pixel (saturation, sharpness,
hue) are blends. Strengths of brightness, contrast and blends are given as the change: torchvision's factor less 1.
Steps are in place where they can be: on a CPU fresh memory costs more than the arithmetic.

Shape suffixes: N images, C channels (1 or 3; of a table, 1 is the same for all channels), H rows, W columns.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from nearsight.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


_LEVELS = 256


def identity_matrices(num: int, device: torch.device) -> Tensor:
    """[N, 2, 3] float64: output pixel, measured from the image's centre, to input pixel."""
    return torch.eye(2, 3, dtype=torch.float64, device=device).expand(num, 2, 3)


def shear_x_matrices(magnitude_N: Tensor, height: int) -> Tensor:
    """x + m·y, about the top left corner as torchvision's policies do it."""
    m, zero, one = _columns(magnitude_N)
    return _matrices(one, m, m * (0.5 * height), zero, one, zero)


def shear_y_matrices(magnitude_N: Tensor, width: int) -> Tensor:
    m, zero, one = _columns(magnitude_N)
    return _matrices(one, zero, zero, m, one, m * (0.5 * width))


def translate_matrices(x_N: Tensor, y_N: Tensor) -> Tensor:
    """Moves the picture right by x and down by y, cut to whole pixels."""
    x, zero, one = _columns(x_N)
    return _matrices(one, zero, -x.trunc(), zero, one, -y_N.to(torch.float64).trunc())


def rotate_matrices(degrees_N: Tensor) -> Tensor:
    """Counter-clockwise about the centre."""
    radians, zero, _ = _columns(degrees_N)
    radians = radians * (math.pi / 180)
    cosine, sine = radians.cos(), radians.sin()
    return _matrices(cosine, -sine, zero, sine, cosine, zero)


def sample_nearest(images_NCHW: Tensor, matrix_N23: Tensor, fill_C: Tensor) -> Tensor:
    """The images as the matrices see them; what comes from outside is `fill_C`.

    The sampling grid is float32 and normalised to [-1, 1], as torchvision's, so that the same pixel is picked.
    """
    channels, height, width = images_NCHW.shape[-3:]
    device = images_NCHW.device
    x_W = torch.arange(width, device=device, dtype=torch.float32) - 0.5 * (width - 1)
    y_H1 = torch.arange(height, device=device, dtype=torch.float32).unsqueeze(-1) - 0.5 * (height - 1)
    scaled = matrix_N23.to(torch.float32)[..., None, None]
    column_NHW = _source_position(scaled[:, 0] / (0.5 * width), x_W, y_H1, width)
    row_NHW = _source_position(scaled[:, 1] / (0.5 * height), x_W, y_H1, height)
    nearest_column, nearest_row = column_NHW.clamp(0, width - 1), row_NHW.clamp(0, height - 1)
    inside_NHW = (column_NHW == nearest_column) & (row_NHW == nearest_row)
    flat_NHW = (nearest_row * width + nearest_column).to(torch.int64)
    picked = images_NCHW.flatten(-2).gather(-1, flat_NHW.flatten(-2).unsqueeze(1).expand(-1, channels, -1))
    return torch.where(inside_NHW.unsqueeze(1), picked.view_as(images_NCHW), fill_C[:, None, None])


def _source_position(row_N3: Tensor, x_W: Tensor, y_H1: Tensor, size: int) -> Tensor:
    grid_NHW = (x_W * row_N3[:, 0] + y_H1 * row_N3[:, 1]).add_(row_N3[:, 2])
    return grid_NHW.add_(1).mul_(size).sub_(1).mul_(0.5).round_()


def _columns(magnitude_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    magnitude = magnitude_N.to(torch.float64)
    return magnitude, torch.zeros_like(magnitude), torch.ones_like(magnitude)


def _matrices(*entries_N: Tensor) -> Tensor:
    return torch.stack(entries_N, dim=-1).view(-1, 2, 3)


def look_up(images_NCHW: Tensor, table_NC256: Tensor) -> Tensor:
    """Every pixel replaced by its entry."""
    index = images_NCHW.flatten(-2).to(torch.int64)
    return table_NC256.expand(*images_NCHW.shape[:2], -1).gather(-1, index).view_as(images_NCHW)


def identity_table(device: torch.device) -> Tensor:
    return torch.arange(_LEVELS, device=device).to(torch.uint8)[None, None]


def brightness_table(change_N: Tensor) -> Tensor:
    return _clipped(_levels(change_N) * (1 + change_N[:, None, None]))


def contrast_table(change_N: Tensor, mean_grey_N: Tensor) -> Tensor:
    """Away from the image's mean grey, which is one number per image."""
    change = change_N[:, None, None]
    return _clipped(torch.addcmul(_levels(change_N) * (1 + change), mean_grey_N[:, None, None], -change))


def posterize_table(bits_N: Tensor) -> Tensor:
    """Keeps the upper `bits` of 8 bits (int64). Any number is taken, since all images pass here when one needs it."""
    cleared = 8 - bits_N.clamp(0, 8)[:, None, None]
    level = torch.arange(_LEVELS, device=bits_N.device)
    return (level >> cleared << cleared).to(torch.uint8)


def solarize_table(threshold_N: Tensor) -> Tensor:
    """Inverts levels from the threshold on."""
    level = _levels(threshold_N)
    return torch.where(level >= threshold_N[:, None, None], 255 - level, level).to(torch.uint8)


def solarize_add_table(amount_N: Tensor) -> Tensor:
    """Adds the amount (whole levels) to levels below 128 (timm's `solarize_add`; torchvision has none)."""
    level = _levels(amount_N)
    added = (level + amount_N[:, None, None]).clamp(max=255)
    return torch.where(level < 128, added, level).to(torch.uint8)


def invert_table(device: torch.device) -> Tensor:
    return 255 - identity_table(device)


def autocontrast_table(images_NCHW: Tensor) -> Tensor:
    """Stretches each channel to the full range."""
    darkest_NC1, brightest_NC1 = (level.unsqueeze(-1).to(torch.float32) for level in _extremes(images_NCHW))
    flat = brightest_NC1 == darkest_NC1
    scale = torch.where(flat, 1.0, (brightest_NC1 - darkest_NC1) * (1.0 / 255.0))
    above = _levels(images_NCHW) - torch.where(flat, 0.0, darkest_NC1)
    # Many quotients are whole numbers, where cutting off the fraction needs the correctly rounded one. Compilers may
    # approximate float32 division; a float64 quotient rounded to float32 is correct either way.
    return _clipped((above.to(torch.float64) / scale.to(torch.float64)).to(torch.float32))


def equalize_table(images_NCHW: Tensor) -> Tensor:
    """Makes the levels of each channel equally frequent (Pillow's integer formula)."""
    index_NCP = images_NCHW.flatten(-2).to(torch.int64)
    ones = torch.ones((), dtype=torch.int32, device=index_NCP.device).expand_as(index_NCP)
    histogram = torch.zeros(*index_NCP.shape[:2], _LEVELS, dtype=torch.int32, device=index_NCP.device)
    histogram = histogram.scatter_add(-1, index_NCP, ones)
    brightest_NC1 = _extremes(images_NCHW)[1].unsqueeze(-1).to(torch.int64)
    step = (index_NCP.shape[-1] - histogram.gather(-1, brightest_NC1)) // 255
    below = histogram.cumsum(-1, dtype=torch.int32) - histogram
    spread = ((below + step // 2) // step.clamp(min=1)).clamp(max=255).to(torch.uint8)
    return torch.where(step == 0, identity_table(images_NCHW.device), spread)


def _levels(like: Tensor) -> Tensor:
    return torch.arange(_LEVELS, dtype=torch.float32, device=like.device)


def _clipped(value: Tensor) -> Tensor:
    return value.clamp(0, 255).to(torch.uint8)


def _extremes(images_NCHW: Tensor) -> tuple[Tensor, Tensor]:
    if torch.compiler.is_compiling():
        # Compiled for a CPU, the minimum of uint8 is 0 whatever the image (pytorch/pytorch#191499).
        images_NCHW = images_NCHW.to(torch.int32)
    darkest, brightest = images_NCHW.flatten(-2).aminmax(dim=-1)
    return darkest, brightest


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
    # `addcmul` for exactness: like torchvision's blend it rounds once.
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
