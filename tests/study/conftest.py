import shutil
import sys
from pathlib import Path

import pytest

# Test modules are imported by path, so the study beside them has to be put where it can be found.
sys.path.insert(0, str(Path(__file__).parent))

from tiny_study import tiny_study

from nearsight.study import run_study


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study that nothing came between; not to be changed."""
    return run_study(tiny_study(), tmp_path_factory.mktemp("finished") / "study").path


@pytest.fixture
def folder(finished: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(finished, tmp_path / "study"))
