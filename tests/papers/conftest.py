"""Studies made up for tests: heads and accuracies that imitate the paper's Table 2 (or anything else) plus noise.

Nothing here was measured.
"""

import sys
from collections.abc import Callable, Collection, Mapping
from itertools import product
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from nearsight.files import canonical_hash
from nearsight.papers import declare_all
from nearsight.papers.protocol.numbers import PUBLISHED, WITH_CUTMIX, PublishedCondition
from nearsight.study.results import StudyResults

declare_all()

# Test modules are imported by path, so what stands beside them has to be put where it can be found.
sys.path.insert(0, str(Path(__file__).parent))

ABLATION = {"cutmix": ("off", "on"), "autoaugment": ("off", "on"), "smoothing": ("0", "0.1")}
LABELS = {
    (0, 0, 0): "Baseline",
    (1, 1, 1): "Modern",
    (0, 1, 1): "−CutMix",
    (1, 0, 1): "−AutoAugment",
    (1, 1, 0): "−LabelSmoothing",
    (1, 0, 0): "+CutMix",
    (0, 1, 0): "+AutoAugment",
    (0, 0, 1): "+LabelSmoothing",
}
SETTINGS = {"protocol.lr": 1e-3, "protocol.weight_decay": 0.05, "protocol.batch_size": 128, "num_measured": 5000}
SPREAD = {"test_acc": 0.004, "min_mad": 0.03, "max_mad": 0.02, "min_entropy": 0.03, "max_entropy": 0.004}
"""Over seeds, as a share of the value."""
ASSUMED = ("protocol.lr", "protocol.weight_decay", "smoothing")


def _heads(
    number: PublishedCondition, run: str, has_hierarchy: bool, shape: tuple[int, int], random: np.random.Generator
) -> pd.DataFrame:
    """Heads whose smallest and largest distance and entropy are the given ones; with a depth hierarchy or without."""
    num_layers, num_heads = shape
    layer, head = np.divmod(np.arange(num_layers * num_heads), num_heads)
    depth = layer / max(num_layers - 1, 1)
    if has_hierarchy:
        place = np.clip(0.12 + 0.62 * depth**0.7 + 0.16 * random.standard_normal(layer.size), 0.02, 0.98)
    else:
        place = np.clip(0.45 + 0.25 * random.standard_normal(layer.size), 0.02, 0.98)
    lowest = int(random.integers(num_heads)) if has_hierarchy else int(random.integers(layer.size))
    highest = layer.size - 1 - int(random.integers(num_heads))
    place[lowest], place[highest if highest != lowest else highest - 1] = 0.0, 1.0
    focus = np.clip(place + 0.05 * random.standard_normal(layer.size) * (place > 0) * (place < 1), 0, 1)
    low_mad, high_mad = number.min_mad or 0.2, number.max_mad or 0.5
    low_entropy, high_entropy = number.min_entropy or 0.4, number.max_entropy or 0.95
    return pd.DataFrame(
        {
            "run": run,
            "layer": layer,
            "layer_name": [f"blocks.{index}.attn" for index in layer],
            "head": head,
            "mad": low_mad + (high_mad - low_mad) * place,
            "mad_std": 0.02,
            "entropy": low_entropy + (high_entropy - low_entropy) * focus**0.6,
            "entropy_std": 0.03,
            "num_images": 5000,
        }
    )


def _make_study(
    name: str = "ablation-cifar100",
    *,
    seeds: int = 3,
    noise: float = 1.0,
    changed: Mapping[str, Mapping[str, float]] | None = None,
    without: Collection[tuple[str, int]] = (),
    shape: tuple[int, int] = (8, 8),
    scale: str = "full",
) -> StudyResults:
    """The paper's numbers plus noise; `changed` replaces some per condition, `without` leaves (condition, seed) out."""
    published = PUBLISHED[name].conditions
    if name == "ablation-cifar100":
        factors = ABLATION
        labels = {tuple(ABLATION[f][i] for f, i in zip(ABLATION, key, strict=True)): v for key, v in LABELS.items()}
    else:
        factors = {"protocol": ("Baseline", "Modern")}
        labels = {("Baseline",): "Baseline", ("Modern",): "Modern"}
    rows, heads, history = [], [], []
    for seed, levels in product(range(seeds), product(*factors.values())):
        label = labels[levels]
        if (label, seed) in without:
            continue
        random = np.random.default_rng([seed, *label.encode()])
        number = {**vars(published[label]), **(changed or {}).get(label, {})}
        jitter = {
            key: None if value is None else value * (1 + SPREAD[key] * noise * random.standard_normal())
            for key, value in number.items()
        }
        run = canonical_hash([label, seed])
        frame = _heads(PublishedCondition(**jitter), run, label in WITH_CUTMIX, shape, random)
        rows.append(
            {
                "run": run,
                "condition": label,
                **dict(zip(factors, levels, strict=True)),
                "seed": seed,
                "epochs": 120 + 7 * seed,
                "best_epoch": 100 + 7 * seed,
                "best_val_acc": jitter["test_acc"] + 0.01,
                "test_acc": jitter["test_acc"],
                "min_mad": frame["mad"].min(),
                "max_mad": frame["mad"].max(),
                "min_entropy": frame["entropy"].min(),
                "max_entropy": frame["entropy"].max(),
                "images_per_second": 1e5,
                "wall_seconds": 100.0,
            }
        )
        heads.append(frame)
        history.append(
            pd.DataFrame(
                {
                    "run": run,
                    "epoch": [1, 2],
                    "train_loss": [4.0, 3.0],
                    "val_loss": [4.1, 3.1],
                    "val_acc": [0.1, 0.2],
                    "lr": 1e-3,
                    "seconds": 1.0,
                }
            )
        )
    return StudyResults(
        name=name,
        factors=dict(factors),
        runs=pd.DataFrame(rows),
        heads=pd.concat(heads, ignore_index=True),
        history=pd.concat(history, ignore_index=True),
        scale=scale,
        settings=dict(SETTINGS),
        assumed=ASSUMED,
    )


@pytest.fixture(scope="session")
def make_study() -> Callable[..., StudyResults]:
    return _make_study
