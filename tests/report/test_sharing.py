"""Runs as others get them: in a folder and through a Hub that is a folder here, to timm, to nearsight and to people."""

import json
import re
import shlex
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
import timm
import torch
from huggingface_hub import ModelCard
from huggingface_hub.errors import LocalEntryNotFoundError

import nearsight
from nearsight import HubModel, push_to_hub
from nearsight.cli import main
from nearsight.commands.train import config_of
from nearsight.errors import InputError
from nearsight.models import ModelConfig, load_model, load_source
from nearsight.models.zoo import folder as zoo_folder
from nearsight.report import sharing
from nearsight.train import RunFolder, train_run
from nearsight.train.config import DataConfig, Protocol, RunConfig

ZOO = "locat_compact_vit.modern_cifar100"
FILES = {
    *("README.md", "config.json", "model.safetensors", "report.html", "heads.csv", "layers.csv", "history.csv"),
    *("result.json", "provenance.json", "checksums.json"),
}


def small_run(folder: Path, **changes: Any) -> Path:
    config = RunConfig(
        model=ModelConfig(depth=2, width=24, num_heads=2, mlp_width=24, **changes),
        data=DataConfig(name="shapes", num_train=60, num_test=20),
        protocol=Protocol(max_epochs=1, warmup_epochs=0, batch_size=16),
        seed=3,
        num_measured=20,
    )
    train_run(config, folder, device=torch.device("cpu"))
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_run(tmp_path_factory.mktemp("runs") / "small", gaug=True, prr=True, locat_kernel="laplace")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A Hub in a folder: whatever is uploaded there can be downloaded."""
    root = tmp_path / "hub"

    class Api:
        def __init__(self, token: str | None = None, **_: Any) -> None: ...

        def create_repo(self, repo_id: str, *, private: bool | None, exist_ok: bool) -> SimpleNamespace:
            (root / repo_id).mkdir(parents=True)
            (root / repo_id / ".private").write_text(str(private))
            return SimpleNamespace(repo_id=repo_id)

        def upload_folder(self, *, repo_id: str, folder_path: Path, **_: Any) -> str:
            shutil.copytree(folder_path, root / repo_id, dirs_exist_ok=True)
            return f"https://huggingface.co/{repo_id}/commit/1"

    def download(repo_id: str, filename: str, **_: Any) -> str:
        if not (root / repo_id / filename).is_file():
            raise LocalEntryNotFoundError(f"no {filename} in {repo_id}")
        return str(root / repo_id / filename)

    monkeypatch.setattr("huggingface_hub.hub_mixin.HfApi", Api)
    for place in (huggingface_hub, "huggingface_hub.hub_mixin", "timm.models._hub", sharing):
        name = (f"{place}.hf_hub_download",) if isinstance(place, str) else (place, "hf_hub_download")
        monkeypatch.setattr(*name, download)
    return root


def outputs(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        result: torch.Tensor = model.eval()(nearsight.sample_images()[0][:4])
    return result


def read_front_matter(folder: Path) -> Any:
    return ModelCard.load(folder / "README.md").data


class TestFolder:
    def test_three_readers_find_the_same_model(self, run: Path, tmp_path: Path) -> None:
        shared, expected = tmp_path / "shared", outputs(load_model(run / "model.safetensors"))
        HubModel(run).save_pretrained(shared)
        assert {path.name for path in shared.iterdir()} - {"heads.npz"} == FILES
        assert torch.equal(outputs(timm.create_model(f"local-dir:{shared}", pretrained=True)), expected)
        assert torch.equal(outputs(HubModel.from_pretrained(shared).model), expected)
        assert torch.equal(outputs(load_source(f"local-dir:{shared}").model), expected)
        config = load_source(f"local-dir:{shared}").data_config
        assert tuple(config["mean"]) == (0.438, 0.438, 0.438)  # of the data that the run was trained on

    def test_it_is_the_same_run_still(self, run: Path, tmp_path: Path) -> None:
        HubModel(run).save_pretrained(tmp_path / "shared")
        before, after = RunFolder(run), RunFolder(tmp_path / "shared")
        assert after.is_complete
        assert after.read_config() == before.read_config()
        assert after.read_result() == before.read_result()
        assert after.read_provenance() == before.read_provenance()
        (tmp_path / "shared" / "result.json").write_text(json.dumps({"test_acc": 1.0}))
        with pytest.raises(InputError, match=r"result\.json is damaged, or was changed"):
            after.read_result()

    def test_the_card_has_the_numbers_of_the_run(self, run: Path, tmp_path: Path) -> None:
        HubModel(run, license="mit").save_pretrained(tmp_path / "shared")
        text = (tmp_path / "shared" / "README.md").read_text(encoding="utf-8")
        result, data = RunFolder(run).read_result(), read_front_matter(tmp_path / "shared")
        assert (data.license, data.library_name, data.metrics) == ("mit", "nearsight", ["accuracy"])
        assert {"timm", "nearsight"} <= set(data.tags)
        assert data.datasets is None  # shapes are drawn, not published
        assert data.eval_results[0].metric_value == pytest.approx(result["test_acc"])
        assert f"| test accuracy | {100 * result['test_acc']:.2f} % |" in text
        assert f": MAD {result['min_mad']:.4f} |" in text
        assert "| seed | 3 |" in text
        assert len(re.findall(r"^\| [01] \|(?: 0\.\d{3} \|){4}$", text, re.MULTILINE)) == 2
        (command,) = re.findall(r"^nearsight train (.*)$", text, re.MULTILINE)
        assert config_of(shlex.split(command)) == RunFolder(run).read_config()
        config = json.loads((tmp_path / "shared" / "config.json").read_text())
        assert config["pretrained_cfg"]["license"] == "mit"

    def test_the_zoo(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        target = tmp_path / "shared"
        assert main(["share", ZOO, str(target), "--json"]) == 0
        printed = json.loads(capsys.readouterr().out)
        assert {Path(path).name for path in printed["files"]} == FILES
        text, data = (target / "README.md").read_text(encoding="utf-8"), read_front_matter(target)
        assert data.datasets == ["cifar100"]
        assert "| test accuracy | 73.43 % |" in text
        assert "| most local head | layer 1, head 7: MAD 0.0922 |" in text
        assert "| own-patch heads | 0 of 64 |" in text
        assert "Weights are stored as float16" in text
        assert "NVIDIA H200" in text
        expected = outputs(timm.create_model(ZOO, pretrained=True))
        assert torch.equal(outputs(timm.create_model(f"local-dir:{target}", pretrained=True)), expected)

    def test_again_replaces_and_another_is_refused(self, run: Path, tmp_path: Path) -> None:
        target = tmp_path / "shared"
        HubModel(run).save_pretrained(target)
        (target / "README.md").write_text("mine")
        HubModel(run).save_pretrained(target)
        assert "| test accuracy |" in (target / "README.md").read_text(encoding="utf-8")
        before = (target / "config.json").read_text()
        with pytest.raises(InputError, match="holds another model"):
            HubModel(ZOO).save_pretrained(target)
        assert (target / "config.json").read_text() == before

    def test_a_network_that_timm_cannot_build_has_its_own_way(self, tmp_path: Path) -> None:
        run = small_run(tmp_path / "run", shuffled_tiles=2)
        HubModel(run).save_pretrained(tmp_path / "shared")
        assert "pretrained_cfg" not in json.loads((tmp_path / "shared" / "config.json").read_text())
        text = (tmp_path / "shared" / "README.md").read_text(encoding="utf-8")
        assert 'HubModel.from_pretrained("shared").model' in text
        assert "timm.create_model" not in text
        again = HubModel.from_pretrained(tmp_path / "shared").model
        assert torch.equal(outputs(again), outputs(load_model(run / "model.safetensors")))


class TestModels:
    def test_a_measured_model_of_timm(self, tmp_path: Path) -> None:
        torch.manual_seed(0)
        model = nearsight.create_model("locat_compact_vit", depth=2, embed_dim=24, num_heads=2, kernel="inverse")
        table = nearsight.measure(model, nearsight.sample_images()[0][:5])
        HubModel(model, table=table).save_pretrained(tmp_path / "shared")
        assert torch.equal(outputs(HubModel.from_pretrained(tmp_path / "shared").model), outputs(model))
        text = (tmp_path / "shared" / "README.md").read_text(encoding="utf-8")
        assert f": MAD {table.mad.min():.4f} |" in text
        assert "| measured on | 5 images |" in text
        assert "test accuracy" not in text
        assert (tmp_path / "shared" / "report.html").exists()
        assert len((tmp_path / "shared" / "heads.csv").read_text().splitlines()) == 5

    def test_one_that_was_not_measured(self, tmp_path: Path) -> None:
        HubModel(nearsight.create_model("compact_vit", depth=1)).save_pretrained(tmp_path / "shared")
        assert {path.name for path in (tmp_path / "shared").iterdir()} == {
            "README.md",
            "config.json",
            "model.safetensors",
        }

    def test_one_whose_name_is_not_the_whole_of_it(self, tmp_path: Path) -> None:
        model = nearsight.add_locat(nearsight.create_model("compact_vit", depth=1))
        with pytest.raises(InputError, match="timm cannot build this model again"):
            HubModel(model).save_pretrained(tmp_path / "shared")
        assert list((tmp_path / "shared").iterdir()) == []


class TestHub:
    def test_pushed_and_loaded(self, run: Path, hub: Path) -> None:
        url = push_to_hub(run, "org/local-vit", private=True)
        assert url == "https://huggingface.co/org/local-vit/commit/1"
        assert (hub / "org/local-vit/.private").read_text() == "True"
        expected = outputs(load_model(run / "model.safetensors"))
        shared = HubModel.from_pretrained("org/local-vit")
        assert torch.equal(outputs(shared.model), expected)
        assert shared.run is not None
        assert shared.run.read_config().seed == 3
        assert torch.equal(outputs(timm.create_model("hf-hub:org/local-vit", pretrained=True)), expected)
        text = (hub / "org/local-vit/README.md").read_text(encoding="utf-8")
        assert 'timm.create_model("hf-hub:org/local-vit", pretrained=True)' in text

    def test_measured_by_its_name(self, hub: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["share", "compact_vit.modern_cifar100", "hf-hub:org/modern"]) == 0
        assert capsys.readouterr().out == "Pushed: https://huggingface.co/org/modern/commit/1\n"
        arguments = ["hf-hub:org/modern", "--images", "cifar100-sample", "--num-images", "9"]
        assert main(["measure", *arguments, "--out", str(tmp_path / "out"), "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["label"] == "hf-hub:org/modern"
        assert min(row["mad"] for row in found["heads"]) < 0.01

    def test_a_config_that_asks_for_too_much(self, hub: Path) -> None:
        push_to_hub("compact_vit.modern_cifar100", "org/huge")
        path = hub / "org/huge/config.json"
        config = json.loads(path.read_text())
        for changes, words in (({"depth": 10**9}, "1000 are the most"), ({"embed_dim": 2**20}, "asks for ")):
            path.write_text(json.dumps({**config, "model_args": {**config["model_args"], **changes}}))
            with pytest.raises(InputError, match=words):
                load_source("hf-hub:org/huge")

    def test_without_hub_or_name(self, run: Path, hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("org/nothing", "not a name"):
            with pytest.raises(InputError, match=f"{name} could not be loaded"):
                HubModel.from_pretrained(name)

        def refused(*_: Any, **__: Any) -> None:
            raise ConnectionError("no route to the hub")

        monkeypatch.setattr("huggingface_hub.hub_mixin.HfApi", refused)
        with pytest.raises(
            InputError, match=r"org/x could not be pushed: no route to the hub; check .* `hf auth login`"
        ):
            push_to_hub(run, "org/x")

    def test_damaged_weights_are_refused(self, run: Path, hub: Path) -> None:
        push_to_hub(run, "org/damaged")
        path = hub / "org/damaged/model.safetensors"
        content = bytearray(path.read_bytes())
        content[-5] ^= 1
        path.write_bytes(content)
        with pytest.raises(InputError, match="is damaged"):
            _ = HubModel.from_pretrained("org/damaged").model


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["no-such-run", "out"], "no-such-run is not a complete run folder: config.json is missing"),
        ([str(zoo_folder(ZOO)), str(zoo_folder(ZOO))], "is the run itself; share it in another folder"),
        ([ZOO], "folder|hf-hub:org/name"),
    ],
)
def test_mistakes(
    arguments: list[str],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["share", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert words.lower() in line.lower()
    assert list(tmp_path.iterdir()) == []
