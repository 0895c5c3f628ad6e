import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

# Test modules are imported by path, so the study beside them has to be put where it can be found.
sys.path.insert(0, str(Path(__file__).parent))

from study_records import as_results
from tiny_study import tiny_study

from nearsight.augment.pipeline import one_thread
from nearsight.study import run_study


@pytest.fixture(autouse=True)
def same_bits_in_any_stack() -> Iterator[None]:
    """How sums are divided among threads depends on how many cells train together; with one thread, nothing does."""
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


@pytest.fixture(scope="session")
def tables_of_tiny(finished: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What would be committed of it; not to be changed."""
    return as_results(finished, tmp_path_factory.mktemp("committed") / "tiny")


@pytest.fixture
def tables(tables_of_tiny: Path, tmp_path: Path) -> Path:
    """A copy of that."""
    return Path(shutil.copytree(tables_of_tiny, tmp_path / "tables"))
