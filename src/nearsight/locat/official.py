"""Weights that the authors of S2 published or that their code writes, under the names that they have here.

Their attentions hold `gaug.log_var` and `gaug.log_alpha` as ours do, and almost all else has timm's names. What differs
is what training scripts wrap around them, and Jumbo: its MLP, which all blocks share, is listed once more for each of
them, and its two final norms lie side by side, where here they are one module.
"""

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from nearsight.errors import InputError

# The first that is there is taken: averaged weights before raw ones, and of DINO's two networks the teacher.
_NESTINGS = ("state_dict_ema", "model_ema", "teacher", "state_dict", "model", "student")
_WRAPPERS = re.compile(r"^(?:(?:module|_orig_mod)\.)+")
_BACKBONE = "backbone."  # beside the head that DINO trains it with
_ATTENTION = re.compile(r"\.attn\..+\.weight$")
_JUMBO_MLP = re.compile(r"^(?:blocks\.\d+\.)?(jumbo_mlp\..+)$")
_JUMBO_NORM = re.compile(r"^norm(?:_(patches))?\.(weight|bias)$")


def load_official(state_dict: Mapping[str, Any]) -> dict[str, Tensor]:
    """The weights of one of the authors' checkpoints, as `load_state_dict` of the same model takes them here.

    With or without LocAt, of any backbone of S2, and with what timm's, DeiT's or DINO's training wraps around them.

    Raises:
        InputError: if there are no attentions in it, or a Jumbo's blocks do not share their MLP.
    """
    for nesting in _NESTINGS:
        if isinstance(inner := state_dict.get(nesting), Mapping):
            return load_official(inner)
    weights = {_WRAPPERS.sub("", name): value for name, value in state_dict.items() if isinstance(value, Tensor)}
    if any(name.startswith(_BACKBONE) for name in weights):
        weights = {name.removeprefix(_BACKBONE): w for name, w in weights.items() if name.startswith(_BACKBONE)}
    if not any(_ATTENTION.search(name) for name in weights):
        raise InputError("this checkpoint has no weights of attentions (….attn.….weight): it is of none of S2's models")
    return _renamed_jumbo(weights) if any(map(_JUMBO_MLP.match, weights)) else weights


def _renamed_jumbo(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """With the shared MLP once, and the norms where `JumboNorm` has them. Our own names stay."""
    renamed: dict[str, Tensor] = {}
    for name, weight in weights.items():
        if shared := _JUMBO_MLP.match(name):
            if not torch.equal(renamed.setdefault(shared[1], weight), weight):
                raise InputError(
                    f"{name} is not the {shared[1]} of the other blocks, but those of a Jumbo share one MLP: this "
                    "checkpoint is of another model"
                )
        elif norm := _JUMBO_NORM.match(name):
            renamed[f"norm.{norm[1] or 'jumbo'}.{norm[2]}"] = weight
        else:
            renamed[name] = weight
    return renamed
