"""What a study of many runs costs beside their training: planning, resuming, reading and reporting.

A study of a paper (its conditions, with as many seeds as it takes) is planned and run by an executor that leaves
finished run folders at once: with 130 epochs, 64 heads and all other files but the weights, written as they always
are. Each step is what a command does:

    plan     cells and their hashes, and the study's folder (the start of `study run`)
    run      every cell through its lock to a finished folder; most of it is making the simulated files
    resume   `study run` of a study of which all but a tenth of the cells are done: what is missing, locks, runs.csv
    show     `study show`: the state of every cell
    tables   all runs read, and runs.csv, heads.csv, layers.csv, history.csv, provenance.json written
    report   tables/, figures/ and verdict.md from that
    page     `report`: the self-contained page

What to expect. Every step reads each run folder a fixed number of times, so cost grows with the number of cells and
memory with the tables: a run's are some 20 KB. docs/scale.md has a table.

    nearsight bench study --num-cells 10 100 1000
"""

import dataclasses
import functools
import gc
import json
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nearsight.bench.costs import PeakMemory, check_counts
from nearsight.errors import InputError
from nearsight.files import as_json
from nearsight.papers import find_study
from nearsight.report.page.folders import write_folder_page
from nearsight.report.writing import write_study_report
from nearsight.study import Study, StudyFolder, StudyListener, StudyResults, run_study
from nearsight.study.executors import Work
from nearsight.study.runner import Place, Runner, Task
from nearsight.train import (
    HEADS_COLUMNS,
    LAYERS_COLUMNS,
    DataConfig,
    Listener,
    RunConfig,
    RunFolder,
    RunName,
    RunQueue,
    Stop,
)
from nearsight.train.integrity import provenance

STEPS = ("plan", "run", "resume", "show", "tables", "report", "page")
_SHARE_MISSING = 10
"""One cell in so many is missing when the study is resumed."""

NUM_EPOCHS = 130
NUM_MEASURED = 5000
_SECONDS_PER_EPOCH = 0.6
_IMAGES_PER_SECOND = 60_000.0


@dataclass(frozen=True, kw_only=True)
class StudyRow:
    """One step for a study of one size."""

    num_cells: int
    num_conditions: int
    step: str
    seconds: float
    cpu_seconds: float
    """Of the processor, which other work on the machine does not lengthen."""
    extra_bytes: int | None
    """Peak memory beyond what was there before the step."""
    disk_bytes: int
    """All files of the study after the step, without weights."""


def bench_study(
    *,
    num_cells: Sequence[int] = (10, 100, 1000),
    study: str = "ablation-cifar100",
    folder: Path | None = None,
) -> list[StudyRow]:
    """Rows for each number of cells and each step.

    Args:
        study: whose conditions to take; all of them, or as many as divide the number of cells.
        folder: where to make a folder that goes at the end; the system's place for such by default.
    """
    check_counts("num_cells", num_cells)
    if folder is not None and not folder.is_dir():
        raise InputError(f"{folder} is not a folder; make it, or leave out --folder")
    rows: list[StudyRow] = []
    for number in num_cells:
        with tempfile.TemporaryDirectory(prefix="nearsight-bench-", dir=folder) as temporary:
            rows += _bench_one(number, study, Path(temporary) / "study")
    return rows


def simulated_study(num_cells: int, name: str) -> Study:
    """The study of that name with so many cells: its own conditions or fewer, and seeds to make up the number.

    The data set is the embedded one, since nothing is trained.
    """
    whole = find_study(name)(seeds=1)
    most = len(whole.cells)
    num_conditions = max(number for number in range(1, most + 1) if num_cells % number == 0)
    part = whole if num_conditions == most else whole.only(cell.levels for cell in whole.cells[:num_conditions])
    base = dataclasses.replace(part.base, data=DataConfig())
    return dataclasses.replace(part, base=base, seeds=num_cells // num_conditions)


def _bench_one(num_cells: int, name: str, path: Path) -> list[StudyRow]:
    folder, executor = StudyFolder(path), SimulatedExecutor(training=SimulatedTraining())
    study = simulated_study(num_cells, name)
    num_conditions = num_cells // len(study.seed_list)
    found: list[StudyResults] = []

    def fresh() -> Study:
        return dataclasses.replace(study)  # without the cells that it remembers

    def plan() -> None:
        folder.claim(fresh())

    def run() -> None:
        run_study(fresh(), path, executor=executor)

    steps: dict[str, Callable[[], object]] = {
        "plan": plan,
        "run": run,
        "resume": run,
        "show": folder.states,
        "tables": lambda: found.append(folder.write_tables()),
        "report": lambda: write_study_report(found[0], path),
        "page": lambda: write_folder_page(path),
    }
    assert tuple(steps) == STEPS
    rows = []
    for step, do in steps.items():
        if step == "resume":
            for cell in study.cells[::_SHARE_MISSING]:
                shutil.rmtree(folder.run_folder(cell.run).path)
        seconds, cpu_seconds, extra_bytes = _measured(do)
        rows.append(
            StudyRow(
                num_cells=num_cells,
                num_conditions=num_conditions,
                step=step,
                seconds=seconds,
                cpu_seconds=cpu_seconds,
                extra_bytes=extra_bytes,
                disk_bytes=sum(file.stat().st_size for file in path.rglob("*") if file.is_file()),
            )
        )
    return rows


def _measured(do: Callable[[], object]) -> tuple[float, float, int | None]:
    """Seconds, those of the processor, and how far memory grew."""
    _forget()
    peak = PeakMemory("cpu")
    start, cpu_start = time.perf_counter(), time.process_time()
    do()
    return time.perf_counter() - start, time.process_time() - cpu_start, peak.growth()


def _forget() -> None:
    """Empty the caches of this project's functions: every step is to start as a command does."""
    for each in gc.get_objects():
        if type(each) is functools._lru_cache_wrapper and each.__module__.startswith("nearsight."):
            each.cache_clear()
    gc.collect()


def table(rows: Sequence[StudyRow]) -> str:
    by_place = {(row.num_cells, row.step): row for row in rows}
    sizes = list(dict.fromkeys(row.num_cells for row in rows))
    head = f"{'cells':>9}{'conditions':>12}" + "".join(f"{step:>9}" for step in STEPS)
    parts: dict[str, Callable[[StudyRow], str]] = {
        "seconds": lambda row: f"{row.seconds:.2f}",
        "seconds of the processor": lambda row: f"{row.cpu_seconds:.2f}",
        "peak memory growth, MB": lambda row: "-" if row.extra_bytes is None else f"{row.extra_bytes / 1e6:.0f}",
        "on disk after it, MB": lambda row: f"{row.disk_bytes / 1e6:.1f}",
    }
    lines = []
    for title, shown in parts.items():
        lines += [title, head]
        for size in sizes:
            conditions = by_place[size, STEPS[0]].num_conditions
            cells = "".join(f"{shown(by_place[size, step]):>9}" for step in STEPS)
            lines.append(f"{size:>9,}{conditions:>12}{cells}")
        lines.append("")
    return "\n".join(lines[:-1])


class SimulatedTraining:
    """Stands in for `nearsight.train.train_queue`: what it leaves of a run is there at once.

    Files as large and as many as those of a paper's runs, with random numbers.
    """

    def __init__(self, num_epochs: int = NUM_EPOCHS) -> None:
        self._num_epochs = num_epochs
        self._certificate = provenance(torch.device("cpu"))  # asks for the commit, which takes a while

    def __call__(self, queue: RunQueue, *, listener: Listener, most: int) -> None:
        for kind in queue.kinds():
            while runs := queue.take(kind, most):
                for config, folder in runs:
                    self.write(config, folder)
                    listener.finished(config, folder)

    def write(self, config: RunConfig, folder: RunFolder) -> None:
        """All files of a finished run but the weights."""
        identity, path = config.identity, folder.path
        random = np.random.default_rng(int(identity, 16))
        path.mkdir(parents=True, exist_ok=True)
        (path / "config.json").write_text(as_json(config.to_json()), encoding="utf-8")
        accuracies = random.random(self._num_epochs)
        best = int(accuracies.argmax())
        self._write_epochs(folder, accuracies, random)
        mad, entropy = _write_heads(config, folder, best + 1, random)
        result = {
            "identity": identity,
            "test_acc": float(random.random()),
            "test_loss": float(random.random()),
            "val_acc": float(accuracies[best]),
            "best_epoch": best + 1,
            "epochs": self._num_epochs,
            "min_mad": float(mad.min()),
            "max_mad": float(mad.max()),
            "min_entropy": float(entropy.min()),
            "max_entropy": float(entropy.max()),
            "max_share_self": float(random.random()),
            "max_share_near": float(random.random()),
            "num_measured": NUM_MEASURED,
            "position_association": float(random.random()),
        }
        (path / "result.json").write_text(as_json(result), encoding="utf-8")
        folder.finish(
            {
                **self._certificate,
                "processes": 1,
                "seed": config.seed,
                "identity": identity,
                "data_fingerprint": "0" * 64,
                "wall_seconds": self._num_epochs * _SECONDS_PER_EPOCH,
                "images_per_second": _IMAGES_PER_SECOND,
            }
        )

    def _write_epochs(self, folder: RunFolder, accuracies: np.ndarray, random: np.random.Generator) -> None:
        numbers = random.random((self._num_epochs, 3)).tolist()
        rows = [
            (epoch, train_loss, val_loss, accuracy, lr, _SECONDS_PER_EPOCH)
            for epoch, (accuracy, (train_loss, val_loss, lr)) in enumerate(
                zip(accuracies.tolist(), numbers, strict=True), start=1
            )
        ]
        _write_csv(folder, "history.csv", ("epoch", "train_loss", "val_loss", "val_acc", "lr", "seconds"), rows)
        events: list[dict[str, Any]] = [{"event": "started", "epochs_done": 0, "device": "cuda"}]
        events += [{"event": "epoch", "epoch": row[0], "val_acc": row[3]} for row in rows]
        stamp = {"time": "2000-01-01T00:00:00+0000"}
        lines = "".join(json.dumps({**stamp, **event}) + "\n" for event in events)
        (folder.path / "events.jsonl").write_text(lines, encoding="utf-8")


@dataclass(frozen=True, kw_only=True)
class SimulatedExecutor:
    """One runner that takes cells through their locks, as `LocalExecutor`, and leaves finished folders at once."""

    training: SimulatedTraining

    def check(self) -> None:
        """It needs nothing."""

    def run(self, work: Work, listener: StudyListener, stop: Stop) -> dict[RunName, Exception]:
        folder = StudyFolder(work.folder)
        with folder.locks().kept_alive() as locks:
            place = Place(folder=folder, locks=locks, listener=listener, completed=lambda _: None)
            runner = Runner(self.training)
            runner.run([Task(((place, cell),)) for cell in work.cells], work.cells_per_stack)
        return runner.failed


def _write_heads(
    config: RunConfig, folder: RunFolder, epoch: int, random: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """heads.csv and layers.csv; distances and entropies, layers × heads."""
    depth, num_heads = config.model.depth, config.model.num_heads
    mad, mad_std, entropy, entropy_std = random.random((4, depth, num_heads))
    rows = [
        (
            *(epoch, layer, f"blocks.{layer}.attn", head, float(mad[layer, head]), float(mad_std[layer, head])),
            *(float(entropy[layer, head]), float(entropy_std[layer, head]), NUM_MEASURED),
        )
        for layer in range(depth)
        for head in range(num_heads)
    ]
    _write_csv(folder, folder.heads.name, HEADS_COLUMNS, rows)
    layers = [(layer, f"blocks.{layer}.attn", *random.random(2).tolist(), NUM_MEASURED) for layer in range(depth)]
    _write_csv(folder, folder.layers.name, LAYERS_COLUMNS, layers)
    return mad, entropy


def _write_csv(folder: RunFolder, name: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    lines = [",".join(columns), *(",".join(map(str, row)) for row in rows)]
    (folder.path / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
