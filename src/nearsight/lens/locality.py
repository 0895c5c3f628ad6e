"""Making attention local in a model that people already use: `add_locality`, on whatever the lens understands.

A survey says which call of which module is a spatial attention and where its tokens lie: windows, shifts, pooled keys,
tokens that are not patches. Images of another size are preceded by a survey of their own.

Shape suffixes: W windows, N queries, M keys, 2 (by row, by column).
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext, suppress
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from nearsight.errors import InputError
from nearsight.lens.attention import FusedAttention
from nearsight.lens.capture import AttentionTap, Call, unseen
from nearsight.lens.geometry import Declared, declared_grid
from nearsight.lens.induced import (
    CHILD,
    Key,
    LastProduct,
    Locality,
    Own,
    Place,
    Places,
    Size,
    are_as_they_were,
    as_they_were,
    query_for,
)
from nearsight.lens.inputs import Batch
from nearsight.lens.running import check_model, running, surveyed_anew
from nearsight.lens.survey import Site, Survey
from nearsight.lens.table import layer_positions
from nearsight.locat.attend import is_transformed
from nearsight.locat.inducers import LOCALITIES, Frame, Inducer, inducer
from nearsight.locat.inducers.base import Layers
from nearsight.locat.inducers.blocks import attached_by_themselves

Model = TypeVar("Model", bound=nn.Module)
_WATCH = "_nearsight_locality"
"""Attribute of a model: its `_Watch`."""


def add_locality(
    model: Model,
    name: str | Inducer,
    *,
    layers: Layers = None,
    image_size: int | tuple[int, int] | None = None,
    grid: tuple[int, int] | None = None,
    prefix: int | None = None,
    **options: Any,
) -> Model:
    """Make attention of a model local; returns the same object.

        nearsight.add_locality(model, "alibi2d")
        nearsight.add_locality(model, "neighborhood", radius=2.5, layers=[0, 1, 2])

    Any model that `measure` understands and that runs on images alone. Its weights keep their names and values; new
    ones lie in a child `locality` of each module that computes an attention (of gaug on timm's ViTs: `gaug`; of
    cpe: `cpe`). Several inducers add up. On CUDA, alibi2d, gaussian, neighborhood and gaug run by fused kernels
    where patches are a whole grid.

    Args:
        name: which inducer; `nearsight.locat.inducers.LOCALITIES` has them all.
        layers: which layers, as `measure` counts (from 0) or names them; all by default. Of cpe and of gaug on timm's
            ViTs these are blocks.
        image_size: (height, width) in pixels that the model is made for, if the model does not say.
        grid, prefix: as for `measure`.
        options: of the inducer.

    What cannot be changed exactly is refused by name: layers that `measure` skips, weights that a model changes after
    their softmax, attentions whose module runs several times in a forward. Compiled as a whole (fullgraph), exported to
    a program or replicated over devices by `DataParallel` it does not run; with other uses of `torch.compile` the
    attention runs as it was written.
    """
    config = name if isinstance(name, Inducer) else inducer(name, **options)
    check_model(model)
    if config.name in localities(model):
        raise InputError(f"{type(model).__name__} has {config.name} already; remove_locality takes it off")
    if config.add_itself(model, layers):
        return model
    if not config.changes_attention:
        raise config.refuse(f"{type(model).__name__} has no place for it")
    watch = getattr(model, _WATCH, None) or _Watch(model, declared_grid(grid, prefix))
    try:
        watch.add(config, layers, _size(model, image_size))
    finally:
        watch.close_if_unused()
    return model


def remove_locality(model: Model) -> Model:
    """Take all inducers off; returns the same object, which computes what it did before, to the last bit."""
    for kind in LOCALITIES.values():
        kind().remove_itself(model)
    for module in [module for module in model.modules() if isinstance(getattr(module, CHILD, None), Locality)]:
        getattr(module, CHILD).close()
    if (watch := getattr(model, _WATCH, None)) is not None:
        watch.close()
    return model


def localities(model: nn.Module) -> list[str]:
    """Names of the inducers that a model has."""
    found = [own.config.name for part in model.modules() if isinstance(part, Locality) for own in part.inducers]
    return list(dict.fromkeys([*attached_by_themselves(model), *found]))


def _size(model: Any, given: int | tuple[int, int] | None) -> Size:
    if given is not None:
        return (given, given) if isinstance(given, int) else (int(given[0]), int(given[1]))
    config = getattr(model, "config", None)
    said = (
        getattr(getattr(model, "patch_embed", None), "img_size", None),
        (getattr(model, "pretrained_cfg", None) or {}).get("input_size", (None,))[1:] or None,
        getattr(model, "image_size", None),
        getattr(getattr(config, "vision_config", config), "image_size", None),
    )
    for size in said:
        if isinstance(size, int):
            return size, size
        if isinstance(size, Sequence) and len(size) == 2:
            return int(size[0]), int(size[1])
    raise InputError(
        f"{type(model).__name__} does not say which images it is made for; give image_size=(height, width)"
    )


class _Watch:
    """Knows of which size the images are that a model is given, and where tokens lie for those."""

    def __init__(self, model: nn.Module, declared: Declared | None) -> None:
        self._model = (model,)  # in a tuple: it may be held by a module
        self._declared = declared
        self.places = Places()
        self._owners: dict[str, nn.Module] = {}
        self._head_sizes: dict[str, dict[Key, int | None]] = {}
        self._sees_keys: set[tuple[str, Key]] = set()
        self._skipped: dict[str, str] = {}
        self._refused: dict[str, str] = {}
        self._channels = 3
        self._handles: list[Any] = []
        setattr(model, _WATCH, self)

    def close_if_unused(self) -> None:
        if not any(isinstance(module, Locality) for module in self._model[0].modules()):
            self.close()

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        vars(self._model[0]).pop(_WATCH, None)

    # Attaching

    def add(self, config: Inducer, layers: Layers, size: Size) -> None:
        (model,) = self._model
        if not self.places.by_size:
            parameter = next((one for one in model.parameters() if one.is_floating_point()), torch.zeros(()))
            generator = torch.Generator().manual_seed(0)
            *others, last = _channels(model)
            for self._channels in (*others, last):
                images = torch.randn(2, self._channels, *size, generator=generator)
                images = images.to(parameter.device, parameter.dtype)
                with suppress(InputError) if self._channels != last else nullcontext():
                    self._learn(Batch(images, lambda whole, pixels, _: whole(pixels)), first=True)
                    break
        size = next(iter(self.places.by_size))
        of_calls = [
            (module, key, place) for module, calls in self.places.by_size[size].items() for key, place in calls.items()
        ]
        names = list(dict.fromkeys(place.name for *_, place in of_calls))
        for layer in layers or ():
            if isinstance(layer, str) and layer in self._skipped:
                raise config.refuse(f"{layer} is skipped: {self._skipped[layer]}")
        chosen = names if layers is None else [names[at] for at in layer_positions(names, layers)]
        chosen = [name for name in names if name in chosen]
        if wrong := [f"{name}: {self._refused[name]}" for name in chosen if name in self._refused]:
            more = "" if len(wrong) == 1 else f" (and {len(wrong) - 1} more)"
            raise config.refuse(f"{wrong[0]}{more}; choose others with layers=")
        by_module: dict[str, dict[Key, Place]] = {}
        for module, key, place in of_calls:
            if place.name in chosen:
                by_module.setdefault(module, {})[key] = place
        prepared = [(module, *self._own(config, module, calls, chosen)) for module, calls in by_module.items()]
        for module, own, like in prepared:
            owner = self._owners[module]
            if not isinstance(getattr(owner, CHILD, None), Locality):
                child = Locality(owner, module, self.places)
                owner.add_module(CHILD, child.train(owner.training))
            holder: Locality = getattr(owner, CHILD)
            if config.normalises and any(other.config.normalises for other in holder.inducers):
                raise config.refuse(f"{module} has something in place of its softmax already")
            holder.add_module(config.name, own.to(device=like.device, dtype=like.dtype).train(owner.training))

    def _own(
        self, config: Inducer, module: str, calls: Mapping[Key, Place], chosen: Sequence[str]
    ) -> tuple[Own, Tensor]:
        owner = self._owners[module]
        like = next(one for one in (*owner.parameters(), *self._model[0].parameters()) if one.is_floating_point())
        if len({(place.num_heads, self._head_sizes[module].get(key)) for key, place in calls.items()}) > 1:
            raise config.refuse(f"the attentions of {module} have heads of several kinds")
        key, place = next(iter(calls.items()))
        frame = Frame(
            layer_name=place.name,
            number=chosen.index(place.name),
            num_layers=len(chosen),
            num_heads=place.num_heads,
            head_size=self._head_sizes[module].get(key),
            sees_keys=(module, key) in self._sees_keys,
            extent=place.extent,
            queries_WN2=place.queries_WN2,
            keys_WM2=place.keys_WM2,
        )
        if config.needs_queries and frame.head_size is None:
            raise config.refuse(f"the queries of {place.name} are not seen")
        own = Own(config, frame, {key: place.extent for key, place in calls.items()})
        return own, like

    # Surveys

    def _learn(self, batch: Batch, *, first: bool = False) -> None:
        """Where tokens lie for images like these."""
        (model,) = self._model
        if is_transformed():
            raise InputError(
                f"{type(model).__name__} meets images of {batch.images.shape[-2]}×{batch.images.shape[-1]} pixels for "
                "the first time under a transform of torch.func; run it once on such images before"
            )
        with unseen(), as_they_were(), running(model) as run:
            batch = batch.to(run.device, run.dtype)
            found = surveyed_anew(run.model, batch, self._declared)
            if found.is_alone:
                raise InputError(
                    f"{type(model).__name__} makes one sequence of all images, which has no local attention"
                )
            if first:
                self._skipped = dict(found.skipped)
                self._probe(found, batch.part(slice(0, 1)))
        known: dict[str, dict[Key, Place]] = {}
        for call, site in found.sites.items():
            known.setdefault(call.layer_name, {})[call.kind, call.number] = _place(site)
        self.places.by_size[tuple(batch.images.shape[-2:])] = known

    def _probe(self, found: Survey, image: Batch) -> None:
        """One forward: which modules are given the image, how often each runs, and what its queries are like."""
        (model,) = self._model
        self._owners = {call.layer_name: found.calling[call.layer_name] for call in found.sites}
        runs: Counter[nn.Module] = Counter()
        entries: list[nn.Module] = []
        products: dict[str, list[LastProduct]] = {}

        def look(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            runs[module] += 1
            if any(value is image.images for value in (*args, *kwargs.values())):
                entries.append(module)

        def of_attention(call: Call, candidates: Sequence[Callable[[], Any]]) -> None:
            site = found.sites.get(call)
            attention = candidates[0]()
            if site is None:
                factors = [candidate().weights for candidate in candidates] if call.kind == "product" else []
                if len(factors) >= 2 and min(factor.dim() for factor in factors[-2:]) > 2:
                    shape = torch.Size((*factors[-2].shape[:-1], factors[-1].shape[-1]))
                    products.setdefault(call.layer_name, []).append(LastProduct(factors[-2], shape))
                return
            sizes = self._head_sizes.setdefault(call.layer_name, {})
            key = call.kind, call.number
            if isinstance(attention, FusedAttention):
                sizes[key] = int(attention.query.shape[-1])
                self._sees_keys.add((call.layer_name, key))
                return
            weights = candidates[site.operand]().weights
            query = query_for(products.get(call.layer_name, []), weights.shape, site.axes)
            sizes[key] = None if query is None else int(query.shape[-1])

        with ExitStack() as undo:
            for module in model.modules():
                if module is not model:
                    hook = module.register_forward_pre_hook(look, with_kwargs=True)
                    undo.callback(hook.remove)
            with torch.no_grad(), AttentionTap(model, of_attention, found.calling):
                try:
                    image.run(model)
                except InputError:
                    raise
                except (ValueError, TypeError, IndexError, AssertionError) as error:  # it takes several images alone
                    reason = " ".join(str(error).split())[:200]
                    raise InputError(f"{type(model).__name__} fails on a single image: {reason}") from error
        self._refused = self._reasons(found, runs)
        self._handles = [model.register_forward_pre_hook(self.before, with_kwargs=True)]
        for module in dict.fromkeys(entries):
            self._handles.append(module.register_forward_pre_hook(self.before_entry, with_kwargs=True))

    def _reasons(self, found: Survey, runs: Mapping[nn.Module, int]) -> dict[str, str]:
        """Layers that cannot be changed exactly, and why."""
        refused = {}
        calling = set(found.calling.values())
        for call, site in found.sites.items():
            owner = found.calling[call.layer_name]
            if call.layer_name == "":
                refused[site.layer] = "the model computes its attention itself; put it into a module"
            elif call.kind == "unseen":
                refused[site.layer] = "its weights meet the values in an operation that is not seen"
            elif site.changed:
                refused[site.layer] = "its weights are changed after their softmax"
            elif site.geometry.num_frames > 1:
                refused[site.layer] = "it is over the frames of a video"
            elif runs[owner] > 1:
                refused[site.layer] = f"its module runs {runs[owner]} times in a forward"
            elif any(part is not owner and part in calling for part in owner.modules()):
                refused[site.layer] = "there is another attention inside its module"
        return refused

    # Running

    def before(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """As a hook of the model."""
        images = self._images(args, kwargs)
        if images is None or are_as_they_were():
            return
        if tuple(images.shape[-2:]) not in self.places.by_size:
            others = {name: value for name, value in kwargs.items() if value is not images}
            rest = args[1:] if args and args[0] is images else args
            call = partial(_called, rest=rest, name=_name_of(images, kwargs))
            self._learn(Batch(images.detach(), call, others))
        self.places.now = tuple(images.shape[-2:])

    def before_entry(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """As a hook of what is given the images: some call the model's parts, and not the model."""
        images = self._images(args, kwargs)
        if images is None or are_as_they_were():
            return
        if tuple(images.shape[-2:]) not in self.places.by_size:
            self._learn(Batch(images.detach(), lambda whole, pixels, _: whole(pixels)))
        self.places.now = tuple(images.shape[-2:])

    def _images(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor | None:
        for value in (*args, *kwargs.values()):
            if isinstance(value, Tensor) and value.dim() == 4 and value.shape[1] == self._channels:
                return value
        return None


def _place(site: Site) -> Place:
    geometry = site.geometry
    return Place(
        site.layer,
        geometry.layout,
        geometry.grid_size,
        geometry.query_places_WN2,
        geometry.key_places_WM2,
        site.operand,
        site.axes,
        site.num_heads,
        site.hidden_WHNM,
    )


def _channels(model: nn.Module) -> list[int]:
    """Of the images: by the first convolution and, where a model has it behind a transform, as it is usually given."""
    first = next((module for module in model.modules() if isinstance(module, nn.Conv2d)), None)
    return list(dict.fromkeys([3 if first is None else first.in_channels, 3]))


def _called(
    model: nn.Module, images: Tensor, others: Mapping[str, Any], *, rest: Sequence[Any], name: str | None
) -> Any:
    """As the caller called it."""
    if name is None:
        return model(images, *rest, **others)
    return model(*rest, **{name: images}, **others)


def _name_of(images: Tensor, kwargs: Mapping[str, Any]) -> str | None:
    return next((name for name, value in kwargs.items() if value is images), None)
