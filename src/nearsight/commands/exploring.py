"""Which models and pictures a page's attention explorer shows."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from nearsight.commands.options import Request
from nearsight.commands.pictures import as_seen
from nearsight.commands.subjects import Subject, open_subjects
from nearsight.errors import InputError
from nearsight.report.explorer import Exhibit, Explorer, explore
from nearsight.report.inputs import ModelHeads, model_heads
from nearsight.train import RunFolder

if TYPE_CHECKING:
    from nearsight.study import StudyResults

NUM_PICTURES = 4


def explorer_of(subjects: Sequence[Subject], heads: Sequence[ModelHeads], device: torch.device) -> Explorer:
    """Of measured models, on the first of the images they were measured on.

    `heads` are what the page says about the same models, in the same order.
    """
    exhibits = []
    for subject, own in zip(subjects, heads, strict=True):
        images_BCHW = next(subject.images.batches(NUM_PICTURES))
        pictures = as_seen(subject.images, images_BCHW)
        exhibits.append(Exhibit(heads=own, model=subject.model, images_BCHW=images_BCHW, pictures_BHWC=pictures))
    return explore(exhibits, device=device)


def explorer_of_runs(
    runs: Mapping[str, Path], *, data_dir: Path | None = None, device: torch.device
) -> Explorer | None:
    """Of complete runs, by their label, on test images of their own; None where their weights or data are missing."""
    request = Request(models=tuple(map(str, runs.values())), data_dir=data_dir)
    try:
        subjects = open_subjects(request, device)
        heads = [model_heads(RunFolder(path), label) for label, path in runs.items()]
        return explorer_of(subjects, heads, device)
    except InputError:  # a page can be made anywhere; what the explorer needs is not always there
        return None


def explorer_of_study(
    folder: Path, results: "StudyResults", *, data_dir: Path | None = None, device: torch.device
) -> Explorer | None:
    """Of a study: the first run with no factor on, and the first with all of them on (S1: Baseline | Modern).

    Runs that were taken from tables have no weights to look into: the next one is shown, and where there is none, the
    other condition alone.
    """
    # Here, because only the page of a study needs them.
    from nearsight.report.conditions import base_and_full, with_attention
    from nearsight.study.results import run_folder

    try:
        conditions = reversed(base_and_full(with_attention(results)))
    except InputError:  # neither has a run yet
        return None
    rows = results.runs.sort_values("seed", kind="stable")
    runs: dict[str, Path] = {}
    for label in conditions:
        folders = [run_folder(folder, run) for run in rows.loc[rows["condition"] == label, "run"]]
        if (shown := next((run for run in folders if run.model.exists()), None)) is not None:
            runs[label] = shown.path
    return explorer_of_runs(runs, data_dir=data_dir, device=device) if runs else None
