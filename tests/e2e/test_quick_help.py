"""What the command answers at once, without torch."""

import importlib
import json
import os
import shlex
import subprocess
import sys

import pytest

import nearsight_command
from nearsight import cli
from nearsight.commands.bench import BENCHES
from nearsight.train.dino.recipes import PRETRAININGS
from nearsight.train.recipes import RUNS
from nearsight.version import __version__

HEAVY = {"nearsight", "torch", "torchvision", "timm", "numpy", "pandas", "scipy", "matplotlib", "tyro"}
ENTRY = """
import sys
from nearsight_command import main
code = main()
print(*sys.modules, file=sys.stderr)
sys.exit(code)
"""
LATE = {"scipy", "matplotlib", "torchvision.transforms.v2", "transformers", "nearsight.report"}
"""What is loaded by those who compute or draw with it, not by those who ask or make a mistake."""
IN_TURN = """
import contextlib, json, sys
from nearsight_command import main
for arguments in json.loads(sys.argv[1]):
    with contextlib.redirect_stdout(sys.stderr), contextlib.suppress(SystemExit):
        main(arguments)
    print(json.dumps(list(sys.modules)))
"""
LIGHT = [
    ["data", "list"],
    ["data", "fetch", "no-such-set"],
    ["bench", "train", "--help"],
    ["train", "compact-shapes", "--help"],
    ["train", "dino-shapes", "--help"],
    ["train", "no-such-recipe"],
    ["study", "list"],
    ["study", "run", "--help"],
    ["study", "run", "no-such-study"],
    ["probe", "knn", "--help"],
    ["probe", "linear", "--help"],
    ["probe", "segment", "--help"],
    ["probe", "retrieve", "--help"],
    ["probe", "all", "--help"],
    ["measure", "--help"],
    ["measure", "--no-such-option"],
    ["measure", "no-such-model"],
    ["maps", "--help"],
    ["maps", "no-such-model", "--out", "maps.safetensors"],
    ["report", "--help"],
    ["report", "--compare", "one"],
    ["demo", "--help"],
]


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--help"], 0, nearsight_command.help_text()),
        (["-h"], 0, nearsight_command.help_text()),
        ([], 2, nearsight_command.help_text()),
        (["--version"], 0, __version__),
        *(([command, "--help"], 0, usage) for command, usage in nearsight_command.USAGES.items()),
        (["study"], 2, nearsight_command.USAGES["study"]),
    ],
)
def test_help_and_version_load_nothing_heavy(arguments: list[str], code: int, said: str) -> None:
    done = subprocess.run([sys.executable, "-c", ENTRY, *arguments], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (code, f"{said}\n")
    *complaints, modules = done.stderr.splitlines()
    assert len(complaints) == (code == 2)
    assert not HEAVY & set(modules.split())


def test_questions_and_mistakes_load_nothing_that_computes_or_draws() -> None:
    command = [sys.executable, "-c", IN_TURN, json.dumps(LIGHT)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    for arguments, modules in zip(LIGHT, map(json.loads, done.stdout.splitlines()), strict=True):
        assert not LATE & set(modules), arguments


def test_what_is_told_of_recipes_and_benchmarks_is_their_own_text() -> None:
    for told, there in ((nearsight_command.RECIPES, {**RUNS, **PRETRAININGS}), (nearsight_command.BENCHES, BENCHES)):
        assert told == {name: (one.__doc__ or "").splitlines()[0] for name, one in there.items()}
        assert list(told) == list(there)


@pytest.mark.parametrize("command", nearsight_command.USAGES)
def test_commands_print_the_same_usage_themselves(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    module = importlib.import_module(f"nearsight.commands.{command}")
    for arguments, code in (([], 2), (["-h"], 0), (["--help"], 0)):
        assert module.main(arguments) == code
        printed = capsys.readouterr()
        assert printed.out == f"{nearsight_command.USAGES[command]}\n"
        missing = f"nearsight: no {nearsight_command.MISSING[command]} is named; see nearsight {command} --help\n"
        assert printed.err == ("" if arguments else missing)


def test_the_same_from_the_package_and_where_it_is_not_installed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nearsight_command, "_installed_version", lambda: None)
    for arguments in (["--help"], [], ["--version"], ["stdy"], ["probe", "-h"], ["data", "list"]):
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
    with monkeypatch.context() as patched:
        patched.setattr("builtins.__import__", interrupted)
        code = nearsight_command.main(["data", "list"])
    assert code == 130
    assert capsys.readouterr().err == f"nearsight: interrupted; {nearsight_command.GOES_ON}\n"


def test_quick_helps_on_outputs_that_cannot_take_them() -> None:
    command = [sys.executable, "-c", ENTRY, "train", "--help"]
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, env={**os.environ, "PYTHONIOENCODING": "ascii"}
    )
    assert done.stdout == nearsight_command.USAGES["train"].replace("…", "?") + "\n"
    with open("/dev/full", "w", encoding="utf-8") as file:
        done = subprocess.run(command, stdout=file, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("nearsight: the output cannot be written: No space left")


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


QUICK = ["-c", "import sys; from nearsight_command import main; sys.exit(main())"]


@pytest.mark.parametrize(
    ("entry", "closed"), [(QUICK, ">&-"), (QUICK, "2>&-"), (["-m", "nearsight"], ">&-"), (["-m", "nearsight"], "2>&-")]
)
def test_an_output_that_is_closed_is_not_written_to(entry: list[str], closed: str) -> None:
    command = shlex.join([sys.executable, *entry, "--help"])
    done = subprocess.run(["sh", "-c", f"{command} {closed}"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("nearsight: see") == (closed == "2>&-")
