"""Libraries that only some data sets need."""

import importlib
from types import ModuleType
from typing import Any

from nearsight.errors import InputError


def require(module: str, purpose: str) -> Any:
    """Import an optional library, or say how to get it."""
    try:
        imported: ModuleType = importlib.import_module(module)
    except ImportError as error:
        library = module.split(".")[0]
        raise InputError(f"{library} is needed {purpose}; install it with: pip install 'nearsight[data]'") from error
    return imported
