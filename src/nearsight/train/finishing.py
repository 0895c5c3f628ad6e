"""The end of a run: the best weights become the model, the test set is touched once, the heads are measured."""

import time
from collections.abc import Callable

import torch

from nearsight.data import Dataset, DeviceImages
from nearsight.files import write_json, write_text
from nearsight.models import load_model, save_model
from nearsight.train.cell import Cell
from nearsight.train.engine import Stack
from nearsight.train.folder import LAYERS_COLUMNS, write_heads
from nearsight.train.heads import measure_on_test
from nearsight.train.provenance import provenance


def finish(cell: Cell, stack: Stack, dataset: Dataset, heed: Callable[[], None]) -> None:
    """Write all that a complete folder has beside its history.

    `heed` is called now and then and may raise: cut short anywhere, all of this is done again.
    """
    heed()
    config, folder, best = cell.config, cell.folder, cell.progress.best
    assert best is not None
    device = stack.device
    began = time.perf_counter()
    save_model(folder.model, cell.best_weights, config.model, dataset.image_size, dataset.num_classes)
    best_stack = {name: weight.unsqueeze(0) for name, weight in cell.best_weights.items()}
    every_test_image = torch.arange(len(dataset.test), device=device)
    (test_loss,), (test_acc,) = stack.evaluate(DeviceImages(dataset.test, device), every_test_image, best_stack)
    table = measure_on_test(load_model(folder.model), dataset, config.num_measured, device, heed)
    write_heads(folder.heads, table.to_frame(), best.epoch, others=cell.progress.heads)
    write_text(folder.layers, table.extra_frame("layer")[list(LAYERS_COLUMNS)].to_csv(index=False))
    write_json(
        folder.path / "result.json",
        {
            "identity": config.identity,
            "test_acc": test_acc,
            "test_loss": test_loss,
            "val_acc": best.val_acc,
            "best_epoch": best.epoch,
            "epochs": cell.epochs_done,
            "min_mad": float(table.mad.min()),
            "max_mad": float(table.mad.max()),
            "min_entropy": float(table.entropy.min()),
            "max_entropy": float(table.entropy.max()),
            "num_measured": table.num_images,
        },
    )
    folder.log("finished", test_acc=test_acc)
    training_seconds = sum(row.seconds for row in cell.progress.history)
    images_seen = cell.epochs_done * stack.steps_per_epoch * config.protocol.batch_size
    write_json(
        folder.path / "provenance.json",
        {
            **provenance(device),
            "seed": config.seed,
            "identity": config.identity,
            "data_fingerprint": dataset.fingerprint,
            "wall_seconds": training_seconds + time.perf_counter() - began,
            "images_per_second": images_seen / training_seconds,
        },
    )
