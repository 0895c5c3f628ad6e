"""From a name or a config to a model, and from a model to a file and back."""

from __future__ import annotations

import ast
import copy
import dataclasses
import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from nearsight.configuration import ADDED, check_choices, decode, encode, settle_numbers
from nearsight.errors import InputError, check_at_least, check_side
from nearsight.lazy import timm, torch
from nearsight.models.reach import Reach, settled_reach
from nearsight.randomness import seeded
from nearsight.tensorfile import load_tensors, save_tensors

if TYPE_CHECKING:
    from torch import Tensor, nn

Initialization = Literal["trunc_normal", "pytorch"]
COMPACT_MODELS = ("compact_vit", "compact_vit_positional", "compact_jumbo_vit")
"""Registered ViTs that take the settings of the compact ViT."""
RESNET_MODELS = ("compact_resnet18",)
_LOCAT = "locat_"
S2_BACKBONES = (
    "vit_tiny_patch16_224",
    "vit_small_patch16_224",
    "vit_base_patch16_224",
    "vit_tiny_patch16_reg4_224",
    "vit_base_patch16_reg4_224",
    "vit_tiny_patch16_rope_mixed_224",
    "vit_base_patch16_rope_mixed_224",
    "swin_tiny_patch4_window7_224",
    "swin_base_patch4_window7_224",
    "jumbo_vit_tiny_patch16_224",
    "jumbo_vit_base_patch16_224",
)
"""Those of S2's tables, and ViT-Small: they have a name with LocAt, too."""
_OF_ALL_MODELS = ("name", "shuffled_tiles", "permutation_seed")
_OF_RESNETS = ("channels",)
_NOT_OF_JUMBO = ("final_norm", "activation")
"""It has norms and MLPs of its own."""
_OF_TIMMS = ("settings", "gaug", "prr", "locality")
"""And what begins with `locat_`."""


def create_model(name: str, **kwargs: Any) -> nn.Module:
    """`timm.create_model`, which knows this package's models too, with an error that names the closest model or tag;
    or a model of the user's own code (module:function), where that may be imported."""
    check_model_name(name)
    if ":" in name:
        from nearsight.models.sources import build_own

        return build_own(name, **kwargs)
    model: nn.Module = timm.create_model(name, **kwargs)
    return model


def check_model_name(name: str) -> None:
    """Refuse a model that timm does not know, an unknown tag of one that it knows, or own code that nobody named."""
    if ":" in name:
        from nearsight.models.sources import check_own

        return check_own(name)
    architecture, _, tag = name.partition(".")
    if not timm.is_model(architecture):
        near = difflib.get_close_matches(name, timm.list_models(), n=1)
        hint = f"; did you mean {near[0]!r}?" if near else "; timm.list_models() shows those it knows"
        raise InputError(f"{name!r} is not a model timm knows{hint}")
    if not tag:
        return
    try:
        timm.get_pretrained_cfg(name, allow_unregistered=False)
    except RuntimeError:
        tags = [full.partition(".")[2] for full in timm.list_pretrained(f"{architecture}.*")]
        near = difflib.get_close_matches(tag, tags, n=1, cutoff=0.4)
        known = f"did you mean {architecture}.{near[0]}?" if near else f"known tags: {', '.join(tags) or 'none'}"
        raise InputError(f"timm knows {architecture}, but not its tag {tag!r}; {known}") from None


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A compact ViT, a network to compare it with, or any model of timm, up to what its data set says (image size,
    classes).

    A setting that a model does not have stays at its default.
    """

    name: str = "compact_vit"
    """Registered model name: compact_vit and its kin, compact_resnet18, any model that timm knows, or module:function
    for one of your own."""
    patch_size: int = 4
    """Side of a patch in pixels; must divide the image."""
    depth: int = 8
    """Transformer blocks."""
    width: int = 192
    """Embedding dimension; a multiple of the number of heads."""
    num_heads: int = 8
    """Attention heads per block."""
    mlp_width: int = 384
    """Hidden units of each block's MLP."""
    init: Initialization = "trunc_normal"
    """Initialisation of the projections (assumed: the paper does not report it)."""
    position_std: float = 0.02
    """Deviation of the initial positions and CLS token (assumed, too)."""
    positions: bool = field(default=True, metadata=ADDED)
    """Learned positions; without them it is a ViT − PE (S2, Table 5)."""
    pool: Literal["token", "avg"] = field(default="token", metadata=ADDED)
    """What the classifier reads: the CLS token, or the mean of the patches (+ GAP)."""
    gaug: bool = field(default=False, metadata=ADDED)
    """Gaussian-augmented attention (S2, LocAt)."""
    prr: bool = field(default=False, metadata=ADDED)
    """Patch representation refinement before the classifier (S2, LocAt)."""
    locat_kernel: Literal["gaussian", "laplace", "inverse"] = field(default="gaussian", metadata=ADDED)
    """How the bias of gaug falls with distance."""
    locat_width: Literal["query", "input"] | float = field(default="query", metadata=ADDED)
    """What says how wide that kernel is: each query, the block's input, or a number for all, in patches."""
    locat_isotropic: bool = field(default=False, metadata=ADDED)
    """One width for rows and columns."""
    locat_scale: Literal["learned", "none", "auto"] = field(default="learned", metadata=ADDED)
    """What the kernel is multiplied by: a learned α of each query, nothing, or the size of the logits."""
    reach: Reach = field(default=(), metadata=ADDED)
    """How many patches far a patch attends, in all blocks or in each (1.5 1.5 2 2 3 3 None None); None: no limit."""
    qkv_bias: bool = field(default=True, metadata=ADDED)
    """Queries, keys and values have biases."""
    head_size: int | None = field(default=None, metadata=ADDED)
    """Channels of a head; None: the width over the number of heads. Another makes attention's inner width another."""
    qk_std: float | None = field(default=None, metadata=ADDED)
    """Deviation of the initial weights of queries and keys alone; None: as init says."""
    embed_norm: bool = field(default=False, metadata=ADDED)
    """Layer norms before and after the patch embedding, as in vit-pytorch."""
    final_norm: bool = field(default=True, metadata=ADDED)
    """A layer norm between the last block and the classifier."""
    activation: Literal["gelu", "relu"] = field(default="gelu", metadata=ADDED)
    """Of the MLPs."""
    locat_gentle: bool = field(default=False, metadata=ADDED)
    """α begins near 0, so that a trained model first computes what it always did."""
    locality: tuple[str, ...] = field(default=(), metadata=ADDED)
    """What else makes attention local: names of inducers (nearsight finetune --help lists them), with options as in
    neighborhood:radius=1.5."""
    settings: tuple[str, ...] = field(default=(), metadata=ADDED)
    """Of a model of timm: its arguments, such as patch_size=8 window_size=4."""
    channels: int = field(default=64, metadata=ADDED)
    """Of a ResNet: channels of its first stage; every later one has twice as many as the one before."""
    shuffled_tiles: int = field(default=1, metadata=ADDED)
    """Tiles along a side into which every image is cut; they change places in one fixed way (S3). 1: none do."""
    permutation_seed: int = field(default=0, metadata=ADDED)
    """Seed of that way; independent of the run's seed, so that all runs of a study see the same images."""

    def __post_init__(self) -> None:
        settle_numbers(self)
        check_choices(self)
        object.__setattr__(self, "reach", settled_reach(self.reach, self.depth))
        object.__setattr__(self, "locality", _settled_locality(self.locality))
        if self.kind == "timm":
            if self.name not in S2_BACKBONES:  # timm takes seconds to load
                check_model_name(self.name)
            timms_settings(self.settings)
        values = {field.name: (getattr(self, field.name), field.default) for field in dataclasses.fields(self)}
        changed = {name: value for name, (value, default) in values.items() if value != default}
        for option, value in changed.items():
            if not self._has(option):
                way_out = "leave it out"
                if self.kind == "timm":
                    way_out = "what timm calls its arguments goes into settings, as in --model.settings patch_size=8"
                raise InputError(f"{option} is {value!r}, but {self.name} has no such setting; {way_out}")
        if (self.gaug or self.prr) and ":" in self.name:
            raise InputError(f"gaug and prr are for S2's backbones; {self.name} takes --model.locality gaug")
        for size in ("patch_size", "depth", "width", "num_heads", "mlp_width", "channels", "shuffled_tiles"):
            check_at_least(size, getattr(self, size), 1)
        check_at_least("permutation_seed", self.permutation_seed, 0)
        if self.head_size is not None:
            check_at_least("head_size", self.head_size, 1)
        if self.qk_std is not None:
            check_at_least("qk_std", self.qk_std, 0.0)
        if self.embed_norm and self.shuffled_tiles > 1:
            raise InputError(
                "embed_norm does not go with shuffled_tiles: it would normalise patches before their tiles move"
            )
        if self.permutation_seed and self.shuffled_tiles == 1:
            raise InputError(f"permutation_seed is {self.permutation_seed}, but shuffled_tiles is 1: none are shuffled")
        if self.width % self.num_heads:
            raise InputError(f"{self.num_heads} heads do not divide a width of {self.width}")
        if self.head_size == self.width // self.num_heads:  # what means the same is the same, also in an identity
            object.__setattr__(self, "head_size", None)
        for option, value in changed.items():
            if option.startswith(_LOCAT) and not self.gaug:
                raise InputError(f"{option} is {value!r}, but it needs gaug, which is off")

    @property
    def kind(self) -> Literal["compact", "resnet", "timm"]:
        if self.name in COMPACT_MODELS:
            return "compact"
        return "resnet" if self.name in RESNET_MODELS else "timm"

    def is_like(self, other: ModelConfig) -> bool:
        """Whether the settings of one mean the same for the other."""
        return self.kind == other.kind and (self.kind != "timm" or self.name == other.name)

    def _has(self, option: str) -> bool:
        """Whether a setting is one of this kind of model."""
        if option in _OF_ALL_MODELS:
            return True
        of_timm = option in _OF_TIMMS or option.startswith(_LOCAT)
        if self.kind == "compact":
            without = _NOT_OF_JUMBO if self.name == "compact_jumbo_vit" else ()
            return option not in (*_OF_RESNETS, *without, "settings")
        return of_timm if self.kind == "timm" else option in _OF_RESNETS

    @property
    def shape(self) -> tuple[object, ...]:
        """What two models must share for their weights to be stacked; how these start may differ."""
        return tuple(
            getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.name not in ("init", "position_std", "qk_std")
        )

    def build(self, image_size: tuple[int, int], num_classes: int) -> nn.Module:
        """The model with fresh weights, drawn from torch's global generator.

        LocAt and inducers draw their own after the others: models that differ only in them start with the same weights.
        """
        if self.locality:
            return self._build_local(image_size, num_classes)
        if self.kind == "compact":
            model = self._build_vit(image_size, num_classes)
        elif self.kind == "resnet":
            model = create_model(self.name, img_size=image_size, num_classes=num_classes, channels=self.channels)
        else:
            name = f"locat_{self.name}" if self.gaug or self.prr else self.name
            model = build_timms(name, image_size, num_classes, **timms_settings(self.settings), **self._locat)
        if self.shuffled_tiles > 1:
            from nearsight.models.shuffledtiles import shuffle_tiles

            shuffle_tiles(model, image_size, self.shuffled_tiles, self.permutation_seed)
        return model

    def _build_local(self, image_size: tuple[int, int], num_classes: int) -> nn.Module:
        from nearsight.lens.locality import add_locality
        from nearsight.locat.inducers import inducer_of

        device = torch.get_default_device()
        with torch.device("cpu" if device.type == "meta" else device):  # where tokens lie is found out by a forward
            model = dataclasses.replace(self, locality=()).build(image_size, num_classes)
            for text in self.locality:
                add_locality(model, inducer_of(text), image_size=image_size)
        return model.to(device)

    def _build_vit(self, image_size: tuple[int, int], num_classes: int) -> nn.Module:
        return create_model(
            f"locat_{self.name}" if self.gaug or self.prr else self.name,
            img_size=image_size,
            num_classes=num_classes,
            patch_size=self.patch_size,
            depth=self.depth,
            embed_dim=self.width,
            num_heads=self.num_heads,
            mlp_ratio=self.mlp_width / self.width,
            init=self.init,
            position_std=self.position_std,
            pos_embed="learn" if self.positions else "none",
            global_pool=self.pool,
            reach=self.reach,
            **self._further,
            **self._locat,
        )

    @property
    def _further(self) -> dict[str, Any]:
        """Settings of the compact ViT, as far as they are not at their defaults."""
        found = {name: getattr(self, name) for name in ("qk_std", "head_size") if getattr(self, name) is not None}
        found |= {name: False for name in ("qkv_bias", "final_norm") if not getattr(self, name)}
        if self.activation != "gelu":
            found["act_layer"] = self.activation
        return found | ({"embed_norm": True} if self.embed_norm else {})

    @property
    def _locat(self) -> dict[str, Any]:
        """The settings of LocAt, as `add_locat` calls them."""
        if not self.gaug:
            return {"gaug": False, "prr": True} if self.prr else {}
        options = [field.name for field in dataclasses.fields(self) if field.name.startswith(_LOCAT)]
        return {"gaug": True, "prr": self.prr} | {name.removeprefix(_LOCAT): getattr(self, name) for name in options}


def _settled_locality(texts: Sequence[str]) -> tuple[str, ...]:
    """Inducers in the one way to write them: what means the same is the same, also in a run's identity."""
    if not texts:
        return ()
    from nearsight.locat.inducers import inducer_of

    inducers = [inducer_of(text) for text in texts]
    names = [each.name for each in inducers]
    if twice := {name for name in names if names.count(name) > 1}:
        raise InputError(f"locality has {min(twice)} twice; give each inducer once")
    return tuple(each.text for each in inducers)


def timms_settings(texts: Sequence[str]) -> dict[str, Any]:
    """Arguments of a model, from "patch_size=8" and the like: numbers, True and False, tuples of them, or words."""
    found: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not (equals and name.isidentifier() and value):
            raise InputError(f"{text!r} is no setting of a model; write it as patch_size=8")
        if name in (own := {"img_size": "--data.image-size", "num_classes": "--data.name", "pretrained": "--init"}):
            raise InputError(f"{name} is not a setting here: {own[name]} says it")
        try:
            found[name] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            found[name] = value
    return found


def build_timms(name: str, image_size: tuple[int, int], num_classes: int, **settings: Any) -> nn.Module:
    """A model of timm for images of a size; without drop path, which belongs to the protocol."""
    settings = {**settings, "num_classes": num_classes}
    usual: dict[str, Any] = {"img_size": image_size, "drop_path_rate": 0.0}
    try:
        while True:
            try:
                return create_model(name, **{**usual, **settings})
            except TypeError as error:  # of convolutions some take neither: they fit any size
                unknown = next((option for option in usual if f"'{option}'" in str(error)), None)
                if unknown is None:
                    raise
                del usual[unknown]
    except InputError:
        raise
    except Exception as error:
        given = ", ".join(f"{key}={value}" for key, value in settings.items())
        problem = " ".join(str(error).split())
        builder = "your code" if ":" in name else "timm"
        raise InputError(
            f"{builder} cannot build {name} for images of {image_size} pixels with {given}: {problem}"
        ) from error


def save_model(
    path: Path, state: Mapping[str, Tensor], config: ModelConfig, image_size: tuple[int, int], num_classes: int
) -> None:
    """Weights with what is needed to build the model they belong to, in one safetensors file."""
    described = {"model": encode(config), "image_size": list(image_size), "num_classes": num_classes}
    save_tensors(path, state, described)


def load_model(path: Path) -> nn.Module:
    """The model of a file written by `save_model`, in eval mode."""
    tensors, described = load_tensors(path)
    try:
        config = decode(ModelConfig, described["model"], "model")
        image_size = decode(tuple[int, int], described["image_size"], "image_size")
        num_classes = decode(int, described["num_classes"], "num_classes")
        check_side("image_size", max(image_size))
    except KeyError as error:
        raise InputError(f"{path} does not say which model its weights belong to ({error} is missing)") from error
    except InputError as error:
        raise InputError(f"{path}: {error}") from error
    if not _fit(tensors, config, image_size, num_classes):
        raise InputError(f"{path} holds weights that do not fit the model it names")
    model = config.build(image_size, num_classes)
    model.load_state_dict(tensors)
    return model.eval()


def _num_blocks(settings: Mapping[str, Any]) -> float:
    """As far as the arguments of a model say; ∞ where they say nonsense."""
    depths = [value for name, value in settings.items() if "depth" in name]
    flat = [number for value in depths for number in (value if isinstance(value, tuple | list) else (value,))]
    return sum(number if isinstance(number, int) and number >= 0 else math.inf for number in flat)


def _fit(tensors: Mapping[str, Tensor], config: ModelConfig, image_size: tuple[int, int], num_classes: int) -> bool:
    """Whether these are the weights of such a model, checked before memory for it is allocated."""
    if config.depth > len(tensors) and config.kind == "compact":  # each block has several
        return False
    if config.kind == "timm" and _num_blocks(timms_settings(config.settings)) > len(tensors):
        return False
    try:
        with torch.device("meta"):
            # What inducers add is known of a model with memory alone: the backbone comes first.
            plain = dataclasses.replace(config, locality=()).build(image_size, num_classes).state_dict()
            if not all(name in tensors and tensors[name].shape == weight.shape for name, weight in plain.items()):
                return False
            wanted = config.build(image_size, num_classes).state_dict() if config.locality else plain
    except (ArithmeticError, RuntimeError, TypeError, ValueError):
        return False
    return wanted.keys() == tensors.keys() and all(wanted[name].shape == tensors[name].shape for name in wanted)


def with_fresh_weights(model: nn.Module, *, seed: int = 0) -> nn.Module:
    """A copy of a model with random weights, drawn as the model draws its own: what its architecture gives untrained.

    By the `reset_parameters` of PyTorch's own layers, then the model's `init_weights`, then the `reset_parameters` of
    other layers, where there are such. Parameters that none of these changes, such as tokens and positions of some
    models, are normal with a deviation of 0.02, as in most ViTs; those that are one number all over stay. The random
    state of the caller is left as it was.
    """
    home = next(model.parameters(), torch.zeros(())).device
    fresh = copy.deepcopy(model).cpu()  # on which the same seed gives the same weights everywhere
    before = {name: weight.detach().clone() for name, weight in fresh.named_parameters()}
    resets = [reset for module in fresh.modules() if callable(reset := getattr(module, "reset_parameters", None))]
    usual = [reset for reset in resets if reset.__module__.startswith("torch.")]
    initialise = [init] if callable(init := getattr(fresh, "init_weights", None)) else []
    with seeded(seed), torch.no_grad():
        for draw in (*usual, *initialise, *(reset for reset in resets if reset not in usual)):
            draw()
        for name, weight in fresh.named_parameters():
            if torch.equal(weight, before[name]) and bool((weight != weight.flatten()[:1]).any()):
                weight.normal_(std=0.02)
    return fresh.to(home)
