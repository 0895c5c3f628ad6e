"""Finished runs at any place that fsspec reaches: another disk, a bucket.

<url>/study.json …              the study's description, tables and figures
<url>/runs/<hash>/…             the files of a run
<url>/runs/<hash>/manifest.json their sizes and sha256; written last

A run is published as a whole: one without a manifest is not there, however much of it is, and one that does not fit its
manifest is damaged. Neither is trusted; both are done again. Training itself needs a folder of this machine
(`scratch_folder`), since only there can files be replaced in one step and cells be locked.
"""

import contextlib
import hashlib
import importlib
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from nearsight.data.locations import user_cache_folder
from nearsight.errors import InputError
from nearsight.files import canonical_hash, replacing
from nearsight.train import RunFolder
from nearsight.train.provenance import TAKEN_FROM

SCHEMA = 1
"""Version of the manifest; raised whenever an older reader would go wrong."""
_MANIFEST = "manifest.json"
_LAST = "provenance.json"
"""A run folder that has it is complete, so it comes last."""
_STAYS_HERE = ("checkpoint.safetensors",)
"""What only one who continues the run would need."""

T = TypeVar("T")


class DamagedError(InputError):
    """What is published is not what was published."""


def is_url(place: str) -> bool:
    return "://" in place


def scratch_folder(url: str) -> Path:
    """Where this machine works on the study that is published there."""
    return user_cache_folder() / "studies" / canonical_hash(url)


@dataclass(frozen=True)
class Location:
    """A place for the results of one study."""

    url: str
    """As fsspec takes it: file:///…, s3://…, memory://…."""
    tries: int = 4
    """Of each transfer."""
    first_wait: float = 0.5
    """Seconds before the second one; twice as long before each further one."""

    def published(self) -> set[str]:
        """The runs that are there as a whole."""
        with self._opened() as (files, root):
            files.invalidate_cache()
            found = self._patiently(lambda: files.glob(f"{root}/runs/*/{_MANIFEST}"))
        return {path.split("/")[-2] for path in found}

    def publish(self, folder: RunFolder) -> None:
        """Put a complete run there, in place of what there may be of it."""
        if not folder.model.exists() and TAKEN_FROM not in folder.read_provenance():
            raise InputError(f"{folder.path} cannot be published: its weights are not here; remove it to do it again")
        names = sorted(path.name for path in folder.path.iterdir() if _is_published(path))
        manifest = {"schema": SCHEMA, "files": {name: _sums(folder.path / name) for name in names}}
        with self._opened() as (files, root):
            place = f"{root}/runs/{folder.path.name}"
            self._patiently(lambda: _remove(files, f"{place}/{_MANIFEST}"))  # what it names is about to change
            for name in names:
                self._put(files, folder.path / name, f"{place}/{name}")
            content = json.dumps(manifest, indent=2).encode()
            self._patiently(lambda: files.pipe_file(f"{place}/{_MANIFEST}", content))

    def fetch(self, folder: RunFolder) -> None:
        """Bring a published run here, except for its weights; `DamagedError`: it is not what was published."""
        with self._opened() as (files, root):
            place = f"{root}/runs/{folder.path.name}"
            named = self._manifest(files, f"{place}/{_MANIFEST}")
            for name in sorted(named, key=lambda name: name == _LAST):
                if not name.endswith(".safetensors"):
                    self._get(files, f"{place}/{name}", folder.path / name, named[name])

    def publish_tables(self, folder: Path) -> None:
        """Put all but the runs there: what the study is, its tables, figures and report."""
        with self._opened() as (files, root):
            for path in sorted(folder.rglob("*")):
                inside = path.relative_to(folder)
                if path.is_file() and inside.parts[0] not in ("runs", "locks") and not path.name.startswith("."):
                    self._put(files, path, f"{root}/{inside.as_posix()}")

    def fetch_description(self, folder: Path) -> bool:
        """Bring study.json here; whether there is one."""
        with self._opened() as (files, root):
            place = f"{root}/study.json"
            if not self._patiently(lambda: files.exists(place)):
                return False
            self._get(files, place, folder / "study.json", None)
        return True

    def _manifest(self, files: Any, place: str) -> dict[str, Any]:
        try:
            told = json.loads(self._patiently(lambda: files.cat_file(place)))
            named = told["files"]
            is_right = all(name == Path(name).name and set(sums) == {"bytes", "sha256"} for name, sums in named.items())
            if told["schema"] > SCHEMA:
                raise InputError(f"{place} has schema {told['schema']}, but this nearsight reads up to {SCHEMA}")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            if isinstance(error, InputError):
                raise
            raise DamagedError(f"{place} is damaged: {error}") from error
        if not is_right or _LAST not in named:
            raise DamagedError(f"{place} is damaged: it does not name the files of a run")
        return dict(named)

    def _put(self, files: Any, path: Path, place: str) -> None:
        parent = place.rpartition("/")[0]
        self._patiently(lambda: (files.makedirs(parent, exist_ok=True), files.put_file(str(path), place)))

    def _get(self, files: Any, place: str, path: Path, sums: dict[str, Any] | None) -> None:
        with replacing(path) as temporary:
            self._patiently(lambda: files.get_file(place, str(temporary)))
            if sums is not None and _sums(temporary) != sums:
                raise DamagedError(f"{place} is damaged: it does not fit the run's manifest")

    def _patiently(self, transfer: Callable[[], T]) -> T:
        """Networks come back: some tries, with longer and longer waits between them."""
        for number in range(self.tries - 1):
            try:
                return transfer()
            except FileNotFoundError:  # which no waiting brings back
                break
            except OSError:
                time.sleep(self.first_wait * 2.0**number)
        return transfer()

    @contextlib.contextmanager
    def _opened(self) -> Iterator[tuple[Any, str]]:
        """The file system, and the path on it; what goes wrong there becomes an `InputError` that names the place."""
        fsspec = importlib.import_module("fsspec.core")
        try:
            files, root = fsspec.url_to_fs(self.url)
        except (ValueError, ImportError) as error:
            raise InputError(f"{self.url} cannot be opened: {error}") from error
        try:
            yield files, root.rstrip("/")
        except InputError:
            raise
        except FileNotFoundError as error:
            raise DamagedError(f"{self.url} is damaged: {error} is missing") from error
        except OSError as error:
            raise InputError(f"{self.url} cannot be used: {error}; the same command goes on where it was") from error


def _is_published(path: Path) -> bool:
    return path.is_file() and path.name not in _STAYS_HERE and not path.name.startswith(".")


def _remove(files: Any, place: str) -> None:
    if files.exists(place):
        files.rm_file(place)


def _sums(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}
