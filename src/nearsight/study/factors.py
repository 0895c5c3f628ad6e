"""What a study varies: a factor changes the settings of a run, in a different way at each of its levels. Conditions are
called after what they add to the base, or leave out of the whole, or after what they are."""

import dataclasses
import enum
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from nearsight.augment import AUGMENTATIONS, Augmentation
from nearsight.configuration import decode, encode
from nearsight.errors import InputError, unknown_name
from nearsight.study.run_tables import check_label
from nearsight.train import RunConfig


class _Off(enum.Enum):
    OFF = "off"


OFF: Final = _Off.OFF
"""The level without the augmentations of the other levels; of a factor without augmentations, the base as it is."""

Levels = Sequence[Any] | Mapping[str, Any]
"""Changes in order, or label → change. A change is OFF, an augmentation, the value of the setting that the factor is
named after, or a mapping of such names to values or augmentations, for several changes at once."""

ENDS: Final = ("base", "all")
"""The conditions with all factors at their first and at their last level, by default."""
_ABSENT = ("off", "0", "none")
"""Labels of values that are the absence of the others."""
_TITLES = {"protocol.smoothing": "LabelSmoothing"}
"""Setting → what the paper calls it."""


@dataclass(frozen=True)
class Factor:
    """One thing that is varied."""

    name: str
    title: str
    """Its name in conditions, as in +CutMix."""
    labels: tuple[str, ...]
    """Of its levels; the first is the base."""
    changes: tuple[Any, ...]
    are_labels_given: bool
    """Whether the labels were chosen, and so say enough by themselves."""

    @classmethod
    def of(cls, name: str, levels: Levels) -> "Factor":
        if isinstance(levels, str) or len(levels) < 2:
            raise InputError(f"factor {name!r} has the levels {levels!r}, but needs at least two")
        given = isinstance(levels, Mapping)
        changes = tuple(levels.values() if isinstance(levels, Mapping) else levels)
        labels = tuple(levels) if isinstance(levels, Mapping) else _labels(name, changes)
        for label in labels:
            if not isinstance(label, str) or not label.strip():
                raise InputError(f"factor {name!r} has a level labelled {label!r}; a label is a word")
            if labels.count(label) > 1:
                raise InputError(f"factor {name!r} has two levels {label!r}; label them: {{'label': level, …}}")
            check_label(label, f"a level of factor {name!r}")
        return cls(name, _title(name, changes), labels, changes, given)

    def apply(self, config: RunConfig, label: str) -> RunConfig:
        """The run with this factor at a level."""
        if label not in self.labels:
            raise unknown_name(f"level of {self.name}", label, self.labels)
        change = self.changes[self.labels.index(label)]
        varied = {augmentation.name for each in self.changes for augmentation in _augmentations(each)}
        present = {augmentation.name for augmentation in _augmentations(change)}
        for name in sorted(varied - present):
            config = dataclasses.replace(config, protocol=config.protocol.without(name))
        try:
            return _changed(config, self.name, change)
        except InputError as error:
            raise InputError(f"factor {self.name!r} at {label!r}: {error}") from error


def setting_path(name: str) -> tuple[str, ...]:
    """Where a run's config keeps a setting: ("protocol", "lr") for protocol.lr, and for lr, which is the only one.

    Settings of an augmentation are named after it: cutmix.alpha, or protocol.cutmix.alpha.
    """
    first, *rest = name.removeprefix("protocol.").split(".")
    if first in AUGMENTATIONS and len(rest) == 1:
        _check_known(name, rest[0], {field.name for field in dataclasses.fields(AUGMENTATIONS[first])})
        return "protocol", first, rest[0]
    known = _setting_paths()
    found = [path for path in known if name in (".".join(path), path[-1])]
    whole = [path for path in found if ".".join(path) == name]
    if len(whole or found) == 1:
        return (whole or found)[0]
    if found:
        raise InputError(f"{name!r} may mean {' or '.join('.'.join(path) for path in found)}; write it out")
    names = [".".join(path) for path in known] + [path[-1] for path in known] + list(AUGMENTATIONS)
    raise unknown_name("setting", name, set(names))


def _setting_paths() -> list[tuple[str, ...]]:
    """Every field of a run, and every field of those that are configs themselves. Seeds are not a factor."""
    paths: list[tuple[str, ...]] = []
    for name, kind in typing.get_type_hints(RunConfig).items():
        if name != "seed":
            paths.append((name,))
        if dataclasses.is_dataclass(kind):
            paths += [(name, field.name) for field in dataclasses.fields(kind)]
    return paths


def _changed(config: RunConfig, name: str, change: Any) -> RunConfig:
    if change is OFF:
        if name not in AUGMENTATIONS:
            return config
        return dataclasses.replace(config, protocol=config.protocol.without(name))
    if isinstance(change, Augmentation):
        return dataclasses.replace(config, protocol=config.protocol.with_(change))
    if isinstance(change, Mapping):
        for each, value in change.items():
            if isinstance(value, Mapping):
                raise InputError(f"{each!r} is given {value!r}, but needs a value or an augmentation")
            config = _changed(config, each, value)
        return config
    return _with_setting(config, setting_path(name), change)


def _with_setting(config: RunConfig, path: tuple[str, ...], value: Any) -> RunConfig:
    if len(path) == 3:
        held = config.protocol.augmentation(path[1])
        if held is None:
            raise InputError(f"{'.'.join(path)} cannot be set where there is no {path[1]}")
        changed = _replaced(held, path[2], value, ".".join(path))
        return dataclasses.replace(config, protocol=config.protocol.with_(changed))
    if len(path) == 2:
        part = _replaced(getattr(config, path[0]), path[1], value, ".".join(path))
        return dataclasses.replace(config, **{path[0]: part})
    return typing.cast("RunConfig", _replaced(config, path[0], value, path[0]))


def _replaced(owner: Any, field: str, value: Any, where: str) -> Any:
    """The config with another value in a field, of the type it says: through JSON, where types are checked."""
    kind = typing.get_type_hints(type(owner))[field]
    return dataclasses.replace(owner, **{field: decode(kind, encode(value), where)})


def _augmentations(change: Any) -> list[Augmentation]:
    values = change.values() if isinstance(change, Mapping) else [change]
    return [value for value in values if isinstance(value, Augmentation)]


def _check_known(name: str, field: str, fields: set[str]) -> None:
    if field not in fields:
        raise InputError(f"{name!r} is not a setting; {name.rsplit('.', 1)[0]} has {', '.join(sorted(fields))}")


def _title(name: str, changes: Sequence[Any]) -> str:
    """An augmentation is called as its class, a setting as in the paper or as itself."""
    classes = {type(change).__name__ for change in changes if isinstance(change, Augmentation)}
    if len(classes) == 1:
        return classes.pop()
    if any(isinstance(change, Augmentation | Mapping) for change in changes):
        return name
    return _TITLES.get(".".join(setting_path(name)), name)


def _labels(name: str, changes: Sequence[Any]) -> tuple[str, ...]:
    labels = [_label(name, change) for change in changes]
    if len(set(labels)) < len(labels):  # CutMix() and Mixup() are both "on"
        labels = [
            f"{type(change).__name__} {label}" if isinstance(change, Augmentation) else label
            for change, label in zip(changes, labels, strict=True)
        ]
    return tuple(labels)


def _label(name: str, change: Any) -> str:
    """A level in a word: its settings that are not the defaults."""
    if isinstance(change, Augmentation):
        usual = type(change)()
        changed = {field.name: getattr(change, field.name) for field in dataclasses.fields(change)}
        words = [f"{field}={_word(value)}" for field, value in changed.items() if value != getattr(usual, field)]
        return ", ".join(words) or "on"
    if isinstance(change, Mapping):
        return ", ".join(f"{each}={_label(each, value)}" for each, value in change.items())
    if change is OFF:
        return "off"
    if dataclasses.is_dataclass(change):
        raise InputError(f"the levels of factor {name!r} have no short names; label them: {{'label': level, …}}")
    return _word(change)


def _word(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, float):
        short = f"{value:g}"
        return short if float(short) == value else repr(value)
    return "none" if value is None else str(value)


def condition_name(factors: Sequence[Factor], levels: Mapping[str, str], ends: tuple[str, str]) -> str:
    """The name of a level combination; no two of a study share one.

    `ends` are all factors at the first and at the last level. Between them, one factor that is on is +A, one that is
    off −B, anything else A+B. Of one factor alone the levels say it. Where a factor chooses among things that have
    names, such as networks, a condition is one of them with what is on: "ResNet-18, tiles 4×4". Where one chooses
    among values, nothing is left out of a whole, and a value that is not the base's is named: "lr 0.0003+CutMix".
    """
    if len(factors) == 1:
        (factor,) = factors
        label = levels[factor.name]
        return label if factor.are_labels_given else f"{factor.title} {label}"
    base, full = ends
    on = [factor for factor in factors if levels[factor.name] != factor.labels[0]]
    off = [factor for factor in factors if levels[factor.name] == factor.labels[0]]
    if not on:
        return base
    has_values = any(map(_is_value, factors))
    at_end = all(levels[factor.name] == factor.labels[-1] for factor in on)
    if not off and at_end and not (has_values and full == ENDS[1]):
        return full
    if any(map(_is_choice, factors)):
        return ", ".join(
            levels[factor.name] if _is_choice(factor) else _named(factor, levels)
            for factor in factors
            if _is_choice(factor) or factor in on
        )
    if len(on) == 1:
        return f"+{_named(on[0], levels)}"
    if len(off) == 1 and at_end and not has_values:
        return f"−{off[0].title}"
    return "+".join(_named(factor, levels) for factor in on)


def _is_choice(factor: Factor) -> bool:
    """Whether none of its levels is the absence of the others, and all were given names."""
    return factor.are_labels_given and OFF not in factor.changes


def _is_value(factor: Factor) -> bool:
    """Whether its base is a value as good as the others, such as a learning rate or all images, and not their absence.

    What is off is a value only where someone gave it a name, and where it is settings that the others change: without
    an augmentation there is none, whatever that is called.
    """
    others_are_settings = all(isinstance(change, Mapping) for change in factor.changes if change is not OFF)
    is_off = factor.changes[0] is OFF and not (factor.are_labels_given and others_are_settings)
    return not _is_choice(factor) and not is_off and factor.labels[0] not in _ABSENT


def _named(factor: Factor, levels: Mapping[str, str]) -> str:
    """A factor that is on; where it can be on in several ways, or is a value, in which."""
    is_enough = len(factor.labels) == 2 and not _is_value(factor)
    return factor.title if is_enough else f"{factor.title} {levels[factor.name]}"
