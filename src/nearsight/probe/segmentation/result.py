"""What a segmentation probe gives: numbers from one confusion matrix, for machines and for people.

Shape suffixes: N images, C classes.
"""

from dataclasses import dataclass
from typing import Any

import pandas as pd
from torch import Tensor

from nearsight.metrics.segmentation import mean_iou, per_class_accuracy, per_class_iou, pixel_accuracy
from nearsight.probe.bootstrap import miou_score


@dataclass(frozen=True, kw_only=True)
class SegmentResult:
    """How well the pixels of the test images are told apart."""

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
