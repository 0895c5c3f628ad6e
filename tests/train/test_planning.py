"""Which runs can be one stack, how many at once, and what a run is thought to take."""

import dataclasses

import pytest
import torch

from nearsight.data import load_dataset
from nearsight.models import ModelConfig
from nearsight.train import DataConfig, RunConfig, modern, planning
from nearsight.train.engine import Stack
from nearsight.train.planning import MOST_CELLS, cell_bytes, free_bytes, is_out_of_memory, num_slots

CPU = torch.device("cpu")


def test_what_must_be_alike_is_in_one_stack() -> None:
    start = modern()
    configs = [
        RunConfig(),
        RunConfig(precision="bf16"),
        RunConfig(seed=1, protocol=dataclasses.replace(start, lr=0.1, smoothing=0.3, max_epochs=7)),
        RunConfig(protocol=dataclasses.replace(start, batch_size=64)),
        RunConfig(model=ModelConfig(depth=2)),
        RunConfig(model=ModelConfig(init="pytorch"), measure_every=3),
        RunConfig(data=DataConfig(name="cifar10")),
        RunConfig(protocol=dataclasses.replace(start, betas=(0.9, 0.99))),
        RunConfig(seed=3, precision="bf16"),
        RunConfig(model=ModelConfig(reach=(1.5,))),
        RunConfig(model=ModelConfig(reach=(1.5,) * 8), seed=4),
        RunConfig(model=ModelConfig(reach=(2.0,))),
    ]
    kinds: dict[object, list[int]] = {}
    for position, config in enumerate(configs):
        kinds.setdefault(config.stack_key, []).append(position)
    assert list(kinds.values()) == [[0, 2, 5], [1, 8], [3], [4], [6], [7], [9, 10], [11]]


def test_no_stack_is_larger_than_what_pays_or_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "free_bytes", lambda device: 2**40)
    assert num_slots(RunConfig(), torch.device("cuda")) == MOST_CELLS == 24
    assert num_slots(RunConfig(), CPU) == num_slots(RunConfig(), CPU, 1000) == 8
    assert num_slots(RunConfig(), CPU, 5) == 5


def test_memory_bounds_a_stack(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "free_bytes", lambda device: 10 * cell_bytes(RunConfig()))
    assert num_slots(RunConfig(), CPU) == 5  # half of it is for the data
    assert num_slots(RunConfig(), CPU, 4) == 4
    monkeypatch.setattr(planning, "free_bytes", lambda device: 1)
    assert num_slots(RunConfig(), CPU) == 1  # one is always tried


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    "model",
    [
        ModelConfig(depth=3, width=64, num_heads=4, mlp_width=128, patch_size=8),
        ModelConfig(depth=3, width=48, num_heads=4, mlp_width=96, patch_size=4),
        ModelConfig(name="compact_resnet18", channels=4),
        ModelConfig(name="compact_resnet18", channels=6, shuffled_tiles=4),
    ],
    ids=lambda model: f"{model.name}-{model.width}-{model.channels}",
)
def test_the_estimate_is_near_what_a_step_keeps(precision: str, model: ModelConfig) -> None:
    config = RunConfig(
        model=model,
        data=DataConfig(name="shapes", num_train=100, num_test=10),
        protocol=dataclasses.replace(modern(), batch_size=80),
        precision=precision,  # type: ignore[arg-type]
    )
    stack = Stack.start([config], load_dataset("shapes", num_train=100, num_test=10), CPU)
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        stack.run_epoch()  # one step
    states = 4 * sum(weight.nbytes for weight in stack.weights.values())
    assert sum(kept.values()) + states < cell_bytes(config) < 3 * (sum(kept.values()) + states)


def test_free_memory_is_known_here() -> None:
    assert 2**20 < free_bytes(CPU) < 2**50


def test_a_lack_of_memory_is_known_by_its_error() -> None:
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    assert is_out_of_memory(MemoryError())
    assert is_out_of_memory(RuntimeError("CUDA error: out of memory"))
    assert is_out_of_memory(RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 8 bytes"))
    assert not is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not is_out_of_memory(ValueError("out of memory"))
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**55, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)
