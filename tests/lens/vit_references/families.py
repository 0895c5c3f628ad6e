"""Every architecture of timm that has softmax attention: a small variant of it, and its reference.

Smallest sensible variants with fewer blocks and smaller images; where the family allows it images are not square, so
that rows and columns cannot be mistaken for each other.
"""

import timm

from vit_references import not_spatial, pooled, whole_image, windowed
from vit_references.checking import Family

FAMILIES: list[Family] = [
    *whole_image.FAMILIES,
    *windowed.FAMILIES,
    *pooled.FAMILIES,
    *not_spatial.FAMILIES,
]


def module_of(variant: str) -> str | None:
    """The module of timm that has this model; None if the installed timm does not know it."""
    return next((module for module in timm.list_modules() if variant in timm.list_models(module=module)), None)
