"""Nearsight: see, measure and induce spatial locality in Vision Transformers.

Importing it registers its models with timm, so that `timm.create_model("compact_vit")` works too.
"""

from nearsight import metrics
from nearsight.data.cifar100_sample import sample_images
from nearsight.lens import HeadTable, attention_maps, check_vit_adapter, measure, open_maps
from nearsight.locat import add_locat
from nearsight.models import create_model
from nearsight.version import __version__

__all__ = [
    "HeadTable",
    "__version__",
    "add_locat",
    "attention_maps",
    "check_vit_adapter",
    "create_model",
    "measure",
    "metrics",
    "open_maps",
    "sample_images",
]
