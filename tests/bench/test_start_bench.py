"""The start benchmark times real processes; a second one finds what the first one left. Speed itself is not tested."""

import dataclasses
import json

import pytest

from nearsight.bench import start as bench
from nearsight.commands import bench as command
from nearsight.errors import InputError
from nearsight.models import ModelConfig

TINY = ModelConfig(depth=1, width=16, num_heads=2, mlp_width=32, patch_size=8)


def test_two_processes_reach_their_first_step(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = bench.bench_start(device="cpu", num_cells=[2], batch_size=4, model=TINY)
    assert [(row.what, row.num_cells) for row in rows] == [("cold", 2), ("again", 2)]
    for row in rows:
        assert 0 < row.imported < row.ready < row.first_step
    monkeypatch.setattr(bench, "bench_start", lambda **options: rows)
    assert command.main(["start", "--device", "cpu"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["seconds", "cold", "again"]
    assert command.main(["start", "--device", "cpu", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"] == [dataclasses.asdict(row) for row in rows]


def test_a_process_that_fails_is_named() -> None:
    with pytest.raises(InputError, match=r"a process that trains 1 cells did not start: .*patch"):
        bench.bench_start(device="cpu", model=dataclasses.replace(TINY, patch_size=7))
    with pytest.raises(InputError, match="num_cells"):
        bench.bench_start(device="cpu", num_cells=[0])
