"""Every kind of file that is read, small and good, and its reader: what is fuzzed in tests."""

import io
import json
import shutil
import tarfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from small_files import (
    pixels,
    write_cifar10_binary,
    write_cifar100_python,
    write_picture,
    write_svhn,
    write_tiny_imagenet,
)

from nearsight.data.archives import unpack_archive
from nearsight.data.image_folder import open_tree
from nearsight.data.parquet import open_parquet
from nearsight.data.registry import DATASETS
from nearsight.data.source import Source
from nearsight.lens import HeadTable
from nearsight.metrics.moments import Moments
from nearsight.report.inputs import read_heads, read_history
from nearsight.tensorfile import load_tensors, save_tensors
from nearsight.train import HEADS_COLUMNS, HistoryRow, RunConfig, RunFolder, modern
from nearsight.train.dino import DinoConfig
from nearsight.train.dino.folder import DinoFolder

Read = Callable[[Path], object]


@dataclass(frozen=True, kw_only=True)
class Format:
    """Something that is read from files."""

    write: Callable[[Path], object]
    """Good ones, into a folder."""
    read: Read
    """All there is, from that folder."""


def all_images(source: Source | None) -> None:
    assert source is not None
    for read in (source.train, source.test):
        for _ in read():
            pass


def dataset(name: str, image_size: int = 32) -> Read:
    find = DATASETS[name].find
    assert find is not None
    return lambda folder: all_images(find(folder, image_size))


def write_tree(folder: Path) -> None:
    for part in ("train", "val"):
        for number, ending in enumerate(("png", "jpg", "gif", "bmp", "tif", "webp", "ppm")):
            write_picture(folder / part / "class" / f"{number}.{ending}", number, (20, 24))


def write_parquet(folder: Path) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    for part in ("train", "test"):
        pictures = []
        for image in pixels(3):
            Image.fromarray(image.transpose(1, 2, 0)).save(buffer := io.BytesIO(), "PNG")
            pictures.append({"bytes": buffer.getvalue(), "path": None})
        names = {"info": {"features": {"label": {"names": ["a", "b"]}}}}
        table = pyarrow.table({"image": pictures, "label": [0, 1, 0]})
        parquet.write_table(
            table.replace_schema_metadata({"huggingface": json.dumps(names)}), folder / f"{part}-0.parquet"
        )


def write_tables(folder: Path) -> None:
    row = dict.fromkeys(HEADS_COLUMNS, 0.5) | {"epoch": 2, "layer": 0, "layer_name": "blocks.0", "num_images": 20}
    pd.DataFrame([row | {"head": head} for head in (0, 1)]).to_csv(folder / "heads.csv", index=False)
    history = [dict.fromkeys(HistoryRow.__dataclass_fields__, 0.5) | {"epoch": epoch} for epoch in (1, 2)]
    pd.DataFrame(history).to_csv(folder / "history.csv", index=False)


def read_tables(folder: Path) -> None:
    RunFolder(folder).read_heads()
    read_heads(folder / "heads.csv")
    read_history(folder / "history.csv")


def write_heads(folder: Path) -> None:
    draw = np.random.default_rng(0)
    distance, entropy = (Moments(5, draw.random((2, 3)), draw.random((2, 3))) for _ in range(2))
    grids = {"grid_size": np.full((2, 2), 4.0)}
    HeadTable(("a", "b"), distance, entropy, {"c": "no attention"}, grids).save(folder / "heads.npz")


def read_npz(folder: Path) -> None:
    table = HeadTable.load(folder / "heads.npz")
    table.to_frame()
    table.extra_frame("layer")


def write_tar(mode: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        with tarfile.open(folder / "archive", mode) as archive:  # type: ignore[call-overload]
            for number in range(3):
                member = tarfile.TarInfo(f"set/{number}.txt")
                member.size = 100
                archive.addfile(member, io.BytesIO(b"x" * 100))

    return write


def write_zip(folder: Path) -> None:
    with zipfile.ZipFile(folder / "archive", "w", zipfile.ZIP_DEFLATED) as archive:
        for number in range(3):
            archive.writestr(f"set/{number}.txt", "content " * 20)


def unpack(folder: Path) -> None:
    into = folder.with_name("unpacked")
    shutil.rmtree(into, ignore_errors=True)
    beside = set(folder.parent.iterdir())
    try:
        unpack_archive(folder / "archive", into)
    finally:
        assert set(folder.parent.iterdir()) - beside <= {into}, "nothing lands outside"
        assert not [path for path in into.rglob("*") if path.is_symlink() or not (path.is_file() or path.is_dir())]


def write_config(config: RunConfig | DinoConfig) -> Callable[[Path], object]:
    return lambda folder: (folder / "config.json").write_text(json.dumps(config.to_json()))


FORMATS = {
    "run config": Format(
        write=write_config(RunConfig(protocol=modern())), read=lambda folder: RunFolder(folder).read_config().identity
    ),
    "DINO config": Format(
        write=write_config(DinoConfig()), read=lambda folder: DinoFolder(folder).read_config().identity
    ),
    "tables": Format(write=write_tables, read=read_tables),
    "tensors": Format(
        write=lambda folder: save_tensors(folder / "t.safetensors", {"w": torch.ones(3, 4)}, {"depth": [1]}),
        read=lambda folder: load_tensors(folder / "t.safetensors"),
    ),
    "heads.npz": Format(write=write_heads, read=read_npz),
    "CIFAR binary": Format(write=lambda folder: write_cifar10_binary(folder, per_file=2), read=dataset("cifar10")),
    "CIFAR pickles": Format(write=lambda folder: write_cifar100_python(folder, 4, 4), read=dataset("cifar100")),
    "SVHN": Format(write=lambda folder: write_svhn(folder, 3), read=dataset("svhn")),
    "SVHN uncompressed": Format(write=lambda folder: write_svhn(folder, 3, compressed=False), read=dataset("svhn")),
    "Tiny-ImageNet": Format(
        write=lambda folder: write_tiny_imagenet(folder, 2, 1), read=dataset("tiny-imagenet", image_size=64)
    ),
    "image folders": Format(write=write_tree, read=lambda folder: all_images(open_tree(folder, 32))),
    "parquet": Format(write=write_parquet, read=lambda folder: all_images(open_parquet(folder, 32))),
    "tar": Format(write=write_tar("w"), read=unpack),
    "tar.gz": Format(write=write_tar("w:gz"), read=unpack),
    "zip": Format(write=write_zip, read=unpack),
}
