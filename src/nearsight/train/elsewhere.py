"""The folder of a run in a process that does not write it."""

from pathlib import Path
from typing import Any

import pandas as pd
from torch import Tensor

from nearsight.data import Dataset
from nearsight.train.config import RunConfig
from nearsight.train.folder import Progress, RunFolder


class FolderElsewhere(RunFolder):
    """A folder that another process reads and writes; it may even lie on another machine. Here nothing is done."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.is_finished = False
        """Whether the other process has said that it is complete."""

    @property
    def is_complete(self) -> bool:
        return self.is_finished

    def claim(self, config: RunConfig, dataset: Dataset | None = None) -> None: ...

    def write_checkpoint(self, progress: Progress, tensors: dict[str, Tensor], config: RunConfig) -> None: ...

    def write_heads_so_far(self, rows: pd.DataFrame) -> None: ...

    def log(self, event: str, **details: Any) -> None: ...
