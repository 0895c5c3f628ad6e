"""What a model is, as a digest: two models of one digest compute the same, as far as weights and settings tell."""

import hashlib
from dataclasses import fields, is_dataclass

import torch
from torch import nn

# Neither says anything about what an evaluated model computes.
_NOT_SETTINGS = ("training", "fused_attn")


def weights_hash(model: nn.Module) -> str:
    """The sha256 of a model's class and of all its weights and buffers by name."""
    digest = hashlib.sha256(type(model).__qualname__.encode())
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name}:{tensor.dtype}:{list(tensor.shape)};".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def model_identity(model: nn.Module) -> str:
    """A digest of a model's weights and of its modules' kinds and settings: the number of heads and the kernel of a
    local attention change what a model computes, but no weight."""
    digest = hashlib.sha256(weights_hash(model).encode())
    for name, module in sorted(model.named_modules()):
        digest.update(f"{name}:{type(module).__qualname__};".encode())
        for setting, value in sorted(vars(module).items()):
            if _is_simple(value) and not setting.startswith("_") and setting not in _NOT_SETTINGS:
                digest.update(f"{setting}={value!r};".encode())
    return digest.hexdigest()


def _is_simple(value: object) -> bool:
    """Whether it reads the same in every process."""
    if isinstance(value, tuple):
        return all(map(_is_simple, value))
    if is_dataclass(value) and not isinstance(value, type):
        of_fields = [getattr(value, field.name) for field in fields(value)]
        return all(each is None or _is_simple(each) for each in of_fields)
    return isinstance(value, bool | int | float | str)
