"""GAug as an inducer: a kernel whose width and strength each query predicts (S2, LocAt)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from nearsight.errors import check_flag
from nearsight.locat.inducers.base import Asked, Frame, Gated, Layers, Radial, register_locality

if TYPE_CHECKING:
    from torch import Tensor, nn


@register_locality
@dataclass(frozen=True, kw_only=True)
class GaussianAugmented(Gated):
    """GAug (S2): a kernel of the distance, whose width and strength each query predicts; a gate for each head
    multiplies it.

    timm's ViT, Eva, Swin and GCViT get the modules of `add_locat`, with its fused kernels. Elsewhere heads read queries
    as they meet the keys, behind a rotation where there is one, and `width="input"` is refused.
    """

    name = "gaug"
    about = "a Gaussian of the distance, whose width and strength each query predicts (LocAt)"
    needs_queries = True

    kernel: Literal["gaussian", "laplace", "inverse"] = "gaussian"
    """How the bias falls with distance."""
    width: Literal["query", "input"] | float = "query"
    """Where widths come from: each query, the attention's input, or fixed, in patches."""
    isotropic: bool = False
    """One width for rows and columns."""
    scale: Literal["learned", "none", "auto"] = "learned"
    """The strength: of each query, 1, or the size of the logits."""
    resolution: Literal["linear", "squared"] = "linear"
    """How variances grow with the grid."""
    gated: bool = True
    """Whether there is a gate. Without one it is as published, and takes effect at once."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_flag("gated", self.gated)
        self._config()

    def _config(self) -> Any:
        from nearsight.locat.gaussian import GaussianConfig

        return GaussianConfig(
            kernel=self.kernel,
            width=self.width,
            isotropic=self.isotropic,
            scale=self.scale,
            resolution=self.resolution,
        )

    def add_itself(self, model: nn.Module, layers: Layers) -> bool:
        from nearsight.locat.attach import add_locat, counts_as_measured, takes_locat
        from nearsight.locat.gaussian import GaussianHeads

        if not takes_locat(model):
            return False
        if layers is not None and not counts_as_measured(model, layers):
            return False
        add_locat(model, gaug=True, prr=False, **vars(self._config()), blocks=layers)  # type: ignore[arg-type]
        for heads in model.modules() if self.gated else ():
            if isinstance(heads, GaussianHeads) and heads.gate is None:
                heads.add_gate(self.gate, next(model.parameters()))
        return True

    def remove_itself(self, model: nn.Module) -> bool:
        from nearsight.locat.attach import remove_gaug

        return remove_gaug(model)

    def parameters(self, frame: Frame) -> dict[str, Tensor | nn.Module]:
        from nearsight.locat.gaussian import GaussianHeads

        if self.width == "input":
            raise self.refuse(
                f"width='input' is known of timm's ViT, Eva, Swin and GCViT alone, not {frame.layer_name}"
            )
        if self.scale == "auto" and not frame.sees_keys:
            raise self.refuse(f"scale='auto' needs the keys, which are not seen in {frame.layer_name}")
        if frame.head_size is None:
            raise self.refuse(f"the queries of {frame.layer_name} are not seen")
        heads = GaussianHeads(
            self._config(), dim=0, num_heads=frame.num_heads, head_dim=frame.head_size, grid_size=frame.extent
        )
        return {"gaug": heads, **({"gate": self.gates(frame)} if self.gated else {})}

    def _bumps(self, own: Any, asked: Asked) -> tuple[Tensor, Tensor]:
        """Precisions [X, H, T, 2] and strengths [X, H, T], without the gate; X images and their windows, or 1."""
        heads, query = own.gaug, asked.query_BWHTd
        assert query is not None
        variance, strength_XHT = heads.of_queries(
            query.flatten(0, 1),  # to the heads, windows are more images
            self._size_of_keys(asked) if self.scale == "auto" else None,
            asked.extent,
            asked.scale,
        )
        return (0.5 / (variance + heads.eps)).expand(*variance.shape[:-1], 2), strength_XHT

    def radial(self, own: Any, asked: Asked) -> Radial:
        precision_XHT2, strength_XHT = self._bumps(own, asked)
        if self.gated:
            strength_XHT = own.gate[:, None] * strength_XHT
        return Radial(
            self.kernel,
            precision_XHT2,
            strength_XHT,
            largest_half_square=own.gaug.longest_half_square(asked.extent),
        )

    def bias(self, own: Any, asked: Asked) -> Tensor:
        from nearsight.locat.gaussian import kernel_of

        heads, query = own.gaug, asked.query_BWHTd
        assert query is not None
        precision_XHT2, strength_XHT = self._bumps(own, asked)
        precision, strength = (
            part.unflatten(0, (-1, query.shape[1])) if len(part) > 1 else part.unsqueeze(0)
            for part in (precision_XHT2, strength_XHT)
        )
        squares_W1TM2 = asked.steps.square().clamp(max=2 * heads.longest_half_square(asked.extent))[:, None]
        rows, cols = (precision[..., axis : axis + 1] * squares_W1TM2[..., axis] for axis in (0, 1))
        kernel = kernel_of(rows + cols, self.kernel)
        bias: Tensor = strength[..., None] * kernel
        return bias if not self.gated else self.by_head(own.gate) * bias

    def _size_of_keys(self, asked: Asked) -> Tensor:
        """How long the keys of patches are on average, [B·W, H, 1]."""
        keys = asked.key_BWHMd
        assert keys is not None
        lengths_BWHM = keys.to(asked.steps.dtype).norm(dim=-1)
        is_patch_W1M = asked.keys_WM2[:, None, :, 0].isfinite()
        mean_BWH: Tensor = (lengths_BWHM * is_patch_W1M).sum(-1) / is_patch_W1M.sum(-1)
        return mean_BWH.flatten(0, 1).unsqueeze(-1)
