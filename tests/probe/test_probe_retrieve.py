"""Dense retrieval against a brute-force reference in float64 loops, and what bounds its memory."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from nearsight.errors import InputError
from nearsight.locat import add_locat
from nearsight.models import create_model
from nearsight.probe import FeatureSpec, PatchMemory, Preparation, Retriever, build_memory, reading, retrieve
from nearsight.probe.frozen import FrozenModel, at_size
from nearsight.probe.retrieve import image_quotas, pooled_labels, stretched

IGNORED = 255
PREPARATION = Preparation(size=(32, 32), mean=(0.5, 0.5, 0.5), std=(0.25, 0.25, 0.25))


class Pictures(list):
    """(image, mask) pairs; the colours of a picture follow its classes, but for noise."""

    def __init__(self, num, seed, num_classes=4, side=48):
        generator = torch.Generator().manual_seed(seed)
        colours = torch.rand(num_classes, 3, generator=torch.Generator().manual_seed(7)) * 200
        for number in range(num):
            rows, columns = side + number % 3 * 8, side + number % 2 * 16
            coarse = torch.randint(num_classes, (3, 4), generator=generator)
            mask = coarse.repeat_interleave(-(-rows // 3), 0).repeat_interleave(-(-columns // 4), 1)[:rows, :columns]
            noise = 40 * torch.rand(rows, columns, 3, generator=generator)
            image = (colours[mask] + noise).to(torch.uint8).permute(2, 0, 1)
            mask = mask.to(torch.uint8)
            mask[:5] = IGNORED
            self.append((image, mask))


def pictures(num_train=6, num_test=3):
    parts = {"train": Pictures(num_train, 0), "test": Pictures(num_test, 1)}
    names = ("sky", "sea", "sand", "stone")
    return SimpleNamespace(name="made", num_classes=4, class_names=names, ignore_index=IGNORED, **parts)


@contextmanager
def reading_small(device="cpu"):
    torch.manual_seed(0)
    model = create_model("compact_vit", depth=2, embed_dim=24, num_heads=3).eval().to(device)
    with reading(model, FeatureSpec(), image_size=(32, 32)) as reader:
        yield reader


@pytest.fixture(scope="module")
def reader():
    with reading_small() as reader:
        yield reader


def test_at_another_size_a_model_is_a_copy_with_resampled_positions():
    torch.manual_seed(0)
    own, image = torch.randn(1, 3, 32, 32), torch.randn(1, 3, 48, 48)

    def read(model, images):
        with reading(model, FeatureSpec(), image_size=tuple(images.shape[2:])) as reader:
            return reader(images)

    model = add_locat(create_model("compact_vit", depth=2, embed_dim=24, num_heads=3)).eval()
    frozen, before = FrozenModel(label="one", model=model, preparation=PREPARATION), read(model, own)
    larger = at_size(frozen, 48, FeatureSpec(), option="--image-size", device=torch.device("cpu"))
    assert larger.preparation.size == (48, 48)
    assert frozen.preparation.size == (32, 32)
    found = read(larger.model, image)
    assert found.shape[2:] == (12, 12)
    assert torch.equal(read(model, own), before)
    model.set_input_size(img_size=(48, 48))
    torch.testing.assert_close(read(model, image), found, rtol=1e-4, atol=1e-5)


def test_sizes_that_a_model_does_not_take():
    model = create_model("convit_tiny", img_size=32, depth=2, local_up_to_layer=1, embed_dim=24, num_heads=2).eval()
    frozen = FrozenModel(label="one size", model=model, preparation=PREPARATION)
    with pytest.raises(InputError, match=r"one size cannot be read at 48×48 pixels: .*leave out --image-size"):
        at_size(frozen, 48, FeatureSpec(), option="--image-size", device=torch.device("cpu"))
    vit = FrozenModel(label="vit", model=create_model("compact_vit", depth=1), preparation=PREPARATION)
    with pytest.raises(InputError, match="--image-size is 50, but the model takes multiples of 4; use --image-size 52"):
        at_size(vit, 50, FeatureSpec(), option="--image-size", device=torch.device("cpu"))


def test_labels_are_pooled_over_the_pixels_of_a_patch():
    generator = torch.Generator().manual_seed(0)
    mask = torch.randint(3, (12, 8), generator=generator)
    mask[torch.rand(12, 8, generator=generator) < 0.3] = IGNORED
    mask[:4, :4] = IGNORED
    found = pooled_labels(mask, (3, 2), 3, IGNORED)
    for patch in range(6):
        row, column = 4 * (patch // 2), 4 * (patch % 2)
        under = [int(value) for value in mask[row : row + 4, column : column + 4].flatten() if value != IGNORED]
        expected = [under.count(label) / max(len(under), 1) for label in range(3)]
        torch.testing.assert_close(found[patch], torch.tensor(expected))
    # 5 pixels under 2 patches: the middle one is half in each.
    halves = pooled_labels(torch.tensor([[0, 0, 1, 1, 1]]), (1, 2), 2, IGNORED)
    torch.testing.assert_close(halves, torch.tensor([[0.8, 0.2], [0.0, 1.0]]))


def test_predictions_are_those_of_brute_force():
    generator = torch.Generator().manual_seed(0)
    features, queries = (torch.randn(num, 10, generator=generator) for num in (400, 25))
    labels = torch.rand(400, 4, generator=generator).softmax(1)
    unit = torch.nn.functional.normalize(features, dim=1)
    found = Retriever(PatchMemory(unit, labels), k=30, temperature=0.02).predict(queries)
    for query, distribution in zip(queries.double(), found, strict=True):
        similarity = (features.double() @ query) / (features.double().norm(dim=1) * query.norm())
        nearest = similarity.argsort(descending=True)[:30]
        weights = torch.exp(similarity[nearest] / 0.02)
        expected = (weights[:, None] * labels.double()[nearest]).sum(0) / weights.sum()
        torch.testing.assert_close(distribution.double(), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_data_set_from_end_to_end(reader, device):
    """Every step once more, image by image in float64."""
    dataset, where = pictures(), {"device": device}
    with reading_small(device) as there:
        memory = build_memory(there, dataset, PREPARATION, batch_size=4, **where)
        retriever = Retriever(memory, k=7, temperature=0.1)
        result = retrieve(there, retriever, dataset, PREPARATION, batch_size=2, **where)
    memory = PatchMemory(memory.features_MC.cpu(), memory.labels_Mc.cpu())
    confusion = torch.zeros(4, 4, dtype=torch.float64)
    for image, mask in dataset.test:
        patches = reader(PREPARATION.whole(image, torch.device("cpu")))[0].flatten(1).T
        queries = patches.double() / patches.double().norm(dim=1, keepdim=True)
        similarity, nearest = (queries @ memory.features_MC.double().T).topk(7, dim=1)
        weights = (similarity / 0.1).softmax(1)
        prediction = (weights.unsqueeze(-1) * memory.labels_Mc.double()[nearest]).sum(1)
        found = stretched(prediction, (8, 8), mask.shape)
        for true, taken in zip(mask.flatten().tolist(), found.flatten().tolist(), strict=True):
            if true != IGNORED:
                confusion[true, taken] += 1
    assert torch.equal(result.counts_N3c[:, 1].sum(0).double(), confusion.sum(1))  # true pixels of each class
    hits, truth, predicted = result.counts_N3c.sum(0).double()
    ious = hits / (truth + predicted - hits)
    assert result.mean_iou == pytest.approx(float(ious.mean()), abs=1e-12)
    union = confusion.sum(0) + confusion.sum(1) - confusion.diagonal()
    assert result.mean_iou == pytest.approx(float((confusion.diagonal() / union).mean()), abs=2e-3)
    assert result.mean_iou > 0.4  # colours tell the classes apart, even to an untrained model
    assert (result.num_images, result.memory_patches, result.unseen) == (3, len(memory), ())
    assert result.memory_bytes == len(memory) * 4 * (24 + 4)


def test_the_memory_is_bounded_and_does_not_depend_on_batches(reader):
    dataset = pictures()
    small = build_memory(reader, dataset, PREPARATION, size=50, batch_size=1)
    again = build_memory(reader, dataset, PREPARATION, size=50, batch_size=4)
    whole = build_memory(reader, dataset, PREPARATION)
    assert len(small) == 50
    torch.testing.assert_close(small.features_MC, again.features_MC)
    assert torch.equal(small.labels_Mc, again.labels_Mc)
    distances = torch.cdist(small.features_MC, whole.features_MC)
    assert float(distances.min(1).values.max()) < 1e-3  # a choice of the whole
    other = build_memory(reader, dataset, PREPARATION, size=50, seed=1)
    assert not torch.equal(other.labels_Mc, small.labels_Mc)
    for num_images, size in ((6, 50), (7, 3), (5, 5)):
        quotas = image_quotas(num_images, size)
        assert sum(quotas) == size
        assert max(quotas) - min(quotas) <= 1


def test_bad_input_is_named(reader):
    dataset = pictures(num_train=2)
    memory = build_memory(reader, dataset, PREPARATION, size=10)
    with pytest.raises(InputError, match="10 patches in the memory, but 30 neighbours"):
        Retriever(memory)
    for _, mask in dataset.train:
        mask.fill_(IGNORED)
    with pytest.raises(InputError, match="no patch of the 2 training images of made has a labelled pixel"):
        build_memory(reader, dataset, PREPARATION)
    one_class = pictures(num_train=2)
    for _, mask in one_class.train:
        mask.fill_(2)
    found = retrieve(reader, Retriever(build_memory(reader, one_class, PREPARATION)), one_class, PREPARATION)
    assert found.unseen == (0, 1, 3)  # said, and counted with an IoU of 0
    assert found.per_class_iou[0] == 0
