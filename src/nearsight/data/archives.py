"""Unpacking archives that were downloaded: nothing may land outside the folder, and no link may lead out of it."""

import errno
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path, PurePosixPath

from nearsight.errors import InputError


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
    """Unpack a zip or tar file. All its members are checked before the first is written."""
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
