"""The simplified model against a float64 loop: outputs, risk, gradients; and what its descent tells."""

import itertools
import math

import pandas as pd
import pytest
import torch

from nearsight.data import structured_samples
from nearsight.data.structured import GaussianPatches, PatchData, StructuredPatches
from nearsight.data.structured_samples import StoredSamples
from nearsight.errors import InputError
from nearsight.train.structure import (
    CURVES,
    RESULTS,
    Descent,
    PositionalModel,
    StructureRun,
    StructureRunner,
    descend,
    find_phases,
)
from nearsight.train.structure.descent import Tracker, exact_from
from nearsight.train.structure.model import Weights, initial_weights, performance, risk_and_gradients

SEEDS = torch.tensor([2, 9])


def risk_by_loop(a: torch.Tensor, v: torch.Tensor, patches: torch.Tensor, labels: torch.Tensor, p: int, nu: float):
    """The formula (3.1) and the logistic loss, word for word, for one seed."""
    num_patches = patches.shape[1]
    total = torch.zeros((), dtype=torch.float64)
    right = 0
    for sample, label in zip(patches, labels, strict=True):
        output = torch.zeros((), dtype=torch.float64)
        for i in range(num_patches):
            exponentials = [torch.exp(a[i, j]) for j in range(num_patches)]
            inner = sum(exponentials[j] / sum(exponentials) * torch.dot(v, sample[j]) for j in range(num_patches))
            output = output + (num_patches * inner) ** p + nu * num_patches * inner
        total = total + torch.log(1 + torch.exp(-label * output))
        right += bool(label * output > 0)
    return total / len(labels), right / len(labels)


@pytest.mark.parametrize(("power", "slope"), [(5, 0.03), (3, 0.2), (1, 0.0)])
@pytest.mark.parametrize("data", [StructuredPatches(num_sets=3, dim=8), GaussianPatches(num_sets=3, dim=8)])
def test_risk_and_gradients_are_those_of_the_formula(
    data: PatchData, power: int, slope: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(structured_samples, "PATCHES_AT_ONCE", 4 * len(SEEDS) * data.num_patches)  # several pieces
    model = PositionalModel(power=power, slope=slope)
    samples = StoredSamples.draw(data, data.feature(SEEDS), SEEDS, "train", 9)
    samples = StoredSamples(samples.patch_SdM.double(), samples.label_SN.double())
    generator = torch.Generator().manual_seed(0)
    D = data.num_patches
    weights = Weights(
        torch.randn(2, D, D, generator=generator).double(), 0.05 * torch.randn(2, 8, generator=generator).double()
    )
    found = risk_and_gradients(weights, model, samples.pieces(0))
    seen = performance(weights, model, samples.pieces(0))
    patches = samples.patch_SdM.unflatten(-1, (9, D)).permute(0, 2, 3, 1)
    for seed in range(2):
        a = weights.attention_SDD[seed].clone().requires_grad_()
        v = weights.v_Sd[seed].clone().requires_grad_()
        risk, accuracy = risk_by_loop(a, v, patches[seed], samples.label_SN[seed], power, slope)
        by_a, by_v = torch.autograd.grad(risk, (a, v))
        assert torch.allclose(found.risk_S[seed], risk, rtol=1e-12)
        assert torch.allclose(found.v_Sd[seed], by_v, rtol=1e-10, atol=1e-13)
        expected = by_a - torch.diag(by_a.diagonal())  # the diagonal is fixed
        assert torch.allclose(found.attention_SDD[seed], expected, rtol=1e-10, atol=1e-13)
        assert seen.risk_S[seed] == pytest.approx(float(risk.detach()), rel=1e-12)
        assert seen.accuracy_S[seed] == pytest.approx(accuracy)


def test_single_precision_is_near_double() -> None:
    data, model = StructuredPatches(dim=30), PositionalModel()
    samples = StoredSamples.draw(data, data.feature(SEEDS), SEEDS, "train", 500)
    weights = initial_weights(model, data, SEEDS)
    weights = weights._replace(v_Sd=weights.v_Sd + 0.2 * data.feature(SEEDS))
    single = risk_and_gradients(weights, model, samples.pieces(0))
    double = risk_and_gradients(
        Weights(*(part.double() for part in weights)),
        model,
        StoredSamples(samples.patch_SdM.double(), samples.label_SN.double()).pieces(0),
    )
    for one, other in zip(single, double, strict=True):
        assert torch.allclose(one.double(), other, rtol=1e-3, atol=1e-5 * float(other.abs().max()))


def test_the_start_is_what_the_settings_say() -> None:
    data = StructuredPatches(dim=400, num_sets=20)
    model = PositionalModel(init_attention=0.5, init_feature=2.0)
    weights = initial_weights(model, data, SEEDS)
    diagonal = weights.attention_SDD.diagonal(dim1=-2, dim2=-1)
    assert torch.allclose(diagonal, torch.full_like(diagonal, math.log(math.log(400))))
    others = weights.attention_SDD[:, ~torch.eye(40, dtype=torch.bool)]
    assert float(others.std()) == pytest.approx(0.5, rel=0.05)
    assert float(weights.v_Sd.std()) == pytest.approx(2.0, rel=0.1)
    assert torch.equal(initial_weights(model, data, SEEDS[1:]).attention_SDD[0], weights.attention_SDD[1])
    assert float(initial_weights(PositionalModel(diagonal=0.7), data, SEEDS).attention_SDD[0, 3, 3]) == pytest.approx(
        0.7
    )


def test_tracked_scalars_are_loops() -> None:
    data = StructuredPatches(num_sets=3, set_size=2, dim=5)
    sets, feature = data.sets(), data.feature(SEEDS)
    weights = Weights(torch.randn(2, 6, 6), torch.randn(2, 5))
    tracker = Tracker(feature, sets)
    samples = StoredSamples.draw(data, feature, SEEDS, "train", 4)
    test = performance(weights, PositionalModel(), samples.pieces(0))
    tracker.record(7, weights, torch.tensor([0.1, 0.2]), test)
    curves = tracker.curves([2, 9])
    assert list(curves.columns) == ["seed", "step", *CURVES]
    for seed in range(2):
        row, a, v, w = curves.iloc[seed], weights.attention_SDD[seed], weights.v_Sd[seed], feature[seed]
        within, between, associated = [], [], 0
        for i in range(6):
            for j in range(6):
                if i != j:
                    (within if sets[i] == sets[j] else between).append(float(a[i, j]))
            associated += set(a[i].topk(2).indices.tolist()) == {j for j in range(6) if sets[j] == sets[i]}
        assert (row["seed"], row["step"]) == ([2, 9][seed], 7)
        assert row["gamma"] == pytest.approx(sum(within) / len(within), abs=1e-6)
        assert row["rho"] == pytest.approx(sum(between) / len(between), abs=1e-6)
        assert row["alpha"] == pytest.approx(float(v @ w), abs=1e-6)
        assert row["alpha"] ** 2 + row["across"] ** 2 == pytest.approx(float(v @ v), rel=1e-5)
        assert row["associated"] == pytest.approx(associated / 6)
        assert row["test_acc"] == pytest.approx(float(test.accuracy_S[seed]))


def small(**changes: object) -> StructureRun:
    settings = {"num_samples": 600, "steps": 60, "num_test": 500, "attention_lr": 4.0, "feature_lr": 0.01}
    return StructureRun(
        data=StructuredPatches(num_sets=3, dim=16, probability=0.2), descent=Descent(**settings | changes)
    )  # type: ignore[arg-type]


@pytest.mark.parametrize("samples", ["stored", "fresh"])
def test_a_descent_associates_and_a_seed_does_not_depend_on_others(samples: str) -> None:
    run = small(samples=samples)
    together, alone = descend(run, [0, 1, 4]), descend(run, [4])
    assert (together.curves.groupby("seed")["associated"].last() == 1).all()
    ours = together.curves[together.curves["seed"] == 4].reset_index(drop=True)
    pd.testing.assert_frame_equal(ours, alone.curves, rtol=1e-3, atol=1e-4)
    diagonal = together.last.attention_SDD.diagonal(dim1=-2, dim2=-1)
    assert torch.equal(diagonal, together.first.attention_SDD.diagonal(dim1=-2, dim2=-1))


def test_descent_is_the_gradients_followed() -> None:
    run = small(steps=3, record_every=1)
    found = descend(run, [5])
    seed = torch.tensor([5])
    feature = run.data.feature(seed)
    stored = StoredSamples.draw(run.data, feature, seed, "structured.train.0", 600)
    weights = initial_weights(run.model, run.data, seed)
    risks = []
    for _ in range(3):
        step = risk_and_gradients(weights, run.model, [stored])
        risks.append(float(step.risk_S))
        weights = Weights(weights.attention_SDD - 4.0 * step.attention_SDD, weights.v_Sd - 0.01 * step.v_Sd)
    assert torch.allclose(found.last.attention_SDD, weights.attention_SDD, atol=1e-6)
    assert torch.allclose(found.last.v_Sd, weights.v_Sd, atol=1e-6)
    assert found.curves["step"].tolist() == [0, 1, 2, 3]
    assert found.curves["train_risk"].tolist()[:3] == pytest.approx(risks, rel=1e-5)


def test_what_diverges_is_told_and_not_associated() -> None:
    rows = StructureRunner(keep=())(small(feature_lr=50.0, steps=30), [0, 1], torch.device("cpu"), lambda share: None)
    assert (rows["runs"]["exact"] == 0).all()
    assert rows["runs"]["alpha"].isna().all()
    assert (rows["runs"]["associated"] == 0).all()


def test_a_kept_attention_is_learned_once_and_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    from nearsight.train.structure import descent as descent_module

    asked: list[StructureRun] = []

    def counting(run: StructureRun, *rest: object, **options: object):
        asked.append(run)
        return descend(run, *rest, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(descent_module, "descend", counting)
    monkeypatch.setattr(StructureRun, "before", property(lambda run: small()))
    runner, device = StructureRunner(), torch.device("cpu")
    data = small().data
    descents = [Descent(num_samples=n, steps=20, num_test=500, feature_lr=0.01, attention_lr=0.0) for n in (30, 60)]
    runs = [StructureRun(data=data, feature=1, kept_from=600, descent=descent) for descent in descents]
    kept = [runner(run, [0, 1], device, lambda share: None) for run in runs]
    assert asked == [small(), *runs]
    learned = descend(small(), [0, 1]).last.attention_SDD
    for tables in kept:
        for _, entries in tables["attention"].groupby("step"):
            assert torch.allclose(torch.tensor(entries["entry"].to_numpy()), learned.double().flatten(), atol=1e-6)
        assert (tables["runs"]["exact"] == 1).all()
        assert list(tables["runs"].columns) == ["seed", *RESULTS]


def curve(**columns: list[float]) -> pd.DataFrame:
    steps = len(next(iter(columns.values())))
    return pd.DataFrame({"step": [10 * k for k in range(steps)], **columns})


def test_phases_by_their_rules() -> None:
    found = find_phases(
        curve(
            gamma=[0, 0.02, 0.08, 0.3, 0.8, 1.2],
            rho=[0, 0, -0.01, -0.1, -0.2, -0.3],
            associated=[0, 0.5, 1, 0.9, 1, 1],
            test_acc=[0.5, 0.85, 0.85, 0.9, 0.895, 0.9],
        ),
        best_accuracy=0.91,
    )
    assert (found.second, found.third) == (30, 50)
    flat = [0.0] * 3
    none = find_phases(curve(gamma=flat, rho=flat, associated=[1.0] * 3, test_acc=[1.0] * 3), best_accuracy=1.0)
    assert (none.second, none.third) == (None, None)


def test_association_counts_from_when_it_stays() -> None:
    for held, expected in [([0, 1, 0, 1, 1], 30), ([1, 1, 1], 0), ([0, 1, 1, 0.9], math.nan)]:
        assert exact_from(curve(associated=held)) == pytest.approx(expected, nan_ok=True)


@pytest.mark.parametrize(
    ("kind", "settings", "words"),
    [
        (PositionalModel, {"power": 4}, "power is 4, but must be odd"),
        (PositionalModel, {"power": 5.0}, "power is 5.0, but must be of type int"),
        (PositionalModel, {"diagonal": math.nan}, "diagonal is nan, but must be finite"),
        (Descent, {"samples": "frsh"}, "'frsh' is not a known kind of samples; did you mean 'fresh'"),
        (Descent, {"steps": 10.5}, "steps is 10.5, but must be of type int"),
        (StructureRun, {"feature": 0.5}, "feature is 0.5, but must be of type int"),
        (StructureRunner, {"keep": ("curvs",)}, "did you mean 'curves'"),
        (Descent, {"steps": 0}, "steps is 0"),
        (Descent, {"attention_lr": -1.0}, "attention_lr is -1.0"),
        (StructureRun, {"kept_from": 100}, "feature is 0, which the attention was learned with"),
    ],
)
def test_settings_that_cannot_be_are_refused(kind: type, settings: dict[str, object], words: str) -> None:
    with pytest.raises(InputError, match=words):
        kind(**settings)


@pytest.mark.parametrize(
    ("seeds", "attention", "words"),
    [
        ([], None, "some different numbers"),
        ([1, 1], None, "some different numbers"),
        ([0.5], None, "must be whole numbers"),
        ([0, 1], torch.zeros(2, 4, 4), r"of shape \(2, 4, 4\), but these seeds and patches need \(2, 6, 6\)"),
    ],
)
def test_what_cannot_be_descended_is_refused(seeds: list[int], attention: torch.Tensor | None, words: str) -> None:
    with pytest.raises(InputError, match=words):
        descend(small(steps=1), seeds, attention_SDD=attention)


def test_every_pair_of_seeds_differs() -> None:
    risks = descend(small(steps=1), [0, 1, 2]).curves.groupby("seed")["train_risk"].last()
    assert all(abs(one - other) > 1e-6 for one, other in itertools.combinations(risks, 2))
