"""What every head does on every image, kept beside the means, so that two models can be compared image by image.

An image is known by its digest: of its pixels as they were given, or of what the caller calls it. So neither the order
of the images nor who measured which of them matters.

Shape suffixes: N images, L layers, H heads; B images of a batch, P words of eight bytes.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

MOST_VALUES = 2**22
"""Distances that are kept, and as many of each other number: 16 MiB each. For 12 layers of 12 heads that is 29,127
images."""
_FEWEST_JOINED = 1024
_WORDS_IN_CACHE = 2**17
"""More at a time are slower on a CPU; what a GPU is given at once is larger."""
_WORDS_AT_ONCE = 2**22
# Odd numbers with about as many ones as zeros, by which bits are spread (those of SplitMix64).
_FIRST, _SECOND = -7046029254386353131, -4658895280553007687

Values = NDArray[np.floating]
ImageId = str | bytes | int
"""What a caller calls an image."""


@dataclass(frozen=True, eq=False)
class PerImage:
    """The distance and the entropy of every head on every image, in the order of the images' digests.

    Of more images than there is room for (`MOST_VALUES`), those with the smallest digests are kept. A digest has
    nothing to do with what is on an image, so these are as good as a random sample, and of two models on the same
    images both keep the same ones, as far as each has room.
    """

    digests: NDArray[np.uint64]
    """[N]. An image that was measured twice is there twice."""
    mad: NDArray[np.float32]
    """[N, L, H], NaN for heads that do not exist."""
    entropy: NDArray[np.float32]
    further: Mapping[str, NDArray[np.float32]] = field(default_factory=dict)
    """The same of what measurements give for each image (`Measurement.of_images`), by name."""

    @classmethod
    def of(
        cls,
        digests_N: NDArray[np.uint64],
        mad_NLH: Values,
        entropy_NLH: Values,
        further: Mapping[str, Values] | None = None,
    ) -> Self:
        """Put in order, and cut to what there is room for."""
        num_kept = MOST_VALUES // max(1, mad_NLH[0].size) if len(mad_NLH) else 0
        mad, entropy = (values.astype(np.float32, copy=False) for values in (mad_NLH, entropy_NLH))
        others = {name: values.astype(np.float32, copy=False) for name, values in (further or {}).items()}
        # By their values where digests are equal: so the order in which images came is forgotten.
        order = np.lexsort((np.nansum(mad, (1, 2), dtype=np.float64), digests_N))[:num_kept]
        return cls(
            digests_N[order], mad[order], entropy[order], {name: values[order] for name, values in others.items()}
        )

    def __len__(self) -> int:
        return len(self.digests)

    def choose(self, layers: Sequence[int]) -> Self:
        """Those of some layers, by position."""
        further = {name: values[:, layers] for name, values in self.further.items()}
        return type(self)(self.digests, self.mad[:, layers], self.entropy[:, layers], further)


class KeptImages:
    """The values of images, part by part in any order: all together are the same, and never far more than are kept."""

    def __init__(self) -> None:
        self._parts: list[PerImage] = []
        self._is_known = True

    def add(self, part: PerImage | None) -> None:
        """None: a part whose values are not known, so that those of all are not either."""
        if part is None or not self._is_known:
            self._is_known, self._parts = False, []
            return
        self._parts.append(part)
        # Seldom enough that each value is copied a few times only, however many parts there are.
        if sum(map(len, self._parts[1:])) > max(len(self._parts[0]), _FEWEST_JOINED):
            self._parts = [self._joined()]

    def values(self) -> PerImage | None:
        return self._joined() if self._is_known and self._parts else None

    def _joined(self) -> PerImage:
        if len(self._parts) == 1:
            return self._parts[0]
        return PerImage.of(
            np.concatenate([part.digests for part in self._parts]),
            np.concatenate([part.mad for part in self._parts]),
            np.concatenate([part.entropy for part in self._parts]),
            {
                name: np.concatenate([part.further[name] for part in self._parts])
                for name in self._parts[0].further
                if all(name in part.further for part in self._parts)
            },
        )


def digests_of_names(names: Iterable[ImageId]) -> Tensor:
    """One for each of what a caller calls images, [B]: equal where the names are."""
    contents = (name if isinstance(name, bytes) else str(name).encode() for name in names)
    found = [hashlib.blake2b(content, digest_size=8).digest() for content in contents]
    return torch.from_numpy(np.frombuffer(b"".join(found), dtype="<i8").astype(np.int64))


def digests_of_pixels(images_B: Tensor) -> Tensor:
    """One for each image, [B]: equal where all bits of its pixels are, on every device.

    A sum of the words, each multiplied by a number of its place: on a GPU it costs less than to bring the images to the
    host, and on a CPU half of what a cryptographic hash costs, which is not needed here.
    """
    bytes_B = images_B.detach().flatten(1).contiguous().view(torch.uint8)
    if (missing := -bytes_B.shape[1] % 8) or bytes_B.storage_offset() % 8:
        bytes_B = torch.nn.functional.pad(bytes_B, (0, missing)).clone()
    words_BP = bytes_B.view(torch.int64)
    num_words = words_BP.shape[1]
    places_P = torch.arange(1, num_words + 1, device=words_BP.device) * _FIRST
    factors_P = (places_P ^ (places_P >> 30)) * _SECOND | 1
    at_once = max(1, (_WORDS_IN_CACHE if words_BP.device.type == "cpu" else _WORDS_AT_ONCE) // max(1, num_words))

    def sums(part_BP: Tensor) -> Tensor:
        spread_BP = part_BP * factors_P
        return (spread_BP ^ (spread_BP >> 32)).sum(1)

    return torch.cat([sums(part_BP) for part_BP in words_BP.split(at_once)]) + num_words


def as_digests(digests_B: Tensor) -> NDArray[np.uint64]:
    """As a table keeps them; waits for the device."""
    return digests_B.cpu().numpy().view(np.uint64)
