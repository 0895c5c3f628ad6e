"""Weights that the authors of S2 published or that their code writes, under the names that they have here.

Their attentions hold `gaug.log_var` and `gaug.log_alpha` as ours do, and all else has timm's names; what differs is
what training scripts wrap around them.
"""

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from nearsight.errors import InputError

# The first that is there is taken: averaged weights before raw ones, and of DINO's two networks the teacher.
_NESTINGS = ("state_dict_ema", "model_ema", "teacher", "state_dict", "model", "student")
_PREFIXES = re.compile(r"^(?:(?:module|_orig_mod|backbone)\.)+")
_HEADS = re.compile(r"\.attn\.gaug\.log_(?:var|alpha)\.(?:weight|bias)$")


def load_official(state_dict: Mapping[str, Any]) -> dict[str, Tensor]:
    """The weights of one of the authors' checkpoints, as `load_state_dict` of a model with LocAt takes them.

    Raises:
        InputError: if there is no Gaussian-augmented attention in it.
    """
    for nesting in _NESTINGS:
        if isinstance(inner := state_dict.get(nesting), Mapping):
            return load_official(inner)
    weights = {_PREFIXES.sub("", name): value for name, value in state_dict.items() if isinstance(value, Tensor)}
    if not any(_HEADS.search(name) for name in weights):
        raise InputError(
            "this checkpoint has no attn.gaug.log_var or attn.gaug.log_alpha: it is not of a model with LocAt"
        )
    return weights
