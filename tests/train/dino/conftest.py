import sys
from pathlib import Path

# Test modules are imported by path, so what they share has to be put where it can be found.
sys.path.insert(0, str(Path(__file__).parent))
