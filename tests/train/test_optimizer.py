"""Stacked AdamW, plain and in one pass, against torch's, cell by cell; the learning rate against its closed form and
torch's own schedulers.
"""

import math
from typing import Any

import pytest
import torch
from timm.optim import param_groups_layer_decay
from timm.utils import ModelEmaV3
from torch import Tensor, nn

from nearsight.errors import InputError
from nearsight.models import create_model
from nearsight.train import Protocol
from nearsight.train.optimizer import AdamW, Average, decays, group_scales, groups_of, learning_rates
from nearsight.train.stacked import running_statistics, stack_weights

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


LARGE_SHAPES = {"blocks.0.weight": (50, 41), "blocks.0.bias": (50,), "pos_embed": (1, 3, 41), "cls_token": (1, 1, 41)}
"""2,264 parameters: a block of the kernel and part of a second."""
DECAY_ALL = (False, False, True)
BETAS = (0.9, 0.95)


def draw(device: torch.device) -> list[dict[str, Tensor]]:
    """Numbers for all parameters of three cells."""
    return [{name: torch.randn(shape).to(device) for name, shape in LARGE_SHAPES.items()} for _ in LR]


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
def test_every_cell_equals_torchs_adamw_in_one_pass(
    device: torch.device, memory: Any, clip: tuple[float | None, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(AdamW, "_step_plainly", None)  # that is another test
    cells = draw(device)
    stacked = AdamW.start(
        {name: torch.stack([cell[name] for cell in cells]) for name in LARGE_SHAPES},
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
            for name in LARGE_SHAPES:
                cell[name].grad = gradients[k][name].clone()
            if clip[k] is not None:
                torch.nn.utils.clip_grad_norm_(list(cell.values()), clip[k])
            for group in reference.param_groups:
                group["lr"] = LR[k] * factor
            reference.step()
        flat = torch.stack([torch.cat([cell[name].flatten() for name in LARGE_SHAPES]) for cell in gradients])
        stacked.step(flat, torch.tensor(LR, device=device) * factor)
    for k, (cell, reference) in enumerate(zip(cells, references, strict=True)):
        for name in LARGE_SHAPES:
            state = reference.state[cell[name]]
            for found, expected in (
                (stacked.weights_KP, cell[name].detach()),
                (stacked.first_KP, state["exp_avg"]),
                (stacked.second_KP, state["exp_avg_sq"]),
            ):
                mine = stacked.arrangement.views(found)[name][k]
                torch.testing.assert_close(mine, expected, rtol=1e-5, atol=1e-6, msg=f"{name} of cell {k}")


def all_rates(protocol: Protocol, steps: int) -> list[float]:
    return torch.cat([learning_rates(protocol, epoch, steps) for epoch in range(protocol.max_epochs)]).tolist()


def test_warm_up_is_linear_and_the_cosine_ends_at_zero() -> None:
    protocol = Protocol(lr=0.3, warmup_epochs=2, max_epochs=7)
    rates = all_rates(protocol, 5)
    for step, rate in enumerate(rates):
        done = step + 1
        expected = 0.3 * (done / 10 if done <= 10 else 0.5 * (1 + math.cos(math.pi * (done - 10) / 25)))
        assert rate == pytest.approx(expected, abs=1e-15)
    assert max(rates) == pytest.approx(0.3)
    assert rates[9] == pytest.approx(0.3)
    assert rates[-1] == pytest.approx(0, abs=1e-12)


def test_the_cosine_equals_torchs() -> None:
    protocol = Protocol(lr=0.1, warmup_epochs=0, max_epochs=4)
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=12)
    for rate in all_rates(protocol, 3):
        optimizer.step()
        scheduler.step()
        assert rate == pytest.approx(scheduler.get_last_lr()[0], abs=1e-12)


def test_the_triangle_is_the_papers() -> None:
    """S2: 1e-7 → lr → 1e-7, with the peak at the end of the warm-up."""
    protocol = Protocol(lr=0.3, warmup_epochs=2, max_epochs=7, schedule="triangular")
    steps, warmup, total = 5, 10, 35
    rates = all_rates(protocol, steps)
    assert rates[0] == 1e-7
    assert rates[warmup] == max(rates) == pytest.approx(0.3)
    assert rates[-1] == pytest.approx(1e-7 + (0.3 - 1e-7) / (total - warmup))
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.3)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer,
        max_lr=0.3,
        total_steps=total + 1,
        pct_start=(warmup + 1) / (total + 1),
        anneal_strategy="linear",
        cycle_momentum=False,
        div_factor=0.3 / 1e-7,
        final_div_factor=1.0,
    )
    for rate in rates:
        assert rate == pytest.approx(scheduler.get_last_lr()[0], abs=1e-9)
        optimizer.step()
        scheduler.step()


@pytest.mark.parametrize("warmup_epochs", [0, 4])
def test_a_triangle_with_one_side(warmup_epochs: int) -> None:
    rates = all_rates(Protocol(lr=1.0, warmup_epochs=warmup_epochs, max_epochs=4, schedule="triangular"), 3)
    expected = [step / 12 for step in range(12)]
    assert rates == pytest.approx(expected if warmup_epochs else [1 - height for height in expected], abs=1e-6)


def test_a_warm_up_longer_than_training_never_reaches_the_peak_early() -> None:
    rates = all_rates(Protocol(lr=1.0, warmup_epochs=10, max_epochs=2), 3)
    assert rates == pytest.approx([1 / 6, 2 / 6, 3 / 6, 4 / 6, 5 / 6, 1])


SMALL_VIT = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 3, "num_heads": 2, "num_classes": 5}
BACKBONES = {
    "vit_tiny_patch16_reg4_224": SMALL_VIT,
    "vit_tiny_patch16_rope_mixed_224": SMALL_VIT,
    "locat_swin_tiny_patch4_window7_224": {
        **{"img_size": 32, "patch_size": 2, "window_size": 4, "num_classes": 5},
        **{"embed_dim": 12, "depths": (1, 2), "num_heads": (1, 2)},
    },
    "locat_jumbo_vit_tiny_patch16_224": {**SMALL_VIT, "num_jumbo": 2},
    "compact_vit": {"depth": 2, "embed_dim": 24, "num_heads": 2},
}


@pytest.mark.parametrize(
    ("name", "fused"), [*((name, False) for name in BACKBONES), ("locat_swin_tiny_patch4_window7_224", True)]
)
def test_layers_learn_at_the_rates_of_timm(
    name: str, fused: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's AdamW on timm's groups, its rate scaled as timm's schedulers do, in each cell by another decay; what GAug
    adds is a group of its own."""
    monkeypatch.setattr(AdamW, "_step_plainly" if fused else "_step_fused", None)
    monkeypatch.setattr("nearsight.train.optimizer.runs_on", lambda _: fused)
    layer_decays, locality_lrs, weight_decay = (0.65, 1.0, 0.9), (1.0, 30.0, 100.0), 0.1
    protocols = [
        Protocol(layer_decay=decay, locality_lr=times) for decay, times in zip(layer_decays, locality_lrs, strict=True)
    ]
    cells = [create_model(name, **BACKBONES[name]).to(device) for _ in layer_decays]
    without = tuple(name for name, weight in cells[0].named_parameters() if not decays(name, weight[None]))
    stacked = AdamW.start(
        stack_weights([dict(cell.named_parameters()) for cell in cells], device),
        betas=BETAS,
        weight_decay=[weight_decay] * 3,
        decay_all=[False] * 3,
        clip_norm=[None] * 3,
        groups=(layers := groups_of(cells[0], protocols[0])),
        group_scales=[group_scales(protocol, layers) for protocol in protocols],
    )
    references = []
    for cell, layer_decay, locality_lr in zip(cells, layer_decays, locality_lrs, strict=True):
        groups = []
        for group in param_groups_layer_decay(cell, weight_decay, without, layer_decay=layer_decay):
            for local in (False, True):
                chosen = [weight for name, weight in cell.named_parameters() if ("gaug" in name) == local]
                parts = [weight for weight in group["params"] if any(weight is one for one in chosen)]
                scale = group["lr_scale"] * (locality_lr if local else 1.0)
                groups.append({**group, "params": parts, "lr_scale": scale})
        references.append(torch.optim.AdamW(groups, lr=LR[0], betas=BETAS))
    for step in range(3):
        rate = LR[0] * (1 - step / 6)
        gradients = []
        for cell, reference in zip(cells, references, strict=True):
            for parameter in cell.parameters():
                parameter.grad = torch.randn_like(parameter)
            gradients.append(torch.cat([parameter.grad.flatten() for parameter in cell.parameters()]))  # type: ignore[union-attr]
            for group in reference.param_groups:
                group["lr"] = rate * group["lr_scale"]
            reference.step()
        stacked.step(torch.stack(gradients), torch.full((3,), rate, device=device))
    for k, cell in enumerate(cells):
        for each, weight in cell.named_parameters():
            torch.testing.assert_close(stacked.weights[each][k], weight.detach(), rtol=1e-5, atol=1e-6, msg=each)
    moved = stacked.select(torch.tensor([2, 0], device=device))
    scales = group_scales(protocols[0], layers)
    moved.put(
        0, dict(cells[0].named_parameters()), weight_decay=0, decay_all=False, clip_norm=None, group_scales=scales
    )
    assert moved.scale_KG is not None
    assert torch.equal(moved.scale_KG[0], moved.scale_KG[1])


def test_a_model_without_layers_is_refused() -> None:
    with pytest.raises(InputError, match="layer_decay cannot be used: Linear does not say which its layers are"):
        groups_of(nn.Linear(2, 2), Protocol(layer_decay=0.9))
    assert set(groups_of(nn.Linear(2, 2), Protocol(locality_lr=2.0)).values()) == {0}


def test_averages_are_those_of_timm() -> None:
    """Of weights and of running statistics, in each cell by another decay."""
    ema_decays = (0.9, 0.5)
    cells = [nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)) for _ in ema_decays]
    theirs = [ModelEmaV3(cell, decay=decay) for cell, decay in zip(cells, ema_decays, strict=True)]
    cpu = torch.device("cpu")

    def flat_and_statistics() -> tuple[Tensor, dict[str, Tensor]]:
        weights = [torch.cat([weight.detach().flatten() for weight in cell.parameters()]) for cell in cells]
        return torch.stack(weights), stack_weights([running_statistics(cell) for cell in cells], cpu)

    ours = Average.start(*flat_and_statistics(), ema_decays)
    for _ in range(4):
        for cell, average in zip(cells, theirs, strict=True):
            cell(torch.randn(5, 3, 6, 6))
            with torch.no_grad():
                for weight in cell.parameters():
                    weight += torch.randn_like(weight)
            average.update(cell)
        ours.update(*flat_and_statistics())
    for k, average in enumerate(theirs):
        expected = torch.cat([weight.flatten() for weight in average.module.parameters()])
        torch.testing.assert_close(ours.weights_KP[k], expected)
        for name, statistic in running_statistics(average.module).items():
            torch.testing.assert_close(ours.statistics[name][k], statistic)
