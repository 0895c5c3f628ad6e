"""Fetching, with the network played by a function, and unpacking, with archives nobody should trust."""

import dataclasses
import errno
import functools
import http.server
import io
import stat
import tarfile
import threading
import urllib.error
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from small_files import write_cifar100_python, write_parquet, write_svhn

from nearsight.data import fetch, fetch_dataset, load_dataset
from nearsight.data.fetch import unpack_archive
from nearsight.data.registry import Download
from nearsight.errors import InputError


def make_tar(path: Path, members: list[tarfile.TarInfo]) -> Path:
    with tarfile.open(path, "w:gz") as archive:
        for member in members:
            archive.addfile(member, io.BytesIO(b"x" * member.size))
    return path


def tar_member(name: str, kind: bytes = tarfile.REGTYPE, link: str = "") -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.type, member.linkname, member.size = kind, link, 3 if kind == tarfile.REGTYPE else 0
    return member


GOOD = tar_member("set/good.txt")


@pytest.mark.parametrize(
    "bad",
    [
        tar_member("../outside.txt"),
        tar_member("set/../../outside.txt"),
        tar_member("/outside.txt"),
        tar_member("C:/outside.txt"),
        tar_member("..\\outside.txt"),
        tar_member("set/link", tarfile.SYMTYPE, "/etc"),
        tar_member("set/link", tarfile.SYMTYPE, "good.txt"),
        tar_member("set/link", tarfile.LNKTYPE, "../outside.txt"),
        tar_member("set/device", tarfile.CHRTYPE),
        tar_member("set/pipe", tarfile.FIFOTYPE),
    ],
    ids=lambda member: f"{member.name} {member.type.decode()}",
)
def test_tar_members_that_could_do_harm_are_refused_before_anything_is_written(tmp_path: Path, bad) -> None:
    archive = make_tar(tmp_path / "a.tgz", [GOOD, bad])
    with pytest.raises(InputError, match=r"a\.tgz is refused: its member"):
        unpack_archive(archive, tmp_path / "into" / "folder")
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["a.tgz"]


@pytest.mark.parametrize("name", ["../outside.txt", "set/../../outside.txt", "/outside.txt", "..\\outside.txt"])
def test_zip_members_that_would_leave_the_folder_are_refused(tmp_path: Path, name: str) -> None:
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("set/good.txt", "good")
        archive.writestr(name, "bad")
    with pytest.raises(InputError, match="would be written outside the folder"):
        unpack_archive(tmp_path / "a.zip", tmp_path / "into" / "folder")
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["a.zip"]


def test_links_in_zip_files_are_refused(tmp_path: Path) -> None:
    link = zipfile.ZipInfo("set/link")
    link.external_attr = (stat.S_IFLNK | 0o777) << 16
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr(link, "/etc")
    with pytest.raises(InputError, match="is a link"):
        unpack_archive(tmp_path / "a.zip", tmp_path / "into")
    assert not (tmp_path / "into").exists()


def test_good_archives_are_unpacked(tmp_path: Path) -> None:
    make_tar(tmp_path / "a.tgz", [GOOD, tar_member("set/below/more..txt")])
    unpack_archive(tmp_path / "a.tgz", tmp_path / "tar")
    assert (tmp_path / "tar/set/below/more..txt").read_bytes() == b"xxx"
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("set/good.txt", "good")
    unpack_archive(tmp_path / "a.zip", tmp_path / "zip")
    assert (tmp_path / "zip/set/good.txt").read_text() == "good"


def test_damaged_archives_are_named(tmp_path: Path) -> None:
    whole = make_tar(tmp_path / "a.tgz", [tar_member(f"set/{number}") for number in range(200)]).read_bytes()
    (tmp_path / "a.tgz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(InputError, match=r"a\.tgz is damaged"):
        unpack_archive(tmp_path / "a.tgz", tmp_path / "into")
    (tmp_path / "b.zip").write_bytes(b"not an archive")
    with pytest.raises(InputError, match="neither a zip nor a tar"):
        unpack_archive(tmp_path / "b.zip", tmp_path / "into")


@pytest.fixture
def web(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes | Exception]:
    """What the network answers, by file name."""
    answers: dict[str, bytes | Exception] = {}

    def download_url(url: str, root: Path, filename: str, md5: str) -> None:
        answer = answers.get(filename, urllib.error.URLError("Name or service not known"))
        if isinstance(answer, Exception):
            raise answer
        Path(root, filename).write_bytes(answer)

    monkeypatch.setattr("torchvision.datasets.utils.download_url", download_url)
    return answers


def cifar_archive(tmp_path: Path) -> bytes:
    write_cifar100_python(tmp_path / "made")
    with tarfile.open(tmp_path / "made.tgz", "w:gz") as archive:
        archive.add(tmp_path / "made" / "cifar-100-python", "cifar-100-python")
    return (tmp_path / "made.tgz").read_bytes()


def test_an_archive_is_fetched_once(tmp_path: Path, data_dir: Path, web: dict[str, bytes | Exception]) -> None:
    web["cifar-100-python.tar.gz"] = cifar_archive(tmp_path)
    source = fetch_dataset("cifar100", data_dir)
    assert source.folder == data_dir / "cifar-100-python"
    assert [path.name for path in data_dir.iterdir()] == ["cifar-100-python"], "neither archive nor temporary is left"
    web.clear()
    assert fetch_dataset("cifar100", data_dir).folder == source.folder


def test_plain_files_are_fetched_into_their_folder(
    tmp_path: Path, data_dir: Path, web: dict[str, bytes | Exception]
) -> None:
    write_svhn(tmp_path / "made")
    for path in (tmp_path / "made" / "svhn").iterdir():
        web[path.name] = path.read_bytes()
    assert fetch_dataset("svhn", data_dir).folder == data_dir / "svhn"


def test_the_default_folder_is_made(tmp_path: Path, cache_home: Path, web: dict[str, bytes | Exception]) -> None:
    web["cifar-100-python.tar.gz"] = cifar_archive(tmp_path)
    assert fetch_dataset("cifar100").folder == cache_home / "nearsight" / "data" / "cifar-100-python"


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (urllib.error.URLError("Name or service not known"), "cannot be reached: Name or service not known; try again"),
        (
            RuntimeError("File not found or corrupted."),
            "did not arrive as published .md5 eb9058c3a382ffc7106e4002c42a8d85",
        ),
        (OSError(errno.ENOSPC, "No space left on device"), "the disk is full"),
        (TimeoutError("timed out"), "could not be fetched into .*timed out"),
        (b"not an archive", "neither a zip nor a tar"),
    ],
)
def test_what_goes_wrong_is_said_and_leaves_nothing(
    data_dir: Path, web: dict[str, bytes | Exception], answer: bytes | Exception, message: str
) -> None:
    web["cifar-100-python.tar.gz"] = answer
    with pytest.raises(InputError, match=message):
        fetch_dataset("cifar100", data_dir)
    assert list(data_dir.iterdir()) == []


def test_an_incomplete_folder_is_not_overwritten(
    tmp_path: Path, data_dir: Path, web: dict[str, bytes | Exception]
) -> None:
    web["cifar-100-python.tar.gz"] = RuntimeError("it must not be downloaded, because it could not be put anywhere")
    (data_dir / "cifar-100-python").mkdir()
    with pytest.raises(InputError, match="is there already, but is not complete; remove it"):
        fetch_dataset("cifar100", data_dir)


def test_half_of_one_version_is_in_nobody_s_way(
    tmp_path: Path, data_dir: Path, web: dict[str, bytes | Exception]
) -> None:
    web["cifar-100-python.tar.gz"] = cifar_archive(tmp_path)
    (data_dir / "cifar-100-binary").mkdir()
    with pytest.raises(InputError, match="cifar-100-binary is not complete"):
        load_dataset("cifar100", data_dir=data_dir)
    assert fetch_dataset("cifar100", data_dir).folder == data_dir / "cifar-100-python"
    web.clear()
    assert fetch_dataset("cifar100", data_dir).folder == data_dir / "cifar-100-python"
    assert len(load_dataset("cifar100", data_dir=data_dir, verify=False).train) == 200


class TestHub:
    @pytest.fixture(autouse=True)
    def hub(self, monkeypatch: pytest.MonkeyPatch) -> list[Exception]:
        """What the hub answers after the first file."""
        errors: list[Exception] = []

        def snapshot_download(repository: str, *, local_dir: Path, **options: object) -> None:
            assert repository == "timm/mini-imagenet"
            for name in ("train", "test"):
                write_parquet(local_dir / "data" / f"{name}-00000-of-00001.parquet", [0])
                if errors:
                    raise errors[0]

        monkeypatch.setattr(pytest.importorskip("huggingface_hub"), "snapshot_download", snapshot_download)
        return errors

    def test_all_of_it(self, data_dir: Path, hub: list[Exception]) -> None:
        assert fetch_dataset("mini-imagenet", data_dir).folder == data_dir / "mini-imagenet"
        assert [path.name for path in data_dir.iterdir()] == ["mini-imagenet"]
        hub.append(AssertionError("it is there"))
        assert len(fetch_dataset("mini-imagenet", data_dir).files) == 2

    def test_half_of_it_is_nothing(self, data_dir: Path, hub: list[Exception]) -> None:
        hub.append(ConnectionError("no route to host\nmore lines"))
        with pytest.raises(
            InputError, match="timm/mini-imagenet could not be fetched from the hub: no route to host; "
        ):
            fetch_dataset("mini-imagenet", data_dir)
        assert list(data_dir.iterdir()) == []

    def test_what_is_there_is_not_overwritten(self, data_dir: Path, hub: list[Exception]) -> None:
        hub.append(AssertionError("it must not be downloaded"))
        write_parquet(data_dir / "mini-imagenet" / "train-00000-of-00002.parquet", [0])
        with pytest.raises(InputError, match="mini-imagenet is there already, but is not complete; remove it"):
            fetch_dataset("mini-imagenet", data_dir)


@pytest.mark.parametrize(
    ("name", "message"),
    [("shapes", "needs no files"), ("imagenet", "cannot be fetched"), ("cifer100", "did you mean 'cifar100'")],
)
def test_what_cannot_be_fetched(data_dir: Path, name: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        fetch_dataset(name, data_dir)


@pytest.fixture
def address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A web server on this machine with one file."""
    (tmp_path / "served").mkdir()
    (tmp_path / "served" / "file.bin").write_bytes(b"content")
    monkeypatch.setenv("no_proxy", "*")
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(tmp_path / "served"))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_downloads_are_checked(tmp_path: Path, address: str) -> None:
    """Through torchvision and a real socket."""
    good = Download(url=f"{address}/file.bin", md5="9a0364b9e99bb480dd25e1f0284c8555", folder="set")
    assert fetch._download(good, tmp_path).read_bytes() == b"content"
    with pytest.raises(InputError, match="did not arrive as published"):
        fetch._download(dataclasses.replace(good, md5="0" * 32), tmp_path / "again")
    with pytest.raises(InputError, match="cannot be reached: File not found"):
        fetch._download(dataclasses.replace(good, url=f"{address}/other.bin"), tmp_path)
