"""Weights from files: every usual nesting and prefix is undone, nothing is executed, nothing is loaded in part."""

import argparse
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from nearsight.errors import InputError
from nearsight.models import create_model, load_checkpoint

State = dict[str, Tensor]


def small_vit(seed: int = 0, **changes: Any) -> nn.Module:
    torch.manual_seed(seed)
    settings = {"img_size": 16, "patch_size": 8, "depth": 1, "embed_dim": 16, "num_heads": 2, "num_classes": 5}
    return timm.models.VisionTransformer(**{**settings, **changes})


def prefixed(state: State, prefix: str) -> State:
    return {prefix + name: weight for name, weight in state.items()}


def without_head(state: State) -> State:
    return {name: weight for name, weight in state.items() if not name.startswith("head.")}


def assert_same(model: nn.Module, state: State) -> None:
    assert all(torch.equal(weight, state[name]) for name, weight in model.state_dict().items())


LAYOUTS: dict[str, Callable[[State], Any]] = {
    "plain": dict,
    "state_dict": lambda state: {"state_dict": state, "epoch": 3},
    "model": lambda state: {"model": state, "args": argparse.Namespace(lr=0.1), "optimizer": {"state": {}}},
    "average before raw": lambda state: {"state_dict": torch_zeros(state), "state_dict_ema": state},
    "model_ema": lambda state: {"model": torch_zeros(state), "model_ema": state},
    "teacher before student": lambda state: {"student": torch_zeros(state), "teacher": prefixed(state, "backbone.")},
    "student alone": lambda state: {"student": prefixed(state, "module.backbone.")},
    "parallel": lambda state: prefixed(state, "module."),
    "compiled and parallel": lambda state: {"state_dict": prefixed(state, "_orig_mod.module.")},
    "lightning": lambda state: {"state_dict": prefixed(state, "model."), "epoch": 1},
    "nested": lambda state: {"model_ema": {"decay": 0.9}, "model": {"state_dict": state}},
    "an average's settings are no weights": lambda state: {"ema": {"decay": torch.tensor(0.99)}, "model": state},
}


def torch_zeros(state: State) -> State:
    return {name: torch.zeros_like(weight) for name, weight in state.items()}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_usual_wrappings_are_undone(layout: str, tmp_path: Path) -> None:
    state = small_vit(seed=1).state_dict()
    torch.save(LAYOUTS[layout](state), tmp_path / "weights.pth")
    model = small_vit()
    note = load_checkpoint(model, tmp_path / "weights.pth")
    assert_same(model, state)
    assert note.startswith("weights of weights.pth")


def test_the_note_says_what_was_done(tmp_path: Path) -> None:
    path = tmp_path / "weights.pth"
    state = small_vit(seed=1).state_dict()
    dino = {"teacher": {**prefixed(without_head(state), "backbone."), "head.mlp.0.weight": torch.ones(2)}}
    torch.save(dino, path)
    note = load_checkpoint(small_vit(), path)
    assert note == (
        "weights of weights.pth from the entry 'teacher', without the prefix 'backbone.'; left random, as attention "
        "does not need it: head.weight, head.bias; not used: head.mlp.0.weight"
    )


def test_safetensors(tmp_path: Path) -> None:
    state = small_vit(seed=1).state_dict()
    save_file(prefixed(state, "module."), tmp_path / "weights.safetensors")
    model = small_vit()
    assert "prefix 'module.'" in load_checkpoint(model, tmp_path / "weights.safetensors")
    assert_same(model, state)


def test_a_head_for_other_classes_is_taken_with_them(tmp_path: Path) -> None:
    state = small_vit(seed=1, num_classes=7).state_dict()
    torch.save(state, tmp_path / "weights.pth")
    model = small_vit()
    assert "left random" not in load_checkpoint(model, tmp_path / "weights.pth")
    assert_same(model, state)
    assert model.num_classes == 7
    assert model(torch.zeros(1, 3, 16, 16)).shape == (1, 7)


def test_a_head_of_another_width_is_left_out(tmp_path: Path) -> None:
    state = small_vit(seed=1).state_dict()
    torch.save({**state, "head.weight": torch.zeros(7, 5), "head.bias": torch.zeros(7)}, tmp_path / "weights.pth")
    model = small_vit()
    head = model.state_dict()["head.weight"].clone()
    note = load_checkpoint(model, tmp_path / "weights.pth")
    assert "left random, as attention does not need it: head.weight, head.bias" in note
    assert torch.equal(model.state_dict()["head.weight"], head)
    assert torch.equal(model.state_dict()["norm.weight"], state["norm.weight"])


def test_weights_of_a_masked_autoencoder_without_its_decoder(tmp_path: Path) -> None:
    state = without_head(small_vit(seed=1).state_dict())
    decoder = {f"decoder_blocks.{number}.norm1.weight": torch.ones(3) for number in range(5)}
    torch.save({"model": {**state, **decoder, "mask_token": torch.ones(1, 1, 3)}}, tmp_path / "mae.pth")
    model = small_vit()
    note = load_checkpoint(model, tmp_path / "mae.pth")
    assert torch.equal(model.state_dict()["blocks.0.attn.qkv.weight"], state["blocks.0.attn.qkv.weight"])
    assert "not used: decoder_blocks.0.norm1.weight, decoder_blocks.1.norm1.weight" in note
    assert "and 3 more" in note


def test_timm_converts_positions_to_the_size_of_the_model(tmp_path: Path) -> None:
    state = small_vit(seed=1, img_size=32).state_dict()
    torch.save(state, tmp_path / "weights.pth")
    model = small_vit()
    note = load_checkpoint(model, tmp_path / "weights.pth")
    assert "with names as timm converts them; resized: pos_embed" in note
    assert torch.equal(model.state_dict()["norm.weight"], state["norm.weight"])


def test_published_names_are_converted_by_timm(tmp_path: Path) -> None:
    """DINOv2 calls its registers, and the halves of its gated layers, differently from timm."""
    own = small_vit(seed=1, reg_tokens=2, num_classes=0, no_embed_class=True, init_values=1.0).state_dict()
    published = {name.replace("reg_token", "register_tokens"): weight for name, weight in own.items()}
    published["pos_embed"] = torch.cat([torch.zeros(1, 1, 16), own["pos_embed"]], dim=1)
    torch.save({**published, "mask_token": torch.zeros(1, 16)}, tmp_path / "dinov2.pth")
    model = small_vit(reg_tokens=2, num_classes=0, no_embed_class=True, init_values=1.0)
    assert "timm converts" in load_checkpoint(model, tmp_path / "dinov2.pth")
    assert torch.equal(model.state_dict()["reg_token"], own["reg_token"])


def test_models_of_this_package_are_read_as_well(tmp_path: Path) -> None:
    state = create_model("compact_vit", depth=1, embed_dim=16, num_heads=2).state_dict()
    torch.save({"state_dict": state}, tmp_path / "weights.pth")
    model = create_model("compact_vit", depth=1, embed_dim=16, num_heads=2)
    load_checkpoint(model, tmp_path / "weights.pth")
    assert_same(model, state)


def test_a_model_whose_own_names_begin_like_a_prefix(tmp_path: Path) -> None:
    model, other = (nn.ModuleDict({"backbone": nn.Linear(2, 2), "model": nn.Linear(2, 2)}) for _ in range(2))
    torch.save(other.state_dict(), tmp_path / "weights.pth")
    assert load_checkpoint(model, tmp_path / "weights.pth") == "weights of weights.pth"
    assert_same(model, other.state_dict())


class Attack:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.mark}",)


@pytest.mark.parametrize("save", [torch.save, lambda value, path: path.write_bytes(pickle.dumps(value))])
def test_a_malicious_pickle_is_refused_and_not_executed(save: Callable[[Any, Path], Any], tmp_path: Path) -> None:
    mark, path = tmp_path / "mark", tmp_path / "weights.pth"
    save({"state_dict": small_vit().state_dict(), "extra": Attack(mark)}, path)
    model = small_vit()
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    with pytest.raises(InputError, match=r"weights\.pth") as refused:
        load_checkpoint(model, path)
    assert "\n" not in str(refused.value)
    assert not mark.exists()
    assert_same(model, before)


def test_a_pickled_model_is_refused_by_name(tmp_path: Path) -> None:
    torch.save(nn.Linear(2, 2), tmp_path / "model.pth")
    with pytest.raises(InputError, match=r"holds more than weights \(torch\.nn\.modules\.linear\.Linear\).*state_dict"):
        load_checkpoint(small_vit(), tmp_path / "model.pth")


@pytest.mark.parametrize("name", ["weights.pth", "weights.safetensors"])
@pytest.mark.parametrize("content", [b"", b"hello world", b"PK\x03\x04 cut off"])
def test_damaged_files(name: str, content: bytes, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=f"{name} is damaged"):
        load_checkpoint(small_vit(), tmp_path / name)


def test_files_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is not there, but a file of weights"):
        load_checkpoint(small_vit(), tmp_path / "none.pth")
    with pytest.raises(InputError, match="is a folder, but a file of weights"):
        load_checkpoint(small_vit(), tmp_path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda state: {"epoch": 3}, "holds no weights"),
        (lambda state: [1, 2], "holds no weights"),
        (
            lambda state: {"a.weight": torch.ones(2), "b": torch.ones(1)},
            "none of the model's weights; it holds a.weight, b",
        ),
        (
            lambda state: {name: weight for name, weight in state.items() if "qkv" not in name},
            "lacks 2 of the model's 20 weights: blocks.0.attn.qkv.weight, blocks.0.attn.qkv.bias; is it of another",
        ),
        (
            lambda state: {**state, "norm.weight": torch.ones(3)},
            r"has norm.weight as \[3\], but the model's is \[16\] \(1 differ in all\)",
        ),
        (
            lambda state: {**state, "norm.weight": torch.ones(16, dtype=torch.int8)},
            "norm.weight is of int8: quantised weights cannot be used",
        ),
    ],
)
def test_what_does_not_fit_is_refused_and_changes_nothing(
    change: Callable[[State], Any], words: str, tmp_path: Path
) -> None:
    torch.save(change(small_vit(seed=1).state_dict()), tmp_path / "weights.pth")
    model = small_vit()
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    with pytest.raises(InputError, match=words):
        load_checkpoint(model, tmp_path / "weights.pth")
    assert_same(model, before)
