"""The result of measuring a model: every head's distance and entropy, with their spread over images."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from nearsight.errors import InputError
from nearsight.files import replacing
from nearsight.metrics.moments import Moments

Array = NDArray[np.float64]
_FORMAT = 1


@dataclass(frozen=True)
class HeadTable:
    """Per layer and head: mean attention distance and normalised entropy, mean and deviation over images.

    Arrays are layers × heads, float64; a layer with fewer heads than the widest is padded with NaN.
    """

    layer_names: tuple[str, ...]
    """Dotted name of each layer's attention module; a second attention in one module is marked "#2"."""
    mad_moments: Moments
    """Mean attention distance over images."""
    entropy_moments: Moments
    """Normalised entropy over images."""
    skipped: Mapping[str, str] = field(default_factory=dict)
    """Layers that are not spatial attention, with the reason."""
    extra: Mapping[str, Array] = field(default_factory=dict)
    """Further arrays, by name."""

    @property
    def mad(self) -> Array:
        return self.mad_moments.mean

    @property
    def mad_std(self) -> Array:
        return self.mad_moments.std

    @property
    def entropy(self) -> Array:
        return self.entropy_moments.mean

    @property
    def entropy_std(self) -> Array:
        return self.entropy_moments.std

    @property
    def num_images(self) -> int:
        return self.mad_moments.count

    def to_frame(self) -> pd.DataFrame:
        """One row per head, layers and heads counted from 0: the columns of heads.csv but for the epoch."""
        layer, head = np.nonzero(~np.isnan(self.mad) | ~np.isnan(self.entropy))
        names = np.array(self.layer_names, dtype=object)
        return pd.DataFrame(
            {
                "layer": layer,
                "layer_name": names[layer],
                "head": head,
                "mad": self.mad[layer, head],
                "mad_std": self.mad_std[layer, head],
                "entropy": self.entropy[layer, head],
                "entropy_std": self.entropy_std[layer, head],
                "num_images": self.num_images,
            }
        )

    @classmethod
    def merge(cls, tables: Sequence[Self]) -> Self:
        """The table of all images, from tables of the same model over disjoint images."""
        if not tables:
            raise InputError("no tables to merge")
        merged, *others = tables
        for table in others:
            if table.layer_names != merged.layer_names or table.mad.shape != merged.mad.shape:
                raise InputError("tables of different models cannot be merged: their layers or heads differ")
            if merged.extra or table.extra:
                raise InputError("tables with extra arrays cannot be merged: how to combine those is not known")
            merged = cls(
                merged.layer_names,
                merged.mad_moments.merge(table.mad_moments),
                merged.entropy_moments.merge(table.entropy_moments),
                {**table.skipped, **merged.skipped},
            )
        return merged

    def save(self, path: str | Path) -> None:
        """Write as .npz, without pickled objects."""
        arrays = {
            "format": np.array(_FORMAT),
            "layer_names": np.array(self.layer_names, dtype=np.str_),
            "num_images": np.array(self.num_images),
            "mad": self.mad,
            "mad_squared_deviations": self.mad_moments.squared_deviations,
            "entropy": self.entropy,
            "entropy_squared_deviations": self.entropy_moments.squared_deviations,
            "skipped_names": np.array(list(self.skipped), dtype=np.str_),
            "skipped_reasons": np.array(list(self.skipped.values()), dtype=np.str_),
        }
        with replacing(Path(path)) as temporary, temporary.open("wb") as file:
            np.savez(
                file, allow_pickle=False, **arrays, **{f"extra/{name}": value for name, value in self.extra.items()}
            )

    @classmethod
    def load(cls, path: str | Path) -> Self:
        try:
            with np.load(path, allow_pickle=False) as archive:
                stored = dict(archive)
            if int(stored["format"]) > _FORMAT:
                raise InputError(f"{path} was written by a newer nearsight (format {int(stored['format'])}); update it")
            count = int(stored["num_images"])
            return cls(
                tuple(str(name) for name in stored["layer_names"]),
                Moments(count, stored["mad"], stored["mad_squared_deviations"]),
                Moments(count, stored["entropy"], stored["entropy_squared_deviations"]),
                dict(zip(map(str, stored["skipped_names"]), map(str, stored["skipped_reasons"]), strict=True)),
                {name.removeprefix("extra/"): value for name, value in stored.items() if name.startswith("extra/")},
            )
        except FileNotFoundError as error:
            raise InputError(f"{path} does not exist") from error
        except InputError:
            raise
        except Exception as error:  # numpy and zipfile raise many kinds for a damaged archive
            raise InputError(f"{path} is damaged or is not a table of heads ({error})") from error
