"""`check_vit_adapter`: does the lens see your model right? Checks to run on a model of your own."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from nearsight.lens import inputs
from nearsight.lens.attention import Attention, ExplicitAttention, FusedAttention
from nearsight.lens.capture import AttentionTap, Call
from nearsight.lens.geometry import declared_grid
from nearsight.lens.inputs import Batch
from nearsight.lens.measuring import measure
from nearsight.lens.running import running
from nearsight.lens.stream import in_full_precision, tiles
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


def check_vit_adapter(
    model: nn.Module,
    image_size: int | tuple[int, int],
    *,
    channels: int = 3,
    call: inputs.Call | None = None,
    grid: tuple[int, int] | None = None,
    prefix: int | None = None,
) -> AdapterReport:
    """Check that `nearsight.measure` sees a model right, for images of this size (in pixels; height and width).

    Among other things: outputs are bit-identical with and without the lens; the model and all random generators are
    left as they were; a batch gives what its images give alone; every patch is a query once in each layer; each
    attention's output is what its map and its values give; and, found by changing the image and looking at what
    changes, tokens lie where the lens believes they lie. What the lens says of a layer is in the report; read it, since
    only you know what your model was meant to do. `call`, `grid` and `prefix` are those of `measure`.

    Raises:
        AdapterError: naming each check that failed.
        InputError: if the model has no spatial attention, or does not take such images.
    """
    height, width = (image_size, image_size) if isinstance(image_size, int) else image_size
    images = torch.randn(3, channels, height, width, generator=torch.Generator("cpu").manual_seed(0), device="cpu")
    said: dict[str, Any] = {"call": call, "grid": grid, "prefix": prefix}
    _check_state(model, images, said)  # also raises InputError for what cannot be measured at all
    passed = ["the model and every random generator are left as they were"]
    failures = []
    with running(model) as run:
        (batch,) = (one.to(run.device, run.dtype) for one in inputs.batches(images, len(images), call=call))
        found = survey(run.model, batch, declared_grid(grid, prefix))
        asked = _Asked(run.model, batch, found, said)
        for check in (_check_outputs, _check_batches, _check_queries, _check_maps, _check_places):
            try:
                check(asked)
                passed.append(_said(check))
            except AdapterError as error:
                failures.append(f"{_said(check)}: {error}")
    if failures:
        raise AdapterError(f"{type(model).__name__} fails {len(failures)} checks:\n" + "\n".join(failures))
    return AdapterReport(tuple(passed), tuple(map(_described, found.sites.values())), found.skipped)


@dataclass(frozen=True)
class _Asked:
    """What is checked: a model that is running, images for it, and what the lens has found."""

    model: nn.Module
    batch: Batch
    found: Survey
    said: Mapping[str, Any]
    """The caller's options for the model: call, grid, prefix."""

    def run(self, images: Tensor) -> list[Tensor]:
        """All that the model gives for such images, one by one where it takes them so."""
        batch = self.batch.with_images(images)
        parts = batch.one_by_one() if self.found.is_alone else [batch]
        return [tensor for part in parts for tensor in _tensors(part.run(self.model))]


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


def _check_state(model: nn.Module, images: Tensor, said: Mapping[str, Any]) -> None:
    def state() -> list[Any]:
        hooks = torch.nn.modules.module
        modules = [(m.training, len(m._forward_hooks), len(m._forward_pre_hooks), *m.__dict__) for m in model.modules()]
        generators = [torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()]  # type: ignore[index]
        return [modules, generators, len(hooks._global_forward_hooks), len(hooks._global_forward_pre_hooks)]

    before = state()
    measure(model, images, **said)
    if state() != before:
        raise AdapterError("measuring leaves the model or a random generator changed")


@torch.no_grad()
def _check_outputs(asked: _Asked) -> None:
    """Outputs with and without the lens are bit-identical."""
    plain, again = (asked.run(asked.batch.images) for _ in range(2))
    with AttentionTap(asked.model, lambda *_: None, asked.found.calling):
        watched = asked.run(asked.batch.images)
    if not _equal(plain, again):
        raise AdapterError("two plain forwards differ already: the model is random in eval mode")
    if not _equal(plain, watched):
        raise AdapterError("they differ")


def _check_batches(asked: _Asked) -> None:
    """A batch of images gives what each gives alone."""
    images = asked.batch.images
    batch, alone = (measure(asked.model, images, batch_size=size, **asked.said) for size in (len(images), 1))
    for name in ("mad", "mad_std", "entropy"):
        one, other = getattr(batch, name), getattr(alone, name)
        worst = float(np.nanmax(np.abs(one - other), initial=0.0))
        if worst > 1e-3:  # half precision; a wrong order of images and heads is off by far more
            raise AdapterError(f"{name} differs by {worst:.2g}")


def _check_queries(asked: _Asked) -> None:
    """Every patch is a query once in each layer."""
    queries: dict[tuple[str, tuple[int, int]], list[Tensor]] = {}
    for site in asked.found.sites.values():  # several in a module may be one attention in parts
        module = site.name.partition("#")[0]
        queries.setdefault((module, site.geometry.grid_size), []).append(site.geometry.query_places_WN2.flatten(0, 1))
    for (module, (rows, cols)), places in queries.items():
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
def _check_maps(asked: _Asked) -> None:
    """Maps times values give each attention's own output, and values come from the image."""
    values = []
    for image in asked.batch.images[:2].split(1):
        with _Rebuilding(asked.model, asked.found) as rebuilding:
            asked.run(image)
        values.append(rebuilding.values)
    for name, (one, other) in ((name, (values[0][name], values[1][name])) for name in values[0]):
        if _equal(one, other):
            raise AdapterError(f"what the weights of {name} multiply does not change with the image")


class _Rebuilding(AttentionTap):
    """Computes the output of each attention again, from the map that is measured."""

    def __init__(self, model: nn.Module, found: Survey) -> None:
        super().__init__(model, self._look, found.calling)
        self._found = found
        self._seen: list[tuple[Site, Attention, Sequence[Callable[[], Attention]]]] = []
        """The attention of the call that is being looked at, if it is one."""
        self.values: dict[str, list[Tensor]] = {}
        """By layer, what the weights were multiplied with."""

    def _look(self, call: Call, candidates: Sequence[Callable[[], Attention]]) -> None:
        if (site := self._found.sites.get(call)) is not None:
            self._seen.append((site, candidates[site.operand](), candidates))

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self._seen.clear()
        kwargs = kwargs or {}
        output = super().__torch_function__(func, types, args, kwargs)
        for site, attention, candidates in self._seen:
            with torch._C.DisableTorchFunction(), in_full_precision(output.device):
                if isinstance(attention, ExplicitAttention):
                    self._compare_product(site, attention, candidates, output, partial(func, **kwargs), args)
                elif func is not F.multi_head_attention_forward:
                    value = kwargs["value"] if "value" in kwargs else args[2]
                    self._compare(site, _map_of(attention, site, output.shape[:-2]) @ _for_heads(value, output), output)
        return output

    def _multihead(self, module: nn.MultiheadAttention, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._seen.clear()
        output = super()._multihead(module, forward, *args, **kwargs)
        for site, attention, _ in self._seen:
            settings = {**kwargs, "need_weights": True, "average_attn_weights": False}
            with torch._C.DisableTorchFunction():
                _, own = forward(*args, **settings)
            own = own if own.dim() == 4 else own[None]
            self._compare(site, _map_of(attention, site, own.shape[:-2]), own)
        return output

    def _compare_product(
        self,
        site: Site,
        attention: ExplicitAttention,
        candidates: Sequence[Callable[[], Attention]],
        output: Tensor,
        product: Callable[..., Tensor],
        args: Sequence[Any],
    ) -> None:
        weights = attention.weights
        factors = [factor for candidate in candidates if isinstance(factor := candidate(), ExplicitAttention)]
        others = [factor.weights for factor in factors if factor.operand != site.operand]
        if any(other is weights for other in others):
            raise AdapterError(f"the weights of {site.name} multiply weights, not values")
        self.values[site.name] = others
        first = weights.movedim(site.axes, (-2, -1))
        rebuilt = _map_of(attention, site, first.shape[:-2])
        rebuilt = torch.where(rebuilt.isnan(), first.to(rebuilt), rebuilt).movedim((-2, -1), site.axes)

        def replaced(leaf: Any) -> Any:
            if leaf is weights:
                return rebuilt
            return leaf.double() if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf

        self._compare(site, product(*tree_map(replaced, tuple(args))), output)

    def _compare(self, site: Site, rebuilt: Tensor, output: Tensor) -> None:
        looking = rebuilt.isfinite()
        scale = float(output.abs().max())
        error = float(torch.where(looking, rebuilt.to(output) - output, 0.0).abs().max())
        if error > (2e-2 if output.dtype in (torch.float16, torch.bfloat16) else 1e-3) * scale:
            raise AdapterError(f"{site.name} gives another output than its map does: off by {error / scale:.2g} of it")


def _map_of(attention: Attention, site: Site, shape: Sequence[int]) -> Tensor:
    """All of the map that is measured, as the model's own axes have it: float64 [L..., N, M]."""
    parts = [tile.log_weights_BWHTM for tile in tiles(attention, site, dtype=torch.float64, whole=True)]
    return site.geometry.layout.restore(torch.cat(parts, dim=-2).softmax(-1), shape)


def _for_heads(value: Tensor, output: Tensor) -> Tensor:
    """Values [..., H, M, d] of all heads, where several heads share some."""
    if value.dim() > 2 and value.shape[-3] != output.shape[-3]:
        value = value.repeat_interleave(output.shape[-3] // value.shape[-3], dim=-3)
    return value.double()


@torch.no_grad()
def _check_places(asked: _Asked) -> None:
    """Changing part of the image changes the tokens that are said to lie there most."""
    images = asked.batch.images
    call, site = next(iter(asked.found.sites.items()))
    rows, cols = site.geometry.grid_size
    # Keys that are pooled along the sequence form no grid and say little about places: then the queries are used.
    by_query = not _is_grid(site.geometry.key_places_WM2)
    place_KM2 = (site.geometry.query_places_WN2 if by_query else site.geometry.key_places_WM2).flatten(0, 1)
    is_patch = place_KM2[:, 0].isfinite()
    # A pooled key is changed as a whole; and convolutions before the first attention blur by about a token.
    down, right = (
        max(1, round(side / len(lines.unique())))
        for side, lines in zip((rows, cols), place_KM2[is_patch].T, strict=True)
    )
    height, width = images.shape[-2] / rows, images.shape[-1] / cols
    changed, cells = (
        [images[0]],
        sorted({(0, 0), (rows // 2, cols // 3), (rows - down, cols - right), (0, cols - right)}),
    )
    for row, col in cells:
        image = images[0].clone()
        lines = slice(round(row * height), round((row + down) * height))
        window = image[:, lines, round(col * width) : round((col + right) * width)]
        window.copy_(-2 * window + 1)
        changed.append(image)
    changes = _changes_of_keys(asked, torch.stack(changed), call, site, by_query)
    if changes is None or not changes.any():
        return  # attention from positions alone: its keys are the same for every image
    for (row, col), change_M in zip(cells, changes, strict=True):
        largest = place_KM2[int(torch.where(is_patch, change_M, -1.0).argmax())]
        extent = largest.new_tensor([down, right])
        middle = largest.new_tensor([row, col]) + (extent - 1) / 2
        if bool(((largest - middle).abs() > extent + 0.5).any()):
            raise AdapterError(
                f"after a change at row {row}, column {col} of {rows}×{cols} the token said to lie at "
                f"({float(largest[0]):g}, {float(largest[1]):g}) changed most in {site.name}"
            )


def _is_grid(places_WM2: Tensor) -> bool:
    places = places_WM2[places_WM2[..., 0].isfinite()].unique(dim=0)
    return len(places[:, 0].unique()) * len(places[:, 1].unique()) == len(places)


def _changes_of_keys(asked: _Asked, images: Tensor, call: Call, site: Site, by_query: bool) -> Tensor | None:
    """How much the keys of an attention differ from those of the first image, [images − 1, windows · keys], or its
    queries; None if they cannot be read."""
    keys: list[Tensor] = []
    logs: list[Tensor] = []
    arrange = site.geometry.layout.arrange

    def look(other: Call, candidates: Sequence[Callable[[], Attention]]) -> None:
        if other != call:
            return
        attention = candidates[site.operand]()
        if isinstance(attention, FusedAttention):
            keys.append(arrange(attention.query if by_query else attention.key).double())
        elif (key := _values_of(attention, candidates, site)) is not None and not by_query:
            keys.append(arrange(key).double())
        elif not by_query:
            weights = arrange(attention.weights.movedim(site.axes, (-2, -1))).double()
            logs.append(weights.clamp(min=torch.finfo(torch.float32).tiny).log())

    for part in images.split(1) if asked.found.is_alone else [images]:
        with AttentionTap(asked.model, look):
            asked.run(part)
    if keys:
        key_BWHMd = torch.cat(keys)
        change_BWHM: Tensor = (key_BWHMd[1:] - key_BWHMd[:1]).norm(dim=-1)
        return change_BWHM.sum(2).flatten(1).cpu()
    if not logs:
        return None
    # Less its mean, since a softmax lowers all other keys of a query when one of them rises; and the median over
    # queries, since the queries that lie in the changed part change towards every key. Over patches alone: padding,
    # which most of a window may be, is left out.
    log_BWHNM = torch.cat(logs)
    log_BWHNM = log_BWHNM - log_BWHNM.mean(-1, keepdim=True)
    no_patch_WN = site.geometry.query_places_WN2[..., 0].isnan().to(log_BWHNM.device)
    change = (log_BWHNM[1:] - log_BWHNM[:1]).abs().masked_fill(no_patch_WN[:, None, :, None], torch.nan)
    return change.nanmedian(dim=-2).values.nan_to_num(0.0).sum(2).flatten(1).cpu()


def _values_of(
    attention: ExplicitAttention, candidates: Sequence[Callable[[], Attention]], site: Site
) -> Tensor | None:
    """What explicit weights multiply, [L..., M, d], where its axes are those of the weights; otherwise None."""
    weights = attention.weights.movedim(site.axes, (-2, -1))
    for candidate in candidates:
        factor = candidate()
        assert isinstance(factor, ExplicitAttention)
        value = factor.weights if site.axes[1] % weights.dim() == weights.dim() - 1 else factor.weights.mT
        if factor.operand != site.operand and value.shape[:-1] == (*weights.shape[:-2], weights.shape[-1]):
            return value
    return None


def _tensors(output: Any) -> list[Tensor]:
    return [
        leaf for leaf in tree_leaves(dict(output) if hasattr(output, "keys") else output) if isinstance(leaf, Tensor)
    ]


def _equal(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
