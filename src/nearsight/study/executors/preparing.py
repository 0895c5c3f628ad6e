"""Data sets made ready once per machine, however many workers there need them at once."""

import time
from collections.abc import Iterable
from pathlib import Path

from nearsight.data.loading import dataset_spec
from nearsight.data.locations import user_cache_folder
from nearsight.files import canonical_hash
from nearsight.study.lock import Locks
from nearsight.train import DataConfig, Stop, StoppedError, load_data

_SECONDS_BETWEEN_LOOKS = 0.5


def prepare_data(configs: Iterable[DataConfig], data_dir: Path | None, stop: Stop) -> None:
    """See to it that each data set is in this machine's image cache; the first who needs it decodes, others wait."""
    for config in dict.fromkeys(configs):
        if dataset_spec(config.name).find is None:  # embedded: made, not read
            continue
        name = canonical_hash([config.name, config.image_size, str(data_dir)])
        with Locks(user_cache_folder() / "decoded" / "locks").kept_alive() as locks:
            while not locks.take(name):
                if stop.by is not None:
                    raise StoppedError(stop.by, [0])
                time.sleep(_SECONDS_BETWEEN_LOOKS)
            load_data(config, data_dir)
            locks.clear(name)
