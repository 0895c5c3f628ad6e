"""One interface for every way to make attention local: what an inducer is told of an attention, and what it gives.

An inducer is a frozen dataclass of options under `@register_locality`, in a file of this folder or of your own package.
It says which parameters of its own an attention gets, and computes with them what is added to the logits, which keys
are hidden, or what stands for the softmax; and if fused kernels can make the same, it says it in their form (`Radial`).
Where tokens lie comes from the lens, so it need not know any model.

Distances are in patches of the layer's grid. What a query can attend to (the whole grid, or a window) is its `extent`;
on images whose extent is larger than the one that the model was made for, widths grow in proportion to its shorter
side (`Asked.growth`).

Shape suffixes: B images, W windows, H heads, T some queries, M keys, d head size, 2 (by row, by column). Sizes of 1
stand for any number.
"""

from __future__ import annotations

import ast
import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from nearsight.errors import InputError, check_number, unknown_name
from nearsight.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor, nn

    from nearsight.locat.gaussian import Grid, Shape

SAME_PLACE = 1e-4
"""Patches: places that are nearer to each other than this are one. Centres of pooled cells are rounded."""
Layers = Sequence[int | str] | None


@dataclass(frozen=True)
class Frame:
    """What an attention is like for images of the size that the model was made for."""

    layer_name: str
    number: int
    """Which of the layers that become local it is, from 0."""
    num_layers: int
    num_heads: int
    head_size: int | None
    """Channels of a query; None where the queries are not seen."""
    sees_keys: bool
    extent: tuple[int, int]
    """(rows, columns) of what a query can attend to."""
    queries_WN2: Tensor
    keys_WM2: Tensor


@dataclass
class Asked:
    """Some queries of an attention, and all its keys."""

    queries_WT2: Tensor
    """(row, column) of each query in patches; NaN for one that is not a patch."""
    keys_WM2: Tensor
    extent: tuple[int, int]
    made_for: tuple[int, int]
    scale: float = 1.0
    """What products of queries and keys are multiplied by."""
    query_BWHTd: Tensor | None = None
    """None where weights are seen alone."""
    key_BWHMd: Tensor | None = None
    number: int = 0
    cache: dict[Any, Tensor] = field(default_factory=dict)

    @property
    def growth(self) -> float:
        """What widths in patches are multiplied by."""
        return min(self.extent) / min(self.made_for)

    @property
    def are_patches(self) -> Tensor:
        """[W, T, M]: whether both are."""
        return self.known("patches", self.raw_steps[..., 0].isfinite)

    @property
    def raw_steps(self) -> Tensor:
        """As `steps`, with NaN where one of the two is no patch."""
        return self.known("steps", lambda: self.keys_WM2[:, None] - self.queries_WT2[:, :, None])

    @property
    def steps(self) -> Tensor:
        """[W, T, M, 2]: from query to key, by row and by column; 0 where one of them is no patch."""
        return self.known("finite steps", partial(self.raw_steps.nan_to_num, 0.0))

    @property
    def distances(self) -> Tensor:
        """[W, T, M]: in patches of the grid that the model was made for; 0 where one of the two is no patch."""
        return self.known("distances", lambda: self.steps.square().sum(-1).sqrt() / self.growth)

    def known(self, name: Any, make: Any) -> Tensor:
        """What depends on the places and the options alone is made once."""
        if name in self.cache:
            return self.cache[name]
        with torch.inference_mode(False):  # it may be needed for gradients later
            made: Tensor = make()
        if type(made) is torch.Tensor:
            self.cache[name] = made
        return made


@dataclass(frozen=True)
class Radial:
    """What is added to the logits between patches, as a function of place and query that kernels compute without it
    ever being in memory: strength · f(r) with r² = 2 Σ_axis precision_axis · Δ²_axis, or −∞ beyond a reach.

    Shape suffixes: X images and their windows.
    """

    shape: Shape = "none"
    """f: a Gaussian exp(−r²/2), laplace exp(−r), inverse 1/(1 + r), or the distance r; none: nothing is added."""
    precision: Tensor | None = None
    """Of each query, by row and by column, in grid cells; expands to [X, H, T, 2]."""
    strength: Tensor | None = None
    """Of each query; expands to [X, H, T]."""
    reach: Tensor | None = None
    """Keys farther than this are hidden, in grid cells; expands to [X, H]. A mask without a bias has nothing else."""
    largest_half_square: float = math.inf
    """What ½Δ² along an axis is clamped at."""

    def __and__(self, other: Radial) -> Radial | None:
        """Both; None where kernels have not room for two biases."""
        if "none" not in (self.shape, other.shape):
            return None
        biased, reach = (other if self.shape == "none" else self), (self.reach if other.reach is None else other.reach)
        if self.reach is not None and other.reach is not None:
            reach = torch.minimum(self.reach, other.reach)
        return dataclasses.replace(biased, reach=reach)

    def expanded(self, shape_XHT: Sequence[int], device: torch.device) -> tuple[Tensor, Tensor, Tensor | None]:
        """Precisions [X, H, T, 2], strengths [X, H, T] and reaches [X, H] in float32; 0 where there is no bias."""
        none = torch.zeros((), device=device)
        precision, strength = (none if given is None else given.float() for given in (self.precision, self.strength))
        reach = None if self.reach is None else self.reach.float().expand(*shape_XHT[:2])
        return precision.expand(*shape_XHT, 2), strength.expand(*shape_XHT), reach


class Inducer:
    """A way to make attention local."""

    name: ClassVar[str]
    about: ClassVar[str]
    """One line of help."""
    starts_plain: ClassVar[bool] = True
    """Whether at first it changes nothing, and yet has a gradient: by a gate that is 0, or a table of zeros."""
    needs_queries: ClassVar[bool] = False
    """Whether it reads the queries themselves, beside their places."""
    normalises: ClassVar[bool] = False
    """Whether `weights` stands for the softmax. An attention has one such inducer at most."""
    changes_attention: ClassVar[bool] = True
    """Whether it is in an attention; the others are around it, and `add_itself` alone attaches them."""

    def parameters(self, frame: Frame) -> dict[str, Tensor | nn.Module]:
        """What an attention gets to learn, by name; an `InputError` refuses an attention that it cannot change."""
        return {}

    def bias(self, own: Any, asked: Asked) -> Tensor | None:
        """What is added to the logits between patches; expands to [B, W, H, T, M]. `own` has the parameters."""
        return None

    def shown(self, own: Any, asked: Asked) -> Tensor | None:
        """Which keys patches may attend to; expands to [B, W, H, T, M]. Keys that are not patches are always shown."""
        return None

    def radial(self, own: Any, asked: Asked) -> Radial | None:
        """What `bias` and `shown` give together, for all queries, in the form that fused kernels take; None: it has no
        such form. It is asked for on a GPU, where tokens are a whole grid behind those that are not patches."""
        return None

    def weights(self, own: Any, asked: Asked, logits_BWHTM: Tensor) -> Tensor:
        """What stands for the softmax over the keys."""
        raise NotImplementedError

    def add_itself(self, model: nn.Module, layers: Layers) -> bool:
        """Attach in a way of its own to a model that it knows; False: it does not know this one."""
        return False

    def remove_itself(self, model: nn.Module) -> bool:
        """Take off what `add_itself` attached; whether there was any."""
        return False

    @property
    def text(self) -> str:
        """As `inducer_of` reads it, with the options that are not at their defaults."""
        given = [(each.name, getattr(self, each.name)) for each in _options(type(self)) if self._differs(each)]
        return self.name + (":" + ",".join(f"{name}={_written(value)}" for name, value in given) if given else "")

    def _differs(self, option: dataclasses.Field[Any]) -> bool:
        return bool(getattr(self, option.name) != option.default)

    def refuse(self, reason: str) -> InputError:
        return InputError(f"{self.name} cannot be added: {reason}")


@dataclass(frozen=True, kw_only=True)
class Gated(Inducer):
    """One whose effect is multiplied by a gate of its own, a number for each head."""

    gate: float = 0.0
    """Where the gate begins: 0 for a trained model, which first computes what it always did; 1 for its full effect."""

    def __post_init__(self) -> None:
        check_number("gate", self.gate)

    def gates(self, frame: Frame) -> Tensor:
        """As they begin."""
        return torch.full((frame.num_heads,), float(self.gate))

    @staticmethod
    def by_head(gate_H: Tensor) -> Tensor:
        """[H, 1, 1]"""
        return gate_H.view(-1, 1, 1)


LOCALITIES: dict[str, type[Inducer]] = {}
"""By name."""
I = TypeVar("I", bound=type[Inducer])  # noqa: E741


def register_locality(kind: I) -> I:
    """Class decorator that makes an inducer known by its name: to `add_locality`, run settings and the command line."""
    if kind.name in LOCALITIES:
        raise ValueError(f"there is an inducer {kind.name!r} already: {LOCALITIES[kind.name].__qualname__}")
    LOCALITIES[kind.name] = kind
    return kind


def inducer(name: str, **options: Any) -> Inducer:
    """The inducer of this name with these options."""
    if name not in LOCALITIES:
        raise unknown_name("inducer of locality", str(name), LOCALITIES)
    kind = LOCALITIES[name]
    known = [each.name for each in _options(kind)]
    for option in options:
        if option not in known:
            raise InputError(f"{name} has no option {option!r}; it has {', '.join(known) or 'none'}")
    return kind(**options)


def _written(value: Any) -> str:
    return value if isinstance(value, str) else repr(value).replace(" ", "")


def _options(kind: type[Inducer]) -> tuple[dataclasses.Field[Any], ...]:
    return dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else ()


def inducer_of(text: str) -> Inducer:
    """From "neighborhood" or "neighborhood:radius=1.5,by=head", as a command or a config has it."""
    name, _, given = text.partition(":")
    options: dict[str, Any] = {}
    for part in _parts(given):
        option, equals, value = part.partition("=")
        if not (equals and option.isidentifier() and value):
            raise InputError(f"{text!r} is not an inducer with options; write it as neighborhood:radius=1.5")
        try:
            options[option] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            options[option] = value
    return inducer(name, **options)


def _parts(text: str) -> list[str]:
    """Separated by commas, except within brackets."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter in "([") - (letter in ")]")
        if letter == "," and not depth:
            parts.append("")
        else:
            parts[-1] += letter
    return [part for part in parts if part]


def described() -> str:
    """A line for each inducer, as help shows them."""
    lines = []
    for name, kind in LOCALITIES.items():
        options = ", ".join(f"{each.name}={each.default!r}" for each in _options(kind))
        lines.append(f"{name}: {kind.about}" + (f" ({options})" if options else ""))
    return "; ".join(lines)


def extent_of(places_WM2: Tensor, grid_size: tuple[int, int]) -> tuple[int, int]:
    """(rows, columns) of what a query can attend to: the grid where there is one window, or else a window.

    Shifted windows at the border hold patches from both sides; the others say how large a window is.
    """
    if len(places_WM2) == 1:
        return grid_size
    spans_W2 = places_WM2.nan_to_num(-math.inf).amax(1) - places_WM2.nan_to_num(math.inf).amin(1)
    rows, cols = (max(1, round(float(side[side.isfinite()].min())) + 1) for side in spans_W2.unbind(-1))
    return rows, cols


def whole_grid(places_WM2: Tensor) -> Grid | None:
    """The grid of each window, if its tokens are some that are not patches, and then all patches of it, row by row."""
    from nearsight.locat.gaussian import Grid

    num_prefix = int(places_WM2[0, :, 0].isnan().sum())
    patches_WP2 = places_WM2[:, num_prefix:]
    if not patches_WP2.numel() or not bool(patches_WP2.isfinite().all()):
        return None
    steps_WP2 = patches_WP2 - patches_WP2[:, :1]
    rows, cols = (round(float(side)) + 1 for side in steps_WP2[0].amax(0))
    grid = Grid(rows, cols, num_prefix)
    if grid.num_tokens != places_WM2.shape[1]:
        return None
    expected_P2 = torch.cartesian_prod(torch.arange(rows), torch.arange(cols)).view(-1, 2).to(steps_WP2)
    lie_there = bool(((steps_WP2 - expected_P2).abs() < SAME_PLACE).all())
    return grid if lie_there and bool(places_WM2[:, :num_prefix, 0].isnan().all()) else None
