"""The benchmark of attention with a bias compares ways on the same work. Speed itself is not tested."""

import json
from typing import Any

import pytest
import torch

from nearsight.bench import costs
from nearsight.bench import gaug as bench
from nearsight.bench.costs import CostRow
from nearsight.commands import bench as command
from nearsight.errors import InputError


@pytest.fixture(scope="module")
def rows() -> list[CostRow]:
    torch.manual_seed(0)
    return bench.bench_gaug(
        device="cpu",
        num_tokens=(5, 17),
        batch_sizes=(2, 1),
        num_heads=2,
        head_size=8,
        num_steps=1,
        model="test_vit",
        model_batch_size=2,
    )


def test_rows(rows: list[CostRow]) -> None:
    assert [(row.work, row.num_tokens, row.batch_size, row.way) for row in rows] == [
        *(("attention", 5, 2, way) for way in ("plain", "nearsight", "dense")),
        *(("attention", 17, 1, way) for way in ("plain", "nearsight", "dense")),
        *(("test_vit", 101, 2, way) for way in ("plain", "nearsight")),
    ]
    plain = None
    for row in rows:
        assert row.milliseconds is not None
        assert row.milliseconds > 0
        plain = row.milliseconds if row.way == "plain" else plain
        assert row.ratio == pytest.approx(row.milliseconds / plain)
        assert row.extra_bytes is None  # it cannot be known on a CPU
    assert all(line.endswith(" -") for line in bench.table(rows).splitlines()[2:])


def test_what_does_not_fit_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def too_large() -> None:
        raise torch.OutOfMemoryError

    ways = {"plain": lambda: None, "dense": too_large}
    rows = costs.compare("nothing", ways, 1, device="cpu", dtype="float32", num_tokens=5, batch_size=1)
    assert [row.milliseconds is None for row in rows] == [False, True]
    assert rows[1].ratio is None
    assert rows[1].extra_bytes is None
    assert bench.table(rows).splitlines()[-1].split() == ["nothing", "5", "1", "dense", "float32", "-", "-", "-"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_tokens": (200,)}, "200 tokens are not CLS and a square"),
        ({"num_tokens": (0,)}, "num_tokens is 0, but must be at least 1"),
        ({"num_tokens": (5,), "batch_sizes": (1, 2)}, "num_tokens has 1 numbers and batch_sizes 2"),
        ({"num_tokens": (5,), "batch_sizes": (0,)}, "batch_sizes is 0, but must be at least 1"),
        ({"num_tokens": ()}, "num_tokens is empty"),
        ({"batch_sizes": ()}, "batch_sizes is empty"),
        ({"num_steps": 0}, "num_steps is 0"),
        ({"model": "vit_tny_patch16_224"}, "did you mean 'vit_tiny_patch16_224'"),
        ({"model": "vit_tiny_patch16_224.augreg"}, "did you mean vit_tiny_patch16_224.augreg_in21k?"),
        ({"model": "resnet18"}, "LocAt cannot be added to ResNet"),
        ({"model": "eva02_tiny_patch14_224"}, "eva02_tiny_patch14_224 has no classifier to train"),
    ],
)
def test_mistakes(options: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are found before anything takes its time."""
    monkeypatch.setattr(bench, "compare", None)
    with pytest.raises(InputError, match=message):
        bench.bench_gaug(device="cpu", **options)


def test_what_depends_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(bench, "attention_ways", lambda _, grid, batch_size, *__: {"plain": batch_size})
    monkeypatch.setattr(
        bench, "compare", lambda work, ways, num_steps, **shared: asked.append((shared, num_steps)) or []
    )
    for device in ("cpu", "cuda"):
        bench.bench_gaug(device=device, model=None)
    assert [(shared["num_tokens"], shared["batch_size"], steps) for shared, steps in asked] == [
        *((197, 2, 1), (1025, 1, 1)),
        *((197, 256, 10), (1025, 32, 10), (4097, 8, 10)),
    ]


def test_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], rows: list[CostRow]) -> None:
    given = {}
    monkeypatch.setattr(bench, "bench_gaug", lambda **options: given.update(options) or rows)
    assert command.main(["gaug", "--device", "cpu", "--num-tokens", "5", "17", "--model", "test_vit"]) == 0
    assert given["num_tokens"] == (5, 17)
    assert given["model"] == "test_vit"
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 2 + len(rows)
    assert command.main(["gaug", "--device", "cpu", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"][0]["way"] == "plain"
