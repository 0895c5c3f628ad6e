"""The papers' experiments as small functions. Importing this package registers them."""

from nearsight.recipes import (
    emergence,
    locat,
    mixing,
    permuted,
    protocols,
    size,
    structure,
    unreported,
)
from nearsight.recipes.registry import (
    SIMULATIONS,
    STUDIES,
    find_study,
    find_study_or_simulation,
)
from nearsight.train.recipes import RUNS, demo_runs, find_run

__all__ = [
    "RUNS",
    "SIMULATIONS",
    "STUDIES",
    "demo_runs",
    "emergence",
    "find_run",
    "find_study",
    "find_study_or_simulation",
    "locat",
    "mixing",
    "permuted",
    "protocols",
    "size",
    "structure",
    "unreported",
]
