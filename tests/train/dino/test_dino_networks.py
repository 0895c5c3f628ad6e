"""The network's code for two sizes of views, against modules that timm resizes."""

import copy
import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from timm.layers import Format
from torch import Tensor, nn

from nearsight.models import ModelConfig
from nearsight.randomness import Draws
from nearsight.train.dino import CropsConfig, DinoConfig, DinoProtocol
from nearsight.train.dino.networks import NetworkCode, build_network

CPU = torch.device("cpu")
MODEL = ModelConfig(patch_size=4, depth=3, width=16, num_heads=2, mlp_width=16)
MODELS = {
    "plain": MODEL,
    "locat": dataclasses.replace(MODEL, gaug=True, prr=True),
    "without positions": dataclasses.replace(MODEL, positions=False),
    "positional": dataclasses.replace(MODEL, name="compact_vit_positional"),
    "jumbo": dataclasses.replace(MODEL, name="compact_jumbo_vit"),
}


def config_of(model: ModelConfig, drop_path: float = 0.0) -> DinoConfig:
    protocol = DinoProtocol(drop_path=drop_path, num_prototypes=7, hidden=12, bottleneck=5)
    return DinoConfig(model=model, crops=CropsConfig(num_local=3, local_size=12), protocol=protocol)


def of_another_size(backbone: Any, side: int) -> nn.Module:
    """timm's own way: while it runs where it can, else once and for all."""
    backbone = copy.deepcopy(backbone)
    if hasattr(backbone.blocks[0].attn, "belong_to"):
        backbone.set_input_size(img_size=(side, side))
        return backbone
    backbone.dynamic_img_size = True
    embedding = backbone.patch_embed
    embedding.strict_img_size, embedding.flatten, embedding.output_fmt = False, False, Format.NHWC
    return backbone


@pytest.mark.parametrize("name", MODELS)
def test_views_of_two_sizes_are_what_the_modules_say(name: str) -> None:
    config = config_of(MODELS[name])
    network = build_network(config, (24, 24))
    with torch.no_grad():
        for weight in network.parameters():
            weight.add_(0.1 * torch.randn_like(weight))
    weights = {name: weight.detach().unsqueeze(0).requires_grad_() for name, weight in network.named_parameters()}
    views = torch.randn(2, 4, 3, 24, 24), torch.randn(3, 4, 3, 12, 12)
    cosines = NetworkCode(network, config, (24, 24), CPU)(weights, views)
    small = of_another_size(network.backbone, 12)
    expected = torch.stack([network(view) for view in views[0]] + [network.head(small(view)) for view in views[1]])
    torch.testing.assert_close(cosines, expected, rtol=1e-4, atol=1e-5)
    if name == "positional":  # its positions were resampled without a way back for gradients
        return
    wanted = torch.randn_like(expected)
    (expected * wanted).sum().backward()
    (cosines * wanted).sum().backward()
    of_small = dict(small.named_parameters())
    for name, weight in network.named_parameters():
        elsewhere = of_small.get(name.removeprefix("backbone.")) if name.startswith("backbone.") else None
        gradients = [w.grad for w in (weight, elsewhere) if w is not None and w.grad is not None]
        ours = weights[name].grad
        if not gradients:
            assert ours is None or not ours.any(), name
            continue
        assert ours is not None, name
        torch.testing.assert_close(ours[0], sum(gradients), rtol=1e-3, atol=1e-4, msg=name)


def test_branches_are_dropped_by_the_samples_own_coins() -> None:
    config = config_of(MODEL, drop_path=0.5)
    network = build_network(config, (24, 24))
    code = NetworkCode(network, config, (24, 24), CPU)
    weights = {name: weight.detach().unsqueeze(0) for name, weight in network.named_parameters()}
    views = torch.randn(2, 6, 3, 24, 24), torch.randn(3, 6, 3, 12, 12)
    index = torch.arange(30).view(5, 6)
    draws = [
        Draws(torch.zeros(len(part)).long(), torch.tensor(1), torch.tensor(0), part) for part in index.split([2, 3])
    ]
    dropped, whole = code(weights, views, draws), code(weights, views)
    small = of_another_size(network.backbone, 12)
    coins = [drawn.per_sample("drop_path", 6) for drawn in draws]
    for view, sample in ((0, 0), (1, 4), (2, 1), (4, 5)):
        backbone: Any = network.backbone if view < 2 else small
        image = views[0][view, sample] if view < 2 else views[1][view - 2, sample]
        coin = coins[0][view, sample] if view < 2 else coins[1][view - 2, sample]
        rows = backbone._pos_embed(backbone.patch_embed(image[None]))
        for number, block in enumerate(backbone.blocks):
            keep = 1 - 0.5 * number / 2
            rows = rows + float(coin[2 * number] < keep) / keep * block.attn(block.norm1(rows))
            rows = rows + float(coin[2 * number + 1] < keep) / keep * block.mlp(block.norm2(rows))
        said = network.head(F.layer_norm(rows, (16,), backbone.norm.weight, backbone.norm.bias, 1e-6)[:, 0])[0]
        torch.testing.assert_close(dropped[view, sample], said, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(dropped, whole, atol=1e-3)


def test_blocks_run_by_the_fused_kernels(device: torch.device) -> None:
    """In bfloat16 all blocks are one operation, for views of each size."""
    config = dataclasses.replace(config_of(MODEL), precision="bf16")
    network = build_network(config, (24, 24))
    weights = {name: weight.detach().unsqueeze(0).to(device) for name, weight in network.named_parameters()}
    views = torch.randn(2, 2, 3, 24, 24, device=device), torch.randn(3, 2, 3, 12, 12, device=device)
    learning = {name: weight.clone().requires_grad_() for name, weight in weights.items()}
    cosines = NetworkCode(network, config, (24, 24), device)(learning, views)
    assert sum(name == "_ChainBackward" for name in operations_behind(cosines)) == len(views)
    exact = NetworkCode(network, config_of(MODEL), (24, 24), device)(weights, views)
    assert (cosines - exact).abs().max() < 0.03


def operations_behind(result: Tensor) -> list[str]:
    """The names of all operations that gradients of this go through."""
    found: dict[int, Any] = {}
    ahead: list[Any] = [result.grad_fn]
    while ahead:
        node = ahead.pop()
        if node is not None and id(node) not in found:
            found[id(node)] = node
            ahead += [before for before, _ in node.next_functions]
    return [node.name() for node in found.values()]
