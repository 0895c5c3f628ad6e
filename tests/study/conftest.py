import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

# Test modules are imported by path, so the study beside them has to be put where it can be found.
sys.path.insert(0, str(Path(__file__).parent))

from tiny_study import tiny_study

from nearsight.study import run_study


@contextmanager
def one_thread() -> Iterator[None]:
    """How sums are divided among threads depends on how many cells train together; with one thread, nothing does."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def same_bits_in_any_stack() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study that nothing came between; not to be changed."""
    with one_thread():
        return run_study(tiny_study(), tmp_path_factory.mktemp("finished") / "study").path


@pytest.fixture
def folder(finished: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(finished, tmp_path / "study"))
