"""Forked processes do not end what they have inherited."""

import subprocess
import sys

import pytest
import torch
from torch.utils.data import DataLoader

from tests.helpers.ranks import run_ranks
from tests.helpers.tiers import with_few
from trainkit import Accelerator

SCRIPT = """
import gc
import sys
import tempfile
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD
from torch.utils.data import DataLoader, Dataset
import trainkit

class Holder:
    pass

gc.disable()  # no luck
holder = Holder()
holder.itself = holder
dist.init_process_group(
    "gloo", init_method=f"file://{tempfile.mkdtemp()}/meeting", rank=0, world_size=1
)
holder.group = dist.group.WORLD
dist.destroy_process_group()
del holder  # a group of an earlier cell, with its threads, is garbage

class Data(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        gc.collect()
        return torch.ones(2), torch.ones(1)

def train(workers=0):
    return trainkit.Trainer(max_steps=2).fit(
        nn.Linear(2, 1), DataLoader(Data(), 2, num_workers=workers),
        loss_fn=nn.functional.mse_loss, optimizer=lambda parameters: SGD(parameters, lr=0.1),
    )

if sys.argv[1] == "worker":
    train(workers=1)
else:
    trainkit.notebook_launcher(train, num_processes=2)
"""


@pytest.mark.parametrize("by", with_few(["worker"], ["worker", "notebook"]))
@pytest.mark.usefixtures("warm_programs")
def test_an_old_group_does_not_stop_a_fork(by: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, by], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-2000:]


def _gathers(rank: int) -> int:
    return len(Accelerator(cpu=True).gather_for_metrics(torch.ones(2, 3)))


def test_a_loop_under_way_before_a_fork_is_not_one_in_it() -> None:
    loader = Accelerator(cpu=True).prepare(DataLoader(range(7), batch_size=3))  # type: ignore[arg-type]
    batches = iter(loader)
    next(batches)
    assert run_ranks(2, _gathers) == [4, 4]
    batches.close()
