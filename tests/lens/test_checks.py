"""The conformance checks pass on models the lens sees right, and fail on those made to be seen wrong."""

from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import nearsight
from nearsight.errors import InputError
from nearsight.lens import checks
from nearsight.lens.checks import AdapterError, check_vit_adapter


class Tokens(nn.Module):
    """A small attention over patches of four pixels, with an order of tokens that a subclass may change."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, 16, 4, 4)

    def order(self, tokens: Tensor) -> Tensor:
        return tokens

    def forward(self, images: Tensor) -> Tensor:
        x = self.order(self.embed(images).flatten(2).transpose(1, 2))[:, None]
        return F.scaled_dot_product_attention(x, x, x)


@pytest.mark.parametrize("explicit", [False, True])
def test_a_vit_passes(explicit: bool) -> None:
    torch.manual_seed(0)
    model = timm.create_model("compact_vit", depth=2, embed_dim=48, num_heads=4)
    for block in model.blocks:
        block.attn.fused_attn = not explicit
    report = check_vit_adapter(model, 32)
    assert len(report.passed) == 6
    assert report.layers[0] == "blocks.0.attn: 8×8 patches, 64 keys that are patches, 1 that are not"
    assert not report.skipped
    assert str(report).count("ok: ") == 6
    assert model.training


def test_windows_and_an_image_that_is_not_square() -> None:
    torch.manual_seed(0)
    swin = timm.create_model(
        "swin_tiny_patch4_window7_224", img_size=(28, 56), depths=(2,), num_heads=(3,), num_classes=0
    )
    report = check_vit_adapter(swin, (28, 56))
    assert report.layers[1] == "layers.0.blocks.1.attn: 7×14 patches, 2 windows, 49 keys that are patches"


def test_windows_that_are_mostly_padding() -> None:
    torch.manual_seed(0)
    settings = {"img_size": (28, 40), "depths": (1,), "num_heads": (3,), "num_classes": 0}
    swin = timm.create_model("swin_tiny_patch4_window7_224", **settings)
    swin.layers[0].blocks[0].attn.fused_attn = False
    report = check_vit_adapter(swin, (28, 40))
    assert report.layers[0].startswith("layers.0.blocks.0.attn: 7×10 patches, 2 windows")


def test_tokens_in_another_order_than_believed_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Disordered(Tokens):
        def order(self, tokens: Tensor) -> Tensor:
            return tokens.flip(1)

    torch.manual_seed(0)
    assert check_vit_adapter(Disordered(), 32)  # the lens follows it
    right = checks.survey

    def wrong(*args: Any) -> checks.Survey:
        found = right(*args)
        for site in found.sites.values():
            site.geometry.key_places_WM2.copy_(site.geometry.key_places_WM2.flip(1))
        return found

    monkeypatch.setattr(checks, "survey", wrong)
    with pytest.raises(AdapterError, match=r"fails 1 checks:\nChanging part of the image .* row 0, column 0 of 8×8"):
        check_vit_adapter(Disordered(), 32)


def test_a_model_that_is_random_in_eval_mode_is_named() -> None:
    class Noisy(Tokens):
        def order(self, tokens: Tensor) -> Tensor:
            return tokens + 0.01 * torch.randn_like(tokens)

    with pytest.raises(AdapterError, match="random in eval mode"):
        check_vit_adapter(Noisy(), 32)


def test_a_model_that_mixes_its_batch_is_named() -> None:
    class Mixing(Tokens):
        def order(self, tokens: Tensor) -> Tensor:
            return tokens * (1 + 5 * (tokens.shape[0] > 1))

    with pytest.raises(AdapterError, match="A batch of images gives what each gives alone: mad"):
        check_vit_adapter(Mixing(), 32)


def test_a_model_that_changes_itself_is_named() -> None:
    class Changing(Tokens):
        def forward(self, images: Tensor) -> Tensor:
            self.seen = images.shape
            return super().forward(images)

    with pytest.raises(AdapterError, match="leaves the model or a random generator changed"):
        check_vit_adapter(Changing(), 32)


def test_weights_that_do_not_sum_to_one_are_named() -> None:
    class Scaled(Tokens):
        def forward(self, images: Tensor) -> Tensor:
            x = self.embed(images).flatten(2).transpose(1, 2)
            return (2 * (x @ x.transpose(1, 2)).softmax(-1)) @ x

    with pytest.raises(InputError, match="they sum to 2 … 2, not 1"):
        check_vit_adapter(Scaled(), 32)


@pytest.mark.parametrize(("parts", "error"), [(slice(None), None), (slice(2), "has 32 queries for 8×8 patches")])
def test_queries_in_parts_must_be_all_of_them(parts: slice, error: str | None) -> None:
    class Parts(Tokens):
        def forward(self, images: Tensor) -> Tensor:
            x = self.embed(images).flatten(2).transpose(1, 2)
            return torch.cat([F.scaled_dot_product_attention(q, x, x) for q in x.split(16, dim=1)[parts]], dim=1)

    torch.manual_seed(0)
    if error is None:
        assert len(check_vit_adapter(Parts(), 32).layers) == 4
        return
    with pytest.raises(AdapterError, match=error):
        check_vit_adapter(Parts(), 32)


def test_every_other_patch_may_ask() -> None:
    class Thinned(Tokens):
        def forward(self, images: Tensor) -> Tensor:
            x = self.embed(images)
            query, key = (y.flatten(2).transpose(1, 2) for y in (x[..., ::2, ::2], x))
            return F.scaled_dot_product_attention(query, key, key)

    torch.manual_seed(0)
    assert check_vit_adapter(Thinned(), 32)


def test_a_compiled_model_is_checked_as_what_it_was_compiled_from() -> None:
    torch.manual_seed(0)
    model = Tokens()
    assert check_vit_adapter(torch.compile(model, backend="eager"), 32) == check_vit_adapter(model, 32)


def test_a_model_without_attention() -> None:
    with pytest.raises(InputError, match="no attention was seen"):
        check_vit_adapter(nn.Conv2d(3, 4, 3), 32)


def test_the_public_name() -> None:
    assert nearsight.check_vit_adapter is check_vit_adapter
