"""Two processes give what one gives with the same batches."""

import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
import torch
from dino_parallel import pretrain_together

from nearsight.errors import InputError
from nearsight.models import ModelConfig, load_model
from nearsight.train.dino import CropsConfig, DinoConfig, DinoFolder, DinoProtocol, ImagesConfig, pretrain
from nearsight.train.processes import Processes

CONFIG = DinoConfig(
    model=ModelConfig(patch_size=8, depth=2, width=16, num_heads=2, mlp_width=16),
    data=ImagesConfig(name="shapes", num_train=32, num_test=10),
    crops=CropsConfig(num_local=2, local_size=16),
    protocol=DinoProtocol(
        epochs=2, batch_size=8, warmup_epochs=1, num_prototypes=12, hidden=16, bottleneck=8, momentum=0.9
    ),
)


def test_two_processes_are_one_with_the_same_batches(tmp_path: Path) -> None:
    alone = pretrain(CONFIG, tmp_path / "alone")
    script = Path(__file__).with_name("dino_parallel.py")
    places = [str(tmp_path / name) for name in ("alone", "together", "meeting")]
    second = subprocess.Popen([sys.executable, str(script), *places, "1"], stderr=subprocess.PIPE, text=True)
    pretrain_together(*map(Path, places), 0)
    _, complaint = second.communicate(timeout=120)
    assert second.returncode == 0, complaint
    together = DinoFolder(tmp_path / "together")
    assert together.run.read_provenance()["processes"] == 2
    columns = ["loss", "teacher_entropy", "prototypes_used", "information", "centre_norm"]
    ours, theirs = (pd.read_csv(folder.path / "history.csv")[columns] for folder in (alone, together))
    pd.testing.assert_frame_equal(ours, theirs, rtol=1e-3)
    expected = load_model(together.run.model).state_dict()
    for name, weight in load_model(alone.run.model).state_dict().items():
        torch.testing.assert_close(weight, expected[name], rtol=1e-3, atol=1e-4)


def test_shares_of_a_batch() -> None:
    batches = torch.arange(12).view(2, 6)
    assert [Processes(rank, 3).share(batches).tolist() for rank in range(3)] == [
        *([[0, 1], [6, 7]], [[2, 3], [8, 9]], [[4, 5], [10, 11]])
    ]
    with pytest.raises(InputError, match="4 processes do not divide a batch of 6"):
        Processes(0, 4).check(6)
