"""Changing what heads attend to while an unmodified model runs: does it matter where they look?

The tap that sees every attention also says what is computed instead. Heads that no plan names give what they always
give; of those that one does, the map is made tile by tile, changed by the plan, and multiplied with the values.

Shape suffixes: B images, W windows, H heads, T queries of a tile, N queries, M keys, v channels of a value.
"""

import math
import operator
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nearsight.errors import InputError
from nearsight.lens import inputs
from nearsight.lens.attention import Attention, ExplicitAttention, FusedAttention
from nearsight.lens.capture import OPAQUE, AttentionTap, Call, Change, current_depth, unseen
from nearsight.lens.geometry import Declared, declared_grid
from nearsight.lens.inputs import Batch
from nearsight.lens.layout import Layout
from nearsight.lens.plans import AverageMaps, Heads, Mean, Plan, Zero
from nearsight.lens.running import MEASURING, check_model, running, surveyed, uncompiled, without_gradients
from nearsight.lens.stream import Tile, in_full_precision, tiles
from nearsight.lens.survey import Site, Survey
from nearsight.lens.table import layer_positions

_ARRANGED = Layout((), 0, (1,), (2,))
"""Of tensors that are [B, W, H, …] already."""
_MOST_BYTES = 2**31
"""Of average maps."""
_TILE_BYTES = 2**27
"""Of one tensor of a tile on a GPU: more than measuring takes, which has other work besides."""
Group = tuple[Plan, slice]
"""A plan, and the images of a batch that it is for."""


@contextmanager
def intervene(
    model: nn.Module,
    plan: Plan | Sequence[Plan],
    *,
    grid: tuple[int, int] | None = None,
    prefix: int | None = None,
) -> Iterator[nn.Module]:
    """While active, heads of the model attend to what a plan says; afterwards the model is as it was.

        with nearsight.intervene(model, Identity({4: [1]})):
            logits = model(images)

    Any model that `measure` understands, called as ever, with gradients or without, in the thread that entered. Several
    plans go together if no head is in two of them. The first forward on images of a size is preceded by a survey that
    finds out where its tokens lie (half a second).

    Args:
        model: a ViT, unmodified. Heads that no plan names compute what they always compute.
        plan: from `nearsight.lens`: `Zero`, `Identity`, `Uniform`, `Reach`, `Mean`, `Offsets`, `DropSinks`,
            `OnlySinks`, each for some heads of some layers, which count from 0 as `measure` counts them.
        grid, prefix: as for `measure`.

    What cannot be changed exactly is refused by name: layers that `measure` skips, plans that a layer's places do not
    allow and videos, when the model is first called; and calls of its parts, such as `model.forward_features(images)`.
    """
    plans = [plan] if isinstance(plan, Plan) else list(plan)
    for one in plans:
        if not isinstance(one, Plan):
            raise InputError(f"a plan is one of nearsight.lens, such as Identity({{4: [1]}}), not {one!r}")
    with intervening(model, [(one, slice(None)) for one in plans], declared_grid(grid, prefix)):
        yield model


@contextmanager
def intervening(model: nn.Module, groups: Sequence[Group], declared: Declared | None = None) -> Iterator[None]:
    """As `intervene`, with plans that are for some images of each batch."""
    model = getattr(model, "_orig_mod", model)  # a compiled model: what it was compiled from
    check_model(model)
    intervention = _Intervention(model, groups, declared)
    with ExitStack() as undo:
        if any(isinstance(module, OPAQUE) for module in model.modules()):
            # Their forward is replaced, for which threads take turns, as for measuring.
            undo.enter_context(MEASURING)
        undo.enter_context(uncompiled())
        undo.enter_context(intervention)
        handle = model.register_forward_pre_hook(intervention.before, with_kwargs=True)
        undo.callback(handle.remove)
        undo.callback(model.register_forward_hook(intervention.after, always_call=True).remove)
        opaque = {inner for module in model.modules() if isinstance(module, OPAQUE) for inner in module.modules()}
        for module in set(model.modules()) - opaque - {model}:  # those compute in another way if they have hooks
            undo.callback(module.register_forward_pre_hook(intervention.check_called).remove)
        yield


@dataclass(frozen=True)
class _Part:
    """Some heads of one attention, for some images of a batch, and what they do instead."""

    plan: Plan
    heads: tuple[int, ...]
    images: slice
    prepared: Any

    def goes_on(self, other: "_Part") -> bool:
        """Whether other images come next, in which as many heads do the same."""
        ours, theirs = ({**vars(part.plan), "heads": None} for part in (self, other))
        return (
            type(self.plan) is type(other.plan)
            and self.prepared is other.prepared is None
            and len(self.heads) == len(other.heads)
            and self.images.stop is not None
            and self.images.stop == other.images.start
            and self.images.stop - self.images.start == other.images.stop - other.images.start
            and ours == theirs
        )


class _Chosen:
    """The heads of parts that go on from one another, which are changed as one: a GPU would wait for a launch each."""

    def __init__(self, parts: Sequence[_Part], device: torch.device) -> None:
        self.plan, self.prepared, self.heads = parts[0].plan, parts[0].prepared, parts[0].heads
        self._images = slice(parts[0].images.start, parts[-1].images.stop)
        self._of_all = range(len(parts)), [part.heads for part in parts]
        self._index_GK: tuple[Tensor, Tensor] | None = None
        if len(parts) > 1:
            number_G1, heads_GK = (torch.tensor(list(which), device=device) for which in self._of_all)
            self._index_GK = number_G1[:, None], heads_GK

    def of(self, tensor_BWHNx: Tensor) -> Tensor:
        """Of their images, their part: [B, W, K, N, x]."""
        tensor_BWHNx = tensor_BWHNx[self._images]
        if self._index_GK is None:
            return tensor_BWHNx[:, :, list(self.heads)]
        number_G1, heads_GK = self._index_GK
        chosen_GKBWNx: Tensor = tensor_BWHNx.unflatten(0, (len(heads_GK), -1))[number_G1, :, :, heads_GK]
        return chosen_GKBWNx.movedim(1, 3).flatten(0, 1)

    def put(self, tensor_BWHNx: Tensor, queries: slice, values_BWKTx: Tensor) -> None:
        """Into their part; a single number into all of it."""
        tensor_BWHNx = tensor_BWHNx[self._images]
        if self._index_GK is None:
            tensor_BWHNx[:, :, list(self.heads), queries] = values_BWKTx
            return
        number_G1, heads_GK = self._index_GK
        if values_BWKTx.dim():
            values_BWKTx = values_BWKTx.unflatten(0, (len(heads_GK), -1)).movedim(3, 1)
        tensor_BWHNx.unflatten(0, (len(heads_GK), -1))[number_G1, :, :, heads_GK, queries] = values_BWKTx


def _joined(parts: Sequence[_Part], site: Site, device: torch.device) -> Iterator[_Chosen]:
    """As few as there can be: one for those that go on from one another."""
    of_each_head = site.hidden_WHNM is not None and site.hidden_WHNM.shape[1] > 1
    group: list[_Part] = []
    for part in parts:
        if group and not of_each_head and group[-1].goes_on(part):
            group.append(part)
            continue
        if group:
            yield _Chosen(group, device)
        group = [part]
    if group:
        yield _Chosen(group, device)


_active = threading.local()
"""Of this thread, from the outermost: `_active.interventions`."""


class _Intervention:
    """The taps of a model, by what its images are like, of which the last one is active."""

    def __init__(self, model: nn.Module, groups: Sequence[Group], declared: Declared | None) -> None:
        self._model, self._groups, self._declared = model, groups, declared
        self._depth = current_depth()
        self._thread = threading.get_ident()
        self._known: dict[tuple[object, ...], tuple[Survey, dict[Call, list[_Part]]]] = {}
        self._averages: dict[int, AverageMaps] = {}
        self._found: Survey | None = None
        self._parts: dict[Call, list[_Part]] = {}
        self._tap: AttentionTap | None = None
        self._undo = ExitStack()
        self._called_at: set[int] = set()
        """Depths: while a forward is prepared for, others run below it."""
        self._around: list[_Intervention] = []
        """Those that were active before."""

    def __enter__(self) -> None:
        self._around = getattr(_active, "interventions", [])
        _active.interventions = [*self._around, self]

    def __exit__(self, *exception: Any) -> None:
        _active.interventions = self._around
        self._undo.close()

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> None:
        """Before each forward: make sure that it is known where these images' tokens are.

        (While a thread removes its hooks, torch may call them in others without `kwargs`.)
        """
        if kwargs is None or threading.get_ident() != self._thread:
            return
        if current_depth() == self._depth:
            self._begin(module, args, kwargs)
        self._called_at.add(current_depth())

    def after(self, *_: Any) -> None:
        if threading.get_ident() == self._thread:
            self._called_at.discard(current_depth())

    def check_called(self, *_: Any) -> None:
        """Before each forward of a part: one that nobody prepared for would be computed unchanged."""
        if threading.get_ident() == self._thread and current_depth() not in self._called_at:
            raise InputError(
                f"plans change {type(self._model).__name__} when it is called itself, as model(images); "
                "forward_features, forward_intermediates and calls of its parts go around them"
            )

    def _begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        batch = _batch(module, args, kwargs)
        if (key := batch.key) not in self._known:
            with unseen():
                self._known[key] = self._prepare(batch)
        found, self._parts = self._known[key]
        if found.is_alone and len(batch) > 1:
            raise InputError("this model makes one sequence of all images; give it one at a time")
        if found is not self._found:
            self._undo.close()
            self._found, self._tap = found, AttentionTap(module, self._on_attention, found.calling, changes=True)
            self._undo.enter_context(self._tap)
        assert self._tap is not None
        self._tap.begin()

    def _prepare(self, batch: Batch) -> tuple[Survey, dict[Call, list[_Part]]]:
        with running(self._model) as run:
            found = surveyed(run.model, batch.to(run.device, run.dtype), self._declared)
        if "" in found.calling and not isinstance(self._model, OPAQUE):
            raise InputError(f"{type(self._model).__name__} computes its attention itself; put it into a module")
        parts: dict[Call, list[_Part]] = {}
        for plan, images in self._groups:
            chosen = chosen_heads(found, plan.heads)
            averages = self._average(plan, chosen)
            for call, site in found.sites.items():
                if site.layer not in chosen:
                    continue
                heads, others = chosen[site.layer], parts.setdefault(call, [])
                if site.geometry.num_frames > 1:
                    raise InputError(f"{site.name}: attention over the frames of a video is not changed by plans")
                around = [part for one in self._around for part in one._parts_of(found.calling[call.layer_name], call)]
                taken = {head for other in (*others, *around) if other.images == images for head in other.heads}
                if twice := taken & set(heads):
                    raise InputError(f"{site.layer}: head {min(twice)} is in two plans")
                prepared = plan.prepare(site, heads, averages)
                if isinstance(prepared, Tensor):
                    prepared = prepared.to(batch.images.device, torch.promote_types(batch.images.dtype, torch.float32))
                others.append(_Part(plan, heads, images, prepared))
        return found, parts

    def _average(self, plan: Plan, chosen: Mapping[str, Sequence[int]]) -> AverageMaps | None:
        if not isinstance(plan, Mean) or isinstance(plan.reference, AverageMaps):
            return getattr(plan, "reference", None)
        if id(plan) not in self._averages:
            self._averages[id(plan)] = _average_maps(self._model, plan.reference, chosen, self._declared)
        return self._averages[id(plan)]

    def _on_attention(self, call: Call, candidates: Sequence[Callable[[], Attention]]) -> Change | None:
        assert self._found is not None
        parts = self._parts.get(call, [])
        if not parts:
            return None
        site = self._found.sites[call]
        attention = candidates[site.operand]()
        if isinstance(attention, ExplicitAttention):
            return lambda compute: compute(site.operand, _changed_weights(attention, site, parts))
        if attention.finish is not None:
            # Its heads are mixed in what it returns, so that one change makes those of all interventions.
            module = self._found.calling[call.layer_name]
            parts = [part for other in self._around for part in other._parts_of(module, call)] + parts
        return lambda compute: _changed_output(attention, site, parts, compute)

    def _parts_of(self, module: nn.Module, call: Call) -> list[_Part]:
        """What is changed in a call of a module, which may have another name here."""
        return [
            part
            for own, parts in self._parts.items()
            if self._found is not None and self._found.calling[own.layer_name] is module
            if (own.kind, own.number) == (call.kind, call.number)
            for part in parts
        ]


def _batch(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Batch:
    """What a forward is given, as the survey takes it."""
    if args:
        first, *rest = args
        if not isinstance(first, Tensor) or first.dim() != 4 or not first.is_floating_point():
            raise InputError("a model whose heads are changed is called with images [B, C, H, W] first, or by name")
        return Batch(first, lambda model, images, others: model(images, *rest, **others), kwargs)
    return next(inputs.batches(kwargs, len(next(iter(kwargs.values()))), model=model))


def chosen_heads(found: Survey, heads: Heads) -> dict[str, tuple[int, ...]]:
    """Layer → heads, of layers and heads that the model has."""
    names = list(found.layers)
    if heads is None:
        return {name: tuple(range(site.num_heads)) for name, site in found.layers.items()}
    chosen: dict[str, tuple[int, ...]] = {}
    for name, which in zip((names[at] for at in layer_positions(names, list(heads))), heads.values(), strict=True):
        count = found.layers[name].num_heads
        numbers = tuple(range(count)) if which is None else tuple(dict.fromkeys(_head_numbers(name, which)))
        if wrong := [head for head in numbers if not 0 <= head < count]:
            raise InputError(f"{name} has {count} heads, which count from 0: there is no head {wrong[0]}")
        chosen[name] = numbers
    return chosen


def _head_numbers(name: str, which: Any) -> list[int]:
    try:
        return [operator.index(head) for head in which]
    except TypeError:
        raise InputError(f"heads of {name} are a list of numbers from 0, or None for all, not {which!r}") from None


def _changed_output(attention: FusedAttention, site: Site, parts: Sequence[_Part], compute: Callable[[], Any]) -> Any:
    """What fused attention returns with some of its heads changed."""
    assert attention.value is not None
    if attention.finish is None:
        output = compute()
    else:  # what the model's own call returns has the heads mixed already
        with torch.no_grad():
            compute()  # for others who look
        output = F.scaled_dot_product_attention(
            attention.query,
            attention.key,
            attention.value,
            attention.mask,
            0.0,
            attention.is_causal,
            scale=attention.scale,
        )
    arrange = site.geometry.layout.arrange
    with torch._C.DisableTorchFunction(), in_full_precision(output.device):
        output_BWHNv, value_BWHMv = arrange(output).clone(), arrange(attention.value)
        weights_BWHNM = _weights(attention, site) if attention.finish and attention.finish.needs_weights else None
        for chosen in _joined(parts, site, output.device):
            if isinstance(chosen.plan, Zero):
                for tensor in (output_BWHNv, weights_BWHNM):
                    if tensor is not None:
                        chosen.put(tensor, slice(None), tensor.new_zeros(()))
                continue
            values_BWHMv = chosen.of(value_BWHMv)
            one = _chosen_part(attention, site, chosen)
            for queries, new_BWHTM in _changed_rows(one, _arranged(site, chosen.heads), chosen):
                chosen.put(output_BWHNv, queries, (new_BWHTM @ values_BWHMv.to(new_BWHTM.dtype)).to(output.dtype))
                if weights_BWHNM is not None:
                    chosen.put(weights_BWHNM, queries, new_BWHTM.to(output.dtype))
        changed_output = site.geometry.layout.restore(output_BWHNv, output.shape[:-2])
        if weights_BWHNM is not None:
            weights_BWHNM = site.geometry.layout.restore(weights_BWHNM, output.shape[:-2])
    if attention.finish is None:
        return changed_output
    with torch._C.DisableTorchFunction():
        return attention.finish(changed_output, weights_BWHNM)


def _changed_weights(attention: ExplicitAttention, site: Site, parts: Sequence[_Part]) -> Tensor:
    """Weights that a model holds in memory, with those of some heads changed."""
    weights = attention.weights.movedim(site.axes, (-2, -1))
    with torch._C.DisableTorchFunction(), in_full_precision(weights.device):
        weights_BWHNM = site.geometry.layout.arrange(weights).clone()
        for chosen in _joined(parts, site, weights.device):
            if isinstance(chosen.plan, Zero):
                chosen.put(weights_BWHNM, slice(None), weights.new_zeros(()))
                continue
            one = ExplicitAttention(chosen.of(weights_BWHNM), site.operand)
            for queries, new_BWHTM in _changed_rows(one, _arranged(site, chosen.heads), chosen):
                chosen.put(weights_BWHNM, queries, new_BWHTM.to(weights.dtype))
        restored = site.geometry.layout.restore(weights_BWHNM, weights.shape[:-2])
        return restored.movedim((-2, -1), site.axes)


def _arranged(site: Site, heads: Sequence[int]) -> Site:
    """The site of the chosen heads, whose axes are in order."""
    hidden = site.hidden_WHNM
    if hidden is not None and hidden.shape[1] > 1:
        hidden = hidden[:, list(heads)]
    geometry = replace(site.geometry, layout=_ARRANGED)
    return replace(site, geometry=geometry, num_heads=len(heads), axes=(-2, -1), hidden_WHNM=hidden)


def _all_images(heads: tuple[int, ...], device: torch.device) -> _Chosen:
    return _Chosen([_Part(Zero(), heads, slice(None), None)], device)


def _chosen_part(attention: FusedAttention, site: Site, chosen: _Chosen) -> FusedAttention:
    arrange, mask = site.geometry.layout.arrange, attention.mask
    if mask is not None:
        mask = chosen.of(arrange(mask.expand(*attention.query.shape[:-1], attention.key.shape[-2])))
    query, key = (chosen.of(arrange(tokens)) for tokens in (attention.query, attention.key))
    return FusedAttention(query, key, attention.scale, mask, attention.is_causal)


def _weights(attention: FusedAttention, site: Site) -> Tensor:
    whole = _all_images(tuple(range(site.num_heads)), attention.query.device)
    found = tiles(_chosen_part(attention, site, whole), _arranged(site, whole.heads), whole=True)
    return torch.cat([tile.log_weights_BWHTM.softmax(-1) for tile in found], dim=-2).to(attention.query.dtype)


def _changed_rows(attention: Attention, site: Site, chosen: _Chosen) -> Iterator[tuple[slice, Tensor]]:
    """Some queries at a time, with what they attend to by the plan: [B, W, H, T, M]."""
    dtype = torch.promote_types(attention.dtype, torch.float32)
    known = chosen.plan.look(attention, site, dtype, chosen.prepared)
    start = 0
    tile_bytes = _TILE_BYTES if attention.device.type == "cuda" else None
    for tile in tiles(attention, site, dtype=dtype, whole=True, tile_bytes=tile_bytes):
        queries = slice(start, start + tile.log_weights_BWHTM.shape[-2])
        yield queries, _respread(tile, chosen.plan, chosen.plan.log_spread(tile, queries, known))
        start = queries.stop


def _respread(tile: Tile, plan: Plan, log_spread: Tensor) -> Tensor:
    """The rows of a tile as a plan wants them."""
    log_BWHTM = tile.log_weights_BWHTM
    weights_BWHTM = _softmax(log_BWHTM)
    other_W11M = tile.keys_WM2[:, None, None, :, 0].isnan()
    if tile.shown is not None:
        log_spread = log_spread.masked_fill(~tile.shown, -math.inf)
    if plan.prefix == "share":
        log_spread = torch.where(other_W11M, log_BWHTM, log_spread)
        new_BWHTM = _softmax(log_spread)
    else:
        log_spread = log_spread.masked_fill(other_W11M, -math.inf)
        new_BWHTM = _softmax(log_spread)
        if plan.prefix == "keep":
            to_others_BWHTM = torch.where(other_W11M, weights_BWHTM, 0.0)
            new_BWHTM = to_others_BWHTM + torch.where(other_W11M, 0.0, weights_BWHTM).sum(-1, keepdim=True) * new_BWHTM
    stays = (log_spread == -math.inf).all(-1, keepdim=True)
    if plan.rows == "patches":
        stays = stays | tile.queries_WT2[:, None, :, :1].isnan()
    return torch.where(stays, weights_BWHTM, new_BWHTM)


def _softmax(log_BWHTM: Tensor) -> Tensor:
    """0 in rows that have no key at all."""
    nothing = log_BWHTM.amax(-1, keepdim=True) == -math.inf
    return log_BWHTM.masked_fill(nothing, 0.0).softmax(-1).masked_fill(nothing, 0.0)


def average_maps(
    model: nn.Module,
    images: Tensor | Mapping[str, Any] | Iterable[Any],
    heads: Heads = None,
    *,
    batch_size: int = 64,
    device: torch.device | str | None = None,
    call: inputs.Call | None = None,
    grid: tuple[int, int] | None = None,
    prefix: int | None = None,
) -> AverageMaps:
    """What heads attend to on average over images of one size, for the plans `Mean` and `Offsets`.

    Arguments are those of `measure`; `heads` as plans take them. Averages are of whole rows, in float64.
    """
    return _average_maps(model, images, heads, declared_grid(grid, prefix), batch_size, device, call)


def _average_maps(
    model: nn.Module,
    images: Tensor | Mapping[str, Any] | Iterable[Any],
    heads: Heads,
    declared: Declared | None,
    batch_size: int = 64,
    device: torch.device | str | None = None,
    call: inputs.Call | None = None,
) -> AverageMaps:
    sums: dict[str, Tensor] = {}
    found: Survey | None = None
    num_images = 0

    def look(call: Call, candidates: Sequence[Callable[[], Attention]]) -> None:
        assert found is not None
        if (site := found.sites.get(call)) is None or site.layer not in chosen:
            return
        attention = candidates[site.operand]()
        part = _all_images(chosen[site.layer], attention.device)
        if isinstance(attention, ExplicitAttention):
            weights = site.geometry.layout.arrange(attention.weights.movedim(site.axes, (-2, -1)))
            attention = ExplicitAttention(weights[:, :, list(part.heads)], site.operand)
        else:
            attention = _chosen_part(attention, site, part)
        dtype = torch.promote_types(attention.dtype, torch.float32)
        with in_full_precision(attention.device):
            rows = [
                _softmax(tile.log_weights_BWHTM)
                for tile in tiles(attention, _arranged(site, part.heads), dtype=dtype, whole=True)
            ]
            sums[site.name] = sums.get(site.name, 0.0) + torch.cat([row.double().sum(0) for row in rows], dim=-2).cpu()

    with running(model, device) as run:
        for batch in inputs.batches(images, batch_size, model=run.model, call=call):
            with without_gradients():
                batch = batch.to(run.device, run.dtype)
                again = surveyed(run.model, batch, declared) if found is None else found
                if found is None:
                    found, key = again, batch.key
                    chosen = chosen_heads(found, heads)
                    _check_size(found, chosen)
                elif batch.key != key:
                    raise InputError("average maps are of images of one size; take those of each size by themselves")
                for one in batch.one_by_one() if found.is_alone else [batch]:
                    with AttentionTap(run.model, look, found.calling):
                        one.run(run.model)
            num_images += len(batch)
    if not num_images:
        raise InputError("there are no images to average over")
    assert found is not None
    weights = {
        name: dict(zip(chosen[site.layer], (total / num_images).unbind(1), strict=True))
        for site in found.sites.values()
        if (name := site.name) in sums
        for total in [sums[name]]
    }
    return AverageMaps(weights, num_images)


def _check_size(found: Survey, chosen: Mapping[str, Sequence[int]]) -> None:
    sizes = (
        len(chosen[site.layer]) * site.geometry.query_places_WN2[..., 0].numel() * site.geometry.key_places_WM2.shape[1]
        for site in found.sites.values()
        if site.layer in chosen
    )
    if (total := 8 * sum(sizes)) > _MOST_BYTES:
        raise InputError(
            f"average maps of these heads need {total / 2**30:.0f} GiB; take fewer heads, or smaller images"
        )
