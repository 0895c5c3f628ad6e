"""`nearsight measure --what …`: what there is to see beside distance and entropy, as tables and figures."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from numpy.typing import NDArray
from torch import Tensor

from nearsight.files import output_folder, replacing
from nearsight.lens import HeadTable, attention_rollout, layer_similarity, position_gram
from nearsight.report import offset_pictures, position_maps, rollout_overlays, save_figure, similarity_heatmap
from nearsight.report.figures.files import figure_files

if TYPE_CHECKING:
    from nearsight.commands.measured import Measured

NUM_ROLLOUTS = 8
"""Pictures that are shown under their rollout."""
CKA_BATCH = 64
STANDS_OUT = 2.0
"""Times the median: from there on a step gets more attention than others."""
EXTRA_TABLES = {
    "head": ("extra-heads.csv", frozenset({"shares", "quantiles", "gaussians"})),
    "layer": ("extra-layers.csv", frozenset({"features"})),
}
"""What a row is of, its file, and which names of --what ask for it."""


@dataclass(frozen=True)
class Further:
    """What was found of models beside their tables of heads: figures, and tables that are not per head."""

    tables: Mapping[str, pd.DataFrame]
    """By the name of their file."""
    figures: Mapping[str, Figure]

    def write(self, out: Path) -> list[Path]:
        files: list[Path] = []
        for name, table in self.tables.items():
            files.append(out / f"{name}.csv")
            _write_csv(files[-1], table)
        if self.figures:
            folder = output_folder(out / "figures")
            files += [path for name, figure in self.figures.items() for path in save_figure(figure, folder, name)]
        return files


def look_further(measured: "Sequence[Measured]", what: Sequence[str], device: torch.device) -> Further:
    """CKA, rollout, positions and pictures of attention by steps, if they are asked for; of several models, files are
    named after their folders."""
    tables: dict[str, pd.DataFrame] = {}
    figures: dict[str, Figure] = {}
    if "cka" in what:
        one, other = measured[0].subject, measured[-1].subject
        similarity = layer_similarity(
            one.model,
            one.images.batches(CKA_BATCH),
            None if other is one else other.model,
            other_images=None if other is one else other.images.batches(CKA_BATCH),
            batch_size=CKA_BATCH,
            device=device,
        )
        tables["cka"] = similarity.to_frame()
        other_label = None if other is one else other.label
        figures["cka"] = similarity_heatmap(similarity, label=one.label, other_label=other_label)
    for seen in measured:
        subject, end = seen.subject, f"-{seen.folder.name}" if len(measured) > 1 else ""
        if "rollout" in what:
            images = next(subject.images.batches(NUM_ROLLOUTS))
            maps = attention_rollout(subject.model, images, device=device)
            figures[f"rollout{end}"] = rollout_overlays(_as_seen(images), maps.numpy(), label=subject.label)
        if "positions" in what:
            positions = position_gram(subject.model)
            tables[f"positions{end}"] = positions.to_frame()
            figures[f"positions{end}"] = position_maps(positions, label=subject.label)
        if "offsets" in what:
            figures[f"offsets{end}"] = offset_pictures(seen.table, label=subject.label, layers=seen.layers)
    return Further(tables, figures)


def further_files(folder: Path) -> Iterator[Path]:
    """All that `look_further` and `write_extra_tables` may have left in a folder, of one model or of several."""
    yield from extra_tables_in(folder)
    yield folder / "cka.csv"
    yield from figure_files(folder / "figures", "cka")
    # Of several models, each has a folder here, after which its files are named.
    for end in ("", *(f"-{table.parent.name}" for table in folder.glob("*/heads.csv"))):
        yield folder / f"positions{end}.csv"
        yield from figure_files(folder / "figures", f"positions{end}")
        yield from figure_files(folder / "figures", f"rollout{end}")
        yield from figure_files(folder / "figures", f"offsets{end}")


def extra_tables_in(folder: Path) -> list[Path]:
    return [folder / name for name, _ in EXTRA_TABLES.values()]


def write_extra_tables(table: HeadTable, layers: Sequence[int], what: Sequence[str], folder: Path) -> list[Path]:
    """Per head and per layer, what was asked for beyond distance and entropy; `layers` are the numbers of the table's
    layers in the whole model."""
    files = []
    for per, (name, asked) in EXTRA_TABLES.items():
        if asked & set(what):
            frame = table.extra_frame("head" if per == "head" else "layer")
            files.append(folder / name)
            _write_csv(files[-1], frame.assign(layer=[layers[place] for place in frame["layer"]]))
    return files


def summary(table: HeadTable, layers: Sequence[int], what: Sequence[str]) -> Iterator[str]:
    """A line for each further measurement; `layers` as above."""
    if "shares" in what:
        means = {said: float(np.nanmean(table.extra[f"share_{name}"])) for name, said in _SAID.items()}
        yield f"Of all attention, {', '.join(f'{share:.1%} is on {said}' for said, share in means.items() if share)}."
    if "quantiles" in what:
        median = table.distance_quantiles([0.5])[..., 0]
        nearest, farthest = np.nanmin(median), np.nanmax(median)
        yield f"Half of a head's attention is paid within {nearest:.3f} to {farthest:.3f} diagonals, by head."
    if "offsets" in what:
        yield _by_steps(table)
    if "gaussians" in what:
        sigma = np.hypot(table.extra["sigma_rows"], table.extra["sigma_cols"]) / np.sqrt(2)
        yield f"σ of its Gaussians is {np.nanmin(sigma):.2f} to {np.nanmax(sigma):.2f} patches by head; α is " + (
            f"{np.nanmin(table.extra['alpha']):.2f} to {np.nanmax(table.extra['alpha']):.2f}."
        )
    if "features" in what:
        first, last = table.extra["locality_score"][[0, -1]]
        yield (
            f"Locality score of the tokens: {first:.3f} after layer {layers[0] + 1}, "
            f"{last:.3f} after layer {layers[-1] + 1}."
        )


def _by_steps(table: HeadTable) -> str:
    """How many heads look most at the patch itself, at one beside it, farther away, or nowhere more than elsewhere."""
    heads = [head_RC for layer in range(len(table.layer_names)) for head_RC in table.offset_maps(layer)]
    # Not those that do not exist, nor those of a patch that is alone.
    steps = Counter(_favourite_step(head_RC) for head_RC in heads if head_RC.size > 1 and not np.isnan(head_RC).all())
    return (
        f"By the step that gets most, {steps[0]} of {steps.total()} heads look at the patch itself, {steps[1]} at one "
        f"beside it, {steps[2]} farther away; {steps[None]} look about everywhere alike."
    )


def _favourite_step(head_RC: NDArray[np.float64]) -> int | None:
    """The distance of the step that gets most attention: 0, 1, or 2 for all beyond; None where none stands out."""
    most = np.unravel_index(np.nanargmax(head_RC), head_RC.shape)
    if head_RC[most] < STANDS_OUT * np.nanmedian(head_RC):
        return None
    steps = max(abs(int(place) - size // 2) for place, size in zip(most, head_RC.shape, strict=True))
    return 2 if steps > 1 else steps


_SAID = {"self": "the patch itself", "neighbours": "its 8 neighbours", "cls": "CLS", "registers": "registers"}


def _as_seen(images_BCHW: Tensor) -> list[NDArray[np.float64]]:
    """Pictures from normalised images: stretched between their own extremes, since all that counts is to know them."""
    pictures = images_BCHW.double().cpu().permute(0, 2, 3, 1)
    low, high = (function(pictures, dim=(1, 2, 3), keepdim=True) for function in (torch.amin, torch.amax))
    return list(((pictures - low) / (high - low).clamp(min=1e-12)).numpy())


def _write_csv(path: Path, table: pd.DataFrame) -> None:
    with replacing(path) as temporary:
        table.to_csv(temporary, index=False)
