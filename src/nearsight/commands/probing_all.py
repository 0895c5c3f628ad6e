"""All probes of one model after the other: what is on disk is read, what is missing is computed and put there at once.

k-NN and the linear classifier read the same features, which are computed once. Retrieval reads whole images squeezed
to the model's own size, segmentation random crops and larger images: they share none. Segmentation comes last, because
it may change the sizes that a model takes.

A cluster probes each model in a job and a folder of its own; then one more command takes over what they left, and makes
one report of them all.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from nearsight.commands.masked import OwnMasks
from nearsight.commands.probe_classes import KnnRequest, Probed, knn_found, linear_found, probed
from nearsight.commands.probe_retrieve import RetrieveSettings, retrieved
from nearsight.data import Dataset
from nearsight.data.segmentation import SegmentationSet
from nearsight.errors import InputError, check_at_least
from nearsight.files import read_object
from nearsight.probe import LinearConfig
from nearsight.probe.segmentation.config import SegmentConfig, default_settings
from nearsight.probe.settings import MEMORY_SIZE, Place
from nearsight.train import Stop

if TYPE_CHECKING:
    from nearsight.probe import Score
    from nearsight.probe.frozen import FrozenModel
    from nearsight.probe.scores import ProbeKey, StoredProbe

ProbeName = Literal["knn", "linear", "retrieve", "segment"]
OF_CLASSES: tuple[ProbeName, ...] = ("knn", "linear")
OF_PATCHES: tuple[ProbeName, ...] = ("retrieve", "segment")
RESULTS = "results"
PROVENANCE = "provenance"
"""Under which a result says by which code and on which machine it was computed."""

Found: TypeAlias = "tuple[Mapping[str, Score], Mapping[str, Any]]"
"""Scores by name, and what else is to be recorded."""


@dataclass(frozen=True, kw_only=True)
class AllRequest(OwnMasks, KnnRequest):
    """The options of all probes together."""

    probes: tuple[ProbeName, ...] = (*OF_CLASSES, *OF_PATCHES)
    """Which of them."""
    linear_epochs: int = LinearConfig.num_epochs
    """Over which the linear classifiers are trained."""
    dense_data: str = "voc-small"
    """A data set with masks for retrieval and segmentation, or a folder of your own with images, masks and
    classes.json; --data is for k-NN and linear."""
    dense_num_train: int | None = None
    """Its training images at most, the first ones; --num-train is for k-NN and linear."""
    dense_num_test: int | None = None
    """Its test images at most, likewise."""
    dense_place: Place = "block"
    """Features of patches as the block returns them, after the final norm, or refined."""
    memory_size: int = MEMORY_SIZE
    """Patches in the memory of retrieval at most."""
    retrieve_size: int | None = None
    """Side of the square that images of retrieval are squeezed to; by default the size the model takes."""
    segment_iterations: int | None = None
    """Steps of the segmentation head; by default those of the data set."""
    segment_batch_size: int | None = None
    """Its crops per step, likewise."""
    segment_square: bool = False
    """Segment images squeezed to the model's own size, for models that take one size only."""
    pictures: bool = False
    """Draw what each segmentation head predicts beside the truth when it is tested; of small models that takes long."""
    checkpoint_every: int = 500
    """Its steps between checkpoints; a kill costs those since the last, SIGINT and SIGTERM none."""
    reuse: tuple[Path, ...] = ()
    """Folders of other `probe all`: their results are taken where model, data and options are the same."""

    @property
    def linear_config(self) -> LinearConfig:
        return LinearConfig(num_epochs=self.linear_epochs, seed=self.seed)

    @property
    def retrieve_settings(self) -> RetrieveSettings:
        return RetrieveSettings(
            block=self.block,
            place=self.dense_place,
            memory_size=self.memory_size,
            image_size=self.retrieve_size,
            seed=self.seed,
        )

    def segment_config(self, frozen: FrozenModel, dataset: SegmentationSet) -> SegmentConfig:
        from nearsight.probe.frozen import size_step

        usual = default_settings(dataset.name, image_size=max(frozen.preparation.size), step=size_step(frozen.model))
        given = {"iterations": self.segment_iterations, "batch_size": self.segment_batch_size}
        chosen: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        if self.segment_square:
            chosen |= {"square": True, "crop": max(frozen.preparation.size)}
        return SegmentConfig(**{**usual, **chosen}, block=self.block, place=self.dense_place, seed=self.seed)

    def check(self, probe: str) -> None:
        super().check(probe)
        if not self.probes:
            raise InputError(f"no probe is named; leave out --probes, or choose of {', '.join(AllRequest.probes)}")
        for name in ("dense_num_train", "dense_num_test", "retrieve_size", "segment_iterations", "segment_batch_size"):
            check_at_least(f"--{name.replace('_', '-')}", 1 if (value := getattr(self, name)) is None else value, 1)
        check_at_least("--checkpoint-every", self.checkpoint_every, 1)
        check_reusable(self.reuse)
        _ = self.linear_config, self.retrieve_settings  # which check themselves

    def load_both(self) -> tuple[Dataset | None, SegmentationSet | None]:
        """The data sets that the chosen probes need, opened: one that is missing or wrong is refused here."""
        dataset = dense = None
        if set(OF_CLASSES) & set(self.probes):
            dataset = self.load()
            if "knn" in self.probes:
                self.check_enough(dataset)
        if set(OF_PATCHES) & set(self.probes):
            sizes = self.dense_num_train, self.dense_num_test
            dense = self.load_masked(self.dense_data, self.data_dir, *sizes)
        return dataset, dense


@dataclass(frozen=True, kw_only=True)
class _Step:
    """One probe of one model."""

    probe: ProbeName
    data: Mapping[str, Any]
    """A description of the data set, with its fingerprint."""
    settings: Mapping[str, Any]
    compute: Callable[[ProbeKey], Found]


class AllProbes:
    """The probes that were asked for, on the data sets that they need."""

    def __init__(
        self, request: AllRequest, dataset: Dataset | None, dense: SegmentationSet | None, out: Path, stop: Stop
    ) -> None:
        from nearsight.probe.scores import ProbeStore
        from nearsight.train.integrity import provenance

        self._request, self._dataset, self._dense, self._stop = request, dataset, dense, stop
        self._store, self._out = ProbeStore(out / RESULTS), out
        self._provenance = provenance(request.torch_device)

    def of(self, frozen: FrozenModel) -> Iterator[StoredProbe]:
        """What each probe finds in a model, one after the other."""
        model = frozen.identity
        with ExitStack() as opened:
            yield from (self._found(step, frozen, model) for step in self._wanted(self._of_classes(frozen, opened)))
        yield from (self._found(step, frozen, model) for step in self._wanted(self._of_patches(frozen)))

    def _wanted(self, steps: Iterator[_Step]) -> Iterator[_Step]:
        return (step for step in steps if step.probe in self._request.probes)

    def _found(self, step: _Step, frozen: FrozenModel, model: str) -> StoredProbe:
        """From the store or that of another folder, or computed and put there."""
        from nearsight.probe.scores import ProbeKey

        key = ProbeKey(
            probe=step.probe,
            model=model,
            preparation=asdict(frozen.preparation),
            data=step.data["fingerprint"],
            settings=step.settings,
        )
        stored = self._store.read(key)
        if stored is not None:
            return with_certificate(key, stored, self._out)
        if (taken := reuse_probe(key, self._request.reuse, self._out)) is not None:
            return taken
        began = time.perf_counter()
        scores, details = step.compute(key)
        about = {"label": frozen.label, "data_set": step.data, "settings": step.settings, **details}
        seconds = round(time.perf_counter() - began, 3)
        return self._store.write(key, scores, {**about, "seconds": seconds, PROVENANCE: self._provenance})

    def _of_classes(self, frozen: FrozenModel, opened: ExitStack) -> Iterator[_Step]:
        request, dataset = self._request, self._dataset
        if dataset is None:
            return

        @functools.cache
        def features() -> Probed:
            """Opened by the first of the two that is missing, and kept for the other."""
            return opened.enter_context(probed(request, frozen, dataset))

        def knn(_: ProbeKey) -> Found:
            found = knn_found(request, features(), dataset)
            return {f"knn_{k}": score for k, score in found.items()}, {"features": features().described}

        def linear(_: ProbeKey) -> Found:
            result, score = linear_found(request, features(), dataset, config)
            details = {"best": asdict(result.best), "heads": [asdict(head) for head in result.heads]}
            return {"linear": score}, {"features": features().described, **details}

        config, data = request.linear_config, request.described(dataset)
        common: dict[str, Any] = {**asdict(request.spec), "crop_pct": request.crop_pct}
        of_votes = {**common, "ks": request.ks, "temperature": request.temperature}
        yield _Step(probe="knn", data=data, settings=of_votes, compute=knn)
        yield _Step(probe="linear", data=data, settings={**common, **asdict(config)}, compute=linear)

    def _of_patches(self, frozen: FrozenModel) -> Iterator[_Step]:
        from nearsight.commands.probing_segment import SegmentProgress, draw_predictions
        from nearsight.probe import Score
        from nearsight.probe.segmentation.probing import probe_segmentation

        request, dense = self._request, self._dense
        if dense is None:
            return
        settings, config = request.retrieve_settings, request.segment_config(frozen, dense)

        def retrieve(_: ProbeKey) -> Found:
            found = retrieved(request, frozen, dense, settings, size_option="--retrieve-size")
            return {"retrieve_miou": found.score}, {"features": found.described, **found.numbers(dense)}

        def segment(key: ProbeKey) -> Found:
            path = segment_folder(self._out, key)
            drawn = functools.partial(draw_predictions, dense, frozen.label, path / "figures")
            with SegmentProgress(f"{frozen.label}, segmentation") as progress:
                folder = probe_segmentation(
                    frozen,
                    dense,
                    config,
                    path,
                    device=request.torch_device,
                    listener=progress,
                    stop=self._stop,
                    checkpoint_every=request.checkpoint_every,
                    keep=True,
                    cache=request.cache_dir,
                    show=drawn if request.pictures else None,
                )
            found = folder.read_result()
            score = Score(
                value=found["miou"], low=found["miou_low"], high=found["miou_high"], num_images=found["num_test"]
            )
            return {"segment_miou": score}, {"folder": str(path.relative_to(self._out)), "result": found}

        data = {
            "name": dense.name,
            "fingerprint": dense.fingerprint,
            "num_train": len(dense.train),
            "num_test": len(dense.test),
            "num_classes": dense.num_classes,
        }
        yield _Step(probe="retrieve", data=data, settings=asdict(settings), compute=retrieve)
        yield _Step(probe="segment", data=data, settings=asdict(config), compute=segment)


def segment_folder(folder: Path, key: ProbeKey) -> Path:
    """Where a segmentation head is kept."""
    return folder / "segment" / key.identity


def check_reusable(folders: Sequence[Path]) -> None:
    for folder in folders:
        if not (folder / RESULTS).is_dir():
            raise InputError(f"{folder} has no probes to reuse: it is not a folder of nearsight probe all")


def reuse_probe(key: ProbeKey, others: Sequence[Path], out: Path) -> StoredProbe | None:
    """Copy what one of the other folders has of this probe into the folder `out`; None if none has it."""
    from nearsight.probe.scores import ProbeStore

    for other in others:
        stored = ProbeStore(other / RESULTS).read(key)
        if stored is None or (key.probe == "segment" and not _take_head(key, other, out)):
            continue
        print(f"{stored.told.get('label')}, {key.probe}: taken from {other}", file=sys.stderr)
        return _write(key, stored, other, out)
    return None


def with_certificate(key: ProbeKey, stored: StoredProbe, folder: Path) -> StoredProbe:
    """A result that says where it is from, if its folder does."""
    from nearsight.train.integrity import PROVENANCE as CERTIFICATE

    if PROVENANCE in stored.told or not (folder / CERTIFICATE).is_file():
        return stored
    return _write(key, stored, folder, folder)


def _write(key: ProbeKey, stored: StoredProbe, source: Path, out: Path) -> StoredProbe:
    """Results of earlier versions do not say where they are from, but their folder does."""
    from nearsight.probe.scores import ProbeStore

    about = stored.told if PROVENANCE in stored.told else {**stored.told, PROVENANCE: _certificate(source)}
    return ProbeStore(out / RESULTS).write(key, stored.scores, about)


def _take_head(key: ProbeKey, other: Path, out: Path) -> bool:
    """Copy a segmentation head and its pictures; False if it is not there as it was left."""
    from nearsight.probe.segmentation.result import SegmentFolder
    from nearsight.train.integrity import check_sums, check_there, copy_complete

    theirs, ours = SegmentFolder(segment_folder(other, key)), SegmentFolder(segment_folder(out, key))
    if not theirs.is_complete:
        return False
    try:
        check_sums(theirs.path)
        check_there(theirs.path)
    except InputError:
        return False
    if theirs.figures.is_dir():
        copy_complete(theirs.figures, ours.figures)
    copy_complete(theirs.path, ours.path)
    ours.checkpoint.unlink(missing_ok=True)
    return True


def _certificate(folder: Path) -> dict[str, object]:
    """By which code and on which machine the folder was made."""
    from nearsight.train.integrity import PROVENANCE as CERTIFICATE

    held = read_object(folder / CERTIFICATE, missing=f"{folder} does not say where its probes are from")
    return {name: held.get(name) for name in ("commit", "versions", "hardware")}
