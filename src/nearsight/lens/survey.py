"""One forward of two images that finds each attention of a model and where its tokens lie.

Done once per model and image size; measuring then knows which calls to look at and how.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from nearsight.lens.attention import Attention, ExplicitAttention, FusedAttention
from nearsight.lens.capture import OPAQUE, AttentionTap, Call, unseen
from nearsight.lens.geometry import Declared, Geometry, NotSpatialError, joint_geometries, locate
from nearsight.lens.inputs import Batch, as_batch, on_the_host
from nearsight.lens.layout import MOVING, ImagesUnclearError, LayoutError
from nearsight.lens.pairs import Meeting, Trace
from nearsight.lens.places import PADDING, constant_along, without_repetitions
from nearsight.lens.trace import PlaceTrace, without_values_first
from nearsight.locat.refine import REFINEMENTS


@dataclass(frozen=True)
class Site:
    """One spatial attention of a model."""

    name: str
    """Dotted name of its module; "#2" marks a second attention in the same module."""
    geometry: Geometry
    num_heads: int = 1
    layer: str = ""
    """What it is measured as: its name, or that of the first of several that are one attention in parts."""
    operand: int = 0
    """For explicit attention, which factor of the product holds the weights."""
    axes: tuple[int, int] = (-2, -1)
    """For explicit attention, which of their axes are queries and keys."""
    hidden_WHNM: Tensor | None = None
    """For explicit attention, the keys that a mask hides from a query."""
    changed: bool = False
    """For explicit attention, whether the weights are anything else than what a softmax made sum to 1."""


@dataclass(frozen=True)
class Survey:
    """What is where in a model, for images of one size."""

    sites: dict[Call, Site]
    """The spatial attentions, in the order in which they are computed."""
    skipped: dict[str, str]
    """Names of attentions that are not spatial, with the reason."""
    calling: dict[str, nn.Module]
    """All modules that call functions which may be attention, by name, and those that do it out of sight."""
    is_alone: bool = False
    """Whether images must be given one by one: the model makes one sequence of all, or takes no more."""
    cache: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)
    """What measurements found out for images of this size, and share."""

    def is_as(self, other: "Survey") -> bool:
        """Whether another one has the same attentions with tokens at the same places."""
        return self.sites.keys() == other.sites.keys() and all(
            site.geometry.is_as(other.sites[call].geometry) for call, site in self.sites.items()
        )

    def only(self, layers: Sequence[str]) -> "Survey":
        """With these layers alone."""
        return replace(self, sites={call: site for call, site in self.sites.items() if site.layer in layers})

    @property
    def layers(self) -> dict[str, Site]:
        """By name what is measured as one, in the order in which it is computed; of several parts the first."""
        first: dict[str, Site] = {}
        for site in self.sites.values():
            first.setdefault(site.layer, site)
        return first


def survey(model: nn.Module, image: Tensor | Batch, declared: Declared | None = None) -> Survey:
    """Survey a model (in eval mode) for images like this one, [C, H, W], or the first of a batch."""
    with unseen():
        return _survey(model, as_batch(image), declared)


def _survey(model: nn.Module, batch: Batch, declared: Declared | None) -> Survey:
    one = batch if batch.is_one else batch.part(slice(0, 1))
    if batch.is_one:
        return _in_use(model, one, _one_survey(model, one, declared, alone=True)[0])
    try:
        found, is_unclear = _one_survey(model, batch.pair(), declared, alone=False)
    except Exception as error:
        # A model may take no more than one image at a time; if it does not take that either, the first error counts.
        try:
            found, is_unclear = _alone(model, one, declared), False
        except Exception:
            raise error from None
    if is_unclear:
        alone = _alone(model, one, declared)
        found = alone if len(alone.sites) >= len(found.sites) else found
    return _in_use(model, one, found)


def _alone(model: nn.Module, one: Batch, declared: Declared | None) -> Survey:
    """Of a model that puts all images of a batch into one sequence, or takes one at a time."""
    found, turned = (
        _one_survey(model, batch, declared, alone=True)[0] for batch in (one, one.with_images(one.images.flip(-2, -1)))
    )
    moved = {
        site.name: MOVING
        for call, site in found.sites.items()
        if call not in turned.sites or not turned.sites[call].geometry.is_as(site.geometry)
    }
    sites = {call: site for call, site in found.sites.items() if site.name not in moved}
    return replace(found, sites=sites, skipped={**found.skipped, **moved})


class RowSums:
    """Whether explicit weights are distributions over the keys, as maps must be; and if not, what they are."""

    def __init__(self, attention: ExplicitAttention, site: Site) -> None:
        weights = site.geometry.layout.arrange(attention.weights.movedim(site.axes, (-2, -1)))
        is_patch_WN = site.geometry.query_places_WN2[..., 0].isfinite().to(weights.device)
        sums_BWHN = weights.sum(-1, dtype=torch.promote_types(weights.dtype, torch.float32))
        # A query that looks nowhere has no distribution; and that weights are not finite is said elsewhere.
        sums_BWHN = torch.where(is_patch_WN[:, None] & (sums_BWHN != 0), sums_BWHN, 1.0).nan_to_num(1.0, 1.0, 1.0)
        self._numbers = torch.stack([weights.amin().nan_to_num(0.0).to(sums_BWHN), sums_BWHN.amin(), sums_BWHN.amax()])
        self._tolerance = 0.03 if weights.dtype in (torch.float16, torch.bfloat16) else 1e-3

    def fault(self) -> str | None:
        """What is wrong with them; waits for the device."""
        lowest, smallest, largest = self._numbers.tolist()
        if lowest < -self._tolerance:
            return f"its weights are not a distribution over the keys: some are negative (the lowest is {lowest:.2g})"
        if max(1 - smallest, largest - 1) > self._tolerance:
            return (
                f"its weights are not a distribution over the keys: they sum to {smallest:.3g} … {largest:.3g}, not 1"
            )
        return None


def _in_use(model: nn.Module, one: Batch, found: Survey) -> Survey:
    """Weights that are not just what a softmax gave are looked at once with their values."""
    rows: dict[Call, RowSums] = {}

    def look(call: Call, candidates: Sequence[Callable[[], Attention]]) -> None:
        if (site := found.sites.get(call)) is not None and site.changed:
            attention = candidates[site.operand]()
            assert isinstance(attention, ExplicitAttention)
            rows[call] = RowSums(attention, site)

    if not any(site.changed for site in found.sites.values()):
        return found
    with torch.no_grad(), AttentionTap(model, look, found.calling):
        one.run(model)
    faults = {call: fault for call, row in rows.items() if (fault := row.fault()) is not None}
    sites = {call: site for call, site in found.sites.items() if call not in faults}
    skipped = {**found.skipped, **{found.sites[call].name: fault for call, fault in faults.items()}}
    return replace(found, sites=sites, skipped=skipped)


def _one_survey(model: nn.Module, batch: Batch, declared: Declared | None, *, alone: bool) -> tuple[Survey, bool]:
    """By one forward; and whether for some attention it is unclear which image is which."""

    def run(with_values: bool) -> tuple[Survey, bool]:
        surveyor = _Surveyor(model, batch, declared, alone, with_values)
        try:
            return surveyor.run(batch), surveyor.is_unclear
        finally:
            surveyor.forget()

    return without_values_first(run)


class _Surveyor:
    def __init__(
        self, model: nn.Module, batch: Batch, declared: Declared | None, alone: bool, with_values: bool
    ) -> None:
        self._model, self._declared, self._is_alone = model, declared, alone
        self.is_unclear = False
        self._pixel_size = batch.pixel_size
        self._trace = PlaceTrace(batch, self._softmax, self._met, with_values=with_values)
        self._tap = AttentionTap(model, self._candidates)
        self._modules = dict(model.named_modules())
        self._calling: dict[str, nn.Module] = {
            name: module for name, module in self._modules.items() if isinstance(module, OPAQUE)
        }
        self._found: list[tuple[Call, str, Site | str]] = []
        self._softmaxes: dict[int, tuple[str, str]] = {}
        """Those not yet seen to multiply values: their layer, and what is to be said of them."""
        self._unused: dict[int, int] = {}
        """Of the weights that have been seen to multiply values, how many of each have not yet."""
        self._used: set[tuple[int, int, torch.Size]] = set()
        """The parts of them that have: their number, where they begin in memory, their shape."""
        self._times: Counter[str] = Counter()
        """How many attentions each layer has had."""
        self._located: dict[tuple[object, ...], Geometry] = {}

    def forget(self) -> None:
        """Trace and tap call back here: otherwise all of it would stay in memory until the next garbage collection."""
        del self._trace, self._tap

    def run(self, batch: Batch) -> Survey:
        with torch.no_grad(), self._trace, self._tap:
            batch.run(self._model)
        sites: dict[Call, Site] = {}
        skipped: dict[str, str] = {}
        for call, name, result in self._found:
            if isinstance(result, Site):
                sites[call] = result
            else:
                skipped[name] = result
        named = {site.name for site in sites.values()}
        for name, reason in self._softmaxes.values():
            if name not in named:  # otherwise it is beside the attention of that module, such as an unused score
                skipped.setdefault(name, reason)
        with on_the_host():
            sites = with_joined_parts(sites)
        return Survey(sites, skipped, self._calling, self._is_alone)

    def _softmax(self, number: int, trace: Trace, axis: int) -> None:
        name = self._tap.layer_name
        if name is None or self._tap.inside_fused:
            return
        places = self._trace.places
        if trace.own.dim() < 3:
            if not bool(((places.image_of(trace.own) < 0) & (trace.own > PADDING)).any()):
                return  # of a classifier
            reason = "its weights are between the images of a batch, not between places"
        elif trace.looked_at is not None:
            reason = "its weights do not multiply values in a way that can be followed"
        elif trace.own.movedim(axis, 0).unique(dim=0).shape[0] > 1:
            reason = "a softmax over tokens that has no queries on the image (pooling by scores, or learned queries)"
        elif bool(places.covers_image(trace.own).all()):
            reason = "attention between channels, or among summaries of the image, not between places"
        else:
            reason = "its weights come from one token alone, or its keys are not patches"
        self._softmaxes[number] = name, reason

    def _candidates(self, call: Call, candidates: Sequence[Callable[[], Attention]]) -> None:
        self._calling[call.layer_name] = self._modules[call.layer_name]
        attention = candidates[0]()
        if isinstance(attention, FusedAttention):
            self._note(call, lambda: self._fused(attention))

    def _met(self, meeting: Meeting) -> None:
        """Weights multiply values, somewhere inside an operation."""
        if self._tap.inside_fused or self._tap.layer_name is None:
            return
        weights = self._trace.pairs.weights[meeting.weights]
        for softmax in weights.softmaxes:
            self._softmaxes.pop(softmax, None)
        call, factors = self._tap.product or (Call(self._tap.layer_name, "unseen", meeting.weights), [])
        holding = [
            (operand, factor, trace)
            for operand, factor in enumerate(factors)
            if (trace := self._trace.of(factor)) is not None and trace.weights == meeting.weights
        ]
        if not holding:  # they were made of others within the call, or it cannot be looked into
            self._note(call, lambda: _refused("its weights meet the values in an operation that cannot be looked into"))
            return
        operand, factor, trace = holding[0]
        if not self._is_new_part(meeting.weights, weights.size, factor):
            return
        if not meeting.are_keys:
            self._note(call, lambda: _refused("its weights were moved to other keys by a matrix"))
            return
        if meeting.keys_first:
            assert trace.looked_at is not None
            trace = replace(trace, own=trace.looked_at, looked_at=trace.own)
        examine = partial(self._explicit, ExplicitAttention(factor, operand), trace, not meeting.is_softmax)
        self._note(call, examine, may_be_none=not weights.softmaxes)

    def _is_new_part(self, number: int, size: int, part: Tensor) -> bool:
        """Weights may meet the values in several products, by heads or by queries: each part is a site. The same
        weights may also do it twice, which is one."""
        left = self._unused.setdefault(number, size)
        key = number, part.data_ptr(), part.shape
        if left <= 0 or (part._base is not None and key in self._used):  # a copy may be where another one was
            return False
        self._unused[number] = left - part.numel()
        self._used.add(key)
        return True

    def _note(self, call: Call, examine: Callable[[], Site], *, may_be_none: bool = False) -> None:
        """What an attention is found to be. What has no softmax may be none at all, and is not named unless it is one
        between places."""
        self._times[call.layer_name] += 1
        times = self._times[call.layer_name]
        name = call.layer_name if times == 1 else f"{call.layer_name}#{times}"
        try:
            if isinstance(self._modules[call.layer_name], REFINEMENTS):
                raise NotSpatialError("tokens that refine each other without any weights (PRR), which is not a layer")
            site: Site | str = examine()
        except (NotSpatialError, LayoutError) as error:
            self.is_unclear |= isinstance(error, ImagesUnclearError)
            if may_be_none:
                self._times[call.layer_name] -= 1
                return
            lost = f"; places could not be followed through {self._trace.lost[-1]}" if self._trace.lost else ""
            site = f"{error}{lost}"
        self._found.append((call, name, site if isinstance(site, str) else replace(site, name=name, layer=name)))

    def _fused(self, attention: FusedAttention) -> Site:
        numbers = []
        for tensor in (attention.query, attention.key):
            of_tokens = constant_along(self._trace.numbers(tensor), -1)
            if of_tokens is None:
                raise NotSpatialError("attention between channels, not between places")
            numbers.append(of_tokens.squeeze(-1))
        geometry = self._locate(*numbers)
        return Site("", geometry, geometry.layout.num_heads(attention.query.shape))

    def _locate(self, query_LN: Tensor, key_LM: Tensor) -> Geometry:
        """Most layers of a model have their tokens where another one has."""
        known = _content(query_LN), _content(key_LM)
        if known not in self._located:
            places, alone = self._trace.places, self._is_alone
            found = None if self._declared is None else self._declared.locate(places, query_LN, key_LM, alone=alone)
            found = found or locate(places, query_LN, key_LM, alone=alone)
            height, width = (self._pixel_size * side for side in found.cell_size)
            self._located[known] = replace(found, cell_size=(height, width))
        return self._located[known]

    def _explicit(self, attention: ExplicitAttention, trace: Trace, changed: bool) -> Site:
        assert trace.looked_at is not None
        own, looked_at = trace.own, trace.looked_at
        query_axis, key_axis = _token_axes(own, looked_at)
        query = own.movedim((query_axis, key_axis), (-2, -1))[..., 0]
        key = looked_at.movedim((query_axis, key_axis), (-2, -1))[..., 0, :]
        geometry = self._locate(query, key)
        hidden_WHNM: Tensor | None = None
        if trace.hidden is not None and trace.hidden.any():
            hidden = trace.hidden.movedim((query_axis, key_axis), (-2, -1))
            hidden_WHNM = geometry.layout.arrange(hidden)[0].bool()
        return Site(
            "",
            geometry,
            geometry.layout.num_heads(own.movedim((query_axis, key_axis), (-2, -1)).shape),
            operand=attention.operand,
            axes=(query_axis, key_axis),
            hidden_WHNM=hidden_WHNM,
            changed=changed,
        )


def _refused(reason: str) -> Site:
    raise NotSpatialError(reason)


def with_joined_parts(sites: Mapping[Call, Site]) -> dict[Call, Site]:
    """Attentions of one module whose queries are different patches of one grid are one layer: a model may compute it
    for some queries after the others, or window by window. They lie on the grid that they have together."""
    joined = dict(sites)
    modules: dict[str, list[Call]] = {}
    for call in sites:
        modules.setdefault(call.layer_name, []).append(call)
    for calls in modules.values():
        if len(calls) == 1 or len({sites[call].num_heads for call in calls}) > 1:
            continue
        if (geometries := joint_geometries([sites[call].geometry for call in calls])) is not None:
            for call, geometry in zip(calls, geometries, strict=True):
                joined[call] = replace(sites[call], geometry=geometry, layer=sites[calls[0]].name)
    return joined


def _content(numbers: Tensor) -> tuple[object, ...]:
    """Equal for tensors of the same numbers."""
    once = without_repetitions(numbers)
    return numbers.shape, once.shape, once.numpy().tobytes()


def _token_axes(own: Tensor, looked_at: Tensor) -> tuple[int, int]:
    """The axis along which queries alone change, and that along which keys alone do."""

    def changes(numbers: Tensor, axis: int) -> bool:
        return constant_along(numbers, axis) is None

    axes = range(own.dim())
    queries = [axis for axis in axes if changes(own, axis) and not changes(looked_at, axis)]
    keys = [axis for axis in axes if changes(looked_at, axis) and not changes(own, axis)]
    if len(queries) == 1 and len(keys) == 1:
        return queries[0], keys[0]
    if own.shape[-1] == 1 or own.shape[-2] == 1:  # a single token does not change
        return own.dim() - 2, own.dim() - 1
    raise NotSpatialError("it is unclear which axes of its weights are queries and which are keys")
