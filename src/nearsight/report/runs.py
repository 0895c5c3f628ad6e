"""From run folders to what reports are made of."""

from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from nearsight.report.figures import heatmaps, mad_entropy_plane, mad_profiles, save_figure
from nearsight.report.inputs import ModelHeads, read_heads, read_history
from nearsight.train import RunFolder

FIGURES = ("mad-profiles", "mad-entropy-plane", "heatmaps")
"""What `write_figures` calls them."""


def model_heads(folder: RunFolder, label: str, *, heads: pd.DataFrame | None = None) -> ModelHeads:
    """A finished run's heads (or others of its model) with all that the page says about how they came to be."""
    result = folder.read_result()
    return ModelHeads(
        label=label,
        heads=read_heads(folder.heads) if heads is None else heads,
        # Heads may have been measured all through training; the model is that of the best epoch, not of the last.
        epoch=result["best_epoch"] if heads is None else None,
        # Pretraining without labels has a history of its own and no accuracy.
        history=read_history(folder.path / "history.csv") if "test_acc" in result else None,
        test_accuracy=result.get("test_acc"),
        config=folder.read_settings(),
        provenance=folder.read_provenance(),
    )


def write_figures(
    models: Sequence[ModelHeads], folder: Path, *, grid_size: tuple[int, int] | None = None
) -> tuple[Path, ...]:
    """S1's three figures of these models, as PNG and SVG; the files written."""
    figures = (
        mad_profiles(models, grid_size=grid_size),
        mad_entropy_plane(models, grid_size=grid_size),
        heatmaps(models),
    )
    return tuple(
        path for name, figure in zip(FIGURES, figures, strict=True) for path in save_figure(figure, folder, name)
    )
