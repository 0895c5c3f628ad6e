"""The models that come with the package: by timm, by nearsight and by the command they are the same, and their cards,
tables and weights agree."""

import csv
import json
import re
import shlex
from pathlib import Path

import pytest
import timm
import torch
from PIL import Image
from timm.data import create_transform, resolve_data_config
from torch import nn

import nearsight
from nearsight.cli import main
from nearsight.commands.train import config_of
from nearsight.data.cifar100_sample import FILE
from nearsight.metrics import uniform_attention_distance
from nearsight.models import load_model, load_source
from nearsight.models.zoo import CARD, MODELS, folder
from nearsight.train import RunFolder

CORRECT = {
    "compact_vit.baseline_cifar100": 106,
    "compact_vit.modern_cifar100": 134,
    "locat_compact_vit.modern_cifar100": 145,
}
"""Of the 200 sample images."""
RUNS = {row["run"]: row for row in csv.DictReader((CARD.parent / "runs.csv").open())}
each = pytest.mark.parametrize("name", MODELS)


def chosen(name: str) -> dict[str, str]:
    """The row of runs.csv of a model's run."""
    return RUNS[RunFolder(folder(name)).read_config().identity]


def correct(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> int:
    with torch.no_grad():
        return int((model.eval()(images).argmax(1) == labels).sum())


def test_timm_lists_them() -> None:
    assert timm.list_pretrained("*compact*") == sorted(MODELS)


@each
def test_accuracy_is_the_same_through_timm_and_through_nearsight(name: str) -> None:
    model = timm.create_model(name, pretrained=True)
    transform = create_transform(**resolve_data_config(model=model), is_training=False)
    with Image.open(FILE) as sheet:
        corners = [(left, top) for top in range(0, sheet.height, 32) for left in range(0, sheet.width, 32)]
        prepared = [transform(sheet.convert("RGB").crop((left, top, left + 32, top + 32))) for left, top in corners]
    images, labels = nearsight.sample_images()
    assert torch.stack(prepared).equal(images)
    assert correct(model, torch.stack(prepared), labels) == CORRECT[name]
    assert correct(load_model(folder(name) / "model.safetensors"), images, labels) == CORRECT[name]
    assert correct(nearsight.create_model(name, pretrained=True), images, labels) == CORRECT[name]
    # The sample is 200 of the 10,000 images; three standard errors of a share are at most 0.11.
    assert CORRECT[name] / 200 == pytest.approx(float(chosen(name)["test_acc"]), abs=0.11)


@each
def test_heads_are_near_those_of_all_the_test_images(name: str) -> None:
    table = nearsight.measure(load_source(name).model, nearsight.sample_images()[0])
    with (folder(name) / "heads.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == table.mad.size
    for row in rows:
        place = int(row["layer"]), int(row["head"])
        # Six standard errors of a mean over 200 images, and what half precision changes.
        near = 6 * float(row["mad_std"]) / 200**0.5 + 4e-5
        assert table.mad[place] == pytest.approx(float(row["mad"]), abs=near), place


@each
def test_weights_are_stored_in_half_and_loaded_in_single_precision(name: str) -> None:
    model = timm.create_model(name, pretrained=True)
    assert {weight.dtype for weight in model.parameters()} == {torch.float32}
    assert all(torch.equal(weight, weight.half().float()) for weight in model.parameters())
    assert (folder(name) / "model.safetensors").stat().st_size < 5_000_000
    random = timm.create_model(name)
    assert not torch.equal(random.head.weight, model.head.weight)


@each
def test_another_number_of_classes_takes_a_new_head(name: str) -> None:
    whole, other = timm.create_model(name, pretrained=True), timm.create_model(name, pretrained=True, num_classes=10)
    assert other.head.weight.shape == (10, 192)
    assert torch.equal(other.blocks[3].mlp.fc1.weight, whole.blocks[3].mlp.fc1.weight)
    larger = timm.create_model(name, pretrained=True, img_size=64)
    assert larger.pos_embed.shape == (1, 257, 192)


def test_a_name_without_a_tag_has_no_weights() -> None:
    for name in ("compact_vit", "locat_compact_vit"):
        with pytest.raises((RuntimeError, ValueError), match="weights"):
            timm.create_model(name, pretrained=True)


def test_a_name_of_the_zoo_means_its_weights() -> None:
    name = "compact_vit.modern_cifar100"
    expected = load_model(folder(name) / "model.safetensors").state_dict()
    for pretrained in (False, True):
        sourced = load_source(name, pretrained=pretrained)
        assert sourced.label == name
        assert all(torch.equal(weight, expected[key]) for key, weight in sourced.model.state_dict().items())


def test_they_are_measured_offline_on_the_sample(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["measure", *MODELS, "compact_vit", "--num-images", "20", "--json", "--out", str(tmp_path)]) == 0
    found = {model["label"]: model for model in json.loads(capsys.readouterr().out)["models"]}
    lowest = {name: min(row["mad"] for row in model["heads"]) for name, model in found.items()}
    modern, locat, baseline = (lowest[name] for name in ("compact_vit.modern_cifar100", *list(MODELS)[::-2]))
    assert modern < 0.01 < locat < 0.15 < baseline
    described = {name: json.loads((tmp_path / name / "measured.json").read_text()) for name in (*MODELS, "compact_vit")}
    images = {name: record["config"]["images"]["from"] for name, record in described.items()}
    assert images == {**dict.fromkeys(MODELS, "cifar100-sample, test"), "compact_vit": "the embedded set"}


@each
def test_each_folder_is_a_whole_run(name: str) -> None:
    run, row = RunFolder(folder(name)), chosen(name)
    assert row["chosen"] == "True"
    assert run.read_config().seed == run.read_provenance()["seed"] == int(row["seed"])
    result = run.read_result()
    for column in ("test_acc", "min_mad", "best_epoch"):
        assert result[column] == float(row[column]), column
    with run.heads.open() as file:
        assert min(float(head["mad"]) for head in csv.DictReader(file)) == result["min_mad"]


def test_the_card_has_the_numbers_of_the_tables() -> None:
    card = CARD.read_text(encoding="utf-8")
    for row in RUNS.values():
        numbers = (
            f"| {row['condition']} | {row['seed']} | {float(row['test_acc']):.2%} | {float(row['min_mad']):.4f} "
            f"| {row['own_patch_heads']} | {float(row['min_mad_of_others']):.3f} "
            f"| {float(row['max_share_near']):.1%} | {row['best_epoch']} |"
        )
        assert numbers.replace("%", " %") in card
    with (CARD.parent / "fp16.csv").open() as file:
        for row in csv.DictReader(file):
            numbers = (
                f"| {row['condition']} | {float(row['fp32_test_acc']):.2%} | {float(row['fp16_test_acc']):.2%} "
                f"| {row['predictions_changed']} of 10,000 | {float(row['fp32_min_mad']):.5f} "
                f"| {float(row['fp16_min_mad']):.5f} | {float(row['max_abs_mad_change']):.1e} |"
            )
            assert numbers.replace("%", " %") in card


def test_the_card_s_commands_train_these_very_runs() -> None:
    card = CARD.read_text(encoding="utf-8").replace("\\\n", " ")
    commands = re.findall(r"^nearsight train (.*)$", card, re.MULTILINE)
    identities = [config_of(shlex.split(command)).identity for command in commands]
    assert identities == [RunFolder(folder(name)).read_config().identity for name in MODELS]


def test_the_page_of_the_docs_has_the_numbers_of_the_tables() -> None:
    page = (Path(__file__).parents[2] / "docs" / "zoo.md").read_text(encoding="utf-8")
    for name, about in MODELS.items():
        row = chosen(name)
        accuracy = f"{100 * float(row['test_acc']):.2f} %"
        numbers = f"| {accuracy} | {float(row['min_mad']):.4f} | {row['own_patch_heads']} |"
        assert f"| `{name}` | {about} {numbers}" in page
    words = re.sub(r"\s+", " ", page)
    assert "right on {}, {} and {}.".format(*CORRECT.values()) in words
    assert f"uniform attention has {uniform_attention_distance((8, 8)):.3f} here" in words
    modern = [row for row in RUNS.values() if row["condition"] == "Modern"]
    assert [int(row["own_patch_heads"]) for row in modern].count(0) == 1  # "One of three Modern runs has no such head"
    assert min(modern, key=lambda row: float(row["min_mad"]))["chosen"] == "True"


def test_the_python_of_card_and_docs_runs(capsys: pytest.CaptureFixture[str]) -> None:
    for text in (CARD.read_text(encoding="utf-8"), (Path(__file__).parents[2] / "docs" / "zoo.md").read_text("utf-8")):
        exec(re.findall(r"```python\n(.*?)```", text, re.DOTALL)[0], {})
    assert "67.0%" in capsys.readouterr().out
