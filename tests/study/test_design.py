"""Studies: which runs follow from factors, levels and seeds, and what they are called."""

import dataclasses
import itertools
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_study import tiny_base

from nearsight.augment import AutoAugment, CutMix, HorizontalFlip, Mixup, RandomCrop
from nearsight.errors import InputError
from nearsight.study import OFF, Study, add_one, leave_one_out
from nearsight.study.factors import setting_path
from nearsight.train import RunConfig, modern

BASE = RunConfig()
ABLATION = {"cutmix": (OFF, CutMix(p=0.5)), "autoaugment": (OFF, AutoAugment()), "smoothing": (0.0, 0.1)}


def ablation(**changes: Any) -> Study:
    return Study(BASE, **({"factors": ABLATION, "ends": ("Baseline", "Modern")} | changes))


def test_the_papers_eight_conditions() -> None:
    cells = {cell.condition: cell for cell in ablation().cells}
    assert set(cells) == {
        *("Baseline", "Modern", "−CutMix", "−AutoAugment", "−LabelSmoothing"),
        *("+CutMix", "+AutoAugment", "+LabelSmoothing"),
    }
    assert cells["Baseline"].config == BASE
    assert cells["Modern"].config.protocol == modern()
    for title, name in (("CutMix", "cutmix"), ("AutoAugment", "autoaugment")):
        assert cells[f"−{title}"].config.protocol == modern().without(name)
        assert cells[f"+{title}"].config.protocol == BASE.protocol.with_(modern().augmentation(name))
    assert cells["−LabelSmoothing"].config.protocol == dataclasses.replace(modern(), smoothing=0.0)
    assert cells["+LabelSmoothing"].config.protocol == dataclasses.replace(BASE.protocol, smoothing=0.1)


def test_levels_are_labelled_by_what_is_not_as_usual() -> None:
    study = Study(
        BASE,
        factors={
            "cutmix": (OFF, CutMix(), CutMix(p=0.5), CutMix(p=0.5, alpha=0.25)),
            "mixing": (OFF, CutMix(), Mixup()),
            "lr": (1e-3, 3e-4, 0.1 + 0.2),
            "decay_all": (False, True),
            "clip_norm": (None, 1.0),
            "model.init": ("trunc_normal", "pytorch"),
            "longer": ({"max_epochs": 600, "lr": 1e-3}, {"max_epochs": 900, "lr": 5e-4}),
            "given": {"a": OFF, "b": {"weight_decay": 0.0}},
        },
    )
    assert study.labels == {
        "cutmix": ("off", "on", "p=0.5", "p=0.5, alpha=0.25"),
        "mixing": ("off", "CutMix on", "Mixup on"),
        "lr": ("0.001", "0.0003", "0.30000000000000004"),
        "decay_all": ("off", "on"),
        "clip_norm": ("none", "1"),
        "model.init": ("trunc_normal", "pytorch"),
        "longer": ("max_epochs=600, lr=0.001", "max_epochs=900, lr=0.0005"),
        "given": ("a", "b"),
    }


def config_of(factor: str, levels: Any, label: str, base: RunConfig = BASE) -> RunConfig:
    (cell,) = Study(base, factors={factor: levels}).only([{factor: label}]).cells
    return cell.config


def test_settings_by_short_and_by_dotted_name() -> None:
    for name in ("lr", "protocol.lr"):
        assert config_of(name, (1e-3, 2e-3), "0.002").protocol == dataclasses.replace(BASE.protocol, lr=2e-3)
    assert config_of("position_std", (0.02, 1), "1").model.position_std == 1.0
    assert isinstance(
        config_of("position_std", (0.02, 1), "1").model.position_std, float
    )  # so the identity is the same
    assert config_of("data.num_train", (100, None), "none").data.num_train is None
    assert config_of("precision", ("fp32", "bf16"), "bf16").precision == "bf16"
    with_cutmix = dataclasses.replace(BASE, protocol=BASE.protocol.with_(CutMix(p=0.5)))
    for name in ("cutmix.alpha", "protocol.cutmix.alpha"):
        changed = config_of(name, (1.0, 0.2), "0.2", with_cutmix)
        assert changed.protocol.augmentation("cutmix") == CutMix(p=0.5, alpha=0.2)


def test_reach_stands_beside_locat() -> None:
    schedule = (1.5, 1.5, 2, 2, 3, 3, None, None)
    levels = {"ViT": OFF, "reach 1.5": {"reach": (1.5,)}, "schedule": {"reach": schedule}, "LocAt": {"gaug": True}}
    for study in (Study(BASE, factors={"reach": levels}, seeds=2), Study(BASE, factors={"reach": levels}).small()):
        models = {cell.condition: cell.config.model for cell in study.cells}
        assert {name: model.reach for name, model in models.items()} == {
            "ViT": (),
            "reach 1.5": (1.5,),
            "schedule": schedule,
            "LocAt": (),
        }
    identities = {cell.config.identity for cell in Study(BASE, factors={"reach": levels}, seeds=2).cells}
    assert len(identities) == 8
    assert config_of("reach", {"off": OFF, "on": (1.5,)}, "on").model.reach == (1.5,)


def test_an_augmentation_keeps_its_place() -> None:
    changed = config_of("crop", (RandomCrop(), RandomCrop(padding=2)), "padding=2")
    assert changed.protocol.augment == (RandomCrop(padding=2), HorizontalFlip())
    assert config_of("flip", (HorizontalFlip(), OFF), "off").protocol.augment == (RandomCrop(),)


def test_levels_of_one_factor_replace_each_other() -> None:
    levels = {"none": OFF, "cut": CutMix(), "blend": {"mixup": Mixup(), "smoothing": 0.1}}
    assert config_of("mixing", levels, "none") == BASE
    assert config_of("mixing", levels, "cut").protocol.augment[2:] == (CutMix(),)
    blended = config_of("mixing", levels, "blend", config_of("mixing", levels, "cut"))
    assert blended.protocol.augment[2:] == (Mixup(),)
    assert blended.protocol.smoothing == 0.1
    off = {"with": {"lr": 1e-3}, "without": {"flip": OFF, "lr": 2e-3}}
    assert config_of("any name", off, "without").protocol.augment == (RandomCrop(),)


@pytest.mark.parametrize(
    ("factors", "words"),
    [
        ({}, "varies nothing"),
        ({"lr": (1e-3,)}, "needs at least two"),
        ({"lr": (1e-3, 1e-3)}, "two levels '0.001'"),
        ({"lr": {"": 1e-3, "b": 2e-3}}, "a label is a word"),
        ({"lrate": (1, 2)}, "'lrate' is not a known setting; did you mean 'lr'?"),
        ({"name": ("a", "b")}, "'name' may mean model.name or data.name; write it out"),
        ({"cutmix.alfa": (1, 2)}, "'cutmix.alfa' is not a setting; cutmix has alpha, feather, mix_labels, p, patch"),
        ({"cutmix.alpha": (1.0, 2.0)}, "cannot be set where there is no cutmix"),
        ({"lr": (1e-3, "high")}, "factor 'lr' at 'high': protocol.lr is 'high', but must be of type float"),
        ({"lr": (1e-3, -1.0)}, "lr is -1.0, but must be positive"),
        ({"seed": (0, 1)}, "cannot be called 'seed'"),
        ({"protocol": (BASE.protocol, modern())}, "have no short names; label them"),
        ({"both": (OFF, {"lr": {"a": 1}})}, "needs a value or an augmentation"),
    ],
)
def test_what_does_not_make_a_study(factors: Any, words: str) -> None:
    with pytest.raises(InputError) as error:
        _ = Study(BASE, factors=factors).cells
    assert words in str(error.value)


@pytest.mark.parametrize(
    "seeds", [0, [], [1, 1], 2.5, None, True, "3", [0.5], ["0"], np.arange(0), np.float64(3), 2**70, [2**70]]
)
def test_seeds_are_some_different_numbers(seeds: Any) -> None:
    with pytest.raises(InputError, match="seed"):
        ablation(seeds=seeds)


@pytest.mark.parametrize(
    ("seeds", "same"), [(np.int64(3), (0, 1, 2)), (np.arange(3), (0, 1, 2)), ([np.uint8(5), 2], (5, 2)), ({7}, (7,))]
)
def test_seeds_of_numpy_are_seeds(seeds: Any, same: tuple[int, ...]) -> None:
    study = ablation(seeds=seeds)
    assert json.dumps(study.to_json()) == json.dumps(ablation(seeds=same).to_json())
    assert study.seed_list == same


def test_every_setting_has_a_path_that_leads_to_it() -> None:
    assert setting_path("smoothing") == ("protocol", "smoothing")
    for part in ("model", "data", "protocol"):
        for field in dataclasses.fields(getattr(BASE, part)):
            assert setting_path(f"{part}.{field.name}") == (part, field.name)


@given(
    sizes=st.lists(st.integers(2, 4), min_size=1, max_size=3),
    seeds=st.lists(st.integers(0, 99), min_size=1, max_size=3, unique=True),
)
@settings(max_examples=25, deadline=None)
def test_a_full_factorial_has_every_combination_once(sizes: list[int], seeds: list[int]) -> None:
    names = ("lr", "weight_decay", "smoothing")[: len(sizes)]
    values = {name: [0.1 * (1 + level) for level in range(size)] for name, size in zip(names, sizes, strict=True)}
    study = Study(BASE, factors=values, seeds=seeds)
    wanted = {(seed, *levels) for seed in seeds for levels in itertools.product(*values.values())}
    configs = [cell.config for cell in study.cells]
    assert {(c.seed, *(getattr(c.protocol, name) for name in names)) for c in configs} == wanted
    assert len(configs) == len(wanted)
    assert len({(cell.condition, cell.seed) for cell in study.cells}) == len(wanted)
    assert [config.seed for config in configs] == sorted((c.seed for c in configs), key=seeds.index)  # seed by seed
    for cell in study.cells:
        for name, label in cell.levels.items():
            assert float(label) == getattr(cell.config.protocol, name)


def test_no_condition_disappears() -> None:
    """Two that come to the same run would be one: the second factor overrides the first, or two levels are equal."""
    with pytest.raises(InputError, match=r"'base' and '\+protocol.lr 0.01' of study 'study' are the same run"):
        _ = Study(BASE, factors={"protocol.lr": (1e-3, 1e-2), "lr": (1e-3, 1e-2)}).cells
    factors = {"mixing": {"none": OFF, "cutmix": CutMix(), "also cutmix": CutMix()}}
    for study in (Study(BASE, factors=factors, seeds=2), Study(BASE, factors=factors, seeds=2, scale="small")):
        with pytest.raises(InputError, match=r"'cutmix' and 'also cutmix'|small runs"):
            _ = study.cells
    with pytest.raises(InputError, match="'cutmix' and 'also cutmix'"):  # not what small runs have in common
        Study(BASE, factors=factors).small()


def test_a_study_may_be_part_of_a_design() -> None:
    study = ablation(seeds=2)
    assert [c.condition for c in study.only(add_one(study.labels)).cells[:4]] == [
        *("Baseline", "+CutMix", "+AutoAugment", "+LabelSmoothing")
    ]
    assert [c.condition for c in study.only(leave_one_out(study.labels)).cells[:4]] == [
        *("Modern", "−CutMix", "−AutoAugment", "−LabelSmoothing")
    ]
    part = study.only([{"cutmix": "p=0.5"}, {}])
    assert [(cell.condition, cell.seed) for cell in part.cells] == [
        *(("+CutMix", 0), ("Baseline", 0), ("+CutMix", 1), ("Baseline", 1))
    ]
    assert {cell.run for cell in part.cells} < {cell.run for cell in study.cells}
    with pytest.raises(InputError, match="'cutmx' is not a known factor; did you mean 'cutmix'"):
        study.only([{"cutmx": "off"}])
    with pytest.raises(InputError, match=r"'0\.5' is not a known level of cutmix"):
        study.only([{"cutmix": "0.5"}])


def test_a_fraction_is_the_part_its_generator_says() -> None:
    study = ablation().fraction("C=AB")
    on = {"cutmix": "p=0.5", "autoaugment": "on", "smoothing": "0.1"}
    for cell in study.cells:
        signs = [1 if cell.levels[name] == label else -1 for name, label in on.items()]
        assert signs[2] == signs[0] * signs[1]
    assert len(study.cells) == 4
    assert study.design == (
        "fraction: A CutMix, B AutoAugment, C LabelSmoothing; I = ABC, resolution III; aliases: A = BC; B = AC; C = AB"
    )
    with pytest.raises(InputError, match="'lr' has 3"):
        Study(BASE, factors={"lr": (1e-3, 2e-3, 3e-3), **ABLATION}).fraction("D=ABC")


def test_conditions_of_many_levels_and_of_four_factors() -> None:
    two = Study(BASE, factors={"cutmix": (OFF, CutMix(p=0.5), CutMix()), "smoothing": (0.0, 0.1)})
    assert [cell.condition for cell in two.cells] == [
        *("base", "+LabelSmoothing", "+CutMix p=0.5", "CutMix p=0.5+LabelSmoothing", "+CutMix on", "all")
    ]
    four = Study(BASE, factors={**ABLATION, "lr": (1e-3, 2e-3)})
    names = {cell.condition for cell in four.cells}
    assert len(names) == 16
    assert {"base", "+CutMix", "CutMix+AutoAugment", "CutMix+AutoAugment+LabelSmoothing"} <= names
    # A value is not on or off: it is named, and nothing is left out of a whole.
    assert {"+lr 0.002", "LabelSmoothing+lr 0.002", "CutMix+AutoAugment+LabelSmoothing+lr 0.002"} <= names
    assert not any(name.startswith("−") for name in names)
    named = Study(BASE, factors=four.factors, ends=("old", "new"))
    assert {"old", "new"} <= {cell.condition for cell in named.cells}
    off_at_last = Study(BASE, factors={"flip": (HorizontalFlip(), OFF), "smoothing": (0.0, 0.1)})
    assert [cell.condition for cell in off_at_last.cells] == [
        *("base", "+LabelSmoothing", "+HorizontalFlip off", "HorizontalFlip off+LabelSmoothing")
    ]
    one = Study(BASE, factors={"lr": (1e-3, 2e-3)})
    assert [cell.condition for cell in one.cells] == ["lr 0.001", "lr 0.002"]
    # What someone calls "all" is not off: the other level is told.
    images: dict[str, Any] = {"all": OFF, "25 %": {"num_train": 100}}
    fewer = Study(BASE, factors={"images": images, "cutmix": (OFF, CutMix())})
    assert [cell.condition for cell in fewer.cells] == ["base", "+CutMix", "+images 25 %", "images 25 %+CutMix"]
    # What is there or not is so by any name.
    answers: dict[str, Any] = {"cutmix": {"no": OFF, "yes": CutMix()}, "autoaugment": {"No": OFF, "Yes": AutoAugment()}}
    named = Study(BASE, factors=answers)
    assert [cell.condition for cell in named.cells] == ["base", "+AutoAugment", "+CutMix", "all"]


def test_conditions_of_a_choice_are_called_after_it() -> None:
    networks = {"ViT": {"depth": 8}, "Shallow ViT": {"depth": 4}, "Deep ViT": {"depth": 12}}
    factors: dict[str, Any] = {"model": networks, "patch": {"4": OFF, "2": {"patch_size": 2}, "8": {"patch_size": 8}}}
    study = Study(BASE, factors=factors, ends=("ViT", "Deep ViT, patch 8"))
    names = [f"{network}{patch}" for network in networks for patch in ("", ", patch 2", ", patch 8")]
    assert [cell.condition for cell in study.cells] == names
    # A factor that can be absent is not a choice, though its levels were given names.
    absent = Study(BASE, factors={**factors, "model": {**networks, "ViT": OFF}})
    assert {"+model Deep ViT", "model Deep ViT+patch 2", "+patch 2"} < {cell.condition for cell in absent.cells}
    both = Study(BASE, factors={"model": networks, "lr": (1e-3, 2e-3)})
    assert [cell.condition for cell in both.cells][1:4] == ["ViT, lr 0.002", "Shallow ViT", "Shallow ViT, lr 0.002"]


def test_a_small_study_keeps_its_conditions_and_its_form() -> None:
    full, small = ablation(seeds=3), ablation(seeds=3).small()
    assert (small.scale, len(small.cells)) == ("small", 16)
    for cell in small.cells:
        config = cell.config
        assert (config.data.name, config.precision, config.protocol.max_epochs) == ("shapes", "fp32", 2)
        assert (config.model.depth, config.model.num_heads) == (8, 8)
    assert {cell.condition for cell in small.cells} == {cell.condition for cell in full.cells}
    assert [cell.levels for cell in small.cells[:8]] == [cell.levels for cell in full.cells[:8]]
    with pytest.raises(InputError, match="varies what small runs have in common"):
        Study(BASE, factors={"max_epochs": (300, 600)}).small()


def test_what_is_shared_and_what_is_assumed() -> None:
    described = ablation(seeds=2).to_json()
    shared = described["settings"]
    assert shared["protocol.lr"] == 1e-3
    assert shared["model.depth"] == 8
    assert shared["protocol.cutmix.p"] == 0.5  # in all cells that have it
    assert "protocol.smoothing" not in shared
    assert "seed" not in shared
    assert set(described["assumed"]) >= {"protocol.lr", "protocol.cutmix.alpha", "precision", "cutmix", "smoothing"}
    assert not {"autoaugment", "model.depth", "protocol.flip.p"} & set(described["assumed"])
    assert described["factors"] == {"cutmix": ["off", "p=0.5"], "autoaugment": ["off", "on"], "smoothing": ["0", "0.1"]}


def test_the_tiny_study_of_these_tests_measures_during_training() -> None:
    """Else nothing here would tell a final head from an earlier one."""
    assert tiny_base().measure_every == 1
