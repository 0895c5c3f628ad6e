"""Loading things when they are used: help and mistakes are answered at once, and who asks for one thing waits for one.

`open_room(__name__)`               in the `__init__` of a room: what it imports under `if TYPE_CHECKING` can be had
                                    from it by everybody, and is loaded when somebody asks for it.
`from nearsight.lazy import torch`  in modules that are read before anything is computed, such as those with configs:
                                    they get the library at its first use.
`after_import`                      does something as soon as a library is there.
`marked`                            finds what files register without loading them.
"""

import ast
import functools
import importlib.util
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd
    import timm
    import torch
    import torch.nn.functional as F

__all__ = ["F", "after_import", "marked", "np", "open_room", "pd", "timm", "torch"]

_LIBRARIES = {"F": "torch.nn.functional", "np": "numpy", "pd": "pandas", "timm": "timm", "torch": "torch"}
"""What `from nearsight.lazy import …` offers → the library."""


class _Later(ModuleType):
    """Stands for a library. At its first use the library is loaded and takes this place wherever it was imported, so
    that from then on nothing is different: neither in speed, nor for `torch.compile`."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._importers: list[dict[str, Any]] = []

    def __getattr__(self, name: str) -> Any:
        library = import_module(self.__name__)
        for names in self._importers:
            names.update({alias: library for alias, value in names.items() if value is self})
        return getattr(library, name)


_later = {library: _Later(library) for library in _LIBRARIES.values()}


def __getattr__(name: str) -> Any:
    if name not in _LIBRARIES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    library = _LIBRARIES[name]
    if library in sys.modules:
        return sys.modules[library]
    _later[library]._importers.append(sys._getframe(1).f_globals)  # of the module that imports it
    return _later[library]


class _Room(ModuleType):
    """A package whose names are loaded when they are asked for."""

    def __getattr__(self, name: str) -> Any:
        if home := _offered(self.__name__).get(name):
            module, original = home
            is_module = module == self.__name__
            value = import_module(f"{module}.{original}") if is_module else getattr(import_module(module), original)
        elif not name.startswith("_") and importlib.util.find_spec(f"{self.__name__}.{name}"):
            value = import_module(f"{self.__name__}.{name}")
        else:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        setattr(self, name, value)
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        # A module of a room may have the name of what it offers (`survey`). Python binds the module when it is loaded.
        if isinstance(value, ModuleType) and _offered(self.__name__).get(name) == (value.__name__, name):
            value = getattr(value, name)
        super().__setattr__(name, value)

    def __dir__(self) -> Iterable[str]:
        return sorted({*super().__dir__(), *_offered(self.__name__)})


def open_room(package: str) -> None:
    """Load the names that the `__init__` of a package imports under `if TYPE_CHECKING` when they are asked for."""
    sys.modules[package].__class__ = _Room


@functools.cache
def _offered(package: str) -> dict[str, tuple[str, str]]:
    """Name → its module and its name there, as the `__init__` of the package says."""
    spec = sys.modules[package].__spec__
    source = spec.loader.get_source(package) if spec and spec.loader else ""  # type: ignore[attr-defined]
    return {
        alias.asname or alias.name: (statement.module or "", alias.name)
        for block in ast.parse(source).body
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
        for statement in block.body
        if isinstance(statement, ast.ImportFrom)
        for alias in statement.names
    }


def marked(folder: Path, *decorators: str) -> Iterator[tuple[str, str, ast.FunctionDef | ast.ClassDef]]:
    """What stands under `@decorator("name")` in the files of a package: (name, its module there, the definition).

    From their text alone: nothing is loaded.
    """
    for path in sorted(folder.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if not any(f"\n@{decorator}(" in text for decorator in decorators):  # parsing takes far longer
            continue
        module = ".".join(path.relative_to(folder).with_suffix("").parts)
        for definition in ast.parse(text).body:
            for mark in getattr(definition, "decorator_list", ()):
                match definition, mark:
                    case (
                        ast.FunctionDef() | ast.ClassDef(),
                        ast.Call(func=ast.Name(id=decorator), args=[ast.Constant(value=str(name))]),
                    ) if decorator in decorators:
                        yield name, module, definition


def after_import(library: str, act: Callable[[], None]) -> None:
    """Do something once, as soon as a library is loaded; at once, if it is."""
    if library in sys.modules:
        act()
    else:
        sys.meta_path.insert(0, _Watch(library, act))


class _Watch:
    """Sees a library being imported. While a module of ours is being loaded, and imports it for itself, what is to be
    done waits for the end of that: it may need that module whole."""

    def __init__(self, library: str, act: Callable[[], None]) -> None:
        self._library, self._act = library, act
        self._ours = f"{__package__}."
        self._depth = threading.local()

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != self._library and not name.startswith(self._ours):
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        spec = next(filter(None, (finder.find_spec(name, path, target) for finder in others)), None)
        if spec is not None and spec.loader is not None:
            # The loader stays what it is, since others look at it; only this one, of one module, does more.
            spec.loader.exec_module = functools.partial(self._load, spec.loader.exec_module)  # type: ignore[method-assign]
        return spec

    def _load(self, execute: Callable[[ModuleType], None], module: ModuleType) -> None:
        depth = getattr(self._depth, "now", 0)
        self._depth.now = depth + 1
        try:
            execute(module)
        finally:
            self._depth.now = depth
        if depth == 0 and self in sys.meta_path and self._library in sys.modules:
            sys.meta_path.remove(self)
            self._act()
