"""Models that do more than most when they are moved or change their mode are left as they were found, too."""

import warnings
from typing import Any, Self

import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nearsight import check_vit_adapter, measure


def vit() -> nn.Module:
    torch.manual_seed(0)
    return timm.create_model("compact_vit", depth=2, embed_dim=48, num_heads=4)


def images() -> Tensor:
    return torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(1))


class LowRank(nn.Linear):
    """LoRA as loralib has it: for inference, what was learned is added to the frozen weights."""

    def __init__(self, size: int) -> None:
        super().__init__(size, size)
        self.weight.requires_grad = False
        self.down, self.up = nn.Parameter(torch.randn(2, size)), nn.Parameter(torch.randn(size, 2))
        self.is_merged = False

    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        if self.is_merged == mode:
            self.weight.data += (self.up @ self.down) * (-1 if mode else 1)
            self.is_merged = not mode
        return self

    def forward(self, tokens: Tensor) -> Tensor:
        output = super().forward(tokens)
        return output if self.is_merged else output + F.linear(F.linear(tokens, self.down), self.up)


@pytest.mark.parametrize("frozen", [False, True])
def test_weights_that_are_merged_for_inference_are_taken_apart_again(frozen: bool) -> None:
    model = vit()
    learning = model.blocks[0].attn.proj = LowRank(48)
    model.train()
    if frozen:
        model.blocks[1].eval()
    modes = [module.training for module in model.modules()]
    weight = learning.weight.detach().clone()
    measure(model, images())
    assert [module.training for module in model.modules()] == modes
    assert not learning.is_merged
    torch.testing.assert_close(learning.weight, weight)
    model(images()).sum().backward()
    assert learning.up.grad is not None


class Immovable(nn.Module):
    """As quantised models of transformers are, and those whose layers lie on several devices."""

    def __init__(self) -> None:
        super().__init__()
        self.model = vit()

    def to(self, *_: Any, **__: Any) -> Self:
        raise ValueError("`.to` is not supported for 4-bit models")

    def forward(self, batch: Tensor) -> Tensor:
        return self.model(batch)


def test_a_model_is_not_moved_unless_it_is_asked_for() -> None:
    np.testing.assert_array_equal(measure(Immovable(), images()).mad, measure(vit(), images()).mad)


def test_a_first_parameter_of_whole_numbers() -> None:
    class Indexed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.order = nn.Parameter(torch.arange(4), requires_grad=False)
            self.model = vit().double()

        def forward(self, batch: Tensor) -> Tensor:
            return self.model(batch)

    model = Indexed()
    np.testing.assert_array_equal(measure(model, images()).mad, measure(model.model, images()).mad)
    assert check_vit_adapter(model, 32).layers


class Late(nn.Module):
    """Makes a part of itself whenever it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.vit = vit()

    def forward(self, x: Tensor) -> Tensor:
        self.late = nn.Identity()
        made: Tensor = self.late(self.vit(x))
        return made


def test_modules_that_a_forward_makes_are_no_obstacle() -> None:
    model = Late().train()
    measure(model, images())
    assert model.training
    assert model.vit.training


def test_several_devices_are_no_cause_for_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch warns of them, in the middle of a command's output, where its generators are kept without naming them."""
    monkeypatch.setattr(torch.random, "_fork_rng_warned_already", False)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    states = {device: torch.tensor([device], dtype=torch.uint8) for device in range(2)}
    restored: dict[int, Tensor] = {}
    monkeypatch.setattr(torch.cuda, "get_rng_state", states.__getitem__)
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, device: restored.update({device: state}))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        measure(vit(), images())
    assert restored == states
