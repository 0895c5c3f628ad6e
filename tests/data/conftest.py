import os
import sys
from pathlib import Path

import pytest

# Test modules are imported by path, so the writers of small files beside them have to be put where they can be found.
sys.path.insert(0, str(Path(__file__).parent))

REAL_DATA = os.environ.get("NEARSIGHT_DATA")


@pytest.fixture(autouse=True)
def cache_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Every test has a cache folder of its own and no data but what it makes."""
    home = tmp_path / "cache"
    monkeypatch.setenv("XDG_CACHE_HOME", str(home))
    monkeypatch.delenv("NEARSIGHT_DATA", raising=False)
    return home


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    return folder


@pytest.fixture
def real_folder(request: pytest.FixtureRequest) -> Path:
    """Where the real data are; the parameter names the set a test needs."""
    if REAL_DATA is None:
        pytest.skip("NEARSIGHT_DATA is not set, so there are no real data to test with")
    folder = Path(REAL_DATA)
    if not (folder / request.param).is_dir():
        pytest.skip(f"{request.param} is not in NEARSIGHT_DATA ({folder})")
    return folder
