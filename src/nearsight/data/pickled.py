"""Reading the pickles of the CIFAR python version without giving them the run of the machine.

A pickle can call any function it names. These need three: the ones that rebuild numpy arrays. All others are refused.
"""

import io
import pickle
import pickletools
from pathlib import Path
from typing import Any

import numpy as np

from nearsight.errors import InputError

_ALLOWED = {
    ("numpy.core.multiarray", "_reconstruct"),  # numpy 1 and before
    ("numpy._core.multiarray", "_reconstruct"),
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
    ("_codecs", "encode"),  # how Python 3 writes bytes in protocol 2
}


class _ArraysOnly(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which array files never need")
        if name == "_reconstruct":
            return np.empty(0).__reduce__()[0]  # wherever this numpy keeps it
        return super().find_class(module, name)


def _check_places(stored: bytes) -> None:
    """Refuse to remember something at a place far beyond all others: room is made for those before it, too."""
    for operation, argument, _ in pickletools.genops(stored):
        if operation.name.endswith("PUT") and int(argument or 0) > len(stored):
            raise pickle.UnpicklingError(f"it has a place {argument}, but {len(stored)} bytes")


def read_pickled_arrays(path: Path) -> dict[str, Any]:
    """The dictionary in a CIFAR batch file."""
    try:
        # From memory, since what a file is asked for gets its room before it is known how much there is.
        stored = path.read_bytes()
        _check_places(stored)
        # latin1 maps bytes to code points one to one; the files were written by Python 2.
        content = _ArraysOnly(io.BytesIO(stored), encoding="latin1").load()
    except OSError:
        raise
    except Exception as error:  # a damaged pickle raises nearly anything
        raise InputError(f"{path} is not a CIFAR batch file: {error or type(error).__name__}; get it again") from error
    if not isinstance(content, dict):
        raise InputError(f"{path} is not a CIFAR batch file: it holds a {type(content).__name__}; get it again")
    return {key.decode() if isinstance(key, bytes) else str(key): value for key, value in content.items()}
