"""Where a run's code comes from."""

import subprocess
from pathlib import Path

import pytest
import torch

import nearsight
from nearsight.train.integrity import COMMIT, provenance


@pytest.mark.parametrize(("told", "expected"), [("0123abc", "0123abc"), ("", None)])
def test_without_a_checkout_the_environment_speaks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, told: str, expected: str | None
) -> None:
    monkeypatch.setattr("nearsight.train.integrity.__file__", str(tmp_path / "provenance.py"))
    monkeypatch.setenv(COMMIT, told)
    assert provenance(torch.device("cpu"))["commit"] == expected


def test_a_checkout_speaks_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    command = ["git", "-C", str(Path(nearsight.__file__).parent), "rev-parse", "HEAD"]
    try:
        head = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        pytest.skip("not in a checkout")
    monkeypatch.setenv(COMMIT, "another")
    assert str(provenance(torch.device("cpu"))["commit"]).removesuffix("+changes") == head
