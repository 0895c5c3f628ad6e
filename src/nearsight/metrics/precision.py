"""Metrics are computed in float64, wherever that exists."""

import torch
from torch import Tensor


def to_float64(tensor: Tensor) -> Tensor:
    """The tensor in float64; on the CPU if its own device has none (MPS)."""
    return (tensor.cpu() if tensor.device.type == "mps" else tensor).to(torch.float64)
