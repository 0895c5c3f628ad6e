"""The cells of a study in this process, stacked."""

from dataclasses import dataclass
from functools import partial

import torch

from nearsight.study.executors.refreshing import RunsTable
from nearsight.study.executors.work import Work
from nearsight.study.folder import StudyFolder
from nearsight.study.listening import StudyListener
from nearsight.study.runner import Runner
from nearsight.train import RunFolder, RunName, Stop, train_runs


@dataclass(frozen=True, kw_only=True)
class LocalExecutor:
    """One runner, here, group by group."""

    device: torch.device | str = "cpu"

    def check(self) -> None:
        """This process is there."""

    def run(self, work: Work, listener: StudyListener, stop: Stop) -> dict[RunName, Exception]:
        folder = StudyFolder(work.folder)
        train = partial(
            train_runs,
            device=self.device,
            data_dir=work.data_dir,
            stop=stop,
            checkpoint_every=work.checkpoint_every,
        )
        table = RunsTable(folder)
        with folder.locks().kept_alive() as locks:

            def completed(run: RunFolder) -> None:
                table.refresh()
                if work.location is not None:
                    work.location.publish(run)

            runner = Runner(folder, locks, listener, train, completed)
            runner.run(work.groups, work.cells_per_stack)
        return runner.failed
