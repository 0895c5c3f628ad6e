"""The ablation benchmark asks three ways on the same work, and gets the same answers. Speed itself is not tested."""

import json

import pytest

from nearsight.bench import ablate as bench
from nearsight.cli import main
from nearsight.errors import InputError


def test_three_ways_give_the_same_answers(capsys: pytest.CaptureFixture[str]) -> None:
    given = ("--device", "cpu", "--num-images", "5", "--num-compared", "3", "--batch-size", "2")
    assert main(["bench", "ablate", *given, "--variants-at-once", "3", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert (row["num_heads"], row["num_images"], row["num_compared"], row["predictions"]) == (64, 5, 3, 192)
    assert row["differ"] == row["differ_to_hooks"] == 0
    assert all(row[name] > 0 for name in ("seconds", "ours_s", "whole_s", "hooks_s"))
    text = bench.table([bench.AblateRow(**row)])
    assert "64 heads × 5 images" in text
    assert f"({row['hooks_s'] / row['ours_s']:.2f} ×)" in text


def test_models_whose_maps_no_hook_can_change_are_refused() -> None:
    with pytest.raises(InputError, match="swin_tiny_patch4_window7_224 is not a ViT of timm's"):
        bench.bench_ablate(device="cpu", model="swin_tiny_patch4_window7_224")
