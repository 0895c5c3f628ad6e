"""What plans of `nearsight.intervene` mean, by slow loops over rows, in attentions that are written down by hand.

A model runs as it is, in float64, but for its attention modules: their forward is replaced by one that computes
queries, keys and values as the family does, makes the whole map, changes it row by row, and multiplies by the values.

Shape suffixes: B images, W windows, H heads, N queries, M keys, d head size.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.models.vision_transformer import VisionTransformer
from vit_references.checking import unsettle

from nearsight import add_locat
from nearsight.lens import DropSinks, Identity, Mean, Offsets, OnlySinks, Plan, Reach, Uniform, Zero

Place = tuple[float, float] | None
"""(row, column) of a patch in its layer's grid; None for a token that is not a patch."""
Places = list[list[Place]]
"""Window by window."""


# What a plan makes of a map


def changed_row(
    plan: Plan,
    row_M: Tensor,
    query: Place,
    keys: Sequence[Place],
    *,
    typical: Sequence[float],
    sinks: set[int],
    hidden: set[int],
) -> Tensor:
    """One query's attention as a plan wants it; `typical` is what a reference set says of this row."""
    if isinstance(plan, Zero):
        return torch.zeros_like(row_M)
    if query is None and plan.rows == "patches":
        return row_M
    wanted = []
    for at, key in enumerate(keys):
        own, nothing = row_M[at], torch.zeros_like(row_M[at])
        if key is None or at in hidden:
            wanted.append(nothing)
        elif isinstance(plan, Identity):
            wanted.append(nothing + 1 if key == query else nothing)
        elif isinstance(plan, Uniform):
            wanted.append(nothing + 1)
        elif isinstance(plan, Reach):
            assert query is not None
            distance = math.dist(query, key)
            wanted.append(own if (distance >= plan.r if plan.beyond else distance <= plan.r) else nothing)
        elif isinstance(plan, OnlySinks):
            wanted.append(own if at in sinks else nothing)
        elif isinstance(plan, DropSinks):
            wanted.append(nothing if at in sinks else own)
        else:
            wanted.append(nothing + typical[at])
    spread_M = torch.stack(wanted)
    is_other_M = torch.tensor([key is None for key in keys])
    if plan.prefix == "share":
        spread_M = torch.where(is_other_M, row_M, spread_M)
    if spread_M.sum() == 0:
        return row_M
    spread_M = spread_M / spread_M.sum()
    if plan.prefix == "keep":
        return torch.where(is_other_M, row_M, row_M[~is_other_M].sum() * spread_M)
    return spread_M


def changed_map(
    plan: Plan, heads: Sequence[int], weights_BWHNM: Tensor, queries: Places, keys: Places, average_WHNM: Tensor | None
) -> Tensor:
    """The map of one attention with some of its heads changed."""
    new_BWHNM = weights_BWHNM.clone()
    for image, weights_WHNM in enumerate(weights_BWHNM):
        for head in heads:
            sinks = sinks_of(weights_WHNM[:, head], queries, keys)
            typical_WNM = typical_rows(plan, average_WHNM, head, queries, keys)
            for window, (asking, asked) in enumerate(zip(queries, keys, strict=True)):
                for at, query in enumerate(asking):
                    new_BWHNM[image, window, head, at] = changed_row(
                        plan,
                        weights_WHNM[window, head, at],
                        query,
                        asked,
                        typical=typical_WNM[window][at],
                        sinks=sinks[window],
                        hidden={m for m, key in enumerate(asked) if is_hidden(query, key, len(keys))},
                    )
    return new_BWHNM


def sinks_of(weights_WNM: Tensor, queries: Places, keys: Places) -> list[set[int]]:
    """Per window, the patches that receive more than ten times what a patch receives on average."""
    received = {}
    for window, (asking, asked) in enumerate(zip(queries, keys, strict=True)):
        is_patch_N = torch.tensor([query is not None for query in asking])
        for at, key in enumerate(asked):
            if key is not None:
                received[window, at] = weights_WNM[window, is_patch_N, at].sum().item()
    mean = sum(received.values()) / len(received)
    return [{at for (where, at), got in received.items() if where == w and got > 10 * mean} for w in range(len(keys))]


def typical_rows(
    plan: Plan, average_WHNM: Tensor | None, head: int, queries: Places, keys: Places
) -> list[list[list[float]]]:
    if average_WHNM is None:
        return [[[0.0] * len(asked)] * len(asking) for asking, asked in zip(queries, keys, strict=True)]
    average: list[list[list[float]]] = average_WHNM[:, head].tolist()
    if not isinstance(plan, Offsets):
        return average
    by_step = defaultdict(list)
    pairs = [
        (window, n, m, (key[0] - query[0], key[1] - query[1]))
        for window in range(len(queries))
        for n, query in enumerate(queries[window])
        for m, key in enumerate(keys[window])
        if query is not None and key is not None
    ]
    for window, n, m, step in pairs:
        by_step[step].append(average[window][n][m])
    for window, n, m, step in pairs:
        average[window][n][m] = sum(by_step[step]) / len(by_step[step])
    return average


def is_hidden(query: Place, key: Place, num_windows: int) -> bool:
    """Only a shift brings patches of opposite borders into one window, where Swin's mask separates them."""
    if num_windows == 1 or query is None or key is None:
        return False
    return max(abs(query[0] - key[0]), abs(query[1] - key[1])) >= WINDOW


# Families: how they compute queries, keys and values, and where their tokens are

Attend = Callable[..., Tensor]
"""From queries, keys and values [B·W, H, …, d] and what is added to the logits to the heads' outputs."""


@dataclass(frozen=True)
class Family:
    build: Callable[[], nn.Module]
    forward: Callable[..., Any]
    """Of an attention module, called with it, an `Attend`, and what the module is called with."""
    is_attention: Callable[[nn.Module], bool]
    places: Callable[[int], tuple[Places, Places]]
    """Of queries and keys, by layer."""
    image_size: tuple[int, int] = (48, 64)
    heads: Mapping[int | str, Sequence[int] | None] | None = None
    """Those that are changed in tests."""
    reach: float = 2.0
    """In patches, where some pairs are exactly as far apart."""
    gain: float = 20.0
    """What queries and keys are multiplied with, so that heads look somewhere and there are sinks."""
    tolerance: float = 1e-11
    without: tuple[str, ...] = ()
    """Plans that it cannot have."""

    @property
    def chosen(self) -> Mapping[int | str, Sequence[int] | None]:
        return {0: [1], 1: [0, 2]} if self.heads is None else self.heads

    def model(self) -> nn.Module:
        """In float64, for inference."""
        torch.manual_seed(0)
        model = self.build()
        unsettle(model, self.gain)
        return model.double().eval()

    def images(self, num: int = 2, seed: int = 1) -> Tensor:
        """One bright square, which makes sinks."""
        images = torch.randn(num, 3, *self.image_size, generator=torch.Generator().manual_seed(seed)).double()
        images[:, :, 16:24, 24:32] += 8.0
        return images


@contextmanager
def by_hand(family: Family, model: nn.Module, change: Callable[[int, Tensor], Tensor]) -> Iterator[None]:
    """While active, attention modules are replaced by hand-written ones whose maps go through `change(layer, map)`."""

    def attend(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | float = 0.0, *, number: int) -> Tensor:
        logits = query @ key.transpose(-2, -1) / math.sqrt(query.shape[-1]) + bias
        weights = logits.exp() / logits.exp().sum(-1, keepdim=True)
        windows = len(family.places(number)[0])
        return change(number, weights.unflatten(0, (-1, windows))).flatten(0, 1) @ value

    with ExitStack() as undo:
        for number, module in enumerate(filter(family.is_attention, model.modules())):
            forward = partial(family.forward, module, partial(attend, number=number))
            undo.enter_context(mock.patch.object(module, "forward", forward))
        yield


def maps_by_hand(family: Family, model: nn.Module, images: Tensor) -> dict[int, Tensor]:
    """Layer → [B, W, H, N, M]."""
    found: dict[int, Tensor] = {}

    def keep(number: int, weights: Tensor) -> Tensor:
        found[number] = weights
        return weights

    with torch.no_grad(), by_hand(family, model, keep):
        model(images)
    return found


def output_of(found: Any) -> Tensor:
    tensor: Tensor = found if isinstance(found, Tensor) else found.last_hidden_state
    return tensor


def expected_output(family: Family, model: nn.Module, images: Tensor, plans: Sequence[Plan]) -> Tensor:
    """What the model gives under plans, each for heads of layers that are given by position."""
    averages = {}
    for plan in plans:
        if isinstance(plan, Mean):
            assert isinstance(plan.reference, Tensor)
            averages[plan] = maps_by_hand(family, model, plan.reference)

    def change(number: int, weights_BWHNM: Tensor) -> Tensor:
        for plan in plans:
            if plan.heads is None or number in plan.heads:
                heads = range(weights_BWHNM.shape[2]) if plan.heads is None else plan.heads[number]
                average = averages[plan][number].mean(0) if plan in averages else None
                weights_BWHNM = changed_map(plan, heads or [], weights_BWHNM, *family.places(number), average)
        return weights_BWHNM

    with by_hand(family, model, change):
        return output_of(model(images))


def grid(rows: int, cols: int, prefix: int = 0) -> Callable[[int], tuple[Places, Places]]:
    """All patches, row by row, behind some other tokens; in every layer."""
    tokens: list[Place] = [None] * prefix
    tokens += [(row, col) for row in range(rows) for col in range(cols)]
    return lambda _layer: ([tokens], [tokens])


def in_heads(tokens: Tensor, num_heads: int) -> Tensor:
    return tokens.unflatten(-1, (num_heads, -1)).transpose(1, 2)


def joined(heads_BHNd: Tensor) -> Tensor:
    return heads_BHNd.transpose(1, 2).flatten(2)


def of_timm(module: Any, attend: Attend, x: Tensor, rope: Tensor | None = None, **_: Any) -> Tensor:
    """timm's `Attention` and `EvaAttention`, the latter with rotary positions."""
    if module.qkv is None:
        three = [module.q_proj(x), module.k_proj(x), module.v_proj(x)]
    else:
        bias = module.qkv.bias
        if bias is None and getattr(module, "q_bias", None) is not None:
            bias = torch.cat([module.q_bias, torch.zeros_like(module.q_bias), module.v_bias])
        three = list(F.linear(x, module.qkv.weight, bias).chunk(3, -1))
    query, key, value = (in_heads(part, module.num_heads) for part in three)
    query, key = module.q_norm(query), module.k_norm(key)
    bias_or_none: Tensor | float = 0.0
    if rope is not None:
        query, key = (rotated(part, rope, module.num_prefix_tokens, module.rotate_half) for part in (query, key))
    if hasattr(module, "gaug"):
        bias_or_none = gaussian_bias(module, query)
    return module.proj(joined(attend(query, key, value, bias_or_none)))  # type: ignore[no-any-return]


def rotated(tokens_BHNd: Tensor, rope: Tensor, prefix: int, half: bool) -> Tensor:
    before, patches = tokens_BHNd[:, :, :prefix], tokens_BHNd[:, :, prefix:]
    sine, cosine = rope.chunk(2, -1)
    if half:
        first, second = patches.chunk(2, -1)
        turned = torch.cat([-second, first], -1)
    else:
        turned = torch.stack([-patches[..., 1::2], patches[..., ::2]], -1).flatten(-2)
    return torch.cat([before, patches * cosine + turned * sine], 2)


def gaussian_bias(module: Any, query_BHNd: Tensor, rows: int = 6, cols: int = 8) -> Tensor:
    """LocAt's, for a model with CLS on the grid that it was made for (S2 Eq. 5-9)."""
    places_P2 = torch.tensor([(row, col) for row in range(rows) for col in range(cols)]).double()
    half_squares_PP2 = 0.5 * (places_P2[:, None] - places_P2) ** 2
    patches, longest = query_BHNd[:, :, 1:], max(rows, cols)
    variance = longest**2 / (1 + torch.exp(math.log(longest**2 - 1) - module.gaug.log_var(patches))) + 0.1
    kernel = torch.exp(-(half_squares_PP2 / variance[..., None, :]).sum(-1))
    return F.pad(torch.log1p(torch.exp(module.gaug.log_alpha(patches))) * kernel, (1, 0, 1, 0))


WINDOW = 4


def of_swin(module: Any, attend: Attend, x: Tensor, mask: Tensor | None = None) -> Tensor:
    query, key, value = (in_heads(part, module.num_heads) for part in module.qkv(x).chunk(3, -1))
    cells = [(row, col) for row in range(WINDOW) for col in range(WINDOW)]
    side = 2 * WINDOW - 1
    index = [[(r - s + WINDOW - 1) * side + c - d + WINDOW - 1 for s, d in cells] for r, c in cells]
    bias_HNM = module.relative_position_bias_table[torch.tensor(index)].permute(2, 0, 1)
    bias_LHNM = bias_HNM.expand(len(x), *bias_HNM.shape)
    if mask is not None:
        windows, _ = swin_windows(1)
        shut = [[[is_hidden(q, k, len(windows)) for k in tokens] for q in tokens] for tokens in windows]
        shut_LNM = torch.tensor(shut).repeat(len(x) // len(windows), 1, 1)
        bias_LHNM = bias_LHNM.masked_fill(shut_LNM[:, None], -math.inf)
    return module.proj(joined(attend(query, key, value, bias_LHNM)))  # type: ignore[no-any-return]


def swin_windows(layer: int) -> tuple[Places, Places]:
    """Of a grid of 8 × 12; in odd layers shifted by half a window, beyond the border from the other side."""
    shift = WINDOW // 2 if layer % 2 else 0
    windows: Places = [
        [((top + r + shift) % 8, (left + c + shift) % 12) for r in range(WINDOW) for c in range(WINDOW)]
        for top in range(0, 8, WINDOW)
        for left in range(0, 12, WINDOW)
    ]
    return windows, windows


def of_pvt(module: Any, attend: Attend, x: Tensor, feat_size: Sequence[int]) -> Tensor:
    query, source = in_heads(module.q(x), module.num_heads), x
    if module.sr is not None:
        image = x.transpose(1, 2).unflatten(2, tuple(feat_size))
        source = module.norm(module.sr(image).flatten(2).transpose(1, 2))
    key, value = (in_heads(part, module.num_heads) for part in module.kv(source).chunk(2, -1))
    return module.proj(joined(attend(query, key, value)))  # type: ignore[no-any-return]


def pvt_places(layer: int) -> tuple[Places, Places]:
    """Images of 64 × 64: patches of 4, 8, 16, 32 pixels; keys of 32."""
    side = 16 >> layer
    centres = [side / 4 - 0.5, 3 * side / 4 - 0.5]
    return grid(side, side)(layer)[0], [[(row, col) for row in centres for col in centres]]


def of_multihead(module: Any, attend: Attend, query: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
    three = F.linear(query, module.in_proj_weight, module.in_proj_bias).chunk(3, -1)
    return module.out_proj(joined(attend(*(in_heads(part, module.num_heads) for part in three)))), None


def of_encoder_layer(layer: Any, attend: Attend, src: Tensor, *_: Any, **__: Any) -> Tensor:
    if layer.norm_first:
        src = src + of_multihead(layer.self_attn, attend, layer.norm1(src))[0]
        return src + layer.linear2(layer.linear1(layer.norm2(src)).relu())  # type: ignore[no-any-return]
    src = layer.norm1(src + of_multihead(layer.self_attn, attend, src)[0])
    return layer.norm2(src + layer.linear2(layer.linear1(src).relu()))  # type: ignore[no-any-return]


def of_huggingface(
    module: Any, attend: Attend, hidden_states: Tensor, attention_mask: Tensor | None = None, **_: Any
) -> tuple[Tensor, None]:
    three = (layer(hidden_states) for layer in (module.q_proj, module.k_proj, module.v_proj))
    query, key, value = (part.unflatten(-1, (-1, module.head_dim)).transpose(1, 2) for part in three)
    project = module.o_proj if hasattr(module, "o_proj") else module.out_proj
    return project(joined(attend(query, key, value, 0.0 if attention_mask is None else attention_mask))), None


class Encoder(nn.Module):
    """A ViT of torch's encoder layers, which have a fast path without gradients."""

    def __init__(self, norm_first: bool) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, 48, 8, 8)
        self.cls, self.pos = nn.Parameter(torch.randn(1, 1, 48)), nn.Parameter(torch.randn(1, 49, 48))
        layer = nn.TransformerEncoderLayer(48, 3, 64, batch_first=True, norm_first=norm_first)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, images: Tensor) -> Tensor:
        patches = self.embed(images).flatten(2).transpose(1, 2)
        tokens: Tensor = self.encoder(torch.cat([self.cls.expand(len(images), -1, -1), patches], 1) + self.pos)
        return tokens


class AllTokens(VisionTransformer):
    """torchvision's, which returns all tokens instead of classes."""

    def forward(self, images: Tensor) -> Tensor:
        patches = self._process_input(images)
        tokens: Tensor = self.encoder(torch.cat([self.class_token.expand(len(images), -1, -1), patches], 1))
        return tokens


SMALL = {"depth": 2, "embed_dim": 48, "num_heads": 3, "img_size": (48, 64), "patch_size": 8}
TOKENS = {"num_classes": 0, "global_pool": ""}
"""All tokens come out, so that every change is seen."""


def timm_vit(name: str, *, fused: bool = True, locat: bool = False, **settings: Any) -> nn.Module:
    model: nn.Module = timm.create_model(name, **SMALL, **TOKENS, **settings)
    for module in model.modules():
        if hasattr(module, "fused_attn"):
            module.fused_attn = fused
    return add_locat(model) if locat else model


def named(*endings: str) -> Callable[[nn.Module], bool]:
    return lambda module: type(module).__name__.endswith(endings)


def like_vit(prefix: int, name: str, **settings: Any) -> Family:
    return Family(partial(timm_vit, name, **settings), of_timm, lambda m: hasattr(m, "fused_attn"), grid(6, 8, prefix))


def huggingface(name: str, implementation: str, prefix: int, **settings: Any) -> Family:
    def build() -> nn.Module:
        import transformers

        sizes = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 64}
        config = getattr(transformers, f"{name}Config")(**sizes, patch_size=8, **settings)
        model = getattr(transformers, f"{name}Model")._from_config(config, attn_implementation=implementation)
        assert isinstance(model, nn.Module)
        return model

    size = settings["image_size"] if isinstance(settings["image_size"], tuple) else (settings["image_size"],) * 2
    places = grid(size[0] // 8, size[1] // 8, prefix)
    # Its eager softmax is in float32, whatever the model is in.
    tolerance = 1e-6 if implementation == "eager" else 1e-11
    gain = 4.0 if name == "CLIPVision" else 20.0
    return Family(build, of_huggingface, named("Attention"), places, size, gain=gain, tolerance=tolerance)


def swin(**settings: Any) -> nn.Module:
    small = {"window_size": WINDOW, "embed_dim": 32, "depths": (2,), "num_heads": (2,), "img_size": (32, 48)}
    model: nn.Module = timm.create_model("swin_tiny_patch4_window7_224", **small, **TOKENS, **settings)
    return model


SINKS = ("drop-sinks", "only-sinks")
FAMILIES = {
    "vit": like_vit(1, "vit_tiny_patch16_224"),
    "vit-unfused": like_vit(1, "vit_tiny_patch16_224", fused=False),
    "registers": like_vit(5, "vit_small_patch14_reg4_dinov2"),
    "eva": like_vit(1, "eva02_tiny_patch14_224"),
    "dinov3": like_vit(5, "vit_small_patch16_dinov3"),
    "locat": like_vit(1, "vit_tiny_patch16_224", locat=True),
    "swin": Family(swin, of_swin, named("WindowAttention"), swin_windows, (32, 48), {0: [0], 1: [1]}, gain=40.0),
    "pvt": Family(
        lambda: timm.create_model("pvt_v2_b0", depths=(1, 1, 1, 1), **TOKENS),
        of_pvt,
        lambda module: hasattr(module, "kv"),
        pvt_places,
        (64, 64),
        {1: [1], 2: [0, 4]},
        reach=2.5,
        gain=10.0,
        without=("identity", *SINKS),
    ),
    "torchvision": Family(
        lambda: AllTokens(48, 8, num_layers=2, num_heads=3, hidden_dim=48, mlp_dim=64),
        of_multihead,
        named("MultiheadAttention"),
        grid(6, 6, 1),
        (48, 48),
        gain=4.0,
    ),
    "encoder-layers": Family(
        lambda: Encoder(norm_first=False), of_encoder_layer, named("EncoderLayer"), grid(6, 8, 1), gain=4.0
    ),
    "encoder-layers-norm-first": Family(
        lambda: Encoder(norm_first=True), of_encoder_layer, named("EncoderLayer"), grid(6, 8, 1), gain=4.0
    ),
    **{
        f"hf-{name}-{implementation}": huggingface(name, implementation, prefix, **settings)
        for name, prefix, settings in (
            ("ViT", 1, {"image_size": (48, 64)}),
            ("Dinov2WithRegisters", 5, {"image_size": 48, "mlp_ratio": 2}),
            ("CLIPVision", 1, {"image_size": 48}),
            ("Beit", 1, {"image_size": (48, 64), "use_relative_position_bias": True}),
        )
        for implementation in ("sdpa", "eager")
    },
}
