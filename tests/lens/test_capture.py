"""The tap: what it recomputes is what the model used, and the model does not notice it."""

from collections.abc import Callable, Sequence

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from nearsight.lens.attention import Attention, ExplicitAttention, FusedAttention
from nearsight.lens.capture import OPAQUE, AttentionTap, Call


def look(model: nn.Module, *inputs: Tensor, **kwargs: object) -> tuple[object, list[tuple[Call, Attention]]]:
    """The output of a forward under the tap, and every candidate it told of."""
    seen: list[tuple[Call, Attention]] = []

    def listen(call: Call, candidates: Sequence[Callable[[], Attention]]) -> None:
        seen.extend((call, candidate()) for candidate in candidates)

    with AttentionTap(model, listen), torch.no_grad():
        output = model(*inputs, **kwargs)
    return output, seen


def weights(attention: FusedAttention) -> Tensor:
    """Dense softmax weights of fused attention, in float64."""
    logits = attention.query.double() @ attention.key.double().transpose(-2, -1) * attention.scale
    if attention.is_causal:
        logits = logits.masked_fill(torch.ones(logits.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
    if attention.mask is not None:
        mask = attention.mask
        logits = logits.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else logits + mask
    return logits.softmax(-1)


class Sdpa(nn.Module):
    """One attention call with whatever arguments a test wants."""

    def __init__(self, **kwargs: object) -> None:
        super().__init__()
        self.kwargs = kwargs

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, **self.kwargs)


@pytest.mark.parametrize(
    "kwargs",
    [
        {},
        {"scale": 0.3},
        {"is_causal": True},
        {"attn_mask": torch.randn(9, 9)},
        {"attn_mask": torch.rand(9, 9) > 0.4},
        {"attn_mask": torch.randn(2, 1, 1, 9)},
        {"enable_gqa": True},
    ],
    ids=lambda kwargs: ",".join(kwargs) or "plain",
)
def test_what_the_tap_tells_is_what_sdpa_used(kwargs: dict[str, object]) -> None:
    """With one-hot values the output of attention is the attention itself."""
    torch.manual_seed(1)
    if isinstance(mask := kwargs.get("attn_mask"), Tensor) and mask.dtype == torch.bool:
        mask.fill_diagonal_(True)
    num_key_heads = 2 if kwargs.get("enable_gqa") else 4
    query, key = torch.randn(2, 4, 9, 6), torch.randn(2, num_key_heads, 9, 6)
    value = torch.eye(9).expand(2, num_key_heads, 9, 9)
    used, [(call, attention)] = look(Sdpa(**kwargs), query, key, value)
    assert call == Call("", "sdpa", 0)
    assert isinstance(attention, FusedAttention)
    torch.testing.assert_close(weights(attention), used.double(), rtol=1e-5, atol=1e-6)


def test_keys_that_all_heads_share_are_expanded() -> None:
    query, key = torch.randn(2, 4, 9, 6), torch.randn(2, 1, 9, 6)
    value = torch.eye(9).expand(2, 1, 9, 9)
    used, [(_, attention)] = look(Sdpa(), query, key, value)
    torch.testing.assert_close(weights(attention), used.double(), rtol=1e-5, atol=1e-6)


MULTIHEAD = {
    "plain": {},
    "not batch first": {"batch_first": False},
    "without bias": {"bias": False},
    "other key width": {"kdim": 12, "vdim": 20},
    "appended bias": {"add_bias_kv": True},
    "appended zero": {"add_zero_attn": True},
}


@pytest.mark.parametrize("settings", MULTIHEAD.values(), ids=MULTIHEAD)
@pytest.mark.parametrize("masks", ["", "attn_mask", "key_padding_mask", "both", "per head"])
def test_multihead_attention_against_the_weights_it_returns(settings: dict[str, object], masks: str) -> None:
    torch.manual_seed(2)
    module = nn.MultiheadAttention(16, 4, **{"batch_first": True, **settings}).eval()
    query, key, value = torch.randn(3, 5, 16), torch.randn(3, 7, module.kdim), torch.randn(3, 7, module.vdim)
    if not module.batch_first:
        query, key, value = (tokens.transpose(0, 1) for tokens in (query, key, value))
    given: dict[str, Tensor] = {}
    if masks in ("attn_mask", "both"):
        given["attn_mask"] = torch.randn(5, 7)
    if masks in ("key_padding_mask", "both"):
        given["key_padding_mask"] = torch.rand(3, 7) < 0.3
        given["key_padding_mask"][:, 0] = False
        if "attn_mask" in given:
            given["key_padding_mask"] = torch.zeros(3, 7).masked_fill(given["key_padding_mask"], -torch.inf)
    if masks == "per head":
        given["attn_mask"] = torch.rand(12, 5, 7) < 0.3
        given["attn_mask"][..., 0] = False
    with torch.no_grad():
        _, expected = module(query, key, value, average_attn_weights=False, **given)
    _, [(call, attention)] = look(module, query, key, value, need_weights=False, **given)
    assert call.kind == "multihead"
    torch.testing.assert_close(weights(attention), expected.double(), rtol=1e-5, atol=1e-6)


def test_unbatched_multihead() -> None:
    module = nn.MultiheadAttention(16, 4).eval()
    tokens = torch.randn(5, 16)
    with torch.no_grad():
        _, expected = module(tokens, tokens, tokens, average_attn_weights=False)
    _, [(_, attention)] = look(module, tokens, tokens, tokens)
    torch.testing.assert_close(weights(attention)[0], expected.double(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_an_encoder_layers_fast_path_is_seen_and_kept(norm_first: bool, masked: bool) -> None:
    torch.manual_seed(3)
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True, norm_first=norm_first).eval()
    tokens = torch.randn(2, 6, 16)
    given = {"src_key_padding_mask": torch.tensor([[False] * 6, [False] * 4 + [True] * 2])} if masked else {}
    with torch.no_grad():
        plain = layer(tokens, **given)
        inner = layer.norm1(tokens) if norm_first else tokens
        mask = given.get("src_key_padding_mask")
        _, expected = layer.self_attn(inner, inner, inner, key_padding_mask=mask, average_attn_weights=False)
    watched, [(call, attention)] = look(layer, tokens, **given)
    assert torch.equal(plain, watched)
    assert call == Call("self_attn", "multihead", 0)
    torch.testing.assert_close(weights(attention), expected.double(), rtol=1e-5, atol=1e-6)


def test_an_encoder_layer_without_its_fast_path() -> None:
    layer = nn.TransformerEncoderLayer(16, 4, 32, activation=nn.SiLU(), batch_first=True).eval()
    _, seen = look(layer, torch.randn(2, 6, 16))
    assert [call for call, _ in seen] == [Call("self_attn", "multihead", 0)]


@pytest.mark.parametrize("how", ["@", "matmul", "bmm", "einsum", "baddbmm"])
def test_explicit_weights_are_seen_where_they_meet_the_values(how: str) -> None:
    attn, value = torch.randn(2, 5, 5).softmax(-1), torch.randn(2, 5, 3)
    products = {
        "@": lambda: attn @ value,
        "matmul": lambda: attn.matmul(value),
        "bmm": lambda: torch.bmm(attn, value),
        "einsum": lambda: torch.einsum("bij,bjd->bid", attn, value),
        "baddbmm": lambda: torch.baddbmm(torch.zeros(2, 5, 3), attn, value),
    }

    class Explicit(nn.Module):
        def forward(self) -> Tensor:
            return products[how]()

    _, seen = look(Explicit())
    assert all(call.kind == "product" for call, _ in seen)
    assert any(isinstance(found, ExplicitAttention) and found.weights is attn for _, found in seen)


def test_calls_are_named_and_counted_and_only_the_models() -> None:
    model = timm.create_model("compact_vit", depth=2, embed_dim=48, num_heads=4)
    seen: list[Call] = []
    with AttentionTap(model, lambda call, _: seen.append(call)), torch.no_grad():
        model(torch.randn(1, 3, 32, 32))
        F.scaled_dot_product_attention(*torch.randn(3, 1, 1, 2, 4))  # not the model's
    assert seen == [Call("blocks.0.attn", "sdpa", 0), Call("blocks.1.attn", "sdpa", 0)]


class Encoder(nn.Module):
    """A ViT out of torch's own layers, as tutorials build it."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 16, 8, 8)
        layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)

    def forward(self, images: Tensor) -> Tensor:
        return self.encoder(self.patches(images).flatten(2).transpose(1, 2))


MODELS = {
    "timm fused": lambda: timm.create_model("compact_vit", depth=2, embed_dim=48, num_heads=4),
    "timm swin": lambda: timm.create_model("swin_tiny_patch4_window7_224", img_size=56, depths=(2,), num_heads=(3,)),
    "nn.TransformerEncoder": Encoder,
}


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_outputs_with_and_without_the_tap_are_bit_identical(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(4)
    model = make().eval()
    side = 56 if "Swin" in type(model).__name__ else 32
    batch = torch.randn(2, 3, side, side)
    with torch.no_grad():
        plain = model(batch)
    watched, seen = look(model, batch)
    assert seen
    assert torch.equal(plain, watched)


def test_nothing_stays_after_a_failure() -> None:
    class Failing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(16, 4)

        def forward(self) -> Tensor:
            raise RuntimeError("no")

    model = Failing()
    tap = AttentionTap(model, lambda *_: None)
    with pytest.raises(RuntimeError, match="no"), tap:
        model()
    assert tap.layer_name is None
    assert "forward" not in model.attention.__dict__
    hooks = torch.nn.modules.module
    assert not hooks._global_forward_hooks
    assert not hooks._global_forward_pre_hooks


class SharpQueries(nn.MultiheadAttention):
    """Gives torch's forward other queries than its own."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, **settings: object) -> tuple[Tensor, Tensor | None]:
        return super().forward(query * 5, key, value, **settings)


class SelfAttention(nn.MultiheadAttention):
    """Takes other arguments than torch's forward, whose fast path it uses."""

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens, tokens, tokens, need_weights=False)[0]


class FromScratch(nn.MultiheadAttention):
    """Takes the weights of torch's module alone."""

    def forward(self, tokens: Tensor) -> Tensor:
        projected = F.linear(tokens, self.in_proj_weight, self.in_proj_bias).unflatten(-1, (3, self.num_heads, -1))
        query, key, value = projected.permute(2, 0, 3, 1, 4)
        return self.out_proj(F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2))


class ByFunction(nn.MultiheadAttention):
    def forward(self, tokens: Tensor) -> Tensor:
        tokens = tokens.transpose(0, 1)
        projections = (self.in_proj_weight, self.in_proj_bias, self.bias_k, self.bias_v, self.add_zero_attn)
        output = (0.0, self.out_proj.weight, self.out_proj.bias, False, None, False)
        return F.multi_head_attention_forward(tokens, tokens, tokens, 16, 4, *projections, *output)[0]


class ScaledTokens(nn.TransformerEncoderLayer):
    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens * 2)


def replaced() -> nn.MultiheadAttention:
    """A forward that somebody put onto an instance."""
    module = nn.MultiheadAttention(16, 4, batch_first=True)
    original = module.forward
    module.forward = lambda tokens: original(tokens * 3, tokens, tokens, need_weights=False)[0]
    return module


def encoder_with_sharp_queries(**settings: object) -> nn.Module:
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True, **settings)
    layer.self_attn = SharpQueries(16, 4, batch_first=True)
    return layer


# The module, how many tokens it takes, and by what its queries and its keys are multiplied.
OVERRIDING: dict[str, tuple[Callable[[], nn.Module], int, float, float]] = {
    "other arguments": (lambda: SharpQueries(16, 4, batch_first=True), 3, 5, 1),
    "another signature": (lambda: SelfAttention(16, 4, batch_first=True), 1, 1, 1),
    "from scratch": (lambda: FromScratch(16, 4, batch_first=True), 1, 1, 1),
    "by the function": (lambda: ByFunction(16, 4, batch_first=True, add_bias_kv=True), 1, 1, 1),
    "on the instance": (replaced, 1, 3, 1),
    "an encoder layer": (lambda: ScaledTokens(16, 4, 32, batch_first=True), 1, 2, 2),
    # torch's fast path does not call the attention module at all, whatever that overrides.
    "in a fast encoder layer": (encoder_with_sharp_queries, 1, 1, 1),
    "in a slow encoder layer": (lambda: encoder_with_sharp_queries(activation=nn.SiLU()), 1, 5, 1),
}


@pytest.mark.parametrize("case", OVERRIDING)
def test_what_overrides_torchs_forward_is_seen_by_what_it_calls(case: str) -> None:
    make, num_inputs, of_query, of_key = OVERRIDING[case]
    torch.manual_seed(5)
    module = make().eval()
    attention = getattr(module, "self_attn", module)
    kinds, shadows = [type(part) for part in module.modules()], [*module.__dict__]
    tokens = torch.randn(2, 6, 16)
    with torch.no_grad():
        plain = module(*[tokens] * num_inputs)
        stock = nn.MultiheadAttention(16, 4, batch_first=True, add_bias_kv=attention.bias_k is not None).eval()
        stock.load_state_dict(attention.state_dict())
        _, expected = stock(tokens * of_query, tokens * of_key, tokens, average_attn_weights=False)
    opaque = {name: part for name, part in module.named_modules() if isinstance(part, OPAQUE)}
    for calling in (None, opaque):  # in a survey, and when it is known who calls
        seen: list[Attention] = []
        listen = lambda _, candidates, seen=seen: seen.extend(candidate() for candidate in candidates)  # noqa: E731
        with AttentionTap(module, listen, calling), torch.no_grad():
            watched = module(*[tokens] * num_inputs)
        fused = [one for one in seen if isinstance(one, FusedAttention)]
        assert len(fused) == 1
        torch.testing.assert_close(weights(fused[0]), expected.double(), rtol=1e-5, atol=1e-6)
        for one, other in zip(tree_leaves(plain), tree_leaves(watched), strict=True):
            assert one is None or torch.equal(one, other)
    assert [type(part) for part in module.modules()] == kinds
    assert [*module.__dict__] == shadows


class OwnAttention(nn.Module):
    """Takes what an encoder layer gives its attention, and leaves the work to a part of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.batch_first = False  # an encoder layer asks before it takes its fast path
        self.inner = nn.Module()
        self.inner.forward = lambda x: F.scaled_dot_product_attention(x, x, x)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, **_settings: object) -> tuple[Tensor, None]:
        return self.inner(query), None


def test_an_encoder_layer_with_somebody_elses_attention() -> None:
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True).eval()
    layer.self_attn = OwnAttention()  # type: ignore[assignment]
    tokens = torch.randn(2, 6, 16)
    with torch.no_grad():
        plain = layer(tokens)
    for calling in (None, {"": layer, "self_attn.inner": layer.self_attn.inner}):  # in a survey, and after it
        seen: list[tuple[Call, Attention]] = []
        with (
            AttentionTap(layer, lambda call, candidates, seen=seen: seen.append((call, candidates[0]())), calling),
            torch.no_grad(),
        ):
            watched = layer(tokens)
        assert torch.equal(watched, plain)
        ((call, attention),) = [one for one in seen if isinstance(one[1], FusedAttention)]
        assert call.layer_name == "self_attn.inner"
        assert torch.equal(attention.query, tokens)
    assert "forward" not in layer.__dict__
