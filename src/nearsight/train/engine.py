"""How K cells train as one program: the epoch of a stack and its evaluation. K = 1 is one model.

A cell's numbers depend on its own config and on nothing else: its batches, augmentations and initial weights follow
from its seed, its weights meet only its own images, and its epoch is its own, so cells may join and leave at any epoch.

A place in a stack is a slot: when its cell has ended, `Stack.put` begins another one there. All that distinguishes
cells lies in tensors that the step reads, and is written into these, so the captured program goes on as it is.

Shape suffixes: K cells, B samples, S steps, E batches, N images, C channels or classes.
"""

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nearsight.augment import Pipeline, ResizedCrop, normalize
from nearsight.augment.pipeline import CompiledPipeline
from nearsight.data import Dataset, DeviceImages, epoch_batches, stratified_split
from nearsight.data.streaming import Images, StreamedImages, cropped_before
from nearsight.errors import InputError
from nearsight.train.config import RunConfig
from nearsight.train.dropping import Dropping, NumberDropping, PathDropping
from nearsight.train.initial import untrained_model
from nearsight.train.optimizer import AdamW, Average, group_scales, groups_of, learning_rates
from nearsight.train.planning import check_shareable, check_sizes, check_stackable
from nearsight.train.processes import Processes, Share
from nearsight.train.scaling import LossScale
from nearsight.train.stacked import (
    DTYPES,
    Weights,
    bring_constants,
    running_statistics,
    stack_weights,
    stacked_forward,
    verify_stacking,
    weightless,
)
from nearsight.train.step import Advance, Epoch, Step, Teacher, captured

_LARGEST_BATCH = 512


class Evaluation:
    """Loss and accuracy of every cell on the same images, without augmentation or smoothing.

    Like a step, a program without arguments that keeps its own position.
    """

    def __init__(
        self,
        skeleton: nn.Module,
        weights: Weights,
        images: Images,
        index_N: Tensor,
        mean_C: Tensor,
        std_C: Tensor,
        *,
        dtype: torch.dtype,
        processes: Processes | None = None,
    ) -> None:
        """`weights` are read again in every run. `processes` are those that share the images, if several do."""
        self.processes, self.num_of_all = processes or Processes(), len(index_N)
        index_N = self.processes.share(index_N)
        self.skeleton, self.weights, self.images, self.dtype = skeleton, weights, images, dtype
        self.mean_C, self.std_C = mean_C, std_C
        device, num_cells = images.device, len(next(iter(weights.values())))
        self.batch_size = min(_LARGEST_BATCH, len(index_N))
        num_batches = -(-len(index_N) // self.batch_size)
        # Every batch is whole, as a captured graph wants it: the last one is filled up with images that do not count.
        self.index_EB = torch.zeros(num_batches, self.batch_size, dtype=index_N.dtype, device=device)
        self.index_EB.view(-1)[: len(index_N)] = index_N
        self.num_images = len(index_N)
        """Of this process."""
        self.number = torch.zeros(1, dtype=torch.int64, device=device)
        self.loss_K = torch.zeros(num_cells, dtype=torch.float64, device=device)
        self.correct_K = torch.zeros(num_cells, dtype=torch.int64, device=device)
        self._advance: Advance | None = None

    def __call__(self) -> tuple[list[float], list[float]]:
        """(mean cross-entropy, accuracy) of every cell."""
        for tensor in self._state:
            tensor.zero_()
        with _in_eval_mode(self.skeleton):
            self._run()
        loss_K, correct_K = self.processes.summed([self.loss_K, self.correct_K])
        return (loss_K / self.num_of_all).tolist(), (correct_K.double() / self.num_of_all).tolist()

    def capture(self) -> None:
        """Run as a graph from now on, where there are graphs; worth it if it runs more than once."""
        if self.images.resident and self.images.device.type == "cuda":
            with _in_eval_mode(self.skeleton):
                self._advance = captured(self._next, self._state, self.images.device)

    def _run(self) -> None:
        if self.images.resident:
            advance = self._advance or self._next
            for _ in self.index_EB:
                advance()
        else:
            for batch in self.images.stream(self.images.positions(self.index_EB)):
                self._next(batch)

    @property
    def _state(self) -> list[Tensor]:
        return [self.number, self.loss_K, self.correct_K]

    @torch.no_grad()
    def _next(self, batch: tuple[Tensor, Tensor] | None = None) -> None:
        index_B = self.index_EB.index_select(0, self.number)[0]
        images_BCHW, labels_B = batch or (self.images.gather(index_B), self.images.labels(index_B))
        normal = normalize(images_BCHW, self.mean_C, self.std_C)
        num_cells = len(self.loss_K)
        images_KBCHW = normal.expand(num_cells, *normal.shape)
        logits_KBC = stacked_forward(self.skeleton, self.weights, images_KBCHW, dtype=self.dtype)
        labels_KB = labels_B.expand(num_cells, -1)
        position_B = self.number * self.batch_size + torch.arange(self.batch_size, device=index_B.device)
        counts_B = position_B < self.num_images
        losses_KB = F.cross_entropy(logits_KBC.movedim(-1, 1), labels_KB, reduction="none")
        self.loss_K += (losses_KB.double() * counts_B).sum(-1)
        self.correct_K += ((logits_KBC.argmax(-1) == labels_KB) & counts_B).sum(-1)
        self.number += 1


@contextmanager
def _in_eval_mode(skeleton: nn.Module) -> Iterator[None]:
    """Batch norms then use their running statistics, and leave them as they are."""
    training = skeleton.training
    try:
        skeleton.eval()
        yield
    finally:
        skeleton.train(training)


def initial_model(config: RunConfig, dataset: Dataset) -> nn.Module:
    """The run's model before its first step."""
    return untrained_model(config, dataset.image_size, dataset.num_classes)


@dataclass(frozen=True)
class EpochResult:
    """What an epoch gave one cell. Losses are means; accuracy is a fraction."""

    train_loss: float
    val_loss: float
    val_acc: float
    lr: float
    """Learning rate of the epoch's last step."""


def _pipeline(
    configs: Sequence[RunConfig],
    waiting: Sequence[RunConfig],
    dataset: Dataset,
    device: torch.device,
    processes: Processes,
) -> Pipeline:
    """The augmentations of the cells, for this process's share of a batch."""
    whole = Pipeline.stack(
        [config.protocol.augment for config in configs],
        num_classes=dataset.num_classes,
        mean=dataset.mean,
        std=dataset.std,
        device=device,
        later=[config.protocol.augment for config in waiting],
    )
    if dataset.pictures is not None:
        whole = cropped_before(whole)
    return whole if processes.num == 1 else Share(processes, configs[0].protocol.batch_size).pipeline(whole)


def _images(dataset: Dataset, device: torch.device) -> Images:
    """The official training set, in memory or in its files."""
    if dataset.pictures is None:
        return DeviceImages(dataset.train, device)
    return StreamedImages(dataset.pictures, device, size=dataset.image_size[0], resized=dataset.resized)


@dataclass(frozen=True)
class _Programs:
    """What an epoch consists of."""

    step: Step
    advance: Advance
    """Does the step: itself, or a graph of it."""
    validation: Evaluation


@dataclass
class Stack:
    """K cells of equal shapes, their weights and optimiser states, on one device."""

    configs: tuple[RunConfig, ...]
    skeleton: nn.Module
    optimizer: AdamW
    statistics: Weights
    """What else of the cells a step changes: running means of batch norms and the like, [K, …] by name."""
    epochs_done: list[int]
    pipeline: Pipeline
    smoothing_K: Tensor
    images: Images
    """The official training set."""
    training_N: Tensor
    """Positions of the images that train."""
    validation_N: Tensor
    """Positions of those held out."""
    dropping: tuple[Dropping, ...] = ()
    teacher: Teacher | None = None
    average: Average | None = None
    groups: Mapping[str, int] | None = None
    """Parameter → its group, where not all learn at one rate."""
    scale: LossScale | None = None
    """Of the cells' losses, where gradients are float16."""
    processes: Processes = field(default_factory=Processes)
    """Those that train the stack together, each on its share of the batches."""
    _programs: "_Programs | None" = None
    """Made when the first epoch begins."""

    @classmethod
    def start(
        cls,
        configs: Sequence[RunConfig],
        dataset: Dataset,
        device: torch.device,
        processes: Processes | None = None,
        *,
        waiting: Sequence[RunConfig] = (),
    ) -> "Stack":
        """The cells before their first step. Of those that are `waiting` any may be `put` into the stack later, which
        then needs no other program."""
        processes = processes or Processes()
        check_stackable(configs, dataset)
        check_sizes(configs, dataset.image_size)
        models = [initial_model(config, dataset) for config in configs]
        protocols = [config.protocol for config in configs]
        groups = groups_of(models[0], protocols[0]) if protocols[0].has_own_rates else None
        optimizer = AdamW.start(
            stack_weights([dict(model.named_parameters()) for model in models], device),
            betas=protocols[0].betas,
            weight_decay=[protocol.weight_decay for protocol in protocols],
            decay_all=[protocol.decay_all for protocol in protocols],
            clip_norm=[protocol.clip_norm for protocol in protocols],
            groups=groups,
            group_scales=[] if groups is None else [group_scales(protocol, groups) for protocol in protocols],
        )
        optimizer.clips |= any(config.protocol.clip_norm is not None for config in waiting)
        skeleton = weightless(models[0])
        dropping: list[Dropping] = []
        if any(rates := [protocol.drop_path for protocol in protocols]):
            dropping.append(PathDropping.install(skeleton, rates, device))
        if any(rates := [protocol.dropout for protocol in protocols]):
            dropping.append(NumberDropping.install(skeleton, rates, device))
        teacher = Teacher.load(protocols[0].teacher, dataset, device) if protocols[0].teacher is not None else None
        statistics = stack_weights([running_statistics(model) for model in models], device)
        decays = [protocol.ema for protocol in protocols]
        average = Average.start(optimizer.weights_KP, statistics, decays) if any(decays) else None
        verify_stacking(skeleton, models, dataset.image_size)
        bring_constants(skeleton, device)
        data = configs[0].data
        training_N, validation_N = stratified_split(dataset.training_labels, data.validation_fraction, data.split_seed)
        if len(training_N) < protocols[0].batch_size:
            raise InputError(
                f"{len(training_N)} training images do not fill one batch of {protocols[0].batch_size}; take more of "
                "them, or a smaller batch"
            )
        if processes.num > 1:
            check_shareable(configs[0], processes, has_statistics=bool(statistics), num_validation=len(validation_N))
        return cls(
            tuple(configs),
            skeleton,
            optimizer,
            statistics,
            [0] * len(configs),
            _pipeline(configs, waiting, dataset, device, processes),
            torch.tensor([protocol.smoothing for protocol in protocols], device=device),
            _images(dataset, device),
            training_N.to(device),
            validation_N.to(device),
            tuple(dropping),
            teacher,
            average,
            groups,
            LossScale.start(len(configs), device) if configs[0].precision == "fp16" else None,
            processes,
        )

    @property
    def device(self) -> torch.device:
        return self.images.device

    @property
    def weights(self) -> Weights:
        """What makes models of the skeleton, [K, …] by name: parameters and statistics, in the cells' own memory.
        Where they are averaged, it is the averages that are validated, measured and kept."""
        if self.average is not None:
            return self.optimizer.arrangement.views(self.average.weights_KP) | self.average.statistics
        return self.optimizer.weights | self.statistics

    @property
    def state(self) -> list[Tensor]:
        """What the cells go on from, apart from their epochs."""
        of_average = [] if self.average is None else self.average.state
        of_scale = [] if self.scale is None else self.scale.state
        return [*self.optimizer.state, *self.statistics.values(), *of_average, *of_scale]

    @property
    def steps_per_epoch(self) -> int:
        """Full batches in an epoch; the images of a last partial batch wait for another epoch's order."""
        return len(self.training_N) // self.configs[0].protocol.batch_size

    @torch.no_grad()
    def put(self, position: int, config: RunConfig, dataset: Dataset) -> None:
        """Begin another cell in the slot of one. What it finds in memory is what it would find in a stack of its own.

        Only if the stack was not started with it in mind, and it needs what no other cell does, are its programs made
        again.
        """
        check_stackable([config, self.configs[0]], dataset)
        check_sizes([config], dataset.image_size)
        self.configs = (*self.configs[:position], config, *self.configs[position + 1 :])
        model, protocol = initial_model(config, dataset), config.protocol
        self.optimizer.put(
            position,
            dict(model.named_parameters()),
            weight_decay=protocol.weight_decay,
            decay_all=protocol.decay_all,
            clip_norm=protocol.clip_norm,
            group_scales=None if self.groups is None else group_scales(protocol, self.groups),
        )
        for name, statistic in running_statistics(model).items():
            self.statistics[name][position].copy_(statistic)
        if self.average is not None:
            self.average.put(position, self.optimizer.weights_KP, self.statistics, protocol.ema)
        self.smoothing_K[position] = protocol.smoothing
        for dropping in self.dropping:
            dropping.put(position, protocol)
        if self.scale is not None:
            self.scale.put(position)
        self.epochs_done[position] = 0
        if self.pipeline.takes(protocol.augment):
            self.pipeline.put(position, protocol.augment)
        else:
            self.pipeline, self._programs = _pipeline(self.configs, (), dataset, self.device, self.processes), None
        if protocol.clip_norm is not None and not self.optimizer.clips:
            self.optimizer.clips, self._programs = True, None

    def select(self, keep: Sequence[int]) -> "Stack":
        """The stack of the cells at these positions; the others' memory is freed."""
        index = torch.tensor(keep, device=self.device)
        return replace(
            self,
            configs=tuple(self.configs[k] for k in keep),
            optimizer=self.optimizer.select(index),
            statistics={name: statistic[index] for name, statistic in self.statistics.items()},
            epochs_done=[self.epochs_done[k] for k in keep],
            pipeline=self.pipeline.select(index),
            smoothing_K=self.smoothing_K[index],
            dropping=tuple(dropping.select(index) for dropping in self.dropping),
            average=None if self.average is None else self.average.select(index),
            scale=None if self.scale is None else self.scale.select(index),
            _programs=None,
        )

    def run_epoch(self, on_step: Callable[[int], None] = lambda step: None) -> list[EpochResult]:
        """Train every cell for one epoch of its own and validate it. A cell whose loss is not finite reports that."""
        epoch = self._epoch()
        if self._programs is None:
            self._programs = self._make_programs(epoch)
        programs = self._programs
        programs.step.begin(epoch)
        for number, advance in enumerate(self._steps(programs, epoch)):
            advance()
            on_step(number + 1)
            # On the CPU asking is free; on a GPU it would wait for the step, so there a NaN is noticed at the end. So
            # it is by several processes, which have to leave together.
            if self.device.type == "cpu" and self.processes.num == 1 and not torch.isfinite(programs.step.loss_K).all():
                break
        lr_K = self._rates()[:, -1].tolist()  # as it is asked for; steps round it to float32
        self.epochs_done = [done + 1 for done in self.epochs_done]
        val_loss_K, val_acc_K = programs.validation()
        (loss_K,) = self.processes.summed([programs.step.loss_K])
        train_loss_K = (loss_K / self.steps_per_epoch).tolist()
        return [EpochResult(*values) for values in zip(train_loss_K, val_loss_K, val_acc_K, lr_K, strict=True)]

    @property
    def losses_so_far(self) -> Tensor:
        """The sum of the losses of the steps done in this epoch, to watch it step by step; of several processes,
        this one's part of it."""
        assert self._programs is not None, "no epoch has begun"
        return self._programs.step.loss_K

    def _steps(self, programs: "_Programs", epoch: Epoch) -> Iterator[Advance]:
        if isinstance(self.images, StreamedImages):
            crops = [config.protocol.augmentation(ResizedCrop.name) for config in self.configs]
            seeds = [config.seed for config in self.configs]
            for batch in self.images.crops(crops, seeds, self.epochs_done, self.images.positions(epoch.index_SKB)):
                yield functools.partial(programs.step, batch)
        elif self.images.resident:
            yield from itertools.repeat(programs.advance, self.steps_per_epoch)
        else:
            for batch in self.images.stream(self.images.positions(epoch.index_SKB)):
                yield functools.partial(programs.step, batch)

    def _epoch(self) -> Epoch:
        """What every step of the cells' next epochs works with."""
        seed_K = torch.tensor([config.seed for config in self.configs], device=self.device)
        epoch_K = torch.tensor(self.epochs_done, device=self.device)
        batch_size = self.configs[0].protocol.batch_size
        in_shards = isinstance(self.images, StreamedImages) and self.images.in_shards
        window = self.configs[0].data.window if in_shards else None
        index_SKB = self.training_N[epoch_batches(seed_K, epoch_K, len(self.training_N), batch_size, window=window)]
        if self._share is not None:
            index_SKB = self._share.needed(self.pipeline, seed_K, epoch_K, index_SKB)
        return Epoch(
            seed_K,
            epoch_K,
            index_SKB,
            self._rates().T.contiguous().to(self.device, torch.float32),
        )

    def _rates(self) -> Tensor:
        """The learning rates of the cells' next epochs, float64 [K, S], on the CPU."""
        return torch.stack(
            [
                learning_rates(config.protocol, epoch, self.steps_per_epoch)
                for config, epoch in zip(self.configs, self.epochs_done, strict=True)
            ]
        )

    def _make_programs(self, epoch: Epoch) -> "_Programs":
        on_gpu = self.device.type == "cuda"
        # A compiled program rounds in its own way, and that of a single cell is another one.
        compiled = on_gpu and not torch.are_deterministic_algorithms_enabled()
        step = Step(
            self.skeleton,
            self.optimizer,
            self.statistics,
            self.pipeline,
            self.smoothing_K,
            self.images,
            epoch,
            dtype=self._dtype,
            augment=CompiledPipeline() if compiled else None,
            dropping=self.dropping,
            teacher=self.teacher,
            share=self._share,
            average=self.average,
            num_parts=self.configs[0].protocol.accumulate,
            scale=self.scale,
        )
        validation = self._evaluation(self.images, self.validation_N, self.weights, self.processes)
        if not (on_gpu and self.images.resident):
            return _Programs(step, step, validation)
        validation.capture()
        return _Programs(step, step.captured(), validation)

    @property
    def _share(self) -> Share | None:
        return None if self.processes.num == 1 else Share(self.processes, self.configs[0].protocol.batch_size)

    @property
    def _dtype(self) -> torch.dtype:
        return DTYPES[self.configs[0].precision]

    def evaluate(
        self, images: Images, index_N: Tensor, weights: Weights | None = None
    ) -> tuple[list[float], list[float]]:
        """(mean cross-entropy, accuracy) of every cell on these images, without augmentation or smoothing.

        The process does it alone, even if there are others.
        """
        return self._evaluation(images, index_N, self.weights if weights is None else weights)()

    def _evaluation(
        self,
        images: Images,
        index_N: Tensor,
        weights: Weights,
        processes: Processes | None = None,
    ) -> Evaluation:
        mean_C, std_C = self.pipeline.mean_C, self.pipeline.std_C
        return Evaluation(
            self.skeleton, weights, images, index_N, mean_C, std_C, dtype=self._dtype, processes=processes
        )
