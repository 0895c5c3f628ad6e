"""`nearsight demo`: from data to picture in three minutes on a laptop."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from nearsight.commands.options import Common, parse, stoppable
from nearsight.files import check_kind, output_folder
from nearsight.models import load_model
from nearsight.train import Stop
from nearsight.train.recipes import demo_runs


@dataclass(frozen=True, kw_only=True)
class DemoOptions(Common):
    """Train a small ViT with and without CutMix on the embedded images, measure both, and say what changed.

    Stopped or killed, it continues when the same command is given again.
    """

    out: Path = Path("runs/demo")
    """Folder for the two runs, the figures and the page."""
    seed: int = 0
    """Seed of both runs."""
    epochs: int = 10
    """Training epochs of each run."""
    num_train: int = 5000
    """Training images, a fifth of which is held out for validation."""


def main(arguments: Sequence[str]) -> int:
    options = parse(DemoOptions, arguments, prog="nearsight demo")
    command = shlex.join(["nearsight", "demo", *arguments])
    return stoppable(lambda stop: _demonstrate(options, command, stop))


def _demonstrate(options: DemoOptions, command: str, stop: Stop) -> int:
    # Here, because whatever draws figures takes half a second to load: help and mistakes do without.
    from nearsight.commands.exploring import explorer_of_runs
    from nearsight.commands.progress import TrainingProgress
    from nearsight.lens import patch_grid
    from nearsight.metrics import uniform_attention_distance
    from nearsight.report.figures.models import write_figures
    from nearsight.report.inputs import model_heads
    from nearsight.report.page.models import write_page
    from nearsight.report.reading import compare, layer_table
    from nearsight.train import train_run

    configs = demo_runs(seed=options.seed, epochs=options.epochs, num_train=options.num_train)
    device = options.torch_device
    check_kind(options.out, None)
    output_folder(options.out)
    models, runs = [], {}
    for label, config in configs.items():
        with TrainingProgress(label) as progress:
            runs[label] = options.out / label.replace(" ", "-").lower()
            folder = train_run(
                config, runs[label], device=device, data_dir=options.data_dir, listener=progress, stop=stop
            )
        models.append(model_heads(folder, label))
    reading = compare(*models)
    grid_size = patch_grid(load_model(folder.model))
    write_figures(models, options.out / "figures", grid_size=grid_size)
    page = options.out / "report.html"
    write_page(
        page,
        title="Does CutMix make attention local? A demo on synthetic images",
        models=models,
        readings=[reading],
        grid_size=grid_size,
        command=command,
        explorer=explorer_of_runs(runs, data_dir=options.data_dir, device=device),
    )
    if options.json:
        accuracies = {model.label: model.test_accuracy for model in models}
        found = {**reading.as_json(), "sentences": reading.sentences}
        print(json.dumps({"test_acc": accuracies, **found, "report": str(page)}))
        return 0
    for model in models:
        print(f"\n{model.label}: test accuracy {model.test_accuracy:.1%} (chance 10.0%)\n")
        print(layer_table([model])[model.label].to_string(float_format=lambda value: f"{value:.3f}"))
    if grid_size is not None:
        uniform = uniform_attention_distance(grid_size)
        print(f"\nA head with uniform attention has a distance (mad) of {uniform:.3f} and an entropy of 1.")
    print("\n" + "\n".join(reading.sentences))
    print(f"\nPage: {page}\nFigures: {options.out / 'figures'}")
    sys.stdout.flush()
    return 0
