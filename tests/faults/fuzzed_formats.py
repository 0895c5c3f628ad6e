"""Every kind of file that is read, small and good, and its reader: what is fuzzed in tests."""

import atexit
import io
import json
import os
import shutil
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from unittest import mock

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from small_files import (
    pixels,
    write_cifar10_binary,
    write_cifar100_python,
    write_picture,
    write_svhn,
    write_tiny_imagenet,
)
from tiny_study import tiny_study

from nearsight.data.cache import open_cached
from nearsight.data.check import check_segmentation
from nearsight.data.fetch import unpack_archive
from nearsight.data.image_folder import open_tree
from nearsight.data.loading import find_source
from nearsight.data.parquet import open_parquet
from nearsight.data.registry import DATASETS, Source
from nearsight.data.segmentation import load_segmentation
from nearsight.lens import HeadTable, attention_maps, open_maps
from nearsight.lens.perimage import PerImage
from nearsight.lens.shards import Shards
from nearsight.metrics.moments import Moments
from nearsight.models import create_model, load_model, load_source
from nearsight.models.checkpoints import load_checkpoint
from nearsight.probe import FeatureKey, FeatureSpec, Preparation, Score, cached_features, reading
from nearsight.probe.scores import ProbeKey, ProbeStore
from nearsight.probe.segmentation.config import SegmentConfig
from nearsight.probe.segmentation.head import HeadTraining
from nearsight.probe.segmentation.result import SegmentFolder
from nearsight.report.explorer import Explorer
from nearsight.report.inputs import ModelHeads, read_heads, read_history, write_measured
from nearsight.report.page import tables as report_tables
from nearsight.report.page.charts import of_models
from nearsight.report.page.folders import read_folder
from nearsight.report.page.models import common_grid
from nearsight.report.probe_tables import models_table
from nearsight.report.probes import ProbedModel, ProbeResults
from nearsight.report.reading import describe
from nearsight.study import SimulationResults, StudyFolder, StudyResults, run_study
from nearsight.study.folder import elapsed_seconds
from nearsight.study.reusing import tabled_runs
from nearsight.study.run_tables import read_run
from nearsight.tensorfile import load_tensors, save_tensors
from nearsight.train import HEADS_COLUMNS, HistoryRow, RunConfig, RunFolder, modern, write_heads
from nearsight.train.dino import DinoConfig
from nearsight.train.dino.running import DinoFolder
from nearsight.train.integrity import CHECKSUMS

Read = Callable[[Path], object]


@dataclass(frozen=True, kw_only=True)
class Format:
    """Something that is read from files."""

    write: Callable[[Path], object]
    """Good ones, into a folder."""
    read: Read
    """All there is, from that folder."""
    damaged: str = "**/*"
    """The files that are damaged."""
    is_quick: bool = True
    """Whether a few damages fit into a test of seconds."""
    most: int = 400
    """How often its files are damaged in the longer test."""


def all_images(source: Source | None) -> None:
    assert source is not None
    for read in (source.train, source.test):
        for _ in read():
            pass


def dataset(name: str, image_size: int = 32) -> Read:
    return lambda folder: all_images(find_source(name, DATASETS[name], folder, image_size))


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


def write_heads_npz(folder: Path) -> None:
    draw = np.random.default_rng(0)
    distance, entropy = (Moments(5, draw.random((2, 3)), draw.random((2, 3))) for _ in range(2))
    grids = {"grid_size": np.full((2, 2), 4.0)}
    images = PerImage.of(draw.integers(0, 2**63, 5, dtype=np.uint64), draw.random((5, 2, 3)), draw.random((5, 2, 3)))
    HeadTable(("a", "b"), distance, entropy, {"c": "no attention"}, grids, images).save(folder / "heads.npz")


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


@cache
def finished_study() -> Path:
    """Of eight runs; not to be changed. Without sums, as earlier versions left it: what is damaged has to be read."""
    place = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, place, ignore_errors=True)
    run_study(tiny_study(seeds=2), place / "study")
    StudyFolder(place / "study").write_tables()
    for sums in place.rglob(CHECKSUMS):
        sums.unlink()
    return place / "study"


def write_run(folder: Path) -> None:
    run = min((finished_study() / "runs").iterdir())
    shutil.copytree(run, folder, dirs_exist_ok=True)


def read_whole_run(folder: Path) -> None:
    run = RunFolder(folder)
    read_run(run)
    run.read_checkpoint(run.read_config())
    load_model(run.model)
    elapsed_seconds([run])
    tell(folder)


def tell(folder: Path) -> None:
    """What a page says of models, but for its figures, which take a second."""
    models = read_folder(folder).models
    report_tables.overview(models)
    report_tables.layers(models)
    json.dumps(of_models(models, common_grid(models)))
    for model in models:
        describe(model)
        model.matrix("mad")


def write_study(folder: Path) -> None:
    shutil.copytree(finished_study(), folder, dirs_exist_ok=True)
    for run in sorted((folder / "runs").iterdir())[1:]:
        for path in run.glob("*.safetensors"):
            path.unlink()


def read_study(folder: Path) -> None:
    StudyResults.read(folder)
    StudyFolder(folder).states()


def write_tables_of_study(folder: Path) -> None:
    shutil.copytree(finished_study(), folder, dirs_exist_ok=True)
    shutil.rmtree(folder / "runs")
    shutil.rmtree(folder / "locks")


def read_tables_of_study(folder: Path) -> None:
    read_study(folder)
    tabled_runs(folder, {path.name for path in (finished_study() / "runs").iterdir()})


def write_simulation(folder: Path) -> None:
    cells = [{"condition": label, "seed": seed, "run": f"{label}{seed}"} for label in "ab" for seed in (0, 1)]
    described = {
        **{"schema": 1, "kind": "simulation", "name": "sums", "scale": "full", "responses": {"total": "the total"}},
        **{"settings": {"rate": 0.5}, "assumed": ["rate"], "cells": cells},
        "conditions": {label: {"size": size, "rate": 0.5} for size, label in enumerate("ab", start=3)},
        "levels": {label: {"size": size} for size, label in enumerate("ab", start=3)},
    }
    (folder / "study.json").write_text(json.dumps(described, indent=1))
    runs = pd.DataFrame(cells).assign(size=3, total=0.25, wall_seconds=1.5)
    runs.to_csv(folder / "runs.csv", index=False)
    runs[["condition", "seed"]].assign(step=0, x=0.125).to_csv(folder / "curves.csv", index=False)


def write_measured_model(folder: Path) -> None:
    write_heads_npz(folder)
    table = HeadTable.load(folder / "heads.npz")
    heads = table.to_frame().assign(epoch=0)
    write_heads(folder / "heads.csv", heads, 0)
    model = ModelHeads(label="a", heads=heads, grids={0: (4, 4), 1: (4, 4)}, config={"seed": 0}, provenance={"a": [1]})
    write_measured(folder, model, "nearsight measure a")
    explorer = {"format": 2, "colours": "", "pictures": [], "notes": [], "models": [{"label": "a", "layers": [1, 2.5]}]}
    Explorer(explorer).write(folder / "explorer.json")


def read_measured_model(folder: Path) -> None:
    tell(folder)
    read_npz(folder)
    Explorer.read(folder / "explorer.json").html()


def write_probes(folder: Path) -> None:
    score = {"probe": "knn", "data": "cifar100", "measure": "knn_20", "value": 0.5, "low": 0.4, "high": 0.6}
    score |= {"num_images": 321, "identity": "0123"}
    scores = [score, score | {"measure": "linear"}]
    models = [
        ProbedModel(model=f"{label} {seed}", condition=label, seed=seed, num_parameters=2_417_956, image_size=32)
        for label in "ab"
        for seed in (0, 1)
    ]
    ProbeResults.of([(model, scores) for model in models], name="pairs", planned=("a", "b")).write(folder)


def read_probes(folder: Path) -> None:
    results = ProbeResults.read(folder)
    models_table(results)
    results.as_study()
    json.dumps(results.as_json())


PROBE = ProbeKey(probe="knn", model="0123", preparation={}, data="4567", settings={"k": 20})


def write_stored_probe(folder: Path) -> None:
    ProbeStore(folder).write(PROBE, {"knn_20": Score(value=0.5, low=0.4, high=0.6, num_images=9)}, {"label": "a"})


SEGMENTING = SegmentConfig(iterations=2, batch_size=1, crop=16, width=8)


def head_training() -> HeadTraining:
    return HeadTraining(4, 3, 255, SEGMENTING, torch.device("cpu"))


def write_segment_probe(folder: Path) -> None:
    probe = SegmentFolder(folder)
    probe.claim({"identity": "0123"})
    head_training().save(folder / "kept.safetensors", "0123")
    pd.DataFrame({"class": ["a", "b"], "iou": [0.25, 0.5]}).to_csv(folder / "per_class.csv", index=False)
    (folder / "result.json").write_text('{"miou": 0.25}')
    probe.finish({"seed": 0})


def read_segment_probe(folder: Path) -> None:
    probe = SegmentFolder(folder)
    probe.check({"identity": "0123"})
    probe.read_result()
    head_training().load(folder / "kept.safetensors", "0123")


def open_image_cache(folder: Path) -> None:
    with mock.patch.dict(os.environ, {"XDG_CACHE_HOME": str(folder / "cache")}):
        opened = open_cached("own", open_tree(folder / "tree", 16), 16)
    assert opened.train.images_NCHW.sum() > 0
    assert opened.train.labels_N.tolist() == [0] * 7


def write_image_cache(folder: Path) -> None:
    write_tree(folder / "tree")
    open_image_cache(folder)


@cache
def small_vit() -> torch.nn.Module:
    torch.manual_seed(0)
    return create_model("compact_vit", depth=1, embed_dim=24, num_heads=3).eval()


def cache_features(folder: Path) -> None:
    spec = FeatureSpec(place="norm", tokens="cls")
    preparation = Preparation(size=(32, 32), mean=(0.5, 0.5, 0.5), std=(0.25, 0.25, 0.25))
    key = FeatureKey(model="m", data="d", part="test", spec=spec, preparation=preparation)
    images = torch.linspace(-1, 1, 8 * 3 * 32 * 32).view(8, 3, 32, 32)
    with reading(small_vit(), spec, image_size=(32, 32)) as reader:
        features = cached_features(key, reader, lambda begin, end: images[begin:end], 8, folder=folder, batch_size=4)
        assert torch.allclose(features, reader(images), atol=1e-5)


def shards(folder: Path) -> Shards:
    return Shards(folder=folder, record={"model": "a"}, num_images=10, num_shards=2)


def write_shards(folder: Path) -> None:
    write_heads_npz(folder)
    table = HeadTable.load(folder / "heads.npz")
    (folder / "heads.npz").unlink()
    for number in range(2):
        shards(folder).keep(number, table)


def write_maps(folder: Path) -> None:
    attention_maps(small_vit(), torch.zeros(1, 3, 32, 32), out=folder / "maps.safetensors")


def read_maps(folder: Path) -> None:
    for layer in open_maps(folder / "maps.safetensors"):
        layer.full()


def write_masks(folder: Path) -> None:
    for place in ("JPEGImages", "SegmentationClass", "ImageSets/Segmentation"):
        (folder / "voc-small" / place).mkdir(parents=True)
    for part, name in (("train", "a"), ("val", "b")):
        (folder / "voc-small" / "ImageSets/Segmentation" / f"{part}.txt").write_text(f"{name}\n")
        write_picture(folder / "voc-small" / "JPEGImages" / f"{name}.jpg", size=(7, 5))
        labels = Image.fromarray(np.resize(np.array([0, 1, 20, 255], dtype=np.uint8), (5, 7)))
        labels.save(folder / "voc-small" / "SegmentationClass" / f"{name}.png")


def read_masks(folder: Path) -> None:
    check_segmentation("voc-small", folder)
    dataset = load_segmentation("voc-small", folder)
    for images in (dataset.train, dataset.test):
        for index in range(len(images)):
            _ = images[index]


def write_transformers_model(folder: Path) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    config = transformers.ViTConfig(**sizes, image_size=32, patch_size=8)
    transformers.ViTModel(config).save_pretrained(folder)
    transformers.ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained(folder)


def write_timm_model(folder: Path) -> None:
    settings = {"depth": 1, "embed_dim": 24, "num_heads": 3}
    save_file(create_model("test_vit", **settings).state_dict(), folder / "model.safetensors")
    images = {"input_size": [3, 160, 160], "mean": [0.5] * 3, "std": [0.5] * 3, "crop_pct": 0.95}
    config = {"architecture": "test_vit", "num_classes": 1000, "model_args": settings, "pretrained_cfg": images}
    (folder / "config.json").write_text(json.dumps(config, indent=1))


def write_weights(folder: Path) -> None:
    torch.save({"state_dict": small_vit().state_dict()}, folder / "weights.pth")


def read_weights(folder: Path) -> None:
    load_checkpoint(create_model("compact_vit", depth=1, embed_dim=24, num_heads=3), folder / "weights.pth")


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
    "heads.npz": Format(write=write_heads_npz, read=read_npz),
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
    "run": Format(write=write_run, read=read_whole_run),
    "study": Format(write=write_study, read=read_study, is_quick=False),
    "tables of a study": Format(write=write_tables_of_study, read=read_tables_of_study),
    "simulation": Format(write=write_simulation, read=SimulationResults.read),
    "measured model": Format(write=write_measured_model, read=read_measured_model),
    "probes": Format(write=write_probes, read=read_probes),
    "stored probe": Format(write=write_stored_probe, read=lambda folder: ProbeStore(folder).read(PROBE)),
    "segmentation probe": Format(write=write_segment_probe, read=read_segment_probe),
    "image cache": Format(write=write_image_cache, read=open_image_cache, damaged="cache/**/*"),
    "feature cache": Format(write=cache_features, read=cache_features),
    "shards": Format(write=write_shards, read=lambda folder: shards(folder).merged()),
    "attention maps": Format(write=write_maps, read=read_maps),
    "masks": Format(write=write_masks, read=read_masks),
    "transformers": Format(
        write=write_transformers_model, read=lambda folder: load_source(f"hf:{folder}"), is_quick=False
    ),
    "timm": Format(write=write_timm_model, read=lambda folder: load_source(f"local-dir:{folder}", pretrained=True)),
    "weights": Format(write=write_weights, read=read_weights),
}
