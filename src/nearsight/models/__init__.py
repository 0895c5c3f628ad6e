"""The networks of the papers, registered with timm, and models from elsewhere.

Importing this package makes the names of the former known to timm.
"""

from typing import TYPE_CHECKING

from nearsight.lazy import open_room

if TYPE_CHECKING:
    from nearsight.models.backbones import JumboViT
    from nearsight.models.checkpoints import load_checkpoint
    from nearsight.models.compact import CompactViT
    from nearsight.models.factory import ModelConfig, create_model, load_model, save_model, with_fresh_weights
    from nearsight.models.positional import PositionalViT
    from nearsight.models.sources import SourcedModel, load_source

__all__ = [
    "CompactViT",
    "JumboViT",
    "ModelConfig",
    "PositionalViT",
    "SourcedModel",
    "create_model",
    "load_checkpoint",
    "load_model",
    "load_source",
    "save_model",
    "with_fresh_weights",
]

open_room(__name__)
