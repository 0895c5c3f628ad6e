"""`nearsight measure --what …`: what there is to see beside distance and entropy, as tables and figures."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from numpy.typing import NDArray
from torch import Tensor

from nearsight.commands.subjects import Subject
from nearsight.files import output_folder, replacing
from nearsight.lens import HeadTable, attention_rollout, layer_similarity, position_gram
from nearsight.report import offset_pictures, position_maps, rollout_overlays, save_figure, similarity_heatmap
from nearsight.report.figures.files import figure_files

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


def look_further(
    subjects: Sequence[Subject], names: Sequence[str], what: Sequence[str], device: torch.device
) -> Further:
    """CKA, rollout and positions of these models, if they are asked for; `names` tell their files apart."""
    tables: dict[str, pd.DataFrame] = {}
    figures: dict[str, Figure] = {}
    if "cka" in what:
        one, other = subjects[0], subjects[-1]
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
    for subject, name in zip(subjects, names, strict=True):
        end = f"-{name}" if len(subjects) > 1 else ""
        if "rollout" in what:
            images = next(subject.images.batches(NUM_ROLLOUTS))
            maps = attention_rollout(subject.model, images, device=device)
            figures[f"rollout{end}"] = rollout_overlays(_as_seen(images), maps.numpy(), label=subject.label)
        if "positions" in what:
            positions = position_gram(subject.model)
            tables[f"positions{end}"] = positions.to_frame()
            figures[f"positions{end}"] = position_maps(positions, label=subject.label)
    return Further(tables, figures)


def write_pictures(
    table: HeadTable, layers: Sequence[int], label: str, what: Sequence[str], out: Path, *, end: str
) -> list[Path]:
    """What the table shows in pictures, if they are asked for: attention by steps. `layers` as in `write_extra_tables`;
    `end`: of the files' names."""
    if "offsets" not in what:
        return []
    return Further({}, {f"offsets{end}": offset_pictures(table, label=label, layers=layers)}).write(out)


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
    own = next_to = farther = alike = 0
    for layer in range(len(table.layer_names)):
        for head_RC in table.offset_maps(layer):
            if head_RC.size == 1 or np.isnan(head_RC).all():  # a patch that is alone, or no head
                continue
            most = np.unravel_index(np.nanargmax(head_RC), head_RC.shape)
            steps = max(abs(int(place) - size // 2) for place, size in zip(most, head_RC.shape, strict=True))
            stands_out = head_RC[most] >= STANDS_OUT * np.nanmedian(head_RC)
            alike += not stands_out
            own += stands_out and steps == 0
            next_to += stands_out and steps == 1
            farther += stands_out and steps > 1
    return (
        f"By the step that gets most, {own} of {own + next_to + farther + alike} heads look at the patch itself, "
        f"{next_to} at one beside it, {farther} farther away; {alike} look about everywhere alike."
    )


_SAID = {"self": "the patch itself", "neighbours": "its 8 neighbours", "cls": "CLS", "registers": "registers"}


def _as_seen(images_BCHW: Tensor) -> list[NDArray[np.float64]]:
    """Pictures from normalised images: stretched between their own extremes, since all that counts is to know them."""
    pictures = images_BCHW.double().cpu().permute(0, 2, 3, 1)
    low, high = (function(pictures, dim=(1, 2, 3), keepdim=True) for function in (torch.amin, torch.amax))
    return list(((pictures - low) / (high - low).clamp(min=1e-12)).numpy())


def _write_csv(path: Path, table: pd.DataFrame) -> None:
    with replacing(path) as temporary:
        table.to_csv(temporary, index=False)
