"""Finished runs at any place that fsspec reaches: another disk, a bucket.

<url>/study.json …              the study's description, plan, tables and figures
<url>/plans/<hash>.json         every entry of the plan by itself: no runner replaces what another has planned
<url>/runs/<hash>/…             the files of a run
<url>/runs/<hash>/manifest.json their sizes and sha256; written last

A run is published as a whole: one without a manifest is not there, however much of it is, and one that does not fit its
manifest is damaged. Neither is trusted; both are done again. Training itself needs a folder of this machine
(`scratch_folder`), since only there can files be replaced in one step and cells be locked.

What lies at a URL belongs to someone else. `PublishedStudy` reads it and cannot write there; only `study run`, whose
runs are its own, is given a `StudyPublisher`. Names that are read become paths here in two forms only: a `RunName`, and
the plain name of a file.
"""

import contextlib
import hashlib
import importlib
import json
import re
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from nearsight.data.locations import user_cache_folder
from nearsight.errors import InputError
from nearsight.files import WriteError, as_json, canonical_hash, replacing
from nearsight.study.plan import Entry, entry_problem
from nearsight.train import RunFolder, RunName
from nearsight.train.integrity import TAKEN_FROM

SCHEMA = 1
"""Version of the manifest; raised whenever an older reader would go wrong."""
MOST_BYTES = 2**28
"""Of a file that is brought here: descriptions, tables and logs, no weights. The largest seen has 6 MB."""
_MANIFEST = "manifest.json"
_LAST = "provenance.json"
"""A run folder that has it is complete, so it comes last."""
_STAYS_HERE = ("checkpoint.safetensors", "heads.npz")
"""Only needed to continue the run, and to compare it image by image: no table of a study is made of these."""
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_BYTES_AT_ONCE = 2**20

T = TypeVar("T")


class DamagedError(InputError):
    """What is published is not what was published."""


def scratch_folder(url: str) -> Path:
    """Where this machine works on the study that is published there."""
    return user_cache_folder() / "studies" / canonical_hash(url)


@dataclass(frozen=True)
class PublishedStudy:
    """The results of one study at some place, to be read."""

    url: str
    """As fsspec takes it: file:///…, s3://…, memory://…."""
    tries: int = 4
    """Of each transfer."""
    first_wait: float = 0.5
    """Seconds before the second one; twice as long before each further one."""

    def published(self) -> set[RunName]:
        """The runs that are there as a whole."""
        files, root = self._opened()
        found = self._patiently(lambda: (files.invalidate_cache(), files.glob(f"{root}/runs/*/{_MANIFEST}"))[1])
        names = set[RunName]()
        for path in found:
            with contextlib.suppress(InputError):  # something else that lies there
                names.add(RunName(path.split("/")[-2]))
        return names

    def fetch(self, folder: RunFolder) -> None:
        """Bring a published run here, except for its weights; `DamagedError`: it is not what was published."""
        files, root = self._opened()
        place = f"{root}/runs/{RunName(folder.path.name)}"
        named = self._manifest(files, f"{place}/{_MANIFEST}")
        for name in sorted(named, key=lambda name: name == _LAST):
            if not name.endswith(".safetensors"):
                self._get(files, f"{place}/{name}", folder.path / name, named[name])

    def fetch_description(self, folder: Path) -> bool:
        """Bring study.json here; whether there is one."""
        files, root = self._opened()
        place = f"{root}/study.json"
        if not self._patiently(lambda: files.exists(place)):
            return False
        self._get(files, place, folder / "study.json", None)
        return True

    def fetch_plans(self) -> list[Entry]:
        """The entries of the study's plan, of all its runners."""
        files, root = self._opened()
        places = self._patiently(lambda: (files.invalidate_cache(), files.glob(f"{root}/plans/*.json"))[1])
        return [self._plan(files, place) for place in places]

    def _plan(self, files: Any, place: str) -> Entry:
        content = b"".join(self._patiently(lambda: list(_read(files, place, MOST_BYTES))))
        try:
            entry = json.loads(content)
        except (ValueError, RecursionError) as error:
            raise DamagedError(f"{place} is damaged: {error}") from error
        if problem := entry_problem(entry):
            raise DamagedError(f"{place} is damaged: this plan {problem}")
        return dict(entry)

    def _manifest(self, files: Any, place: str) -> dict[str, Any]:
        content = b"".join(self._patiently(lambda: list(_read(files, place, MOST_BYTES))))
        try:
            described = json.loads(content)
            schema, named = described["schema"], described["files"]
            if schema > SCHEMA:
                raise InputError(f"{place} has schema {schema}, but this nearsight reads up to {SCHEMA}")
            is_right = _LAST in named and all(_FILE_NAME.fullmatch(name) and _are_sums(named[name]) for name in named)
        except InputError:
            raise
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise DamagedError(f"{place} is damaged: {error}") from error
        if not is_right:
            raise DamagedError(f"{place} is damaged: it does not name the files of a run")
        return dict(named)

    def _get(self, files: Any, place: str, path: Path, sums: dict[str, Any] | None) -> None:
        most = MOST_BYTES if sums is None else min(sums["bytes"], MOST_BYTES)
        with replacing(path) as temporary:
            self._patiently(lambda: _bring(files, place, temporary, most))
            if sums is not None and _sums(temporary) != sums:
                raise DamagedError(f"{place} is damaged: it does not fit the run's manifest")

    def _patiently(self, transfer: Callable[[], T]) -> T:
        """Retry a few times with longer and longer waits, since network errors may pass.

        Errors of the place become an `InputError` that names it; each kind of place has its own types of error.
        """
        problem: Exception | None = None
        for number in range(self.tries):
            try:
                return transfer()
            except InputError:
                raise
            except FileNotFoundError as error:  # which waiting does not help
                raise DamagedError(f"{self.url} is damaged: {error} is missing") from error
            except OSError as error:
                problem = error
            except Exception as error:
                raise InputError(f"{self.url} cannot be used: {_reason(error)}") from error
            if number < self.tries - 1:
                time.sleep(self.first_wait * 2.0**number)
        raise InputError(f"{self.url} cannot be used: {problem}; the same command goes on where it was") from problem

    def _opened(self) -> tuple[Any, str]:
        """The file system, and the path on it."""
        fsspec = importlib.import_module("fsspec.core")
        try:
            files, root = fsspec.url_to_fs(self.url)
            return files, str(root).rstrip("/")
        except Exception as error:  # a file system may raise anything for a bad address
            raise InputError(f"{self.url} cannot be opened: {_reason(error)}") from error


@dataclass(frozen=True)
class StudyPublisher(PublishedStudy):
    """A place to which a study's own runs are published."""

    def publish(self, folder: RunFolder) -> None:
        """Put a complete run there, in place of what there may be of it."""
        if not folder.model.exists() and TAKEN_FROM not in folder.read_provenance():
            raise InputError(f"{folder.path} cannot be published: its weights are not here; remove it to do it again")
        names = sorted(path.name for path in folder.path.iterdir() if _is_published(path))
        manifest = {"schema": SCHEMA, "files": {name: _sums(folder.path / name) for name in names}}
        files, root = self._opened()
        place = f"{root}/runs/{RunName(folder.path.name)}"
        self._patiently(lambda: _remove(files, f"{place}/{_MANIFEST}"))  # what it names is about to change
        for name in names:
            self._put(files, folder.path / name, f"{place}/{name}")
        content = json.dumps(manifest, indent=2).encode()
        self._patiently(lambda: files.pipe_file(f"{place}/{_MANIFEST}", content))

    def publish_plans(self, entries: Iterable[Entry]) -> None:
        """Put there what is not there yet."""
        files, root = self._opened()
        self._patiently(lambda: files.makedirs(f"{root}/plans", exist_ok=True))
        for entry in entries:
            place, content = f"{root}/plans/{entry['hash']}.json", as_json(entry).encode()
            if not self._patiently(partial(files.exists, place)):
                self._patiently(partial(files.pipe_file, place, content))

    def publish_tables(self, folder: Path) -> None:
        """Put all but the runs there: what the study is, its tables, figures and report."""
        files, root = self._opened()
        for path in sorted(folder.rglob("*")):
            inside = path.relative_to(folder)
            if path.is_file() and inside.parts[0] not in ("runs", "locks") and not path.name.startswith("."):
                self._put(files, path, f"{root}/{inside.as_posix()}")

    def _put(self, files: Any, path: Path, place: str) -> None:
        parent = place.rpartition("/")[0]
        self._patiently(lambda: (files.makedirs(parent, exist_ok=True), files.put_file(str(path), place)))


def _read(files: Any, place: str, most: int) -> Iterator[bytes]:
    """The content of a file there, which may be larger than it says."""
    left = most
    with files.open(place, "rb") as file:
        while part := file.read(_BYTES_AT_ONCE):
            left -= len(part)
            if left < 0:
                raise DamagedError(f"{place} is damaged: it has more than the {most} bytes that it may have")
            yield part


def _bring(files: Any, place: str, temporary: Path, most: int) -> None:
    with temporary.open("wb") as file:
        for part in _read(files, place, most):
            try:
                file.write(part)
            except OSError as error:  # of the disk here, not of the place
                raise WriteError(error.errno, error.strerror, str(temporary)) from error


def _reason(error: Exception) -> str:
    is_plain = isinstance(error, ValueError | ImportError) and str(error)
    return " ".join((str(error) if is_plain else f"{type(error).__name__}: {error}").split())


def _is_published(path: Path) -> bool:
    return path.is_file() and path.name not in _STAYS_HERE and _FILE_NAME.fullmatch(path.name) is not None


def _remove(files: Any, place: str) -> None:
    if files.exists(place):
        files.rm_file(place)


def _are_sums(sums: Any) -> bool:
    is_whole = isinstance(sums, dict) and set(sums) == {"bytes", "sha256"}
    return is_whole and type(sums["bytes"]) is int and sums["bytes"] >= 0 and bool(_SHA256.fullmatch(sums["sha256"]))


def _sums(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}
