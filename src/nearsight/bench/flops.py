"""What a model must compute at the least, and what a device could compute at the most."""

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

_PEAK_BF16 = {
    "NVIDIA H200": 989e12,
    "NVIDIA H100 80GB HBM3": 989e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA A100-SXM4-40GB": 312e12,
}
"""FLOP/s of dense bfloat16 products from the maker's data sheets, by the name torch gives the device.

Names are whole on purpose: PCIe and NVL cards of the same family are slower."""


def peak_flops(device: torch.device) -> float | None:
    """The device's bfloat16 peak, where it is known."""
    return _PEAK_BF16.get(torch.cuda.get_device_name(device)) if device.type == "cuda" else None


def flops_per_image(model: nn.Module, image_size: tuple[int, int]) -> tuple[int, int]:
    """(forward, forward and backward) of one image: the matrix products, two operations per multiply-add."""
    image = torch.zeros(1, 3, *image_size, device=next(model.parameters()).device)
    # A fused backward computes the attention a second time; the count is to be of the work, not of a kernel's habits.
    with sdpa_kernel(SDPBackend.MATH):
        with FlopCounterMode(display=False) as forward:
            output = model(image).sum()
        with FlopCounterMode(display=False) as backward:
            torch.autograd.grad(output, list(model.parameters()))
    return forward.get_total_flops(), forward.get_total_flops() + backward.get_total_flops()
