"""What the command answers at once, without torch."""

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
