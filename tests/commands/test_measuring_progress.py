"""Progress of measuring: a bar on a terminal, plain lines elsewhere, and the images unchanged in between."""

from functools import partial

import pytest
import torch
from rich.console import Console

from nearsight.commands import progress
from nearsight.commands.progress import MeasuringProgress

BATCHES = [torch.full((3, 1), float(number)) for number in range(4)]


def test_plain_lines(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0.0)
    with MeasuringProgress("a model", 12) as counting:
        assert list(counting.counted(BATCHES)) == BATCHES
    *lines, last = capsys.readouterr().err.splitlines()
    assert lines == ["a model: 3/12 images", "a model: 6/12 images", "a model: 9/12 images"]
    assert last.startswith("a model: 12 images measured in ")


def test_a_start_from_the_beginning_counts_from_the_beginning(capsys: pytest.CaptureFixture[str]) -> None:
    with MeasuringProgress("a model", 12) as counting:
        next(counting.counted(BATCHES))
        list(counting.counted(BATCHES))
    assert capsys.readouterr().err.startswith("a model: 12 images measured in ")


def test_a_failure_is_not_called_done(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="broken"), MeasuringProgress("a model", 12):
        raise ValueError("broken")
    assert capsys.readouterr().err == ""


def test_a_bar_on_a_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "Console", partial(Console, force_terminal=True, width=100))
    with MeasuringProgress("a [model]", 12) as counting:
        list(counting.counted(BATCHES))
    shown = capsys.readouterr().err
    assert "a [model]" in shown
    assert "12/12" in shown
    assert "measured in" not in shown
