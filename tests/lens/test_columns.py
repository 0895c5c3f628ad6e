"""The kernel of received attention against a dense float64 computation, without a GPU: on cases of the other one."""

import math

import numpy as np
import pytest
import torch
from test_extras import images, vit
from test_kernels import CASES, Size
from test_token_measures import SINKS, with_sinks

from nearsight.lens import measure, sinks, stream
from nearsight.lens.attention import FusedAttention
from nearsight.lens.columns import fused_attention_columns
from nearsight.triton_language import triton

_OTHER = {"grouped_heads"}
"""Cases that do not come here: `arrange` gives as many heads of keys as of queries."""


pytestmark = pytest.mark.skipif(triton is None, reason="Triton is not installed")


@pytest.mark.interpreted
@pytest.mark.parametrize("name", sorted(CASES.keys() - _OTHER))
def test_columns_are_those_of_the_maps(name: str) -> None:
    inputs = CASES[name](Size())
    query, key, bias = (inputs[part] for part in ("query_BWHNd", "key_BWHMd", "bias"))
    windows, tokens = query.shape[1], query.shape[3]
    sets = torch.zeros(2, windows, tokens)
    sets[0] = inputs["query_places_WN2"][..., 0].isfinite()
    sets[1, :, 0] = 1
    logits = query.double() @ key.double().mT * inputs["scale"]
    if bias is not None:
        logits = logits.masked_fill(~bias, -math.inf) if bias.dtype == torch.bool else logits + bias.double()
    share = torch.where((logits == -math.inf).all(-1, keepdim=True), 0.0, logits.softmax(-1))
    expected = torch.einsum("bwhnm,xwn->xbwhm", share, sets.double())
    for chosen in (sets, sets[:1]):
        found = fused_attention_columns(query, key, scale=inputs["scale"], sets_XWN=chosen, bias=bias)
        torch.testing.assert_close(
            found.double(),
            expected[: len(chosen)],
            rtol=2e-5,
            atol=2e-6,
            equal_nan=True,
            msg=lambda said: f"{name}: {said}",
        )


@pytest.mark.interpreted
def test_sinks_by_kernels_are_those_by_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = with_sinks(vit(img_size=(48, 64)), 3.0), images(2, (48, 64))
    by_tiles = measure(model, batch, what=["sinks"])
    for module in (stream, sinks):
        monkeypatch.setattr(module, "has_kernel", lambda attention, _: isinstance(attention, FusedAttention))
    by_kernels = measure(model, batch, what=["sinks"])
    assert (by_tiles.extra["share_sinks"] > 0).any()
    for name in SINKS:
        np.testing.assert_allclose(by_kernels.extra[name], by_tiles.extra[name], rtol=1e-4, atol=1e-6, err_msg=name)
