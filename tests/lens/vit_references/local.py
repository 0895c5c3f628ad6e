"""Which models take which inducer: each is added to each model, compared with the model as it was, and taken off."""

import copy
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from nearsight import add_locality, remove_locality
from nearsight.errors import InputError
from nearsight.lens import HeadTable
from nearsight.lens.running import remembering_surveys
from nearsight.locat.inducers import LOCALITIES
from vit_references.table import as_row

INDUCERS = tuple(LOCALITIES)
RADII = (4.0, 8.0, 16.0, 32.0)
"""Tried one after the other where the usual one leaves some queries without a key: pooled keys lie far apart."""
TOLERANCE, EXACT, LEAST = 1e-5, 1e-9, 1e-7
"""Of the largest output: what a start without effect may change, in float32 and in float64, and what an effect must."""
MARKS = {"gentle": "●", "abrupt": "○", "partly": "◐", "refused": "–"}
HEADER = """
## Making them local

The same models, with each inducer of [`nearsight.add_locality`](locality.md) ({versions}).

**How a mark is made.** The inducer is added to a model of that row and the outputs are compared with those of the model
as it was. ● It is taken and at first changes nothing (by less than 1e-5 of the largest output); with its gates open it
does. ○ It is taken and has its effect at once. ◐ Some layers take it (`layers=` names them), the last column says why
others do not. – It is refused, for the reason in the last column, and the model is left as it was. Taken off again,
every one leaves the outputs of before, to the last bit. `prr` and `cpe` know timm's ViT, Eva, Swin and GCViT alone,
which the last column does not repeat. That what is added is right is another test: outputs and gradients against maps
written out in float64 loops, on twelve models.

"""


@dataclass(frozen=True)
class Taken:
    """What became of one inducer on one model."""

    kind: Literal["gentle", "abrupt", "partly", "refused"]
    """From a start without effect, at once, in some of the layers alone (at once or not), or not at all."""
    reason: str = ""
    """Of a refusal, or with which setting it is taken."""


class WrongError(Exception):
    """An inducer does something else than it says."""


Forward = Callable[[nn.Module], Any]


def taken(model: nn.Module, forward: Forward, look: Callable[[nn.Module], HeadTable], **about: Any) -> dict[str, Taken]:
    """Every inducer, added to a copy of a model. `look`: how it is measured; `about`: for `add_locality`."""
    model = copy.deepcopy(model).eval()
    plain = look(model)
    with remembering_surveys():  # where tokens lie stays as it is
        return {name: _Trial(model, forward, look, plain, name, about).taken() for name in INDUCERS}


class _Trial:
    """One inducer on a model, which it leaves as it was."""

    def __init__(
        self,
        model: nn.Module,
        forward: Forward,
        look: Callable[[nn.Module], HeadTable],
        plain: HeadTable,
        name: str,
        about: Mapping[str, Any],
    ) -> None:
        self._model, self._forward, self._name, self._about = model, forward, name, about
        self._look, self._plain = look, plain
        self._before, self._weights = outputs(model, forward), {key for key, _ in model.named_parameters()}

    def taken(self) -> Taken:
        reason, note, partly = self._add(), "", ""
        for radius in RADII if "take a larger one" in reason else ():
            if not (reason := self._add(radius=radius)):
                note = f"with radius={radius:g}"
                break
        if "choose others with layers=" in reason:
            partly = reason
            if allowed := [layer for layer in self._plain.layer_names if not self._is_refused(layer)]:
                reason = self._add(layers=allowed)
        if reason:
            return Taken("refused", reason)
        is_gentle = LOCALITIES[self._name].starts_plain
        if is_gentle:
            self._check_start()
            self._open_gates()
        self._check_effect()
        remove_locality(self._model)
        self._check_same(0.0, "removed")
        return Taken("partly", partly) if partly else Taken("gentle" if is_gentle else "abrupt", note)

    def _add(self, **more: Any) -> str:
        """Why it is refused; empty where it is not."""
        try:
            add_locality(self._model, self._name, **self._about, **more)
        except InputError as error:
            said = str(error)
            if "\n" in said:
                raise WrongError(f"{self._name} is refused in several lines: {said}") from error
            self._check_same(0.0, "refused")
            return re.sub(r"^\w+ cannot be added( to \w+)?: ", "", said)
        return ""

    def _is_refused(self, layer: str) -> bool:
        try:
            add_locality(self._model, self._name, layers=[layer], **self._about)
        except InputError:
            return True
        remove_locality(self._model)
        return False

    def _check_start(self) -> None:
        """In float64 where float32, which deep models of batch norms amplify, is not enough."""
        if difference(outputs(self._model, self._forward), self._before) <= TOLERANCE:
            return
        exact = copy.deepcopy(self._model).double()
        gap = difference(outputs(exact, self._forward), outputs(remove_locality(exact), self._forward))
        if gap > EXACT:
            raise WrongError(f"{self._name}, at its start: differs by {gap:.1e}")

    def _open_gates(self) -> None:
        """What is new is anything."""
        generator = torch.Generator().manual_seed(5)
        for key, weight in self._model.named_parameters():
            if key not in self._weights:
                weight.data += torch.randn(weight.shape, generator=generator).to(weight)

    def _check_effect(self) -> None:
        """On the outputs or, where these do not depend on what patches attend to, on the distances of heads."""
        if difference(outputs(self._model, self._forward), self._before) > LEAST:
            return
        with remembering_surveys():  # of what it is now
            changes = np.abs(self._look(self._model).mad - self._plain.mad)
        if not np.nanmax(changes) > LEAST:
            raise WrongError(f"{self._name} changes nothing")

    def _check_same(self, tolerance: float, when: str) -> None:
        gap = difference(outputs(self._model, self._forward), self._before)
        if gap > tolerance:
            raise WrongError(f"{self._name}, {when}: differs by {gap:.1e}")


@torch.no_grad()
def outputs(model: nn.Module, forward: Callable[[nn.Module], Any]) -> list[Tensor]:
    """All numbers that a forward gives; what it draws at random is the same every time."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return [found for found in tensors(forward(model)) if found.is_floating_point()]


def as_weights(given: Any, model: nn.Module) -> Any:
    """Inputs of the type that a model's weights have."""
    if isinstance(given, Tensor):
        dtype = next((one.dtype for one in model.parameters() if one.is_floating_point()), given.dtype)
        return given.to(dtype) if given.is_floating_point() else given
    return {name: as_weights(value, model) for name, value in given.items()} if isinstance(given, dict) else given


def tensors(found: Any) -> Iterator[Tensor]:
    if isinstance(found, Tensor):
        yield found
    elif isinstance(found, Mapping):
        for value in found.values():
            yield from tensors(value)
    elif isinstance(found, list | tuple):
        for value in found:
            yield from tensors(value)


def difference(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """The largest, relative to the largest number of the same tensor."""
    if [one.shape for one in found] != [one.shape for one in expected]:
        return float("inf")
    pairs = [(one.double(), two.double()) for one, two in zip(found, expected, strict=True) if one.numel()]
    scales = [max(float(two.nan_to_num(0.0, 0.0, 0.0).abs().max()), 1e-9) for _, two in pairs]
    gaps = [float((one - two).nan_to_num(0.0, 0.0, 0.0).abs().max()) for one, two in pairs]
    return max((gap / scale for gap, scale in zip(gaps, scales, strict=True)), default=0.0)


# As a table


def header(*before: str) -> str:
    """The first two lines of a table."""
    columns = (*before, *INDUCERS, "what is refused, and why")
    return as_row(*columns) + "|" + "---|" * len(columns) + "\n"


def row(found: Mapping[str, Taken], *before: object) -> str:
    """A model with a mark for each inducer, and each reason once."""
    reasons: dict[str, list[str]] = {}
    for name, one in found.items():
        if one.reason:
            reasons.setdefault(one.reason, []).append(name)
    words = [f"{', '.join(names)}: {_shortened(reason)}" for reason, names in reasons.items() if not _is_usual(reason)]
    return as_row(*before, *(MARKS[found[name].kind] for name in INDUCERS), "; ".join(words))


def _is_usual(reason: str) -> bool:
    """Of prr and cpe, which the header says."""
    return "how its patches meet in attention is not known" in reason or "where its blocks have their" in reason


def _shortened(reason: str) -> str:
    """Without the way out, which is for whoever calls."""
    return re.sub(r"; (choose others with layers=|it takes timm's .*)$", "", reason)
