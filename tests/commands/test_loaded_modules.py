"""How much of this project a command loads: what it does not need, it does not import."""

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import contextlib, io, sys
from nearsight.cli import main
with contextlib.redirect_stdout(io.StringIO()):
    code = main(sys.argv[1:])
assert code == 0
print(*(name for name in sys.modules if name.split(".")[0] == "nearsight"))
"""
MEASURE = ("measure", "compact_vit", "--num-images", "4", "--device", "cpu")
TRAIN = (
    *("train", "compact-shapes", "--model.depth", "1", "--model.width", "16", "--model.num-heads", "2"),
    *("--model.mlp-width", "16", "--data.num-train", "60", "--data.num-test", "20", "--protocol.batch-size", "16"),
    *("--protocol.max-epochs", "1", "--protocol.warmup-epochs", "0", "--num-measured", "10", "--device", "cpu"),
)
STUDY = ("study", "run", "ablation-cifar100", "--scale", "small", "--seeds", "1", "--device", "cpu")


@pytest.mark.parametrize(
    ("arguments", "most", "without"),
    [
        (MEASURE, 200, ("nearsight.papers", "nearsight.probe", "nearsight.report.page.results")),
        ((*MEASURE, "--shards", "2", "--shard", "0"), 165, ("nearsight.report", "nearsight.study")),
        (TRAIN, 205, ("nearsight.papers", "nearsight.probe", "nearsight.report.page.results")),
        # It trains eight cells and draws all their figures.
        pytest.param(STUDY, 255, ("nearsight.probe",), marks=pytest.mark.slow),
    ],
    ids=["measure", "measure a shard", "train", "study run"],
)
def test_a_command_loads_what_it_needs(
    arguments: tuple[str, ...], most: int, without: tuple[str, ...], tmp_path: Path
) -> None:
    command = [sys.executable, "-c", PROGRAM, *arguments, "--out", str(tmp_path / "out")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    loaded = done.stdout.split()
    assert not set(without) & set(loaded)
    assert len(loaded) <= most, f"{len(loaded)} modules"
