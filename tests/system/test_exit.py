"""Processes that have done their work end without an abort (rule 34)."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

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

SCRIPTS = {"slow thread": _SLOW_THREAD, "own loop": _HELD, "trainer": _TRAINED}

# Forks the processes of many jobs from one that has imported everything; they end as scripts do.
_DRIVER = """
import json, os, sys
import torch._dynamo, torch.utils.data
import trainkit, trainkit.callbacks

names, folder, jobs, at_once = sys.argv[1].split(","), sys.argv[2], *map(int, sys.argv[3:])
scripts = json.load(sys.stdin)
codes, started, children = [], 0, {}
while started < 2 * jobs or children:
    if started < 2 * jobs and len(children) < 2 * at_once:
        job, rank = divmod(started, 2)
        name = names[job % len(names)]
        pid = os.fork()
        if pid == 0:
            os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2",
                LOCAL_WORLD_SIZE="2", TRAINKIT_INIT_METHOD=f"file://{folder}/{job}")
            break
        started, children[pid] = started + 1, name
    else:
        pid, status = os.wait()
        codes.append([children.pop(pid), os.waitstatus_to_exitcode(status)])
else:
    print(json.dumps(codes))
    name, scripts = "", {"": ""}
exec(scripts[name])
"""


def _failures(names: list[str], folder: Path, jobs: int, at_once: int) -> list[tuple[str, int]]:
    """Run jobs of two processes, of these scripts in turn; return the names and codes not 0."""
    result = subprocess.run(
        [sys.executable, "-c", _DRIVER, ",".join(names), str(folder), str(jobs), str(at_once)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        input=json.dumps(SCRIPTS),
        stdout=subprocess.PIPE,
        text=True,
        timeout=240 + 10 * jobs,
        check=True,
    )
    codes = json.loads(result.stdout.strip().splitlines()[-1])
    assert len(codes) == 2 * jobs
    return [(name, code) for name, code in codes if code]


@pytest.mark.e2e
def test_successful_processes_exit_with_0(tmp_path: Path) -> None:
    """Also where threads still hold tensors."""
    assert _failures([*SCRIPTS], tmp_path, jobs=3, at_once=3) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", ["own loop", "trainer"])
def test_successful_processes_exit_with_0_on_a_busy_machine(name: str, tmp_path: Path) -> None:
    assert _failures([name], tmp_path, jobs=100, at_once=3 * (os.cpu_count() or 1)) == []
