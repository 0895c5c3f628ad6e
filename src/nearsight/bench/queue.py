"""A study at the engine's speed: how many images per second are left of it, from the start to the tables.

Runs stop early, each at its own epoch, so a stack that only loses cells ends with one model that has the device to
itself. This replays a study whose lengths are known: the conditions and seeds of committed results, each run as long
as it was there, but shortened in proportion. All else is real: the engine, stacks and slots, locks, checkpoints, the
test of every run, the measurement of its heads, and the tables. Only the images are made up, of CIFAR's size, and as
many times fewer are tested and measured as runs are shorter.

    engine            all cells in one stack, nothing else: the peak
    seed after seed   as it was before there were slots: the conditions of a seed as one stack, then the next seed
    one queue         all cells in one queue, the longest first; the next one takes the slot of one that has ended

Each starts warm: programs are compiled for the numbers of cells that they begin and end with. Images are training
images of all cells; the rates of the last two are over the wall clock.

What to expect. The fewer cells train at once, the lower the rate, so a queue gains most where runs differ most in
length, and where more of them wait than train at once.

    nearsight bench queue --device cuda
"""

import contextlib
import dataclasses
import functools
import gc
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from nearsight.bench.ordinary import picture_like_images
from nearsight.data import Dataset, ImageSet, load_dataset
from nearsight.errors import InputError, check_at_least
from nearsight.models import ModelConfig
from nearsight.papers import find_study
from nearsight.study import Study, StudyResults, run_study
from nearsight.study.executors import LocalExecutor
from nearsight.train import DataConfig, RunConfig
from nearsight.train.engine import Stack
from nearsight.train.planning import MOST_CELLS, num_slots

RESULTS = Path("results/ablation-cifar100")
_NUM_TEST = 10_000
_NUM_MEASURED = 5_000
_PEAK_EPOCHS = 2


@dataclass(frozen=True, kw_only=True)
class QueueRow:
    """One way to do the study."""

    what: str
    num_cells: int
    most_at_once: int
    """Cells that train at a time, at most."""
    num_epochs: int
    """Of all cells together."""
    images: int
    seconds: float
    """By the wall clock; of the engine, of epochs alone."""
    images_per_second: float
    of_peak: float
    """Its rate over the engine's."""


@dataclass(frozen=True)
class Replay(Study):
    """A study whose runs have known lengths."""

    lengths: Mapping[tuple[tuple[tuple[str, str], ...], int], int] = field(default_factory=dict, kw_only=True)
    """Levels and seed → epochs."""

    def _config(self, levels: Mapping[str, str], seed: int) -> RunConfig:
        config = super()._config(levels, seed)
        epochs = self.lengths[tuple(levels.items()), seed]
        batch_size = self.base.protocol.batch_size  # of every condition, also where conditions are whole protocols
        protocol = dataclasses.replace(config.protocol, max_epochs=epochs, patience=epochs, batch_size=batch_size)
        return dataclasses.replace(config, protocol=protocol)


def bench_queue(
    *,
    device: str,
    results: Path = RESULTS,
    shorter: float = 25.0,
    num_images: int | None = None,
    batch_size: int = 128,
    checkpoint_every: int = 10,
    most: int = MOST_CELLS,
    model: ModelConfig | None = None,
) -> list[QueueRow]:
    """The engine's peak, the study seed after seed, and from one queue.

    Args:
        results: of a study of these papers; the lengths of its runs are taken.
        shorter: by how much; at least an epoch is left of every run.
        num_images: that train and validate, 4 to 1; 50,000 by default on a GPU and 640 elsewhere.
        checkpoint_every: epochs between checkpoints, as `nearsight study run` takes it.
        most: cells that train at a time, at most.
    """
    where = torch.device(device)
    on_gpu = where.type == "cuda"
    num_images = num_images if num_images is not None else 50_000 if on_gpu else 640
    for name, number, least in (("num_images", num_images, 1), ("most", most, 1), ("batch_size", batch_size, 1)):
        check_at_least(name, number, least)
    check_at_least("shorter", shorter, 1)
    num_tested, num_measured = (max(1, round(number / shorter)) for number in (_NUM_TEST, _NUM_MEASURED))
    if not on_gpu:
        num_tested = num_measured = min(num_tested, num_images)
    study = replayed(results, shorter)
    base = dataclasses.replace(
        study.base,
        model=model or ModelConfig(),
        data=DataConfig(name="shapes", num_train=num_images, num_test=num_tested),
        protocol=dataclasses.replace(study.base.protocol, batch_size=batch_size),
        precision="bf16" if on_gpu else "fp32",
        num_measured=num_measured,
        measure_every=0,
    )
    study = dataclasses.replace(study, base=base)
    dataset = _pictures(num_images, num_tested)
    executor = LocalExecutor(device=device, load=lambda config, data_dir: dataset)

    def run(part: Study, path: Path) -> None:
        cells_per_stack = min(most, len(part.cells))
        folder = run_study(
            part, path, executor=executor, checkpoint_every=checkpoint_every, cells_per_stack=cells_per_stack
        )
        folder.write_tables()

    configs = [cell.config for cell in study.cells]
    most = num_slots(configs[0], where, most)
    seeds = [dataclasses.replace(study, seeds=(seed,)) for seed in study.seed_list]
    per_seed = min(most, len(seeds[0].cells))
    for num_cells in dict.fromkeys((1, per_seed)):
        Stack.start(configs[:num_cells], dataset, where).run_epoch()
    peak, images_per_epoch = _peak(configs[:most], dataset, where)
    num_epochs = sum(config.protocol.max_epochs for config in configs)

    def row(what: str, at_once: int, seconds: float) -> QueueRow:
        images = num_epochs * images_per_epoch
        return QueueRow(
            what=what,
            num_cells=len(configs),
            most_at_once=at_once,
            num_epochs=num_epochs,
            images=images,
            seconds=seconds,
            images_per_second=images / seconds,
            of_peak=images / seconds / peak.images_per_second,
        )

    with _timed() as clock:
        for part in seeds:
            clock.add(functools.partial(run, part))
    seed_after_seed = row("seed after seed", per_seed, clock.seconds)
    with _timed() as clock:
        clock.add(functools.partial(run, study))
    return [peak, seed_after_seed, row("one queue", min(most, len(configs)), clock.seconds)]


def replayed(results: Path, shorter: float) -> Replay:
    """The study of these results, with runs as long as they were, but shortened."""
    found = StudyResults.read(results)
    runs = found.runs[["condition", "seed", "epochs"]].to_dict("records")
    epochs = {(run["condition"], run["seed"]): max(1, round(run["epochs"] / shorter)) for run in runs}
    seeds = sorted({seed for _, seed in epochs})
    whole = find_study(found.name)(seeds=max(seeds) + 1)
    if missing := {(cell.condition, seed) for cell in whole.cells for seed in seeds} - set(epochs):
        condition, seed = min(missing)
        raise InputError(f"{results} has no run of {condition}, seed {seed}; take results that are whole")
    lengths = {
        (tuple(cell.levels.items()), cell.seed): epochs[cell.condition, cell.seed]
        for cell in whole.cells
        if cell.seed in seeds
    }
    settings = {each.name: getattr(whole, each.name) for each in dataclasses.fields(Study)}
    return Replay(**{**settings, "seeds": seeds}, lengths=lengths)


def _pictures(num_images: int, num_tested: int) -> Dataset:
    images, labels = picture_like_images(num_images), torch.arange(num_images) % 10
    return dataclasses.replace(
        load_dataset("shapes", num_train=10, num_test=1),
        train=ImageSet(images, labels),
        test=ImageSet(images[:num_tested], labels[:num_tested]),
    )


def _peak(configs: Sequence[RunConfig], dataset: Dataset, device: torch.device) -> tuple[QueueRow, int]:
    """The engine alone, and how many images train a cell in an epoch."""
    stack = Stack.start(configs, dataset, device)
    stack.run_epoch()
    began = time.perf_counter()
    for _ in range(_PEAK_EPOCHS):
        stack.run_epoch()
    seconds = time.perf_counter() - began
    images_per_epoch = stack.steps_per_epoch * configs[0].protocol.batch_size
    images = _PEAK_EPOCHS * len(configs) * images_per_epoch
    row = QueueRow(
        what="engine",
        num_cells=len(configs),
        most_at_once=len(configs),
        num_epochs=_PEAK_EPOCHS * len(configs),
        images=images,
        seconds=seconds,
        images_per_second=images / seconds,
        of_peak=1.0,
    )
    return row, images_per_epoch


class _Clock:
    """Adds up how long pieces of work took, each in a folder of its own."""

    def __init__(self, root: Path) -> None:
        self.seconds, self._root, self._num = 0.0, root, 0

    def add(self, work: Callable[[Path], None]) -> None:
        self._num += 1
        began = time.perf_counter()
        work(self._root / str(self._num))
        self.seconds += time.perf_counter() - began


@contextlib.contextmanager
def _timed() -> Iterator[_Clock]:
    gc.collect()
    torch.cuda.empty_cache()  # what others left in the cache would count as taken memory
    with tempfile.TemporaryDirectory(prefix="nearsight-bench-") as folder:
        yield _Clock(Path(folder))


def table(rows: Sequence[QueueRow]) -> str:
    titles = (
        f"{'way':<18}{'cells':>6}{'at once':>9}{'epochs':>8}{'images':>13}{'seconds':>9}{'images/s':>11}{'of peak':>9}"
    )
    return "\n".join([titles, *map(_line, rows)])


def _line(row: QueueRow) -> str:
    return (
        f"{row.what:<18}{row.num_cells:>6}{row.most_at_once:>9}{row.num_epochs:>8}{row.images:>13,}"
        f"{row.seconds:>9.1f}{row.images_per_second:>11,.0f}{row.of_peak:>9.1%}"
    )
