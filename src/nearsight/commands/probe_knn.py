"""`nearsight probe knn MODEL …`: classes by the votes of the nearest training images."""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd

from nearsight.commands.options import parse
from nearsight.commands.probing import Outcome
from nearsight.commands.probing_classes import KnnRequest, knn_found, probed


@dataclass(frozen=True, kw_only=True)
class KnnOptions(KnnRequest):
    """Classify test images by their nearest training images: cosine, votes weighted by exp(similarity / T) as in DINO.

    Writes result.json, table.csv, table.md and provenance.json. Features are kept, and found again.
    """


def main(arguments: Sequence[str]) -> int:
    began = time.perf_counter()
    options = parse(KnnOptions, arguments, prog="nearsight probe knn")
    options.check("knn")
    from nearsight.report.tables import percent  # here, because it takes half a second

    dataset = options.load()
    options.check_enough(dataset)
    frozen, out = options.opened("knn", dataset.name)
    models = []
    for one in frozen:
        with probed(options, one, dataset) as features:
            found = knn_found(options, features, dataset)
        models.append(
            {
                **features.described,
                "accuracy": {str(k): score.value for k, score in found.items()},
                "interval": {str(k): [score.low, score.high] for k, score in found.items()},
            }
        )
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
