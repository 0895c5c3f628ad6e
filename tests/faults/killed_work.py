"""What is killed in tests: each kind of work that leaves files behind, as small as it gets, and how to see that what it
left is right."""

import contextlib
import dataclasses
import filecmp
import io
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import torch
from small_files import write_cifar100_binary
from tiny_study import tiny_base, tiny_study

from nearsight.cli import main
from nearsight.commands import atlasing
from nearsight.data import cache
from nearsight.data.cifar import find_cifar100
from nearsight.lens import HeadTable
from nearsight.models import create_model
from nearsight.probe import FeatureKey, FeatureSpec, Preparation, cached_features, reading, weights_hash
from nearsight.probe import cache as feature_cache
from nearsight.study import StudyFolder, run_study
from nearsight.train import RunFolder, train_run

TIMES = ("seconds", "images_per_second", "wall_seconds")
"""Columns that are never the same twice."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """Some work in a folder, which done twice is the same as done once."""

    do: Callable[[Path], None]
    same: Callable[[Path, Path], None]
    """Fails if what is in the one folder is not what is in the other."""
    prepare: Callable[[Path], None] | None = None
    """Puts into the folder what has to be there before; it is left in peace."""


def train(folder: Path) -> None:
    train_run(tiny_base(), folder / "run")


def same_run(a: Path, b: Path) -> None:
    for name in ("config.json", "model.safetensors", "heads.csv", "layers.csv", "result.json"):
        assert filecmp.cmp(a / name, b / name, shallow=False), f"{b / name} is another"
    same_table(a / "history.csv", b / "history.csv")
    assert RunFolder(b).is_complete
    RunFolder(b).read_result()


def same_table(a: Path, b: Path) -> None:
    tables = (pd.read_csv(path).drop(columns=list(TIMES), errors="ignore") for path in (a, b))
    pd.testing.assert_frame_equal(*tables, check_exact=True, obj=str(b))


def study(folder: Path) -> None:
    run_study(tiny_study(seeds=1), folder / "study").write_tables()


def same_study(a: Path, b: Path) -> None:
    for name in ("runs.csv", "heads.csv", "layers.csv", "history.csv", "course.csv.gz"):
        same_table(a / "study" / name, b / "study" / name)
    for cell in tiny_study(seeds=1).cells:
        same_run(*(path / "study" / "runs" / cell.run for path in (a, b)))
    assert {state.state for state in StudyFolder(b / "study").states()} == {"done"}


def measure(folder: Path) -> None:
    command(["measure", str(folder / "run"), "--device", "cpu"])


def same_measurement(a: Path, b: Path) -> None:
    same_run(a / "run", b / "run")
    tables = [HeadTable.load(path / "run" / "heads.npz").to_frame() for path in (a, b)]
    pd.testing.assert_frame_equal(*tables, check_exact=True)
    same_files(a / "run" / "figures", b / "run" / "figures")


def train_two(folder: Path) -> None:
    for seed in (0, 1):
        train_run(dataclasses.replace(tiny_base(), seed=seed), folder / f"seed{seed}")


def compare(folder: Path) -> None:
    runs = [str(folder / f"seed{seed}") for seed in (0, 1)]
    command(["measure", *runs, "--device", "cpu", "--out", str(folder / "report")])


def same_report(a: Path, b: Path) -> None:
    for seed in (0, 1):
        same_run(a / f"seed{seed}", b / f"seed{seed}")
        same_table(*(path / "report" / f"seed{seed}" / "heads.csv" for path in (a, b)))
    same_files(a / "report" / "figures", b / "report" / "figures")
    assert (b / "report" / "report.html").read_text(encoding="utf-8").rstrip().endswith("</html>")


def same_files(a: Path, b: Path) -> None:
    names = sorted(path.name for path in a.iterdir())
    assert names == sorted(path.name for path in b.iterdir() if not path.name.startswith("."))
    assert filecmp.cmpfiles(a, b, names, shallow=False) == (names, [], [])


def command(arguments: list[str]) -> None:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as said:
        assert main(arguments) == 0, said.getvalue()


def write_images(folder: Path) -> None:
    write_cifar100_binary(folder)


def decode(folder: Path) -> None:
    os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
    cache.open_cached("small", find_cifar100(folder, 32), 32)


def same_images(a: Path, b: Path) -> None:
    files = [next(path.rglob("[!.]*.images")) for path in (a, b)]
    record, other = (cache._read_record(path) for path in files)
    assert (record.sha256, record.classes) == (other.sha256, other.classes)
    assert cache._content_sha256(files[1], other) == record.sha256


def features(folder: Path) -> None:
    feature_cache.CHUNK_BYTES = 4 * 24 * 4  # four images
    torch.manual_seed(0)
    model, spec = create_model("compact_vit", depth=1, embed_dim=24, num_heads=3).eval(), FeatureSpec(tokens="cls")
    images = torch.randn(40, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    preparation = Preparation(size=(32, 32), mean=(0.5, 0.5, 0.5), std=(0.25, 0.25, 0.25))
    with reading(model, spec, image_size=(32, 32)) as reader:
        key = FeatureKey(model=weights_hash(model), data="d", part="test", spec=reader.spec, preparation=preparation)
        cached_features(key, reader, lambda begin, end: images[begin:end], 40, folder=folder, batch_size=2)


def same_features(a: Path, b: Path) -> None:
    one, other = (next(path.glob("*/features.npy")) for path in (a, b))
    assert filecmp.cmp(one, other, shallow=False)


def atlas(folder: Path) -> None:
    """Two models, each in two shards of three pictures."""
    atlasing.PICTURES_PER_SHARD = 3
    models = "".join(f'[[model]]\nmodel = "compact_vit.{name}_cifar100"\n' for name in ("baseline", "modern"))
    (folder / "own.toml").write_text(models, encoding="utf-8")
    out = ["--out", str(folder / "atlas"), "--num-images", "6", "--no-random", "--device", "cpu"]
    command(["atlas", str(folder / "own.toml"), *out])


def same_atlas(a: Path, b: Path) -> None:
    same_files(a / "atlas" / "figures", b / "atlas" / "figures")
    for name in ("atlas.csv", "atlas-heads.csv", "models.csv"):
        same_table(a / "atlas" / name, b / "atlas" / name)
    names = sorted(path.name for path in (a / "atlas" / "models").iterdir())
    for name in names:
        tables = [HeadTable.load(path / "atlas" / "models" / name / "heads.npz") for path in (a, b)]
        pd.testing.assert_frame_equal(*(table.to_frame() for table in tables), check_exact=True)
    assert len(names) == 2
    assert not list((b / "atlas").rglob("*-of-2.*"))


WORKS = {
    "atlas": Work(do=atlas, same=same_atlas),
    "train": Work(do=train, same=lambda a, b: same_run(a / "run", b / "run")),
    "study": Work(do=study, same=same_study),
    "measure": Work(prepare=train, do=measure, same=same_measurement),
    "report": Work(prepare=train_two, do=compare, same=same_report),
    "data cache": Work(prepare=write_images, do=decode, same=same_images),
    "feature cache": Work(do=features, same=same_features),
}
