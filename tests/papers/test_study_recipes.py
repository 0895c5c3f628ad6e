"""Study recipes: what they ask for is what the paper's tables have, and their docstrings say how to run them."""

import dataclasses
import inspect
import re
from pathlib import Path

import numpy as np
import pytest

from nearsight.errors import InputError
from nearsight.papers import SIMULATIONS, STUDIES, catalogue, find_study
from nearsight.papers.protocol import emergence, mixing, size, unreported
from nearsight.study import Cell
from nearsight.train import modern
from nearsight.train.recipes import find_run

RESULTS = Path(__file__).parents[2] / "results"
NUM_TRAIN = {"cifar10": 50_000, "cifar100": 50_000, "tiny-imagenet": 100_000, "svhn": 73_257}


def images_of(cell: Cell) -> int:
    """That a cell trains on at most, over all epochs."""
    data = cell.config.data
    num_train = data.num_train or NUM_TRAIN[data.name]
    return round(num_train * (1 - data.validation_fraction)) * cell.config.protocol.max_epochs


@pytest.mark.parametrize("name", list(STUDIES))
def test_every_study_says_its_command_its_cost_and_its_result(name: str) -> None:
    recipe = find_study(name)
    lines = (recipe.__doc__ or "").splitlines()
    assert re.search(r"\((S1|S2|S3)[ ,].*\)$", lines[0]), "its place in the papers"
    text = " ".join(lines)
    study = recipe()
    assert f"nearsight study run {name}" in text
    epochs, images = study.base.protocol.max_epochs, images_of(study.cells[0]) // study.base.protocol.max_epochs
    assert re.search(rf"Cost    {len(study.cells)} cells of (at most )?{epochs} epochs of {images:,} images", text)
    assert f"({sum(map(images_of, study.cells)) // 10**6} M" in text
    named = [RESULTS.parent / folder for folder in re.findall(r"results/[\w/-]+", text)]
    assert named or "Result  not run yet" in text
    assert all(folder.is_dir() for folder in named)
    kept = [folder for folder in (RESULTS / name, RESULTS / "spatial-structure" / name) if folder.is_dir()]
    assert all(folder in named for folder in kept if (folder / "runs.csv").exists())
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


@pytest.mark.parametrize("data", ["cifar10", "tiny-imagenet"])
def test_the_other_ablations_are_the_same_eight_conditions(data: str) -> None:
    cells = {cell.condition: cell.config for cell in find_study(f"ablation-{data}")().cells}
    run = find_run(f"compact-{data}")
    assert len(cells) == 8
    assert cells["Baseline"].protocol == run("baseline").protocol
    assert cells["Modern"].protocol == run("modern").protocol
    colour = "colorjitter" if data == "tiny-imagenet" else "autoaugment"
    for condition, config in cells.items():
        has_cutmix, has_colour = (config.protocol.augmentation(name) is not None for name in ("cutmix", colour))
        parts = {"cutmix": has_cutmix, colour: has_colour, "labelsmoothing": config.protocol.smoothing > 0}
        # +X has X alone, −X all but X.
        alone = condition.startswith("+") or condition == "Baseline"
        named = {part for part in parts if part == condition[1:].lower()}
        assert {part for part, is_on in parts.items() if is_on} == (named if alone else set(parts) - named)
    assert {config.data.name for config in cells.values()} == {data}


def test_unreported_settings_are_a_balanced_half_with_a_baseline_each() -> None:
    study = unreported.unreported_cifar100()
    settings = {tuple(cell.levels[name] for name in list(study.labels)[:-1]) for cell in study.cells}
    assert len(settings) == 8
    assert len(study.cells) == len({(*cell.levels.values(),) for cell in study.cells}) == 24
    names = list(study.labels)[:-1]
    signs = np.array(
        [
            [1 if level == study.labels[name][1] else -1 for name, level in zip(names, each, strict=True)]
            for each in settings
        ]
    )
    # Main effects are balanced, orthogonal, and apart from every product of two.
    assert (signs.sum(axis=0) == 0).all()
    assert (signs.T @ signs == 8 * np.eye(4)).all()
    pairs = np.array([signs[:, i] * signs[:, j] for i in range(4) for j in range(i)])
    assert (pairs @ signs == 0).all()
    assert {len({cell.config.protocol.max_epochs, cell.config.protocol.patience}) for cell in study.cells} == {1}


def test_mixing_differs_in_what_is_mixed_alone() -> None:
    study = mixing.mixing_cifar100()
    base = study.base.protocol.augment
    configs = {cell.condition: cell.config for cell in study.cells if cell.seed == 0}
    assert configs["None of these"].protocol == study.base.protocol
    for condition, config in configs.items():
        added = [each for each in config.protocol.augment if each not in base]
        assert len(added) == (condition != "None of these")
        assert {each.p for each in added} <= {0.5}
        assert dataclasses.replace(config, protocol=study.base.protocol) == study.base
    assert len(set(configs.values())) == 13


def test_the_long_mixing_is_seven_of_the_conditions_in_every_batch() -> None:
    study = mixing.mixing_long_cifar100()
    assert study.seed_list == tuple(range(6))
    short = {cell.condition: cell.config for cell in mixing.mixing_cifar100().cells}
    configs = {cell.condition: cell.config for cell in study.cells if cell.seed == 0}
    assert len(configs) == 7
    for condition, config in configs.items():
        protocol = config.protocol
        assert protocol.max_epochs == protocol.patience == 200
        assert protocol.max_epochs % config.measure_every == 0  # so that the last epoch is measured, too
        halved = [dataclasses.replace(each, p=0.5) if each.p == 1.0 else each for each in protocol.augment[2:]]
        assert (*protocol.augment[:2], *halved) == short[condition].protocol.augment
    assert len({cell.config.stack_key for cell in study.cells}) == 1  # so that all train in one stack


def test_emergence_measures_every_epoch() -> None:
    study = emergence.emergence_cifar100()
    assert {cell.config.measure_every for cell in study.cells} == {1}
    configs = {cell.condition: cell.config for cell in study.cells if cell.seed == 0}
    assert configs["Modern"].protocol.augment == modern().augment
    assert configs["+CutMix"].protocol.without("cutmix") == configs["Baseline"].protocol


def test_emergence_under_the_fitted_settings_trains_all_equally_long() -> None:
    configs = {cell.condition: cell.config for cell in emergence.emergence_fitted_cifar100().cells if cell.seed == 0}
    fitted = {cell.condition: cell.config for cell in unreported.ablation_fitted_cifar100().cells if cell.seed == 0}
    assert list(configs) == ["Baseline", "−CutMix", "+CutMix", "Modern"]
    for condition, config in configs.items():
        protocol = config.protocol
        assert protocol.max_epochs == protocol.patience == 300
        assert protocol.max_epochs % config.measure_every == 0  # so that the last epoch is measured, too
        of_paper = {name: getattr(fitted[condition].protocol, name) for name in ("max_epochs", "patience")}
        assert dataclasses.replace(protocol, **of_paper) == fitted[condition].protocol
        assert dataclasses.replace(config, measure_every=0, protocol=fitted[condition].protocol) == fitted[condition]


def test_size_keeps_heads_and_steps_as_they_are() -> None:
    study = size.size_cifar100()
    for cell in study.cells:
        model = cell.config.model
        assert model.width == 24 * model.num_heads
        assert model.mlp_width == 2 * model.width
        assert images_of(cell) == 60 * 40_000
        assert cell.config.protocol.warmup_epochs * 12 == cell.config.protocol.max_epochs
    assert {(cell.config.model.width, cell.config.model.depth) for cell in study.cells} == {
        *((96, 8), (192, 8), (384, 8)),
        *((192, 4), (192, 12)),
    }


def test_an_ablation_under_fitted_settings_needs_all_of_them() -> None:
    levels = {"lr": "0.0003", "weight_decay": "0", "init": "pytorch", "position_std": "1", "cutmix": "p=1"}
    study = unreported.ablation_under(levels, seeds=1)
    modern_cell = next(cell.config for cell in study.cells if cell.condition == "Modern")
    assert (modern_cell.protocol.lr, modern_cell.model.init) == (3e-4, "pytorch")
    usual = {cell.condition: cell.config for cell in find_study("ablation-cifar100")(seeds=1).cells}
    assert {cell.condition for cell in study.cells} == set(usual)
    with pytest.raises(InputError, match="no level of init is given; it needs one of trunc_normal, pytorch"):
        unreported.ablation_under({name: level for name, level in levels.items() if name != "init"})
    with pytest.raises(InputError, match="'off' is not a known probability of CutMix"):
        unreported.ablation_under({**levels, "cutmix": "off"})


def test_unknown_names_are_answered_with_the_nearest() -> None:
    with pytest.raises(InputError, match="'ablation-cifr100' is not a known study; did you mean 'ablation-cifar100'"):
        find_study("ablation-cifr100")


def test_the_catalogue_is_what_is_registered_and_says_how_many_cells() -> None:
    """It is read from the files' text, without loading them."""
    registered = {**STUDIES, **SIMULATIONS}
    assert catalogue() == {name: inspect.getdoc(make) for name, make in registered.items()}
    for name, make in registered.items():
        stated = re.search(r"^Cost +(\d+) cells", inspect.getdoc(make) or "", re.MULTILINE)
        assert stated is not None, name
        assert int(stated[1]) == len(make().cells), name
