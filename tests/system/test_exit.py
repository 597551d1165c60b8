"""Processes that have done their work end without an abort (rule 34)."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.tiers import with_few

# The worker thread that drops the last reference to a tensor sleeps, and asks for the interpreter
# again when the script is over: what otherwise happens once in ten runs of a busy machine.
_SLOW_THREAD = """
import time, weakref
import torch, torch.distributed
from trainkit.distributed import Processes

processes = Processes.start()

def send(group):
    tensor = torch.ones(3)
    torch.distributed.all_reduce(tensor, group=group, async_op=True)
    return weakref.ref(tensor, lambda _: time.sleep(0.3))

kept = [send(processes.control), send(None)]
"""

_HELD = """
import sys
import torch
from torch import nn
from trainkit import Accelerator

sys.setswitchinterval(10)
accelerator = Accelerator()
model = nn.parallel.DistributedDataParallel(nn.Linear(6, 1))
for _ in range(3):
    model(torch.ones(2, 6)).sum().backward()
    kept = accelerator.reduce(torch.ones(3))
kept = accelerator.broadcast(torch.ones(3))
"""

_TRAINED = """
import sys
from functools import partial
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from trainkit import Trainer

sys.setswitchinterval(10)
inputs = torch.ones(40, 6)
data = TensorDataset(inputs, inputs[:, :1])
trainer = Trainer(max_epochs=1, callbacks=[])
trainer.fit(
    nn.Linear(6, 1),
    (DataLoader(data, batch_size=10), DataLoader(data, batch_size=8)),
    optimizer=partial(torch.optim.SGD, lr=0.1),
    loss_fn=nn.MSELoss(),
)
"""

# Forks the processes of many jobs from one that has imported everything; they end as scripts do.
_DRIVER = """
import os, sys
import torch._dynamo, torch.utils.data
import trainkit, trainkit.callbacks

script, folder, jobs, at_once = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
codes, started, children = [], 0, 0
while started < 2 * jobs or children:
    if started < 2 * jobs and children < 2 * at_once:
        job, rank = divmod(started, 2)
        pid = os.fork()
        if pid == 0:
            os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2",
                LOCAL_WORLD_SIZE="2", TRAINKIT_INIT_METHOD=f"file://{folder}/{job}")
            break
        started, children = started + 1, children + 1
    else:
        codes.append(os.waitstatus_to_exitcode(os.wait()[1]))
        children -= 1
else:
    print(codes)
    script = ""
exec(script)
"""


def _exit_codes(script: str, folder: Path, jobs: int, at_once: int) -> list[int]:
    result = subprocess.run(
        [sys.executable, "-c", _DRIVER, script, str(folder), str(jobs), str(at_once)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
        timeout=240 + 10 * jobs,
        check=True,
    )
    return [int(code) for code in result.stdout.strip().splitlines()[-1].strip("[]").split(",")]


@pytest.mark.e2e
def test_the_end_waits_for_threads_that_still_hold_tensors(tmp_path: Path) -> None:
    assert _exit_codes(_SLOW_THREAD, tmp_path, jobs=4, at_once=2) == [0] * 8


@pytest.mark.parametrize("script", with_few([], [_HELD, _TRAINED]), ids=["own loop", "trainer"])
def test_successful_processes_exit_with_0(script: str, tmp_path: Path) -> None:
    assert _exit_codes(script, tmp_path, jobs=3, at_once=3) == [0] * 6


@pytest.mark.slow
@pytest.mark.parametrize("script", [_HELD, _TRAINED], ids=["own loop", "trainer"])
def test_successful_processes_exit_with_0_on_a_busy_machine(script: str, tmp_path: Path) -> None:
    assert _exit_codes(script, tmp_path, jobs=100, at_once=3 * (os.cpu_count() or 1)) == [0] * 200
