"""Tensors on disk: safetensors, written atomically, with a digest of the contents so that damage is noticed."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from nearsight.errors import InputError
from nearsight.files import replacing

_METADATA_KEY = "nearsight"


def save_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, Any]) -> None:
    """Write tensors and a JSON-able description of them. A crash leaves the file that was there before."""
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    described = {**metadata, "digest": _digest(tensors)}
    with replacing(path) as temporary:
        # One key only: safetensors writes several in random order, and equal contents should be equal files.
        save_file(tensors, temporary, metadata={_METADATA_KEY: json.dumps(described, sort_keys=True)})


def load_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors and their description; damaged files are refused by name. Nothing in the file is executed."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = json.loads((file.metadata() or {}).get(_METADATA_KEY, "{}"))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    except FileNotFoundError as error:
        raise InputError(f"{path} does not exist") from error
    except (SafetensorError, json.JSONDecodeError, UnicodeDecodeError, OSError) as error:
        raise InputError(f"{path} is damaged or is not a safetensors file ({error})") from error
    digest = metadata.pop("digest", None) if isinstance(metadata, dict) else None
    if digest is None:
        raise InputError(f"{path} was not written by nearsight: it carries no digest of its contents")
    if digest != (found := _digest(tensors)):
        raise InputError(f"{path} is damaged: its contents have digest {found[:12]}…, but {digest[:12]}… was written")
    return tensors, metadata


def _digest(tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name}:{tensor.dtype}:{list(tensor.shape)};".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
