"""The birth certificate of a run: which code, which libraries, which machine."""

import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from nearsight.version import __version__

COMMIT = "NEARSIGHT_COMMIT"
"""Environment variable that names the commit where there is no checkout to ask, as in a container."""
CERTIFIED = ("commit", "versions", "hardware", "data_fingerprint")
"""What a run was made by and of, as its provenance.json says it and that of a study, joined over its runs."""
TAKEN_FROM = "taken_from"
"""In provenance.json of a run: the study from whose tables it was taken, since it was not trained where it is."""
_LIBRARIES = ("torch", "torchvision", "timm", "numpy", "safetensors")


def provenance(device: torch.device) -> dict[str, Any]:
    """Commit, versions and hardware, as found now."""
    return {"commit": _commit(), "versions": _versions(), "hardware": _hardware(device)}


def joined(certificates: Iterable[Mapping[str, Any]], names: Iterable[str]) -> dict[str, list[Any]]:
    """Name → every value that it has among these certificates, once; None where one does not tell.

    A run that was taken from tables may say several, one of which is its own.
    """
    held = list(certificates)
    found: dict[str, list[Any]] = {name: [] for name in names}
    for name, values in found.items():
        for certificate in held:
            told = certificate.get(name)
            for value in told if isinstance(told, list) else [told]:
                if value not in values:
                    values.append(value)
    return found


def _commit() -> str | None:
    """The commit of the checkout this package runs from, "+changes" if edited; else what the environment says."""
    folder = Path(__file__).resolve().parent
    try:
        # An installed package may lie inside some other project's checkout: only a tracked file speaks for this one.
        _git(folder, "ls-files", "--error-unmatch", Path(__file__).name)
        commit = _git(folder, "rev-parse", "HEAD")
        return commit + ("+changes" if _git(folder, "status", "--porcelain", "--", "..") else "")
    except (OSError, subprocess.SubprocessError):
        return os.environ.get(COMMIT) or None


def _git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=True, timeout=10
    )
    return done.stdout.strip()


def _versions() -> dict[str, str]:
    versions = {"nearsight": __version__, "python": platform.python_version()}
    for library in _LIBRARIES:
        versions[library] = importlib.metadata.version(library)
    if torch.version.cuda:
        versions["cuda"] = torch.version.cuda
    return versions


def _hardware(device: torch.device) -> dict[str, Any]:
    hardware: dict[str, Any] = {
        "device": device.type,
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
    }
    if device.type == "cuda":
        hardware["gpu"] = torch.cuda.get_device_name(device)
    return hardware
