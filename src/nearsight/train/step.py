"""One training step of a stack: augment → forward → backward → optimiser → metrics, as a program without arguments.

Whatever changes from step to step lies on the device (which images, which learning rates, how far the epoch is), and
the step finds its place by itself. So on CUDA it is captured once, as one graph, and replayed: the host neither decides
nor waits for anything within an epoch.

One of several processes steps on its share of the batch, and gradients are added up before the optimiser sees them.

Shape suffixes: K cells, B samples, S steps of an epoch, C channels or classes, H rows, W columns, P parameters.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed
import torch.nn.functional as F
from torch import Tensor, nn

from nearsight.augment import Pipeline, grey_levels, smooth_targets
from nearsight.augment.pipeline import CompiledPipeline
from nearsight.data import Dataset
from nearsight.data.loading import dataset_spec
from nearsight.data.streaming import Images
from nearsight.errors import InputError
from nearsight.models import load_model, load_source
from nearsight.randomness import Draws
from nearsight.train.dropping import Dropping
from nearsight.train.folder import RunFolder
from nearsight.train.optimizer import AdamW, Average
from nearsight.train.processes import Share
from nearsight.train.scaling import LossScale
from nearsight.train.stacked import Weights, stacked_forward

Advance = Callable[[], None]
"""Does the next piece of work; where it is, is on the device."""

_NUM_WARM_UPS = 2


def captured(program: Advance, state: Sequence[Tensor], device: torch.device) -> Advance:
    """`program` as one CUDA graph, launched as a whole. `state` is what it changes; that is left as it was.

    Kernels are compiled and libraries find their memory while it warms up, neither of which a graph can hold.
    """
    with torch.cuda.device(device):
        before = [tensor.clone() for tensor in state]
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(_NUM_WARM_UPS):
                program()
                # Each time: there may be only one piece of work, and none to go on to.
                for tensor, value in zip(state, before, strict=True):
                    tensor.copy_(value)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # Where processes talk, a thread of their library watches over it, and must not be taken for part of this.
        mode = "thread_local" if torch.distributed.is_initialized() else "global"
        with torch.cuda.graph(graph, capture_error_mode=mode):
            program()
        replay: Advance = graph.replay
        return replay


@dataclass(frozen=True)
class Teacher:
    """A trained model whose predictions take the place of labels (S2 trains Jumbo so; Fuller et al. 2026).

    It sees the images that its students see, prepared as in its own training.
    """

    model: nn.Module
    scale_C: Tensor
    """From images as the data set normalises them to images as the teacher's did: x · scale + shift."""
    shift_C: Tensor

    @classmethod
    def load(cls, name: str, dataset: Dataset, device: torch.device) -> "Teacher":
        """The best weights of a run folder, or a model of `load_source` with its published weights."""
        if Path(name).is_dir():
            folder = RunFolder(Path(name))
            if folder.is_pretraining:
                raise InputError(
                    f"teacher {name} was pretrained without labels and has no classes; take a labelled run"
                )
            folder.check_weights()
            spec = dataset_spec(folder.read_config().data.name)
            model, mean, std = load_model(folder.model), spec.mean, spec.std
        elif Path(name).parent != Path():
            raise InputError(f"teacher {name} is not there; train it first, or name a model with published weights")
        else:
            sourced = load_source(name, pretrained=True)
            model, mean, std = sourced.model, sourced.data_config["mean"], sourced.data_config["std"]
        own_mean_C, own_std_C = grey_levels(mean, device), grey_levels(std, device)
        mean_C, std_C = grey_levels(dataset.mean, device), grey_levels(dataset.std, device)
        teacher = cls(
            model.to(device).eval().requires_grad_(False), std_C / own_std_C, (mean_C - own_mean_C) / own_std_C
        )
        teacher._check(name, dataset, device)
        return teacher

    def _check(self, name: str, dataset: Dataset, device: torch.device) -> None:
        if getattr(self.model, "num_classes", None) == 0:  # its features would pass for classes
            raise InputError(f"teacher {name} has no classifier; take a model that was trained on {dataset.name}")
        try:
            answer = self(torch.zeros(1, 1, 3, *dataset.image_size, device=device))
        except (AssertionError, RuntimeError) as error:
            raise InputError(f"teacher {name} does not take images of {dataset.image_size} pixels: {error}") from error
        if answer.shape[-1] != dataset.num_classes:
            raise InputError(
                f"teacher {name} knows {answer.shape[-1]} classes, but {dataset.name} has {dataset.num_classes}"
            )

    @torch.no_grad()
    def __call__(self, images_KBCHW: Tensor, *, dtype: torch.dtype = torch.float32) -> Tensor:
        """Its predictions for normalised images: class distributions [K, B, C]."""
        images = images_KBCHW.flatten(0, 1) * self.scale_C[:, None, None] + self.shift_C[:, None, None]
        with torch.autocast(images.device.type, dtype, enabled=dtype != torch.float32):
            logits: Tensor = self.model(images)
        by_cell: Tensor = logits.float().softmax(-1).unflatten(0, images_KBCHW.shape[:2])
        return by_cell


@dataclass(frozen=True)
class Epoch:
    """Where the steps of an epoch find what is theirs."""

    seed_K: Tensor
    epoch_K: Tensor
    index_SKB: Tensor
    """Positions of the images; of a share, those it needs."""
    lr_SK: Tensor

    def copy_(self, other: "Epoch") -> None:
        for name, tensor in vars(other).items():
            getattr(self, name).copy_(tensor)


class Step:
    """The step of some cells. Calling it trains every cell on its next batch."""

    def __init__(
        self,
        skeleton: nn.Module,
        optimizer: AdamW,
        statistics: Weights,
        pipeline: Pipeline,
        smoothing_K: Tensor,
        images: Images,
        epoch: Epoch,
        *,
        dtype: torch.dtype,
        augment: CompiledPipeline | None,
        dropping: Sequence[Dropping] = (),
        teacher: Teacher | None = None,
        share: Share | None = None,
        average: Average | None = None,
        num_parts: int = 1,
        scale: LossScale | None = None,
    ) -> None:
        """`share`: what of a batch this process does; None: all of it. `num_parts`: in how many parts, one after the
        other, it goes through the model. `scale`: of the losses, if they need one."""
        self.skeleton, self.optimizer, self.statistics = skeleton, optimizer, statistics
        self.pipeline, self.smoothing_K, self.images, self.epoch = pipeline, smoothing_K, images, epoch
        self.dtype, self.augment, self.dropping, self.teacher = dtype, augment, dropping, teacher
        self.share, self.average, self.num_parts, self.scale = share, average, num_parts, scale
        device = images.device
        self.number = torch.zeros(1, dtype=torch.int64, device=device)
        """Steps done in this epoch."""
        self.loss_K = torch.zeros(len(smoothing_K), dtype=torch.float64, device=device)
        """Sum of the losses of this epoch's steps, each before its update; of a share, its part of them."""

    def begin(self, epoch: Epoch) -> None:
        """Go to the start of an epoch."""
        self.epoch.copy_(epoch)
        self.number.zero_()
        self.loss_K.zero_()

    def __call__(self, batch: tuple[Tensor, Tensor] | None = None) -> None:
        """`batch`: images and labels, where they do not lie on the device."""
        gradient_KP = self._differentiate(batch)
        if self.share is not None:
            self.share.sum_(gradient_KP)
        self._update(gradient_KP)

    def captured(self) -> Advance:
        """The step as one graph. With a share there are two, and the exchange between processes is in neither: whether
        a graph may hold it depends on versions and settings of the library that does it.

        With a share this has not run yet: it needs two GPUs.
        """
        device = self.images.device
        if self.share is None:
            return captured(self, self.state, device)
        share, gradient_KP = self.share, torch.empty_like(self.optimizer.weights_KP)

        def differentiate() -> None:
            gradient_KP.copy_(self._differentiate())

        first = captured(differentiate, self.state, device)
        second = captured(lambda: self._update(gradient_KP), self.state, device)

        def advance() -> None:
            first()
            share.sum_(gradient_KP)
            second()

        return advance

    def _differentiate(self, batch: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """The gradient [K, P] of the next batch."""
        epoch = self.epoch
        index_KB = epoch.index_SKB.index_select(0, self.number)[0]
        images_KBCHW, labels_KB = batch or (self.images.gather(index_KB), self.images.labels(index_KB))
        draws = Draws(epoch.seed_K, epoch.epoch_K, self.number[0], index_KB)
        images, targets_KBC = self._augmented(images_KBCHW, labels_KB, draws)
        if self.share is not None:
            images, targets_KBC, draws = self.share.own(images, targets_KBC, draws)
        weights_KP = self.optimizer.weights_KP.detach().requires_grad_()
        num_samples, gradient_KP = images.shape[1], None
        num_parts = min(self.num_parts, num_samples)  # a share of a batch may have fewer
        ends = [num_samples * part // num_parts for part in range(num_parts + 1)]
        for start, end in itertools.pairwise(ends):
            loss_K = self._loss(
                weights_KP, images[:, start:end], targets_KBC[:, start:end], draws.of(slice(start, end))
            )
            if num_parts > 1:
                loss_K = loss_K * ((end - start) / num_samples)
            if self.share is not None:
                loss_K = self.share.weighted(loss_K)
            # Cells share no weights, so the gradient of the sum is each cell's own gradient.
            scaled_K = loss_K if self.scale is None else loss_K * self.scale.scale_K
            (of_part_KP,) = torch.autograd.grad(scaled_K.sum(), weights_KP)
            gradient_KP = of_part_KP if gradient_KP is None else gradient_KP.add_(of_part_KP)
            self.loss_K += loss_K.detach()
        assert gradient_KP is not None
        return gradient_KP

    def _loss(self, weights_KP: Tensor, images: Tensor, targets_KBC: Tensor, draws: Draws) -> Tensor:
        """The mean loss of these samples, by cell."""
        weights = self.optimizer.arrangement.views(weights_KP) | self.statistics
        for dropping in self.dropping:
            weights |= dropping(draws)
        if self.teacher is not None:
            # The loss is then the divergence from the teacher plus the teacher's own entropy, which has no gradient.
            targets_KBC = self.teacher(images, dtype=self.dtype)
        logits_KBC = stacked_forward(self.skeleton, weights, images, dtype=self.dtype)
        return -(targets_KBC * F.log_softmax(logits_KBC, -1)).sum(-1).mean(-1)

    def _update(self, gradient_KP: Tensor) -> None:
        lr_K = self.epoch.lr_SK.index_select(0, self.number)[0]
        if self.scale is None:
            self.optimizer.step(gradient_KP, lr_K)
        else:
            self.scale.step(self.optimizer, gradient_KP, lr_K)
        if self.average is not None:
            self.average.update(self.optimizer.weights_KP, self.statistics)
        self.number += 1

    def _augmented(self, images_KBCHW: Tensor, labels_KB: Tensor, draws: Draws) -> tuple[Tensor, Tensor]:
        if self.augment is not None:
            return self.augment(self.pipeline, images_KBCHW, labels_KB, draws, self.smoothing_K)
        images, targets_KBC = self.pipeline(images_KBCHW, labels_KB, draws)
        return images, smooth_targets(targets_KBC, self.smoothing_K)

    @property
    def state(self) -> list[Tensor]:
        """What a step changes."""
        of_average = [] if self.average is None else self.average.state
        of_scale = [] if self.scale is None else self.scale.state
        others = [*of_average, *of_scale, self.number, self.loss_K]
        return [*self.optimizer.state, *self.statistics.values(), *others]
