"""The heads of runs that are still training: all cells of a stack in one forward, with the numbers `measure` gives.

Shape suffixes: K cells, B images, H heads, N tokens, d head size, C channels.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import pandas as pd
import torch
from torch import Tensor, nn

from nearsight.augment import grey_levels, normalize
from nearsight.data import Dataset, measuring_subset
from nearsight.lens import AttentionTap, HeadTable, Survey, measure
from nearsight.lens.attention import Attention, FusedAttention
from nearsight.lens.capture import Call
from nearsight.lens.measuring import table_of
from nearsight.lens.running import NoSpatialAttentionError, running, surveyed
from nearsight.lens.stream import Precision, reduce_attention, summing_dtype
from nearsight.train.config import RunConfig
from nearsight.train.engine import Stack, initial_model
from nearsight.train.stacked import Weights, runs_as_one_batch, stacked_forward

MEASURING_BATCH = 256
"""Images per forward; the same wherever a run is measured, so that the numbers are the same to the bit."""


@dataclass(frozen=True)
class MeasuringImages:
    """The measuring subset of a data set's test images, normalised, in batches: the same images for every model."""

    dataset: Dataset
    num_images: int
    device: torch.device

    def __iter__(self) -> Iterator[Tensor]:
        return self.batches(MEASURING_BATCH)

    def batches(self, batch_size: int) -> Iterator[Tensor]:
        dataset = self.dataset
        chosen = measuring_subset(len(dataset.test), self.num_images)
        mean_C, std_C = grey_levels(dataset.mean, self.device), grey_levels(dataset.std, self.device)
        for index in chosen.split(batch_size):
            yield normalize(dataset.test.images_NCHW[index].to(self.device), mean_C, std_C)

    def ids(self) -> Iterator[bytes]:
        """What the images are called, in their order: by their pixels in the data set, before any model's own ways."""
        images_NCHW = self.dataset.test.images_NCHW
        return (pixels_id(images_NCHW[index]) for index in measuring_subset(len(images_NCHW), self.num_images).tolist())


def pixels_id(image_CHW: Tensor) -> bytes:
    """What an image in memory is called: the same wherever its pixels are the same."""
    return hashlib.sha256(repr(tuple(image_CHW.shape)).encode() + image_CHW.numpy().tobytes()).digest()


def measure_on_test(
    model: nn.Module,
    dataset: Dataset,
    num_images: int,
    device: torch.device,
    on_batch: Callable[[], None] = lambda: None,
) -> HeadTable:
    """The heads of a model, what they spend attention on, and what its layers' tokens are like, on the measuring subset
    of the test set.

    `on_batch` is called before each batch.
    """

    images = MeasuringImages(dataset, num_images, device)

    def batches() -> Iterator[Tensor]:
        for batch in images:
            on_batch()
            yield batch

    return measure(
        model,
        batches(),
        batch_size=MEASURING_BATCH,
        device=device,
        precision="float64",
        what=("features", "shares"),
        ids=images.ids(),
    )


def measure_stack(
    model: nn.Module,
    weights_K: Weights,
    batches: Iterable[Tensor],
    *,
    skeleton: nn.Module | None = None,
    found: Survey | None = None,
    precision: Precision = "float32",
) -> list[HeadTable]:
    """`nearsight.measure` of K models of one shape on the same images, by one stacked forward per batch. Of K models
    the values of single images would be many; they are not kept.

    Args:
        model: any model of that shape, where the weights are; its own do not matter.
        weights_K: the K models' weights.
        batches: normalised images [B, 3, H, W], all of one size. Iterated twice if the model does not run as one batch
            with plain fused attention: then each cell is measured on its own.
        skeleton: the code that the stack is trained with, of which is known how it runs stacked; else the model's.
        found: the survey of `model` for these images, if there is one already.
        precision: as `measure`.
    """
    tables: list[HeadTable] = []
    code = model if skeleton is None else skeleton
    with running(model), running(code):
        for batch in batches:
            found = surveyed(model, batch[0]) if found is None else found
            new = _look(code, weights_K, batch, found, summing_dtype(precision, batch.device))
            if new is None:
                return _one_by_one(model, weights_K, batches, precision)
            tables = [HeadTable.merge(pair) for pair in zip(tables, new, strict=True)] if tables else new
    return tables


def _look(
    code: nn.Module, weights_K: Weights, images_BCHW: Tensor, found: Survey, dtype: torch.dtype
) -> list[HeadTable] | None:
    """The tables of one batch; None if not every spatial attention was a plain fused one on all cells at once."""
    if not runs_as_one_batch(code):
        return None
    num_cells = len(next(iter(weights_K.values())))
    reduced_K: list[dict[Call, Tensor]] = [{} for _ in range(num_cells)]

    def reduce(call: Call, candidates: Sequence[Callable[[], Attention]]) -> None:
        site = found.sites.get(call)
        if site is None or call.kind != "sdpa" or not isinstance(attention := candidates[0](), FusedAttention):
            return
        if attention.mask is None and not attention.is_causal:
            for reduced, one in zip(reduced_K, _by_cell(attention, num_cells), strict=True):
                reduced[call] = reduce_attention(one, site, dtype=dtype)

    calling_modules = {name: code.get_submodule(name) for name in found.calling}
    with AttentionTap(code, reduce, calling_modules):
        images_KBCHW = images_BCHW.expand(num_cells, *images_BCHW.shape)
        stacked_forward(code, weights_K, images_KBCHW)
    if reduced_K[0].keys() != found.sites.keys():
        return None
    return [table_of(found, reduced) for reduced in reduced_K]


def _by_cell(attention: FusedAttention, num_cells: int) -> Iterator[FusedAttention]:
    """Each cell's own, since where the images are within the first axis is known for one model's batch alone."""
    query_KL, key_KL = (tensor.unflatten(0, (num_cells, -1)) for tensor in (attention.query, attention.key))
    for query_L, key_L in zip(query_KL, key_KL, strict=True):
        yield FusedAttention(query_L, key_L, attention.scale)


def _one_by_one(
    model: nn.Module, weights_K: Weights, batches: Iterable[Tensor], precision: Precision
) -> list[HeadTable]:
    own = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    tables = []
    try:
        for position in range(len(next(iter(weights_K.values())))):
            model.load_state_dict({name: weight[position] for name, weight in weights_K.items()}, strict=False)
            table = measure(model, batches, batch_size=MEASURING_BATCH, precision=precision)
            tables.append(replace(table, per_image=None))
    finally:
        model.load_state_dict(own, strict=False)
    return tables


def is_due(config: RunConfig, epoch: int) -> bool:
    """Whether a run's heads are measured after so many epochs. 0 are the initial weights."""
    return config.measure_every > 0 and epoch % config.measure_every == 0


class TimeCourse:
    """Measures the cells of a stack during their training."""

    def __init__(self, stack: Stack, dataset: Dataset) -> None:
        self._model = initial_model(stack.configs[0], dataset).to(stack.device)
        self._dataset = dataset
        self._found: Survey | None = None
        self._has_attention = True

    def measure(self, stack: Stack, epochs: Mapping[int, int]) -> dict[int, pd.DataFrame]:
        """By position, rows of heads.csv of those cells whose turn it is after `epochs`, which are by position too."""
        by_number: dict[int, list[int]] = {}
        for position, epoch in epochs.items():
            config = stack.configs[position]
            if is_due(config, epoch) and self._has_attention:
                by_number.setdefault(config.num_measured_during, []).append(position)
        rows = {}
        for num_images, positions in by_number.items():
            weights_K = stack.weights
            if len(positions) < len(stack.configs):
                weights_K = {name: weight[positions] for name, weight in weights_K.items()}
            images = MeasuringImages(self._dataset, num_images, stack.device)
            try:
                found = self._survey(images)
            except NoSpatialAttentionError:  # the end of the run says so
                self._has_attention = False
                return {}
            tables = measure_stack(
                self._model, weights_K, images, skeleton=stack.skeleton, found=found, precision="float64"
            )
            for position, table in zip(positions, tables, strict=True):
                rows[position] = table.to_frame().assign(epoch=epochs[position])
        return rows

    def _survey(self, images: MeasuringImages) -> Survey:
        """Made once: where tokens lie does not change with the weights."""
        if self._found is None:
            with running(self._model):
                self._found = surveyed(self._model, next(iter(images))[0])
        return self._found
