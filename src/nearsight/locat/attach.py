"""LocAt on an existing model (S2 §4)."""

from collections.abc import Iterable
from functools import partial
from typing import Any, Literal, TypeVar

from timm.layers import SelectAdaptivePool2d
from timm.models.eva import Eva
from timm.models.gcvit import GlobalContextVit, GlobalContextVitBlock
from timm.models.swin_transformer import SwinTransformer
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from nearsight.errors import InputError, check_at_least, check_flag
from nearsight.locat.attention import LOCAL_CLASSES, GridRecord
from nearsight.locat.gaussian import GaussianConfig, GaussianHeads, Kernel, Resolution, Scale
from nearsight.locat.refine import RefinedMapPool, RefinedPool

Model = TypeVar("Model", bound=nn.Module)

_WINDOWED = SwinTransformer | GlobalContextVit
"""Models whose attention is in windows, and whose heads pool maps."""
_OTHERS = {
    "SwinTransformerV2": "its attention compares directions, so that nothing says how strong a bias has to be",
    "VisionTransformerRelPos": "its attention takes its own bias for one grid alone",
}


def add_locat(
    model: Model,
    *,
    gaug: bool = True,
    prr: bool = True,
    kernel: Kernel = "gaussian",
    width: Literal["query", "input"] | float = "query",
    isotropic: bool = False,
    scale: Scale = "learned",
    resolution: Resolution = "linear",
    blocks: Iterable[int] | None = None,
    initial_grid: tuple[int, int] | None = None,
    gentle: bool = False,
) -> Model:
    """Make a timm ViT, RoPE-ViT (Eva), Swin or GCViT attend locally and refine its patches; returns the same object.

    Its weights keep their names and values. New ones are two small layers in each attention, `gaug.log_var` and
    `gaug.log_alpha`: 195 numbers where heads have 64 channels. They are drawn from torch's global generator.

    Args:
        gaug: Gaussian-augmented attention, in every block; of GCViT in those whose queries have places among the keys:
            not where queries of the whole image meet one of several windows.
        prr: patch representation refinement, between the final norm and the pooling that the model has. It sits where
            timm keeps attention pooling: choosing another pooling in `reset_classifier` takes it off. A norm that the
            model has after its pooling comes before the refinement.
        kernel: of the distance between patches.
        width: where the widths of the kernel come from: each query, the attention's input, or fixed, in patches.
        isotropic: one width for both axes.
        scale: α from each query; "none" for 1; "auto" for the size of the logits, without parameters.
        resolution: whether the variance grows in proportion to the side of the grid or to its square, when images are
            larger than the model was made for.
        blocks: those whose attention becomes local, counted from 0 over all stages; all by default.
        initial_grid: the grid (Swin: window) that the widths were learned on; by default that of the model now.
        gentle: α begins at 0.0003 everywhere and not near 0.7, so that a trained model first computes what it always
            did, as far as it has no refinement, and becomes local by further training.
    """
    for name, chosen in (("gaug", gaug), ("prr", prr), ("gentle", gentle)):
        check_flag(name, chosen)
    config = GaussianConfig(kernel=kernel, width=width, isotropic=isotropic, scale=scale, resolution=resolution)
    _check_grid(initial_grid)
    if gentle and scale != "learned":
        raise InputError(f"gentle=True is about a learned α, but scale is {scale!r}; leave one of them out")
    if not gaug and (config != GaussianConfig() or blocks is not None or initial_grid is not None or gentle):
        raise InputError("options of the local attention were given, but with gaug=False there is none; leave them out")
    _check_model(model)
    attentions = _attentions(model, blocks) if gaug else []
    if prr:
        _check_pooling(model)
    if attentions:
        _make_local(model, attentions, config, initial_grid)
        for heads in [module for module in model.modules() if isinstance(module, GaussianHeads)] if gentle else ():
            heads.start_gently()
    if prr:
        _refine(model)
    return model


def takes_locat(model: nn.Module) -> bool:
    """Whether the attentions of a model are of the kinds that are known here."""
    if isinstance(model, VisionTransformer | Eva | _WINDOWED):
        kinds = tuple(LOCAL_CLASSES), tuple(LOCAL_CLASSES.values())
        return all(any(isinstance(part, kinds[0] + kinds[1]) for part in block.modules()) for block in _blocks(model))
    return False


def counts_as_measured(model: nn.Module, layers: Iterable[Any]) -> bool:
    """Whether these layers are numbers, by which `measure` means the same as `add_locat`: in GCViT it leaves some
    blocks out."""
    return not isinstance(model, GlobalContextVit) and all(type(layer) is int for layer in layers)


def remove_gaug(model: nn.Module) -> bool:
    """Take the local bias off; whether there was any."""
    plain_classes = {local: plain for plain, local in LOCAL_CLASSES.items()}
    attentions: list[Any] = [module for module in model.modules() if type(module) in plain_classes]
    for attention in attentions:
        attention.__class__ = plain_classes[type(attention)]
        del attention.gaug
        if hasattr(attention, "grids"):
            del attention.grids
    _remove_hooks(model, GridRecord)
    return bool(attentions)


def remove_prr(model: nn.Module) -> bool:
    """Take the refinement off; whether there was any."""
    found: list[Any] = [module for module in model.modules() if isinstance(module, RefinedPool | RefinedMapPool)]
    for pool in found:
        whole: Any = model
        if isinstance(pool, RefinedMapPool):
            pool.__class__ = SelectAdaptivePool2d
            del pool.num_heads
            pool.__dict__.pop("channels_first", None)
        else:
            pool.retire()
            whole.attn_pool = None
            whole.pool_include_prefix = pool.include_prefix
            _remove_hooks(model, RefinedPool)
        whole.__dict__.pop("reset_classifier", None)
    return bool(found)


def _remove_hooks(model: nn.Module, kind: type) -> None:
    """Those that are methods of such objects."""
    for module in model.modules():
        hooks_of_module: tuple[Any, ...] = module._forward_pre_hooks, module._forward_hooks
        for hooks in hooks_of_module:
            for number, hook in list(hooks.items()):
                if isinstance(getattr(hook, "__self__", None), kind):
                    del hooks[number]


def _check_grid(initial_grid: Any) -> None:
    if initial_grid is None:
        return
    sides = tuple(initial_grid) if isinstance(initial_grid, Iterable) else (initial_grid,)
    if len(sides) != 2 or not all(isinstance(side, int) for side in sides):
        raise InputError(f"initial_grid is {initial_grid!r}, but must be two numbers: (rows, columns)")
    for side in sides:
        check_at_least("a side of initial_grid", side, 1)


def _check_model(model: nn.Module) -> None:
    name = type(model).__name__
    if not isinstance(model, VisionTransformer | Eva | _WINDOWED):
        reason = _OTHERS.get(name, "how its patches meet in attention is not known here")
        raise InputError(
            f"LocAt cannot be added to {name}: {reason}; it takes timm's VisionTransformer, Eva, Swin and GCViT"
        )


def _attentions(model: Any, blocks: Iterable[int] | None) -> list[nn.Module]:
    """Of the chosen blocks; some have two."""
    name = type(model).__name__
    if getattr(model, "patch_drop", None) is not None and not isinstance(model.patch_drop, nn.Identity):
        raise InputError(
            f"LocAt cannot be added to {name} with patch_drop_rate: without some of its patches an image has no grid"
        )
    those_of_model = _blocks(model)
    if blocks is None:
        chosen = [number for number, block in enumerate(those_of_model) if not _is_without_places(block)]
    else:
        chosen = _chosen(blocks, len(those_of_model), name)
    for number in chosen:
        if _is_without_places(those_of_model[number]):
            raise InputError(
                f"block {number} of {name} has queries of the whole image, which have no places in one of its windows; "
                "leave it out"
            )
    found = [attention for number in chosen for attention in _attentions_of_block(those_of_model[number], name)]
    attentions = list(dict.fromkeys(found))  # blocks may be shared
    for attention in attentions:
        if isinstance(attention, tuple(LOCAL_CLASSES.values())):
            raise InputError(f"{name} has a local attention already; LocAt is added once")
        if type(attention) not in LOCAL_CLASSES:
            raise InputError(
                f"LocAt cannot be added to {type(attention).__name__}, which is not one of timm's own attentions"
            )
    return attentions


def _chosen(blocks: Any, num_blocks: int, name: str) -> list[int]:
    numbers = list(blocks) if isinstance(blocks, Iterable) else [blocks]
    if not numbers or not all(type(number) is int for number in numbers):
        raise InputError(
            f"blocks is {blocks!r}, but must be numbers of blocks, such as [0, 1]; gaug=False makes none local"
        )
    for number in numbers:
        if number not in range(num_blocks):
            raise InputError(f"there is no block {number} in {name}: it has 0 to {num_blocks - 1}")
    return sorted(set(numbers))


def _attentions_of_block(block: nn.Module, model_name: str) -> list[nn.Module]:
    found = [module for module in block.modules() if isinstance(module, tuple(LOCAL_CLASSES))]
    if not found:
        attention = getattr(block, "attn", None)
        named = "" if attention is None else f" and {type(attention).__name__}"
        raise InputError(
            f"LocAt cannot be added to {model_name} with blocks of {type(block).__name__}{named}: only timm's ordinary "
            "attentions are known"
        )
    return found


def _blocks(model: Any) -> list[nn.Module]:
    if isinstance(model, SwinTransformer):
        return [block for stage in model.layers for block in stage.blocks]
    if isinstance(model, GlobalContextVit):
        return [block for stage in model.stages for block in stage.blocks]
    return list(model.blocks)


def _is_without_places(block: Any) -> bool:
    """Whether it is a block of GCViT in which queries of the whole image meet one of several windows. Such a query is
    of another part of the image than the key at the same place of the window."""
    return isinstance(block, GlobalContextVitBlock) and block.attn.use_global and block.num_windows > 1


def _make_local(
    model: Any, attentions: list[Any], config: GaussianConfig, initial_grid: tuple[int, int] | None
) -> None:
    grids = None
    if not isinstance(model, _WINDOWED):
        grids = GridRecord(model.patch_embed, _blocks(model), model.num_prefix_tokens)
    for attention in attentions:
        grid_size = initial_grid or (attention.window_size if grids is None else model.patch_embed.grid_size)
        weight = attention.proj.weight
        attention.gaug = GaussianHeads(
            config,
            dim=_in_features(attention),
            num_heads=attention.num_heads,
            head_dim=attention.proj.in_features // attention.num_heads,
            grid_size=tuple(grid_size),
            device=weight.device,
            dtype=weight.dtype,
        ).train(attention.training)
        if grids is not None:
            attention.grids = grids
        attention.__class__ = LOCAL_CLASSES[type(attention)]


def _in_features(attention: Any) -> int:
    projection: nn.Linear = attention.q_proj if attention.qkv is None else attention.qkv
    return projection.in_features


def _check_pooling(model: Any) -> None:
    name = type(model).__name__
    if isinstance(model, _WINDOWED):
        pool: nn.Module = model.head.global_pool
        if type(pool) is not SelectAdaptivePool2d:
            raise InputError(f"{name} pools by {type(pool).__name__}, which refinement does not fit; use prr=False")
        return
    if model.attn_pool is not None:
        raise InputError(
            f"{name} pools by attention ({type(model.attn_pool).__name__}), while refinement comes before CLS or mean "
            "pooling; use prr=False, or another global_pool"
        )
    if _late_norm(model) is not None and not model.global_pool:
        raise InputError(
            f"{name} normalises after pooling, but does not pool; use prr=False, or make it with fc_norm=False"
        )
    family = VisionTransformer if isinstance(model, VisionTransformer) else Eva
    if any(getattr(type(model), method) is not getattr(family, method) for method in ("forward_head", "pool")):
        raise InputError(f"{name} has a head of its own, which refinement would not reach; use prr=False")


def _refine(model: Any) -> None:
    num_heads = _num_heads(model)
    if isinstance(model, _WINDOWED):
        pool = model.head.global_pool
        pool.__class__ = RefinedMapPool
        pool.num_heads = num_heads
        if isinstance(model, GlobalContextVit):  # which makes another head for another number of classes
            pool.channels_first = True
            model.reset_classifier = partial(_reset_maps_classifier, model)
        return
    include_prefix = getattr(model, "pool_include_prefix", False)
    model.attn_pool = RefinedPool(
        num_heads,
        pool=model.global_pool,
        num_prefix=model.num_prefix_tokens,
        include_prefix=include_prefix,
        late_norm=_late_norm(model),
    )
    model.pool_include_prefix = True  # for `attn_pool`, which gets all tokens
    model.reset_classifier = partial(_reset_classifier, model)


def _late_norm(model: Any) -> nn.Module | None:
    """The norm of a model that normalises what it has pooled, and nothing before."""
    norm: nn.Module = model.fc_norm
    return norm if isinstance(model.norm, nn.Identity) and not isinstance(norm, nn.Identity) else None


def _num_heads(model: Any) -> int:
    """Of the last attention."""
    for block in reversed(_blocks(model)):
        for module in block.modules():
            if (num_heads := getattr(module, "num_heads", None)) is not None:
                return int(num_heads)
    raise InputError(f"{type(model).__name__} has no attention, so nothing says how many heads refinement has")


def _reset_classifier(model: Any, num_classes: int, global_pool: str | None = None) -> None:
    """That of timm. Not every model of it takes off what pools before another pooling, and none knows what we set."""
    pool = model.attn_pool
    if global_pool is not None and isinstance(pool, RefinedPool):
        if global_pool and global_pool == pool.pool:
            global_pool = None  # as it is
        else:
            pool.retire()
            model.attn_pool = None
            model.pool_include_prefix = pool.include_prefix
    type(model).reset_classifier(model, num_classes, global_pool)


def _reset_maps_classifier(model: Any, num_classes: int, global_pool: str | None = None, **options: Any) -> None:
    """That of timm, with refinement in the new head, unless it pools in another way."""
    before = model.head.global_pool
    stays = global_pool is None or global_pool == before.pool_type
    type(model).reset_classifier(model, num_classes, global_pool, **options)
    if stays and isinstance(before, RefinedMapPool):
        _refine(model)
