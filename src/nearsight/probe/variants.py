"""A model with its heads changed in many ways, each of which is a `Variant`: a plan of `nearsight.lens`.

What comes before the first layer that a variant changes is the same for all variants: it is computed once per batch of
images. From there on several variants run as one batch, in which each has its own images. So a model of 12 layers costs
half of one forward per head.

Shape suffixes: V variants, N images, B images of a batch, D numbers that are kept of an image.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from nearsight.errors import InputError, check_at_least
from nearsight.lens.intervene import chosen_heads, intervening
from nearsight.lens.plans import Plan
from nearsight.lens.running import remembering_surveys, running, surveyed, without_gradients
from nearsight.lens.survey import Survey
from nearsight.lens.tokens import block_of
from nearsight.probe.readouts import Labelled, Metric, Readout, Truth
from nearsight.tensorfile import load_tensors, save_tensors

_NEAR = 0.02
"""How far outputs may be from those of the whole forward, as a share of the largest, for a prefix to be shared: more
than rounding does, and far less than another input."""


@dataclass(frozen=True)
class Variant:
    """A model with some heads changed."""

    kind: str
    """What it is one of, such as "head" or "reach"."""
    plan: Plan
    settings: Mapping[str, Any] = field(default_factory=dict)
    """What distinguishes it from others of its kind: the columns of its row."""


@dataclass(frozen=True)
class Tried:
    """What each image contributes to the score of the unchanged model and of every variant, which is the mean."""

    found: Survey
    variants: tuple[Variant, ...]
    base_N: NDArray[np.float64]
    values_VN: NDArray[np.float64]
    metric: Metric


def try_variants(
    model: nn.Module,
    images: Labelled,
    variants: Sequence[Variant] | Callable[[Survey], Sequence[Variant]],
    read: Readout,
    *,
    variants_at_once: int = 8,
    share: bool = True,
    device: torch.device | str | None = None,
    num_images: int = 0,
    folder: Path | None = None,
    on_group: Callable[[int], object] = lambda num_answers: None,
) -> Tried:
    """How a model does with its heads changed.

    Args:
        model: a ViT, unmodified. It runs in eval mode without gradients, and is left as it was.
        images: batches of normalised images, and what is true of them.
        variants: what to change; or a function that says so when it is known what the model has.
        read: what is read of the model, and how it is scored.
        variants_at_once: how many run as one batch, which then has so many times the images.
        share: whether what comes before the first changed layer is computed once for all variants. If a model's blocks
            do not follow each other, it never is.
        device: where to run; by default where the model is.
        num_images: of all batches, where it is known: what does not fit into memory is then refused at once.
        folder: keeps what is known of each batch, so that the same call goes on where it was interrupted. Its name has
            to say what the numbers depend on.
        on_group: called with images × variants after each forward, the unchanged model among them.
    """
    check_at_least("variants_at_once", variants_at_once, 1)
    parts: list[Tensor] = []
    truths: list[Truth] = []
    with running(model, device) as run, remembering_surveys():
        chain: _Chain | None = None
        for number, (pictures, truth) in enumerate(images):
            with without_gradients():
                batch_BCHW = run.brought(pictures)
                if chain is None:
                    found = surveyed(run.model, batch_BCHW)
                    listed = tuple(variants(found) if callable(variants) else variants)
                    groups = _groups(found, listed, variants_at_once)
                    read.prepare(run.model, batch_BCHW[:2])
                    chain = _Chain(run.model, found, read, batch_BCHW[:2] if share else None)
                path = None if folder is None else folder / f"batch-{number}.safetensors"
                kept_VBD = _read_part(path)
                if kept_VBD is None:
                    kept_VBD = _try_all(chain, read, batch_BCHW, truth, listed, groups, on_group)
                    if path is not None:
                        save_tensors(path, {"kept": kept_VBD}, {})
                else:
                    on_group(len(kept_VBD) * len(truth))
            parts.append(kept_VBD)
            truths.append(truth)
            read.check_room(parts[0], max(num_images, sum(map(len, truths))))
    if chain is None:
        raise InputError("there are no images to ask about")
    base_N, *values = (read.values(kept_ND, truths, run.device) for kept_ND in torch.cat(parts, dim=1))
    return Tried(found, listed, base_N, np.reshape(values, (len(listed), len(base_N))), read.metric)


def _read_part(path: Path | None) -> Tensor | None:
    """What an earlier call kept; None where it kept nothing that can be read."""
    if path is None or not path.exists():
        return None
    try:
        return load_tensors(path)[0]["kept"]
    except InputError:
        return None


def _try_all(
    chain: "_Chain",
    read: Readout,
    batch_BCHW: Tensor,
    truth: Truth,
    variants: Sequence[Variant],
    groups: Sequence[tuple[int, Sequence[int]]],
    on_group: Callable[[int], object],
) -> Tensor:
    """What is kept of one batch, [V + 1, B, D]: of the unchanged model, then of all variants."""
    with chain.remembering():
        kept = {-1: read.kept(read(batch_BCHW), truth)}
    on_group(len(truth))
    for first, which in groups:
        outputs = chain.run(batch_BCHW, [variants[number].plan for number in which], first)
        kept |= {number: read.kept(output_B, truth) for number, output_B in zip(which, outputs, strict=True)}
        on_group(len(truth) * len(which))
    chain.forget()
    # All at once: to fetch those of each forward would be to wait for it, with nothing left to do for the device.
    return torch.stack([kept[number] for number in sorted(kept)]).cpu()


def _groups(found: Survey, variants: Sequence[Variant], at_once: int) -> list[tuple[int, Sequence[int]]]:
    """(first changed layer, which variants), as many as run as one batch."""
    names, first = list(found.layers), dict[int, list[int]]()
    for number, variant in enumerate(variants):
        first.setdefault(min(names.index(name) for name in chosen_heads(found, variant.plan.heads)), []).append(number)
    return [(layer, some) for layer, numbers in sorted(first.items()) for some in _chunks(numbers, at_once)]


def _chunks(numbers: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    return (numbers[begin : begin + size] for begin in range(0, len(numbers), size))


class _Chain:
    """The blocks of a model, which can be left out up to one of them: what that one returned is known."""

    def __init__(self, model: nn.Module, found: Survey, read: Readout, example_BCHW: Tensor | None) -> None:
        self._model, self._read = model, read
        names = [block_of(layer) for layer in found.layers]
        self._blocks = [model.get_submodule(name) if name else None for name in names]
        self._outputs: dict[int, Any] = {}
        self._shared = [False] * len(names)
        if example_BCHW is not None:
            self._shared = [self._can_share(layer, example_BCHW) for layer in range(len(names))]

    @contextmanager
    def remembering(self) -> Iterator[None]:
        """Around a whole forward: keep what the blocks that may be left out return."""
        with ExitStack() as undo:
            for layer, block in enumerate(self._blocks[:-1]):
                if block is not None and self._shared[layer + 1]:
                    hook = block.register_forward_hook(lambda _block, _inputs, output, at=layer: self._keep(at, output))
                    undo.callback(hook.remove)
            yield

    def _keep(self, layer: int, output: Any) -> None:
        self._outputs[layer] = output

    def forget(self) -> None:
        self._outputs.clear()

    def run(self, images_BCHW: Tensor, plans: Sequence[Plan], first: int) -> Tensor:
        """[V, B, …]: what is read by each plan, none of which changes a layer before the first."""
        times, size = len(plans), len(images_BCHW)
        groups = [(plan, slice(number * size, (number + 1) * size)) for number, plan in enumerate(plans)]
        with ExitStack() as around:
            if self._shared[first]:
                around.enter_context(self._left_out(first, times))
            else:
                images_BCHW = images_BCHW.repeat(times, 1, 1, 1)
            around.enter_context(intervening(self._model, groups))
            output_VB: Tensor = self._read(images_BCHW).unflatten(0, (times, size))
            return output_VB

    @contextmanager
    def _left_out(self, first: int, times: int) -> Iterator[None]:
        """Blocks before a layer's do nothing, but for the last of them, which returns what it did, several times."""
        blocks = list(dict.fromkeys(block for block in self._blocks[:first] if block is not None))
        known = tree_map(
            lambda value: value.repeat(times, *[1] * (value.dim() - 1)) if isinstance(value, Tensor) else value,
            self._outputs[first - 1],
        )
        with ExitStack() as undo:
            for block in blocks:
                last = block is blocks[-1]
                block.__dict__["forward"] = (lambda *_a, **_k: known) if last else (lambda tokens, *_a, **_k: tokens)
                undo.callback(block.__dict__.pop, "forward")
            yield

    def _can_share(self, layer: int, images_BCHW: Tensor) -> bool:
        """Whether the model goes on as it should from that layer on, twice as a batch: that is tried."""
        blocks = self._blocks[: layer + 1]
        if not layer or None in blocks or blocks[layer] in blocks[:layer]:
            return False
        if any("forward" in block.__dict__ for block in blocks if block is not None):
            return False
        self._shared[layer] = True
        try:
            with self.remembering():
                whole_B = self._read(images_BCHW)
            if not all(len(leaf) == len(images_BCHW) for leaf in tree_leaves(self._outputs[layer - 1])):
                return False
            with self._left_out(layer, 2):
                found_B = self._read(images_BCHW)
            expected_B = torch.cat([whole_B, whole_B])
            return found_B.shape == expected_B.shape and bool(
                (found_B - expected_B).abs().max() <= _NEAR * expected_B.abs().max()
            )
        except Exception:  # whatever a model makes of blocks that do nothing, it is then run as a whole
            return False
        finally:
            self._shared[layer] = False
            self._outputs.clear()
