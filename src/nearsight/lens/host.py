"""Where the lens keeps its own tensors."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


def on_the_host() -> AbstractContextManager[Any]:
    """Around code of the lens: what it makes without naming a device is on the CPU, wherever the caller's
    `torch.set_default_device` puts things. The model itself runs as the caller has set it."""
    return nullcontext() if torch.get_default_device().type == "cpu" else torch.device("cpu")
