"""The learning rate against its closed form and torch's own schedulers."""

import math

import pytest
import torch

from nearsight.train import Protocol
from nearsight.train.optimizer import learning_rates


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
