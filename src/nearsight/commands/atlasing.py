"""How `nearsight atlas` measures the models of a list: shard by shard of the pictures, each of which is kept as soon as
it is done, by one process or by several at the same folder."""

from __future__ import annotations

import hashlib
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import timm
import torch
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD

from nearsight.commands.further import write_extra_tables
from nearsight.commands.measured import Measured
from nearsight.commands.measuring import (
    Prepared,
    Watch,
    check_what,
    in_the_table,
    measure_watched,
    prepare,
    shards_of,
    until_stopped,
)
from nearsight.commands.options import Request, short_name
from nearsight.commands.pictures import PreparedImages, find_pictures
from nearsight.commands.progress import MeasuringProgress
from nearsight.commands.subjects import images_record, part_of
from nearsight.configuration import encode
from nearsight.errors import InputError
from nearsight.files import LostError, WriteError, canonical_hash, output_folder, read_object, reading
from nearsight.lens import HeadTable
from nearsight.models.lists import ListedModel, ModelList
from nearsight.models.sourced import one_line
from nearsight.probe.frozen import weights_hash
from nearsight.report.atlas import AtlasModel, Kind, keep_small, read_model, with_texts
from nearsight.report.inputs import DESCRIPTION, write_measured
from nearsight.study.lock import Locks
from nearsight.train import Stop, StoppedError, write_heads
from nearsight.work import (
    Attempt,
    Driver,
    Outcome,
    Retries,
    Tell,
    check_device,
    import_ray,
    places,
    process_pool,
    ray_pool,
)

if TYPE_CHECKING:
    from nearsight.commands.atlas import AtlasOptions

Channels = tuple[float, float, float]
PREPARATIONS: Mapping[str, tuple[Channels, Channels]] = {
    "ImageNet’s mean and std": (IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD),
    "mean and std of 0.5": ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
    "not normalised": ((0.0, 0.0, 0.0), (1.0, 1.0, 1.0)),
}
"""What pixels in [0, 1] are normalised by, in words → mean and standard deviation."""
PICTURES_PER_SHARD = 256
"""At most: what a killed process loses."""
HELD = "another process is at it"
_SECONDS_BETWEEN_LOOKS = 2.0


class Job(NamedTuple):
    """A model to measure, and what it is in the atlas."""

    model: ListedModel
    label: str
    kind: Kind
    beside: str | None = None
    """The label that it is compared with."""

    def __str__(self) -> str:
        return self.label


class Part(NamedTuple):
    """A shard of the pictures of a model."""

    job: Job
    shard: int
    num_shards: int

    def num_pictures(self, of: int) -> int:
        return (self.shard + 1) * of // self.num_shards - self.shard * of // self.num_shards

    def __str__(self) -> str:
        return f"{self.job}, shard {self.shard} of {self.num_shards}" if self.num_shards > 1 else str(self.job)


def jobs_of(models: ModelList, *, with_random: bool) -> list[Job]:
    """The models of a list, and after them each of their architectures once with random weights."""
    jobs, untrained = [], dict[str, Job]()
    for model in models.models:
        twin = model.untrained() if with_random else None
        if twin is not None:
            untrained.setdefault(twin.name, Job(twin, twin.name, "random"))
        kind: Kind = "trained" if model.is_trained else "random"
        jobs.append(Job(model, model.name, kind, None if twin is None else twin.name))
    return [*jobs, *untrained.values()]


def preparations_of(job: Job, own: AtlasModel) -> list[Job]:
    """The same under the other means and standard deviations."""
    prepared = own.record["preparation"]
    return [
        Job(replace(job.model, mean=mean, std=std), f"{job.label}, {words}", "preparation", job.label)
        for words, (mean, std) in PREPARATIONS.items()
        if not (_equal(mean, prepared["mean"]) and _equal(std, prepared["std"]))
    ]


def _equal(one: Sequence[float], other: Sequence[float]) -> bool:
    return all(abs(a - b) < 1e-6 for a, b in zip(one, other, strict=True))


@dataclass(frozen=True, kw_only=True)
class Atlas:
    """How models are measured, wherever that is; it is sent to workers."""

    options: AtlasOptions
    models: ModelList
    what: tuple[str, ...]
    pictures: str
    """Their digest."""
    num_pictures: int

    def folder(self, job: Job) -> Path:
        """Of its tables; the end keeps apart what differs in letters that no file name has."""
        return self.options.out / "models" / f"{short_name(job.label)}-{canonical_hash(job.label, 4)}"

    def identity(self, job: Job) -> str:
        """All that its numbers depend on, as far as it is known without loading the model."""
        checkpoint = self.models.checkpoint_of(job.model)
        digest = None
        if checkpoint is not None:
            with reading(checkpoint), checkpoint.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
        numbers = ("model", "pretrained", "image_size", "mean", "std")
        return canonical_hash(
            {
                **{name: encode(getattr(job.model, name)) for name in numbers},
                "checkpoint": digest,
                "seed": self.options.seed,
                "pictures": self.pictures,
                "what": sorted(self.what),
            }
        )

    def measured(self, job: Job) -> AtlasModel | None:
        """What an earlier call, or another process, has measured; None where it is missing or of something else."""
        folder = self.folder(job)
        if not (folder / DESCRIPTION).is_file():
            return None
        # The description is written last: with it, the tables are there.
        config = read_object(folder / DESCRIPTION, missing=str(folder)).get("config") or {}
        if config.get("identity") != self.identity(job):
            return None
        return with_texts(read_model(folder, job.kind, job.beside), self._about(job.model))

    def _about(self, model: ListedModel) -> dict[str, str]:
        licence = model.licence
        if not licence and model.pretrained and ":" not in model.model:
            published = timm.get_pretrained_cfg(model.model, allow_unregistered=True)
            licence = (published.license or "") if published is not None else ""
        return {
            "trained_on": model.trained_on,
            "citation": model.citation,
            "licence": licence,
            "note": model.note,
        }

    def opened(self, job: Job, device: torch.device) -> Prepared:
        """The model, tried on a picture; its subject says what people should know of it."""
        model, options = job.model, self.options
        request = Request(
            models=(model.model,),
            images=options.images,
            num_images=options.num_images,
            data_dir=options.data_dir,
            pretrained=model.pretrained,
            checkpoint=self.models.checkpoint_of(model),
            image_size=model.image_size,
            seed=options.seed,
        )
        (one,) = prepare(request, (), device, all_decoded=False)
        images = one.subject.images
        assert isinstance(images, PreparedImages)
        if model.mean is not None and model.std is not None:
            images = replace(images, data_config={**images.data_config, "mean": model.mean, "std": model.std})
        config = {
            "model": model.model,
            "weights": "trained" if model.is_trained else f"random, seed {options.seed}",
            "checkpoint": model.checkpoint,
            "digest": weights_hash(one.subject.model),
            "preparation": dict(images.data_config),
            "images": {"from": images.name, "num": len(images), "digest": self.pictures},
            "notes": list(one.subject.notes),
            "identity": self.identity(job),
            **self._about(model),
        }
        subject = replace(one.subject, label=job.label, images=images, run=None, epoch=0, config=config)
        return replace(one, subject=subject)

    def parts(self, jobs: Sequence[Job]) -> list[Part]:
        """The pictures of these models in shards, as one list."""
        num_shards = -(-self.num_pictures // PICTURES_PER_SHARD)
        return [Part(job, shard, num_shards) for job in jobs for shard in range(num_shards)]

    def try_part(
        self, part: Part, opened: Callable[[Job], Prepared], device: torch.device, watch: Watch, locks: Locks
    ) -> str | None:
        """Measure it and keep what was found: None, or why that could not be done; `HELD` if another process does."""
        try:
            return None if self._do(part, opened, device, watch, locks) else HELD
        except LostError:  # it was silent for so long that another process took over
            return HELD
        except (WriteError, StoppedError, torch.AcceleratorError):  # of which the model is innocent
            raise
        except InputError as error:
            return str(error)
        except Exception as error:  # a model of somebody else may raise anything, and there are others to measure
            return f"{type(error).__name__}: {one_line(error)}"

    def _do(
        self, part: Part, opened: Callable[[Job], Prepared], device: torch.device, watch: Watch, locks: Locks
    ) -> bool:
        """Measure a shard, and write the tables of its model if it was the last; False: another process is at it.

        Whatever is done is kept at once, and looked for again when a lock was taken: between, another process may have
        done it.
        """
        job, folder = part.job, self.folder(part.job)
        cell = f"{folder.name}-{part.shard}"
        if self.measured_or_damaged(job) is not None:
            return True
        if not (locks.is_free(cell) and locks.is_free(folder.name)):  # before the model is opened
            return False
        one = opened(job)
        shards = shards_of(one, self.what, part.num_shards, folder)
        if not shards.is_done(part.shard):
            if not locks.take(cell):
                return False
            if self.measured_or_damaged(job) is None and not shards.is_done(part.shard):
                some = replace(one, subject=part_of(one.subject, shards.span(part.shard)))
                table = measure_watched(some, self.options.batch_size, self.what, device, watch)
                with locks.guarding({cell: shards.path(part.shard).parent}):
                    shards.keep(part.shard, table)
            locks.clear(cell)
        if not all(shards.path(shard).with_suffix(".json").exists() for shard in range(part.num_shards)):
            return True
        if not locks.take(folder.name):
            return False
        if self.measured_or_damaged(job) is None:
            with locks.guarding({folder.name: folder}):
                self._write(one, shards.merged(), folder, device)
        shutil.rmtree(shards.path(0).parent, ignore_errors=True)
        locks.clear(folder.name)
        return True

    def _write(self, one: Prepared, table: HeadTable, folder: Path, device: torch.device) -> None:
        (output_folder(folder) / DESCRIPTION).unlink(missing_ok=True)  # from here on, what was there is of no model
        seen = Measured.of(one.subject, table, [one.layers[name] for name in table.layer_names], folder, device)
        seen.table.save(folder / "heads.npz")
        write_heads(folder / "heads.csv", seen.heads.heads, 0)
        write_extra_tables(table, seen.layers, self.what, folder)
        if self.options.small:
            keep_small(folder)
        write_measured(folder, seen.heads, None)

    def measured_or_damaged(self, job: Job) -> AtlasModel | None:
        """As `measured`; files that cannot be read are as good as none, since they are made again."""
        try:
            return self.measured(job)
        except InputError:
            if not (self.folder(job) / DESCRIPTION).exists():  # it is of the checkpoint
                raise
            return None

    def locks(self, **of_attempt: Any) -> Locks:
        return Locks(self.options.out / "locks", **of_attempt)

    def worker(self, place: str) -> Callable[[Attempt[Part], Tell, Stop], Outcome[str]]:
        """What a worker does with its parts: it opens a model when one asks for it, and keeps it for the next."""
        device = torch.device(place)
        opened = lru_cache(maxsize=1)(partial(self.opened, device=device))

        def do(attempt: Attempt[Part], tell: Tell, stop: Stop) -> Outcome[str]:
            (part,) = attempt.items
            with self.locks(token=attempt.token, lost_tokens=attempt.lost_tokens).kept_alive() as locks:
                try:
                    return Outcome(result=self.try_part(part, opened, device, until_stopped(stop), locks))
                except StoppedError as stopped:
                    return Outcome(stopped_by=stopped.by)

        return do


def measure_all(options: AtlasOptions, models: ModelList) -> tuple[list[AtlasModel], dict[str, str]]:
    """All models of a list, those of earlier calls among them; and why others could not be measured, by label."""
    device = options.torch_device
    what = check_what(options.what, 1)
    for name in what:
        if name not in in_the_table(what):
            raise InputError(f"--what {name} is not per head or layer; use nearsight measure --what {name}")
    if options.engine == "ray":
        check_device(options.device)
        import_ray()
    pictures = find_pictures(options.images, options.num_images, options.data_dir)
    digest = images_record(PreparedImages(pictures, {}))["pictures"]
    atlas = Atlas(options=options, models=models, what=what, pictures=digest, num_pictures=len(pictures))
    jobs = jobs_of(models, with_random=not options.no_random)
    found, problems = _measured(atlas, jobs, device)
    if options.preparations:
        own = {model.label: model for model in found if model.kind == "trained"}
        others = [other for job in jobs if job.label in own for other in preparations_of(job, own[job.label])]
        more, further_problems = _measured(atlas, others, device)
        found, problems = found + more, problems | further_problems
    return found, problems


def _measured(atlas: Atlas, jobs: Sequence[Job], device: torch.device) -> tuple[list[AtlasModel], dict[str, str]]:
    """These models, measured by this process or by others at the same folder; and why some could not be."""
    problems: dict[str, str] = {}
    missing = []
    for job in jobs:
        try:
            if atlas.measured_or_damaged(job) is None:
                missing.append(job)
        except InputError as error:  # of its checkpoint, say
            problems[job.label] = str(error)
    parts, said = atlas.parts(missing), set[Part]()
    while parts:
        found, held = _try(atlas, parts, device)
        problems |= found
        waiting = [part for part in held if part.job.label not in problems]
        for part in waiting:
            if part not in said:
                _say(str(part), f"{HELD}; waiting")
        said.update(waiting)
        if parts := waiting:
            time.sleep(_SECONDS_BETWEEN_LOOKS)
    measured = [model for job in jobs if job.label not in problems and (model := atlas.measured(job)) is not None]
    return measured, {job.label: problems[job.label] for job in jobs if job.label in problems}


def _try(atlas: Atlas, parts: Sequence[Part], device: torch.device) -> tuple[dict[str, str], list[Part]]:
    """Measure these; the reasons of models that failed, and what another process is at."""
    options = atlas.options
    if options.engine == "ray":
        with ray_pool(atlas.worker, address=options.address, device=options.device) as pool:
            return _AtlasDriver(pool, Retries(), Stop()).run(parts)
    if options.engine == "processes":
        num_threads = 1 if device.type == "cpu" else None
        with process_pool(atlas.worker, places(device, options.workers), num_threads=num_threads, patience=5.0) as pool:
            return _AtlasDriver(pool, Retries(), Stop()).run(parts)
    problems, held = dict[str, str](), list[Part]()
    opened = lru_cache(maxsize=1)(partial(atlas.opened, device=device))
    with atlas.locks().kept_alive() as locks:
        for part in parts:
            if part.job.label in problems:
                continue
            with MeasuringProgress(str(part), part.num_pictures(atlas.num_pictures)) as progress:
                why = atlas.try_part(part, opened, device, progress.counted, locks)
            if why == HELD:
                held.append(part)
            elif why is not None:
                problems[part.job.label] = why
                _say(part.job.label, why)
    return problems, held


def _say(what: str, text: str) -> None:
    print(f"{what}: {text}", file=sys.stderr, flush=True)


class _AtlasDriver(Driver[Part, str]):
    """Has models measured by a pool of workers, a shard at a time."""

    def run(self, parts: Sequence[Part]) -> tuple[dict[str, str], list[Part]]:
        self._problems, self._held = dict[str, str](), list[Part]()
        self.drive([part] for part in parts)
        return self._problems, self._held

    def ended(self, attempt: Attempt[Part], outcome: Outcome[str]) -> None:
        (part,) = attempt.items
        if outcome.result == HELD:
            self._held.append(part)
        elif outcome.result is None:
            _say(str(part), "measured")
        elif part.job.label not in self._problems:
            self._problems[part.job.label] = outcome.result
            _say(part.job.label, outcome.result)

    def lost(self, attempt: Attempt[Part], left: Sequence[Part], problem: str, seconds: float | None) -> None:
        for part in left:
            if seconds is not None:
                _say(str(part), f"is measured again, since {problem}")
            else:
                lost = f"it lost {attempt.losses + 1} processes, the last because {problem}"
                self._problems.setdefault(part.job.label, lost)
