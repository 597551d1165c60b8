"""What was logged since the last log counts the same where a run goes on on other processes."""

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest
from typing_extensions import override

from tests.helpers.ranks import run_ranks
from tests.helpers.toys import fit, make_trainer, toy_loaders
from trainkit import Callback, Interrupted, Run, StepResult
from trainkit.callbacks import Checkpoint


class Counts(Callback):
    """Logs the step, alike on each process, and keeps what comes of it."""

    def __init__(self, stop: int) -> None:
        self.stop = stop
        self.logs: list[dict[str, float]] = []

    @override
    def on_step_end(self, run: Run, result: StepResult) -> None:
        run.log({"step": float(run.state.step)})
        time.sleep(0.15)  # so long that the processes exchange what they know at each step
        if run.state.step == self.stop:
            os.kill(os.getpid(), signal.SIGTERM)

    @override
    def on_log(self, run: Run, values: dict[str, float]) -> None:
        self.logs.append(values)


def logged(rank: int, folder: Path, stop: int) -> list[dict[str, float]]:
    counts = Counts(stop)
    trainer = make_trainer(
        max_steps=4,
        log_every_n_steps=8,
        max_grad_norm=1.0,
        split_batches=True,
        output_dir=folder,
        callbacks=[Checkpoint(), counts],
    )
    with suppress(Interrupted):
        fit(trainer, toy_loaders(batch_size=12), resume="auto")
    return counts.logs


@pytest.mark.e2e
@pytest.mark.parametrize("sizes", [(3, 1), (1, 3), (2, 3)])
def test_a_mean_goes_on_by_steps_on_another_number_of_processes(
    sizes: tuple[int, int], tmp_path: Path
) -> None:
    assert run_ranks(sizes[0], logged, tmp_path, 2)[0] == []
    values = run_ranks(sizes[1], logged, tmp_path, 0)[0]
    assert [round(each["step"], 9) for each in values] == [2.5]
