"""Measured models made up for tests: every number differs from every other, so that a mix-up shows."""

from collections.abc import Callable

import numpy as np
import pandas as pd
import pytest

from nearsight.report import ModelHeads


def _heads_frame(
    num_layers: int = 6, num_heads: int = 4, *, lowest: float = 0.1, spread: float = 0.01, seed: int = 0, epoch: int = 3
) -> pd.DataFrame:
    random = np.random.default_rng(seed)
    layer, head = np.divmod(np.arange(num_layers * num_heads), num_heads)
    mad = lowest + 0.3 * random.permutation(layer.size) / layer.size
    return pd.DataFrame(
        {
            "epoch": epoch,
            "layer": layer,
            "layer_name": [f"blocks.{number}.attn" for number in layer],
            "head": head,
            "mad": mad,
            "mad_std": spread * random.uniform(0.5, 1.5, layer.size),
            "entropy": 0.2 + mad * random.uniform(0.4, 0.8, layer.size),
            "entropy_std": 0.02,
            "num_images": 64,
        }
    )


def _history_frame(num_epochs: int = 4) -> pd.DataFrame:
    epoch = np.arange(1, num_epochs + 1)
    return pd.DataFrame(
        {
            "epoch": epoch,
            "train_loss": 2.0 / epoch,
            "val_loss": 2.2 / epoch,
            "val_acc": 0.1 * epoch,
            "lr": 1e-3 / epoch,
            "seconds": 1.5,
        }
    )


def _make_model(label: str = "model", *, epochs: int = 4, **shape: float) -> ModelHeads:
    return ModelHeads(label=label, heads=_heads_frame(**shape), history=_history_frame(epochs))


@pytest.fixture(scope="session")
def heads_frame() -> Callable[..., pd.DataFrame]:
    return _heads_frame


@pytest.fixture(scope="session")
def history_frame() -> Callable[..., pd.DataFrame]:
    return _history_frame


@pytest.fixture(scope="session")
def make_model() -> Callable[..., ModelHeads]:
    return _make_model
