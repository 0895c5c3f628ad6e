"""`nearsight probe {knn,linear} MODEL …`: classes by the nearest training images, or by a linear classifier."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from nearsight.commands.options import parse
from nearsight.commands.probe import Outcome, ProbeRequest, describe, run_path
from nearsight.data import Dataset, ImageSet, load_dataset
from nearsight.data.segmentation import SEGMENTATION_SETS
from nearsight.errors import InputError
from nearsight.lazy import pd
from nearsight.probe import FeatureSpec, LinearConfig
from nearsight.probe.search import check_enough
from nearsight.probe.settings import KNN_KS, KNN_TEMPERATURE, Place, Tokens, check_votes

if TYPE_CHECKING:
    from torch import Tensor

if TYPE_CHECKING:
    from nearsight.probe import LinearResult, Score
    from nearsight.probe.frozen import FrozenModel

EMBEDDED = "shapes"
_USUAL = LinearConfig()


@dataclass(frozen=True, kw_only=True)
class ClassRequest(ProbeRequest):
    """The options of probes that classify images."""

    data: str | None = None
    """A data set (see nearsight data list); by default that of the runs, or the embedded one."""
    place: Place | None = None
    """Features as the block returns them, after the final norm, or refined; by default what the classifier reads."""
    tokens: Literal["cls", "mean", "cls+mean"] | None = None
    """CLS, the mean of the patches, or both; by default CLS where there is one."""
    crop_pct: float = 1.0
    """Share of a resized image's side that is cut out of its centre (DINO: 0.875); not for images of the right size."""

    @property
    def spec(self) -> FeatureSpec:
        tokens: Tokens | None = self.tokens
        return FeatureSpec(block=self.block, place=self.place, tokens=tokens)

    def load(self) -> Dataset:
        from nearsight.train import RunFolder, load_data

        if self.data in SEGMENTATION_SETS:
            raise InputError(
                f"{self.data} has masks and no class for each image: it is for nearsight probe segment and retrieve; "
                "choose another --data (see nearsight data list)"
            )
        runs = [RunFolder(path).read_config().data for text in self.models if (path := run_path(text)) is not None]
        if self.data is None and runs:
            if len(set(runs)) > 1 or len(runs) < len(self.models):
                raise InputError("the models were not all trained on one data set; say with --data on which to probe")
            given = {"num_train": self.num_train, "num_test": self.num_test}
            changed: dict[str, Any] = {name: number for name, number in given.items() if number is not None}
            # A classifier needs training images, too, where they can be had again and again.
            decoded = replace(runs[0], stream=False, crop_pct=1.0)
            return load_data(replace(decoded, **changed), self.data_dir)
        return load_dataset(
            self.data or EMBEDDED, data_dir=self.data_dir, num_train=self.num_train, num_test=self.num_test
        )

    def described(self, dataset: Dataset) -> dict[str, Any]:
        return {
            "name": dataset.name,
            "fingerprint": dataset.fingerprint,
            "num_train": len(dataset.train),
            "num_test": len(dataset.test),
            "num_classes": dataset.num_classes,
        }


@dataclass(frozen=True, kw_only=True)
class KnnRequest(ClassRequest):
    """The options of k-NN."""

    ks: tuple[int, ...] = KNN_KS
    """Numbers of neighbours; one search serves all."""
    temperature: float = KNN_TEMPERATURE
    """T of the votes."""

    def check(self, probe: str) -> None:
        super().check(probe)
        check_votes(self.ks, self.temperature)

    def check_enough(self, dataset: Dataset) -> None:
        """There are as many training images as neighbours."""
        check_enough(len(dataset.train), max(self.ks), f"training images of {dataset.name}")


@dataclass(frozen=True, kw_only=True)
class Probed:
    """The features of one model."""

    train_NC: Tensor
    test_NC: Tensor
    crops: Callable[[Tensor, int], Tensor] | None
    """(positions of training images, epoch) → features of random crops, where they are wanted."""
    described: dict[str, Any]


@contextmanager
def probed(
    request: ClassRequest, frozen: FrozenModel, dataset: Dataset, *, random_crops: bool = False
) -> Iterator[Probed]:
    """The features of a model for both parts of a data set, from the cache or into it."""
    from nearsight.commands.progress import MeasuringProgress
    from nearsight.probe import FeatureKey, cached_features
    from nearsight.probe.linear import cropped_features

    preparation = replace(frozen.preparation, crop_pct=request.crop_pct)
    device = request.torch_device
    with request.reading(frozen, request.spec) as reader:
        batch_size = request.images_at_once(reader, frozen)

        def features(part: str, images: ImageSet) -> Tensor:
            key = FeatureKey(
                model=frozen.identity, data=dataset.fingerprint, part=part, spec=reader.spec, preparation=preparation
            )
            with MeasuringProgress(f"{frozen.label}, {part} features", len(images)) as progress:
                return cached_features(
                    key,
                    reader,
                    lambda begin, end: preparation(images.images_NCHW[begin:end], device),
                    len(images),
                    folder=request.cache_dir,
                    batch_size=batch_size,
                    watch=progress.counted,
                )

        yield Probed(
            train_NC=features("train", dataset.train),
            test_NC=features("test", dataset.test),
            crops=cropped_features(
                reader, dataset.train, preparation, seed=request.seed, batch_size=batch_size, device=device
            )
            if random_crops
            else None,
            described=describe(frozen, reader),
        )


def knn_found(request: KnnRequest, features: Probed, dataset: Dataset) -> dict[int, Score]:
    """k → the accuracy of k-NN."""
    from nearsight.probe import accuracy_score, knn_right

    right = knn_right(
        features.train_NC,
        dataset.train.labels_N,
        features.test_NC,
        dataset.test.labels_N,
        num_classes=dataset.num_classes,
        ks=request.ks,
        temperature=request.temperature,
        device=request.torch_device,
    )
    return {k: accuracy_score(right_Q) for k, right_Q in right.items()}


def linear_found(
    request: ClassRequest, features: Probed, dataset: Dataset, config: LinearConfig
) -> tuple[LinearResult, Score]:
    """A linear classifier, and its accuracy."""
    from nearsight.probe import accuracy_score, linear_probe

    result = linear_probe(
        features.train_NC,
        dataset.train.labels_N,
        features.test_NC,
        dataset.test.labels_N,
        num_classes=dataset.num_classes,
        config=config,
        device=request.torch_device,
        crops=features.crops,
    )
    return result, accuracy_score(result.right_N)


@dataclass(frozen=True, kw_only=True)
class KnnOptions(KnnRequest):
    """Classify test images by their nearest training images: cosine, votes weighted by exp(similarity / T) as in DINO.

    Writes result.json, table.csv, table.md and provenance.json. Features are kept, and found again.
    """


def knn(arguments: Sequence[str]) -> int:
    began = time.perf_counter()
    options = parse(KnnOptions, arguments, prog="nearsight probe knn")
    options.check("knn")
    from nearsight.report.tables import percent  # here, because it takes half a second

    dataset = options.load()
    options.check_enough(dataset)
    frozen, out = options.opened("knn", dataset.name)
    models = []
    for one in frozen:
        with probed(options, one, dataset) as features:
            found = knn_found(options, features, dataset)
        models.append(
            {
                **features.described,
                "accuracy": {str(k): score.value for k, score in found.items()},
                "interval": {str(k): [score.low, score.high] for k, score in found.items()},
            }
        )
    numbers = pd.DataFrame(
        [
            {"model": model["model"], **{f"accuracy_k{k}": model["accuracy"][str(k)] for k in options.ks}}
            for model in models
        ]
    )
    shown = pd.DataFrame(
        [
            {"model": model["model"], **{f"k = {k}": percent(model["accuracy"][str(k)]) for k in options.ks}}
            for model in models
        ]
    )
    outcome = Outcome(
        probe="knn",
        title=f"k-NN accuracy on {dataset.name} in per cent",
        data=options.described(dataset),
        settings={"ks": list(options.ks), "temperature": options.temperature},
        models=models,
        numbers=numbers,
        shown=shown,
    )
    outcome.report(options, out, arguments, began)
    return 0


@dataclass(frozen=True, kw_only=True)
class LinearOptions(ClassRequest):
    """Train a linear classifier on frozen features, for all learning rates and weight decays at once; the best on held
    out training images is tested, once.

    The defaults are DINO's. Writes result.json, table.csv, table.md and provenance.json.
    """

    optimizer: Literal["sgd", "adamw"] = _USUAL.optimizer
    """sgd (with momentum 0.9) or adamw."""
    learning_rates: tuple[float, ...] = _USUAL.learning_rates
    """For 256 images per batch; scaled in proportion to the batch."""
    weight_decays: tuple[float, ...] = _USUAL.weight_decays
    """Each is tried with each learning rate."""
    head_batch_size: int = _USUAL.batch_size
    """Images per step of the classifier."""
    num_epochs: int = _USUAL.num_epochs
    """Over which the learning rate falls as a cosine."""
    random_crops: bool = False
    """Train on random crops and flips, as DINO does: features of the training images are then computed every epoch."""


def linear(arguments: Sequence[str]) -> int:
    began = time.perf_counter()
    options = parse(LinearOptions, arguments, prog="nearsight probe linear")
    options.check("linear")
    from nearsight.report.tables import percent  # here, because it takes half a second

    config = LinearConfig(
        optimizer=options.optimizer,
        learning_rates=options.learning_rates,
        weight_decays=options.weight_decays,
        batch_size=options.head_batch_size,
        num_epochs=options.num_epochs,
        seed=options.seed,
    )
    dataset = options.load()
    frozen, out = options.opened("linear", dataset.name)
    models = []
    for one in frozen:
        with probed(options, one, dataset, random_crops=options.random_crops) as features:
            result, score = linear_found(options, features, dataset, config)
        models.append(
            {
                **features.described,
                "test_accuracy": result.test_accuracy,
                "interval": [score.low, score.high],
                "best": asdict(result.best),
                "heads": [asdict(head) for head in result.heads],
            }
        )
    rows = [{"model": model["model"], "test_accuracy": model["test_accuracy"], **model["best"]} for model in models]
    shown = [
        {
            "model": row["model"],
            "test": percent(row["test_accuracy"]),
            "validation": percent(row["validation_accuracy"]),
            "learning rate": f"{row['learning_rate']:g}",
            "weight decay": f"{row['weight_decay']:g}",
        }
        for row in rows
    ]
    outcome = Outcome(
        probe="linear",
        title=f"Accuracy of a linear classifier on {dataset.name} in per cent",
        data=options.described(dataset),
        settings={**asdict(config), "random_crops": options.random_crops},
        models=models,
        numbers=pd.DataFrame(rows),
        shown=pd.DataFrame(shown),
    )
    outcome.report(options, out, arguments, began)
    return 0
