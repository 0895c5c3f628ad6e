"""Configs: validated at construction, strict in JSON, identified by what changes numbers."""

import dataclasses
import json
import math
from typing import Any, get_type_hints

import pytest

from nearsight.augment import AUGMENTATIONS, AutoAugment, CutMix, HorizontalFlip, RandomCrop
from nearsight.configuration import decode, encode, field_docs
from nearsight.errors import InputError
from nearsight.models import ModelConfig
from nearsight.train import SCHEMA, DataConfig, Protocol, RunConfig, baseline, modern
from nearsight.train.dino import DinoConfig, DinoProtocol


def test_round_trip_through_json() -> None:
    config = RunConfig(
        model=ModelConfig(depth=3),
        data=DataConfig(name="cifar100", num_train=100),
        protocol=dataclasses.replace(modern(), betas=(0.8, 0.9), clip_norm=5.0),
        seed=4,
    )
    stored = json.loads(json.dumps(config.to_json()))
    assert RunConfig.from_json(stored, "config.json") == config


def test_the_protocols_are_the_papers() -> None:
    assert [augmentation.name for augmentation in baseline().augment] == ["crop", "flip"]
    assert [augmentation.name for augmentation in modern().augment] == ["crop", "flip", "autoaugment", "cutmix"]
    assert baseline().smoothing == 0
    assert modern().smoothing == 0.1
    for protocol in (baseline(), modern()):
        assert (protocol.batch_size, protocol.max_epochs, protocol.warmup_epochs, protocol.patience) == (
            128,
            600,
            5,
            20,
        )
        assert (protocol.lr, protocol.weight_decay) == (1e-3, 0.05)


def test_augmentations_go_where_their_stage_belongs() -> None:
    protocol = baseline().with_(CutMix(p=0.5)).with_(AutoAugment())
    assert [augmentation.name for augmentation in protocol.augment] == ["crop", "flip", "autoaugment", "cutmix"]
    assert protocol.with_(CutMix(p=0.9)).augmentation("cutmix") == CutMix(p=0.9)
    assert protocol.without("cutmix").augmentation("cutmix") is None
    with pytest.raises(InputError, match="'cutmx' is not a known augmentation; did you mean 'cutmix'"):
        protocol.without("cutmx")


def test_identity_is_a_function_of_the_settings_alone() -> None:
    assert RunConfig().identity == RunConfig().identity
    assert len(RunConfig().identity) == 16
    others = [
        RunConfig(seed=1),
        RunConfig(precision="bf16"),
        RunConfig(model=ModelConfig(position_std=1.0)),
        RunConfig(data=DataConfig(split_seed=1)),
        RunConfig(protocol=Protocol(augment=(HorizontalFlip(), RandomCrop()))),
        RunConfig(protocol=modern()),
    ]
    assert len({config.identity for config in (RunConfig(), *others)}) == len(others) + 1


def test_settings_that_came_later_leave_identities_as_they_were() -> None:
    """Run folders are found by these: they were computed before the first setting was added."""
    assert RunConfig().identity == "142647aea0aba225"
    modern_bf16 = RunConfig(data=DataConfig(name="cifar100"), protocol=modern(), seed=2, precision="bf16")
    assert modern_bf16.identity == "9679c54ecd870b69"
    wide = RunConfig(
        model=ModelConfig(patch_size=8, position_std=1.0),
        protocol=dataclasses.replace(baseline(), clip_norm=1.0, betas=(0.9, 0.95)),
        measure_every=5,
    )
    assert wide.identity == "6d3a08b3c34e73b4"


def test_every_setting_that_came_later_changes_the_identity() -> None:
    base = RunConfig(model=ModelConfig(gaug=True))
    models = [
        *(
            ModelConfig(gaug=True, positions=False),
            ModelConfig(gaug=True, pool="avg"),
            ModelConfig(gaug=True, prr=True),
        ),
        *(ModelConfig(gaug=True, locat_kernel=kernel) for kernel in ("laplace", "inverse")),
        *(ModelConfig(gaug=True, locat_width=width) for width in ("input", 1.0, 2.0)),
        *(ModelConfig(gaug=True, locat_scale=scale) for scale in ("none", "auto")),
        *(ModelConfig(gaug=True, locat_isotropic=True), ModelConfig(), ModelConfig(prr=True)),
        *(ModelConfig(reach=reach) for reach in ((1.5,), (2.0,), (1.5, 1.5, 2, 2, 3, 3, None, None))),
    ]
    protocols = [Protocol(schedule="triangular"), Protocol(drop_path=0.1), Protocol(teacher="vit")]
    runs = [
        base,
        *(dataclasses.replace(base, model=model) for model in models),
        *(dataclasses.replace(base, protocol=protocol) for protocol in protocols),
    ]
    assert len({run.identity for run in runs}) == len(runs)
    for run in runs:
        assert RunConfig.from_json(json.loads(json.dumps(run.to_json())), "config.json") == run


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Protocol(max_epochs=-3), "max_epochs is -3"),
        (lambda: Protocol(lr=0.0), "lr is 0.0"),
        (lambda: Protocol(lr=float("nan")), "lr is nan"),
        (lambda: Protocol(smoothing=1.0), "smoothing is 1.0"),
        (lambda: Protocol(patience=0), "patience is 0"),
        (lambda: Protocol(betas=(0.9, 1.0)), "betas are"),
        (lambda: Protocol(clip_norm=0.0), "clip_norm is 0.0"),
        (lambda: CutMix(p=1.5), r"cutmix\.p is 1\.5, but a probability lies in \[0, 1\]"),
        (lambda: DataConfig(validation_fraction=1.0), "validation_fraction is 1.0"),
        (lambda: DataConfig(num_train=0), "num_train is 0"),
        (lambda: RunConfig(seed=-1), "seed is -1"),
        (lambda: ModelConfig(width=50, num_heads=8), "8 heads do not divide"),
        (lambda: ModelConfig(prr=True, locat_kernel="laplace"), "locat_kernel is 'laplace', but it needs gaug"),
        (lambda: Protocol(drop_path=1.0), r"drop_path is 1\.0"),
        (lambda: Protocol(schedule="linear"), "'linear' is not a known schedule"),
        (lambda: Protocol(weight_decay=math.inf), "weight_decay is inf, but must be finite"),
        (lambda: RunConfig(protocol=Protocol(lr=math.inf)), r"protocol\.lr is inf, but must be finite"),
        (lambda: RunConfig(protocol=Protocol(clip_norm=math.inf)), r"protocol\.clip_norm is inf"),
        (lambda: RunConfig(protocol=Protocol(augment=(CutMix(alpha=math.inf),))), r"cutmix\.alpha is inf"),
        (lambda: RunConfig(model=ModelConfig(position_std=math.nan)), r"model\.position_std is nan"),
        (lambda: RunConfig(seed=2**63), "seed is 9223372036854775808, but must lie within ±9223372036854775807"),
        (lambda: RunConfig(data=DataConfig(split_seed=-(2**64))), r"data\.split_seed is -1844.*64 bits"),
        (lambda: DinoConfig(protocol=DinoProtocol(clip_norm=math.inf)), r"protocol\.clip_norm is inf"),
    ],
)
def test_impossible_settings_are_refused_at_construction(make: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        make()


def changed(path: list[str | int], value: Any) -> dict[str, Any]:
    stored: Any = json.loads(json.dumps(RunConfig(protocol=modern()).to_json()))
    place = stored
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return stored


@pytest.mark.parametrize(
    ("stored", "message"),
    [
        (changed(["schema"], SCHEMA + 1), f"schema {SCHEMA + 1}, but this nearsight reads up to {SCHEMA}"),
        (changed(["schema"], "one"), "is not the config of a run"),
        ([], "is not the config of a run"),
        (changed(["config", "seed"], "3"), "seed is '3', but must be of type int"),
        (changed(["config", "seed"], True), "seed is True"),
        (changed(["config", "colour"], 1), "colour is not a setting"),
        (changed(["config", "precision"], "fp8"), "must be one of 'fp32', 'bf16'"),
        (changed(["config", "protocol", "betas"], [0.9]), "has 1 items, but needs 2"),
        (changed(["config", "protocol", "betas"], 0.9), "must be a list"),
        (changed(["config", "protocol"], 3), "must be an object"),
        (changed(["config", "protocol", "lr"], None), "lr is None"),
        (changed(["config", "model", "locat_width"], "key"), "must be one of 'query', 'input' or of type float"),
        (changed(["config", "protocol", "augment", 0], {"p": 1.0}), "has no 'name'"),
        (changed(["config", "protocol", "augment", 0, "name"], "crup"), "did you mean 'crop'"),
        (changed(["config", "protocol", "augment", 0, "padding"], 1.5), "must be of type int"),
    ],
)
def test_a_config_that_does_not_fit_is_named(stored: Any, message: str) -> None:
    with pytest.raises(InputError, match=r"config\.json") as caught:
        RunConfig.from_json(stored, "config.json")
    caught.match(message)


def test_optional_values_and_floats_written_as_integers() -> None:
    assert decode(Protocol, {"lr": 1, "clip_norm": None}) == Protocol(lr=1.0)
    assert encode(decode(Protocol, {"lr": 1}))["lr"] == 1.0


NUMBERS = (Protocol, DataConfig, RunConfig, *AUGMENTATIONS.values())


@pytest.mark.parametrize("kind", NUMBERS)
def test_whole_numbers_are_floats_where_these_belong(kind: Any) -> None:
    """Equal configs are equal as JSON, of which identities are made, and come back from there as they were."""
    for name, hint in get_type_hints(kind).items():
        if hint in (float, float | None) and name != "validation_fraction":  # which has no whole values
            for whole in (0, 1):
                try:
                    exact = kind(**{name: float(whole)})
                except InputError:  # out of its range
                    continue
                config = kind(**{name: whole})
                assert json.dumps(encode(config)) == json.dumps(encode(exact))
                assert type(getattr(config, name)) is float


@pytest.mark.parametrize("kind", NUMBERS)
def test_numbers_of_another_kind_are_refused(kind: Any) -> None:
    wrong = {int: (2.0, True, "2"), float: ("0.5", None, True), bool: (1, 0.0, "yes"), int | None: (2.0, False)}
    checked = 0
    for field in dataclasses.fields(kind):
        hint = get_type_hints(kind)[field.name]
        for value in wrong.get(hint, ()):
            with pytest.raises(InputError, match=rf"{field.name} is {value!r}, but must be of type"):
                kind(**{field.name: value})
            checked += 1
    assert checked


def test_betas_may_be_whole_and_in_a_list() -> None:
    protocol = Protocol(betas=[0, 0.9])  # type: ignore[arg-type]
    assert protocol == Protocol(betas=(0.0, 0.9))
    assert RunConfig(protocol=protocol).identity == RunConfig(protocol=Protocol(betas=(0.0, 0.9))).identity
    assert dataclasses.replace(baseline(), weight_decay=0) == dataclasses.replace(baseline(), weight_decay=0.0)
    assert str(dataclasses.replace(baseline(), weight_decay=0).weight_decay) == "0.0"


def test_types_are_looked_up_once_per_class(monkeypatch: pytest.MonkeyPatch) -> None:
    """Studies make thousands of configs."""
    RunConfig(protocol=modern())
    monkeypatch.setattr("typing.get_type_hints", None)
    RunConfig(protocol=dataclasses.replace(modern().with_(CutMix(p=1)), smoothing=0))


def test_field_docs_are_the_texts_under_the_fields() -> None:
    docs = field_docs(CutMix)
    assert docs["p"] == "Probability that it is applied."
    assert docs["alpha"].startswith("Both parameters of the Beta")
    documented = {name for kind in (Protocol, DataConfig, ModelConfig) for name in field_docs(kind)}
    fields = {field.name for kind in (Protocol, DataConfig, ModelConfig) for field in dataclasses.fields(kind)}
    assert documented == fields


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        (RunConfig, "precision", "fp8"),
        (DinoConfig, "precision", "bfloat16"),
        (ModelConfig, "init", "xavier"),
        (ModelConfig, "pool", "gap"),
        (ModelConfig, "locat_width", "key"),
        (ModelConfig, "locat_scale", None),
    ],
)
def test_a_word_that_is_no_choice_is_refused_when_a_config_is_made(kind: type, name: str, value: Any) -> None:
    with pytest.raises(InputError, match=rf"^{name} is {value!r}, but must be one of '"):
        kind(**{name: value})
