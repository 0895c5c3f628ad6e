"""A trained model made local by further training, measured and probed before and after.

The model begins with the weights that it has. With a gentle start (α near 0) it first computes what it always did, and
becomes local as far as the data ask for it; the refinement of patches (PRR) has no such start.

    found = nearsight.finetune("vit_small_patch16_224", data="image-folder", data_dir="pets", out="runs/pets")
    found.before.knn, found.after.knn, found.after.heads.mad.min(), found.model

Shape suffixes: N images, C channels.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import timm
import torch
from torch import Tensor, nn

from nearsight.augment import HorizontalFlip, RandomCrop, ResizedCrop, grey_levels, normalize
from nearsight.data import DATASETS, Dataset, ImageSet, balanced_subset, measuring_subset
from nearsight.data.loading import dataset_spec
from nearsight.errors import InputError, unknown_name
from nearsight.lens import HeadTable, measure
from nearsight.lens.running import running, without_gradients
from nearsight.lens.widths import ALPHA, gaussian_widths
from nearsight.locat.gaussian import GaussianHeads
from nearsight.locat.inducers import Gated, inducer_of
from nearsight.models import ModelConfig, load_model
from nearsight.models.factory import check_model_name
from nearsight.probe.features import read_features
from nearsight.probe.knn import knn_right
from nearsight.probe.linear import linear_probe
from nearsight.probe.scores import Score, accuracy_score
from nearsight.probe.settings import ABLATION_K, LOCAT, FeatureSpec, FinetuneConfig
from nearsight.train import DataConfig, Listener, Protocol, RunConfig, RunFolder, Stop, load_data, train_run
from nearsight.train.heads import MEASURING_BATCH, MeasuringImages
from nearsight.train.initial import PRETRAINED, untrained_model

_SMALL = 96
"""Images of a smaller side are cropped with a margin, larger ones by random sizes."""
_LOCALITY_LR = {"gentle": 100.0, "abrupt": 10.0}
"""From near 0 α can at most double in 70 steps at the one, with a rate of 1e-4; in 7,000 at that rate itself."""
_AS_CLASSIFIED = FeatureSpec(place=None, tokens=None)
"""The features that the classifier takes."""


@dataclass(frozen=True, kw_only=True)
class Side:
    """The model before, or after. Accuracies are of the same test images."""

    model: nn.Module
    heads: HeadTable
    knn: Score
    """Of the nearest neighbours among training images."""
    linear: Score
    """Of a linear classifier that was trained on the same features."""
    own: Score | None
    """Of the model's own classifier; None before, if that is fresh."""
    alpha: float | None
    """Mean strength of GAug over images, patches, heads and layers; None without it."""


@dataclass(frozen=True, kw_only=True)
class Finetuned:
    """A model before and after it was trained further."""

    config: RunConfig
    run: RunFolder
    dataset: Dataset
    before: Side
    after: Side

    @property
    def model(self) -> nn.Module:
        """The result, in eval mode."""
        return self.after.model


def finetune(
    model: str,
    *,
    data: str,
    out: Path | str,
    device: torch.device | str = "cpu",
    data_dir: Path | str | None = None,
    listener: Listener | None = None,
    stop: Stop | None = None,
    **settings: Any,
) -> Finetuned:
    """Make a trained model local by further training, and say what that changes.

    Args:
        model: a name that timm has weights for, one of the zoo, or a run folder.
        data: a data set with classes (`nearsight data list`), such as image-folder.
        out: the run's folder; what was begun there goes on, and what is complete is not trained again.
        settings: fields of `nearsight.probe.FinetuneConfig`: add, start, epochs, lr, layer_decay, ema, checkpoint, …
    """
    config, where = FinetuneConfig(**settings), torch.device(device)
    run, folder = run_of(model, data, config), None if data_dir is None else Path(data_dir)
    trained = train_run(run, Path(out), device=where, data_dir=folder, listener=listener, stop=stop)
    dataset = load_data(run.data, folder)
    before = untrained_model(run, dataset.image_size, dataset.num_classes).eval()
    fresh_run = replace(run, weights=None, weights_normalized="data")
    fresh = untrained_model(fresh_run, dataset.image_size, dataset.num_classes)
    return Finetuned(
        config=run,
        run=trained,
        dataset=dataset,
        before=_side(before, dataset, config, where, has_classes=not _same_classifier(before, fresh)),
        after=_side(load_model(trained.model), dataset, config, where, has_classes=True),
    )


def run_of(model: str, data: str, config: FinetuneConfig) -> RunConfig:
    """What is trained, and what it begins with."""
    if data not in DATASETS:
        raise unknown_name("data set", data, DATASETS)
    side = config.image_size
    if Path(model).is_dir():
        if config.settings or config.checkpoint is not None:
            raise InputError(f"{model} is a run, which has its settings and its weights; leave out others")
        held = RunFolder(Path(model)).read_config()
        network, weights = held.model, model
        side = side or held.data.image_size or dataset_spec(held.data.name).image_size
    else:
        if ":" in model:
            raise InputError(
                f"{model} has no published weights to begin with; nearsight train vit-folder --model.name {model} "
                "--init FILE --model.locality gaug trains one of your own further"
            )
        check_model_name(model)
        name, _, tag = model.partition(".")
        local = name.startswith("locat_")
        network = ModelConfig(name=name.removeprefix("locat_"), settings=config.settings, gaug=local, prr=local)
        weights = model if tag else PRETRAINED
        if config.checkpoint is None and config.settings:
            raise InputError("settings change the model, so that published weights may not fit; give a checkpoint")
        side = side or int(timm.get_pretrained_cfg(model).input_size[-1])
    if config.checkpoint is not None:
        weights = str(config.checkpoint)
    if config.add in ("gaug", "locat") and not network.gaug:  # what the model has already stays
        network = replace(network, gaug=True, locat_gentle=config.start == "gentle")
    if config.add not in LOCAT:
        network = replace(network, locality=(*network.locality, _with_start(config.add, config.start)))
    crop = RandomCrop() if side < _SMALL else ResizedCrop(min_area=0.35)
    return RunConfig(
        model=replace(network, prr=network.prr or config.add in ("prr", "locat")),
        data=DataConfig(
            name=data,
            image_size=side,
            num_train=config.num_train,
            num_test=config.num_test,
            validation_fraction=0.1,
        ),
        protocol=Protocol(
            lr=config.lr,
            locality_lr=1.0 if config.add in ("prr", "nothing") else config.locality_lr or _LOCALITY_LR[config.start],
            layer_decay=config.layer_decay,
            ema=config.ema,
            max_epochs=config.epochs,
            warmup_epochs=min(1, config.epochs - 1),
            patience=config.epochs,
            batch_size=config.batch_size,
            augment=(crop, HorizontalFlip()),
        ),
        seed=config.seed,
        weights=weights,
        weights_normalized="data" if config.checkpoint is None or network.kind != "timm" else "model",
        precision=config.precision,
        num_measured=config.num_images,
    )


def _with_start(text: str, start: str) -> str:
    """The inducer with its gate where it has one that nobody has set: 0, or open."""
    config = inducer_of(text)
    if isinstance(config, Gated) and config.gate == 0 and start == "abrupt" and "gate=" not in text:
        config = replace(config, gate=1.0)
    return config.text


def _same_classifier(model: Any, other: Any) -> bool:
    pairs = zip(model.get_classifier().parameters(), other.get_classifier().parameters(), strict=True)
    return all(torch.equal(one, another) for one, another in pairs)


def _side(
    model: nn.Module, dataset: Dataset, config: FinetuneConfig, device: torch.device, *, has_classes: bool
) -> Side:
    images = MeasuringImages(dataset, config.num_images, device)
    test_N = measuring_subset(len(dataset.test), config.num_images)
    train_N = _reference(dataset.train.labels_N, config.num_reference)
    labels_N, train_labels_N = dataset.test.labels_N[test_N], dataset.train.labels_N[train_N]
    test_NC = read_features(model, iter(images), _AS_CLASSIFIED, device=device)
    train_NC = read_features(model, _batches(dataset, dataset.train, train_N, device), _AS_CLASSIFIED, device=device)
    features = (train_NC, train_labels_N, test_NC, labels_N)
    right = knn_right(*features, num_classes=dataset.num_classes, ks=[ABLATION_K], device=device)
    linear = linear_probe(*features, num_classes=dataset.num_classes, device=device)
    return Side(
        model=model,
        heads=measure(model, iter(images), device=device),
        knn=accuracy_score(right[ABLATION_K]),
        linear=accuracy_score(linear.right_N),
        own=accuracy_score(_right(model, images, labels_N)) if has_classes else None,
        alpha=_alpha(model, images),
    )


def _alpha(model: nn.Module, images: MeasuringImages) -> float | None:
    if not any(isinstance(module, GaussianHeads) for module in model.modules()):
        return None
    frame = gaussian_widths(model, iter(images), device=images.device).frame
    return float(frame.loc[frame["what"] == ALPHA, "mean"].mean())


def _reference(labels_N: Tensor, num: int) -> Tensor:
    """Positions of so many training images, or of all; of each class its share, so that none is missing."""
    return balanced_subset(labels_N, min(num, len(labels_N)))


def _batches(dataset: Dataset, images: ImageSet, index_N: Tensor, device: torch.device) -> Iterator[Tensor]:
    mean_C, std_C = grey_levels(dataset.mean, device), grey_levels(dataset.std, device)
    for part in index_N.split(MEASURING_BATCH):
        yield normalize(images.images_NCHW[part].to(device), mean_C, std_C)


def _right(model: nn.Module, images: MeasuringImages, labels_N: Tensor) -> Tensor:
    """For which images the model's own classifier is right."""
    with running(model, images.device) as run, without_gradients():
        chosen_N = torch.cat([run.model(run.brought(batch)).argmax(-1).cpu() for batch in images])
    return chosen_N == labels_N
