"""A pytest plugin: kernels are tested on a GPU, and on the CPU in a process with Triton's interpreter.

Triton settles when a kernel is defined whether its interpreter runs it. So a test that is marked `interpreted` runs in
a process that has TRITON_INTERPRET set, and here it only says how it went there. There is one such process, which is
sent the tests of one file at a time: of several pytests that share the files of a session, each asks for its own.

A test that takes `device` is two: on a GPU it runs as any test, and on the CPU it is marked.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import IO, Any

import pytest
import torch
from guarded_memory import Memory

from nearsight.triton_language import INTERPRETED, triton

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "interpreted: runs in a process with Triton's interpreter")
    config.stash[_interpreter] = _Interpreter(config)


def pytest_unconfigure(config: pytest.Config) -> None:
    config.stash[_interpreter].stop()


@pytest.fixture(
    params=[pytest.param(CPU, marks=pytest.mark.interpreted), pytest.param(GPU, marks=pytest.mark.gpu)], ids=str
)
def device(request: pytest.FixtureRequest) -> torch.device:
    if triton is None:
        pytest.skip("Triton is not installed")
    which: torch.device = request.param
    torch.manual_seed(0)
    return which


@pytest.fixture
def memory(device: torch.device) -> Iterator[Memory]:
    with Memory(device) as memory:
        yield memory
    memory.check()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if INTERPRETED or not pyfuncitem.get_closest_marker("interpreted"):
        return None
    if problem := pyfuncitem.config.stash[_interpreter].problem_of(pyfuncitem):
        pytest.fail(problem, pytrace=False)
    return True


class _Interpreter:
    """The other process. It starts when it is first needed, and again if it has died."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._process: subprocess.Popen[str] | None = None
        self._printed: IO[str] = tempfile.TemporaryFile("w+")  # noqa: SIM115  # closed by `stop`
        self._problems: dict[str, str] = {}

    def problem_of(self, test: pytest.Function) -> str:
        """What went wrong with a test: nothing, if all is well."""
        if test.nodeid not in self._problems:
            of_file = [
                item.nodeid
                for item in test.session.items
                if item.path == test.path and item.get_closest_marker("interpreted")
            ]
            self._problems |= self._run(of_file)
        return self._problems[test.nodeid]

    def _run(self, names: list[str]) -> dict[str, str]:
        process = self._process = self._process or self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        start = self._printed.seek(0, os.SEEK_END)
        process.stdin.write(json.dumps(names) + "\n")
        process.stdin.flush()
        answer: dict[str, str] = json.loads(process.stdout.readline() or "{}")
        if not answer:
            self.stop()
        self._printed.seek(start)
        printed = self._printed.read()
        return {name: answer.get(name, f"did not run:\n{printed}") for name in names}

    def _start(self) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, __file__],
            env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
            cwd=self._config.rootpath,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._printed,
            text=True,
        )

    def stop(self) -> None:
        if self._process is not None:
            self._process.communicate()  # it ends with what it reads
            self._process = None


_interpreter = pytest.StashKey[_Interpreter]()


class _Problems(dict[str, str]):
    """A plugin of the other process: what it has to tell of each test."""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self[report.nodeid] = self.get(report.nodeid, "") + ("" if report.passed else report.longreprtext)


def _answer() -> None:
    """Run the tests that are named by each line that comes in, and write a line with their problems."""
    _make_the_interpreter_faster()
    questions, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what pytest prints is for people
    for names in questions:
        problems = _Problems()
        pytest.main(["-q", "-p", "no:cacheprovider", *json.loads(names)], plugins=[problems])
        print(json.dumps(problems), file=answers, flush=True)


def _make_the_interpreter_faster() -> None:
    """It puts its own functions into Triton's language for a launch, and then for every call of one kernel by another
    anew, which is a third of its time. Once for all kernels of a module is enough.
    """
    interpreter: Any = triton.runtime.interpreter
    if not hasattr(interpreter, "_patch_lang"):  # a Triton that does it otherwise
        return
    launch, patch = interpreter.GridExecutor.__call__, interpreter._patch_lang
    patched: set[int] = set()

    def launch_first(executor: Any, *args: Any, **kwargs: Any) -> Any:
        patched.clear()
        return launch(executor, *args, **kwargs)

    def patch_once(function: Any) -> Any:
        module = id(function.__globals__)
        if module in patched:
            return None  # of calls; launches come first
        patched.add(module)
        return patch(function)

    interpreter.GridExecutor.__call__, interpreter._patch_lang = launch_first, patch_once


if __name__ == "__main__":
    _answer()
