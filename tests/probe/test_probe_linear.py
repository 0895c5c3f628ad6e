"""The stacked linear probe: each head is what torch trains alone, and the best is as good as scikit-learn's."""

from math import cos, pi

import pytest
import torch
import torch.nn.functional as F

from nearsight.data import epoch_batches, stratified_split
from nearsight.errors import InputError
from nearsight.probe import LinearConfig, linear_probe
from nearsight.probe.linear import Heads


def samples(num, seed, num_classes=4, num_channels=12):
    """Overlapping clouds: not all of them can be told apart."""
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(num_classes, num_channels, generator=torch.Generator().manual_seed(99))
    labels = torch.arange(num) % num_classes
    return centres[labels] + 1.5 * torch.randn(num, num_channels, generator=generator), labels


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_each_head_is_what_torch_trains_alone(optimizer, device):
    config = LinearConfig(
        optimizer=optimizer, learning_rates=(0.01, 0.3), weight_decays=(0.0, 0.05), batch_size=64, num_epochs=3
    )
    features, labels = samples(200, 0)
    heads = Heads(config, 12, 4, torch.device(device))
    start = heads.weight_CKc[:, 0].cpu().clone()
    for epoch in range(3):
        for order in epoch_batches(torch.tensor([0]), epoch, 200, 64)[:, 0]:
            heads.step(features[order].to(device), labels[order].to(device), (1 + cos(pi * epoch / 3)) / 2)
    for number, (rate, decay) in enumerate(config.grid):
        layer = torch.nn.Linear(12, 4)
        with torch.no_grad():
            layer.weight.copy_(start.T)
            layer.bias.zero_()
        rate = rate * 64 / 256
        kinds = {
            "sgd": lambda layer=layer, rate=rate, decay=decay: torch.optim.SGD(
                layer.parameters(), rate, momentum=0.9, weight_decay=decay
            ),
            "adamw": lambda layer=layer, rate=rate, decay=decay: torch.optim.AdamW(
                layer.parameters(), rate, weight_decay=decay
            ),
        }
        alone = kinds[optimizer]()
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(alone, 3)
        for epoch in range(3):
            for order in epoch_batches(torch.tensor([0]), epoch, 200, 64)[:, 0]:
                alone.zero_grad()
                F.cross_entropy(layer(features[order]), labels[order]).backward()
                alone.step()
            schedule.step()
        torch.testing.assert_close(heads.weight_CKc[:, number].cpu(), layer.weight.detach().T, atol=2e-5, rtol=1e-4)
        torch.testing.assert_close(heads.bias_Kc[number].cpu(), layer.bias.detach(), atol=2e-5, rtol=1e-4)


def test_as_good_as_logistic_regression():
    linear_model = pytest.importorskip("sklearn.linear_model")
    (train, labels), (test, test_labels) = samples(1500, 1), samples(1000, 2)
    result = linear_probe(
        train, labels, test, test_labels, num_classes=4, config=LinearConfig(batch_size=256, num_epochs=30)
    )
    reference = linear_model.LogisticRegression(max_iter=500).fit(train.numpy(), labels.numpy())
    assert result.test_accuracy == pytest.approx(reference.score(test.numpy(), test_labels.numpy()), abs=0.03)
    assert result.test_accuracy > 0.6
    # What is handed back is the head that was tested.
    predicted = (test @ result.weight_Cc + result.bias_c).argmax(1)
    assert float((predicted == test_labels).double().mean()) == pytest.approx(result.test_accuracy)
    assert result.best.validation_accuracy == max(head.validation_accuracy for head in result.heads)


def test_random_crops_take_the_place_of_stored_features():
    (train, labels), (test, test_labels) = samples(300, 3), samples(100, 4)
    config = LinearConfig(batch_size=100, num_epochs=2, learning_rates=(0.1,))
    training, _ = stratified_split(labels, config.validation_fraction, config.seed)
    seen = []

    def crops(positions, epoch):
        seen.append((epoch, positions))
        return train[positions]

    with_crops = linear_probe(train, labels, test, test_labels, num_classes=4, config=config, crops=crops)
    stored = linear_probe(train, labels, test, test_labels, num_classes=4, config=config)
    assert torch.equal(with_crops.weight_Cc, stored.weight_Cc)
    assert [epoch for epoch, _ in seen] == [0, 0, 1, 1]
    assert set(torch.cat([positions for _, positions in seen]).tolist()) <= set(training.tolist())


def test_bad_input_is_named():
    (train, labels), (test, test_labels) = samples(80, 5), samples(40, 6)
    with pytest.raises(InputError, match="class 2 of the test samples is never seen"):
        linear_probe(train[labels != 2], labels[labels != 2], test, test_labels, num_classes=4)
    with pytest.raises(InputError, match="at least one learning rate"):
        LinearConfig(learning_rates=())
    for setting, words in (
        ({"optimizer": "lamb"}, "optimizer is 'lamb', but must be one of 'sgd', 'adamw'"),
        ({"momentum": 1.0}, "momentum is 1.0, but must lie in"),
        ({"betas": (0.9, 1.5)}, "betas is 1.5, but must lie in"),
        ({"validation_fraction": 0.0}, "validation_fraction is 0.0, but must lie between 0 and 1"),
    ):
        with pytest.raises(InputError, match=words):
            LinearConfig(**setting)
