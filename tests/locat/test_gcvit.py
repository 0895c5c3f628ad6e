"""LocAt on GCViT (S2 App. H): which attentions become local, float64 equality to maps written out, and the original."""

import copy
import math
from typing import Any

import pytest
import torch
from locat_models import excite
from locat_paper import Paper, PaperAttention, refined
from timm.models.gcvit import GlobalContextVit
from torch import Tensor, nn

from nearsight import add_locat, measure
from nearsight.errors import InputError
from nearsight.locat import refined_map
from nearsight.probe import FeatureSpec, read_features

SETTINGS = {"img_size": 64, "window_size": (4, 4, 4, 2), "embed_dim": 12, "num_classes": 7, "mlp_ratio": 2.0}
"""Maps of 16, 8, 4 and 2: sixteen windows, four, and one in the last two stages."""
WITH_PLACES = [
    f"stages.{stage}.blocks.{block}.attn" for stage, block in ((0, 0), (1, 0), (2, 0), (2, 1), (3, 0), (3, 1))
]


def plain_model() -> Any:
    torch.manual_seed(0)
    return GlobalContextVit(**SETTINGS, depths=(2, 2, 2, 2), num_heads=(1, 2, 3, 6)).eval()


def local_model(**options: Any) -> Any:
    model = add_locat(plain_model(), **options).double()
    excite(model)
    return model


class Written(PaperAttention):
    """Of windows, or of global queries in the only window there is."""

    def forward(self, x: Tensor, q_global: Tensor | None = None) -> Tensor:  # type: ignore[override]
        attention = self.attention
        heads, parts = attention.num_heads, attention.qkv(x).chunk(2 if attention.use_global else 3, dim=-1)
        if attention.use_global:
            assert q_global is not None
            parts = (q_global.flatten(1, 2), *parts)
        query, key, value = (part.view(*part.shape[:2], heads, -1).transpose(1, 2) for part in parts)
        logits = query @ key.transpose(-2, -1) / math.sqrt(query.shape[-1]) + self._table()
        weights = torch.softmax(logits + self.supplement(query, key, x), dim=-1)
        return attention.proj((weights @ value).transpose(1, 2).flatten(2))

    def _table(self) -> Tensor:
        """An entry for each difference of places."""
        rows, cols = self.attention.window_size
        places = [(row, col) for row in range(rows) for col in range(cols)]
        table = self.attention.rel_pos.relative_position_bias_table
        entries = [
            table[(one[0] - other[0] + rows - 1) * (2 * cols - 1) + one[1] - other[1] + cols - 1]
            for one in places
            for other in places
        ]
        return torch.stack(entries).view(rows * cols, rows * cols, -1).permute(2, 0, 1)


def written_down(local: Any, **variant: Any) -> Any:
    """timm's model with the weights of `local`, and maps in memory."""
    model = copy.deepcopy(plain_model()).double()
    model.load_state_dict({name: weight for name, weight in local.state_dict().items() if ".gaug." not in name})
    for name in WITH_PLACES:
        start = f"{name}.gaug."
        heads = {
            full.removeprefix(start): weight for full, weight in local.state_dict().items() if full.startswith(start)
        }
        block = model.get_submodule(name.removesuffix(".attn"))
        window = tuple(block.attn.window_size)
        block.attn = Written(block.attn, heads, Paper(window, window, 0, **variant))
    return model


@pytest.mark.parametrize("variant", [{}, {"kernel": "laplace", "scale": "auto"}, {"width": "input", "isotropic": True}])
def test_maps_written_out_give_the_same(variant: dict[str, Any]) -> None:
    local, images = local_model(**variant), torch.randn(3, 3, 64, 64, dtype=torch.float64)
    paper = written_down(local, **variant)
    features = paper.forward_features(images)
    torch.testing.assert_close(local.forward_features(images), features, rtol=1e-10, atol=1e-11)
    tokens = features.flatten(2).transpose(1, 2)
    expected = paper.head.fc(refined(tokens, 6).mean(1))
    torch.testing.assert_close(local(images), expected, rtol=1e-10, atol=1e-11)
    torch.testing.assert_close(refined_map(local, images).flatten(2).transpose(1, 2), refined(tokens, 6))
    if "kernel" in variant:  # the root of the reference has no derivative where a patch looks at itself
        return
    local(images).square().sum().backward()
    expected.square().sum().backward()
    gradients = dict(paper.named_parameters())
    for name, parameter in local.named_parameters():
        if ".gaug." not in name:
            there = gradients[name.replace(".attn.", ".attn.attention.") if name not in gradients else name]
            torch.testing.assert_close(parameter.grad, there.grad, rtol=1e-8, atol=1e-10)


def test_without_strength_and_refinement_it_is_the_original() -> None:
    plain, images = plain_model().double(), torch.randn(2, 3, 64, 64, dtype=torch.float64)
    before = plain.state_dict()
    local = add_locat(copy.deepcopy(plain), prr=False)
    assert {name: weight for name, weight in local.state_dict().items() if ".gaug." not in name}.keys() == before.keys()
    assert all(torch.equal(local.state_dict()[name], weight) for name, weight in before.items())
    assert not torch.allclose(local(images), plain(images))
    for name in WITH_PLACES:
        heads = local.get_submodule(f"{name}.gaug")
        nn.init.zeros_(heads.log_alpha.weight)
        nn.init.constant_(heads.log_alpha.bias, -1e4)
    torch.testing.assert_close(local(images), plain(images), rtol=1e-10, atol=1e-12)


def test_queries_of_the_whole_image_stay_as_they_are_where_there_are_several_windows() -> None:
    local = local_model()
    found = [name.removesuffix(".gaug") for name, _ in local.named_modules() if name.endswith(".gaug")]
    assert found == WITH_PLACES
    some = add_locat(plain_model(), blocks=[0, 5], prr=False)
    found = [name for name, _ in some.named_modules() if name.endswith(".gaug")]
    assert found == ["stages.0.blocks.0.attn.gaug", "stages.2.blocks.1.attn.gaug"]
    with pytest.raises(InputError, match="block 1 of GlobalContextVit has queries of the whole image"):
        add_locat(plain_model(), blocks=[0, 1])
    attention = local.stages[2].blocks[1].attn
    with pytest.raises(InputError, match="8 windows of 2 images came to an attention whose queries are of the whole"):
        attention(torch.zeros(8, 16, 48, dtype=torch.float64), torch.zeros(2, 4, 4, 48, dtype=torch.float64))
    with pytest.raises(InputError, match="local attention already"):
        add_locat(local)


def test_new_classes_keep_refinement_and_another_pooling_takes_it_off() -> None:
    local, images = add_locat(plain_model()), torch.randn(2, 3, 64, 64)
    pool = type(local.head.global_pool).__name__
    local.reset_classifier(3)
    assert (local(images).shape, type(local.head.global_pool).__name__) == ((2, 3), pool)
    local.reset_classifier(4, "max")
    assert (local(images).shape, type(local.head.global_pool).__name__) == ((2, 4), "SelectAdaptivePool2d")


def test_it_is_measured_and_read() -> None:
    local, images = local_model().float(), torch.randn(2, 3, 64, 64)
    table = measure(local, images)
    assert list(table.layer_names) == WITH_PLACES
    assert any("blocks.1" in name for name in table.skipped)
    maps = read_features(local, images, FeatureSpec(place="prr"))
    torch.testing.assert_close(maps, refined_map(local, images).detach(), rtol=1e-4, atol=1e-5)
