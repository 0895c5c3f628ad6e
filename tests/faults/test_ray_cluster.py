"""A real Ray cluster on one machine, whose nodes are killed and added while a study runs on it."""

import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from study_records import Recorder, events, table
from tiny_study import unmeasured

from nearsight.study import run_study
from nearsight.study.executors import RayExecutor, Retries
from nearsight.train import HistoryRow, RunConfig, Stop, StoppedError

pytestmark = pytest.mark.faults
ray = pytest.importorskip("ray", reason="the extra `ray` is not installed")

NODE = {"num_cpus": 1, "object_store_memory": 80 * 2**20}
NUM_NODES, NUM_KILLS = 3, 3
STUDY = unmeasured(seeds=6, epochs=6)
RETRIES = Retries(most=20, first_wait=0.2, longest_wait=1.0)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    from ray.cluster_utils import Cluster

    soon = {"health_check_period_ms": 500, "health_check_timeout_ms": 5000, "health_check_failure_threshold": 3}
    head = {**NODE, "include_dashboard": False, "_system_config": soon}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        for _ in range(NUM_NODES - 1):
            cluster.add_node(**NODE)
        ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


@pytest.fixture
def undisturbed(tmp_path: Path) -> Path:
    """The same study in this process, with the one thread that a task of one core has."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return run_study(STUDY, tmp_path / "undisturbed").path
    finally:
        torch.set_num_threads(before)


class StoppingAtFirst(Recorder):
    def __init__(self) -> None:
        super().__init__()
        self.stop = Stop()

    def epoch(self, config: RunConfig, row: HistoryRow) -> None:
        super().epoch(config, row)
        self.stop.request("SIGTERM")


def test_a_stop_reaches_all_tasks(cluster: Any, tmp_path: Path) -> None:
    path, listener = tmp_path / "study", StoppingAtFirst()
    study = unmeasured(seeds=3, epochs=200)
    with pytest.raises(StoppedError, match="stopped by SIGTERM"):
        run_study(study, path, listener=listener, stop=listener.stop, checkpoint_every=1000, executor=RayExecutor())
    told = events(path)
    begun = {run for run, event in told if event == "started"}
    assert begun
    for run in begun:
        history = path / "runs" / run / "history.csv"
        assert told[run, "stopped"] == 1
        assert told[run, "epoch"] == (len(pd.read_csv(history)) if history.exists() else 0) < 200


class Disturber(Recorder):
    """Kills and adds nodes at random moments, while cells train."""

    def __init__(self, cluster: Any, seed: int) -> None:
        super().__init__()
        self.cluster, self.random = cluster, random.Random(seed)
        self.until_next = 4
        """Epochs of cells."""
        self.killed = self.added = 0

    def epoch(self, config: RunConfig, row: HistoryRow) -> None:
        super().epoch(config, row)
        self.until_next -= 1
        if self.until_next == 0:
            self.disturb()
            self.until_next = self.random.randint(4, 20)

    def disturb(self) -> None:
        nodes = sorted(self.cluster.worker_nodes, key=lambda node: node.node_id)  # the head is not one of them
        if nodes and self.killed < NUM_KILLS and self.random.random() < 0.6:
            self.cluster.remove_node(self.random.choice(nodes), allow_graceful=False)
            self.killed += 1
        elif len(nodes) < NUM_NODES:
            self.cluster.add_node(wait=False, **NODE)
            self.added += 1


def test_nodes_come_and_go_and_the_tables_are_those_of_a_quiet_run(
    cluster: Any, undisturbed: Path, tmp_path: Path
) -> None:
    began, path = time.monotonic(), tmp_path / "disturbed"
    listener = Disturber(cluster, seed=12)
    run_study(STUDY, path, listener=listener, cells_per_stack=2, executor=RayExecutor(retries=RETRIES))
    print(
        f"{listener.killed} nodes killed, {listener.added} added, {len(listener.lost)} tasks lost, "
        f"{time.monotonic() - began:.0f} s"
    )
    assert listener.killed > 0
    assert listener.added > 0
    assert listener.lost
    runs = [cell.run for cell in STUDY.cells]
    assert len(runs) == 24
    assert sorted(listener.done) == sorted(runs)
    pd.testing.assert_frame_equal(table(path), table(undisturbed), check_exact=True)
    told = events(path)
    assert all(told[run, "finished"] == 1 for run in runs)
    assert list((path / "locks").iterdir()) == []
