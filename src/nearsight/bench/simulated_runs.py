"""Finished run folders without training: files as large and as many as those of a paper's runs, with random numbers."""

import json
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch

from nearsight.files import as_json
from nearsight.train import HEADS_COLUMNS, LAYERS_COLUMNS, Listener, RunConfig, RunFolder
from nearsight.train.integrity import provenance

NUM_EPOCHS = 130
NUM_MEASURED = 5000
_SECONDS_PER_EPOCH = 0.6
_IMAGES_PER_SECOND = 60_000.0


class SimulatedTraining:
    """Stands in for `nearsight.train.train_runs`: what it leaves of a run is there at once."""

    def __init__(self, num_epochs: int = NUM_EPOCHS) -> None:
        self._num_epochs = num_epochs
        self._certificate = provenance(torch.device("cpu"))  # asks for the commit, which takes a while

    def __call__(self, configs: Sequence[RunConfig], folders: Sequence[RunFolder], *, listener: Listener) -> None:
        for config, folder in zip(configs, folders, strict=True):
            self.write(config, folder)
            listener.finished(config, folder)

    def write(self, config: RunConfig, folder: RunFolder) -> None:
        """All files of a finished run but the weights."""
        identity, path = config.identity, folder.path
        random = np.random.default_rng(int(identity, 16))
        path.mkdir(parents=True, exist_ok=True)
        (path / "config.json").write_text(as_json(config.to_json()), encoding="utf-8")
        accuracies = random.random(self._num_epochs)
        best = int(accuracies.argmax())
        self._write_epochs(folder, accuracies, random)
        mad, entropy = _write_heads(config, folder, best + 1, random)
        result = {
            "identity": identity,
            "test_acc": float(random.random()),
            "test_loss": float(random.random()),
            "val_acc": float(accuracies[best]),
            "best_epoch": best + 1,
            "epochs": self._num_epochs,
            "min_mad": float(mad.min()),
            "max_mad": float(mad.max()),
            "min_entropy": float(entropy.min()),
            "max_entropy": float(entropy.max()),
            "max_share_self": float(random.random()),
            "max_share_near": float(random.random()),
            "num_measured": NUM_MEASURED,
            "position_association": float(random.random()),
        }
        (path / "result.json").write_text(as_json(result), encoding="utf-8")
        folder.finish(
            {
                **self._certificate,
                "processes": 1,
                "seed": config.seed,
                "identity": identity,
                "data_fingerprint": "0" * 64,
                "wall_seconds": self._num_epochs * _SECONDS_PER_EPOCH,
                "images_per_second": _IMAGES_PER_SECOND,
            }
        )

    def _write_epochs(self, folder: RunFolder, accuracies: np.ndarray, random: np.random.Generator) -> None:
        numbers = random.random((self._num_epochs, 3)).tolist()
        rows = [
            (epoch, train_loss, val_loss, accuracy, lr, _SECONDS_PER_EPOCH)
            for epoch, (accuracy, (train_loss, val_loss, lr)) in enumerate(
                zip(accuracies.tolist(), numbers, strict=True), start=1
            )
        ]
        _write_csv(folder, "history.csv", ("epoch", "train_loss", "val_loss", "val_acc", "lr", "seconds"), rows)
        events: list[dict[str, Any]] = [{"event": "started", "epochs_done": 0, "device": "cuda"}]
        events += [{"event": "epoch", "epoch": row[0], "val_acc": row[3]} for row in rows]
        stamp = {"time": "2000-01-01T00:00:00+0000"}
        lines = "".join(json.dumps({**stamp, **event}) + "\n" for event in events)
        (folder.path / "events.jsonl").write_text(lines, encoding="utf-8")


def _write_heads(
    config: RunConfig, folder: RunFolder, epoch: int, random: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """heads.csv and layers.csv; distances and entropies, layers × heads."""
    depth, num_heads = config.model.depth, config.model.num_heads
    mad, mad_std, entropy, entropy_std = random.random((4, depth, num_heads))
    rows = [
        (
            *(epoch, layer, f"blocks.{layer}.attn", head, float(mad[layer, head]), float(mad_std[layer, head])),
            *(float(entropy[layer, head]), float(entropy_std[layer, head]), NUM_MEASURED),
        )
        for layer in range(depth)
        for head in range(num_heads)
    ]
    _write_csv(folder, folder.heads.name, HEADS_COLUMNS, rows)
    layers = [(layer, f"blocks.{layer}.attn", *random.random(2).tolist(), NUM_MEASURED) for layer in range(depth)]
    _write_csv(folder, folder.layers.name, LAYERS_COLUMNS, layers)
    return mad, entropy


def _write_csv(folder: RunFolder, name: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    lines = [",".join(columns), *(",".join(map(str, row)) for row in rows)]
    (folder.path / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
