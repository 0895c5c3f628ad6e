"""The augmentations of K cells as one program: uint8 images and labels in, normalised images and targets out.

Shape suffixes: K cells, B samples, C channels (images) or classes (targets), H rows, W columns.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nearsight.augment.base import AUGMENTATIONS, Augmentation, Batch, Cells
from nearsight.augment.streams import Drawn
from nearsight.errors import InputError
from nearsight.lazy import torch
from nearsight.randomness import Draws

if TYPE_CHECKING:
    from torch import Tensor


def normalize(images: Tensor, mean_C: Tensor, std_C: Tensor) -> Tensor:
    """Grey levels [..., C, H, W] to zero mean and unit deviation, float32; means and deviations in grey levels."""
    # In place on the copy: on a CPU, fresh memory for every step costs more than the arithmetic.
    copy = images.to(torch.float32, copy=True)
    return copy.sub_(mean_C[:, None, None]).div_(std_C[:, None, None])


def grey_levels(per_channel: Sequence[float], device: torch.device) -> Tensor:
    """Channel means or deviations of images in [0, 1], as data sets publish them, in grey levels."""
    return torch.tensor(per_channel, device=device) * 255


@dataclass(frozen=True)
class Pipeline:
    """The augmentation lists of K cells, merged. Cells may differ in what they have and how strong it is."""

    stages: tuple[tuple[type[Augmentation], Cells], ...]
    num_classes: int
    mean_C: Tensor
    std_C: Tensor

    @classmethod
    def stack(
        cls,
        cells: Sequence[Sequence[Augmentation]],
        *,
        num_classes: int,
        mean: Sequence[float],
        std: Sequence[float],
        device: torch.device,
        later: Sequence[Sequence[Augmentation]] = (),
    ) -> Pipeline:
        """`mean` and `std` are per channel, for images scaled to [0, 1], as data sets publish them. `later` are cells
        that may take the place of others: the program is made for them too, so that they change none."""
        stages = []
        every = [*cells, *dict.fromkeys(map(tuple, later))]
        for kind in _merged_order([[type(augmentation) for augmentation in cell] for cell in every]):
            configs = [next((a for a in cell if type(a) is kind and not a.is_idle), None) for cell in every]
            if any(config is not None for config in configs):
                stages.append((kind, kind.stack(configs, device).select(torch.arange(len(cells), device=device))))
        return cls(tuple(stages), num_classes, grey_levels(mean, device), grey_levels(std, device))

    def takes(self, cell: Sequence[Augmentation]) -> bool:
        """Whether the program, as it is, augments a cell by this list."""
        wanted = {augmentation.name: augmentation for augmentation in cell if not augmentation.is_idle}
        there = [(wanted[kind.name], cells) for kind, cells in self.stages if kind.name in wanted]
        in_order = [augmentation.name for augmentation, _ in there] == list(wanted)
        return in_order and all(cells.takes(augmentation) for augmentation, cells in there)

    def put(self, position: int, cell: Sequence[Augmentation]) -> None:
        """Give a place to another cell, which the program `takes`, in the tensors that it reads."""
        wanted = {augmentation.name: augmentation for augmentation in cell if not augmentation.is_idle}
        for kind, cells in self.stages:
            cells.put(position, wanted.get(kind.name))

    def select(self, keep: Tensor) -> Pipeline:
        """The pipeline of the cells with these positions."""
        stages = tuple((kind, cells.select(keep)) for kind, cells in self.stages)
        return Pipeline(stages, self.num_classes, self.mean_C, self.std_C)

    def __call__(self, images_KBCHW: Tensor, labels_KB: Tensor, draws: Draws) -> tuple[Tensor, Tensor]:
        """Normalised float32 images [K, B, C, H, W] and target distributions [K, B, classes]."""
        _check_grey_levels(images_KBCHW)
        if torch.compiler.is_compiling():
            return self._augmented(images_KBCHW, labels_KB, draws)
        with threads_for(images_KBCHW):
            return self._augmented(images_KBCHW, labels_KB, draws)

    def check(self, images_KBCHW: Tensor) -> None:
        """Refuse images that are not grey levels as they are stored, or too small for an augmentation."""
        _check_grey_levels(images_KBCHW)
        self._num_draws(images_KBCHW.shape[-3:])

    def _augmented(self, images_KBCHW: Tensor, labels_KB: Tensor, draws: Draws) -> tuple[Tensor, Tensor]:
        drawn = Drawn.of(draws, *self._num_draws(images_KBCHW.shape[-3:]))
        targets_KBC = torch.nn.functional.one_hot(labels_KB, self.num_classes).to(torch.float32)
        batch = Batch(images_KBCHW, targets_KBC, self.mean_C, self.std_C)
        for kind, cells in self.stages:
            batch = kind.apply(batch, cells, drawn)
        return normalize(batch.images_KBCHW, self.mean_C, self.std_C), batch.targets_KBC

    def _num_draws(self, shape_CHW: torch.Size) -> tuple[dict[str, int], dict[str, int]]:
        """Stream → how many draws all stages together need per sample, and per batch."""
        sample_nums: dict[str, int] = {}
        batch_nums: dict[str, int] = {}
        for kind, cells in self.stages:
            sample_nums |= kind.sample_draws(cells, shape_CHW)
            batch_nums |= kind.batch_draws(cells)
            shape_CHW = kind.output_shape(cells, shape_CHW)
        return sample_nums, batch_nums


def _check_grey_levels(images_KBCHW: Tensor) -> None:
    if images_KBCHW.dtype != torch.uint8:
        raise InputError(
            f"the images are {images_KBCHW.dtype}, but augmentations take grey levels 0…255 as torch.uint8; give "
            "them as they are stored, neither scaled nor normalised"
        )


def _merged_order(lists: Sequence[Sequence[type[Augmentation]]]) -> list[type[Augmentation]]:
    """One order that keeps the order of every list: repeatedly take a head that is not further down another list."""
    for kinds in lists:
        if len(set(kinds)) < len(kinds):
            raise InputError(f"an augmentation is listed twice: {', '.join(kind.name for kind in kinds)}")
    remaining = [list(kinds) for kinds in lists if kinds]
    order: list[type[Augmentation]] = []
    while remaining:
        heads = dict.fromkeys(kinds[0] for kinds in remaining)
        free = [head for head in heads if not any(head in kinds[1:] for kinds in remaining)]
        if not free:
            raise InputError(f"cells of one stack apply {', '.join(h.name for h in heads)} in different orders")
        first = min(free, key=lambda kind: kind.stage)
        order.append(first)
        remaining = [kept for kinds in remaining if (kept := [kind for kind in kinds if kind is not first])]
    return order


def stack_key(augmentations: Sequence[Augmentation]) -> tuple[object, ...]:
    """Lists with equal keys can be stacked: what they share is the same, and one order keeps the order of each.

    The key holds only what is unusual, so that a list with an augmentation stacks with one without it.
    """
    settings = frozenset(
        (augmentation.name, field, value)
        for augmentation in augmentations
        for field in augmentation.shared
        if (value := getattr(augmentation, field)) != getattr(type(augmentation), field)  # the default
    )
    place = {name: number for number, name in enumerate(AUGMENTATIONS)}

    def usual_place(augmentation: Augmentation) -> tuple[int, int, str]:
        return augmentation.stage, place.get(augmentation.name, len(place)), augmentation.name

    # All lists of a key have these pairs, and every other pair in the usual order: orders cannot contradict each other.
    turned = frozenset(
        (first.name, second.name)
        for first, second in itertools.combinations(augmentations, 2)
        if usual_place(first) > usual_place(second)
    )
    return settings, turned


def smooth_targets(targets_KBC: Tensor, smoothing_K: Tensor) -> Tensor:
    """(1 - ε)·target + ε/classes, as `torch.nn.CrossEntropyLoss(label_smoothing=ε)` does with probability targets."""
    smoothing = smoothing_K[:, None, None]
    return targets_KBC * (1 - smoothing) + smoothing / targets_KBC.shape[-1]


_MOST_PROGRAMS = 256
"""torch refuses to compile one function more than 8 times; a study may meet more sizes and sets of augmentations."""


class CompiledPipeline:
    """Calls pipelines, compiled. Objects share their programs, so one object per stack costs no more than one for all.

    Step by step a pipeline is hundreds of small operations, and a GPU spends its time on starting them. Compiled they
    are fused, and the program may be captured in a CUDA graph: shapes never depend on the draws, nothing comes from the
    host. The program does not depend on K, so a stack that loses cells goes on with the one it has. One cell alone has
    a program of its own, and so has every other batch size, image size and set of augmentations.

    Made for GPUs. On a CPU the pipeline itself is faster, because there it leaves out work that no image needs.
    """

    def __init__(self, *, backend: str | Callable[..., Any] = "inductor") -> None:
        self._program = torch.compile(_augmented, backend=backend, fullgraph=True, dynamic=False)

    def __call__(
        self,
        pipeline: Pipeline,
        images_KBCHW: Tensor,
        labels_KB: Tensor,
        draws: Draws,
        smoothing_K: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """What `pipeline` returns, its targets smoothed where `smoothing_K` is given.

        Marks the first axis of the tensors with K cells as dynamic, which other compiled functions will see too.
        """
        pipeline.check(images_KBCHW)  # here, because a compiled program cannot say what is wrong
        for tensor in (images_KBCHW, labels_KB, draws.seed_K, draws.epoch, draws.index_KB, smoothing_K):
            _mark(tensor)
        for _, cells in pipeline.stages:
            for tensor in cells.numbers.values():
                _mark(tensor)
        with torch.no_grad(), torch._dynamo.config.patch(recompile_limit=_MOST_PROGRAMS):
            return self._program(pipeline, images_KBCHW, labels_KB, draws, smoothing_K)


def _mark(tensor: Tensor | None) -> None:
    if tensor is not None and tensor.ndim > 0:  # an epoch that is the same for all cells has no axis
        # "maybe", because a single cell is compiled for that number; to insist would be an error then.
        torch._dynamo.maybe_mark_dynamic(tensor, 0)


def _augmented(
    pipeline: Pipeline, images_KBCHW: Tensor, labels_KB: Tensor, draws: Draws, smoothing_K: Tensor | None
) -> tuple[Tensor, Tensor]:
    images_KBCHW, targets_KBC = pipeline(images_KBCHW, labels_KB, draws)
    return images_KBCHW, targets_KBC if smoothing_K is None else smooth_targets(targets_KBC, smoothing_K)


_WORTH_THREADS = 2**23
"""Pixels and channels of a batch from which on more than one thread pays (2,700 images of 32×32, 56 of 224×224)."""


@contextmanager
def one_thread() -> Iterator[None]:
    """One CPU thread for torch, and as many as before afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def threads_for(images: Tensor) -> AbstractContextManager[None]:
    """One thread while a small batch is augmented on a CPU, and as many as before afterwards.

    An augmentation is hundreds of operations of some microseconds each. Shared out among threads they are no faster on
    an idle machine, and on a busy one every operation waits until its last thread gets a core: 50 times slower,
    measured on 2 cores.
    """
    is_small = images.device.type == "cpu" and images.numel() < _WORTH_THREADS
    return one_thread() if is_small and torch.get_num_threads() > 1 else nullcontext()
