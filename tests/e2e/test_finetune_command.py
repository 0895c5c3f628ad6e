"""`nearsight finetune`: a model of the zoo and a run, made local; before, after, and what is refused."""

import json
from pathlib import Path

import pytest
import torch

import nearsight
from nearsight.cli import main
from nearsight.errors import InputError
from nearsight.models import create_model
from nearsight.tensorfile import load_tensors

SMALL = (
    *("--data", "shapes", "--epochs", "1", "--num-train", "80", "--num-test", "40", "--num-images", "30"),
    *("--device", "cpu"),
)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_model_of_the_zoo_before_and_after(capsys: pytest.CaptureFixture[str]) -> None:
    call = ("finetune", "compact_vit.modern_cifar100", *SMALL, "--batch-size", "32", "--out", "out")
    assert main(call) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[1].split()[:2] == ["before", "–"]  # CIFAR's classes are others
    assert said[2].split()[0] == "after"
    assert said[-1] == "Page: out/report.html"
    page = Path("out/report.html").read_text(encoding="utf-8")
    assert 'id="finetuned"' in page
    assert all(title in page for title in ("linear classifier, %", "k-NN (k = 20), %", "most local head: MAD"))
    assert all(Path(f"out/{side}/heads.csv").exists() for side in ("before", "after"))
    assert main(("report", "out")) == 0
    capsys.readouterr()
    assert Path("out/report.html").read_text(encoding="utf-8") == page
    record = json.loads(Path("out/finetune.json").read_text(encoding="utf-8"))
    published = create_model("compact_vit.modern_cifar100", pretrained=True).state_dict()
    trained = load_tensors(Path("out/run/model.safetensors"))[0]
    alpha = trained["blocks.0.attn.gaug.log_alpha.bias"]
    assert float(alpha) == pytest.approx(-8, abs=0.2)  # after few steps
    for name in ("blocks.0.attn.qkv.weight", "pos_embed"):
        moved = (trained[name] - published[name].float()).abs().max()
        assert 0 < float(moved) < 0.05
    assert record["before"]["own"] is None
    assert record["before"]["alpha"] == pytest.approx(0.000335, abs=1e-5)
    assert all(0 <= record[side][score]["value"] <= 1 for side in ("before", "after") for score in ("knn", "linear"))
    assert record["after"]["own"]["num_images"] == 30


def test_a_run_and_an_abrupt_start(capsys: pytest.CaptureFixture[str]) -> None:
    small = ("--data.num-train", "80", "--data.num-test", "30", "--protocol.max-epochs", "1", "--num-measured", "6")
    model = ("--model.settings", "patch_size=8", "depth=2", "embed_dim=24", "num_heads=2")
    train = ("train", "vit-shapes", *model, *small, "--protocol.batch-size", "16", "--device", "cpu", "--out", "first")
    assert main(train) == 0
    for start in ("gentle", "abrupt"):
        call = ("finetune", "first", *SMALL, "--batch-size", "16", "--start", start, "--out", f"all/{start}", "--json")
        assert main(call) == 0
    record = json.loads(Path("all/abrupt/finetune.json").read_text(encoding="utf-8"))
    capsys.readouterr()
    assert main(call) == 0  # the run is there already
    again = json.loads(capsys.readouterr().out)
    assert {again[side]["knn"]["value"] for side in ("before", "after")} == {
        record[side]["knn"]["value"] for side in ("before", "after")
    }
    assert record["before"]["alpha"] > 0.5
    first = load_tensors(Path("first/model.safetensors"))[0]
    begun = json.loads(Path("all/gentle/finetune.json").read_text(encoding="utf-8"))
    assert begun["before"]["own"]["value"] >= 0  # it has the run's classifier
    alphas = {}
    for start in ("gentle", "abrupt"):
        trained = load_tensors(Path("all") / start / "run" / "model.safetensors")[0]
        alphas[start] = torch.nn.functional.softplus(trained["blocks.1.attn.gaug.log_alpha.bias"])
        assert (trained["norm.weight"] - first["norm.weight"]).abs().max() < 0.05
    assert float(alphas["gentle"]) < 0.01 < 0.5 < float(alphas["abrupt"])
    assert main(("report", "all")) == 0
    page = Path("all/report.html").read_text(encoding="utf-8")
    assert all(words in page for words in ("first: what was added", "gaug, abrupt", "gaug, gentle", "within seeds"))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["compact_vit.modern_cifar100"], "--data"),
        (["compact_vit.modern_cifar100", "--data", "shape"], "shapes"),
        (["vit_smal_patch16_224", "--data", "shapes"], "vit_small_patch16_224"),
        (["compact_vit.modern_cifar100", "--data", "shapes", "--epochs", "0"], "epochs is 0"),
        (["vit_tiny_patch16_224", "--data", "shapes", "--settings", "depth=2"], "give a checkpoint"),
        ([], "MODEL"),
    ],
)
def test_mistakes_are_one_line_and_leave_nothing(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["finetune", *arguments, "--device", "cpu"]) == 2
    complaint = capsys.readouterr().err
    assert said in complaint
    assert len([line for line in complaint.splitlines() if line.startswith("nearsight: ")]) == 1
    assert not Path("runs").exists()


def test_few_lines_in_python(tmp_path: Path) -> None:
    small = {"epochs": 1, "num_train": 80, "num_test": 40, "num_images": 30, "batch_size": 16}
    found = nearsight.finetune(
        "locat_compact_vit.modern_cifar100", data="shapes", out=tmp_path / "run", add="nothing", ema=0.5, **small
    )
    published = create_model("locat_compact_vit.modern_cifar100", pretrained=True)
    before = found.before.model.state_dict()
    assert torch.equal(
        before["blocks.2.attn.gaug.log_var.weight"], published.state_dict()["blocks.2.attn.gaug.log_var.weight"]
    )
    assert found.run.is_complete
    assert found.model is found.after.model
    assert found.before.alpha == pytest.approx(found.after.alpha, rel=0.05)
    assert found.config.protocol.ema == 0.5
    assert found.config.protocol.locality_lr == 1
    assert 0 <= found.after.linear.value <= 1
    with pytest.raises(InputError, match="is a run, which has its settings"):
        nearsight.finetune(str(found.run.path), data="shapes", out=tmp_path / "other", settings=("depth=2",))
    assert not (tmp_path / "other").exists()
