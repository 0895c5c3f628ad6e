"""The cache of features: found again, continued after a kill, healed, and never another model's."""

import json

import numpy as np
import pytest
import torch

from nearsight.errors import InputError
from nearsight.models import create_model
from nearsight.probe import (
    FeatureKey,
    FeatureSpec,
    Preparation,
    cache,
    cached_features,
    read_features,
    reading,
    weights_hash,
)

PREPARATION = Preparation(size=(32, 32), mean=(0.5, 0.5, 0.5), std=(0.25, 0.25, 0.25))
IMAGES = torch.randn(20, 3, 32, 32, generator=torch.Generator().manual_seed(0))
SPEC = FeatureSpec(place="norm", tokens="cls")


def vit(num_heads=3, seed=0):
    torch.manual_seed(seed)
    model = create_model("compact_vit", depth=1, embed_dim=24, num_heads=num_heads).eval()
    with torch.no_grad():
        model.blocks[0].attn.qkv.weight.mul_(30)  # attention that is not uniform, as after training
    return model


class Counted:
    """Images that note which of them were asked for, and that can be cut off."""

    def __init__(self, until=1000):
        self.asked, self.until = [], until

    def __call__(self, begin, end):
        if end > self.until:
            raise KeyboardInterrupt
        self.asked.append((begin, end))
        return IMAGES[begin:end]


def key_of(model, **changes):
    settings = {"model": weights_hash(model), "data": "d", "part": "test", "spec": SPEC, "preparation": PREPARATION}
    return FeatureKey(**{**settings, **changes})


def fetch(folder, model, images, key=None):
    with reading(model, SPEC, image_size=(32, 32)) as reader:
        return cached_features(key or key_of(model), reader, images, len(IMAGES), folder=folder, batch_size=2)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(cache, "CHUNK_BYTES", 4 * 24 * 4)  # four images


def test_features_are_computed_once(tmp_path):
    model, first, second = vit(), Counted(), Counted()
    features = fetch(tmp_path, model, first)
    torch.testing.assert_close(features, read_features(model, IMAGES, SPEC))
    assert torch.equal(fetch(tmp_path, model, second), features)
    assert first.asked[1:] == [(begin, begin + 2) for begin in range(0, 20, 2)]
    assert second.asked == [(0, 1)]  # the one that is always compared
    features[0] = 0  # a copy-on-write map
    assert not torch.equal(fetch(tmp_path, model, Counted()), features)


def test_a_kill_costs_a_chunk_and_damage_heals(tmp_path):
    model = vit()
    with pytest.raises(KeyboardInterrupt):
        fetch(tmp_path, model, Counted(until=10))
    continued = Counted()
    features = fetch(tmp_path, model, continued).clone()
    assert continued.asked[1:] == [(begin, begin + 2) for begin in range(8, 20, 2)]
    (path,) = tmp_path.glob("*/features.npy")
    array = np.lib.format.open_memmap(path, mode="r+")
    array[13] += 1
    array.flush()
    healed = Counted()
    assert torch.equal(fetch(tmp_path, model, healed), features)
    assert healed.asked[1:] == [(12, 14), (14, 16)]
    path.write_bytes(path.read_bytes()[:300])  # cut short
    assert torch.equal(fetch(tmp_path, model, Counted()), features)


def test_another_model_data_spec_or_preparation_is_another_folder(tmp_path):
    model = vit()
    keys = [
        key_of(model),
        key_of(vit(seed=1)),
        key_of(model, data="e"),
        key_of(model, part="train"),
        key_of(model, spec=FeatureSpec(place="block", tokens="cls")),
        key_of(model, preparation=Preparation(size=(32, 32), mean=(0.4, 0.5, 0.5), std=(0.25, 0.25, 0.25))),
    ]
    assert len({key.identity for key in keys}) == len(keys)


def test_features_of_another_model_are_refused(tmp_path):
    model, other = vit(), vit(seed=1)
    fetch(tmp_path, model, Counted())
    # The same weights, but another number of heads: only the numbers tell.
    with pytest.raises(InputError, match="those of another model, although its weights and settings are the same"):
        fetch(tmp_path, vit(num_heads=2), Counted())
    # A folder that was moved to where another model's features belong.
    (held,) = tmp_path.iterdir()
    held.rename(tmp_path / key_of(other).identity)
    with pytest.raises(InputError, match="features of another model than these"):
        fetch(tmp_path, other, Counted())
    record = tmp_path / key_of(other).identity / "record.json"
    assert json.loads(record.read_text())["model"] == weights_hash(model)
    with pytest.raises(InputError, match="but the reader reads"):
        fetch(tmp_path, model, Counted(), key=key_of(model, spec=FeatureSpec()))
