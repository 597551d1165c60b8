"""Workers of a loader neither leave before their process nor outlive it (rule 33)."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from tests.helpers.tiers import with_few
from trainkit.basics.signals import kill_workers
from trainkit.data import evaluation_loader
from trainkit.distributed import Processes

_PROGRAM = """
import os, signal, sys, time
from functools import partial
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from trainkit import Callback, Trainer
from trainkit.callbacks import Checkpoint
from trainkit.data import evaluation_loader
from trainkit.distributed import Processes

kind, folder = sys.argv[1:]
inputs = torch.ones(400, 6)
data = DataLoader(TensorDataset(inputs, inputs[:, :1]), batch_size=2, num_workers=2)
kept = []

class Sender(Callback):
    def on_step_end(self, run, result):
        if run.state.step == 3:
            os.killpg(os.getpgrp(), signal.SIGTERM)

if kind == "fit":
    Trainer(max_epochs=1, callbacks=[Sender(), Checkpoint()], output_dir=folder).fit(
        nn.Linear(6, 1), data, optimizer=partial(torch.optim.SGD, lr=0.1), loss_fn=nn.MSELoss()
    )
elif kind == "own loop":
    loader = evaluation_loader(
        data, processes=Processes.start(), device=torch.device("cpu"), seed=0
    )
    batches = loader.batches(0)
    kept = [batches, next(batches)]
    sys.exit(5)
"""


class Stuck(Dataset[int]):
    """Gives one sample and no more."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        if index > 0:
            time.sleep(600)
        return index


@pytest.mark.parametrize(
    ("kind", "code"), with_few([("own loop", 5)], [("fit", 143), ("own loop", 5)])
)
@pytest.mark.usefixtures("warm_programs")
def test_a_program_ends_with_its_workers(kind: str, code: int, tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _PROGRAM, kind, str(tmp_path)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        start_new_session=True,
        stderr=subprocess.PIPE,
        text=True,
    ) as program:
        try:
            _, errors = program.communicate(timeout=240)
        finally:
            if program.poll() is None:
                os.killpg(program.pid, signal.SIGKILL)
    assert program.returncode == code, errors
    with pytest.raises(ProcessLookupError):
        os.killpg(program.pid, 0)
    if kind == "fit":
        assert "ended by SIGTERM at step" in errors
        assert len(list(tmp_path.glob("checkpoints/step-*"))) == 1


@pytest.mark.slow
def test_a_worker_that_is_stuck_is_killed() -> None:
    loader = evaluation_loader(
        DataLoader(Stuck(), batch_size=1, num_workers=1),
        processes=Processes.start(),
        device=torch.device("cpu"),
        seed=0,
    )
    batches = loader.batches(0)
    next(batches)
    (worker,) = multiprocessing.active_children()
    batches.close()
    assert not worker.is_alive()
    loader.close()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")  # idle threads of this process
def test_a_fork_that_is_told_twice_to_end_leaves_the_workers_of_its_parent() -> None:
    worker = multiprocessing.Process(target=time.sleep, args=(60,), daemon=True)
    worker.start()
    try:
        if (fork := os.fork()) == 0:
            try:
                kill_workers()
            finally:
                os._exit(0)
        assert os.waitpid(fork, 0) == (fork, 0)
        worker.join(0.2)
        assert worker.is_alive()
    finally:
        worker.kill()
        worker.join()
