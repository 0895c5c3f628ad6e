"""What all tests share."""

import sys
from pathlib import Path

import pytest
import torch

# Test modules are imported by path, so what they share has to be put where it can be found.
sys.path.insert(0, str(Path(__file__).parent / "plugins"))
pytest_plugins = ["interpreted_kernels"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that need a GPU say so by their mark; without one they are skipped, whatever selected them."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
