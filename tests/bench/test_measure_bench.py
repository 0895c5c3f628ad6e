"""The measuring benchmark compares three ways on the same work. Speed itself is not tested."""

import json

import pytest
import torch

from nearsight.bench import measure as bench
from nearsight.commands import bench as command


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
        assert row.extra_bytes is None or row.extra_bytes >= 0


def test_keeping_maps_leaves_the_model_as_it_was() -> None:
    model = bench.timm.create_model("vit_tiny_patch16_224", img_size=32, depth=1).eval()
    bench._keep_maps(model, torch.randn(1, 3, 32, 32), 1)
    assert model.blocks[0].attn.fused_attn
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
    monkeypatch.setattr(command, "bench_measure", lambda **given: rows)
    assert command.main(["measure", "--device", "cpu"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 2 + len(rows)
    assert command.main(["measure", "--device", "cpu", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["num_tokens"] == 5
    monkeypatch.setattr(bench, "bench_measure", lambda **given: rows)
    bench.main(["--device", "cpu"])
    assert "vit_tiny_patch16_224, float32, cpu" in capsys.readouterr().out
    for wrong in (["--num-tokens", "5"], ["--batch-sizes", "2"]):
        with pytest.raises(ValueError, match="--batch-sizes"):
            command.main(["measure", *wrong])
