"""The step as a program for a device: nothing of it is in the host, and it leaves no trace where it should not."""

import dataclasses
from collections.abc import Callable

import pytest
import torch
from on_the_host import OnTheHost

from nearsight.augment import CompiledPipeline
from nearsight.data import load_dataset
from nearsight.models import ModelConfig
from nearsight.train.dino import CropsConfig, DinoConfig, DinoProtocol, DinoTraining, ImagesConfig
from nearsight.train.dino.views import MultiCrop

CONFIG = DinoConfig(
    model=ModelConfig(patch_size=8, depth=2, width=16, num_heads=2, mlp_width=16, gaug=True, prr=True),
    data=ImagesConfig(name="shapes", num_train=24, num_test=10),
    crops=CropsConfig(num_local=3, local_size=16),
    protocol=DinoProtocol(epochs=3, batch_size=8, warmup_epochs=0, num_prototypes=12, hidden=16, bottleneck=8),
)


@pytest.fixture(scope="module")
def dataset():
    return load_dataset("shapes", num_train=24, num_test=10)


@pytest.mark.parametrize("epoch", [0, 1], ids=["prototypes at rest", "all learn"])
def test_nothing_of_a_step_is_in_the_host(dataset, epoch: int) -> None:
    """On the meta device, where any look at a value is an error."""
    training = DinoTraining(CONFIG, dataset, torch.device("meta"))
    training._step.begin(epoch, torch.empty(3, 8, dtype=torch.int64, device="meta"))
    with OnTheHost() as host:
        training._step()
    assert not host.found


@pytest.mark.parametrize("epoch", [0, 1], ids=["prototypes at rest", "all learn"])
def test_a_step_that_is_put_back_leaves_no_trace(dataset, epoch: int) -> None:
    """As when a graph is captured: nothing that a step changes is missing in its state."""
    device, index = torch.device("cpu"), torch.arange(24).view(3, 8)
    once, again = (DinoTraining(CONFIG, dataset, device) for _ in range(2))
    for training in (once, again):
        training._step.begin(epoch, index)
        training._step()
    before = [tensor.clone() for tensor in again._step.state]
    again._step()
    for tensor, value in zip(again._step.state, before, strict=True):
        tensor.copy_(value)
    for training in (once, again):
        training._step()
    for ours, theirs in zip(again._step.state, once._step.state, strict=True):
        assert torch.equal(ours, theirs)
    assert int(again._step.number) == 3 * epoch + 2
    moved = [not torch.equal(now, then) for now, then in zip(again._step.state, before, strict=True)]
    assert sum(moved) == len(moved) - (4 if epoch == 0 else 0) - (epoch == 0)


def test_compiled_views_are_the_plain_ones(dataset) -> None:
    """One program for each size, whatever the epoch and the images."""
    torch._dynamo.reset()
    programs = []

    def noting(program: torch.fx.GraphModule, _: object) -> Callable[..., object]:
        programs.append(program)
        return program.forward

    device, images = torch.device("cpu"), dataset.train.images_NCHW
    crops = dataclasses.replace(CONFIG.crops, jitter_p=0.0)  # which takes long to trace
    plain = MultiCrop(crops, dataset, 5, device)
    compiled = MultiCrop(crops, dataset, 5, device, compiled=CompiledPipeline(backend=noting))
    for epoch, index in ((0, torch.arange(6)), (3, torch.arange(9, 15))):
        ours, theirs = (crop(images[index], index, torch.tensor(epoch)) for crop in (compiled, plain))
        for mine, expected in zip(ours.batches, theirs.batches, strict=True):
            torch.testing.assert_close(mine, expected, rtol=0, atol=1e-5)
    assert len(programs) == 2
    torch._dynamo.reset()
