"""The one-pass update against torch's AdamW, cell by cell."""

from typing import Any

import pytest
import torch
from torch import Tensor

from nearsight.train.optimizer import AdamW

SHAPES = {"blocks.0.weight": (50, 41), "blocks.0.bias": (50,), "pos_embed": (1, 3, 41), "cls_token": (1, 1, 41)}
"""2,264 parameters: a block of the kernel and part of a second."""
LR, DECAY, DECAY_ALL = (1e-2, 3e-3, 5e-2), (0.0, 0.1, 0.5), (False, False, True)
BETAS = (0.9, 0.95)


def draw(device: torch.device) -> list[dict[str, Tensor]]:
    """Numbers for all parameters of three cells."""
    return [{name: torch.randn(shape).to(device) for name, shape in SHAPES.items()} for _ in LR]


def torchs(cell: dict[str, Tensor], k: int) -> torch.optim.AdamW:
    groups = [
        {
            "params": [parameter.requires_grad_()],
            "weight_decay": DECAY[k] if DECAY_ALL[k] or name.endswith(".weight") else 0,
        }
        for name, parameter in cell.items()
    ]
    return torch.optim.AdamW(groups, lr=LR[k], betas=BETAS)


@pytest.mark.parametrize("clip", [(None, None, None), (None, 0.7, 20.0)], ids=["unclipped", "clipped"])
def test_every_cell_equals_torchs_adamw(
    device: torch.device, memory: Any, clip: tuple[float | None, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(AdamW, "_step_plainly", None)  # that is another test
    cells = draw(device)
    stacked = AdamW.start(
        {name: torch.stack([cell[name] for cell in cells]) for name in SHAPES},
        betas=BETAS,
        weight_decay=DECAY,
        decay_all=DECAY_ALL,
        clip_norm=clip,
    )
    for tensor in ("weights_KP", "first_KP", "second_KP"):  # in guarded memory
        numbers = getattr(stacked, tensor)
        setattr(stacked, tensor, memory.normal(*numbers.shape).copy_(numbers))
    references = [torchs(cell, k) for k, cell in enumerate(cells)]
    for step in range(5):
        factor = 1 - step / 10  # a schedule
        gradients = draw(device)
        for k, (cell, reference) in enumerate(zip(cells, references, strict=True)):
            for name in SHAPES:
                cell[name].grad = gradients[k][name].clone()
            if clip[k] is not None:
                torch.nn.utils.clip_grad_norm_(list(cell.values()), clip[k])
            for group in reference.param_groups:
                group["lr"] = LR[k] * factor
            reference.step()
        flat = torch.stack([torch.cat([cell[name].flatten() for name in SHAPES]) for cell in gradients])
        stacked.step(flat, torch.tensor(LR, device=device) * factor)
    for k, (cell, reference) in enumerate(zip(cells, references, strict=True)):
        for name in SHAPES:
            state = reference.state[cell[name]]
            for found, expected in (
                (stacked.weights_KP, cell[name].detach()),
                (stacked.first_KP, state["exp_avg"]),
                (stacked.second_KP, state["exp_avg_sq"]),
            ):
                mine = stacked.arrangement.views(found)[name][k]
                torch.testing.assert_close(mine, expected, rtol=1e-5, atol=1e-6, msg=f"{name} of cell {k}")
