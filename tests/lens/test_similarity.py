"""The kernel of local versus distant similarity against cosines in float64, interpreted and on a GPU."""

import numpy as np
import pytest
import torch
from test_extras import images, vit

from nearsight.lens import features, measure
from nearsight.lens.similarity import similarity_by_kernel
from nearsight.metrics.features import pair_counts, similarity_by_distance
from nearsight.triton_language import triton

pytestmark = pytest.mark.skipif(triton is None, reason="Triton is not installed")


@pytest.mark.parametrize("grid_size", [(5, 7), (9, 9), (1, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("order", ["rows", "shuffled", "channels first"])
def test_similarity_is_that_of_cosines(
    grid_size: tuple[int, int], dtype: torch.dtype, order: str, device: torch.device
) -> None:
    count = grid_size[0] * grid_size[1]
    tokens = (3 * torch.randn(2, count + 3, 40) + 1).to(device, dtype)
    tokens[0, 2] = 0  # a token without a direction
    patches = torch.randperm(count + 3)[:count] if order == "shuffled" else torch.arange(1, count + 1)
    if order == "channels first":
        tokens = tokens.transpose(1, 2).contiguous().transpose(1, 2)
    patches = patches.to(device)
    near, far = similarity_by_distance(tokens[:, patches].double(), grid_size)
    sums = similarity_by_kernel(tokens, patches, grid_size).sum((1, 2), dtype=torch.float64)
    found = sums / 2 / torch.tensor(pair_counts(*grid_size), device=device)
    torch.testing.assert_close(found, torch.stack([near.mean(), far.mean()]), rtol=1e-5, atol=1e-6, equal_nan=True)


@pytest.mark.interpreted
def test_lds_by_the_kernel_is_that_by_products(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = vit(img_size=(48, 64), reg_tokens=1), images(3, (48, 64))
    expected = measure(model, batch, what=["lds"], batch_size=2)
    monkeypatch.setattr(features, "kernels_take", lambda tensor: True)
    monkeypatch.setattr(features, "similarity_by_distance", None)
    found = measure(model, batch, what=["lds"], batch_size=2)
    for name in features.LocalDistant.columns:
        np.testing.assert_allclose(found.extra[name], expected.extra[name], rtol=1e-5, atol=1e-6)
