"""The files of a segmentation probe, and whose they are."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pandas as pd

from nearsight.configuration import encode
from nearsight.data.segmentation import SegmentationSet
from nearsight.files import canonical_hash, read_object, write_json, write_text
from nearsight.probe.frozen import FrozenModel
from nearsight.probe.segmentation.config import SegmentConfig
from nearsight.probe.segmentation.result import SegmentResult
from nearsight.probe.segmentation.training import LossRow
from nearsight.train.integrity import CONFIG, PROVENANCE, certify, check_owner, check_sums, claim

SCHEMA = 1
_LASTING = (CONFIG, "history.csv", "per_class.csv", "head.safetensors", "result.json")
"""Files that stay as they are when a probe is complete."""


def probe_record(frozen: FrozenModel, dataset: SegmentationSet, config: SegmentConfig) -> dict[str, Any]:
    """What config.json says: everything that affects the numbers, and the identity made of it."""
    record = {
        "model": frozen.label,
        "network": frozen.identity,
        "mean": list(frozen.preparation.mean),
        "std": list(frozen.preparation.std),
        "data": dataset.name,
        "data_fingerprint": dataset.fingerprint,
        "settings": encode(config),
    }
    named = {name: value for name, value in record.items() if name != "model"}
    return {"schema": SCHEMA, "identity": canonical_hash(named), **record}


class SegmentFolder:
    """The files by name."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoint = path / "checkpoint.safetensors"
        self.head = path / "head.safetensors"
        self.figures = path / "figures"

    @property
    def is_complete(self) -> bool:
        return (self.path / PROVENANCE).is_file()  # it is written last

    def check(self, record: dict[str, Any]) -> None:
        """Refuse a folder that holds something else; nothing is changed."""
        check_owner(self.path, record["identity"], lambda: self._read(CONFIG).get("identity"), "something else")

    def claim(self, record: dict[str, Any]) -> None:
        self.check(record)
        claim(self.path, record)

    def write_history(self, rows: Sequence[LossRow]) -> None:
        write_text(self.path / "history.csv", pd.DataFrame([asdict(row) for row in rows]).to_csv(index=False))

    def write_result(self, result: SegmentResult, about: dict[str, Any]) -> None:
        write_text(self.path / "per_class.csv", result.per_class().to_csv(index=False))
        write_json(self.path / "result.json", {**about, **result.summary()}, allow_nan=False)

    def finish(self, provenance: dict[str, Any]) -> None:
        """After everything else."""
        certify(self.path, _LASTING, provenance)
        self.checkpoint.unlink(missing_ok=True)

    def read_result(self) -> dict[str, Any]:
        """What a complete probe found; refused if any of its files is not what was written."""
        check_sums(self.path)
        return self._read("result.json")

    def read_per_class(self) -> pd.DataFrame:
        return pd.read_csv(self.path / "per_class.csv")

    def _read(self, name: str) -> dict[str, Any]:
        missing = f"{self.path} is not a complete probe"
        return read_object(self.path / name, missing=missing, way_out="; choose another --out")
