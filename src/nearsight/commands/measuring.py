"""How `nearsight measure` measures models that are opened: whole, or in shards of their images, which are done by this
process, by several, or job by job."""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from nearsight.commands.options import Request
from nearsight.commands.pictures import PreparedImages, find_batch_size, within_memory
from nearsight.commands.progress import BarOrLines, MeasuringProgress
from nearsight.commands.subjects import Subject, images_record, open_subjects, part_of
from nearsight.errors import InputError, check_at_least, unknown_name
from nearsight.lens import WHAT, HeadTable, Shards, measure
from nearsight.lens.measurement import MEASUREMENTS
from nearsight.models.sources import has_published_weights
from nearsight.train import Stop, StoppedError, TrainingError
from nearsight.work import Attempt, Driver, Outcome, Pool, Retries, Tell, places, process_pool, ray_pool

MASKED = "background"
"""The measurement that takes masks."""
Watch = Callable[[Iterator[Tensor]], Iterable[Tensor]]
"""Passes batches of images on, to count them or to check for a stop between them."""


def check_what(what: Sequence[str], num_models: int) -> tuple[str, ...]:
    """The names that --what gives, separated by spaces or commas, each once."""
    names = tuple(dict.fromkeys(name for text in what for name in text.replace(",", " ").split()))
    for name in names:
        if name not in WHAT:
            raise unknown_name("measurement of --what", name, WHAT)
    if "cka" in names and num_models > 2:
        raise InputError(f"--what cka compares the layers of one model or of two, not of {num_models}")
    return names


def in_the_table(what: Sequence[str]) -> list[str]:
    """Those that `nearsight.measure` takes."""
    return [name for name in what if name in MEASUREMENTS]


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A subject after a trial on one image."""

    subject: Subject
    layers: Mapping[str, int]
    """Those to measure, by name, with their numbers among all of the model's."""
    first_look: HeadTable


def prepare(
    request: Request, layers: Sequence[str], device: torch.device, *, all_decoded: bool = True
) -> list[Prepared]:
    """Open the models and pass one image through each: what does not work is refused before the first is measured."""
    prepared = []
    for subject in open_subjects(request, device, all_decoded=all_decoded):
        first_look = _first_look(subject, device)
        chosen = _choose_layers(layers, first_look, subject.label)
        prepared.append(Prepared(subject=subject, layers=chosen, first_look=first_look))
    return prepared


def _first_look(subject: Subject, device: torch.device) -> HeadTable:
    image = next(subject.images.batches(1))
    return within_memory(lambda size: _look(subject, [image], size, None, (), device), 1, may_shrink=True)


def _look(
    subject: Subject,
    images: Iterable[Tensor],
    batch_size: int,
    layers: Sequence[str] | None,
    what: Sequence[str],
    device: torch.device,
    ids: Iterable[bytes] | None = None,
    num_images: int | None = None,
) -> HeadTable:
    """The one place where a model is measured, with all measurements of --what."""
    masks = subject.images.masks() if MASKED in what and isinstance(subject.images, PreparedImages) else None
    if MASKED in what and masks is None:
        raise InputError(
            f"--what {MASKED} needs masks, which {subject.images.name} does not have or of which none is background; "
            "give --images a folder with images and masks in it, or a data set with a class background, such as voc2012"
        )
    return measure(
        subject.model,
        images,
        batch_size=batch_size,
        layers=layers,
        device=device,
        precision=subject.precision,
        what=what,
        ids=ids,
        masks=masks if masks is None or num_images is None else islice(masks, num_images),
    )


def _choose_layers(asked: Sequence[str], first_look: HeadTable, label: str) -> dict[str, int]:
    """The layers to measure, by name, and their numbers among all of the model's."""
    number_of = {name: number for number, name in enumerate(first_look.layer_names)}
    names = [name for text in asked for name in text.replace(",", " ").split()]
    if not names:
        return number_of
    chosen = {}
    for name in names:
        if re.fullmatch(r"-?\d+", name) and name not in number_of:
            number = int(name)
            if not -len(number_of) <= number < len(number_of):
                last = len(number_of) - 1
                raise InputError(f"--layers {number}: the layers of {label} count from 0 to {last}")
            name = first_look.layer_names[number]
        elif name in first_look.skipped:
            raise InputError(f"--layers {name}: {label} has it, but it is not measured ({first_look.skipped[name]})")
        elif name not in number_of:
            raise unknown_name(f"layer of {label}", name, number_of)
        chosen[name] = number_of[name]
    return dict(sorted(chosen.items(), key=lambda item: item[1]))


def measure_shown(one: Prepared, batch_size: str, what: Sequence[str], device: torch.device) -> HeadTable:
    with MeasuringProgress(one.subject.label, len(one.subject.images)) as progress:
        return measure_watched(one, batch_size, what, device, progress.counted)


def until_stopped(stop: Stop) -> Watch:
    """For workers: the batches, until their pool is to stop."""

    def watch(batches: Iterator[Tensor]) -> Iterator[Tensor]:
        for batch in batches:
            if stop.by is not None:
                raise StoppedError(stop.by, [0])
            yield batch

    return watch


def measure_watched(
    one: Prepared, batch_size: str, what: Sequence[str], device: torch.device, watch: Watch
) -> HeadTable:
    """A model on all its images, whose batches `watch` passes on."""
    subject, names = one.subject, list(one.layers)

    def try_some(num_images: int) -> HeadTable:
        images = [next(subject.images.batches(num_images))]
        return _look(subject, images, num_images, names, what, device, num_images=len(images[0]))

    if batch_size == "auto":
        size = subject.batch_size or find_batch_size(try_some, subject.image_size, device)
    else:
        size = int(batch_size)
    return within_memory(
        lambda size: _look(
            subject, watch(subject.images.batches(size)), size, names, what, device, subject.images.ids()
        ),
        min(size, len(subject.images)),
        may_shrink=batch_size == "auto",
    )


def check_sharding(
    shards: int | None, shard: int | None, engine: str, workers: int | None, what: Sequence[str]
) -> None:
    """Options that contradict each other, before anything is opened."""
    if shards is None:
        asked = {"--shard": shard is not None, "--engine": engine != "local"}
        for option in (option for option, given in asked.items() if given):
            raise InputError(f"{option} is for images in shards; say with --shards how many")
        return
    check_at_least("--shards", shards, 1)
    if shard is not None and not 0 <= shard < shards:
        raise InputError(f"--shard is {shard}, but {shards} shards count from 0 to {shards - 1}")
    if shard is not None and engine != "local":
        raise InputError("--shard is one job, for one process; leave out --engine")
    if workers is not None:
        check_at_least("--workers", workers, 1)
    for name in (name for name in what if name not in in_the_table(what)):
        raise InputError(f"--what {name} is not divided into shards; leave it out, or ask for it without --shards")


def shards_of(one: Prepared, what: Sequence[str], num_shards: int, folder: Path) -> Shards:
    """How the images of a model are divided, and where its shards are kept."""
    record, num_images = _record_of(one, what), len(one.subject.images)
    return Shards(folder=folder / "shards", record=record, num_images=num_images, num_shards=num_shards)


def _record_of(one: Prepared, what: Sequence[str]) -> dict[str, Any]:
    """All that its numbers depend on but for rounding: not the device, nor how many images go through it at once."""
    from nearsight.probe.frozen import model_identity  # here, because few ask for shards

    heads_L = (~np.isnan(one.first_look.mad)).sum(1).tolist()
    heads_of = dict(zip(one.first_look.layer_names, heads_L, strict=True))
    record = {
        "model": model_identity(one.subject.model),
        "heads": {name: heads_of[name] for name in one.layers},
        "images": images_record(one.subject.images),
        "precision": one.subject.precision,
        "what": sorted(what),
    }
    as_read: dict[str, Any] = json.loads(json.dumps(record, default=str))
    return as_read


class ShardJob(NamedTuple):
    """One shard of one model."""

    model: int
    """Its place among the models that are named."""
    shard: int
    said: str
    """It, in words."""

    def __str__(self) -> str:
        return self.said


@dataclass(frozen=True, kw_only=True)
class ShardMeasuring:
    """How shards are measured, wherever that is; it is sent to workers."""

    request: Request
    layers: Sequence[str]
    batch_size: str
    divided: Sequence[Shards]
    """Of each model that is named."""

    def missing(self, labels: Sequence[str], only: int | None) -> list[ShardJob]:
        """The shards of all models that are still to be measured, as one list; of these, the one that is asked for."""
        return [
            ShardJob(model, shard, f"{label}, shard {shard} of {shards.num_shards}")
            for model, (shards, label) in enumerate(zip(self.divided, labels, strict=True))
            for shard in (range(shards.num_shards) if only is None else [only])
            if not shards.is_done(shard)
        ]

    def here(self, prepared: Sequence[Prepared], jobs: Sequence[ShardJob], device: torch.device) -> None:
        """One shard after the other, in this process."""
        for job in jobs:
            with MeasuringProgress(str(job), len(self.divided[job.model].span(job.shard))) as progress:
                self._do(prepared[job.model], job, device, progress.counted)

    def in_processes(self, jobs: Sequence[ShardJob], device: torch.device, workers: int | None) -> None:
        """Several at a time, on a CPU with one thread each; what loses its process is measured again."""
        num_threads = 1 if device.type == "cpu" else None
        with process_pool(self.worker, places(device, workers), num_threads=num_threads, patience=5.0) as pool:
            self._elsewhere(jobs, pool)

    def on_ray(self, jobs: Sequence[ShardJob], device: str, address: str) -> None:
        """Several at a time, wherever the cluster has room; what loses its worker is measured again."""
        with ray_pool(self.worker, address=address, device=device) as pool:
            self._elsewhere(jobs, pool)

    def _elsewhere(self, jobs: Sequence[ShardJob], pool: Pool[ShardJob, str]) -> None:
        num_shards = sum(shards.num_shards for shards in self.divided)
        with _ShardsProgress("shards", num_shards, num_shards - len(jobs)) as progress:
            _ShardDriver(pool, progress).run(jobs)

    def worker(self, place: str) -> Callable[[Attempt[ShardJob], Tell, Stop], Outcome[str]]:
        """What a worker does with its jobs: it opens a model when one asks for it, and keeps it for the next."""
        device = torch.device(place)

        @lru_cache(maxsize=1)
        def opened(model: int) -> Prepared:
            (one,) = prepare(_one_model(self.request, model), self.layers, device, all_decoded=False)
            shards = self.divided[model]
            if _record_of(one, shards.record["what"]) != shards.record:
                raise InputError(
                    f"{self.request.models[model]} or its images differ each time they are opened, so they cannot "
                    "be measured by several processes; use --engine local"
                )
            return one

        def do(attempt: Attempt[ShardJob], tell: Tell, stop: Stop) -> Outcome[str]:
            try:
                for job in attempt.items:
                    self._do(opened(job.model), job, device, until_stopped(stop))
            except InputError as error:
                return Outcome(result=str(error))
            except StoppedError as stopped:
                return Outcome(stopped_by=stopped.by)
            return Outcome()

        return do

    def _do(self, one: Prepared, job: ShardJob, device: torch.device, watch: Watch) -> None:
        shards = self.divided[job.model]
        part = replace(one, subject=part_of(one.subject, shards.span(job.shard)))
        shards.keep(job.shard, measure_watched(part, self.batch_size, shards.record["what"], device, watch))


def _one_model(request: Request, model: int) -> Request:
    """A request for one of its models alone, opened as it is among the others."""
    text = request.models[model]
    leaves_the_choice = not Path(text).is_dir() and has_published_weights(text)
    pretrained = request.pretrained and (len(request.models) == 1 or leaves_the_choice)
    return replace(request, models=(text,), pretrained=pretrained)


class _ShardDriver(Driver[ShardJob, str]):
    """Has shards measured by a pool of workers, one at a time. What a worker refuses is refused here, at once."""

    def __init__(self, pool: Pool[ShardJob, str], progress: "_ShardsProgress", retries: Retries | None = None) -> None:
        super().__init__(pool, retries or Retries(), Stop())
        self._progress, self._given_up = progress, list[str]()

    def run(self, jobs: Sequence[ShardJob]) -> None:
        self.drive([job] for job in jobs)
        if self._given_up:
            given_up = "; ".join(self._given_up)
            raise TrainingError(f"{given_up}; what is done is kept, and the same command tries the rest again")

    def ended(self, attempt: Attempt[ShardJob], outcome: Outcome[str]) -> None:
        if outcome.result is not None:
            raise InputError(outcome.result)
        self._progress.done(*attempt.items)

    def lost(self, attempt: Attempt[ShardJob], left: Sequence[ShardJob], problem: str, seconds: float | None) -> None:
        (job,) = left
        if seconds is not None:
            self._progress.again(job, problem)
        else:
            lost = f"it had lost {attempt.losses + 1} processes, the last because {problem}"
            self._given_up.append(f"{job} was given up after {lost}")


class _ShardsProgress(BarOrLines):
    """Counts the shards that processes have measured."""

    def __init__(self, label: str, num_shards: int, num_done: int) -> None:
        super().__init__(label)
        self._num_shards, self._num_done = num_shards, num_done

    def __enter__(self) -> Self:
        super().__enter__()
        if self._bar is not None:
            self._task = self._bar.add_task(self._label, total=self._num_shards, completed=self._num_done, status="")
        return self

    def done(self, job: ShardJob) -> None:
        self._num_done += 1
        if self._bar is not None:
            self._bar.update(self._task, completed=self._num_done)
        else:
            self._say(f"{job} measured, {self._num_done} of {self._num_shards} done")

    def again(self, job: ShardJob, problem: str) -> None:
        self._say(f"{job} is measured again, since {problem}")
