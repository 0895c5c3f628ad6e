"""DINO's loss, head, schedules and views against the paper's pseudo-code in float64."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from nearsight.train.dino.config import CropsConfig, DinoProtocol
from nearsight.train.dino.networks import DinoHead
from nearsight.train.dino.training import Schedules, cosine, dino_loss, entropy, next_centre, teacher_distributions


@pytest.mark.parametrize("num_views", [2, 5])
def test_the_loss_is_that_of_the_pseudo_code(num_views: int) -> None:
    torch.manual_seed(0)
    student = torch.randn(num_views, 3, 7, dtype=torch.float64)
    teacher, centre = torch.randn(2, 3, 7, dtype=torch.float64), torch.randn(7, dtype=torch.float64)
    student_temperature, teacher_temperature = 0.1, 0.05
    total, num_pairs = 0.0, 0
    for g in range(2):
        for v in range(num_views):
            if v == g:
                continue
            for b in range(3):
                t = [math.exp(float(teacher[g, b, p] - centre[p]) / teacher_temperature) for p in range(7)]
                s = [math.exp(float(student[v, b, p]) / student_temperature) for p in range(7)]
                total -= sum(t[p] / sum(t) * math.log(s[p] / sum(s)) for p in range(7)) / 3
            num_pairs += 1
    targets = teacher_distributions(teacher.float(), centre.float(), teacher_temperature)
    loss = dino_loss(student.float(), targets, student_temperature)
    assert float(loss) == pytest.approx(total / num_pairs, rel=1e-5)


def test_nothing_flows_back_to_the_teacher_and_equal_views_cost_their_entropy() -> None:
    cosines = torch.randn(2, 4, 6, requires_grad=True)
    targets = teacher_distributions(cosines, torch.zeros(6), 0.1)
    assert not targets.requires_grad
    same = targets[:1].expand(2, -1, -1)
    assert float(dino_loss(0.1 * same.log(), same, 0.1)) == pytest.approx(float(entropy(same).mean()), rel=1e-5)


def test_the_centre_is_a_running_mean() -> None:
    centre, expected = torch.zeros(3), [0.0, 0.0, 0.0]
    for step in range(5):
        batch = torch.arange(3.0) + step
        centre = next_centre(centre, batch, 0.9)
        expected = [0.9 * e + 0.1 * float(b) for e, b in zip(expected, batch, strict=True)]
    torch.testing.assert_close(centre, torch.tensor(expected))


def test_the_head_is_the_originals_with_weight_norm() -> None:
    torch.manual_seed(1)
    head = DinoHead(12, hidden=20, bottleneck=5, num_prototypes=9)
    last = nn.utils.parametrizations.weight_norm(nn.Linear(5, 9, bias=False))
    last.parametrizations.weight.original0.data.fill_(1)
    last.parametrizations.weight.original1.data.copy_(head.prototypes)
    features = torch.randn(6, 12)
    layers = [module for module in head.mlp if isinstance(module, nn.Linear)]
    assert [(layer.in_features, layer.out_features) for layer in layers] == [(12, 20), (20, 20), (20, 5)]
    hidden = F.gelu(layers[1](F.gelu(layers[0](features))))
    expected = last(F.normalize(layers[2](hidden), dim=-1, p=2))
    torch.testing.assert_close(head(features), expected)
    gradient, reference = (
        torch.autograd.grad(output.square().sum(), weight)[0]
        for output, weight in ((head(features), head.prototypes), (expected, last.parametrizations.weight.original1))
    )
    torch.testing.assert_close(gradient, reference)


def test_schedules_are_the_originals() -> None:
    protocol = DinoProtocol(epochs=5, warmup_epochs=2, batch_size=512, temperature_warmup_epochs=3)
    schedules = Schedules.of(protocol, steps_per_epoch=4)
    peak = 5e-4 * 2
    for step in range(20):
        after = (step - 8) / 12
        lr = peak * step / 7 if step < 8 else 1e-6 + 0.5 * (peak - 1e-6) * (1 + math.cos(math.pi * after))
        swing = 0.5 * (1 + math.cos(math.pi * step / 20))
        assert float(schedules.lr[step]) == pytest.approx(lr)
        assert float(schedules.weight_decay[step]) == pytest.approx(0.4 + (0.04 - 0.4) * swing)
        assert float(schedules.momentum[step]) == pytest.approx(1 + (0.996 - 1) * swing)
        assert float(schedules.temperature[step]) == pytest.approx([0.04, 0.055, 0.07, 0.07, 0.07][step // 4])
    assert len(cosine(1.0, 0.0, 3, warmup_steps=3)) == 3


def test_a_short_run_ends_within_the_warm_ups() -> None:
    schedules = Schedules.of(DinoProtocol(epochs=2), steps_per_epoch=3)
    assert all(len(values) == 6 for values in vars(schedules).values())
    assert float(schedules.temperature[-1]) == pytest.approx(0.04 + 0.03 / 29)


def test_the_defaults_are_those_of_the_paper() -> None:
    crops = CropsConfig()
    assert (crops.num_local, crops.local_size, crops.min_global_area, crops.max_local_area) == (8, 96, 0.4, 0.4)
    protocol = DinoProtocol()
    assert (protocol.num_prototypes, protocol.hidden, protocol.bottleneck) == (65536, 2048, 256)
