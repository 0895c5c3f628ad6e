"""`check_vit_adapter`: does the lens see your model right? Checks that anybody can run on a model of their own."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from nearsight.lens.attention import Attention, ExplicitAttention, FusedAttention
from nearsight.lens.capture import AttentionTap, Call
from nearsight.lens.measuring import measure
from nearsight.lens.running import running
from nearsight.lens.survey import Site, Survey, survey


class AdapterError(AssertionError):
    """A model that the lens does not see right; the message names the checks that failed."""


@dataclass(frozen=True)
class AdapterReport:
    """What was checked, and what the lens sees in the model."""

    passed: tuple[str, ...]
    """The checks, in words."""
    layers: tuple[str, ...]
    """One line for each spatial attention: its name and where its tokens lie."""
    skipped: dict[str, str]
    """Attentions that are not spatial, with the reason."""

    def __str__(self) -> str:
        lines = [f"ok: {check}" for check in self.passed]
        lines += [f"layer: {layer}" for layer in self.layers]
        return "\n".join(lines + [f"not measured: {name}: {reason}" for name, reason in self.skipped.items()])


def check_vit_adapter(model: nn.Module, image_size: int | tuple[int, int]) -> AdapterReport:
    """Check that `nearsight.measure` sees a model right, for images of this size (in pixels; height and width).

    Among other things: outputs are bit-identical with and without the lens; the model and all random generators are
    left as they were; a batch gives what its images give alone; every patch is a query once in each layer; and, found
    by changing the image and looking at what changes, tokens lie where the lens believes they lie. What the lens says
    of a layer is in the report; read it, since only you know what your model was meant to do.

    Raises:
        AdapterError: naming each check that failed.
        InputError: if the model has no spatial attention, or does not take such images.
    """
    height, width = (image_size, image_size) if isinstance(image_size, int) else image_size
    images = torch.randn(3, 3, height, width, generator=torch.Generator("cpu").manual_seed(0), device="cpu")
    _check_state(model, images)  # also raises InputError for what cannot be measured at all
    passed = ["the model and every random generator are left as they were"]
    failures = []
    with running(model) as run:
        images = run.brought(images)
        found = survey(run.model, images[0])
        for check in (_check_outputs, _check_batches, _check_queries, _check_weights, _check_places):
            try:
                check(run.model, images, found)
                passed.append(_said(check))
            except AdapterError as error:
                failures.append(f"{_said(check)}: {error}")
    if failures:
        raise AdapterError(f"{type(model).__name__} fails {len(failures)} checks:\n" + "\n".join(failures))
    return AdapterReport(tuple(passed), tuple(map(_described, found.sites.values())), found.skipped)


def _said(check: Callable[..., None]) -> str:
    assert check.__doc__ is not None
    return check.__doc__.rstrip(".")


def _described(site: Site) -> str:
    geometry = site.geometry
    (rows, cols), windows = geometry.grid_size, len(geometry.query_places_WN2)
    keys = int(geometry.key_places_WM2[0, :, 0].isfinite().sum())
    others = geometry.key_places_WM2.shape[1] - keys
    parts = [f"{rows}×{cols} patches"]
    if windows > 1:
        parts.append(f"{windows} windows")
    parts.append(f"{keys} keys that are patches")
    if others:
        parts.append(f"{others} that are not")
    return f"{site.name}: {', '.join(parts)}"


def _check_state(model: nn.Module, images: Tensor) -> None:
    def state() -> list[Any]:
        hooks = torch.nn.modules.module
        modules = [(m.training, len(m._forward_hooks), len(m._forward_pre_hooks), *m.__dict__) for m in model.modules()]
        generators = [torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()]  # type: ignore[index]
        return [modules, generators, len(hooks._global_forward_hooks), len(hooks._global_forward_pre_hooks)]

    before = state()
    measure(model, images)
    if state() != before:
        raise AdapterError("measuring leaves the model or a random generator changed")


@torch.no_grad()
def _check_outputs(model: nn.Module, images: Tensor, found: Survey) -> None:
    """Outputs with and without the lens are bit-identical."""
    plain, again = (_tensors(model(images)) for _ in range(2))
    with AttentionTap(model, lambda *_: None, found.calling):
        watched = _tensors(model(images))
    if not _equal(plain, again):
        raise AdapterError("two plain forwards differ already: the model is random in eval mode")
    if not _equal(plain, watched):
        raise AdapterError("they differ")


def _check_batches(model: nn.Module, images: Tensor, found: Survey) -> None:
    """A batch of images gives what each gives alone."""
    batch, alone = (measure(model, images, batch_size=size) for size in (len(images), 1))
    for name in ("mad", "mad_std", "entropy"):
        one, other = getattr(batch, name), getattr(alone, name)
        worst = float(np.nanmax(np.abs(one - other)))
        if worst > 1e-3:  # half precision; a wrong order of images and heads is off by far more
            raise AdapterError(f"{name} differs by {worst:.2g}")


def _check_queries(model: nn.Module, images: Tensor, found: Survey) -> None:
    """Every patch is a query once in each layer."""
    asked: dict[tuple[str, tuple[int, int]], list[Tensor]] = {}
    for site in found.sites.values():  # several in a module may be one attention in parts
        module = site.name.partition("#")[0]
        asked.setdefault((module, site.geometry.grid_size), []).append(site.geometry.query_places_WN2.flatten(0, 1))
    for (module, (rows, cols)), places in asked.items():
        place_Q2 = torch.cat(places)
        place_Q2 = place_Q2[place_Q2[:, 0].isfinite()].unique(dim=0)
        lines = [(place_Q2[:, axis].unique(), side) for axis, side in enumerate((rows, cols))]
        is_grid = len(lines[0][0]) * len(lines[1][0]) == len(place_Q2)
        if not is_grid or not all(_spans(*axis) for axis in lines):
            raise AdapterError(f"{module} has {len(place_Q2)} queries for {rows}×{cols} patches")


def _spans(lines: Tensor, side: int) -> bool:
    """Whether rows or columns go from border to border of a side; fewer than there are cells lie farther apart."""
    step = float(lines.diff().max()) if len(lines) > 1 else side
    return float(lines[0]) < step and side - 1 - float(lines[-1]) < step


@torch.no_grad()
def _check_weights(model: nn.Module, images: Tensor, found: Survey) -> None:
    """Weights of the same query sum to one."""
    worst: dict[str, float] = {}

    def look(call: Call, candidates: Sequence[Callable[[], Attention]]) -> None:
        site = found.sites.get(call)
        if site is not None and isinstance(attention := candidates[site.operand](), ExplicitAttention):
            sums = attention.weights.double().sum(site.axes[1])
            worst[site.name] = float((sums - 1).abs().max())

    with AttentionTap(model, look):
        model(images)
    for name, error in worst.items():
        if error > 0.05:
            raise AdapterError(f"those of {name} are off by {error:.2g}")


@torch.no_grad()
def _check_places(model: nn.Module, images: Tensor, found: Survey) -> None:
    """Changing part of the image changes the tokens that are said to lie there most."""
    call, site = next(iter(found.sites.items()))
    rows, cols = site.geometry.grid_size
    place_KM2 = site.geometry.key_places_WM2.flatten(0, 1)
    is_patch = place_KM2[:, 0].isfinite()
    # A pooled key is changed as a whole; and convolutions before the first attention blur by about a token.
    extent = max(1, round((rows * cols / len(place_KM2[is_patch].unique(dim=0))) ** 0.5))
    height, width = images.shape[-2] / rows, images.shape[-1] / cols
    changed, cells = (
        [images[0]],
        sorted({(0, 0), (rows // 2, cols // 3), (rows - extent, cols - extent), (0, cols - extent)}),
    )
    for row, col in cells:
        image = images[0].clone()
        lines = slice(round(row * height), round((row + extent) * height))
        window = image[:, lines, round(col * width) : round((col + extent) * width)]
        window.copy_(-2 * window + 1)
        changed.append(image)
    changes = _changes_of_keys(model, torch.stack(changed), call, site)
    if not changes.any():
        return  # attention from positions alone: its keys are the same for every image
    for (row, col), change_M in zip(cells, changes, strict=True):
        largest = place_KM2[int(torch.where(is_patch, change_M, -1.0).argmax())]
        middle = largest.new_tensor([row, col]) + (extent - 1) / 2
        if float((largest - middle).abs().max()) > extent + 0.5:
            raise AdapterError(
                f"after a change at row {row}, column {col} of {rows}×{cols} the token said to lie at "
                f"({float(largest[0]):g}, {float(largest[1]):g}) changed most in {site.name}"
            )


def _changes_of_keys(model: nn.Module, images: Tensor, call: Call, site: Site) -> Tensor:
    """How much the keys of an attention differ from those of the first image: [images − 1, windows · keys]."""
    seen: list[Tensor] = []
    arrange = site.geometry.layout.arrange
    no_patch_WN = site.geometry.query_places_WN2[..., 0].isnan()

    def look(other: Call, candidates: Sequence[Callable[[], Attention]]) -> None:
        if other != call:
            return
        attention = candidates[site.operand]()
        if isinstance(attention, FusedAttention):
            key = arrange(attention.key).double()
            seen.append((key[1:] - key[:1]).norm(dim=-1).sum(2))
        else:
            weights = arrange(attention.weights.movedim(site.axes, (-2, -1))).double()
            logs = weights.clamp(min=torch.finfo(torch.float32).tiny).log()
            # Less its mean, since a softmax lowers all other keys of a query when one of them rises; and the median
            # over queries, since the queries that lie in the changed part change towards every key. Over patches alone:
            # padding, which most of a window may be, asks for nothing.
            logs = logs - logs.mean(-1, keepdim=True)
            change = (logs[1:] - logs[:1]).abs()
            change = change.masked_fill(no_patch_WN[:, None, :, None].to(change.device), torch.nan)
            seen.append(change.nanmedian(dim=-2).values.nan_to_num(0.0).sum(2))

    with AttentionTap(model, look):
        model(images)
    return seen[0].flatten(1).cpu()


def _tensors(output: Any) -> list[Tensor]:
    return [
        leaf for leaf in tree_leaves(dict(output) if hasattr(output, "keys") else output) if isinstance(leaf, Tensor)
    ]


def _equal(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
