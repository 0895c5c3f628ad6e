"""The files of a segmentation probe, and whose they are."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pandas as pd

from nearsight.configuration import encode
from nearsight.data.segmentation import SegmentationSet
from nearsight.errors import InputError
from nearsight.files import canonical_hash, check_output_folder, output_folder, write_json, write_text
from nearsight.probe.cache import weights_hash
from nearsight.probe.frozen import FrozenModel
from nearsight.probe.segmentation.config import SegmentConfig
from nearsight.probe.segmentation.result import SegmentResult
from nearsight.probe.segmentation.training import LossRow

SCHEMA = 1


def probe_record(frozen: FrozenModel, dataset: SegmentationSet, config: SegmentConfig) -> dict[str, Any]:
    """What config.json says: everything that affects the numbers, and the identity made of it."""
    record = {
        "model": frozen.label,
        "weights": weights_hash(frozen.model),
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
        return (self.path / "provenance.json").is_file()  # it is written last

    def check(self, record: dict[str, Any]) -> None:
        """Refuse a folder that holds something else; nothing is changed."""
        check_output_folder(self.path)
        if not (self.path / "config.json").exists():
            return
        held = self._read("config.json").get("identity")
        if held != record["identity"]:
            raise InputError(
                f"{self.path} holds something else ({held or 'no probe'}, not {record['identity']}): choose another "
                "--out, or repeat the settings in its config.json to continue it"
            )

    def claim(self, record: dict[str, Any]) -> None:
        self.check(record)
        output_folder(self.path)
        if not (self.path / "config.json").exists():
            write_json(self.path / "config.json", record)

    def write_history(self, rows: Sequence[LossRow]) -> None:
        write_text(self.path / "history.csv", pd.DataFrame([asdict(row) for row in rows]).to_csv(index=False))

    def write_result(self, result: SegmentResult, about: dict[str, Any]) -> None:
        write_text(self.path / "per_class.csv", result.per_class().to_csv(index=False))
        write_json(self.path / "result.json", {**about, **result.summary()})

    def finish(self, provenance: dict[str, Any]) -> None:
        """After everything else."""
        write_json(self.path / "provenance.json", provenance)
        self.checkpoint.unlink(missing_ok=True)

    def read_result(self) -> dict[str, Any]:
        return self._read("result.json")

    def read_per_class(self) -> pd.DataFrame:
        return pd.read_csv(self.path / "per_class.csv")

    def _read(self, name: str) -> dict[str, Any]:
        path = self.path / name
        try:
            value = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError as error:
            raise InputError(f"{self.path} is not a complete probe: {name} is missing; choose another --out") from error
        except ValueError as error:
            raise InputError(f"{path} is damaged: {error}; choose another --out") from error
        if not isinstance(value, dict):
            raise InputError(f"{path} is damaged: it does not hold an object; choose another --out")
        return value
