"""Models of timm in the trainer: S2's backbones by name, what they start from, and what is refused."""

import dataclasses
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from timm.layers import resample_abs_pos_embed, resize_rel_pos_bias_table
from torch import nn

from nearsight.cli import main
from nearsight.commands.train import config_of
from nearsight.data.loading import dataset_spec
from nearsight.errors import InputError
from nearsight.lens import measure
from nearsight.lens.running import remembering_surveys
from nearsight.locat import add_locat
from nearsight.models import ModelConfig, create_model, load_model
from nearsight.models.factory import timms_settings
from nearsight.models.sources import OWN_MODELS
from nearsight.tensorfile import load_tensors, save_tensors
from nearsight.train import DataConfig, Protocol, RunConfig, RunFolder, load_data, train_runs
from nearsight.train.dropping import PathDropping
from nearsight.train.engine import Stack, initial_model
from nearsight.train.initial import untrained_model
from nearsight.train.recipes import RUNS, command_of
from nearsight.train.stacked import stack_weights, stacked_forward, verify_stacking, weightless

_VIT = ("patch_size=8", "depth=2", "embed_dim=24", "num_heads=2")
_SWIN = ("patch_size=2", "window_size=4", "embed_dim=12", "depths=(1,2)", "num_heads=(1,2)")
BACKBONES = {
    "vit_tiny_patch16_224": _VIT,
    "vit_tiny_patch16_reg4_224": _VIT,
    "vit_tiny_patch16_rope_mixed_224": _VIT,
    "swin_tiny_patch4_window7_224": _SWIN,
    "jumbo_vit_tiny_patch16_224": (*_VIT, "num_jumbo=2"),
}
"""Name → settings that make it small."""


def run(name: str = "vit_tiny_patch16_224", *, seed: int = 0, **model: object) -> RunConfig:
    settings = BACKBONES.get(name, ())
    return RunConfig(
        model=ModelConfig(name=name, **{"settings": settings, **model}),  # type: ignore[arg-type]
        data=DataConfig(name="shapes", num_train=80, num_test=20),
        protocol=Protocol(max_epochs=2, warmup_epochs=1, batch_size=16, patience=2, drop_path=0.2),
        seed=seed,
        num_measured=6,
    )


@pytest.mark.parametrize("local", [False, True])
@pytest.mark.parametrize("name", BACKBONES)
def test_backbones_train_are_saved_and_measured_and_do_not_notice_their_neighbours(
    name: str, local: bool, tmp_path: Path
) -> None:
    configs = [run(name, seed=seed, gaug=local, prr=local) for seed in range(2)]
    folders = [RunFolder(tmp_path / str(seed)) for seed in range(2)]
    train_runs(configs, folders)
    assert folders[0].read_config() == configs[0]
    model = load_model(folders[0].model)
    assert any("gaug" in parameter for parameter, _ in model.named_parameters()) == local
    assert folders[0].read_result()["min_mad"] > 0
    alone = RunFolder(tmp_path / "alone")
    train_runs(configs[1:], [alone])
    again, beside = load_tensors(alone.model)[0], load_tensors(folders[1].model)[0]
    for weight, expected in again.items():
        torch.testing.assert_close(beside[weight], expected, rtol=1e-4, atol=1e-5)


def test_paths_are_dropped_as_in_timm() -> None:
    """The later the block, the more often, over all stages."""
    config = run("swin_tiny_patch4_window7_224")
    stack = Stack.start([config], load_data(config.data), torch.device("cpu"))
    (dropping,) = stack.dropping
    assert isinstance(dropping, PathDropping)
    places = [name.removesuffix(".factor") for name in dropping.buffers]
    own = create_model(config.model.name, img_size=32, drop_path_rate=0.2, **timms_settings(_SWIN))
    rates = {name: getattr(module, "drop_prob", 0.0) for name, module in own.named_modules() if "drop_path" in name}
    assert set(places) == set(rates)
    for place, kept in zip(places, dropping.keep_Kn[0].tolist(), strict=True):
        assert kept == pytest.approx(1 - rates[place])


@pytest.mark.parametrize("local", [False, True])
@pytest.mark.parametrize("name", BACKBONES)
def test_gradients_in_a_stack_are_those_of_each_model(name: str, local: bool) -> None:
    config = run(name, gaug=local, prr=local).model
    torch.manual_seed(0)
    models = [config.build((32, 32), 10) for _ in range(2)]
    skeleton = weightless(models[0])
    verify_stacking(skeleton, models, (32, 32))
    weights = stack_weights([dict(model.named_parameters()) for model in models], torch.device("cpu"))
    weights = {name: weight.requires_grad_() for name, weight in weights.items()}
    images, upstream = torch.randn(2, 3, 3, 32, 32), torch.randn(2, 3, 10)
    (stacked_forward(skeleton, weights, images) * upstream).sum().backward()
    for cell, model in enumerate(models):
        (model.train(skeleton.training)(images[cell]) * upstream[cell]).sum().backward()
        for weight, parameter in model.named_parameters():
            gradient = weights[weight].grad
            if parameter.grad is None:
                assert gradient is None or not gradient[cell].any()
            else:
                assert gradient is not None
                torch.testing.assert_close(gradient[cell], parameter.grad, rtol=1e-3, atol=1e-4)


def test_weights_to_start_from(tmp_path: Path) -> None:
    first = run()
    folder = RunFolder(tmp_path / "first")
    train_runs([first], [folder])
    trained = load_tensors(folder.model)[0]
    dataset = load_data(first.data)
    save_tensors(tmp_path / "weights.safetensors", trained, {})
    for source in (folder.path, folder.model, tmp_path / "weights.safetensors"):
        start = initial_model(dataclasses.replace(first, weights=str(source), seed=3), dataset)
        assert all(torch.equal(weight, trained[name]) for name, weight in start.state_dict().items())
    local = dataclasses.replace(run(gaug=True, locat_gentle=True), weights=str(folder.path))
    start = initial_model(local, dataset)
    assert torch.equal(start.state_dict()["blocks.1.mlp.fc1.weight"], trained["blocks.1.mlp.fc1.weight"])
    images = torch.randn(4, 3, 32, 32)
    with torch.no_grad():
        torch.testing.assert_close(start.eval()(images), load_model(folder.model)(images), rtol=1e-3, atol=1e-3)
    assert len({first.identity, local.identity, dataclasses.replace(first, weights=str(folder.path)).identity}) == 3
    train_runs([local], [RunFolder(tmp_path / "second")])
    assert RunFolder(tmp_path / "second").read_config().weights == str(folder.path)


def test_features_before_and_after(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """init:RUN is what a run began with, not fresh weights."""
    first, second = RunFolder(tmp_path / "first"), RunFolder(tmp_path / "second")
    train_runs([run()], [first])
    train_runs([dataclasses.replace(run(seed=5), weights=str(first.path))], [second])
    given = ("--data", "shapes", "--num-train", "40", "--num-test", "20", "--json", "--device", "cpu", "--ks", "5")
    found = {}
    for model in (str(first.path), f"init:{second.path}", f"init:{first.path}"):
        assert main(["probe", "knn", model, *given, "--cache-dir", str(tmp_path / "cache")]) == 0
        found[model] = json.loads(capsys.readouterr().out)
    began, after, fresh = (untrained_model(one, (32, 32), 10) for one in (second.read_config(), run(), run(seed=5)))
    assert torch.equal(began.state_dict()["norm.weight"], load_tensors(first.model)[0]["norm.weight"])
    assert not torch.equal(after.state_dict()["norm.weight"], began.state_dict()["norm.weight"])
    assert not torch.equal(fresh.state_dict()["pos_embed"], began.state_dict()["pos_embed"])
    assert len(found) == 3


def test_published_weights_for_other_classes_and_another_grid() -> None:
    """Those of the zoo, which need no network."""
    data = DataConfig(name="shapes", num_train=80, num_test=20, image_size=64)
    config = RunConfig(model=ModelConfig(), data=data, weights="compact_vit.modern_cifar100")
    model = initial_model(config, load_data(data))
    published = create_model("compact_vit.modern_cifar100", pretrained=True)
    own, theirs = model.state_dict(), published.state_dict()
    assert torch.equal(own["blocks.3.attn.qkv.weight"], theirs["blocks.3.attn.qkv.weight"])
    assert own["pos_embed"].shape[1] == 257
    assert own["head.weight"].shape[0] == 10


@pytest.mark.parametrize(
    "name", ["vit_tiny_patch16_224", "vit_tiny_patch16_rope_mixed_224", "swin_tiny_patch4_window7_224"]
)
def test_a_gentle_start_computes_what_the_model_did_and_learns(name: str) -> None:
    torch.manual_seed(0)
    model = create_model(name, img_size=32, num_classes=5, **timms_settings(BACKBONES[name])).eval()
    images, labels = torch.randn(8, 3, 32, 32), torch.arange(8) % 5
    with torch.no_grad():
        before = model(images)
    add_locat(model, prr=False, gentle=True)
    with torch.no_grad():
        assert (model(images) - before).abs().max() < 1e-3 * before.abs().max()
    heads = [module for name, module in model.named_modules() if name.endswith("log_alpha")]
    biases = [float(head.bias.detach()) for head in heads if isinstance(head, nn.Linear)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(10):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
    assert all(float(head.bias.detach()) != bias for head, bias in zip(heads, biases, strict=True))


def test_a_gentle_start_is_about_a_learned_strength() -> None:
    with pytest.raises(InputError, match="gentle=True is about a learned α"):
        add_locat(create_model("vit_tiny_patch16_224"), scale="none", gentle=True)


@pytest.mark.parametrize("local", [False, True])
@pytest.mark.parametrize("name", BACKBONES)
def test_weights_for_another_grid_and_other_classes(name: str, local: bool, tmp_path: Path) -> None:
    """Of twice the side, for Swin with windows twice as large, too; against timm's own resampling."""
    torch.manual_seed(0)
    source = run(name, gaug=local, prr=local).model.build((32, 32), 7)
    with torch.no_grad():
        for weight in source.parameters():  # tables and positions that differ
            weight += 0.1 * torch.randn_like(weight)
    save_tensors(tmp_path / "weights.safetensors", source.state_dict(), {})
    data = DataConfig(name="shapes", num_train=80, num_test=20, image_size=64)
    settings = tuple(text.replace("window_size=4", "window_size=8") for text in BACKBONES[name])
    config = dataclasses.replace(
        run(name, gaug=local, prr=local, settings=settings), data=data, weights=str(tmp_path / "weights.safetensors")
    )
    model = initial_model(config, load_data(data))
    own, theirs = model.state_dict(), source.state_dict()
    fresh = initial_model(dataclasses.replace(config, weights=None), load_data(data)).state_dict()
    resampled = set()
    for weight, found in own.items():
        if weight.startswith("head."):
            assert torch.equal(found, fresh[weight])
        elif found.shape == theirs[weight].shape:
            assert torch.equal(found, theirs[weight]), weight
        elif weight == "pos_embed":
            prefix = 0 if getattr(source, "no_embed_class", False) else 1
            expected = resample_abs_pos_embed(theirs[weight], new_size=(8, 8), num_prefix_tokens=prefix)
            torch.testing.assert_close(found, expected)
            resampled.add(weight)
        else:
            expected = resize_rel_pos_bias_table(theirs[weight], new_window_size=(8, 8), new_bias_shape=found.shape)
            torch.testing.assert_close(found, expected)
            resampled.add(weight)
    if "rope" in name:  # frequencies are the same on every grid
        assert not resampled
        assert any("freqs" in weight for weight in own)
    elif "swin" in name:
        assert resampled == {weight for weight in own if weight.endswith("relative_position_bias_table")}
    else:
        assert resampled == {"pos_embed"}
    assert model(torch.randn(1, 3, 64, 64)).shape == (1, 10)


def test_images_normalised_otherwise_are_seen_as_before(tmp_path: Path) -> None:
    """Of a run on another data set, whose means and deviations are others."""
    cifar = dataset_spec("cifar100")
    first = run()
    folder = RunFolder(tmp_path / "first")
    train_runs([first], [folder])
    described = json.loads((folder.path / "config.json").read_text())
    described["config"]["data"]["name"] = "cifar100"
    (folder.path / "config.json").write_text(json.dumps(described))
    dataset = load_data(first.data)
    start = initial_model(dataclasses.replace(first, weights=str(folder.path)), dataset).eval()
    grey = torch.rand(5, 3, 32, 32)

    def normalised(mean: tuple[float, ...], std: tuple[float, ...]) -> torch.Tensor:
        return (grey - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(std).view(3, 1, 1)

    with torch.no_grad():
        expected = load_model(folder.model)(normalised(cifar.mean, cifar.std))
        torch.testing.assert_close(start(normalised(dataset.mean, dataset.std)), expected, rtol=1e-4, atol=1e-5)


def test_weights_of_a_file_that_knew_images_as_the_models_name_has_them(tmp_path: Path) -> None:
    config = run()
    source = config.model.build((32, 32), 10).eval()
    save_tensors(tmp_path / "weights.safetensors", source.state_dict(), {})
    dataset = load_data(config.data)
    known = dataclasses.replace(config, weights=str(tmp_path / "weights.safetensors"), weights_normalized="model")
    assert known.identity != dataclasses.replace(known, weights_normalized="data").identity
    grey = torch.rand(5, 3, 32, 32)
    mean, std = (torch.tensor(each).view(3, 1, 1) for each in (dataset.mean, dataset.std))
    with torch.no_grad():  # timm's mean and deviation for this name are 0.5
        seen = initial_model(known, dataset).eval()((grey - mean) / std)
        torch.testing.assert_close(seen, source((grey - 0.5) / 0.5), rtol=1e-4, atol=1e-5)
    with pytest.raises(InputError, match="weights of a file for a model of timm"):
        dataclasses.replace(config, weights_normalized="model")


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ({"name": "vit_smal_patch16_224"}, "did you mean 'vit_small_patch16_224'"),
        ({"name": "vit_tiny_patch16_224", "width": 96}, "--model.settings patch_size=8"),
        ({"name": "vit_tiny_patch16_224", "settings": ("patch_size",)}, "'patch_size' is no setting"),
        ({"name": "vit_tiny_patch16_224", "settings": ("img_size=32",)}, "--data.image-size"),
        ({"settings": ("depth=2",)}, "compact_vit has no such setting"),
        ({"name": "resnet18", "gaug": True}, "'locat_resnet18' is not a model"),
        ({"name": "vit_tiny_patch16_224", "settings": ("dept=2",)}, "timm cannot build vit_tiny_patch16_224"),
    ],
)
def test_what_cannot_be_is_said_in_one_line(model: dict[str, object], said: str) -> None:
    with pytest.raises(InputError, match=said) as error:
        ModelConfig(**model).build((32, 32), 10)  # type: ignore[arg-type]
    assert "\n" not in str(error.value)


def test_a_file_that_asks_for_an_endless_model_is_refused(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    train_runs([run()], [folder])
    tensors, described = load_tensors(folder.model)
    described["model"]["settings"] = ["patch_size=8", "depth=1000000000"]
    save_tensors(tmp_path / "endless.safetensors", tensors, described)
    with pytest.raises(InputError):
        load_model(tmp_path / "endless.safetensors")


@pytest.mark.parametrize("name", ["vit-shapes", "vit-tiny-imagenet"])
def test_recipes_and_their_commands(name: str) -> None:
    config = RUNS[name]("locat")
    assert config.model.kind == "timm"
    assert command_of(config) == f"nearsight train {name} --protocol locat"
    swin = ModelConfig(name="swin_tiny_patch4_window7_224", settings=_SWIN, gaug=True)
    said = command_of(dataclasses.replace(config, model=swin))
    assert said is not None
    assert "--model.name swin_tiny_patch4_window7_224" in said
    assert "--model.gaug" in said
    said = command_of(dataclasses.replace(config, weights="pretrained"))
    assert said == f"nearsight train {name} --protocol locat --init pretrained"
    assert config_of(said.split()[2:]).weights == "pretrained"


def test_every_row_of_table_1_is_a_command() -> None:
    """As docs/locat.md has it: it parses, builds the row's model, and is what `command_of` says of it."""
    text = (Path(__file__).parents[2] / "docs" / "locat.md").read_text(encoding="utf-8")
    commands = [
        line for line in text.splitlines() if line.startswith("nearsight train vit-imagenet --protocol locat --")
    ]
    rows = [line.split("|") for line in text.splitlines() if line.startswith("| 1 |")]
    counted = {row[place].strip().strip("`"): row[place + 1].strip() for row in rows for place in (3, 5)}
    found = {}
    for command in commands:
        config = config_of(command.split()[2:])
        with torch.device("meta"):
            model = config.model.build((224, 224), 1000)
        local = config.model.gaug and config.model.prr
        found[f"locat_{config.model.name}" if local else config.model.name] = sum(
            parameter.numel() for parameter in model.parameters()
        )
        assert config.protocol.drop_path == (0.4 if "base" in config.model.name else 0.1)
        assert (config.protocol.teacher is not None) == ("jumbo" in config.model.name)
    assert len(commands) == 20
    assert {name: f"{number:,}" for name, number in found.items()} == counted


def test_any_model_by_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = ("--data.num-train", "80", "--data.num-test", "20", "--protocol.max-epochs", "1", "--num-measured", "6")
    model = ("--model.name", "swin_tiny_patch4_window7_224", "--model.gaug", "--model.settings", *_SWIN)
    arguments = ("train", "vit-shapes", *model, *small, "--protocol.batch-size", "16", "--device", "cpu")
    assert main([*arguments, "--out", str(tmp_path / "run")]) == 0
    assert "most local head" in capsys.readouterr().out
    assert main([*arguments, "--init", str(tmp_path / "nothing"), "--out", str(tmp_path / "other")]) == 2
    assert "nothing" in capsys.readouterr().err
    assert not (tmp_path / "other").exists()


OWN_MODEL = """
from torch import nn

class Tiny(nn.Module):
    def __init__(self, num_classes, width=16):
        super().__init__()
        self.patches = nn.Conv2d(3, width, 8, 8)
        self.block = nn.TransformerEncoderLayer(width, 2, 32, dropout=0.0, batch_first=True)
        self.classifier = nn.Linear(width, num_classes)

    def forward(self, images):
        return self.classifier(self.block(self.patches(images).flatten(2).transpose(1, 2)).mean(1))

a_number = 1

def without_classes():
    return Tiny(10)

def no_model(num_classes):
    return a_number
"""


@pytest.fixture
def own_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(OWN_MODELS, "")
    Path("own_models.py").write_text(OWN_MODEL)
    yield
    sys.modules.pop("own_models", None)


@pytest.mark.usefixtures("own_models")
def test_a_model_of_the_users_own_code(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """It is trained and measured where its name was typed; a run's config alone imports nothing."""
    small = ("--data.num-train", "80", "--data.num-test", "20", "--protocol.max-epochs", "1", "--num-measured", "6")
    asked = ("--model.name", "own_models:Tiny", "--model.settings", "width=24", "--model.locality", "gaug")
    arguments = ["train", "vit-shapes", *asked, *small, "--protocol.batch-size", "16", "--device", "cpu"]
    assert main([*arguments, "--out", "run"]) == 0
    assert "most local head" in capsys.readouterr().out
    weights = load_tensors(Path("run/model.safetensors"))[0]
    assert weights["patches.weight"].shape[0] == 24
    assert any("gaug" in name for name in weights)
    config = RunFolder(Path("run")).read_config()
    assert command_of(config) is not None
    monkeypatch.setenv(OWN_MODELS, "")
    del sys.modules["own_models"]
    assert main(["measure", "run", "--out", "measured"]) == 2
    assert f"write {OWN_MODELS}=own_models:Tiny in front of the command" in capsys.readouterr().err
    assert "own_models" not in sys.modules
    monkeypatch.setenv(OWN_MODELS, "own_models:Tiny")
    with remembering_surveys():  # as commands do; making it local is not to leave its survey behind
        assert measure(load_model(Path("run/model.safetensors")), torch.randn(2, 3, 32, 32)).mad.shape == (1, 2)
    train_runs([config, dataclasses.replace(config, seed=1)], [RunFolder(Path(name)) for name in ("a", "b")])
    for name, weight in load_tensors(Path("a/model.safetensors"))[0].items():  # beside another
        if not name.endswith("in_proj_bias"):  # that of keys has no gradient, of whose rounding Adam makes steps
            torch.testing.assert_close(weight, weights[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("own_models:none", "has no 'none'"),
        ("own_models:a_number", "is an object of type int"),
        ("own_models:without_classes", "your code cannot build own_models:without_classes for images of"),
        ("own_models:no_model", "returned an object of type int"),
        ("no_such_models:vit", "there is no module no_such_models"),
        ("hf:org/name", "nor module:function"),
    ],
)
@pytest.mark.usefixtures("own_models")
def test_own_code_that_gives_no_model(name: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "vit-shapes", "--model.name", name, "--device", "cpu", "--out", "run"]) == 2
    assert said in capsys.readouterr().err
    assert not Path("run").exists()
