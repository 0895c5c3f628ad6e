"""A model whose features are probed."""

from dataclasses import dataclass
from functools import cached_property

from torch import nn

from nearsight.probe.identity import model_identity
from nearsight.probe.preparation import Preparation


@dataclass(frozen=True, kw_only=True)
class FrozenModel:
    """A model, and how its images are prepared."""

    label: str
    """Its name for people."""
    model: nn.Module
    preparation: Preparation
    """Of its images: which size it was made for, and how their channels are normalised."""

    @cached_property
    def identity(self) -> str:
        """Its `model_identity` when it was first asked for: all its weights are read for that."""
        return model_identity(self.model)
