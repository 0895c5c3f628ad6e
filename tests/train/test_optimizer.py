"""Stacked AdamW against torch's, cell by cell."""

import math

import pytest
import torch

from nearsight.train.optimizer import AdamW, decays

SHAPES = {"blocks.0.weight": (5, 4), "blocks.0.bias": (5,), "pos_embed": (1, 3, 4), "cls_token": (1, 1, 4)}
LR, DECAY, CLIP = (1e-2, 3e-3, 5e-2), (0.0, 0.1, 0.5), (None, 0.7, 2.0)


def cell_weights(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def flat(cells: list[dict[str, torch.Tensor]]) -> torch.Tensor:
    """[K, P], in the order of the parameters."""
    return torch.stack([torch.cat([cell[name].flatten() for name in SHAPES]) for cell in cells])


@pytest.mark.parametrize("decay_all", [True, False])
def test_every_cell_equals_torchs_adamw(decay_all: bool) -> None:
    cells = [cell_weights(seed) for seed in range(3)]
    stacked = AdamW.start(
        {name: torch.stack([cell[name] for cell in cells]) for name in SHAPES},
        betas=(0.9, 0.95),
        weight_decay=DECAY,
        decay_all=[decay_all] * 3,
        clip_norm=CLIP,
    )
    references = []
    for k, cell in enumerate(cells):
        groups = [
            {
                "params": [cell[name].requires_grad_()],
                "weight_decay": DECAY[k] if decay_all or name.endswith(".weight") else 0,
            }
            for name in SHAPES
        ]
        references.append(torch.optim.AdamW(groups, lr=LR[k], betas=(0.9, 0.95)))
    for step in range(20):
        gradients = [cell_weights(100 * k + step) for k in range(3)]
        factor = 1 - step / 40  # a schedule
        for k, (cell, reference) in enumerate(zip(cells, references, strict=True)):
            for name in SHAPES:
                cell[name].grad = gradients[k][name].clone()
            if CLIP[k] is not None:
                torch.nn.utils.clip_grad_norm_(list(cell.values()), CLIP[k])
            for group in reference.param_groups:
                group["lr"] = LR[k] * factor
            reference.step()
        stacked.step(flat(gradients), torch.tensor(LR) * factor)
    for k, cell in enumerate(cells):
        for name in SHAPES:
            torch.testing.assert_close(stacked.weights[name][k], cell[name].detach(), rtol=2e-6, atol=1e-6)


def test_what_decays() -> None:
    weights = {name: torch.zeros(1, *shape) for name, shape in SHAPES.items()}
    assert [name for name, weight in weights.items() if decays(name, weight)] == ["blocks.0.weight"]


def test_selected_cells_go_on_as_before() -> None:
    def start(seeds: list[int]) -> AdamW:
        cells = [cell_weights(seed) for seed in seeds]
        return AdamW.start(
            {name: torch.stack([cell[name] for cell in cells]) for name in SHAPES},
            betas=(0.9, 0.999),
            weight_decay=[DECAY[seed] for seed in seeds],
            decay_all=[False] * len(seeds),
            clip_norm=[CLIP[seed] for seed in seeds],
        )

    def gradients(seeds: list[int], step: int) -> torch.Tensor:
        return flat([cell_weights(100 * seed + step) for seed in seeds])

    together, alone = start([0, 1, 2]), start([2])
    for step in range(3):
        together.step(gradients([0, 1, 2], step), torch.tensor(LR))
        alone.step(gradients([2], step), torch.tensor(LR[2:]))
    left = together.select(torch.tensor([2]))
    for step in range(3, 6):
        left.step(gradients([2], step), torch.tensor(LR[2:]))
        alone.step(gradients([2], step), torch.tensor(LR[2:]))
    assert int(left.steps_done_K) == 6
    for name in SHAPES:
        torch.testing.assert_close(left.weights[name], alone.weights[name], rtol=1e-6, atol=1e-7)


def test_no_clipping_means_no_limit() -> None:
    optimizer = AdamW.start(
        {"w": torch.zeros(1, 2, 2)}, betas=(0.0, 0.0), weight_decay=[0], decay_all=[False], clip_norm=[None]
    )
    optimizer.step(torch.full((1, 4), 1e20), torch.tensor([1.0]))
    assert math.isfinite(float(optimizer.weights["w"].sum()))
    assert not optimizer.clips


def test_parameters_by_name_are_the_tensor_itself() -> None:
    cells = [cell_weights(seed) for seed in range(2)]
    optimizer = AdamW.start(
        {name: torch.stack([cell[name] for cell in cells]) for name in SHAPES},
        betas=(0.9, 0.999),
        weight_decay=[0, 0],
        decay_all=[False] * 2,
        clip_norm=[None] * 2,
    )
    torch.testing.assert_close(optimizer.weights_KP, flat(cells))
    for name, weight in optimizer.weights.items():
        torch.testing.assert_close(weight[1], cells[1][name])
        weight[0] = 7.0  # as resuming a cell does
    assert (optimizer.weights_KP[0] == 7).all()
