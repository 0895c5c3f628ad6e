"""Nearsight: see, measure and induce spatial locality in Vision Transformers.

Importing it registers its models with timm, so that `timm.create_model("compact_vit")` works too: at once if timm is
loaded, or else as soon as it is.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from nearsight.lazy import after_import, open_room
from nearsight.version import __version__

if TYPE_CHECKING:
    from nearsight import metrics
    from nearsight.data.cifar100_sample import sample_images
    from nearsight.lens import (
        HeadTable,
        add_locality,
        attention_maps,
        check_vit_adapter,
        intervene,
        measure,
        open_maps,
        remove_locality,
    )
    from nearsight.locat import add_locat
    from nearsight.models import create_model
    from nearsight.probe import ablate, finetune
    from nearsight.report.sharing import HubModel, push_to_hub

__all__ = [
    "HeadTable",
    "HubModel",
    "__version__",
    "ablate",
    "add_locality",
    "add_locat",
    "attention_maps",
    "check_vit_adapter",
    "create_model",
    "finetune",
    "intervene",
    "measure",
    "metrics",
    "open_maps",
    "push_to_hub",
    "remove_locality",
    "sample_images",
]

open_room(__name__)


def _register_models() -> None:
    for module in ("models.backbones", "models.compact", "models.positional", "locat.registered"):
        import_module(f"nearsight.{module}")


after_import("timm", _register_models)
