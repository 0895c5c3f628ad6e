"""Samples of structured patches, as a model that sees patches only through one direction v needs them.

Such a model needs two things of a sample: the inner products ⟨v, X_j⟩, and the sum of the patches under given weights,
which is the gradient of v. `StoredSamples` hold all their patches and serve as the training set. `ProjectedSamples` are
used once: they hold neither ξ nor X, only what of them can matter for one v. Given v, ⟨v, ξ_j⟩ is one normal number per
patch, and what the weighted sum of the ξ_j has in the d − 2 directions across w* and v is one normal vector for all
patches together. Both have exactly the law of samples that are drawn in full, at a hundredth of the cost.

Shape suffixes: S seeds, N samples, D patches, d dimensions of a patch, M = N·D patches of all samples.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nearsight.data.structured import PatchData, normals
from nearsight.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

NUMBERS_AT_ONCE = 1 << 18
"""Normal numbers that are drawn together: as many as stay in a processor's cache while they are made."""
PATCHES_AT_ONCE = 1 << 17
"""Patches of all seeds that go through a model together."""
FRESH_AT_ONCE = PATCHES_AT_ONCE // 10
"""Patches of one seed, where they are fresh. A piece is one draw of what its noise has across the feature, so its size
must not depend on how many seeds there are; of ten seeds it is as above."""


@dataclass(frozen=True)
class StoredSamples:
    """Samples with all their patches. Those of one coordinate lie together, which is how products with v read them."""

    patch_SdM: Tensor
    label_SN: Tensor

    @classmethod
    def draw(cls, data: PatchData, feature_Sd: Tensor, seed_S: Tensor, stream: str, num_samples: int) -> StoredSamples:
        """The first samples of a stream."""
        num_patches, dim, device = data.num_patches, data.dim, seed_S.device
        strength_SND, label_SN = data.signals(seed_S, stream, 0, torch.arange(num_samples, device=device))
        patch_SdND = torch.empty(len(seed_S), dim, num_samples, num_patches, device=device)
        at_once = max(1, NUMBERS_AT_ONCE // (num_patches * dim))
        for seed, feature_d, strength_ND, patch_dND in zip(seed_S, feature_Sd, strength_SND, patch_SdND, strict=True):
            for first in range(0, num_samples, at_once):
                rows = slice(first, min(first + at_once, num_samples))
                index = torch.arange(rows.start, rows.stop, device=device)
                noise_Md = normals(seed, f"{stream}.noise", 0, index, num_patches * dim).view(-1, dim) * data.noise_std
                along_M = strength_ND[rows].flatten() - noise_Md @ feature_d
                patch_dND[:, rows] = torch.addr(noise_Md, along_M, feature_d).T.view(dim, -1, num_patches)
        return cls(patch_SdND.flatten(2), label_SN)

    @property
    def num_samples(self) -> int:
        return self.label_SN.shape[1]

    @property
    def num_patches(self) -> int:
        return self.patch_SdM.shape[-1] // self.num_samples

    def samples(self, first: int, last: int) -> StoredSamples:
        """Those from `first` up to, and without, `last`; they share the memory."""
        D = self.num_patches
        return StoredSamples(self.patch_SdM[..., first * D : last * D], self.label_SN[:, first:last])

    def pieces(self, step: int) -> Iterator[StoredSamples]:
        """All samples, whatever the step, in pieces that bound the memory of what is computed from them."""
        at_once = max(1, PATCHES_AT_ONCE // (len(self.label_SN) * self.num_patches))
        for first in range(0, self.num_samples, at_once):
            yield self.samples(first, min(first + at_once, self.num_samples))

    def project(self, v_Sd: Tensor) -> Tensor:
        """⟨v, X_j⟩ of every patch: [S, N, D]."""
        return (v_Sd.unsqueeze(1) @ self.patch_SdM).view(*self.label_SN.shape, -1)

    def weighted_sum(self, weight_SND: Tensor, v_Sd: Tensor) -> Tensor:
        """Σ over samples and patches of weight · X_j: [S, d]; the weights may come from any v."""
        return (weight_SND.flatten(1).unsqueeze(1) @ self.patch_SdM.mT).squeeze(1)


@dataclass(frozen=True)
class ProjectedSamples:
    """Samples of which only the strengths and one normal number per patch are drawn; for one v and one use."""

    strength_SND: Tensor
    label_SN: Tensor
    noise_SND: Tensor
    """⟨v, ξ_j⟩ over its deviation: σ and the length of v across the feature."""
    across_Sd: Tensor
    """A standard normal vector per seed, for what the sum of the noise has across the feature and v."""
    feature_Sd: Tensor
    noise_std: float

    @classmethod
    def draw(
        cls, data: PatchData, feature_Sd: Tensor, seed_S: Tensor, stream: str, step: int, index_N: Tensor
    ) -> ProjectedSamples:
        strength_SND, label_SN = data.signals(seed_S, stream, step, index_N)
        noise_SND = normals(seed_S[:, None], f"{stream}.projected", step, index_N, data.num_patches)
        across_Sd = normals(seed_S, f"{stream}.across", step, index_N[0], data.dim)
        return cls(strength_SND, label_SN, noise_SND, across_Sd, feature_Sd, data.noise_std)

    def project(self, v_Sd: Tensor) -> Tensor:
        """⟨v, X_j⟩ of every patch: [S, N, D]."""
        along_S, across_Sd = along_and_across(v_Sd, self.feature_Sd)
        deviation_S = self.noise_std * across_Sd.norm(dim=-1)
        return torch.addcmul(along_S.view(-1, 1, 1) * self.strength_SND, deviation_S.view(-1, 1, 1), self.noise_SND)

    def weighted_sum(self, weight_SND: Tensor, v_Sd: Tensor) -> Tensor:
        """Σ over samples and patches of weight · X_j: [S, d], for weights that come from the projections on v."""
        _, across_Sd = along_and_across(v_Sd, self.feature_Sd)
        direction_Sd = torch.nn.functional.normalize(across_Sd, dim=-1)
        _, rest_Sd = along_and_across(self.across_Sd, self.feature_Sd)
        _, rest_Sd = along_and_across(rest_Sd, direction_Sd)
        along_S1 = (weight_SND * self.strength_SND).sum((1, 2)).unsqueeze(-1)
        noise_S1 = self.noise_std * (weight_SND * self.noise_SND).sum((1, 2)).unsqueeze(-1)
        rest_S1 = self.noise_std * weight_SND.square().sum((1, 2)).sqrt().unsqueeze(-1)
        return along_S1 * self.feature_Sd + noise_S1 * direction_Sd + rest_S1 * rest_Sd


@dataclass(frozen=True)
class FreshSamples:
    """New samples at every step: gradient descent on the population's risk, with the noise of so many samples."""

    data: PatchData
    feature_Sd: Tensor
    seed_S: Tensor
    stream: str
    num_samples: int

    def pieces(self, step: int) -> Iterator[ProjectedSamples]:
        """The samples of a step, also in pieces: the same ones whatever other seeds run."""
        at_once = max(1, FRESH_AT_ONCE // self.data.num_patches)
        for index_N in torch.arange(self.num_samples, device=self.seed_S.device).split(at_once):
            yield ProjectedSamples.draw(self.data, self.feature_Sd, self.seed_S, self.stream, step, index_N)


Samples = StoredSamples | ProjectedSamples
"""What a model computes with."""
SampleSource = StoredSamples | FreshSamples
"""Where the steps of a gradient descent get their samples."""


def along_and_across(vector_Sd: Tensor, unit_Sd: Tensor) -> tuple[Tensor, Tensor]:
    """How long the vectors are along unit vectors [S], and what they have besides [S, d]."""
    along_S = (vector_Sd * unit_Sd).sum(-1)
    return along_S, vector_Sd - along_S.unsqueeze(-1) * unit_Sd
