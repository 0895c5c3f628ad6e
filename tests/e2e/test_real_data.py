"""The Modern protocol on real CIFAR-100, small: from the official files to heads."""

import json
import os
from pathlib import Path

import pandas as pd
import pytest

from nearsight.cli import main


@pytest.fixture
def cifar100(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = os.environ.get("NEARSIGHT_DATA")
    if folder is None or not (Path(folder) / "cifar-100-binary").is_dir():
        pytest.skip("NEARSIGHT_DATA holds no cifar-100-binary")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return Path(folder)


def test_modern_protocol_on_cifar100(cifar100: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    arguments = [
        *("train", "compact-cifar100", "--protocol", "modern", "--out", str(out), "--data-dir", str(cifar100)),
        *("--data.num-train", "2000", "--data.num-test", "500", "--protocol.max-epochs", "2", "--json"),
        *("--model.depth", "2", "--model.width", "48", "--model.num-heads", "4", "--num-measured", "100"),
        *("--protocol.warmup-epochs", "0", "--device", "cpu"),
    ]
    assert main(arguments) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["num_measured"] == 100
    history = pd.read_csv(out / "history.csv")
    assert history["train_loss"].iloc[-1] < history["train_loss"].iloc[0] < 5.2  # ln 100 = 4.6 at chance
    heads = pd.read_csv(out / "heads.csv")
    assert len(heads) == 8
    assert heads["mad"].between(0, 0.7938).all()
    assert heads["entropy"].between(0, 1).all()
