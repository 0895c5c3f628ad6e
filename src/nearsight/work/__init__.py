"""One pool of workers for all work that can be divided: the cells of a study, the shards of a measurement.

Workers are processes of this machine or tasks of a Ray cluster. Without a pool, this process does all work itself, one
part after the other.
"""

from nearsight.work.pool import Attempt, Driver, Outcome, Pool, Retries, Tell
from nearsight.work.processes import num_cores, places, process_pool
from nearsight.work.ray_cluster import check_device, connected, import_ray, ray_pool

__all__ = [
    "Attempt",
    "Driver",
    "Outcome",
    "Pool",
    "Retries",
    "Tell",
    "check_device",
    "connected",
    "import_ray",
    "num_cores",
    "places",
    "process_pool",
    "ray_pool",
]
