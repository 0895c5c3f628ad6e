"""The benchmark of inducers compares ways on the same work. Speed itself is not tested."""

import math
from functools import partial
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from nearsight.bench import locality as bench
from nearsight.bench.costs import CostRow
from nearsight.commands import bench as command
from nearsight.errors import InputError
from nearsight.locat import Grid
from nearsight.locat.inducers import inducer_of

ROWS = {"num_heads": 2, "head_size": 8, "num_steps": 1}


def test_rows() -> None:
    rows = bench.bench_locality(
        device="cpu", inducers=("alibi2d", "neighborhood:radius=1.5"), num_tokens=(5, 17), batch_sizes=(2, 1), **ROWS
    )
    assert [(row.work, row.num_tokens, row.batch_size, row.way) for row in rows] == [
        (work, tokens, batch_size, way)
        for tokens, batch_size in ((5, 2), (17, 1))
        for work in ("alibi2d", "neighborhood:radius=1.5")
        for way in ("plain", "nearsight", "dense")
    ]
    for at, row in enumerate(rows):
        plain = rows[at // 3 * 3].milliseconds
        assert row.milliseconds is not None
        assert plain is not None
        assert row.ratio == pytest.approx(row.milliseconds / plain)
        assert (row.limit, row.note) == (None, "")  # aims are those of a GPU


INDUCERS = (
    "gaug",
    "gaug:kernel=laplace",
    "gaussian",
    "alibi2d",
    "neighborhood:radius=1",
    "neighborhood:radius=(0,1),by=head",
)


@pytest.mark.parametrize("text", [*INDUCERS, "relpos"])
def test_ways_with_an_inducer_agree(text: str) -> None:
    ways = bench.attention_ways(inducer_of(text), Grid(3, 4, 1), 2, 2, 16, "cpu")
    plain, ours, dense = (cast("tuple[Tensor, ...]", ways[way]()) for way in ("plain", "nearsight", "dense"))
    for one, other in zip(ours, dense, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(plain[0], ours[0], rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("text", ["gaug:kernel=laplace", "alibi2d", "neighborhood:radius=(0,1),by=head"])
def test_flex_attention_does_the_same(text: str) -> None:
    """Its outputs: on a CPU it has no gradients."""
    options: dict[str, Any] = {"flex": lambda run: run}
    attentions, inputs, _ = bench.ways_to_attend(inducer_of(text), Grid(3, 4, 1), 2, 2, 16, "cpu", **options)
    for tensor in inputs:
        tensor.requires_grad_(False)
    torch.testing.assert_close(attentions["flex"](), attentions["dense"](), rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("text", INDUCERS)
def test_ways_agree_on_a_gpu(text: str) -> None:
    compiled = partial(torch.compile, dynamic=False)
    ways = bench.attention_ways(inducer_of(text), Grid(14, 14, 1), 2, 2, 64, "cuda", flex=compiled)
    ours, *others = (cast("tuple[Tensor, ...]", ways[way]()) for way in ("nearsight", "dense", "flex"))
    for other in others:
        for one, same in zip(ours, other, strict=True):
            assert float((one - same).float().abs().max()) < 0.03 * float(same.float().abs().max())


def test_aims_are_stated_and_judged() -> None:
    def row(ratio: float | None, limit: float | None, **given: Any) -> CostRow:
        shared: dict[str, Any] = {"device": "cuda", "dtype": "bfloat16", "num_tokens": 1025, "batch_size": 32}
        return CostRow(
            work="alibi2d", milliseconds=ratio, ratio=ratio, extra_bytes=None, limit=limit, **shared, **given
        )

    text = bench.table(
        [
            row(1.0, None, way="plain"),
            row(1.2, 1.25, way="nearsight"),
            row(1.3, 1.25, way="nearsight"),
            row(None, None, way="flex", note="Unsupported: nothing"),
        ]
    )
    assert text.splitlines()[-3:] == [
        "alibi2d at 1025 tokens: 1.20, aim ≤ 1.25, met",
        "alibi2d at 1025 tokens: 1.30, aim ≤ 1.25, missed",
        "alibi2d at 1025 tokens, flex: Unsupported: nothing",
    ]


def test_what_does_not_compile_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> None:
        raise NotImplementedError("not here\nmore")

    assert bench._problem(fails) == "NotImplementedError: not here"
    assert bench._problem(lambda: None) == ""


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_tokens": (200,)}, "200 tokens are not CLS and a square"),
        ({"inducers": ()}, "inducers is empty"),
        ({"inducers": ("alibi",)}, "did you mean 'alibi2d'"),
        ({"inducers": ("prr",)}, "prr is around an attention"),
        ({"inducers": ("entmax15",), "num_tokens": (5,)}, "entmax15 is no bias and no mask"),
        ({"num_steps": 0}, "num_steps is 0"),
    ],
)
def test_mistakes(options: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "compare", None)
    with pytest.raises(InputError, match=message):
        bench.bench_locality(device="cpu", **options)


def test_command(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--num-tokens", "5", "--batch-sizes", "1", "--num-heads", "2", "--head-size", "8"]
    assert command.main(["locality", "--device", "cpu", "--inducers", "gaussian", *options]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert [line.split()[3] for line in printed[2:]] == ["plain", "nearsight", "dense"]
    assert all(math.isfinite(float(line.split()[5])) for line in printed[2:])
