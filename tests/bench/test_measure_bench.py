"""The measuring benchmark compares three ways on the same work. Speed itself is not tested."""

import json
from typing import Any

import pytest
import torch

from nearsight.bench import measure as bench
from nearsight.commands import bench as command
from nearsight.errors import InputError
from nearsight.models import create_model


@pytest.fixture(scope="module")
def rows() -> list[bench.MeasureRow]:
    torch.manual_seed(0)
    return bench.bench_measure(
        device="cpu", model="vit_tiny_patch16_224", num_tokens=(5, 17), batch_sizes=(2, 1), num_batches=1
    )


def test_rows(rows: list[bench.MeasureRow]) -> None:
    assert [(row.num_tokens, row.batch_size, row.dtype) for row in rows] == [(5, 2, "float32"), (17, 1, "float32")]
    for row in rows:
        assert row.forward_ms > 0
        assert row.survey_ms > 0
        assert row.maps_ms is not None
        assert row.ratio == pytest.approx(row.measure_ms / row.forward_ms)
        assert row.extra_bytes is row.maps_extra_bytes is None  # they cannot be known on a CPU
    assert all(line.split()[-3:] == ["-"] * 3 for line in bench.table(rows).splitlines()[2:])


def test_further_measurements_are_timed_beside_measuring() -> None:
    (row,) = bench.bench_measure(
        device="cpu",
        model="vit_tiny_patch16_224",
        num_tokens=(17,),
        batch_sizes=(1,),
        num_batches=1,
        what=["norms", "kinds"],
    )
    assert list(row.what_ms) == ["norms", "kinds"]
    assert all(milliseconds > 0 for milliseconds in row.what_ms.values())
    ratio = row.what_ms["kinds"] / row.measure_ms
    assert bench.table([row]).splitlines()[-1].endswith(f"{row.what_ms['kinds']:,.1f} ms, {ratio:.2f} times measure")


def test_every_way_is_warmed_up_and_takes_its_turns() -> None:
    order: list[tuple[str, int]] = []
    ways: dict[str, bench.Work] = {
        "forward": lambda count: order.append(("forward", count)),
        "maps": lambda count: order.append(("maps", count)),
    }
    milliseconds, peaks = bench._take_turns(ways, 3, "cpu")
    assert order == [("forward", 1), ("maps", 1), *([("forward", 3), ("maps", 3)] * bench._NUM_TURNS)]
    assert set(milliseconds) == set(peaks) == set(ways)


def test_times_are_medians_per_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    turns = iter([40.0, 2.0, 6.0, 4.0, 8.0])
    monkeypatch.setattr(bench, "_timed", lambda work, count, device: (next(turns), 7))
    assert bench._take_turns({"forward": lambda count: None}, 2, "cpu") == ({"forward": 3.0}, {"forward": 7})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_tokens": (200,)}, "200 tokens are not CLS and a square"),
        ({"num_tokens": (1,)}, "1 tokens are not CLS and a square"),
        ({"num_tokens": (0,)}, "num_tokens is 0, but must be at least 1"),
        ({"num_tokens": ()}, "num_tokens is empty"),
        ({"num_tokens": (), "batch_sizes": ()}, "num_tokens is empty"),
        ({"batch_sizes": ()}, "batch_sizes is empty"),
        ({"batch_sizes": (0,)}, "batch_sizes is 0, but must be at least 1"),
        ({"batch_sizes": (1, 2)}, "num_tokens has 1 numbers and batch_sizes 2"),
        ({"what": ("nroms",)}, "nroms"),
        ({"num_batches": 0}, "num_batches is 0, but must be at least 1"),
        ({"model": "vit_tini"}, "'vit_tini' is not a model timm knows"),
        ({"model": "vit_tiny_patch16_224.mine"}, "timm knows vit_tiny_patch16_224, but not its tag 'mine'"),
        ({"model": "vit_base_patch32_224"}, "vit_base_patch32_224 is not a ViT of timm's with CLS, patches of 16"),
        ({"model": "deit_tiny_distilled_patch16_224"}, "is not a ViT of timm's with CLS"),
        ({"model": "swin_tiny_patch4_window7_224"}, "is not a ViT of timm's with CLS"),
        ({"model": "resnet18"}, "is not a ViT of timm's with CLS"),
    ],
)
def test_mistakes(options: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are found before anything takes its time."""
    monkeypatch.setattr(bench, "_bench_tokens", None)
    with pytest.raises(InputError, match=message) as caught:
        bench.bench_measure(device="cpu", **{"model": "vit_tiny_patch16_224", "num_tokens": (17,), **options})
    assert "\n" not in str(caught.value)


def test_batch_sizes_that_are_not_given_depend_on_tokens_and_device(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(bench, "_bench_tokens", lambda name, *sizes: asked.append(sizes[:3]))
    for device in ("cpu", "cuda"):
        bench.bench_measure(device=device)
    bench.bench_measure(device="cpu", num_tokens=(17,))
    assert asked == [
        *((197, 8, 2), (1025, 2, 2), (4097, 1, 2)),
        *((197, 128, 8), (1025, 32, 8), (4097, 8, 8)),
        (17, 8, 2),
    ]


def test_keeping_maps_leaves_the_model_as_it_was() -> None:
    model: Any = create_model("vit_tiny_patch16_224", img_size=32, depth=1).eval()
    for fused in (False, True):
        model.blocks[0].attn.fused_attn = fused
        bench._keep_maps(model, torch.randn(1, 3, 32, 32), 1)
        assert model.blocks[0].attn.fused_attn == fused
    assert not model.blocks[0].attn.attn_drop._forward_hooks


def test_maps_that_are_too_large_are_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "_MOST_MAP_BYTES", {"cpu": 1})
    (row,) = bench.bench_measure(
        device="cpu", model="vit_tiny_patch16_224", num_tokens=(5,), batch_sizes=(1,), num_batches=1
    )
    assert row.maps_ms is None
    assert row.share_of_maps is None


def test_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], rows: list[bench.MeasureRow]
) -> None:
    monkeypatch.setattr(bench, "bench_measure", lambda **given: rows)
    assert command.main(["measure", "--device", "cpu"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 2 + len(rows)
    assert printed[0] == "vit_tiny_patch16_224, float32, cpu"
    assert command.main(["measure", "--device", "cpu", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)["rows"][0]
    assert shown["num_tokens"] == 5
    assert shown["extra_bytes"] is None
