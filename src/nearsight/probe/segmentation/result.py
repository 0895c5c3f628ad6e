"""What a segmentation probe gives: numbers from one confusion matrix, and the files that hold them.

Shape suffixes: N images, C classes.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from torch import Tensor

from nearsight.configuration import encode
from nearsight.data.segmentation import SegmentationSet
from nearsight.files import canonical_hash, read_object, write_json, write_text
from nearsight.metrics.segmentation import mean_iou, per_class_accuracy, per_class_iou, pixel_accuracy
from nearsight.probe.frozen import FrozenModel
from nearsight.probe.scores import miou_score
from nearsight.probe.segmentation.config import SegmentConfig
from nearsight.probe.segmentation.head import LossRow
from nearsight.train.integrity import CONFIG, PROVENANCE, certify, check_owner, check_sums, claim


@dataclass(frozen=True, kw_only=True)
class SegmentResult:
    """How well the pixels of the test images are classified."""

    confusion_CC: Tensor
    """Rows: the truth; columns: the prediction."""
    counts_N3C: Tensor
    """Hits, true and predicted pixels of each class in each image; see `image_counts`."""
    trained_C: Tensor
    """Which classes the head has seen in training."""
    class_names: tuple[str, ...]

    @property
    def miou(self) -> float:
        return float(mean_iou(self.confusion_CC))

    def summary(self) -> dict[str, Any]:
        """The numbers of result.json."""
        truth_C = self.confusion_CC.sum(1).double()
        present = truth_C > 0
        score = miou_score(self.counts_N3C)
        return {
            "miou": self.miou,
            "miou_low": score.low,
            "miou_high": score.high,
            "pixel_accuracy": float(pixel_accuracy(self.confusion_CC)),
            "mean_accuracy": float(per_class_accuracy(self.confusion_CC).nanmean()),
            # What the best single class everywhere would give: its share of all pixels, and 0 for the other classes.
            "miou_of_one_class": float(truth_C.max() / truth_C.sum() / present.sum()),
            "num_pixels": int(truth_C.sum()),
            "classes_not_tested": self._named(~present),
            "classes_tested_but_not_trained": self._named(present & ~self.trained_C),
        }

    def _named(self, chosen_C: Tensor) -> list[str]:
        return [name for name, is_chosen in zip(self.class_names, chosen_C.tolist(), strict=True) if is_chosen]

    def per_class(self) -> pd.DataFrame:
        """The rows of per_class.csv; a class that is neither in the truth nor predicted has no IoU."""
        return pd.DataFrame(
            {
                "class": range(len(self.class_names)),
                "name": self.class_names,
                "iou": per_class_iou(self.confusion_CC).numpy(),
                "accuracy": per_class_accuracy(self.confusion_CC).numpy(),
                "truth_pixels": self.confusion_CC.sum(1).numpy(),
                "predicted_pixels": self.confusion_CC.sum(0).numpy(),
            }
        )


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
        """Written after everything else."""
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
