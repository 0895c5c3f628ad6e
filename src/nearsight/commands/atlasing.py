"""How `nearsight atlas` measures the models of a list, each of which is kept as soon as it is done, and what it writes
of them."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import timm
import torch
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD

from nearsight.commands.further import write_extra_tables
from nearsight.commands.measured import Measured
from nearsight.commands.measuring import Watch, check_what, in_the_table, measure_watched, prepare, until_stopped
from nearsight.commands.options import Request, short_name
from nearsight.commands.pictures import PreparedImages, find_pictures
from nearsight.commands.progress import MeasuringProgress
from nearsight.commands.subjects import images_record
from nearsight.configuration import encode
from nearsight.errors import InputError
from nearsight.files import WriteError, canonical_hash, output_folder, read_object, reading, write_json
from nearsight.lens import HeadTable
from nearsight.models.lists import ListedModel, ModelList
from nearsight.models.sourced import one_line
from nearsight.probe.frozen import weights_hash
from nearsight.report.atlas import AtlasModel, Kind
from nearsight.report.atlas_page import AtlasReport
from nearsight.report.inputs import DESCRIPTION, read_measured, write_measured
from nearsight.report.tables import records
from nearsight.train import Stop, StoppedError, write_heads
from nearsight.train.integrity import joined
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


class Job(NamedTuple):
    """A model to measure, and what it is in the atlas."""

    model: ListedModel
    label: str
    kind: Kind
    beside: str | None = None
    """The label that it is compared with."""

    def __str__(self) -> str:
        return self.label


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
        heads, table = read_measured(folder).heads, HeadTable.load(folder / "heads.npz")
        # What people should know of a model may be corrected in the list without measuring it again.
        config = {**config, **self._about(job.model)}
        return AtlasModel(heads=replace(heads, config=config), table=table, kind=job.kind, beside=job.beside)

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

    def try_one(self, job: Job, device: torch.device, watch: Watch | None) -> str | None:
        """Measure it and keep the table: None, or why that could not be done."""
        try:
            self._measure(job, device, watch)
        except (WriteError, StoppedError, torch.AcceleratorError):  # of which the model is innocent
            raise
        except InputError as error:
            return str(error)
        except Exception as error:  # a model of somebody else may raise anything, and there are others to measure
            return f"{type(error).__name__}: {one_line(error)}"
        return None

    def _measure(self, job: Job, device: torch.device, watch: Watch | None) -> None:
        model, options = job.model, self.options
        identity = self.identity(job)
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
            "identity": identity,
            **self._about(model),
        }
        one = replace(
            one, subject=replace(one.subject, label=job.label, images=images, run=None, epoch=0, config=config)
        )
        if watch is None:
            with MeasuringProgress(job.label, len(images)) as progress:
                table = measure_watched(one, options.batch_size, self.what, device, progress.counted)
        else:
            table = measure_watched(one, options.batch_size, self.what, device, watch)
        folder = output_folder(self.folder(job))
        (folder / DESCRIPTION).unlink(missing_ok=True)  # from here on, what was there is of no model
        seen = Measured.of(one.subject, table, [one.layers[name] for name in table.layer_names], folder, device)
        seen.table.save(folder / "heads.npz")
        write_heads(folder / "heads.csv", seen.heads.heads, 0)
        write_extra_tables(table, seen.layers, self.what, folder)
        write_measured(folder, seen.heads, None)

    def worker(self, place: str) -> Callable[[Attempt[Job], Tell, Stop], Outcome[str]]:
        """What a worker does with its models, one after the other."""
        device = torch.device(place)

        def do(attempt: Attempt[Job], tell: Tell, stop: Stop) -> Outcome[str]:
            try:
                (job,) = attempt.items
                return Outcome(result=self.try_one(job, device, until_stopped(stop)))
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
    atlas = Atlas(options=options, models=models, what=what, pictures=digest)
    jobs = jobs_of(models, with_random=not options.no_random)
    found, problems = _measured(atlas, jobs, device)
    if options.preparations:
        own = {model.label: model for model in found if model.kind == "trained"}
        others = [other for job in jobs if job.label in own for other in preparations_of(job, own[job.label])]
        more, further_problems = _measured(atlas, others, device)
        found, problems = found + more, problems | further_problems
    return found, problems


def _measured(atlas: Atlas, jobs: Sequence[Job], device: torch.device) -> tuple[list[AtlasModel], dict[str, str]]:
    problems: dict[str, str] = {}
    missing = []
    for job in jobs:
        try:
            if atlas.measured(job) is None:
                missing.append(job)
        except InputError as error:  # of its checkpoint, say; or of a file that is damaged, which is made again
            if (atlas.folder(job) / DESCRIPTION).exists():
                missing.append(job)
            else:
                problems[job.label] = str(error)
    problems |= _do(atlas, missing, device)
    found = [model for job in jobs if job.label not in problems and (model := atlas.measured(job)) is not None]
    return found, {job.label: problems[job.label] for job in jobs if job.label in problems}


def _do(atlas: Atlas, jobs: Sequence[Job], device: torch.device) -> dict[str, str]:
    """Measure these; the reasons of those that failed."""
    options = atlas.options
    if options.engine == "local" or not jobs:
        problems = {}
        for job in jobs:
            if (why := atlas.try_one(job, device, None)) is not None:
                problems[job.label] = why
                _say(job, why)
        return problems
    if options.engine == "ray":
        with ray_pool(atlas.worker, address=options.address, device=options.device) as pool:
            return _AtlasDriver(pool, Retries(), Stop()).run(jobs)
    num_threads = 1 if device.type == "cpu" else None
    with process_pool(atlas.worker, places(device, options.workers), num_threads=num_threads, patience=5.0) as pool:
        return _AtlasDriver(pool, Retries(), Stop()).run(jobs)


def _say(job: Job, text: str) -> None:
    print(f"{job}: {text}", file=sys.stderr, flush=True)


class _AtlasDriver(Driver[Job, str]):
    """Has models measured by a pool of workers, one at a time."""

    def run(self, jobs: Sequence[Job]) -> dict[str, str]:
        self._problems: dict[str, str] = {}
        self.drive([job] for job in jobs)
        return self._problems

    def ended(self, attempt: Attempt[Job], outcome: Outcome[str]) -> None:
        (job,) = attempt.items
        if outcome.result is not None:
            self._problems[job.label] = outcome.result
        _say(job, outcome.result or "measured")

    def lost(self, attempt: Attempt[Job], left: Sequence[Job], problem: str, seconds: float | None) -> None:
        for job in left:
            if seconds is not None:
                _say(job, f"is measured again, since {problem}")
            else:
                self._problems[job.label] = f"it lost {attempt.losses + 1} processes, the last because {problem}"


@dataclass(frozen=True, kw_only=True)
class Written:
    """What the command reports."""

    rows: list[dict[str, Any]]
    table: str
    sentences: list[str]
    problems: Mapping[str, str]
    files: list[Path]

    def as_json(self) -> dict[str, Any]:
        return {
            "models": self.rows,
            "failed": dict(self.problems),
            "sentences": self.sentences,
            "files": list(map(str, self.files)),
        }

    def as_text(self) -> list[str]:
        failed = [f"Not measured: {label}: {why}" for label, why in self.problems.items()]
        return [
            self.table,
            "",
            *self.sentences,
            *failed,
            "",
            *(f"{path}" for path in self.files if path.suffix != ".svg"),
        ]


def write_all(
    out: Path, models: ModelList, found: Sequence[AtlasModel], problems: Mapping[str, str], command: str
) -> Written:
    """The tables over models, the figures and the page."""
    output_folder(out)
    report = AtlasReport.of(found, problems)
    files = report.write(out, title=f"Atlas: {models.name}", about=models.about, command=command)
    files.append(out / "provenance.json")
    certificates = [model.heads.provenance or {} for model in found]
    write_json(
        files[-1],
        {
            "command": command,
            **joined(certificates, ("commit", "versions", "hardware")),
            **joined([model.record for model in found], ("images",)),
            "weights": {model.label: model.record["digest"] for model in found},
        },
    )
    numbers = report.overview.numbers
    rows = records(numbers.astype(object).where(numbers.notna(), None))
    return Written(
        rows=json.loads(json.dumps(rows, default=str)),
        table=report.overview.shown.to_string(index=False),
        sentences=[report.headline, *report.sentences],
        problems=problems,
        files=files,
    )
