"""Kernels where there is Triton, and no error where there is none."""

import importlib.util
import sys

import pytest
import torch

from nearsight import triton_language


def test_kernels_need_a_gpu_or_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    if triton_language.triton is None:
        pytest.skip("Triton is not installed")
    monkeypatch.setattr(triton_language, "INTERPRETED", False)
    assert triton_language.runs_on(torch.device("cuda"))
    assert not triton_language.runs_on(torch.device("cpu"))
    monkeypatch.setattr(triton_language, "INTERPRETED", True)
    assert triton_language.runs_on(torch.device("cpu"))


def test_without_triton_there_are_no_kernels_but_no_error_either(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    spec = importlib.util.spec_from_file_location("without_triton", triton_language.__file__)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert not module.runs_on(torch.device("cuda"))

    @module.kernel
    def function(x: int, SIZE: module.tl.constexpr) -> int:  # type: ignore[name-defined]
        return x

    assert function(3, 4) == 3
