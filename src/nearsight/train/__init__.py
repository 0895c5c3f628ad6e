"""Training: what (protocol, config), how (engine: one model or a stack of them), and what remains (run folder)."""

from typing import TYPE_CHECKING

from nearsight.lazy import open_room

if TYPE_CHECKING:
    from nearsight.train.config import (
        ASSUMED,
        PROTOCOLS,
        SCHEMA,
        DataConfig,
        Protocol,
        RunConfig,
        RunName,
        baseline,
        locat,
        modern,
    )
    from nearsight.train.folder import HEADS_COLUMNS, LAYERS_COLUMNS, HistoryRow, RunFolder, write_heads
    from nearsight.train.heads import measure_on_test, measure_stack
    from nearsight.train.runner import (
        Listener,
        Run,
        RunQueue,
        check_images_of_finished,
        load_data,
        train_queue,
        train_run,
        train_runs,
        train_stack,
    )
    from nearsight.train.stopping import LostProcessError, Stop, StoppedError, TrainingError

__all__ = [
    "ASSUMED",
    "HEADS_COLUMNS",
    "LAYERS_COLUMNS",
    "PROTOCOLS",
    "SCHEMA",
    "DataConfig",
    "HistoryRow",
    "Listener",
    "LostProcessError",
    "Protocol",
    "Run",
    "RunConfig",
    "RunFolder",
    "RunName",
    "RunQueue",
    "Stop",
    "StoppedError",
    "TrainingError",
    "baseline",
    "check_images_of_finished",
    "load_data",
    "locat",
    "measure_on_test",
    "measure_stack",
    "modern",
    "train_queue",
    "train_run",
    "train_runs",
    "train_stack",
    "write_heads",
]

open_room(__name__)
