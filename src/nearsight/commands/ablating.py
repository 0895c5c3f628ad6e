"""How `nearsight ablate` asks a model: opened and measured as by `nearsight measure`, then with its heads changed."""

import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from nearsight.commands.ablate import AblateOptions
from nearsight.commands.measured import Measured, explore, write_all
from nearsight.commands.measuring import Prepared, measure_shown, prepare
from nearsight.commands.options import Request
from nearsight.commands.pictures import (
    FilePictures,
    Images,
    PixelPictures,
    PreparedImages,
    RunImages,
    find_batch_size,
    within_memory,
)
from nearsight.commands.progress import SECONDS_BETWEEN_LINES, BarOrLines
from nearsight.commands.subjects import images_record
from nearsight.data import Dataset, load_dataset, measuring_subset
from nearsight.data.segmentation import SEGMENTATION_SETS, MaskedImages, SegmentationSet
from nearsight.errors import InputError
from nearsight.files import canonical_hash, write_json
from nearsight.lens import HeadTable, Survey, average_maps
from nearsight.lens.running import running, without_gradients
from nearsight.probe import Ablation, Readout, Tried, Variant, fit_pixels, model_identity, try_variants
from nearsight.probe.ablation import labelled, questions, readout
from nearsight.probe.frozen import weights_hash
from nearsight.probe.readouts import Pixels, logits_of
from nearsight.probe.search import check_enough
from nearsight.probe.settings import ABLATION_K, USUAL_PLANS
from nearsight.report.ablation import AblationReport
from nearsight.report.page.document import PAGE

_AVERAGED = ("mean", "offsets")
"""Plans that need reference images."""
PARTS = "parts"
"""Folder of what is known of the images that are done, until all are."""
_FIT_BATCH = 16


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What was found of a model, and where it goes."""

    options: AblateOptions
    measured: Measured
    report: AblationReport
    notes: Sequence[str]

    def write(self, command: str) -> list[Path]:
        out, report = self.measured.folder, self.report
        # All that takes long before the first file: an interruption leaves none.
        section, explorer = report.section(), explore([self.measured])
        files = write_all(out, [self.measured], command, [section], explorer)
        files += report.write(out)
        write_json(out / "ablation.json", self._record())
        shutil.rmtree(out / PARTS, ignore_errors=True)
        return [*files, out / "ablation.json"]

    def _record(self) -> dict[str, Any]:
        images, found = self.measured.subject.images, self.report.found
        settings = {name: value for name, value in asdict(self.options).items() if name not in ("json", "out")}
        return {
            "model": self.measured.subject.label,
            "images": {"from": images.name, "num": len(images), "preparation": images.preparation},
            "settings": {name: str(value) if isinstance(value, Path) else value for name, value in settings.items()},
            found.tried.metric: found.score,
            "areas": found.areas(),
            "sentences": self.report.sentences(),
            "notes": list(self.notes),
        }

    def as_json(self, files: Sequence[Path]) -> dict[str, Any]:
        return {**self._record(), "rows": self.report.found.rows(), "files": [str(path) for path in files]}

    def as_text(self) -> list[str]:
        out, images = self.measured.folder, self.measured.subject.images
        return [
            *self.report.sentences(),
            f"Images: {len(images)} of {images.name}, {images.preparation}",
            *(f"Note: {note}" for note in self.notes),
            "",
            f"Tables: {out}",
            f"Figures: {out / 'figures'}",
            f"Page: {out / PAGE}",
        ]


@dataclass(frozen=True, kw_only=True)
class _Data:
    """Images to ask about, with what is true of them, and training images where they are needed."""

    name: str
    test: Images
    truth: Any
    """Labels [N], or masks: what is true of the test images, by slices."""
    train: Images | None
    train_truth: Any = None
    num_classes: int
    labels: str | None = None
    """What identifies masks that may be edited."""


class _Masks:
    """Masks that are read when they are asked for."""

    def __init__(self, images: MaskedImages) -> None:
        self._images = images

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, span: slice) -> list[torch.Tensor]:
        return [self._images.mask(index) for index in range(*span.indices(len(self)))]


def ask(options: AblateOptions, request: Request, reaches: Sequence[float], out: Path) -> Asked:
    """Open the model, measure it, change its heads. Only finished batches are written yet."""
    device = request.torch_device
    masked = None
    if options.has_masks:
        assert options.data is not None
        masked = options.load_masked(options.data, options.data_dir)
        if options.data not in SEGMENTATION_SETS:
            request = replace(request, images=str(masked.test.pairs[0][0].parent))  # one image is looked at first
    (one,) = prepare(request, (), device, all_decoded=False)
    one.subject.model.to(getattr(torch, options.precision))
    if masked is not None:
        data = _with_masks(one, masked, request, options.num_train)
    else:
        data = _with_labels(one, request, needs_train=_needs_reference(options))
    one = replace(one, subject=replace(one.subject, images=data.test))
    if options.score == "knn":
        check_enough(len(data.truth) - 1, ABLATION_K, "other images")
    elif not options.has_masks:
        _check_classes(one, data, device)
    table = measure_shown(one, options.batch_size, (), device)
    read = _fitted(options, one, data, device) if options.has_masks else readout(options.score or "classifier")
    tried = _changed(options, one, data, read, table, reaches, out, device)
    measured = Measured.of(one.subject, table, range(len(table.layer_names)), out, device)
    report = AblationReport(Ablation(tried, table), measured.heads, _words_of(options))
    notes = [*one.subject.notes, *_notes(options, tried, data)]
    return Asked(options=options, measured=measured, report=report, notes=notes)


def _words_of(options: AblateOptions) -> str:
    if options.has_masks:
        return "mIoU of a head on the patches of the last block"
    return f"accuracy of k-NN among these images, k = {ABLATION_K}" if options.score == "knn" else "accuracy"


def _needs_reference(options: AblateOptions) -> bool:
    return "heads" in options.asked and any(name in _AVERAGED for name in options.plan_names)


def _with_labels(one: Prepared, request: Request, *, needs_train: bool) -> _Data:
    images = one.subject.images
    dataset: Dataset
    if isinstance(images, RunImages):
        dataset = images.dataset
        if needs_train and dataset.pictures is not None:
            raise InputError(
                f"the training pictures of {dataset.name} were streamed in this run, and are not decoded; name images "
                "with --images"
            )
    else:
        assert request.images is not None
        dataset = load_dataset(request.images, data_dir=request.data_dir, num_train=None if needs_train else 0)
    assert request.num_images is not None
    chosen = dataset.test.select(measuring_subset(len(dataset.test), request.num_images))
    train: Images
    if isinstance(images, RunImages):
        train = RunImages(replace(dataset, test=dataset.train), len(dataset.train), images.device)
    else:
        # Of a tree of pictures too: as the data set decodes them, with their classes.
        images = replace(images, pictures=PixelPictures(f"{dataset.name}, test", chosen.images_NCHW))
        train = replace(images, pictures=PixelPictures(f"{dataset.name}, train", dataset.train.images_NCHW))
    return _Data(
        name=dataset.name,
        test=images,
        truth=chosen.labels_N,
        train=train if needs_train else None,
        num_classes=dataset.num_classes,
    )


def _with_masks(one: Prepared, dataset: SegmentationSet, request: Request, num_train: int) -> _Data:
    """Whole images, squeezed to the model's size, so that every pixel of a mask has its patch."""
    images = one.subject.images
    assert isinstance(images, PreparedImages)
    assert request.num_images is not None
    parts = []
    for part, masked, number in (
        ("test", dataset.test, request.num_images),
        ("training", dataset.train, num_train),
    ):
        pairs = [masked.pairs[index] for index in measuring_subset(len(masked), number).tolist()]
        pictures = FilePictures(f"{dataset.name}, {part}", [image for image, _ in pairs])
        config = {**images.data_config, "crop_pct": 1.0, "crop_mode": "squash"}
        parts.append((replace(images, pictures=pictures, data_config=config), _Masks(replace(masked, pairs=pairs))))
    (test, truth), (train, train_truth) = parts
    return _Data(
        name=dataset.name,
        test=test,
        truth=truth,
        train=train,
        train_truth=train_truth,
        num_classes=dataset.num_classes,
        labels=dataset.fingerprint if dataset.labels_by_content else None,
    )


def _some(images: Images, number: int) -> Images:
    """As many of them, always the same ones."""
    if isinstance(images, RunImages):
        return RunImages(images.dataset, number, images.device)
    chosen = measuring_subset(len(images), number).tolist()
    return replace(images, pictures=images.pictures.chosen(chosen))


def _check_classes(one: Prepared, data: _Data, device: torch.device) -> None:
    with running(one.subject.model, device) as run, without_gradients():
        found = logits_of(run.model(run.brought(next(one.subject.images.batches(1))))).shape[1]
    if found != data.num_classes:
        raise InputError(
            f"the classifier of {one.subject.label} has {found} classes, but {data.name} has {data.num_classes}; "
            f"use --score knn, or a model that was trained on {data.name}"
        )


def _fitted(options: AblateOptions, one: Prepared, data: _Data, device: torch.device) -> Pixels:
    """The head that reads the classes of pixels."""
    assert data.train is not None
    number = len(data.train)
    with _Progress(one.subject.label) as progress:
        progress.begin(options.steps, "steps", f"fitting a segmentation head to {number} training images")
        return fit_pixels(
            one.subject.model,
            labelled(data.train.batches(_FIT_BATCH), data.train_truth),
            data.num_classes,
            steps=options.steps,
            batch_size=min(_FIT_BATCH, number),
            seed=options.seed,
            device=device,
            on_step=lambda _: progress.add(1),
        )


def _changed(
    options: AblateOptions,
    one: Prepared,
    data: _Data,
    read: Readout,
    table: HeadTable,
    reaches: Sequence[float],
    out: Path,
    device: torch.device,
) -> Tried:
    subject = one.subject
    averages = None
    if _needs_reference(options):
        assert data.train is not None
        reference = _some(data.train, options.num_reference)
        averages = average_maps(subject.model, reference.batches(_FIT_BATCH), device=device)
    # All that the numbers depend on.
    named = ("what", "plans", "reach", "orders", "score", "num_reference", "num_train", "steps", "seed")
    record = {
        "model": model_identity(subject.model),
        "images": images_record(subject.images),
        "options": {name: getattr(options, name) for name in named},
        "head": weights_hash(read.head) if isinstance(read, Pixels) else None,
    }
    if data.labels is not None:
        record["labels"] = data.labels

    def try_at(batch_size: int) -> Tried:
        with _Progress(subject.label) as progress:

            def variants(found: Survey) -> list[Variant]:
                listed = questions(
                    found,
                    table,
                    what=options.asked,
                    plans=options.plan_names or None,
                    reaches=reaches or None,
                    orders=options.orders,
                    seed=options.seed,
                    averages=averages,
                )
                num_answers = len(data.truth) * (len(listed) + 1)
                progress.begin(
                    num_answers, "images × variants", f"{len(listed)} variants of the model, {len(data.truth)} images"
                )
                return listed

            return try_variants(
                subject.model,
                labelled(subject.images.batches(batch_size), data.truth),
                variants,
                read,
                variants_at_once=options.variants_at_once,
                device=device,
                num_images=len(data.truth),
                folder=out / PARTS / canonical_hash({**record, "batch_size": batch_size}),
                on_group=progress.add,
            )

    if options.batch_size == "auto":
        some = next(subject.images.batches(2))
        with running(subject.model, device) as run, without_gradients():
            size = find_batch_size(lambda num: run.model(run.brought(some[:num])), subject.image_size, device)
        size = max(1, size // options.variants_at_once)
    else:
        size = int(options.batch_size)
    return within_memory(try_at, min(size, len(data.truth)), may_shrink=options.batch_size == "auto")


def _notes(options: AblateOptions, tried: Tried, data: _Data) -> Iterator[str]:
    plans = {variant.settings["plan"] for variant in tried.variants if variant.kind == "head"}
    for name in USUAL_PLANS:
        if "heads" in options.asked and not options.plans and name not in plans:
            yield f"the plan {name} does not fit this model's layers, and was left out; --plans {name} says why"
    if data.train is not None and options.has_masks:
        yield (
            f"the head was fitted once, to the unchanged model's features of {len(data.train)} "
            f"training images of {data.name}, in {options.steps} steps; whole images were squeezed to the model's size"
        )
    if data.train is not None and _needs_reference(options):
        number = min(options.num_reference, len(data.train))
        yield f"mean and offsets are averages over {number} training images of {data.name}"


class _Progress(BarOrLines):
    """Counts steps, or answers: images × variants."""

    def __init__(self, label: str) -> None:
        super().__init__(label)
        self._total = self._done = 0
        self._began = self._said = time.perf_counter()

    def begin(self, total: int, unit: str, said: str) -> None:
        self._total, self._unit = total, unit
        if self._bar is not None:
            self._task = self._bar.add_task(self._label, total=total, status=unit)
        else:
            self._say(said)

    def add(self, number: int) -> None:
        self._done += number
        if self._bar is not None:
            self._bar.update(self._task, completed=self._done)
        elif self._done < self._total and time.perf_counter() - self._said > SECONDS_BETWEEN_LINES:
            self._said = time.perf_counter()
            self._say(f"{self._done / self._total:.0%} of {self._unit}")

    def __enter__(self) -> Self:
        super().__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, traceback)
        if self._bar is None and kind is None:
            self._say(f"{self._done} {self._unit} in {time.perf_counter() - self._began:.1f} s")
