"""Modules of timm that have no softmax attention in any of their models, each with one that is quick to look at."""

from contextlib import ExitStack
from typing import Any
from unittest import mock

import timm
import torch
import torch.nn.functional as F
from torch import Tensor

MODULES = {
    "convmixer": "convmixer_768_32",
    "convnext": "convnext_atto",
    "cspnet": "cs3darknet_focus_s",
    "densenet": "densenet121",
    "dla": "dla34",
    "dpn": "dpn48b",
    "efficientvit_mit": "efficientvit_b0",
    "fasternet": "fasternet_t0",
    "focalnet": "focalnet_tiny_srf",
    "ghostnet": "ghostnet_050",
    "hardcorenas": "hardcorenas_a",
    "hgnet": "hgnetv2_b0",
    "hrnet": "hrnet_w18_small",
    "inception_next": "inception_next_atto",
    "inception_resnet_v2": "inception_resnet_v2",
    "inception_v3": "inception_v3",
    "inception_v4": "inception_v4",
    "lcnetv2": "lcnetv2_small",
    "mambaout": "test_mambaout",
    "mlp_mixer": "gmlp_ti16_224",
    "nasnet": "nasnetalarge",
    "nfnet": "test_nfnet",
    "pnasnet": "pnasnet5large",
    "rdnet": "rdnet_tiny",
    "regnet": "regnetx_002",
    "repghost": "repghostnet_050",
    "repvit": "repvit_m0_9",
    "res2net": "res2next50",
    "resnet": "resnet10t",
    "resnetv2": "resnetv2_18",
    "rexnet": "rexnet_100",
    "selecsls": "selecsls42",
    "senet": "legacy_seresnet18",
    "sequencer": "sequencer2d_s",
    "starnet": "starnet_s1",
    "swiftformer": "swiftformer_xs",
    "tresnet": "tresnet_m",
    "vgg": "vgg11",
    "vovnet": "eca_vovnet39b",
    "xception": "legacy_xception",
    "xception_aligned": "xception41",
}


def attends(variant: str) -> bool:
    """Whether a forward computes any softmax or fused attention; without computing anything where the model allows."""
    try:
        return _attends_on("meta", variant)
    except (NotImplementedError, RuntimeError):
        return _attends_on("cpu", variant)


def _attends_on(device: str, variant: str) -> bool:
    called = []

    def telling(function: Any) -> Any:
        def tell(*args: Any, **kwargs: Any) -> Tensor:
            called.append(function)
            return function(*args, **kwargs)

        return tell

    with torch.device(device), torch.no_grad(), ExitStack() as patches:
        model = timm.create_model(variant).eval()
        size = (model.pretrained_cfg or {}).get("input_size", (3, 224, 224))
        for owner, name in ((torch.Tensor, "softmax"), (torch, "softmax"), (F, "scaled_dot_product_attention")):
            patches.enter_context(mock.patch.object(owner, name, telling(getattr(owner, name))))
        model(torch.empty(1, *size))
    return bool(called)
