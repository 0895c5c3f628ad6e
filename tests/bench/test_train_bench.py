"""The training benchmark runs both sides on the same work and counts what they do. Speed itself is not tested."""

import dataclasses
import json
from collections.abc import Callable

import pytest
import torch

from nearsight.bench import train as bench
from nearsight.bench.costs import StepClock, flops_per_image, peak_flops
from nearsight.bench.ordinary import CompiledLoop, OrdinaryLoop
from nearsight.commands import bench as command
from nearsight.data import Dataset, ImageSet, stratified_split
from nearsight.errors import InputError
from nearsight.models import ModelConfig
from nearsight.train import DataConfig, Protocol, RunConfig, modern
from nearsight.train.engine import Stack
from nearsight.train.optimizer import decays, learning_rates

CPU = torch.device("cpu")
TINY = ModelConfig(depth=1, width=16, num_heads=2, mlp_width=32, patch_size=8)


def config(protocol: Protocol | None = None, batch_size: int = 16) -> RunConfig:
    return RunConfig(
        model=TINY,
        data=DataConfig(name="cifar100"),
        protocol=dataclasses.replace(protocol or modern(), batch_size=batch_size),
    )


@pytest.fixture(scope="module")
def rows() -> list[bench.TrainRow]:
    return bench.bench_train(
        device="cpu", num_cells=(1, 2), num_images=110, seconds=0.01, batch_size=16, model=TINY, num_workers=1
    )


def test_rows(rows: list[bench.TrainRow]) -> None:
    assert rows[0].what in {"ordinary loop, PIL", "ordinary loop, tensors"}
    assert [(row.what, row.num_cells) for row in rows[1:]] == [
        ("nearsight", 1),
        ("nearsight", 2),
        ("plain loop, unaugmented", 1),  # compiled on a GPU
        ("nearsight, unaugmented", 1),
        ("4 cells one after another", 4),
        ("4 cells stacked", 4),
    ]
    for row, peer in zip(rows, [rows[0]] * 3 + [rows[3]] * 2 + [rows[5]] * 2, strict=True):
        assert row.images_per_epoch == 80  # 88 training images, the last 8 of which fill no batch
        assert row.images_per_second == pytest.approx(80 * row.num_cells / row.epoch_seconds)
        assert row.ratio == pytest.approx(row.images_per_second / peer.images_per_second)
        assert row.slowest_step is not None
        assert row.slowest_step >= 1
        assert row.floor_share is None
        assert row.extra_bytes is None or row.extra_bytes >= 0


def test_the_faster_ordinary_loop_is_the_peer(monkeypatch: pytest.MonkeyPatch, rows: list[bench.TrainRow]) -> None:
    speeds = {"ordinary loop, PIL": 1.0, "ordinary loop, tensors": 2.0}
    started = []

    def row(work: object, seconds: float, what: str, num_cells: int, start: Callable[[], object]) -> bench.TrainRow:
        start()
        return dataclasses.replace(rows[0], what=what, images_per_second=speeds[what])

    class Work:
        def ordinary(self, kind: str, num_workers: int) -> None:
            started.append((kind, num_workers))

    monkeypatch.setattr(bench, "_row", row)
    assert bench._fastest_ordinary(Work(), 1.0, 3).what == "ordinary loop, tensors"  # type: ignore[arg-type]
    assert started == [("PIL", 3), ("tensors", 3)]


def test_the_compiled_loop_sees_whole_batches_of_the_training_images() -> None:
    """Each at most once, normalised; all of the validation set, in order."""
    dataset = bench.cifar_like(110, 16)
    loop = CompiledLoop(config(), dataset, CPU)
    split = stratified_split(dataset.train.labels_N, 0.2, 0)
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (dataset.mean, dataset.std))
    normal = (dataset.train.images_NCHW.float() / 255 - mean) / std
    batches = list(loop.training)
    assert len(batches) == len(loop.training) == 5
    assert all(images.shape == (16, 3, 16, 16) for images, _ in batches)
    seen = torch.cat([images for images, _ in batches])
    distance = torch.cdist(seen.flatten(1), normal[split[0]].flatten(1))
    assert len(set(distance.argmin(1).tolist())) == 80
    assert float(distance.min(1).values.max()) < 0.1  # others are 30 away
    torch.testing.assert_close(torch.cat([images for images, _ in loop.validation]), normal[split[1]])
    assert torch.equal(torch.cat([labels for _, labels in loop.validation]), dataset.train.labels_N[split[1]])
    loss, accuracy = loop.run_epoch()
    assert loss == pytest.approx(4.6, abs=0.3)
    assert 0 <= accuracy <= 1


def test_any_model_of_timm_at_another_size() -> None:
    model = ModelConfig(
        name="vit_tiny_patch16_224", settings=("patch_size=8", "depth=1", "embed_dim=24", "num_heads=2")
    )
    rows = bench.bench_train(
        device="cpu",
        num_cells=(1,),
        num_images=45,
        seconds=0.01,
        batch_size=16,
        image_size=16,
        model=model,
        num_workers=0,
    )
    assert [row.what for row in rows[1:4]] == ["nearsight", "plain loop, unaugmented", "nearsight, unaugmented"]
    assert rows[2].model.startswith("vit_tiny_patch16_224, settings")


def test_both_sides_see_the_same_number_of_images() -> None:
    dataset = bench.cifar_like(110)
    work = bench._Work(config(), dataset, CPU)
    stack = Stack.start([config()], dataset, CPU)
    loop = OrdinaryLoop(config(), dataset, CPU, num_workers=0)
    ours, theirs = StepClock(CPU), StepClock(CPU)
    stack.run_epoch(ours)
    loop.run_epoch(theirs)
    assert len(ours.times) == len(theirs.times) == 5
    assert work.num_trained == 5 * 16
    assert len(loop.training.dataset) == len(stack.training_N) == 88  # type: ignore[arg-type]
    assert len(loop.validation.dataset) == len(stack.validation_N) == 22  # type: ignore[arg-type]


def test_the_ordinary_loop_follows_the_same_schedule_and_decay() -> None:
    protocol = dataclasses.replace(modern(), max_epochs=3, warmup_epochs=1)
    loop = OrdinaryLoop(config(protocol), bench.cifar_like(110), CPU, num_workers=0)
    seen: list[float] = []
    for _ in range(3):
        loop.run_epoch(lambda step: seen.append(loop.optimizer.param_groups[0]["lr"]))
    expected = torch.cat([learning_rates(protocol, epoch, 5) for epoch in range(3)]).tolist()
    # After step s the optimiser holds the rate of step s + 1.
    assert seen[:-1] == pytest.approx(expected[1:])
    stack = Stack.start([config(protocol)], bench.cifar_like(110), CPU)
    decayed = {id(weight) for weight in loop.optimizer.param_groups[1]["params"]}
    for name, weight in loop.model.named_parameters():
        assert (id(weight) in decayed) == decays(name, stack.weights[name])


def stripes() -> Dataset:
    """Two classes that no augmentation of the protocol turns into each other: horizontal and vertical stripes."""
    labels = torch.arange(80) % 2
    bright = (torch.arange(32) % 8 < 4).float()
    clean = torch.where(labels.bool()[:, None, None], bright, bright[:, None])[:, None].expand(-1, 3, -1, -1)
    noise = torch.randn(clean.shape, generator=torch.Generator().manual_seed(0))
    images = (60 + 140 * clean + 20 * noise).clamp(0, 255).to(torch.uint8)
    part = ImageSet(images, labels)
    return dataclasses.replace(bench.cifar_like(1), classes=("rows", "columns"), train=part, test=part)


def test_the_ordinary_loop_learns() -> None:
    wide = dataclasses.replace(TINY, width=32, mlp_width=64, init="pytorch")
    protocol = dataclasses.replace(modern(), lr=3e-3, warmup_epochs=0)
    settings = dataclasses.replace(config(protocol, batch_size=8), model=wide)
    loop = OrdinaryLoop(settings, stripes(), CPU, num_workers=0)
    losses, accuracies = zip(*(loop.run_epoch() for _ in range(15)), strict=True)
    assert sum(losses[-5:]) / 5 < losses[0] - 0.2
    assert sum(accuracies[-5:]) / 5 > 0.9


def test_flops_against_the_formula() -> None:
    """2·(weights of the matrices)·tokens, plus the two products of attention; the backward does each product twice."""
    settings = ModelConfig()
    forward, both = flops_per_image(settings.build((32, 32), 100), (32, 32))
    patches, tokens, width = 64, 65, settings.width
    block = 2 * tokens * (4 * width**2 + 2 * width * settings.mlp_width) + 4 * tokens**2 * width
    embedding = 2 * patches * 3 * settings.patch_size**2 * width
    by_hand = settings.depth * block + embedding + 2 * width * 100
    assert forward == pytest.approx(by_hand, rel=0.02)
    assert both == pytest.approx(3 * by_hand, rel=0.02)


def test_the_peak_is_known_by_the_whole_name(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda")
    for name, peak in (("NVIDIA H200", 989e12), ("NVIDIA H200 NVL", None)):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, name=name: name)
        assert peak_flops(gpu) == peak
    assert peak_flops(CPU) is None


def test_share_of_the_floor(monkeypatch: pytest.MonkeyPatch) -> None:
    work = bench._Work(config(), bench.cifar_like(110), CPU)
    work.config = dataclasses.replace(work.config, precision="bf16")
    monkeypatch.setattr(bench, "peak_flops", lambda device: 1e9)
    way = bench._Way(work, "nothing", 3, [lambda: lambda on_step: None])
    way.epoch_seconds += [1.0, 3.0]
    row = way.row()
    assert row.floor_share == pytest.approx(3 * work.flops / 1e9 / 2.0)
    assert row.slowest_step is None
    assert "-" in bench.table([row]).splitlines()[-1]
    forward, both = flops_per_image(TINY.build((32, 32), 100), (32, 32))
    assert row.flops_per_image * 80 == 80 * both + 22 * forward


def test_ways_take_turns_until_each_had_its_time() -> None:
    class Counting:
        def __init__(self, name: str, took: float) -> None:
            self.name, self.took = name, took
            self.epoch_seconds: list[float] = []

        def run_epoch(self) -> None:
            order.append(self.name)
            self.epoch_seconds.append(self.took)

    order: list[str] = []
    bench._alternate([Counting("slow", 2.0), Counting("fast", 1.0)], 1.5)  # type: ignore[list-item]
    assert order == ["slow", "fast", "slow", "fast"]
    order.clear()
    bench._alternate([Counting("one", 1.0)], 0.0)  # type: ignore[list-item]
    assert order == ["one"]


def test_mistakes() -> None:
    with pytest.raises(ValueError, match="take more images"):
        bench.bench_train(device="cpu", num_images=100)
    for wrong, message in (
        (["--num-cells", "0"], "num_cells is 0"),
        (["--num-cells"], "num_cells is empty"),
        (["--num-images", "-4"], "num_images is -4"),
        (["--seconds", "nan"], "seconds is nan"),
    ):
        with pytest.raises(InputError, match=message):
            command.main(["train", "--device", "cpu", *wrong])


def test_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], rows: list[bench.TrainRow]
) -> None:
    given = {}
    monkeypatch.setattr(bench, "bench_train", lambda **options: given.update(options) or rows)
    options = ["--device", "cpu", "--num-cells", "1", "2", "--num-images", "110", "--model.gaug"]
    assert command.main(["train", *options]) == 0
    model = ModelConfig(gaug=True)
    expected = {"device": "cpu", "num_cells": (1, 2), "num_images": 110, "seconds": 5.0, "model": model}
    assert given == {**expected, "batch_size": 128, "image_size": 32}
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 2 + 5 + 1 + 2 + 2
    assert printed[0].startswith("compact_vit, patch_size 8, depth 1, width 16, num_heads 2, mlp_width 32, fp32, cpu ")
    assert f"(threads: {torch.get_num_threads()})" in printed[0]
    assert printed[7] == ""
    assert printed[8].startswith("compact_vit, depth 2, width 48, num_heads 4, mlp_width 96, fp32, cpu ")
    assert printed[9] == printed[1]
    assert printed[10].startswith("4 cells one after another ")
    assert command.main(["train", "--device", "cpu", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"bench": "train", "rows": [dataclasses.asdict(row) for row in rows]}


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    rows = bench.bench_train(
        device="cuda", num_cells=(1, 2), num_images=640, seconds=0.01, batch_size=64, model=TINY, num_workers=2
    )
    assert [row.num_cells for row in rows] == [1, 1, 2]
    for row in rows:
        assert row.precision == "bf16"
        assert row.extra_bytes is not None
        assert row.extra_bytes > 0
        assert row.slowest_step is not None
        assert row.slowest_step >= 1
