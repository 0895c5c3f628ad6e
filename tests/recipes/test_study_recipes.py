"""Study recipes: what they ask for is what the paper's tables have, and their docstrings say how to run them."""

import dataclasses
import re

import pytest

from nearsight.errors import InputError
from nearsight.recipes import STUDIES, find_run, find_study
from nearsight.train import modern


@pytest.mark.parametrize("name", list(STUDIES))
def test_every_study_says_its_command_its_cost_and_its_result(name: str) -> None:
    recipe = find_study(name)
    lines = (recipe.__doc__ or "").splitlines()
    assert re.search(r"\((S1, Table|S2, Tables?|S1 meets S2)", lines[0])
    text = " ".join(lines)
    study = recipe()
    assert f"nearsight study run {name}" in text
    assert f"Cost    {len(study.cells)} cells of at most {study.base.protocol.max_epochs} epochs" in text
    num_images = {"tiny-imagenet": 80_000}.get(study.base.data.name, 40_000)
    images = len(study.cells) * study.base.protocol.max_epochs * num_images
    assert f"of {num_images:,} images ({images // 10**6} M" in text
    assert f"results/{name}" in text
    assert study.name == name


@pytest.mark.parametrize("name", list(STUDIES))
def test_every_study_can_be_made_small(name: str) -> None:
    study = find_study(name)(seeds=5)
    small = study.small()
    assert {cell.config.data.name for cell in small.cells} == {"shapes"}
    assert {cell.condition for cell in small.cells} == {cell.condition for cell in study.cells}
    assert len({cell.run for cell in small.cells} | {cell.run for cell in study.cells}) == len(study.cells) + len(
        small.cells
    )


def test_the_ablation_is_table_2() -> None:
    study = find_study("ablation-cifar100")(seeds=2)
    assert len(study.cells) == 16
    cells = {(cell.condition, cell.seed): cell.config for cell in study.cells}
    assert cells["Baseline", 1].protocol == find_run("compact-cifar100")("baseline").protocol
    assert cells["Modern", 1].protocol == modern()
    assert {config.precision for config in cells.values()} == {"bf16"}
    assert {config.num_measured for config in cells.values()} == {5000}
    assert {config.data.name for config in cells.values()} == {"cifar100"}


@pytest.mark.parametrize("data", ["cifar10", "cifar100", "tiny-imagenet"])
def test_the_protocol_studies_are_table_1(data: str) -> None:
    study = find_study(f"protocol-{data}")()
    assert [(cell.condition, cell.seed) for cell in study.cells] == [
        (condition, seed) for seed in range(3) for condition in ("Baseline", "Modern")
    ]
    for cell in study.cells:
        run = find_run(f"compact-{data}")(cell.condition.lower())
        assert (cell.config.protocol, cell.config.model, cell.config.data) == (run.protocol, run.model, run.data)


def test_the_core_rows_of_locat_differ_in_their_models_alone() -> None:
    for name in ("locat-cifar100", "locat-tiny-imagenet"):
        study = find_study(name)()
        assert study.seed_list == (0, 1)
        cells = {cell.condition: cell.config for cell in study.cells if cell.seed == 0}
        models = [cells[row].model for row in ("ViT", "ViT + GAug", "ViT + PRR", "LocAt")]
        assert [(model.gaug, model.prr) for model in models] == [
            (False, False),
            (True, False),
            (False, True),
            (True, True),
        ]
        assert len({dataclasses.replace(config, model=models[0]) for config in cells.values()}) == 1
        assert {len({cell.config for cell in study.cells if cell.condition == row}) for row in cells} == {2}


def test_locat_on_cifar100_has_every_variant() -> None:
    study = find_study("locat-cifar100")()
    models = {cell.condition: cell.config.model for cell in study.cells}
    assert len(models) == len(set(models.values())) == 16
    local = [model for model in models.values() if model.gaug]
    assert {model.locat_kernel for model in local} == {"gaussian", "laplace", "inverse"}
    assert {model.locat_width for model in local} == {"query", "input", 1.0, 2.0, 4.0}
    assert {model.locat_scale for model in local} == {"learned", "none", "auto"}
    assert {model.positions for model in local} == {True, False}
    assert models["ViT + GAP"].pool == "avg"
    assert not models["ViT - PE"].positions


def test_cutmix_beside_locat_is_a_full_factorial() -> None:
    study = find_study("locat-cutmix-cifar100")()
    found = {
        (
            cell.config.protocol.augmentation("cutmix") is not None,
            cell.config.model.gaug,
            cell.config.model.prr,
            cell.seed,
        )
        for cell in study.cells
    }
    assert len(study.cells) == len(found) == 2**3 * 3
    assert study.design == "full factorial"


def test_both_recipes_of_cifar100_share_their_runs() -> None:
    """Baseline and Modern of the ablation are those of Table 1: the identity is that of the settings."""
    runs = {cell.run for cell in find_study("ablation-cifar100")().cells}
    assert {cell.run for cell in find_study("protocol-cifar100")().cells} < runs


def test_unknown_names_are_answered_with_the_nearest() -> None:
    with pytest.raises(InputError, match="'ablation-cifr100' is not a known study; did you mean 'ablation-cifar100'"):
        find_study("ablation-cifr100")
