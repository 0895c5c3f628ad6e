"""The end of a run: the best weights become the model, the test set is touched once, the heads are measured."""

import time
from collections.abc import Callable

import pandas as pd
import torch
from torch import nn

from nearsight.data import Dataset, DeviceImages
from nearsight.errors import InputError
from nearsight.files import write_json, write_text
from nearsight.lens.positions import position_gram
from nearsight.lens.running import NoSpatialAttentionError
from nearsight.models import load_model, save_model
from nearsight.train.cell import Cell
from nearsight.train.engine import Stack
from nearsight.train.folder import HEADS_COLUMNS, LAYERS_COLUMNS, write_heads
from nearsight.train.heads import measure_on_test
from nearsight.train.provenance import provenance

_EXTREMES = ("min_mad", "max_mad", "min_entropy", "max_entropy", "max_share_self", "max_share_near")
"""Over all heads. Shares of attention are those on a patch itself, and on it and its 8 neighbours: a head that looks at
the nearest edge of the image has a small distance too, and does not look near."""


def finish(cell: Cell, stack: Stack, dataset: Dataset, heed: Callable[[], None]) -> None:
    """Write all that a complete folder has beside its history.

    `heed` is called now and then and may raise: cut short anywhere, all of this is done again.
    """
    heed()
    config, folder, best = cell.config, cell.folder, cell.progress.best
    assert best is not None
    device = stack.device
    began = time.perf_counter()
    folder.write_history(cell.progress.history)  # again, in case that it is what was damaged
    save_model(folder.model, cell.best_weights, config.model, dataset.image_size, dataset.num_classes)
    best_stack = {name: weight.unsqueeze(0) for name, weight in cell.best_weights.items()}
    every_test_image = torch.arange(len(dataset.test), device=device)
    (test_loss,), (test_acc,) = stack.evaluate(DeviceImages(dataset.test, device), every_test_image, best_stack)
    model = load_model(folder.model)
    measured = _measure(model, cell, dataset, device, heed)
    write_json(
        folder.path / "result.json",
        {
            "identity": config.identity,
            "test_acc": test_acc,
            "test_loss": test_loss,
            "val_acc": best.val_acc,
            "best_epoch": best.epoch,
            "epochs": cell.epochs_done,
            **measured,
            "position_association": _position_association(model),
        },
    )
    training_seconds = sum(row.seconds for row in cell.progress.history)
    images_seen = cell.epochs_done * stack.steps_per_epoch * config.protocol.batch_size
    folder.finish(
        {
            **provenance(device),
            "processes": stack.processes.num,
            "seed": config.seed,
            "identity": config.identity,
            "data_fingerprint": dataset.fingerprint,
            "wall_seconds": training_seconds + time.perf_counter() - began,
            "images_per_second": images_seen / training_seconds,
        }
    )
    folder.log("finished", test_acc=test_acc)


def _position_association(model: nn.Module) -> float | None:
    """Share of a patch's neighbours whose learned positions are most like its own; None without such positions."""
    try:
        return float(position_gram(model).neighbours.fraction)
    except InputError:
        return None


def _measure(
    model: nn.Module, cell: Cell, dataset: Dataset, device: torch.device, heed: Callable[[], None]
) -> dict[str, float | None]:
    """Write heads.csv and layers.csv of the model; the extremes, which are None in a model without such heads."""
    folder, best = cell.folder, cell.progress.best
    assert best is not None
    try:
        table = measure_on_test(model, dataset, cell.config.num_measured, device, heed)
    except NoSpatialAttentionError as reason:
        folder.log("heads not measured", reason=str(reason))
        heads, layers = pd.DataFrame(columns=list(HEADS_COLUMNS)), pd.DataFrame(columns=list(LAYERS_COLUMNS))
        extremes: dict[str, float | None] = dict.fromkeys(_EXTREMES)
        num_images = 0
    else:
        heads, layers, num_images = table.to_frame(), table.extra_frame("layer"), table.num_images
        shares = table.extra_frame("head")
        near = shares["share_self"] + shares["share_neighbours"]
        found = (heads["mad"].min(), heads["mad"].max(), heads["entropy"].min(), heads["entropy"].max())
        extremes = dict(zip(_EXTREMES, map(float, (*found, shares["share_self"].max(), near.max())), strict=True))
    write_heads(folder.heads, heads, best.epoch, others=cell.progress.heads)
    write_text(folder.layers, layers[list(LAYERS_COLUMNS)].to_csv(index=False))
    return {**extremes, "num_measured": num_images}
