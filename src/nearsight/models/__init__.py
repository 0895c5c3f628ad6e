"""The networks of the papers, registered with timm: importing this package makes their names known to it."""

from nearsight.models.compact import CompactViT
from nearsight.models.factory import ModelConfig, create_model, load_model, save_model

__all__ = ["CompactViT", "ModelConfig", "create_model", "load_model", "save_model"]
