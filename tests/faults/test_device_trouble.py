"""A device that fails in the middle of training: one line, and the same command goes on from the last checkpoint."""

from pathlib import Path

import pandas as pd
import pytest
import torch

from nearsight.cli import main
from nearsight.train.engine import Stack

RUN = ["train", "compact-shapes", "--device", "cpu", "--protocol.max-epochs", "2", "--protocol.batch-size", "8"]
SMALL = ["--data.num-train", "40", "--data.num-test", "10", "--num-measured", "4"]
TINY = ["--model.depth", "1", "--model.width", "8", "--model.num-heads", "1", "--model.mlp-width", "8"]


def test_training_goes_on_after_an_error_of_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([*RUN, *SMALL, *TINY, "--out", "whole"]) == 0
    run_epoch = Stack.run_epoch

    def fail_in_the_second(stack: Stack, *arguments: object) -> object:
        if stack.epochs_done == [1]:
            raise torch.AcceleratorError("CUDA error: misaligned address\nSearch for it in the manual.")
        return run_epoch(stack, *arguments)

    monkeypatch.setattr(Stack, "run_epoch", fail_in_the_second)
    capsys.readouterr()
    assert main([*RUN, *SMALL, *TINY, "--out", "failed"]) == 1
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("nearsight: the device failed (CUDA error: misaligned address); what was saved is kept")
    monkeypatch.setattr(Stack, "run_epoch", run_epoch)
    assert main([*RUN, *SMALL, *TINY, "--out", "failed"]) == 0
    one, other = (pd.read_csv(Path(name, "history.csv")).drop(columns="seconds") for name in ("whole", "failed"))
    pd.testing.assert_frame_equal(one, other, check_exact=True)
    assert Path("whole", "heads.csv").read_bytes() == Path("failed", "heads.csv").read_bytes()
