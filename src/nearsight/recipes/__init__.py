"""The papers' experiments as small functions. Importing this package registers them."""

from nearsight.recipes import (
    compact,
    emergence,
    locat,
    mixing,
    permuted,
    protocols,
    size,
    structure,
    unreported,
    vit,
)
from nearsight.recipes.demo import demo_runs
from nearsight.recipes.registry import (
    RUNS,
    SIMULATIONS,
    STUDIES,
    find_run,
    find_study,
    find_study_or_simulation,
)

__all__ = [
    "RUNS",
    "SIMULATIONS",
    "STUDIES",
    "compact",
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
    "vit",
]
