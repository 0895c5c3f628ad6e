"""Every augmentation gives the same images on a GPU as on the CPU, in one captured program as well as step by step."""

import dataclasses

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from nearsight.augment import (
    AUGMENTATIONS,
    Augmentation,
    AutoAugment,
    CompiledPipeline,
    CutMix,
    HorizontalFlip,
    Pipeline,
    RandomCrop,
)
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


def test_one_compiled_program_captured_for_every_number_of_cells(make_draws, make_images):
    cells = [[RandomCrop(), HorizontalFlip(), AutoAugment(), CutMix(p=p)] for p in (0.0, 0.5, 1.0, 1.0)]
    settings = {"num_classes": 10, "mean": (0.0, 0.0, 0.0), "std": (1 / 255, 1 / 255, 1 / 255)}  # grey levels stay
    on_cpu, on_gpu = (Pipeline.stack(cells, device=torch.device(device), **settings) for device in ("cpu", "cuda"))
    torch._dynamo.reset()
    count = CompileCounterWithBackend("inductor")
    compiled = CompiledPipeline(backend=count)
    for num_cells in (4, 3, 2):
        keep = torch.arange(num_cells)
        images = make_images(num_cells * 32, seed=num_cells).view(num_cells, 32, 3, 32, 32)
        labels = torch.arange(32).expand(num_cells, -1).contiguous() % 10
        draws = make_draws(num_cells, 32)
        pipeline, arguments = on_gpu.select(keep.cuda()), (images.cuda(), labels.cuda(), on(draws, "cuda"))
        compiled(pipeline, *arguments)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out, targets = compiled(pipeline, *arguments)
        graph.replay()
        expected, expected_targets = on_cpu.select(keep)(images, labels, draws)
        # As above; a level that falls on the other side of a threshold may end far away (colour, then solarize).
        assert ((out.cpu() - expected).abs() > 1.01).float().mean() < 1e-3
        torch.testing.assert_close(targets.cpu(), expected_targets, rtol=1e-5, atol=1e-6)
    assert count.frame_count == 1
