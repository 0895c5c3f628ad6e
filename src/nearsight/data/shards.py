"""Shards as WebDataset writes them: .tar files with a picture (`key.jpg`) and its class (`key.cls`, or a number or name
under "label" in `key.json`) side by side.

Nothing is unpacked: an index says where in its shard each picture lies. It is made once, by going from head to head,
and kept in the user's cache folder as long as the shards stay as they are.

A shard's part is in its path: `train/00000.tar`, `imagenet1k-train-0000.tar`. Names of classes come from `classes.txt`
beside the shards, a line each, or are the labels themselves.
"""

from __future__ import annotations

import json
import os
import re
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nearsight.data.cropping import middles
from nearsight.data.decoding import is_image_name
from nearsight.data.image_folder import TEST_NAMES, TRAIN_NAMES, unused_parts
from nearsight.data.locations import check_spelling, read_published, user_cache_folder
from nearsight.data.parquet import files_below
from nearsight.data.pictures import Pictures, files_digest
from nearsight.data.registry import Chunk, Reader, Source
from nearsight.errors import InputError
from nearsight.files import canonical_hash
from nearsight.lazy import np, torch
from nearsight.tensorfile import load_tensors, save_tensors

_VERSION = 1
"""Raise it whenever an index would be another one."""
_CLASSES = "classes.txt"
_LABEL_KEYS = ("label", "cls", "class")
_MOST_LABEL_BYTES = 2**20


def _part_of(path: Path) -> str | None:
    """The first name of a part among the words of a path."""
    words = re.findall(r"[a-z]+", str(path).lower())
    return next((word for word in words if word in TRAIN_NAMES + TEST_NAMES), None)


def open_shards(folder: Path, image_size: int) -> Source | None:
    """The shards in and below a folder; None when there are none."""
    shards = sorted(files_below(folder, ".tar"))
    if not shards:
        return None
    parts: dict[str, list[Path]] = {}
    for path in shards:
        part = _part_of(path.relative_to(folder))
        if part is None:
            raise InputError(
                f"{path} does not say which part of the data it is; put 'train' or 'val' into the names of shards, or "
                "of their folders"
            )
        parts.setdefault(part, []).append(path)
    train = next((parts[name] for name in TRAIN_NAMES if name in parts), None)
    test_name = next((name for name in TEST_NAMES if name in parts), None)
    if train is None or test_name is None:
        missing, way_out = ("train", "training") if train is None else ("val", "test")
        raise InputError(f"{folder} has shards, but none named {missing!r}: {way_out} pictures are needed, too")
    test = parts[test_name]
    indices = {"train": _indexed(folder, train), "test": _indexed(folder, test)}
    classes = _classes(folder, list(indices.values()))

    def pictures(part: str) -> Pictures:
        return indices[part].pictures(folder, classes)

    return Source(
        folder=folder,
        layout=f"{len(train)} shards to train and {len(test)} of {test_name}{unused_parts(test_name, parts)}",
        files=(*train, *test, *(path for path in [folder / _CLASSES] if path.is_file())),
        classes=classes,
        train=_reader(lambda: pictures("train"), image_size),
        test=_reader(lambda: pictures("test"), image_size),
        train_pictures=lambda: pictures("train"),
        test_pictures=lambda: pictures("test"),
        test_files=tuple(test),
    )


def _reader(pictures: Any, image_size: int) -> Reader:
    def read() -> Iterator[Chunk]:
        return middles(pictures(), image_size, image_size)

    return read


@dataclass
class _Index:
    """Where the pictures of some shards are."""

    names: list[bytes]
    """Of the shards, below the folder."""
    sizes: list[int]
    shard: list[int] = field(default_factory=list)
    begin: list[int] = field(default_factory=list)
    length: list[int] = field(default_factory=list)
    label: list[int] = field(default_factory=list)
    """The class's number, or where its name stands among `texts`."""
    texts: list[str] = field(default_factory=list)
    """Names of classes; none where labels are numbers."""

    @property
    def most(self) -> int:
        """The largest label."""
        return max(self.label, default=-1)

    def pictures(self, folder: Path, classes: Sequence[str]) -> Pictures:
        place = {name: number for number, name in enumerate(classes)}
        labels = [place[self.texts[label]] for label in self.label] if self.texts else self.label
        return Pictures(
            folder=folder,
            files_F=np.array(self.names),
            file_N=np.array(self.shard, dtype=np.int64),
            begin_N=np.array(self.begin, dtype=np.int64),
            bytes_N=np.array(self.length, dtype=np.int64),
            labels_N=torch.tensor(labels, dtype=torch.int64),
            digest=files_digest(self.names, self.sizes),
            in_shards=True,
        )


def _classes(folder: Path, indices: Sequence[_Index]) -> tuple[str, ...]:
    texts = sorted({text for index in indices for text in index.texts})
    if texts and not all(index.texts for index in indices):
        raise InputError(f"the shards of {folder} have classes by name in one part and by number in another")
    path = folder / _CLASSES
    if path.is_file():
        names = tuple(line.strip() for line in read_published(path).splitlines() if line.strip())
        unknown = [text for text in texts if text not in names]
        needed = max(index.most for index in indices) + 1
        if len(set(names)) < len(names) or unknown or (not texts and len(names) < needed):
            raise InputError(
                f"{path} has {len(names)} names of classes, which are not those of the shards"
                + (f": {unknown[0]!r} is missing" if unknown else f", or not all different; {needed} are needed")
            )
        return names
    return tuple(texts or map(str, range(max(index.most for index in indices) + 1)))


def _indexed(folder: Path, shards: Sequence[Path]) -> _Index:
    """From the cache if the shards are as they were, otherwise made now."""
    statuses = [path.stat() for path in shards]
    names = [os.fsencode(path.relative_to(folder)) for path in shards]
    sizes = [status.st_size for status in statuses]
    times = [status.st_mtime_ns for status in statuses]
    place = str(check_spelling(folder.resolve()))
    key = canonical_hash([_VERSION, place, files_digest(names, sizes), times])
    kept = user_cache_folder() / "shards" / f"{key}.safetensors"
    if kept.is_file():
        columns, described = load_tensors(kept)
        lists = {name: columns[name].tolist() for name in ("shard", "begin", "length", "label")}
        return _Index(names, sizes, **lists, texts=described["texts"])
    index = _Index(names, sizes)
    labels: list[int | str] = []
    for number, path in enumerate(shards):
        for begin, length, label in _samples(path):
            index.shard.append(number)
            index.begin.append(begin)
            index.length.append(length)
            labels.append(label)
    if not labels:
        raise InputError(f"{shards[0].parent} has shards, but no pictures in them")
    index.texts = sorted({label for label in labels if isinstance(label, str)})
    if index.texts and len({type(label) for label in labels}) > 1:
        raise InputError(f"the shards of {folder} have classes by name and by number; choose one")
    place_of = {text: number for number, text in enumerate(index.texts)}
    index.label = [place_of[label] if isinstance(label, str) else label for label in labels]
    columns = {name: torch.tensor(getattr(index, name)) for name in ("shard", "begin", "length", "label")}
    save_tensors(kept, columns, {"texts": index.texts})
    return index


@dataclass
class _Sample:
    """What was found of one key."""

    picture: tarfile.TarInfo | None = None
    label: int | str | None = None


def _samples(path: Path) -> Iterator[tuple[int, int, int | str]]:
    """(begin, length, label) of the pictures in one shard."""
    key, sample = "", _Sample()
    try:
        with tarfile.open(path, "r:") as archive:
            for member in archive:
                if not member.isreg() or member.issparse():
                    continue
                stem, _, ending = Path(member.name).name.partition(".")
                found = f"{Path(member.name).parent}/{stem}"
                if found != key:
                    yield from _whole(path, key, sample)
                    key, sample = found, _Sample()
                if is_image_name(f"x.{ending}"):
                    sample.picture = member
                elif ending in ("cls", "json") and (ending == "cls" or sample.label is None):
                    sample.label = _label(path, archive, member)
            yield from _whole(path, key, sample)
    except (tarfile.TarError, OSError, EOFError) as error:
        raise InputError(f"{path} is damaged or is not an uncompressed .tar file: {error}; get it again") from error


def _whole(path: Path, key: str, sample: _Sample) -> Iterator[tuple[int, int, int | str]]:
    if sample.picture is None:
        return
    if sample.label is None:
        way_out = f"{key.removeprefix('./')}.cls, or a label in its .json, is needed"
        raise InputError(f"{path}: {sample.picture.name} has no class; {way_out}")
    yield sample.picture.offset_data, sample.picture.size, sample.label


def _label(path: Path, archive: tarfile.TarFile, member: tarfile.TarInfo) -> int | str | None:
    file = archive.extractfile(member) if member.size <= _MOST_LABEL_BYTES else None
    assert file is not None or member.size > _MOST_LABEL_BYTES
    if file is None:
        raise InputError(f"{path}: {member.name} has {member.size:,} bytes, but names a class")
    try:
        text = file.read().decode().strip()
        found: Any = text
        if member.name.endswith(".json"):
            described = json.loads(text)
            found = next((described[name] for name in _LABEL_KEYS if name in described), None)
        elif text.isdecimal():
            found = int(text)
    except (ValueError, TypeError, RecursionError) as error:
        raise InputError(f"{path}: {member.name} cannot be read: {error}") from error
    if found is None or (isinstance(found, str) and found):
        return found
    if isinstance(found, int) and not isinstance(found, bool) and 0 <= found < 2**31:
        return found
    raise InputError(f"{path}: {member.name} has {found!r:.60}, but a class is a number from 0 or a name")
