"""`nearsight bench`: the help, which benchmark is imported, and on which device it runs."""

import contextlib
import dataclasses
import importlib
import inspect
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from nearsight.bench import augment
from nearsight.commands import bench as command
from nearsight.errors import InputError


def test_help_says_a_line_about_each(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(InputError, match="no benchmark is named"):
        command.main([])
    assert command.main(["--help"]) == 0
    usage, empty, *lines = capsys.readouterr().out.splitlines()[-2 - len(command.BENCHES) :]
    assert f"{{{','.join(command.BENCHES)}}}" in usage
    assert empty == ""
    for line, (name, options) in zip(lines, command.BENCHES.items(), strict=True):
        assert line.split(maxsplit=1) == [name, options.__doc__]


def test_help_imports_no_benchmark() -> None:
    code = (
        "import sys; from nearsight.commands.bench import main; main(['--help'])\n"
        "sys.exit(any(name.startswith('nearsight.bench.') for name in sys.modules))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


@pytest.mark.parametrize("name", command.BENCHES)
def test_options_default_to_what_the_function_does(name: str) -> None:
    taken = inspect.signature(getattr(importlib.import_module(f"nearsight.bench.{name}"), f"bench_{name}")).parameters
    for option in dataclasses.fields(command.BENCHES[name]):
        if option.name not in ("device", "json") and option.default is not dataclasses.MISSING:
            assert option.default == taken[option.name].default, option.name


@pytest.mark.parametrize("device", ["cpu", "cuda:1"])
def test_it_runs_with_its_device_as_the_current_one(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    current: list[torch.device] = []
    seen = []

    @contextlib.contextmanager
    def made_current(chosen: torch.device) -> Iterator[None]:
        current.append(chosen)
        yield
        current.clear()

    monkeypatch.setattr(command, "find_device", torch.device)
    monkeypatch.setattr(torch.cuda, "device", made_current)
    monkeypatch.setattr(augment, "bench_augment", lambda **given: seen.append((given["device"], *current)) or [])
    assert command.main(["augment", "--device", device]) == 0
    assert seen == [(device,) if device == "cpu" else (device, torch.device(device))]
    assert not current
