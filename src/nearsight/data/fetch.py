"""Behind `nearsight data fetch`: get a data set from its makers, check it, unpack it."""

import contextlib
import errno
import os
import shutil
import tarfile
import tempfile
import time
import urllib.error
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath

from nearsight.data.loading import dataset_spec, find_source
from nearsight.data.locations import data_folder
from nearsight.data.parquet import require
from nearsight.data.registry import Download, HubDownload, Source
from nearsight.errors import InputError
from nearsight.files import output_folder, reading

_ARCHIVES = (".tar.gz", ".tgz", ".tar", ".zip")
_FETCHING = ".fetching-"
_SECONDS_TO_FETCH = 24 * 3600.0
"""A fetch that started longer ago has ended."""


def fetch_dataset(name: str, data_dir: Path | None = None) -> Source:
    """Download a data set into the data folder, unless it is there, and say where it is."""
    spec = dataset_spec(name)
    if spec.find is None:
        raise InputError(f"{name} needs no files: nearsight draws it")
    folder = data_folder(data_dir)
    with contextlib.suppress(InputError), reading(folder):  # an incomplete one is fetched again
        if folder.is_dir() and (present := spec.find(folder, spec.image_size)) is not None:
            return present
    if not spec.downloads:
        raise InputError(f"{name} cannot be fetched: {spec.about}; put it into {folder}")
    _remove_remains(output_folder(folder))
    for download in spec.downloads:
        if isinstance(download, HubDownload):
            _from_hub(download, folder)
        else:
            _from_web(download, folder)
    return find_source(name, spec, folder, spec.image_size)


def _remove_remains(folder: Path) -> None:
    """What killed fetches left behind, which may be as large as the data; a young one may be still going on."""
    for remains in folder.glob(f"{_FETCHING}*"):
        with contextlib.suppress(FileNotFoundError):  # another fetch has just ended
            if time.time() - remains.stat().st_mtime > _SECONDS_TO_FETCH:
                shutil.rmtree(remains, ignore_errors=True)


def _download(download: Download, into: Path) -> Path:
    from torchvision.datasets import utils as web

    try:
        web.download_url(download.url, into, filename=download.filename, md5=download.md5)
    except urllib.error.URLError as error:
        raise InputError(
            f"{download.url} cannot be reached: {error.reason}; try again with a network, "
            "or get the file elsewhere and unpack it into the data folder"
        ) from error
    except RuntimeError as error:  # torchvision raises it for a wrong checksum
        raise InputError(f"{download.url} did not arrive as published (md5 {download.md5}): {error}") from error
    return into / download.filename


@contextlib.contextmanager
def _fetching(what: str, folder: Path) -> Iterator[Path]:
    """A folder for a download until it is complete: a partial download never has a data set's name."""
    try:
        with tempfile.TemporaryDirectory(prefix=_FETCHING, dir=folder) as temporary:
            yield Path(temporary)
    except OSError as error:
        reason = "the disk is full" if error.errno == errno.ENOSPC else error.strerror or error
        raise InputError(f"{what} could not be fetched into {folder}: {reason}") from error


def _check_absent(target: Path) -> None:
    if target.exists():
        raise InputError(f"{target} is there already, but is not complete; remove it and fetch again")


def _from_web(download: Download, folder: Path) -> None:
    is_archive = download.filename.endswith(_ARCHIVES)
    if is_archive:
        _check_absent(folder / download.folder)
    with _fetching(download.url, folder) as temporary:
        file = _download(download, temporary)
        if is_archive:
            unpacked = temporary / "unpacked"
            unpack_archive(file, unpacked)
            _move_all(unpacked, folder)
        else:
            (folder / download.folder).mkdir(exist_ok=True)
            os.replace(file, folder / download.folder / file.name)


def _move_all(unpacked: Path, folder: Path) -> None:
    for item in sorted(unpacked.iterdir()):
        _check_absent(folder / item.name)
        shutil.move(item, folder / item.name)


def _from_hub(download: HubDownload, folder: Path) -> None:
    hub = require("huggingface_hub", f"to fetch {download.repository}")
    target = folder / download.folder
    _check_absent(target)
    with _fetching(download.repository, folder) as temporary:
        fetched = temporary / download.folder
        try:
            hub.snapshot_download(
                download.repository,
                repo_type="dataset",
                allow_patterns=["*.parquet", "**/*.parquet"],
                local_dir=fetched,
            )
        except Exception as error:  # the hub's clients raise those of whichever HTTP library they use
            first_line = next(iter(str(error).splitlines()), type(error).__name__)
            raise InputError(
                f"{download.repository} could not be fetched from the hub: {first_line}; try again"
            ) from error
        os.replace(fetched, target)


def _check_member(archive: Path, name: str) -> None:
    parts = PurePosixPath(name.replace("\\", "/")).parts
    if not parts or parts[0] == "/" or ".." in parts or ":" in parts[0]:
        raise InputError(f"{archive} is refused: its member {name!r} would be written outside the folder")


def _open_zip(archive: Path) -> tuple[list[str], Callable[[Path], None]]:
    with zipfile.ZipFile(archive) as opened:
        for info in opened.infolist():
            if (info.external_attr >> 16) & 0o170000 == 0o120000:
                raise InputError(f"{archive} is refused: its member {info.filename!r} is a link")

    def unpack(into: Path) -> None:
        with zipfile.ZipFile(archive) as reopened:
            reopened.extractall(into)

    return opened.namelist(), unpack


def _open_tar(archive: Path) -> tuple[list[str], Callable[[Path], None]]:
    with tarfile.open(archive) as opened:
        members = opened.getmembers()
    for member in members:
        if not (member.isfile() or member.isdir()):
            raise InputError(f"{archive} is refused: its member {member.name!r} is a link or a device")

    def unpack(into: Path) -> None:
        with tarfile.open(archive) as reopened:
            reopened.extractall(into, filter="data")

    return [member.name for member in members], unpack


def unpack_archive(archive: Path, into: Path) -> None:
    """Unpack a zip or tar file. All its members are checked before the first is written: nothing may land outside the
    folder, and no link may lead out of it."""
    try:
        if zipfile.is_zipfile(archive):
            names, unpack = _open_zip(archive)
        elif tarfile.is_tarfile(archive):
            names, unpack = _open_tar(archive)
        else:
            raise InputError(f"{archive} is neither a zip nor a tar file; get it again")
        for name in names:
            _check_member(archive, name)
        unpack(into)
    except InputError:
        raise
    except Exception as error:  # zipfile, tarfile, gzip and zlib raise many kinds for a damaged one
        if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):
            raise  # the disk's
        raise InputError(f"{archive} is damaged: {error}; get it again") from error
