"""Models of transformers: tiny ones with random weights, saved and loaded again; nothing is fetched."""

import json
import logging
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from timm.data import create_transform
from torch import Tensor

from nearsight.errors import InputError
from nearsight.models import load_source
from nearsight.models.sources import try_forward

transformers = pytest.importorskip("transformers", reason="needs transformers: pip install 'nearsight[hf]'")

VISION = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "image_size": 32,
    "patch_size": 8,
}
TEXT = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16, "vocab_size": 50}
DECODER = {
    "decoder_hidden_size": 8,
    "decoder_num_hidden_layers": 1,
    "decoder_num_attention_heads": 2,
    "decoder_intermediate_size": 8,
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    torch.manual_seed(0)
    transformers.ViTForImageClassification(transformers.ViTConfig(**VISION)).save_pretrained(folder / "vit")
    processor = transformers.ViTImageProcessor(size={"height": 32, "width": 32}, image_mean=[0.4] * 3)
    processor.save_pretrained(folder / "vit")
    both = transformers.CLIPConfig(vision_config=VISION, text_config=TEXT)
    transformers.CLIPModel(both).save_pretrained(folder / "clip")
    crop = {"height": 32, "width": 32}
    transformers.CLIPImageProcessor(size={"shortest_edge": 36}, crop_size=crop).save_pretrained(folder / "clip")
    masked = transformers.ViTMAEConfig(**VISION, **DECODER)
    transformers.ViTMAEForPreTraining(masked).save_pretrained(folder / "mae")
    transformers.BertModel(transformers.BertConfig(**TEXT)).save_pretrained(folder / "bert")
    return folder


def image(width: int = 60, height: int = 48) -> Image.Image:
    rows, columns = np.mgrid[0:height, 0:width]
    return Image.fromarray(np.stack([rows * 4, columns * 3, rows + columns], axis=-1).astype(np.uint8))


def refusal(text: str, **settings: Any) -> str:
    with pytest.raises(InputError) as refused:
        load_source(text, **settings)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_a_classifier_without_its_head(saved: Path, capfd: pytest.CaptureFixture[str]) -> None:
    sourced = load_source(f"hf:{saved / 'vit'}")
    assert capfd.readouterr() == ("", "")  # neither bars nor reports
    assert sourced.label == "hf:vit"
    assert sourced.notes == ()
    assert not sourced.model.training
    images = torch.rand(2, 3, 32, 32)
    whole = transformers.ViTForImageClassification.from_pretrained(saved / "vit").eval()
    with torch.no_grad():
        assert torch.equal(sourced.model(images).last_hidden_state, whole.vit(images).last_hidden_state)
    assert (
        dict(sourced.model.named_modules()).keys() == dict(transformers.ViTModel(whole.config).named_modules()).keys()
    )


@pytest.mark.parametrize("name", ["vit", "clip"])
@pytest.mark.parametrize("size", [(60, 48), (48, 60), (32, 32)])
def test_images_are_prepared_as_the_processor_does(saved: Path, name: str, size: tuple[int, int]) -> None:
    prepare = create_transform(**load_source(f"hf:{saved / name}").data_config, is_training=False)
    processor = transformers.AutoImageProcessor.from_pretrained(saved / name)
    ours, theirs = prepare(image(*size)), processor(image(*size), return_tensors="pt")["pixel_values"][0]
    assert ours.shape == theirs.shape == (3, 32, 32)
    # Resizing rounds to grey levels in both, not always to the same one.
    assert float((ours - theirs).abs().max()) < 2.5 / 255 / 0.26


def test_what_a_processor_may_say(saved: Path, tmp_path: Path) -> None:
    def config(**changes: Any) -> dict[str, Any]:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        shutil.copytree(saved / "vit", folder)
        path = folder / "preprocessor_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
        return dict(load_source(f"hf:{folder}").data_config)

    assert config(do_normalize=False)["std"] == (1.0, 1.0, 1.0)
    assert config(rescale_factor=1 / 127.5)["mean"] == pytest.approx((0.2, 0.2, 0.2))
    assert config(do_rescale=False)["mean"] == pytest.approx((0.4 / 255,) * 3)
    assert config(resample=3)["interpolation"] == "bicubic"
    assert config(resample=0)["interpolation"] == "nearest"
    assert config()["interpolation"] == "bilinear"
    assert config()["crop_mode"] == "squash"
    assert config(size={"height": 24, "width": 48})["input_size"] == (3, 24, 48)


def test_of_two_towers_the_one_that_sees(saved: Path) -> None:
    sourced = load_source(f"hf:{saved / 'clip'}")
    assert sourced.notes == ("only the image tower of CLIPModel is measured",)
    assert not [name for name, _ in sourced.model.named_modules() if "text" in name]
    images = torch.rand(1, 3, 32, 32)
    whole = transformers.CLIPModel.from_pretrained(saved / "clip").eval()
    with torch.no_grad():
        expected = whole.vision_model(pixel_values=images).last_hidden_state
        assert torch.equal(sourced.model(images).last_hidden_state, expected)


def test_a_masked_autoencoder_sees_every_patch_in_its_place(saved: Path) -> None:
    sourced = load_source(f"hf:{saved / 'mae'}")
    assert "its masking is switched off: it sees every patch, in order" in sourced.notes
    model = sourced.model
    images = torch.rand(2, 3, 32, 32)
    seen: list[Tensor] = []
    embeddings: Any = model.embeddings
    embeddings.register_forward_hook(lambda _module, _inputs, output: seen.append(output[0]))
    with torch.no_grad():
        first, second = model(images).last_hidden_state, model(images).last_hidden_state
        patches = embeddings.patch_embeddings(images) + embeddings.position_embeddings[:, 1:]
    assert first.shape == (2, 17, 16)
    assert torch.equal(first, second)
    assert torch.allclose(seen[0][:, 1:], patches)


@pytest.mark.parametrize("name", ["vit", "clip", "mae"])
def test_another_image_size_interpolates_the_positions(saved: Path, name: str) -> None:
    sourced = load_source(f"hf:{saved / name}", image_size=48)
    assert sourced.image_size == (48, 48)
    try_forward(sourced, torch.device("cpu"))
    assert sourced.model(torch.zeros(2, 3, 48, 48)).last_hidden_state.shape == (2, 37, 16)


def test_without_a_processor_the_assumption_is_named(saved: Path) -> None:
    sourced = load_source(f"hf:{saved / 'mae'}")
    assert sourced.image_size == (32, 32)
    assert sourced.notes[0].startswith(
        "there is no image processor: images are prepared as 32×32 pixels with ImageNet's"
    )
    assert sourced.data_config["mean"] == (0.485, 0.456, 0.406)


def test_half_precision_weights_are_widened(saved: Path, tmp_path: Path) -> None:
    transformers.ViTModel.from_pretrained(saved / "vit").half().save_pretrained(tmp_path)
    assert next(load_source(f"hf:{tmp_path}").model.parameters()).dtype == torch.float32


def test_levels_of_loggers_are_left_as_they_were(saved: Path) -> None:
    logger = logging.getLogger("transformers")
    before = logger.level
    load_source(f"hf:{saved / 'vit'}")
    assert logger.level == before


class TestBadInput:
    def test_without_the_library(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "transformers", None)
        words = "hf: models need transformers; install it with: pip install 'nearsight[hf]'"
        assert refusal("hf:google/vit-base-patch16-224") == words

    def test_folders(self, tmp_path: Path, saved: Path) -> None:
        assert "has no config.json" in refusal(f"hf:{tmp_path}")
        assert "names no existing folder" in refusal(f"hf:{tmp_path / 'none'}")
        assert "names no existing folder" in refusal("hf:./none")
        assert "write hf:org/name or hf:FOLDER" in refusal("hf:")
        (tmp_path / "config.json").write_text('{"model_type": "vit-of-the-future"}')
        assert "could not be loaded" in refusal(f"hf:{tmp_path}")
        (tmp_path / "config.json").write_text("{")
        assert "could not be loaded" in refusal(f"hf:{tmp_path}")

    def test_the_hub_out_of_reach(self, monkeypatch: pytest.MonkeyPatch) -> None:
        hub = pytest.importorskip("huggingface_hub")
        monkeypatch.setattr(hub.constants, "HF_HUB_OFFLINE", True)
        assert "hf:nearsight/no-such-model could not be loaded: " in refusal("hf:nearsight/no-such-model")

    def test_a_pickle_is_not_read(self, saved: Path, tmp_path: Path) -> None:
        shutil.copytree(saved / "vit", tmp_path / "vit")
        (tmp_path / "vit" / "model.safetensors").unlink()
        torch.save({}, tmp_path / "vit" / "pytorch_model.bin")
        assert "safetensors" in refusal(f"hf:{tmp_path / 'vit'}")

    def test_code_of_a_repository_is_not_run(self, saved: Path, tmp_path: Path) -> None:
        folder = Path(shutil.copytree(saved / "vit", tmp_path / "vit"))
        config = json.loads((folder / "config.json").read_text())
        config |= {"model_type": "own", "auto_map": {"AutoConfig": "own.Config", "AutoModel": "own.Model"}}
        (folder / "config.json").write_text(json.dumps(config))
        (folder / "own.py").write_text("raise SystemExit('this must not run')")
        assert "could not be loaded" in refusal(f"hf:{folder}")

    def test_weights_that_are_missing_would_be_random(self, saved: Path, tmp_path: Path) -> None:
        folder = Path(shutil.copytree(saved / "vit", tmp_path / "vit"))
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
        words = refusal(f"hf:{folder}")
        assert "weights of ViTModel, which would be random: " in words

    def test_a_damaged_processor(self, saved: Path, tmp_path: Path) -> None:
        folder = Path(shutil.copytree(saved / "vit", tmp_path / "vit"))
        (folder / "preprocessor_config.json").write_text("{")
        assert "preprocessor_config.json cannot be used" in refusal(f"hf:{folder}")

    @pytest.mark.parametrize(
        ("name", "changes", "said"),
        [
            ("config.json", {"hidden_size": 8192}, "config.json asks for 539418672 weights, but the files beside it"),
            ("config.json", {"image_size": 10**8}, "weights, but the files beside it have"),
            ("config.json", {"num_hidden_layers": 10**9}, "num_hidden_layers 1000000000, but 1000 are the most"),
            ("preprocessor_config.json", {"size": {"height": "x", "width": 32}}, "invalid literal for int"),
            ("preprocessor_config.json", {"size": {"height": 10**9, "width": 32}}, "has 1 to 4096 pixels"),
            ("preprocessor_config.json", {"size": {"height": -5, "width": 32}}, "has 1 to 4096 pixels"),
            (
                "preprocessor_config.json",
                {"image_std": [0, 0, 0]},
                "images cannot be normalised by mean [0.4, ",
            ),
            ("preprocessor_config.json", {"image_mean": [1, 2]}, "images cannot be normalised by mean"),
            ("preprocessor_config.json", {"image_mean": None}, "cannot be used"),
            ("preprocessor_config.json", {"rescale_factor": 0}, "cannot be used"),
        ],
    )
    def test_numbers_that_no_model_has(
        self, saved: Path, tmp_path: Path, name: str, changes: dict[str, Any], said: str
    ) -> None:
        folder = Path(shutil.copytree(saved / "vit", tmp_path / "vit"))
        told = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps({**told, **changes}))
        assert said in refusal(f"hf:{folder}")

    def test_a_model_of_words(self, saved: Path) -> None:
        assert "is a BertModel, which takes no images" in refusal(f"hf:{saved / 'bert'}")

    def test_options_that_have_nothing_to_choose(self, saved: Path) -> None:
        assert "leave it out" in refusal(f"hf:{saved / 'vit'}", pretrained=True)
        assert "brings its own weights" in refusal(f"hf:{saved / 'vit'}", checkpoint=Path("x.pth"))
