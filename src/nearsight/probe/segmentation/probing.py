"""Frozen segmentation (S2 §5.2): a small head on the features of a model, trained and tested in a folder of its own.

result.json       mIoU, pixel accuracy and what they compare with
per_class.csv     IoU of each class
history.csv       loss and learning rate
head.safetensors  the trained head
config.json       all settings, the model and the data
provenance.json   code, versions, hardware, time

The same seed gives the same numbers: to the last bit on a CPU, up to the order of sums on a GPU. Ended at any moment, a
probe goes on from its last checkpoint when it is started again; one that is complete is read, not repeated.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nearsight.data import measuring_subset
from nearsight.data.segmentation import SegmentationSet
from nearsight.errors import InputError, check_at_least
from nearsight.models.sourced import one_line
from nearsight.probe.features import FeatureReader, reading
from nearsight.probe.frozen import FAILURES, FrozenModel, Preparation, check_side, size_step, take_other_sizes
from nearsight.probe.segmentation.config import SegmentConfig
from nearsight.probe.segmentation.crops import TrainingCrops
from nearsight.probe.segmentation.head import Features, HeadTraining, LossRow, Prediction, Tester
from nearsight.probe.segmentation.kept import Kept, kept_maps
from nearsight.probe.segmentation.result import SegmentFolder, SegmentResult, probe_record
from nearsight.probe.settings import FeatureSpec
from nearsight.tensorfile import save_tensors
from nearsight.train import Stop, StoppedError
from nearsight.train.integrity import provenance

NUM_SHOWN = 6
"""Predictions that are drawn."""

Show = Callable[[Sequence[Prediction]], None]


class ProbeStoppedError(StoppedError):
    """A probe ended because a stop was requested; its folder holds all steps that were done."""

    def __init__(self, by: str, steps_done: int) -> None:
        Exception.__init__(self, f"stopped by {by} after iteration {steps_done}; the same command continues")
        self.by = by


class SegmentListener:
    """Called when something happens; the default does nothing."""

    def started(self, steps_done: int, config: SegmentConfig) -> None: ...

    def step(self, steps_done: int, last: LossRow | None) -> None:
        """`last`: the newest line of the history."""

    def tested(self, num_done: int, num_images: int) -> None: ...


def probe_segmentation(
    frozen: FrozenModel,
    dataset: SegmentationSet,
    config: SegmentConfig,
    path: Path,
    *,
    device: torch.device | str = "cpu",
    listener: SegmentListener | None = None,
    stop: Stop | None = None,
    checkpoint_every: int = 500,
    show: Show | None = None,
    keep: bool = False,
    cache: Path | None = None,
) -> SegmentFolder:
    """Train and test a head in the folder `path`, or finish what is missing there.

    The model is afterwards the same, but may have been changed to take images of the config's sizes.

    Args:
        stop: checked after every step and every test image. If a stop is requested, a checkpoint is written and
            `ProbeStoppedError` raised.
        checkpoint_every: iterations between checkpoints; a kill costs those since the last one. It changes no number.
        show: given some predictions, before the probe is complete.
        keep: keep the features of whole test images for another head, in the folder `cache`, by default in the user's
            cache folder, but there not more than 1 GiB.
    """
    check_at_least("checkpoint_every", checkpoint_every, 1)
    folder = SegmentFolder(path)
    record = probe_record(frozen, dataset, config)
    folder.check(record)
    if folder.is_complete:
        return folder
    dataset.train.check_labelled("training")
    dataset.test.check_labelled("test")
    probe = _Probe(frozen, dataset, config, folder, record, torch.device(device))
    probe.keeps, probe.cache = keep, cache
    probe.run(listener or SegmentListener(), stop or Stop(), checkpoint_every, show)
    return folder


@dataclass(frozen=True)
class _PixelReader:
    """From pixels to features; on a GPU the model computes in bfloat16, the head in float32."""

    reader: FeatureReader
    preparation: Preparation
    device: torch.device

    @property
    def spec(self) -> FeatureSpec:
        return self.reader.spec

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.device.type == "cuda" else torch.float32

    def __call__(self, images_BCHW: Tensor) -> Tensor:
        normalized_BCHW = self.preparation.normalized(images_BCHW.to(self.device))
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.dtype == torch.bfloat16):
            return self.reader(normalized_BCHW)


class _Probe:
    """One head in training or testing."""

    keeps = False
    cache: Path | None = None

    def __init__(
        self,
        frozen: FrozenModel,
        dataset: SegmentationSet,
        config: SegmentConfig,
        folder: SegmentFolder,
        record: dict[str, Any],
        device: torch.device,
    ) -> None:
        self._frozen, self._dataset, self._config = frozen, dataset, config
        self._folder, self._record, self._device = folder, record, device
        self._spec = FeatureSpec(block=config.block, place=config.place)
        self._step = size_step(frozen.model)
        check_side("--crop", config.crop, self._step)
        with reading(frozen.model, self._spec, image_size=frozen.preparation.size, device=device):
            pass  # at its own size: an error now is not about sizes
        self._num_features = self._try_sizes()

    def _try_sizes(self) -> int:
        """Make the model take the config's sizes and see that it does; how many channels its features have."""
        side = self._config.crop
        sizes = [(side, side)] if self._config.square else [(side, side), (side, side + self._step)]
        try:
            take_other_sizes(self._frozen.model, side, only=self._config.square)
            with reading(self._frozen.model, self._spec, image_size=sizes[0], device=self._device) as reader:
                return max(reader(torch.zeros(1, 3, *size)).shape[1] for size in sizes)
        except torch.OutOfMemoryError as error:
            raise _too_large(self._frozen.label, f"one image of {side}×{side} pixels", "--crop") from error
        except FAILURES as error:
            own = max(self._frozen.preparation.size)
            raise InputError(
                f"{self._frozen.label} cannot be read at {' and '.join(f'{h}×{w}' for h, w in sizes)} pixels: "
                f"{one_line(error)}; if it takes one size only, use --square --crop {own}"
            ) from error

    def run(self, listener: SegmentListener, stop: Stop, checkpoint_every: int, show: Show | None) -> None:
        began = time.perf_counter()
        config, dataset = self._config, self._dataset
        self._folder.claim(self._record)
        training = HeadTraining(self._num_features, dataset.num_classes, dataset.ignore_index, config, self._device)
        if self._folder.checkpoint.exists():
            training.load(self._folder.checkpoint, self._record["identity"])
        first = training.steps_done
        listener.started(first, config)
        with self._features() as features, stop.listening():
            try:
                self._train(training, features, listener, stop, checkpoint_every)
                self._keep(training)
                trained = time.perf_counter()
                tester = Tester(dataset.test, features, training.head, config, step=self._step)
                if self.keeps:
                    tester.kept = self._kept_maps(features, tester)
                result = self._test(tester, training, listener, stop)
                if show is not None:
                    chosen = measuring_subset(len(dataset.test), NUM_SHOWN, config.seed)
                    show(list(tester.predictions(chosen.tolist(), self._device)))
            except torch.OutOfMemoryError as error:
                raise _too_large(self._frozen.label, f"{config.batch_size} crops", "--batch-size") from error
            except (StoppedError, InputError):  # such as an unreadable file; not a loss that is not finite
                self._keep(training)
                raise
        self._write(training, result)
        self._folder.finish(
            {
                **provenance(self._device),
                "seed": config.seed,
                "first_iteration": first,
                "training_seconds": trained - began,
                "wall_seconds": time.perf_counter() - began,
                "crops_per_second": (training.steps_done - first) * config.batch_size / (trained - began),
            }
        )

    @contextmanager
    def _features(self) -> Iterator[_PixelReader]:
        side = self._config.crop, self._config.crop
        with reading(self._frozen.model, self._spec, image_size=side, device=self._device) as reader:
            yield _PixelReader(reader, self._frozen.preparation, self._device)

    def _kept_maps(self, features: _PixelReader, tester: Tester) -> Kept:
        try:
            return kept_maps(
                self._frozen,
                self._dataset.test,
                self._config,
                features,
                tester,
                data=self._dataset.fingerprint,
                step=self._step,
                dtype=features.dtype,
                folder=self.cache,
            )
        except InputError:
            if self.cache is not None:
                raise
            return lambda _: None  # nobody asked for them to be kept: a full disk, say, stops nothing

    def _train(
        self, training: HeadTraining, features: Features, listener: SegmentListener, stop: Stop, every: int
    ) -> None:
        def after_step() -> None:
            if training.steps_done % every == 0:
                self._keep(training)
            listener.step(training.steps_done, training.history[-1] if training.history else None)
            _heed(stop, training)

        crops = TrainingCrops(self._dataset.train, self._config, fill=self._frozen.preparation.mean)
        with closing(crops.batches(training.steps_done, self._device)) as batches:  # ends its threads at once
            training.train(batches, features, after_step)

    def _keep(self, training: HeadTraining) -> None:
        if training.steps_done > 0:
            training.save(self._folder.checkpoint, self._record["identity"])

    def _test(self, tester: Tester, training: HeadTraining, listener: SegmentListener, stop: Stop) -> SegmentResult:
        def after_image(num_done: int) -> None:
            listener.tested(num_done, len(self._dataset.test))
            _heed(stop, training)

        dataset = self._dataset
        confusion, counts = tester.confusion(dataset.num_classes, dataset.ignore_index, self._device, after_image)
        trained_C = training.seen_L[: dataset.num_classes].cpu()
        return SegmentResult(
            confusion_CC=confusion, counts_N3C=counts, trained_C=trained_C, class_names=dataset.class_names
        )

    def _write(self, training: HeadTraining, result: SegmentResult) -> None:
        dataset, config = self._dataset, self._config
        self._folder.write_history(training.history)
        save_tensors(
            self._folder.head,
            training.head.state_dict(),
            {
                "identity": self._record["identity"],
                "num_features": self._num_features,
                "width": config.width,
                "classes": list(dataset.class_names),
            },
        )
        self._folder.write_result(
            result,
            {
                "model": self._frozen.label,
                "data": dataset.name,
                "seed": config.seed,
                "iterations": config.iterations,
                "crop": config.crop,
                "num_train": len(dataset.train),
                "num_test": len(dataset.test),
            },
        )


def _heed(stop: Stop, training: HeadTraining) -> None:
    if stop.by is not None:
        raise ProbeStoppedError(stop.by, training.steps_done)


def _too_large(label: str, what: str, option: str) -> InputError:
    return InputError(f"{label} with {what} does not fit into memory; use a smaller {option}, or --device cpu")
