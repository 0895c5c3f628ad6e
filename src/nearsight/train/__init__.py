"""Training: what (protocol, config), how (engine: one model or a stack of them), and what remains (run folder)."""

from nearsight.train.config import SCHEMA, DataConfig, RunConfig
from nearsight.train.folder import HEADS_COLUMNS, HistoryRow, RunFolder, write_heads
from nearsight.train.protocol import ASSUMED, PROTOCOLS, Protocol, baseline, modern
from nearsight.train.runner import Listener, TrainingError, load_data, measure_on_test, train_run, train_stack

__all__ = [
    "ASSUMED",
    "HEADS_COLUMNS",
    "PROTOCOLS",
    "SCHEMA",
    "DataConfig",
    "HistoryRow",
    "Listener",
    "Protocol",
    "RunConfig",
    "RunFolder",
    "TrainingError",
    "baseline",
    "load_data",
    "measure_on_test",
    "modern",
    "train_run",
    "train_stack",
    "write_heads",
]
