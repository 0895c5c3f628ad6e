"""`nearsight train` over several processes, as torchrun starts it: what is shown, and signals to any of them."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import pytest

SMALL = [
    *("--model.depth", "1", "--model.width", "16", "--model.num-heads", "2", "--model.mlp-width", "16"),
    *("--model.patch-size", "8", "--data.num-train", "60", "--data.num-test", "10", "--protocol.batch-size", "16"),
    *("--num-measured", "10", "--protocol.lr-scaling", "linear", "--protocol.patience", "10000", "--device", "cpu"),
]
WITHIN = 120.0
"""Seconds."""


def start(out: Path, *options: str) -> list[subprocess.Popen[str]]:
    """Two processes with the environment that torchrun gives them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    command = [sys.executable, "-m", "nearsight", "train", "compact-shapes", *SMALL, *options, "--out", str(out)]
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
    return [
        subprocess.Popen(
            command,
            env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]


def wait_for_epoch(out: Path, epoch: int) -> None:
    limit = time.monotonic() + WITHIN
    while f'"epoch": {epoch},' not in (log.read_text() if (log := out / "events.jsonl").exists() else ""):
        assert time.monotonic() < limit
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "rank"), [(signal.SIGTERM, 1), (signal.SIGINT, 0)])
def test_a_signal_to_one_process_stops_all_and_keeps_every_whole_epoch(tmp_path: Path, number: int, rank: int) -> None:
    out = tmp_path / "run"
    processes = start(out, "--protocol.max-epochs", "10000", "--checkpoint-every", "10000")
    wait_for_epoch(out, 2)
    processes[rank].send_signal(number)
    told = [process.communicate(timeout=WITHIN) for process in processes]
    assert [process.returncode for process in processes] == [128 + number] * 2, told
    kept = len(pd.read_csv(out / "history.csv"))
    assert kept >= 2
    for _, error in told:
        assert f"stopped by {signal.Signals(number).name} after epoch {kept}; the same command continues" in error
    assert "batches of 16 images over 2 processes, peak learning rate 6.25e-05" in told[0][1]


@pytest.mark.slow
def test_one_result_is_printed(tmp_path: Path) -> None:
    processes = start(tmp_path / "run", "--protocol.max-epochs", "2", "--protocol.warmup-epochs", "1", "--json")
    (shown, _), (silent, quiet) = (process.communicate(timeout=WITHIN) for process in processes)
    assert [process.returncode for process in processes] == [0, 0]
    assert '"test_acc"' in shown
    assert silent + quiet == ""
