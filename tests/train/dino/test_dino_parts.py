"""DINO's loss, head, schedules and views against the paper's pseudo-code in float64; the step as a program for a
device, nothing of which is in the host; and settings: what cannot be is refused by its own name.
"""

import dataclasses
import json
import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from on_the_host import OnTheHost
from torch import nn

from nearsight.augment import CompiledPipeline
from nearsight.data import load_dataset
from nearsight.errors import InputError
from nearsight.models import ModelConfig
from nearsight.train.dino import CropsConfig, DinoConfig, DinoProtocol, DinoTraining, ImagesConfig
from nearsight.train.dino.networks import DinoHead
from nearsight.train.dino.training import Schedules, cosine, dino_loss, entropy, next_centre, teacher_distributions
from nearsight.train.dino.views import MultiCrop, global_augmentations, local_augmentations


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


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DinoProtocol(drop_path=1.0), r"^drop_path is 1\.0, but must lie in \[0, 1\)"),
        (lambda: DinoProtocol(drop_path=math.nan), "^drop_path is nan"),
        (lambda: CropsConfig(min_global_area=0.0), r"^min_global_area is 0\.0, but must be a share"),
        (lambda: CropsConfig(min_global_area=1.5), r"^min_global_area is 1\.5"),
        (lambda: CropsConfig(min_local_area=-0.1), r"^min_local_area is -0\.1"),
        (lambda: CropsConfig(max_local_area=math.nan), "^max_local_area is nan"),
        (lambda: CropsConfig(min_local_area=0.5), r"^min_local_area is 0\.5, above max_local_area, 0\.4"),
        (lambda: CropsConfig(brightness=-1.0), r"^brightness is -1\.0"),
        (lambda: CropsConfig(saturation=math.inf), "^saturation is inf"),
        (lambda: CropsConfig(hue=0.6), r"^hue is 0\.6, but must be at most 0\.5"),
        (lambda: CropsConfig(max_sigma=0.05), r"^max_sigma is 0\.05, but must be at least 0\.1"),
    ],
)
def test_what_cannot_be_is_refused_by_its_name(make: Callable[[], object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        make()


def test_the_outermost_settings_make_views() -> None:
    """What is accepted here is accepted by the augmentations, too."""
    crops = CropsConfig(min_global_area=1.0, min_local_area=1e-9, max_local_area=1e-9, hue=0.5, max_sigma=0.1)
    assert len(global_augmentations(crops)) == 2
    assert len(local_augmentations(crops)) == 5
    without = CropsConfig(num_local=0, min_local_area=7.0)  # nothing is cropped so
    assert len(global_augmentations(without)) == 2


def test_test_images_are_no_part_of_the_identity() -> None:
    few, many = (DinoConfig(data=ImagesConfig(num_train=50, num_test=number)) for number in (10, None))
    assert few.identity == many.identity != DinoConfig(data=ImagesConfig(num_train=51, num_test=10)).identity
    assert DinoConfig.from_json(json.loads(json.dumps(few.to_json())), "config.json") == few


def test_whole_numbers_are_what_they_are_when_they_are_read_again() -> None:
    whole = DinoConfig(crops=CropsConfig(jitter_p=0, max_sigma=2), protocol=DinoProtocol(clip_norm=3, drop_path=0))
    again = DinoConfig.from_json(json.loads(json.dumps(whole.to_json())), "config.json")
    assert again.identity == whole.identity
    assert dataclasses.replace(whole, seed=1).identity != whole.identity
