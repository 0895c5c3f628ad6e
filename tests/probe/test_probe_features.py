"""Features of blocks against the model's own parts, called by hand."""

import pytest
import timm
import torch
from torch import nn

from nearsight.errors import InputError
from nearsight.locat import add_locat
from nearsight.locat.refine import refine
from nearsight.models import create_model
from nearsight.probe import FeatureSpec, read_features, reading


def vit(**settings):
    torch.manual_seed(0)
    return create_model("compact_vit", depth=3, embed_dim=24, num_heads=3, **settings).eval()


def swin():
    torch.manual_seed(0)
    return timm.create_model(
        "swin_tiny_patch4_window7_224", img_size=56, embed_dim=12, depths=(1, 1), num_heads=(2, 2), window_size=7
    ).eval()


def images(side=32):
    return torch.randn(3, 3, side, side, generator=torch.Generator().manual_seed(1))


def tokens_after(model, number):
    """What block `number` of a timm ViT returns, by a hook."""
    seen = []
    handle = model.blocks[number].register_forward_hook(lambda module, inputs, output: seen.append(output))
    with torch.no_grad():
        model(images())
    handle.remove()
    return seen[0]


def as_map(patches_BPC, side):
    return patches_BPC.transpose(1, 2).unflatten(2, (side, side))


@pytest.mark.parametrize("block", [0, -2, -1])
def test_a_block_before_and_after_the_final_norm(block):
    model = vit().train()  # reading takes it to eval mode, and back
    tokens = tokens_after(model.eval(), block)
    model.train()
    for place, expected in (("block", tokens), ("norm", model.norm(tokens))):
        expected = expected.detach()
        read = {
            kind: read_features(model, images(), FeatureSpec(block=block, place=place, tokens=kind), batch_size=2)
            for kind in ("cls", "mean", "cls+mean", "patches")
        }
        torch.testing.assert_close(read["cls"], expected[:, 0])
        torch.testing.assert_close(read["patches"], as_map(expected[:, 1:], 8))
        torch.testing.assert_close(read["mean"], expected[:, 1:].mean(1))
        assert torch.equal(read["cls+mean"], torch.cat([read["cls"], read["mean"]], 1))
    assert model.training


def test_refined_patches_and_what_the_classifier_reads():
    model = add_locat(vit())
    normed = model.norm(tokens_after(model, -1)).detach()
    expected = refine(normed, 3)
    with reading(model, FeatureSpec(place="prr"), image_size=(32, 32)) as reader:
        cls, patches = reader.both(images())
    torch.testing.assert_close(cls, expected[:, 0])
    torch.testing.assert_close(patches, as_map(expected[:, 1:], 8))
    pooled = read_features(model, images(), FeatureSpec(place=None, tokens=None))
    with torch.no_grad():
        torch.testing.assert_close(model.head(pooled), model(images()))


def test_stages_of_a_hierarchical_model():
    model = add_locat(swin())
    with torch.no_grad():
        first = model.layers[0](model.patch_embed(images(56)))
        last = model.layers[1](first)
    stage = read_features(model, images(56), FeatureSpec(block=0))
    torch.testing.assert_close(stage, first.movedim(-1, 1))
    torch.testing.assert_close(read_features(model, images(56)), last.movedim(-1, 1))
    with reading(model, FeatureSpec(place=None, tokens=None), image_size=(56, 56)) as reader:
        assert (reader.spec.place, reader.spec.tokens, reader.block_name) == ("prr", "mean", "layers.1")
        torch.testing.assert_close(model.head.fc(reader(images(56))), model(images(56)))


def test_the_wide_token_of_a_jumbo():
    model = create_model("compact_jumbo_vit", depth=2, embed_dim=24, num_heads=3, num_jumbo=2).eval()
    nn.init.normal_(model.head.weight)
    pooled = read_features(model, images(), FeatureSpec(place=None, tokens=None))
    assert pooled.shape == (3, 48)
    with torch.no_grad():
        torch.testing.assert_close(model.head(pooled), model(images()))


class Wrapped(nn.Module):
    """A ViT that timm does not know, so that it is read by hooks."""

    def __init__(self):
        super().__init__()
        self.inner = vit()

    def forward(self, images):
        return self.inner(images)


def test_hooks_read_what_timm_gives():
    model = Wrapped().eval()
    for place in ("block", "norm"):
        for tokens in ("cls", "patches"):
            spec = FeatureSpec(place=place, tokens=tokens)
            by_hooks, by_timm = (read_features(one, images(), spec) for one in (model, model.inner))
            torch.testing.assert_close(by_hooks, by_timm)
    spec = FeatureSpec(block=1)
    torch.testing.assert_close(read_features(model, images(), spec), read_features(model.inner, images(), spec))
    with pytest.raises(InputError, match=r"no final norm after inner\.blocks\.1"):
        read_features(model, images(), FeatureSpec(block=1, place="norm"))


def test_what_is_not_there_is_named():
    cases = [
        (vit(), FeatureSpec(block=3), 32, "no block 3: they count from 0 to 2"),
        (vit(), FeatureSpec(place="prr"), 32, "does not refine its patches"),
        (swin(), FeatureSpec(tokens="cls"), 56, "SwinTransformer has no class token"),
        (swin(), FeatureSpec(block=0, place="norm"), 56, "no final norm after layers.0"),
    ]
    for model, spec, side, message in cases:
        with pytest.raises(InputError, match=message):
            read_features(model, images(side), spec)
    with pytest.raises(InputError, match="PRR refines what the last block returns"):
        FeatureSpec(block=0, place="prr")
    with pytest.raises(InputError, match="no images"):
        read_features(vit(), torch.empty(0, 3, 32, 32))


@pytest.mark.parametrize("tokens", ["cls", "mean", "cls+mean", "patches"])
def test_features_that_are_not_finite_are_no_features(tokens):
    model = vit()
    with torch.no_grad():
        model.blocks[1].mlp.fc2.bias.fill_(float("nan"))
    for block, is_refused in ((0, False), (1, True), (-1, True)):
        spec = FeatureSpec(block=block, tokens=tokens)
        if not is_refused:
            assert read_features(model, images(), spec).isfinite().all()
            continue
        with pytest.raises(InputError, match=r"what CompactViT gives at blocks\.\d is NaN or infinite: the model's"):
            read_features(model, images(), spec)


@pytest.mark.parametrize("setting", [{"tokens": "patch"}, {"tokens": ""}, {"place": "last"}])
def test_a_spec_that_names_no_features_is_refused(setting):
    (name,) = setting
    with pytest.raises(InputError, match=rf"^{name} is '\w*', but must be one of '"):
        FeatureSpec(**setting)
