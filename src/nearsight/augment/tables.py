"""Operations that map grey levels to grey levels, as tables of 256 entries per image and channel.

Whatever the operation, applying it is then one lookup, so images of a batch can differ in what is done to them.
Each table follows the arithmetic of the torchvision.transforms.v2.functional operation of that name on uint8 tensors.
Brightness and contrast are given as the change: torchvision's factor less 1.

Shape suffixes: N images, C channels (or 1: the same for all channels), H rows, W columns.
"""

import torch
from torch import Tensor

LEVELS = 256


def look_up(images_NCHW: Tensor, table_NC256: Tensor) -> Tensor:
    """Every pixel replaced by its entry."""
    index = images_NCHW.flatten(-2).to(torch.int64)
    return table_NC256.expand(*images_NCHW.shape[:2], -1).gather(-1, index).view_as(images_NCHW)


def identity_table(device: torch.device) -> Tensor:
    return torch.arange(LEVELS, device=device).to(torch.uint8)[None, None]


def brightness_table(change_N: Tensor) -> Tensor:
    return _clipped(_levels(change_N) * (1 + change_N[:, None, None]))


def contrast_table(change_N: Tensor, mean_grey_N: Tensor) -> Tensor:
    """Away from the image's mean grey, which is one number per image."""
    change = change_N[:, None, None]
    return _clipped(torch.addcmul(_levels(change_N) * (1 + change), mean_grey_N[:, None, None], -change))


def posterize_table(bits_N: Tensor) -> Tensor:
    """Keeps the upper `bits` of 8 bits (int64). Any number is taken, since all images pass here when one needs it."""
    cleared = 8 - bits_N.clamp(0, 8)[:, None, None]
    level = torch.arange(LEVELS, device=bits_N.device)
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
    histogram = torch.zeros(*index_NCP.shape[:2], LEVELS, dtype=torch.int32, device=index_NCP.device)
    histogram = histogram.scatter_add(-1, index_NCP, ones)
    brightest_NC1 = _extremes(images_NCHW)[1].unsqueeze(-1).to(torch.int64)
    step = (index_NCP.shape[-1] - histogram.gather(-1, brightest_NC1)) // 255
    below = histogram.cumsum(-1, dtype=torch.int32) - histogram
    spread = ((below + step // 2) // step.clamp(min=1)).clamp(max=255).to(torch.uint8)
    return torch.where(step == 0, identity_table(images_NCHW.device), spread)


def _levels(like: Tensor) -> Tensor:
    return torch.arange(LEVELS, dtype=torch.float32, device=like.device)


def _clipped(value: Tensor) -> Tensor:
    return value.clamp(0, 255).to(torch.uint8)


def _extremes(images_NCHW: Tensor) -> tuple[Tensor, Tensor]:
    if torch.compiler.is_compiling():
        # Compiled for a CPU, the minimum of uint8 is 0 whatever the image (pytorch/pytorch#191499).
        images_NCHW = images_NCHW.to(torch.int32)
    darkest, brightest = images_NCHW.flatten(-2).aminmax(dim=-1)
    return darkest, brightest
