import sys
from pathlib import Path

# Test modules are imported by path, so what they share, here and next door, has to be put where it can be found.
TESTS = Path(__file__).parent.parent
for folder in ("faults", "study", "data"):
    if str(TESTS / folder) not in sys.path:
        sys.path.insert(0, str(TESTS / folder))
