"""Every augmentation gives the same images on a GPU as on the CPU, in one captured program as well as step by step."""

import dataclasses

import pytest
import torch

from nearsight.augment import AUGMENTATIONS, Augmentation, Pipeline
from nearsight.randomness import Draws

pytestmark = pytest.mark.gpu


def on(draws: Draws, device: str) -> Draws:
    return Draws(*(getattr(draws, field.name).to(device) for field in dataclasses.fields(Draws)))


@pytest.mark.parametrize("name", list(AUGMENTATIONS))
def test_a_gpu_gives_the_cpus_images(name, make_draws, make_images):
    cells: list[list[Augmentation]] = [[dataclasses.replace(AUGMENTATIONS[name](), p=p)] for p in (0.0, 0.6, 1.0)]
    images = make_images(3 * 32).view(3, 32, 3, 32, 32)
    labels = torch.arange(32).expand(3, -1) % 10
    draws = make_draws(3, 32)
    settings = {"num_classes": 10, "mean": (0.0, 0.0, 0.0), "std": (1 / 255, 1 / 255, 1 / 255)}  # grey levels stay
    outputs = []
    for device in ("cpu", "cuda"):
        pipeline = Pipeline.stack(cells, device=torch.device(device), **settings)
        out, targets = pipeline(images.to(device), labels.to(device), on(draws, device))
        outputs.append((out.cpu(), targets.cpu()))
    (cpu, cpu_targets), (gpu, gpu_targets) = outputs
    assert torch.equal(gpu[0], images[0].float())  # the cell without it
    # Blends round on the edge of two levels now and then, and a rotation may choose the neighbour of a tied pixel.
    assert ((cpu - gpu).abs() > 1.01).float().mean() < 1e-3
    torch.testing.assert_close(cpu_targets, gpu_targets, rtol=1e-5, atol=1e-6)
