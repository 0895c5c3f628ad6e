"""What the command answers at once, without torch."""

import os
import subprocess
import sys

import pytest

import nearsight_command
from nearsight import cli
from nearsight.version import __version__

HEAVY = {"nearsight", "torch", "torchvision", "timm", "numpy", "pandas", "scipy", "matplotlib", "tyro"}
ENTRY = """
import sys
from nearsight_command import main
code = main()
print(*sys.modules, file=sys.stderr)
sys.exit(code)
"""


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--help"], 0, nearsight_command.help_text()),
        (["-h"], 0, nearsight_command.help_text()),
        ([], 2, nearsight_command.help_text()),
        (["--version"], 0, __version__),
    ],
)
def test_help_and_version_load_nothing_heavy(arguments: list[str], code: int, said: str) -> None:
    done = subprocess.run([sys.executable, "-c", ENTRY, *arguments], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (code, f"{said}\n")
    assert not HEAVY & set(done.stderr.split())


def test_the_same_from_the_package_and_where_it_is_not_installed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nearsight_command, "_installed_version", lambda: None)
    for arguments in (["--help"], [], ["--version"], ["stdy"], ["data", "list"]):
        code = nearsight_command.main(arguments)
        printed = capsys.readouterr()
        assert cli.main(arguments) == code
        assert capsys.readouterr() == printed


def test_a_reader_that_has_gone_is_no_error() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(0.5); " + ENTRY, "--help"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        said = process.stderr.read()
    assert process.returncode == 1
    assert "Traceback" not in said
    assert "BrokenPipe" not in said


def test_an_interrupt_while_the_library_is_loaded(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(name: str, *_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "nearsight.cli")
    monkeypatch.setattr("builtins.__import__", interrupted)
    assert nearsight_command.main(["data", "list"]) == 130
    assert capsys.readouterr().err == "nearsight: interrupted\n"


@pytest.mark.parametrize(
    ("arguments", "variables", "output", "code", "said"),
    [
        (["data", "list", "--json"], {}, "/dev/full", 1, "nearsight: the output cannot be written: No space left"),
        (["stdy"], {"PYTHONIOENCODING": "ascii"}, None, 2, "nearsight: 'stdy' is not a known command"),
    ],
)
def test_outputs_that_cannot_take_it(
    arguments: list[str], variables: dict[str, str], output: str | None, code: int, said: str
) -> None:
    command = [sys.executable, "-m", "nearsight", *arguments]
    with open(output or os.devnull, "w", encoding="utf-8") as file:
        done = subprocess.run(
            command, stdout=file, stderr=subprocess.PIPE, text=True, check=False, env={**os.environ, **variables}
        )
    assert done.returncode == code
    assert done.stderr.startswith(said)
    assert done.stderr.count("\n") == 1
