"""Who does the cells of a study: this process, several, or a cluster."""

from nearsight.study.executors.backlog import Retries
from nearsight.study.executors.local import LocalExecutor
from nearsight.study.executors.processes import ProcessesExecutor
from nearsight.study.executors.ray_tasks import RayExecutor
from nearsight.study.executors.work import Executor, Work

__all__ = ["Executor", "LocalExecutor", "ProcessesExecutor", "RayExecutor", "Retries", "Work"]
