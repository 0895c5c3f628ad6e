"""Tensors on disk: safetensors, written atomically, with a digest of the contents so that damage is noticed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from nearsight.errors import InputError
from nearsight.files import check_file, replacing
from nearsight.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

_METADATA_KEY = "nearsight"
_WITH_METADATA = "2:"
"""Begins a digest that is of the description as well."""
_WAY_OUT = "; remove it, and provenance.json beside it if there is one: the command that made it then makes it again"


def save_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, Any]) -> None:
    """Write tensors and a JSON-able description of them. A crash leaves the file that was there before."""
    from safetensors.torch import save_file

    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    metadata = json.loads(json.dumps(metadata))  # as it will be read: keys are text, tuples are lists
    described = {**metadata, "digest": _digest(tensors, metadata)}
    with replacing(path) as temporary:
        temporary.touch()
        mode = temporary.stat().st_mode  # as every new file has it; safetensors' own can be read by the user alone
        try:
            # One key only: safetensors writes several in random order, and equal contents should be equal files.
            save_file(tensors, temporary, metadata={_METADATA_KEY: json.dumps(described, sort_keys=True)})
        except SafetensorError as error:  # raised for a full disk, too
            raise InputError(f"{path} cannot be written: {error}; make room, or choose another --out") from error
        temporary.chmod(mode)


def load_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors and their description; damaged files are refused by name. Nothing in the file is executed."""
    check_file(path)
    try:
        with safe_open(path, framework="pt") as file:
            metadata = json.loads((file.metadata() or {}).get(_METADATA_KEY, "{}"))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    except FileNotFoundError as error:
        raise InputError(f"{path} does not exist") from error
    # Not only safetensors' own errors: torch has others for dtypes it does not know, and memory for shapes without end.
    except Exception as error:
        raise InputError(f"{path} is damaged or is not a safetensors file ({error}){_WAY_OUT}") from error
    digest = metadata.pop("digest", None) if isinstance(metadata, dict) else None
    if not isinstance(digest, str):
        raise InputError(f"{path} was not written by nearsight: it carries no digest of its contents")
    # Of earlier versions, it is one of the tensors alone.
    found = _digest(tensors, metadata) if digest.startswith(_WITH_METADATA) else _digest(tensors)
    if digest != found:
        raise InputError(
            f"{path} is damaged: its contents have digest {found[:12]}…, but {digest[:12]}… was written{_WAY_OUT}"
        )
    return tensors, metadata


def _digest(tensors: Mapping[str, Tensor], metadata: Mapping[str, Any] | None = None) -> str:
    digest = hashlib.sha256()
    if metadata is not None:
        digest.update(json.dumps(metadata, sort_keys=True).encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name}:{tensor.dtype}:{list(tensor.shape)};".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest() if metadata is None else _WITH_METADATA + digest.hexdigest()
