"""SIGINT and SIGTERM, as a shell or a scheduler sends them to the real process."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pandas as pd
import pytest

from nearsight.cli import main
from nearsight.commands.options import stoppable
from nearsight.train import RunFolder, Stop

SMALL = [
    *("--model.depth", "1", "--model.width", "16", "--model.num-heads", "2", "--model.mlp-width", "16"),
    *("--data.num-train", "300", "--data.num-test", "50", "--protocol.batch-size", "16"),
    *("--num-measured", "20", "--measure-every", "2", "--num-measured-during", "10", "--device", "cpu"),
]


@pytest.fixture(autouse=True)
def interruptible() -> Iterator[None]:
    """A shell lets what it starts in the background ignore SIGINT, and that is inherited: also by these tests."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def train_process(out: Path, *options: str) -> subprocess.Popen[str]:
    arguments = ["train", "compact-shapes", "--out", str(out), *SMALL, *options]
    return subprocess.Popen(
        [sys.executable, "-m", "nearsight", *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def wait_until(process: subprocess.Popen[str], ready: Callable[[], bool], *, seconds: float = 60) -> None:
    began = time.monotonic()
    while process.poll() is None and not ready():
        assert time.monotonic() - began < seconds
        time.sleep(0.01)


def events(run: Path) -> list[dict[str, object]]:
    path = run / "events.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def epochs_seen(run: Path) -> int:
    """What the events tell, which are ahead of the checkpoints."""
    return sum(event["event"] == "epoch" for event in events(run))


LENGTH = ("--protocol.max-epochs", "20", "--protocol.patience", "20")


def stop_by(number: signal.Signals, run: Path) -> subprocess.CompletedProcess[str]:
    """Sent in the fourth epoch. Checkpoints are rare: the last whole epoch is on disk because of the signal alone."""
    process = train_process(run, *LENGTH, "--checkpoint-every", "1000")
    wait_until(process, lambda: epochs_seen(run) >= 3)
    process.send_signal(number)
    printed, errors = process.communicate(timeout=60)
    return subprocess.CompletedProcess((), process.returncode, printed, errors)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_ends_training_well(tmp_path: Path, number: signal.Signals, code: int) -> None:
    run = tmp_path / "run"
    done = stop_by(number, run)
    assert done.returncode == code, done.stderr
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    epochs = len(pd.read_csv(run / "history.csv"))
    assert epochs >= 3
    said = f"nearsight: stopped by {number.name} after epoch {epochs}; the same command continues"
    assert done.stderr.splitlines()[-1] == said
    last = events(run)[-1]
    assert (last["event"], last["by"], last["epochs_done"]) == ("stopped", number.name, epochs)
    assert not RunFolder(run).is_complete
    assert [path.name for path in run.iterdir() if "tmp" in path.name] == []
    if number == signal.SIGINT:
        return  # continuing is the same

    whole = tmp_path / "whole"
    for each in (whole, run):
        assert main(["train", "compact-shapes", "--out", str(each), *SMALL, *LENGTH]) == 0
    a, b = (pd.read_csv(path / "history.csv").drop(columns="seconds") for path in (whole, run))
    pd.testing.assert_frame_equal(a, b, check_exact=True)
    for name in ("model.safetensors", "heads.csv", "result.json"):
        assert (whole / name).read_bytes() == (run / name).read_bytes()


@pytest.mark.slow
def test_the_demo_can_be_stopped_too(tmp_path: Path) -> None:
    arguments = ["demo", "--out", str(tmp_path), "--epochs", "500", "--num-train", "200", "--device", "cpu"]
    process = subprocess.Popen([sys.executable, "-m", "nearsight", *arguments], stderr=subprocess.PIPE, text=True)
    wait_until(process, lambda: len(list((tmp_path / "induce").glob("runs/*/history.csv"))) == 2, seconds=240)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 143, errors
    assert errors.splitlines()[-1].startswith("nearsight: stopped by SIGTERM after epoch")
    for run in (tmp_path / "induce" / "runs").iterdir():
        assert events(run)[-1]["event"] == "stopped"
    assert (tmp_path / "report.html").exists()  # of the first part, which is done
    assert not (tmp_path / "understand").exists()


def test_a_second_signal_ends_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "_exit", sys.exit)  # which would end the tests as well

    def work(stop: Stop) -> int:
        with stop.listening():
            signal.raise_signal(signal.SIGINT)
            assert stop.by == "SIGINT"  # the first one waits for somebody to ask
            signal.raise_signal(signal.SIGTERM)
            raise AssertionError("went on")

    with pytest.raises(SystemExit) as ended:
        stoppable(work)
    assert ended.value.code == 143


def test_where_nobody_asks_the_first_signal_ends_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    """While data are read, say; and no `except Exception` on the way keeps it."""

    def work(stop: Stop) -> int:
        with contextlib.suppress(Exception):
            signal.raise_signal(signal.SIGTERM)
        raise AssertionError("went on")

    assert stoppable(work) == 143
    assert capsys.readouterr().err == "nearsight: stopped by SIGTERM; the same command continues\n"


def test_handlers_are_put_back_and_respect_what_is_ignored() -> None:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:

        def work(stop: Stop) -> int:
            assert signal.getsignal(signal.SIGINT) is not before[signal.SIGINT]
            assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
            return 5

        assert stoppable(work) == 5
        assert signal.getsignal(signal.SIGINT) is before[signal.SIGINT]
        with pytest.raises(ZeroDivisionError):
            stoppable(lambda stop: 1 // 0)
        assert signal.getsignal(signal.SIGINT) is before[signal.SIGINT]
    finally:
        signal.signal(signal.SIGTERM, before[signal.SIGTERM])


def test_other_threads_leave_signals_alone() -> None:
    seen = []

    def work(stop: Stop) -> int:
        seen.append(signal.getsignal(signal.SIGINT))
        return 0

    thread = threading.Thread(target=stoppable, args=(work,))
    thread.start()
    thread.join()
    assert seen == [signal.getsignal(signal.SIGINT)]
