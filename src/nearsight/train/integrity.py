"""Which run a folder belongs to, what made it, and whether its files are unchanged.

config.json, which comes first, says which run a folder belongs to: a process that finds another identity refuses it.
provenance.json, which comes last, says which code, libraries and machine made it, and makes it complete.

checksums.json has the size and the sha256 of each file, so that damage is noticed before a file is used. It is put down
before provenance.json, which is one of the files it names: a folder that is complete has all its sums, and a crash
between the two leaves one that is not complete. Files of tensors have their size there and a digest inside, which is
looked at whenever they are read: a study of a thousand runs would otherwise read all their weights to show a table. A
missing file is an error only where it is needed: weights may well be elsewhere. Folders of earlier versions have no
sums, and are read as they are.
"""

import contextlib
import hashlib
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from nearsight.data import Dataset
from nearsight.errors import InputError
from nearsight.files import (
    RUN,
    LostError,
    as_json,
    check_kind,
    check_output_folder,
    output_folder,
    read_object,
    replacing,
    write_json,
    write_text,
)
from nearsight.version import __version__

CONFIG, CHECKSUMS, PROVENANCE = RUN, "checksums.json", "provenance.json"
OWN_IMAGES = "image-folder"
"""The data set whose name, and so an identity, does not say which images they are."""
_FINGERPRINT = "data_fingerprint"
"""What config.json says of such images beside the settings."""
_SUMS_SCHEMA = 1
COMMIT = "NEARSIGHT_COMMIT"
"""Environment variable that names the commit where there is no checkout to ask, as in a container."""
CERTIFIED = ("commit", "versions", "hardware", "data_fingerprint")
"""What a run was made by and of, as its provenance.json says it and that of a study, joined over its runs."""
TAKEN_FROM = "taken_from"
"""In provenance.json of a run: the study from whose tables it was taken, since it was not trained where it is."""
_LIBRARIES = ("torch", "torchvision", "timm", "numpy", "safetensors")


def check_owner(folder: Path, identity: str, held: Callable[[], str | None], others: str = "another run") -> None:
    """Refuse a folder that is another's, or that nothing can be written to; nothing is changed.

    Args:
        held: reads the identity in config.json; called if there is one.
        others: what the folder of another holds, in words.
    """
    check_output_folder(folder)
    if (folder / CONFIG).exists():
        found = held()
        if found != identity:
            raise InputError(
                f"{folder} holds {others} ({found or 'without identity'}, not {identity}): choose another --out, "
                f"or repeat the settings in its {CONFIG} to continue it"
            )
    elif any(folder.glob("*.safetensors")):
        raise InputError(f"{folder} holds weights but no {CONFIG}; choose another --out")
    check_kind(folder, RUN)


def claim(folder: Path, described: dict[str, Any], dataset: Dataset | None = None) -> None:
    """Write what is `described` to config.json of a checked folder, unless it is there already. For a run on the user's
    own images, also refuse other images than it began with."""
    _check_images(folder, dataset)
    output_folder(folder)
    if not (folder / CONFIG).exists():
        if dataset is not None and dataset.name == OWN_IMAGES:
            described = described | {_FINGERPRINT: dataset.fingerprint}
        write_json(folder / CONFIG, described)


def _check_images(folder: Path, dataset: Dataset | None) -> None:
    """Refuse a folder whose run is on other images; None: not known, as in a folder that does not say on which."""
    path = folder / CONFIG
    recorded = read_object(path, missing=str(folder)).get(_FINGERPRINT) if path.exists() else None
    if dataset is not None and recorded not in (None, dataset.fingerprint):
        raise InputError(
            f"{folder} holds a run on other images than those in the data folder now: choose another --out, or give "
            "the run the images it began with (--data-dir)"
        )


def check_finished(folder: Path, name: str, load: Callable[[], Dataset]) -> None:
    """`_check_images` of a run that is complete, for which no images are loaded otherwise.

    Args:
        name: of its data set.
        load: loads the images that are given now. If they cannot be loaded, nothing is refused.
    """
    if name == OWN_IMAGES:
        dataset = None
        with contextlib.suppress(InputError):
            dataset = load()
        _check_images(folder, dataset)


def check_still_there(folder: Path) -> None:
    """Refuse to go on where a disk was unmounted, or the folder removed: the rest alone would be half a run."""
    if not (folder / CONFIG).is_file():
        raise InputError(f"{folder} disappeared while it was written to; put it back, and give the same command again")


def certify(folder: Path, names: Iterable[str], certificate: Mapping[str, Any]) -> None:
    """Write provenance.json, the sign that a folder is complete, and before it the sums of these files and of it.

    Only one process can do that: if another has completed the folder in the meantime, it is a `LostError`.
    """
    text = as_json(dict(certificate))
    if (folder / PROVENANCE).exists():  # whose sums must not be replaced by ours
        raise LostError(f"{folder} was completed by another process in the meantime")
    sums = {name: _sums_of_file(folder / name) for name in names if (folder / name).is_file()}
    _write_sums(folder, {**sums, PROVENANCE: _sums(text.encode())})
    write_text(folder / PROVENANCE, text, exclusive=True)


def copy_complete(source: Path, target: Path, *, without: Collection[str] = ()) -> None:
    """Copy the files of a complete folder; the one that makes it complete comes last."""
    files = [path for path in source.iterdir() if path.is_file() and not path.name.startswith(".")]
    for path in sorted(files, key=lambda path: path.name == PROVENANCE):
        if path.name not in without:
            with replacing(target / path.name) as temporary:
                shutil.copyfile(path, temporary)


def check_sums(folder: Path) -> None:
    """Raise an `InputError` that names the file, if one is not what it was when the folder was completed."""
    if (folder / CHECKSUMS).exists():
        _compare(folder, _files_of(folder))


def _files_of(folder: Path) -> tuple[tuple[str, int, int], ...]:
    """Name, time and size of every file, but for those that are being written and may be gone in a moment."""
    with os.scandir(folder) as entries:
        statuses = [(entry.name, entry.stat()) for entry in entries if not entry.name.startswith(".")]
    return tuple(sorted((name, status.st_mtime_ns, status.st_size) for name, status in statuses))


@lru_cache(maxsize=2**16)
def _compare(folder: Path, _: tuple[tuple[str, int, int], ...]) -> None:
    """Once for every state that a folder is seen in: a study asks for all its results after each of its runs."""
    for name, recorded in _read_sums(folder).items():
        path = folder / name
        if path.is_file() and _sums_of_file(path) != recorded:
            raise InputError(
                f"{path} is damaged, or was changed: it is not what it was when the run was finished{way_out(folder)}"
            )


def check_there(folder: Path, *names: str) -> None:
    """Raise an `InputError` if a file of the completed folder is missing: one of these names, or any."""
    for name in _read_sums(folder):
        if (not names or name in names) and not (folder / name).is_file():
            raise InputError(f"{folder / name} is missing: it was there when the run was finished{way_out(folder)}")


def way_out(folder: Path) -> str:
    """What to do about a finished folder that is not what it was, as the end of a sentence."""
    return f"; remove {folder / PROVENANCE}, and the command that made it makes the end of the run again"


@contextlib.contextmanager
def changing(path: Path) -> Iterator[None]:
    """While the body replaces a file of a complete folder. Killed in between, it has no sum; not a wrong one."""
    folder, name = path.parent, path.name
    held = _read_sums(folder)
    if name in held:
        _write_sums(folder, {each: sums for each, sums in held.items() if each != name})
    yield
    if name in held:
        _write_sums(folder, {**held, name: _sums_of_file(path)})


def _sums_of_file(path: Path) -> dict[str, Any]:
    return {"bytes": path.stat().st_size} if path.suffix == ".safetensors" else _sums(path.read_bytes())


def _sums(content: bytes) -> dict[str, Any]:
    return {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def _write_sums(folder: Path, files: Mapping[str, Mapping[str, Any]]) -> None:
    write_json(folder / CHECKSUMS, {"schema": _SUMS_SCHEMA, "files": files, "digest": _digest(files)})


def _read_sums(folder: Path) -> dict[str, dict[str, Any]]:
    """File → its sums; none in a folder that is not complete, or that is of an earlier version."""
    path = folder / CHECKSUMS
    if not path.exists() or not (folder / PROVENANCE).exists():
        return {}
    content = read_object(path, missing=str(folder), way_out=way_out(folder))
    schema, files = content.get("schema"), content.get("files")
    if isinstance(schema, int) and schema > _SUMS_SCHEMA:
        raise InputError(f"{path} has schema {schema}, but this nearsight reads up to {_SUMS_SCHEMA}; update nearsight")
    if not isinstance(files, dict) or not all(isinstance(each, dict) for each in files.values()):
        raise InputError(f"{path} is damaged: it does not say the sums of files{way_out(folder)}")
    # Earlier versions wrote no digest. Other keys than these would be damage to that one's name.
    is_own = "digest" not in content or content["digest"] == _digest(files)
    if schema != _SUMS_SCHEMA or not content.keys() <= {"schema", "files", "digest"} or not is_own:
        raise InputError(f"{path} is damaged: it is not what was written{way_out(folder)}")
    return files


def _digest(files: Mapping[str, Mapping[str, Any]]) -> str:
    """Of what checksums.json says, so that damage to itself is noticed, too."""
    return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()


def provenance(device: torch.device) -> dict[str, Any]:
    """Commit, versions and hardware, as found now."""
    return {"commit": _commit(), "versions": _versions(), "hardware": _hardware(device)}


def joined(certificates: Iterable[Mapping[str, Any]], names: Iterable[str]) -> dict[str, list[Any]]:
    """Name → every value that it has among these certificates, once; None where one does not say.

    A run that was taken from tables may say several, one of which is its own.
    """
    held = list(certificates)
    found: dict[str, list[Any]] = {name: [] for name in names}
    for name, values in found.items():
        for certificate in held:
            stored = certificate.get(name)
            for value in stored if isinstance(stored, list) else [stored]:
                if value not in values:
                    values.append(value)
    return found


def _commit() -> str | None:
    """The commit of the checkout this package runs from, "+changes" if edited; else what the environment says."""
    folder = Path(__file__).resolve().parent
    try:
        # An installed package may lie inside some other project's checkout, which then does not track this file.
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
