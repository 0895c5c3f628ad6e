"""Where models come from: each form of name gives a model, its preparation of images, and errors that help."""

import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from timm.data import create_transform
from torchvision.models import ViT_B_32_Weights
from torchvision.transforms.functional import to_tensor

from nearsight.errors import InputError
from nearsight.models import create_model, load_source
from nearsight.models.sources import has_published_weights, try_forward

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    hub = pytest.importorskip("huggingface_hub")
    monkeypatch.setattr(hub.constants, "HF_HUB_OFFLINE", True)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty current folder; modules that are imported from it are forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    known, path = set(sys.modules), list(sys.path)
    yield tmp_path
    assert sys.path == path
    for name in set(sys.modules) - known:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def picture(width: int, height: int) -> Image.Image:
    ramp = torch.linspace(0, 255, width * height * 3).reshape(height, width, 3)
    return Image.fromarray(ramp.to(torch.uint8).numpy())


def refusal(text: str, **settings: object) -> str:
    with pytest.raises(InputError) as refused:
        load_source(text, **settings)  # type: ignore[arg-type]
    assert "\n" not in str(refused.value)
    return str(refused.value)


class TestTimm:
    def test_a_name_with_random_weights(self) -> None:
        sourced = load_source("vit_tiny_patch16_224.augreg_in21k")
        assert sourced.label == "vit_tiny_patch16_224.augreg_in21k (random weights)"
        assert not sourced.model.training
        assert sourced.data_config == {
            "input_size": (3, 224, 224),
            "mean": (0.5, 0.5, 0.5),
            "std": (0.5, 0.5, 0.5),
            "interpolation": "bicubic",
            "crop_pct": 0.9,
            "crop_mode": "center",
        }
        assert sourced.image_size == (224, 224)

    def test_another_image_size(self) -> None:
        sourced = load_source("test_vit", image_size=64)
        assert sourced.image_size == (64, 64)
        assert sourced.model(torch.zeros(1, 3, 64, 64)).shape == (1, 1000)
        assert load_source("test_resnet", image_size=64).image_size == (64, 64)  # has no setting for it, needs none

    def test_own_weights(self, tmp_path: Path) -> None:
        torch.manual_seed(1)
        trained = create_model("test_vit")
        torch.save({"model": trained.state_dict()}, tmp_path / "best.pth")
        sourced = load_source("test_vit", checkpoint=tmp_path / "best.pth")
        assert sourced.label == "test_vit (best.pth)"
        assert sourced.notes == ("weights of best.pth from the entry 'model'",)
        images = torch.rand(1, 3, 160, 160)
        assert torch.equal(sourced.model(images), trained.eval()(images))

    @pytest.mark.parametrize(
        ("text", "settings", "words"),
        [
            ("vit_smal_patch16_224", {}, "did you mean 'vit_small_patch16_224'?"),
            ("vit_tiny_patch16_224.augreg_in2k", {}, "did you mean vit_tiny_patch16_224.augreg_in21k?"),
            ("test_vit.zzz", {}, "not its tag 'zzz'; known tags: r160_in1k"),
            ("test_vit.zzz", {"pretrained": True}, "not its tag 'zzz'; known tags: r160_in1k"),
            ("locat_compact_vit.zzz", {}, "not its tag 'zzz'; known tags: modern_cifar100"),
            ("locat_vit_tiny_patch16_224.zzz", {}, "not its tag 'zzz'; known tags: none"),
            ("compact_vit", {"pretrained": True}, "no published weights for compact_vit; leave out --pretrained"),
            ("vit_base_patch16_gap_224", {"pretrained": True}, "no published weights"),
            ("nest_tiny", {"image_size": 100}, "timm cannot build nest_tiny for images of 100 pixels: First level"),
            ("test_vit", {"image_size": 0}, "--image-size is 0, but must be at least 1"),
            ("test_vit", {"pretrained": True, "checkpoint": Path("x.pth")}, "choose one"),
            ("hf-hub:nearsight/no-such-model", {}, "hf-hub:nearsight/no-such-model could not be loaded"),
            ("local-dir:no/such/folder", {}, "local-dir:no/such/folder could not be loaded"),
        ],
    )
    def test_bad_names(self, text: str, settings: dict[str, object], words: str) -> None:
        assert words in refusal(text, **settings)

    @pytest.mark.parametrize(
        ("changes", "words"),
        [
            ({"model_args": {"depth": 10**9}}, "has a config with depth 1000000000, but 1000 are the most"),
            ({"model_args": {"embed_dim": 8192, "depth": 1}}, "config.json asks for "),
            ({"num_classes": 10**12}, "config.json asks for "),
            ({"architecture": 5}, "asks for a model that cannot be built: timm cannot build local-dir:"),
            ({"model_args": {"embed_dim": 2**31, "num_heads": 3}}, "asks for a model that cannot be built"),
            ({"pretrained_cfg": {"input_size": [3, 10**9, 10**9]}}, "has 1 to 4096 pixels"),
            ({"pretrained_cfg": {"crop_pct": 1e-9}}, "has 1 to 4096 pixels"),
            ({"pretrained_cfg": {"crop_pct": "x"}}, "does not say how its images are prepared"),
            ({"pretrained_cfg": {"interpolation": "x"}}, "does not say how its images are prepared: 'x'"),
            ({"pretrained_cfg": {"mean": "x"}}, "does not say how its images are prepared"),
            ({"pretrained_cfg": {"std": [0, 0, 0]}}, "images cannot be normalised"),
        ],
    )
    def test_numbers_that_no_model_has(self, folder: Path, changes: dict[str, Any], words: str) -> None:
        settings = {"depth": 1, "embed_dim": 24, "num_heads": 3}
        model = create_model("test_vit", **settings)
        save_file(model.state_dict(), folder / "model.safetensors")
        config = {"architecture": "test_vit", "model_args": settings, "pretrained_cfg": {}}
        (folder / "config.json").write_text(json.dumps(config))
        assert load_source(f"local-dir:{folder}", pretrained=True).image_size == (224, 224)
        (folder / "config.json").write_text(json.dumps({**config, **changes}))
        for pretrained in (False, True):
            assert words in refusal(f"local-dir:{folder}", pretrained=pretrained)

    def test_damaged_weights(self, folder: Path) -> None:
        (folder / "config.json").write_text(json.dumps({"architecture": "test_vit", "pretrained_cfg": {}}))
        save_file(create_model("test_vit").state_dict(), folder / "model.safetensors")
        os.truncate(folder / "model.safetensors", 900_000)
        assert "timm cannot build local-dir:" in refusal(f"local-dir:{folder}", pretrained=True)


class TestTorchvision:
    def test_the_preparation_is_that_of_the_published_weights(self) -> None:
        sourced = load_source("torchvision:swin_t")
        assert sourced.label == "torchvision:swin_t (random weights)"
        assert not sourced.model.training
        transforms = pytest.importorskip("torchvision.models").Swin_T_Weights.DEFAULT.transforms()
        prepare = create_transform(**sourced.data_config, is_training=False)
        image = picture(300, 260)
        assert torch.allclose(prepare(image), transforms(image), atol=1e-6)

    def test_a_vit_for_another_size_takes_resized_positions(self, monkeypatch: pytest.MonkeyPatch) -> None:
        torch.manual_seed(0)
        published = load_source("torchvision:vit_b_32", image_size=224).model.state_dict()
        monkeypatch.setattr(ViT_B_32_Weights, "get_state_dict", lambda *_, **__: dict(published))
        sourced = load_source("torchvision:vit_b_32", pretrained=True, image_size=64)
        assert sourced.label == "torchvision:vit_b_32 (pretrained)"
        own = sourced.model.state_dict()
        assert own["encoder.pos_embedding"].shape == (1, 5, 768)
        assert torch.equal(own["encoder.ln.weight"], published["encoder.ln.weight"])
        assert torch.equal(own["conv_proj.weight"], published["conv_proj.weight"])
        try_forward(sourced, CPU)

    def test_bad_names(self, monkeypatch: pytest.MonkeyPatch) -> None:
        words = "'vit_b16' is not a known torchvision model; did you mean 'vit_b_16'?"
        assert refusal("torchvision:vit_b16") == words

        def no_network(*_: object, **__: object) -> None:
            raise OSError("<urlopen error [Errno -2] Name or service not known>")

        monkeypatch.setattr(ViT_B_32_Weights, "get_state_dict", no_network)
        words = refusal("torchvision:vit_b_32", pretrained=True)
        assert "torchvision:vit_b_32 could not be loaded: <urlopen error" in words


OWN_MODULE = """
import timm
import torch
from torch import nn
from nearsight.models import create_model

class Plain(nn.Module):
    def forward(self, images):
        return images.mean((2, 3))

class Builder:
    @staticmethod
    def make():
        return Plain()

def compact():
    return create_model("compact_vit", depth=1, embed_dim=16, num_heads=2)

def narrow():
    settings = {"img_size": (32, 48), "patch_size": 8, "embed_dim": 48, "depth": 1, "num_heads": 3}
    return timm.create_model("vit_tiny_patch16_224", **settings)

def plain():
    return Plain()

def broken():
    raise RuntimeError("first line\\nsecond line")

def nothing():
    pass

def leaves():
    raise SystemExit(3)

def wants(size):
    return Plain()

def picky():
    model = Plain()
    model.forward = lambda images: images.view(1, 3, 8, 8)
    return model

number = 3
instance = Plain()
"""


class TestFactories:
    @pytest.fixture(autouse=True)
    def own_module(self, folder: Path) -> str:
        (folder / "own_models_here.py").write_text(OWN_MODULE)
        return "own_models_here"

    def test_the_current_folder_is_importable(self, own_module: str) -> None:
        sourced = load_source(f"{own_module}:compact")
        assert sourced.label == f"{own_module}:compact"
        assert not sourced.model.training
        assert sourced.image_size == (32, 32)  # the model says so
        assert load_source(f"{own_module}:compact", image_size=48).image_size == (48, 48)

    def test_built_for_another_size_than_its_name_says(self, own_module: str) -> None:
        sourced = load_source(f"{own_module}:narrow")
        assert sourced.image_size == (32, 48)
        assert sourced.data_config["mean"] == sourced.model.pretrained_cfg["mean"]
        try_forward(sourced, CPU)

    def test_packages_and_attributes_of_attributes(self, folder: Path, own_module: str) -> None:
        (folder / "own_package_here").mkdir()
        (folder / "own_package_here" / "inner.py").write_text(f"from {own_module} import Builder")
        sourced = load_source("own_package_here.inner:Builder.make", image_size=20)
        assert sourced.image_size == (20, 20)
        assert sourced.data_config["mean"] == (0.485, 0.456, 0.406)
        assert sourced.data_config["std"] == (0.229, 0.224, 0.225)

    def test_own_weights(self, own_module: str, tmp_path: Path) -> None:
        torch.manual_seed(1)
        state = load_source(f"{own_module}:compact").model.state_dict()
        torch.save(state, tmp_path / "own.pth")
        sourced = load_source(f"{own_module}:compact", checkpoint=tmp_path / "own.pth")
        assert sourced.label == f"{own_module}:compact (own.pth)"
        assert all(torch.equal(weight, state[name]) for name, weight in sourced.model.state_dict().items())

    @pytest.mark.parametrize(
        ("text", "words"),
        [
            ("own_models_here:compct", "module own_models_here has no 'compct'; did you mean 'compact'?"),
            (
                "own_models_hre:compact",
                "there is no module own_models_hre in the current folder or among the installed",
            ),
            ("own_models_here.deep:compact", "there is no module own_models_here.deep"),
            ("own_models_here:broken", "broken() failed: RuntimeError: first line second line"),
            ("own_models_here:leaves", "leaves() failed: SystemExit: 3"),
            ("own_models_here:wants", "wants() failed: TypeError"),
            ("own_models_here:nothing", "nothing() returned None, but a torch.nn.Module is needed"),
            ("own_models_here:number", "is an object of type int, but a function that returns a model is needed"),
            ("own_models_here:instance", "is a model; name a function that builds it"),
            ("own_models_here:plain", "does not say which images it takes; say so with --image-size"),
            ("own_models_here:", "does not name a function as package.module:function does"),
            ("own models:compact", "does not name a function as package.module:function does"),
        ],
    )
    def test_bad_names(self, text: str, words: str) -> None:
        assert words in refusal(text)

    def test_a_module_that_cannot_be_imported(self, folder: Path) -> None:
        (folder / "own_typo_here.py").write_text("def broken(:")
        assert "module own_typo_here cannot be imported: SyntaxError" in refusal("own_typo_here:make")
        (folder / "own_needs_here.py").write_text("import a_library_nobody_has")
        words = refusal("own_needs_here:make")
        assert words == "module own_needs_here cannot be imported: No module named 'a_library_nobody_has'"

    def test_weights_are_the_function_s_business(self, own_module: str) -> None:
        assert "brings its own weights" in refusal(f"{own_module}:compact", pretrained=True)

    def test_a_forward_that_fails_is_named(self, own_module: str) -> None:
        sourced = load_source(f"{own_module}:picky", image_size=16)
        with pytest.raises(InputError, match=r"picky fails on an image of 16×16 pixels: RuntimeError: .*--image-size"):
            try_forward(sourced, CPU)


@pytest.mark.parametrize(
    ("text", "choice"),
    [
        ("vit_base_patch16_224", True),
        ("hf-hub:timm/vit_base", True),
        ("torchvision:vit_b_16", True),
        ("hf:google/vit", False),
        ("my.module:build", False),
    ],
)
def test_who_leaves_the_choice_of_weights(text: str, choice: bool) -> None:
    assert has_published_weights(text) is choice


def test_what_is_resized_to_is_what_was_asked_for() -> None:
    """timm rounds down after dividing by a fraction, which must not lose a pixel."""
    for size, resize in ((17, 25), (224, 256), (518, 592), (384, 384), (336, 441)):
        from nearsight.models.sourced import preparation

        transforms = create_transform(**preparation((size, size), resize_to=resize), is_training=False).transforms
        assert re.search(rf"size={resize}\b", str(transforms[0]))
        assert transforms[1].size == (size, size)


def test_normalisation() -> None:
    from nearsight.models.sourced import preparation

    prepare = create_transform(**preparation((8, 8), mean=(0.1, 0.2, 0.3), std=(0.5, 0.6, 0.7)), is_training=False)
    image = picture(8, 8)
    mean, std = (torch.tensor(values)[:, None, None] for values in ((0.1, 0.2, 0.3), (0.5, 0.6, 0.7)))
    assert torch.allclose(prepare(image), (to_tensor(image) - mean) / std)
