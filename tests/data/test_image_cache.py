"""The cache: decoded once, checked, written again when stale, never half-written."""

import errno
import io
import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from small_files import write_cifar100_binary, write_tree

from nearsight.data import cache
from nearsight.data.cache import cache_file, open_cached, source_digest, verify_cache
from nearsight.data.cifar import find_cifar100
from nearsight.data.dataset import content_fingerprint
from nearsight.data.image_folder import open_tree
from nearsight.data.registry import Chunk, Source
from nearsight.errors import InputError


@pytest.fixture
def source(data_dir: Path) -> Source:
    write_cifar100_binary(data_dir)
    return find_cifar100(data_dir, 32)


@pytest.fixture
def decodings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Grows by one whenever something is decoded."""
    seen: list[str] = []
    write = cache._write
    monkeypatch.setattr(cache, "_write", lambda path, *rest: (seen.append(path.name), write(path, *rest))[1])
    return seen


def test_what_is_mapped_is_what_was_decoded(source: Source, data_dir: Path) -> None:
    decoded = open_cached("small", source, 32)
    for part, read in ((decoded.train, source.train), (decoded.test, source.test)):
        images, labels = (np.concatenate(arrays) for arrays in zip(*read(), strict=True))
        np.testing.assert_array_equal(part.images_NCHW.numpy(), images)
        np.testing.assert_array_equal(part.labels_N.numpy(), labels)
    assert decoded.classes == source.classes
    assert decoded.fingerprint == content_fingerprint(decoded.train, decoded.test)


def test_it_is_decoded_once(source: Source, decodings: list[str]) -> None:
    first, second = open_cached("small", source, 32), open_cached("small", source, 32)
    assert len(decodings) == 1
    assert first.fingerprint == second.fingerprint
    assert torch.equal(first.train.images_NCHW, second.train.images_NCHW)


def test_writing_to_the_images_changes_no_file(source: Source) -> None:
    open_cached("small", source, 32).train.images_NCHW.fill_(7)
    assert not bool((open_cached("small", source, 32).train.images_NCHW == 7).all())
    assert verify_cache("small", source, 32)


def test_a_changed_source_is_decoded_again_and_that_is_said(
    source: Source, decodings: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    before = open_cached("small", source, 32)
    content = bytearray(source.files[0].read_bytes())
    content[100] ^= 255
    source.files[0].write_bytes(content)
    with caplog.at_level(logging.WARNING):
        after = open_cached("small", source, 32)
    assert len(decodings) == 2
    assert "have changed" in caplog.text
    assert before.fingerprint != after.fingerprint
    assert int((before.train.images_NCHW != after.train.images_NCHW).sum()) == 1, "the old mapping is still whole"


@pytest.mark.parametrize("change", ["edit", "add", "remove", "rename"])
def test_a_changed_folder_is_noticed(tmp_path: Path, change: str) -> None:
    write_tree(tmp_path / "tree")
    source = open_tree(tmp_path / "tree", 32)
    before = source_digest(source)
    assert before == source_digest(source)
    path = tmp_path / "tree" / "val" / "class1" / "2.png"
    if change == "edit":  # in place, same size
        content = bytearray(path.read_bytes())
        content[-20] ^= 255
        path.write_bytes(content)
    elif change == "add":
        (path.parent / "new.png").write_bytes(path.read_bytes())
    elif change == "remove":
        path.unlink()
    else:
        path.rename(path.with_name("other.png"))
    assert source_digest(source) != before


def rewrite_record(path: Path, **fields: object) -> None:
    """Change what a cache file says about itself, and nothing else."""
    content = path.read_bytes()
    length = int.from_bytes(content[-16:-8], "little")
    record = json.loads(content[-16 - length : -16]) | fields
    text = json.dumps(record).encode()
    path.write_bytes(content[: -16 - length] + text + len(text).to_bytes(8, "little") + content[-8:])


def test_a_cache_of_another_version_is_made_anew_and_that_is_said(
    source: Source, decodings: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    open_cached("small", source, 32)
    rewrite_record(cache_file("small", source, 32), version=cache.VERSION + 1, a_field_of_the_future=1)
    with caplog.at_level(logging.WARNING):
        open_cached("small", source, 32)
    assert len(decodings) == 2
    assert f"it has version {cache.VERSION + 1}, and this nearsight writes {cache.VERSION}" in caplog.text


def damage_pixel(content: bytes) -> bytes:
    return content[:1000] + bytes([content[1000] ^ 1]) + content[1001:]


@pytest.mark.parametrize(
    "damage",
    [
        damage_pixel,
        lambda content: content[:-1],
        lambda content: content[: len(content) // 2],
        lambda content: b"",
        lambda content: content[:-16] + b"\xff" * 8 + content[-8:],
        lambda content: content[:-30] + b"?" * 14 + content[-16:],
        lambda content: b"x" + content,
    ],
    ids=["pixel", "last byte", "half", "empty", "length", "record", "shifted"],
)
def test_damage_is_noticed_and_repaired(
    source: Source, decodings: list[str], caplog: pytest.LogCaptureFixture, damage
) -> None:
    intact = open_cached("small", source, 32).fingerprint
    path = cache_file("small", source, 32)
    path.write_bytes(damage(path.read_bytes()))
    assert not verify_cache("small", source, 32)
    with caplog.at_level(logging.WARNING):
        repaired = open_cached("small", source, 32)
    assert len(decodings) == 2
    assert "written again" in caplog.text
    assert repaired.fingerprint == intact == content_fingerprint(repaired.train, repaired.test)


def test_a_copied_cache_is_verified_once_and_then_trusted(
    source: Source, decodings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    open_cached("small", source, 32)
    path = cache_file("small", source, 32)
    path.write_bytes(path.read_bytes())  # same content, new time
    computed: list[Path] = []
    sha256 = cache._content_sha256
    monkeypatch.setattr(cache, "_content_sha256", lambda file, record: (computed.append(file), sha256(file, record))[1])
    for _ in range(3):
        open_cached("small", source, 32)
    assert len(decodings) == 1
    assert len(computed) == 1


def failing(source: Source, error: Exception) -> Source:
    def train() -> Iterator[Chunk]:
        yield from source.train()
        raise error

    return Source(**{**source.__dict__, "train": train})


def test_an_interrupted_decoding_leaves_nothing(source: Source, cache_home: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        open_cached("small", failing(source, KeyboardInterrupt()), 32)
    assert [path for path in cache_home.rglob("*") if path.is_file()] == []


def test_a_full_disk_leaves_the_old_cache_or_nothing(
    source: Source, cache_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class FullDisk(io.FileIO):
        def write(self, data: bytes) -> int:
            if self.tell() + memoryview(data).nbytes > 500_000:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return super().write(data)

    plain_open = Path.open

    def open_on_full_disk(path: Path, mode: str = "r", *rest, **options):
        return FullDisk(path, "w") if mode == "wb" else plain_open(path, mode, *rest, **options)

    monkeypatch.setattr(Path, "open", open_on_full_disk)
    with pytest.raises(InputError, match=r"cannot be written: the disk is full; make room, or set XDG_CACHE_HOME"):
        open_cached("small", source, 32)
    assert [path for path in cache_home.rglob("*") if path.is_file()] == []


def test_a_cache_folder_that_cannot_be_made(source: Source, cache_home: Path) -> None:
    cache_home.write_text("a file where the folder should be")
    with pytest.raises(InputError, match="cannot be written"):
        open_cached("small", source, 32)


def test_a_cache_that_cannot_be_read(source: Source) -> None:
    cache_file("small", source, 32).mkdir(parents=True)
    with pytest.raises(InputError, match="cannot be read: Is a directory; remove it"):
        open_cached("small", source, 32)


def test_an_unreadable_source_file_is_not_blamed_on_the_cache(source: Source) -> None:
    error = PermissionError(errno.EACCES, "Permission denied", str(source.files[0]))
    with pytest.raises(InputError, match=r"train\.bin cannot be read: Permission denied"):
        open_cached("small", failing(source, error), 32)


def test_a_part_without_images(source: Source) -> None:
    empty = Source(**{**source.__dict__, "test": lambda: iter(())})
    with pytest.raises(InputError, match="has no test images"):
        open_cached("small", empty, 32)
