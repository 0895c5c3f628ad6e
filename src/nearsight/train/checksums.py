"""What the files of a finished folder were, so that damage is noticed before it is believed.

checksums.json has the size and the sha256 of each. It is put down before provenance.json, which comes last and is one
of the files it names: a folder that is complete has all its sums, and a crash between the two leaves one that is not
complete. Files of tensors have their size here and a digest inside, which is looked at whenever they are read: a study
of a thousand runs would otherwise read all their weights to show a table. A file that has gone is missed by whoever
needs it: weights may well be elsewhere. Folders of earlier versions have no sums, and are read as they are.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

from nearsight.errors import InputError
from nearsight.files import LostError, as_json, read_object, replacing, write_json, write_text

CHECKSUMS, PROVENANCE = "checksums.json", "provenance.json"
SCHEMA = 1


def certify(folder: Path, names: Iterable[str], certificate: Mapping[str, Any]) -> None:
    """Write provenance.json, the sign that a folder is complete, and before it the sums of these files and of it.

    Only one can do that: where another process has completed the folder in the meantime, this is a `LostError`.
    """
    text = as_json(dict(certificate))
    if (folder / PROVENANCE).exists():  # whose sums must not be replaced by ours
        raise LostError(f"{folder} was completed by another process in the meantime")
    sums = {name: _sums_of_file(folder / name) for name in names if (folder / name).is_file()}
    _write(folder, {**sums, PROVENANCE: _sums(text.encode())})
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
        _compare(folder, _state(folder))


def _state(folder: Path) -> tuple[tuple[str, int, int], ...]:
    """Name, time and size of every file, but for those that are being written and may be gone in a moment."""
    with os.scandir(folder) as entries:
        statuses = [(entry.name, entry.stat()) for entry in entries if not entry.name.startswith(".")]
    return tuple(sorted((name, status.st_mtime_ns, status.st_size) for name, status in statuses))


@lru_cache(maxsize=2**16)
def _compare(folder: Path, _: tuple[tuple[str, int, int], ...]) -> None:
    """Once for every state that a folder is seen in: a study asks for all its results after each of its runs."""
    for name, told in _read(folder).items():
        path = folder / name
        if path.is_file() and _sums_of_file(path) != told:
            raise InputError(
                f"{path} is damaged, or was changed: it is not what it was when the run was finished{way_out(folder)}"
            )


def check_there(folder: Path, *names: str) -> None:
    """Raise an `InputError` if a file has gone that the folder was completed with: one of these names, or any."""
    for name in _read(folder):
        if (not names or name in names) and not (folder / name).is_file():
            raise InputError(f"{folder / name} has gone: it was there when the run was finished{way_out(folder)}")


def way_out(folder: Path) -> str:
    """What to do about a finished folder that is not what it was, as the end of a sentence."""
    return f"; remove {folder / PROVENANCE}, and the command that made it makes the end of the run again"


@contextmanager
def changing(path: Path) -> Iterator[None]:
    """While the body replaces a file of a complete folder. Killed in between, it has no sum; not a wrong one."""
    folder, name = path.parent, path.name
    held = _read(folder)
    if name in held:
        _write(folder, {each: sums for each, sums in held.items() if each != name})
    yield
    if name in held:
        _write(folder, {**held, name: _sums_of_file(path)})


def _sums_of_file(path: Path) -> dict[str, Any]:
    return {"bytes": path.stat().st_size} if path.suffix == ".safetensors" else _sums(path.read_bytes())


def _sums(content: bytes) -> dict[str, Any]:
    return {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def _write(folder: Path, files: Mapping[str, Mapping[str, Any]]) -> None:
    write_json(folder / CHECKSUMS, {"schema": SCHEMA, "files": files, "digest": _digest(files)})


def _read(folder: Path) -> dict[str, dict[str, Any]]:
    """File → its sums; none in a folder that is not complete, or that is of an earlier version."""
    path = folder / CHECKSUMS
    if not path.exists() or not (folder / PROVENANCE).exists():
        return {}
    told = read_object(path, missing=str(folder), way_out=way_out(folder))
    schema, files = told.get("schema"), told.get("files")
    if isinstance(schema, int) and schema > SCHEMA:
        raise InputError(f"{path} has schema {schema}, but this nearsight reads up to {SCHEMA}; update nearsight")
    if not isinstance(files, dict) or not all(isinstance(each, dict) for each in files.values()):
        raise InputError(f"{path} is damaged: it does not say the sums of files{way_out(folder)}")
    # Earlier versions wrote no digest. Other keys than these would be damage to that one's name.
    is_own = "digest" not in told or told["digest"] == _digest(files)
    if schema != SCHEMA or not told.keys() <= {"schema", "files", "digest"} or not is_own:
        raise InputError(f"{path} is damaged: it is not what was written{way_out(folder)}")
    return files


def _digest(files: Mapping[str, Mapping[str, Any]]) -> str:
    """Of what checksums.json says, so that damage to itself is noticed, too."""
    return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()
