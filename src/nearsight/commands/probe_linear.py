"""`nearsight probe linear MODEL …`: a linear classifier on frozen features."""

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal

import pandas as pd

from nearsight.commands.options import parse
from nearsight.commands.probing import Outcome
from nearsight.commands.probing_classes import ClassRequest, linear_found, probed
from nearsight.probe.linear import LinearConfig

_USUAL = LinearConfig()


@dataclass(frozen=True, kw_only=True)
class LinearOptions(ClassRequest):
    """Train a linear classifier on frozen features, for all learning rates and weight decays at once; the best on held
    out training images is tested, once.

    The defaults are DINO's. Writes result.json, table.csv, table.md and provenance.json.
    """

    optimizer: Literal["sgd", "adamw"] = _USUAL.optimizer
    """sgd (with momentum 0.9) or adamw."""
    learning_rates: tuple[float, ...] = _USUAL.learning_rates
    """For 256 images per batch; scaled in proportion to the batch."""
    weight_decays: tuple[float, ...] = _USUAL.weight_decays
    """Each is tried with each learning rate."""
    head_batch_size: int = _USUAL.batch_size
    """Images per step of the classifier."""
    num_epochs: int = _USUAL.num_epochs
    """Over which the learning rate falls as a cosine."""
    random_crops: bool = False
    """Train on random crops and flips, as DINO does: features of the training images are then computed every epoch."""


def main(arguments: Sequence[str]) -> int:
    began = time.perf_counter()
    options = parse(LinearOptions, arguments, prog="nearsight probe linear")
    options.check("linear")
    from nearsight.report.tables import percent  # here, because it takes half a second

    config = LinearConfig(
        optimizer=options.optimizer,
        learning_rates=options.learning_rates,
        weight_decays=options.weight_decays,
        batch_size=options.head_batch_size,
        num_epochs=options.num_epochs,
        seed=options.seed,
    )
    dataset = options.load()
    frozen, out = options.opened("linear", dataset.name)
    models = []
    for one in frozen:
        with probed(options, one, dataset, random_crops=options.random_crops) as features:
            result, score = linear_found(options, features, dataset, config)
        models.append(
            {
                **features.described,
                "test_accuracy": result.test_accuracy,
                "interval": [score.low, score.high],
                "best": asdict(result.best),
                "heads": [asdict(head) for head in result.heads],
            }
        )
    rows = [{"model": model["model"], "test_accuracy": model["test_accuracy"], **model["best"]} for model in models]
    shown = [
        {
            "model": row["model"],
            "test": percent(row["test_accuracy"]),
            "validation": percent(row["validation_accuracy"]),
            "learning rate": f"{row['learning_rate']:g}",
            "weight decay": f"{row['weight_decay']:g}",
        }
        for row in rows
    ]
    outcome = Outcome(
        probe="linear",
        title=f"Accuracy of a linear classifier on {dataset.name} in per cent",
        data=options.described(dataset),
        settings={**asdict(config), "random_crops": options.random_crops},
        models=models,
        numbers=pd.DataFrame(rows),
        shown=pd.DataFrame(shown),
    )
    outcome.write(out, arguments, options.torch_device, began, options.seed)
    print(json.dumps({**outcome.as_json(), "folder": str(out)}) if options.json else outcome.as_text(out))
    return 0
