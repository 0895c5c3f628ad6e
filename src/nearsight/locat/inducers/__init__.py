"""Ways to make attention local, by name: each is one file here, or anywhere else, under `@register_locality`."""

import importlib
import pkgutil

from nearsight.locat.inducers.base import (
    LOCALITIES,
    Asked,
    Frame,
    Gated,
    Inducer,
    Radial,
    described,
    inducer,
    inducer_of,
    register_locality,
)

for _module in sorted(pkgutil.iter_modules(__path__), key=lambda module: module.name):
    importlib.import_module(f"nearsight.locat.inducers.{_module.name}")  # which registers what it defines

__all__ = [
    "LOCALITIES",
    "Asked",
    "Frame",
    "Gated",
    "Inducer",
    "Radial",
    "described",
    "inducer",
    "inducer_of",
    "register_locality",
]
