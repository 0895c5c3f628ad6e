"""The settings of runs under the dotted names that the commands use, what of them is shared, what is assumed."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from nearsight.configuration import encode
from nearsight.train import ASSUMED, RunConfig


def flat_settings(config: RunConfig) -> dict[str, object]:
    """{"model.depth": 8, "protocol.cutmix.p": 0.5, …} of a run, without its seed and without what has no effect."""
    fields = encode(config)
    del fields["seed"]
    if not config.measure_every:
        del fields["measure_every"], fields["num_measured_during"]
    augmentations = fields["protocol"].pop("augment")
    for augmentation in augmentations:
        fields["protocol"][augmentation.pop("name")] = augmentation
    return _flat(fields)


def _flat(fields: Mapping[str, Any], above: str = "") -> dict[str, object]:
    flat: dict[str, object] = {}
    for name, value in fields.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{above}{name}.")
        else:
            flat[f"{above}{name}"] = value
    return flat


def shared_settings(runs: Sequence[Mapping[str, object]]) -> dict[str, object]:
    """What is the same in every run that has it: an augmentation's settings are shared by the runs that use it."""
    names = dict.fromkeys(name for settings in runs for name in settings)
    shared = {}
    for name in names:
        values = [settings[name] for settings in runs if name in settings]
        if all(value == values[0] for value in values):
            shared[name] = values[0]
    return shared


def assumed_names(names: Iterable[str]) -> list[str]:
    """Those whose values the paper does not report."""
    return [name for name in names if any(f".{name}".endswith(f".{assumed}") for assumed in ASSUMED)]
