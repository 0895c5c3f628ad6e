"""Nearsight: see, measure and induce spatial locality in Vision Transformers.

Importing it registers its models with timm, so that `timm.create_model("compact_vit")` works too.
"""

from typing import TYPE_CHECKING, Any

from nearsight import metrics
from nearsight.data.cifar100_sample import sample_images
from nearsight.lens import HeadTable, attention_maps, check_vit_adapter, measure, open_maps
from nearsight.locat import add_locat
from nearsight.models import create_model
from nearsight.version import __version__

if TYPE_CHECKING:
    from nearsight.report.sharing import HubModel, push_to_hub

__all__ = [
    "HeadTable",
    "HubModel",
    "__version__",
    "add_locat",
    "attention_maps",
    "check_vit_adapter",
    "create_model",
    "measure",
    "metrics",
    "open_maps",
    "push_to_hub",
    "sample_images",
]


def __getattr__(name: str) -> Any:
    """What shares models is loaded when it is asked for, since it draws pages."""
    if name in ("HubModel", "push_to_hub"):
        from nearsight.report import sharing

        return getattr(sharing, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
