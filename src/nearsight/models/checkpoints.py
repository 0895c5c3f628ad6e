"""Trained weights from a file: safetensors, or what `torch.save` wrote, read without running its code.

Training scripts wrap a model's weights in dictionaries ("state_dict", "teacher", …) and its names in prefixes
("module.", "backbone.", …). Both are undone where that makes the names fit, and the note that is returned says so.
"""

import argparse
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from nearsight.errors import InputError

# The first that fits best is taken: averaged weights before raw ones, and of DINO's two networks the teacher, because
# these are the ones that are evaluated.
_NESTINGS = (
    *("state_dict_ema", "model_ema", "ema", "teacher", "state_dict", "model_state_dict", "model", "student"),
    *("module", "weights"),
)
_PREFIXES = re.compile(r"(?:(?:module|_orig_mod|backbone|model)\.)+")
_BEHIND_ATTENTION = ("head", "heads", "head_dist", "fc", "fc_norm", "classifier", "pre_logits")
_INDUCED = (".gaug.", ".locality.", ".cpe.")
_SHOWN = 3

Weights = dict[str, Tensor]


def is_induced(name: str) -> bool:
    """Whether a weight is of what makes attention local, and so not of the model as it was before."""
    return any(part in name for part in _INDUCED)


def load_checkpoint(model: nn.Module, path: Path) -> str:
    """Load the weights of a file into `model`; a sentence that says what was taken, left out and not used.

    Every weight in front of the classifier must be there with its shape; the classifier may differ, because attention
    does not depend on it. One of timm's gets as many classes as the file has.
    """
    return load_weights(model, read_weights(path), path, classes_of_file=True)


def load_weights(model: nn.Module, read: Any, path: Path | str, *, classes_of_file: bool = False) -> str:
    """As `load_checkpoint`, of what was read from a file or comes from elsewhere. Parts of LocAt may be missing: they
    keep what they have, and so does a classifier for other classes, unless it is to get those of the file."""
    nested = list(_unwrapped(read))
    if not nested:
        raise InputError(f"{path} holds no weights: no tensors by name, nor a {', '.join(_NESTINGS)} with them")
    own = model.state_dict()
    fits = [(_best_fit(model, stored), stored, opened) for stored, opened in nested]
    # Of equals the first, in the order of `_NESTINGS`.
    (prefix, weights, converted), stored, opened = max(fits, key=lambda fit: _num_fitting(fit[0][1], own))
    num_classes = _classes_of(weights, model) if classes_of_file else None
    if num_classes not in (None, getattr(model, "num_classes", None)):
        model.reset_classifier(num_classes)  # type: ignore[operator]
        own = model.state_dict()
    left_out = [name for name, weight in own.items() if name not in weights or weights[name].shape != weight.shape]
    missing = [name for name in left_out if not _is_behind_attention(model, name) and not is_induced(name)]
    if missing:
        raise _unfit(path, missing, weights, own)
    for name in own.keys() - set(left_out):
        if own[name].is_floating_point() and not weights[name].is_floating_point():
            kind = str(weights[name].dtype).removeprefix("torch.")
            raise InputError(f"{path}: {name} is of {kind}: quantised weights cannot be used; save the original ones")
    model.load_state_dict({name: weights[name] for name in own if name not in left_out}, strict=False)

    def resized(name: str) -> bool:
        return prefix + name in stored and stored[prefix + name].shape != own[name].shape

    steps = [
        f"from the entry {'.'.join(opened)!r}" if opened else "",
        f"without the prefix {prefix!r}" if prefix else "",
        "with names as timm converts them" if converted else "",
    ]
    lists = {
        "resized": [name for name in own if name not in left_out and resized(name)],
        "left random, as attention does not need it": left_out,
        "not used": [name for name in weights if name not in own]
        + [name for name in stored if not name.startswith(prefix)],
    }
    taken = f"weights of {Path(path).name} {', '.join(filter(None, steps))}".rstrip()
    return "; ".join([taken, *(f"{what}: {_some(names)}" for what, names in lists.items() if names)])


def read_weights(path: Path) -> Any:
    """What a file holds, weights or dictionaries of them, without running any code of it."""
    if not path.is_file():
        raise InputError(f"{path} is {'a folder' if path.is_dir() else 'not there'}, but a file of weights is needed")
    if path.suffix == ".safetensors":
        try:
            return load_file(path)
        except (SafetensorError, OSError) as error:
            raise InputError(f"{path} is damaged or is not a safetensors file ({error})") from error
    try:
        # Namespace holds nothing but values; the checkpoints of DINO, DeiT and MAE keep their arguments in one.
        with torch.serialization.safe_globals([argparse.Namespace]), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about the pickle's version, before the error that says more
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch, zipfile and pickle raise many kinds
        foreign = _foreign_objects(path)
        if foreign:
            raise InputError(
                f"{path} holds more than weights ({_some(foreign)}); such a file can run any code when it is loaded, "
                "so it is refused: save the model's state_dict() alone, or as safetensors"
            ) from error
        raise InputError(
            f"{path} is damaged, or neither a safetensors file nor one of weights that torch.save wrote"
        ) from error


def _foreign_objects(path: Path) -> list[str]:
    """What a pickle would import, found without loading it."""
    try:
        names = torch.serialization.get_unsafe_globals_in_checkpoint(path)
    except Exception:  # not a checkpoint at all
        return []
    return sorted(set(names) - {"argparse.Namespace"})


def _unwrapped(stored: Any) -> Iterator[tuple[Weights, tuple[str, ...]]]:
    """Weights inside the usual nestings, and at last those outside, each with the entries opened on the way."""
    if not isinstance(stored, Mapping):
        return
    for name in _NESTINGS:
        for weights, opened in _unwrapped(stored.get(name)):
            yield weights, (name, *opened)
    if weights := {str(name): value for name, value in stored.items() if isinstance(value, Tensor)}:
        yield weights, ()


def _best_fit(model: nn.Module, stored: Weights) -> tuple[str, Weights, bool]:
    """(prefix to remove, the weights without it, whether timm's conversion was used) that fits the most weights."""
    own = model.state_dict()
    prefixes = {""}
    for name in stored:
        if match := _PREFIXES.match(name):
            words = match.group().split(".")[:-1]
            prefixes |= {".".join(words[: count + 1]) + "." for count in range(len(words))}
    candidates: list[tuple[str, Weights, bool]] = []
    for prefix in sorted(prefixes, key=len):
        plain = {name.removeprefix(prefix): weight for name, weight in stored.items() if name.startswith(prefix)}
        candidates.append((prefix, plain, False))
        if convert := _timm_conversion(model):
            try:
                candidates.append((prefix, convert(dict(plain), model), True))
            except Exception:  # made for other names, so not for this file
                continue

    # Of equals the first: the shortest prefix, unconverted.
    return max(candidates, key=lambda candidate: _num_fitting(candidate[1], own))


def _num_fitting(weights: Weights, own: Mapping[str, Tensor]) -> int:
    return sum(name in own and weight.shape == own[name].shape for name, weight in weights.items())


def _timm_conversion(model: nn.Module) -> Callable[[Weights, nn.Module], Weights] | None:
    """timm's own conversion of published weights to its names and to the model's image size, where it has one."""
    for kind in type(model).__mro__:
        convert = getattr(sys.modules.get(kind.__module__), "checkpoint_filter_fn", None)
        if convert is not None and kind.__module__.startswith("timm."):
            found: Callable[[Weights, nn.Module], Weights] = convert
            return found
    return None


def _classes_of(weights: Weights, model: nn.Module) -> int | None:
    """How many classes these weights are for, where the model can be given as many."""
    timms: Any = model
    if not hasattr(model, "reset_classifier") or not isinstance(own := timms.get_classifier(), nn.Linear):
        return None
    name = next(name for name, module in model.named_modules() if module is own)
    given = weights.get(f"{name}.weight")
    return len(given) if given is not None and given.shape[1:] == own.weight.shape[1:] else None


def _is_behind_attention(model: nn.Module, name: str) -> bool:
    config: Any = getattr(model, "pretrained_cfg", None)
    named = config.get("classifier") if isinstance(config, Mapping) else None
    heads = (*_BEHIND_ATTENTION, *((named,) if isinstance(named, str) else named or ()))
    return any(name.startswith(f"{head}.") for head in heads)


def _unfit(path: Path | str, missing: list[str], weights: Weights, own: Mapping[str, Tensor]) -> InputError:
    if not weights.keys() & own.keys():
        return InputError(f"{path} has none of the model's weights; it holds {_some(weights)}")
    absent = [name for name in missing if name not in weights]
    if absent:
        return InputError(
            f"{path} lacks {len(absent)} of the model's {len(own)} weights: {_some(absent)}; is it of another model?"
        )
    name = missing[0]
    return InputError(
        f"{path} has {name} as {list(weights[name].shape)}, but the model's is {list(own[name].shape)} "
        f"({len(missing)} differ in all); is it of another model, or of another --image-size?"
    )


def _some(names: Iterable[str]) -> str:
    names = list(names)
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
