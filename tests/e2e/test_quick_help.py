"""What the command answers at once, without torch: counted in modules, which no other load of a machine changes."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from nearsight import cli
from nearsight.commands.bench import BENCHES
from nearsight.commands.probe import PROBES
from nearsight.train.dino.recipes import PRETRAININGS
from nearsight.train.recipes import RUNS
from nearsight.version import __version__

HEAVY = {"torch", "torch._dynamo", "torchvision", "timm", "numpy", "pandas", "scipy", "matplotlib", "transformers"}
EACH = """
import contextlib, json, os, sys, tempfile
import nearsight.cli
for arguments in json.loads(sys.argv[1]):
    read, write = os.pipe()
    if os.fork() == 0:  # so that nobody finds what an earlier one has loaded
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
            try:
                code = nearsight.cli.main(arguments)
            except SystemExit as end:
                code = end.code
        os.write(write, json.dumps([code or 0, " ".join(sys.modules)]).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        print(pipe.read())
    os.wait()
"""
ANSWERS = [
    *([], ["--help"], ["--version"], ["mesure"]),
    *([command, "--help"] for command in cli.COMMANDS),
    *(["train", recipe, "--help"] for recipe in (*RUNS, *PRETRAININGS)),
    *(["probe", probe, "--help"] for probe in PROBES),
    *(["bench", bench, "--help"] for bench in BENCHES),
    *(["study", action, "--help"] for action in ("list", "run", "show", "power")),
    *(["data", action, "--help"] for action in ("list", "fetch", "check")),
    *(["study", "list"], ["data", "list"], ["data", "fetch", "no-such-set"]),
    *(["atlas", "no-such-list", "--out", "out"],),
    *(["train", "no-such-recipe"], ["probe", "no-such-probe"], ["bench", "no-such-bench"]),
    *(["study", action, "no-such-study"] for action in ("run", "show", "power")),
    *(
        ["measure", "--no-such-option"],
        ["train", "compact-shapes", "--model.depht", "2"],
        ["report", "--compare", "one"],
    ),
]
MOST = 400
"""Modules at most; `import torch` alone has a thousand. Half of what there are here is Python's own, and tyro's."""
MOST_WITHOUT_OPTIONS = 160
"""For help and mistakes that need no command's own file."""


def test_what_is_asked_and_mistyped_is_answered_without_torch(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", EACH, json.dumps(ANSWERS)], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    for arguments, line in zip(ANSWERS, done.stdout.splitlines(), strict=True):
        code, modules = json.loads(line)
        wrong = not arguments or any(word.startswith(("no-such", "mesure", "--no-such")) for word in arguments)
        assert code == 2 if wrong else code in (0, 2), arguments
        loaded = modules.split()
        assert not HEAVY & set(loaded), arguments
        few = not arguments or arguments[0] not in cli.COMMANDS
        assert len(loaded) <= (MOST_WITHOUT_OPTIONS if few else MOST), (arguments, len(loaded))


@pytest.mark.parametrize("command", ["train", "study", "probe", "data", "bench"])
def test_commands_say_what_has_to_come_next(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    kind = {"train": "recipe", "probe": "probe", "bench": "benchmark"}.get(command, "action")
    usages = set()
    for arguments, code in (([], 2), (["-h"], 0), (["--help"], 0)):
        assert cli.main([command, *arguments]) == code
        printed = capsys.readouterr()
        usages.add(printed.out)
        missing = f"nearsight: no {kind} is named; see nearsight {command} --help\n"
        assert printed.err == ("" if arguments else missing)
    (usage,) = usages
    assert usage.startswith(f"usage: nearsight {command} ")


def test_usages_list_recipes_probes_and_benchmarks_with_their_own_words(capsys: pytest.CaptureFixture[str]) -> None:
    lists = {"train": {**RUNS, **PRETRAININGS}, "bench": BENCHES}
    for command, there in lists.items():
        cli.main([command, "--help"])
        listed = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines() if line.startswith("  ")]
        assert listed == [[name, (one.__doc__ or "").splitlines()[0]] for name, one in there.items()]
    cli.main(["probe", "--help"])
    printed = capsys.readouterr().out
    assert all(f"  {name:<8}  {about}\n" in printed for name, about in PROBES.items())


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"{__version__}\n"


ENTRY = "import sys; from nearsight.cli import main; sys.exit(main())"


def test_a_reader_that_has_gone_is_no_error() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", f"import time; time.sleep(0.5); {ENTRY}", "--help"],
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

    with monkeypatch.context() as patched:
        patched.setattr("importlib.import_module", interrupted)
        code = cli.main(["data", "list"])
    assert code == 130
    assert capsys.readouterr().err == f"nearsight: interrupted; {cli.GOES_ON}\n"


def test_quick_helps_on_outputs_that_cannot_take_them() -> None:
    command = [sys.executable, "-c", ENTRY, "train", "--help"]
    whole = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, env={**os.environ, "PYTHONIOENCODING": "ascii"}
    )
    assert "…" in whole
    assert done.stdout == whole.replace("…", "?")
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


QUICK = ["-c", ENTRY]


@pytest.mark.parametrize(
    ("entry", "closed"), [(QUICK, ">&-"), (QUICK, "2>&-"), (["-m", "nearsight"], ">&-"), (["-m", "nearsight"], "2>&-")]
)
def test_an_output_that_is_closed_is_not_written_to(entry: list[str], closed: str) -> None:
    command = shlex.join([sys.executable, *entry, "--help"])
    done = subprocess.run(["sh", "-c", f"{command} {closed}"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("nearsight: see") == (closed == "2>&-")
