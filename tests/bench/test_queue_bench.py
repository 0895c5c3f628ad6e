"""The queue benchmark replays a study of known lengths, both ways, on the real engine. Speed itself is not tested."""

import dataclasses
import json
from pathlib import Path

import pandas as pd
import pytest

from nearsight.bench import queue as bench
from nearsight.commands import bench as command
from nearsight.errors import InputError
from nearsight.models import ModelConfig

RESULTS = Path(__file__).parents[2] / "results" / "ablation-cifar100"
SMALL_RESULTS = RESULTS.parent / "protocol-cifar100"
TINY = ModelConfig(depth=1, width=16, num_heads=2, mlp_width=32, patch_size=8)


def test_runs_are_as_long_as_they_were() -> None:
    runs = pd.read_csv(RESULTS / "runs.csv")
    whole, short = bench.replayed(RESULTS, 1.0), bench.replayed(RESULTS, 100.0)
    assert len(whole.cells) == len(short.cells) == len(runs) == 24
    length = {(row.condition, row.seed): row.epochs for row in runs.itertuples()}
    for cell, other in zip(whole.cells, short.cells, strict=True):
        assert cell.config.protocol.max_epochs == length[cell.condition, cell.seed]
        assert other.config.protocol.max_epochs == max(1, round(length[cell.condition, cell.seed] / 100))


@pytest.fixture(scope="module")
def rows() -> list[bench.QueueRow]:
    return bench.bench_queue(
        device="cpu", results=SMALL_RESULTS, shorter=100.0, num_images=50, batch_size=16, most=2, model=TINY
    )


def test_both_ways_do_the_same_work(rows: list[bench.QueueRow]) -> None:
    engine, seeds, queue = rows
    assert [row.what for row in rows] == ["engine", "seed after seed", "one queue"]
    assert seeds.num_cells == queue.num_cells == 6
    assert engine.most_at_once == seeds.most_at_once == queue.most_at_once == 2
    assert seeds.images == queue.images == queue.num_epochs * 2 * 16  # of 40 images, 2 batches
    for row in rows:
        assert row.images_per_second == pytest.approx(row.images / row.seconds)
        assert row.of_peak == pytest.approx(row.images_per_second / engine.images_per_second)


def test_damaged_results_and_wrong_numbers(tmp_path: Path) -> None:
    for name in ("study.json", "runs.csv", "heads.csv", "layers.csv", "history.csv", "provenance.json"):
        (tmp_path / name).write_bytes((RESULTS / name).read_bytes())
    runs = pd.read_csv(tmp_path / "runs.csv", dtype=str)
    runs.iloc[1:].to_csv(tmp_path / "runs.csv", index=False)
    with pytest.raises(InputError, match="has no run of Baseline, seed 0"):
        bench.replayed(tmp_path, 1.0)
    for wrong, message in (({"shorter": 0.5}, "shorter is 0.5"), ({"most": 0}, "most is 0")):
        with pytest.raises(InputError, match=message):
            bench.bench_queue(device="cpu", results=RESULTS, **wrong)  # type: ignore[arg-type]


def test_command(
    rows: list[bench.QueueRow], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = {}
    monkeypatch.setattr(bench, "bench_queue", lambda **options: given.update(options) or rows)
    assert command.main(["queue", "--device", "cpu", "--shorter", "50", "--most", "8"]) == 0
    assert (given["device"], given["shorter"], given["most"]) == ("cpu", 50.0, 8)
    printed = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in printed] == ["way", "engine", "seed", "one"]
    assert command.main(["queue", "--device", "cpu", "--json"]) == 0
    described = json.loads(capsys.readouterr().out)
    assert described == {"bench": "queue", "rows": [dataclasses.asdict(row) for row in rows]}
