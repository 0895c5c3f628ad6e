"""`nearsight probe knn MODEL …`: classes by the votes of the nearest training images."""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd

from nearsight.commands.options import parse
from nearsight.commands.probing import Outcome
from nearsight.commands.probing_classes import ClassRequest, probed
from nearsight.probe.knn import DEFAULT_KS, DEFAULT_TEMPERATURE, knn_accuracy
from nearsight.probe.search import check_enough
from nearsight.report.study.table import percent


@dataclass(frozen=True, kw_only=True)
class KnnOptions(ClassRequest):
    """Classify test images by their nearest training images: cosine, votes weighted by exp(similarity / T) as in DINO.

    Writes result.json, table.csv, table.md and provenance.json. Features are kept, and found again.
    """

    ks: tuple[int, ...] = DEFAULT_KS
    """Numbers of neighbours; one search serves all."""
    temperature: float = DEFAULT_TEMPERATURE
    """T of the votes."""


def main(arguments: Sequence[str]) -> int:
    began = time.perf_counter()
    options = parse(KnnOptions, arguments, prog="nearsight probe knn")
    options.check("knn")
    dataset = options.load()
    check_enough(len(dataset.train), max(options.ks, default=1), f"training images of {dataset.name}")
    frozen, out = options.opened("knn", dataset.name)
    models = []
    for one in frozen:
        with probed(options, one, dataset) as features:
            accuracy = knn_accuracy(
                features.train_NC,
                dataset.train.labels_N,
                features.test_NC,
                dataset.test.labels_N,
                num_classes=dataset.num_classes,
                ks=options.ks,
                temperature=options.temperature,
                device=options.torch_device,
            )
        models.append({**features.described, "accuracy": {str(k): value for k, value in accuracy.items()}})
    numbers = pd.DataFrame(
        [
            {"model": model["model"], **{f"accuracy_k{k}": model["accuracy"][str(k)] for k in options.ks}}
            for model in models
        ]
    )
    shown = pd.DataFrame(
        [
            {"model": model["model"], **{f"k = {k}": percent(model["accuracy"][str(k)]) for k in options.ks}}
            for model in models
        ]
    )
    outcome = Outcome(
        probe="knn",
        title=f"k-NN accuracy on {dataset.name} in per cent",
        data=options.described(dataset),
        settings={"ks": list(options.ks), "temperature": options.temperature},
        models=models,
        numbers=numbers,
        shown=shown,
    )
    outcome.write(out, arguments, options.torch_device, began, options.seed)
    print(json.dumps({**outcome.as_json(), "folder": str(out)}) if options.json else outcome.as_text(out))
    return 0
