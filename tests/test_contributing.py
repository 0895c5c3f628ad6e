"""The additions that CONTRIBUTING walks through are real: each is one file, and its own test passes."""

import os
import re
import subprocess
import sys
from pathlib import Path

GUIDE = Path(__file__).parents[1] / "CONTRIBUTING.md"
_FILE = re.compile(r"^`(\w+\.py)`\n\n```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def test_the_worked_additions_run(tmp_path: Path) -> None:
    files = dict(_FILE.findall(GUIDE.read_text(encoding="utf-8")))
    added = [name for name in files if not name.startswith("test_")]
    assert len(added) == 4, "a metric, an augmentation, a data set and a study"
    assert {f"test_{name}" for name in added} == set(files) - set(added), "each has a test"
    for name, text in files.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    # A process of its own: what they register is not taken back.
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--import-mode=prepend", str(tmp_path)]
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache"), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
