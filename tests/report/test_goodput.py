"""Where the time of a run went, to the second."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.report.logs import event, write_run
from trainkit.inspect.report import read_run
from trainkit.inspect.report.goodput import Lost, goodput, throughput

ROOT = Path(__file__).resolve().parents[2]


def test_a_session_is_divided(tmp_path: Path) -> None:
    events = [
        event("start", 0, {"setup": 2.0}, time=100.0),
        event("log", 10, {"setup": 3.0, "train": 10.0}, data_wait=0.2),
        event("evaluation", 10, {"setup": 3.0, "train": 10.0, "evaluate": 4.0}),
        event("log", 20, {"setup": 3.0, "train": 20.0, "evaluate": 4.0}, data_wait=0.1),
        event("checkpoint", 20, {"setup": 3.0, "train": 20.0, "evaluate": 4.0, "save": 1.0}),
        event("end", 20, {"setup": 3.0, "train": 20.0, "evaluate": 4.0, "save": 1.0, "end": 2.0}),
    ]
    split = goodput(read_run(write_run(tmp_path, events=events)))
    assert split is not None
    assert split.seconds == {
        **{"step": 17.0, "data_wait": 3.0, "evaluate": 4.0, "save": 1.0},
        **{"again": 0.0, "setup": 3.0, "end": 2.0, "down": 0.0},
    }
    assert (split.running, split.divided) == (30.0, True)
    assert split.share == pytest.approx(17 / 30)


def test_lost_work_and_the_time_between_sessions_are_told(tmp_path: Path) -> None:
    events = [
        event("start", 0, {"setup": 1.0}, time=1001.0),
        event("log", 10, {"setup": 1.0, "train": 10.0}, data_wait=0.5),
        event("log", 20, {"setup": 1.0, "train": 30.0}, data_wait=0.5),  # killed here, at 1031
        event("start", 15, {"setup": 2.0}, time=1043.0),  # began at 1041, from a save at step 15
        event("log", 20, {"setup": 3.0, "train": 5.0}),
    ]
    split = goodput(read_run(write_run(tmp_path, events=events)))
    assert split is not None
    assert split.lost == [Lost(5, 10.0), Lost(0, 0.0)]  # half of what came between the two logs
    assert split.down == [0.0, 10.0]
    assert split.seconds == {
        **{"step": 15.0, "data_wait": 10.0, "evaluate": 0.0, "save": 0.0},
        **{"again": 10.0, "setup": 4.0, "end": 0.0, "down": 10.0},
    }
    assert split.running == 39.0


def test_a_session_whose_work_was_all_given_up_counts_as_lost(tmp_path: Path) -> None:
    events = [
        event("start", 0, {"setup": 1.0}, time=1.0),
        event("log", 10, {"setup": 1.0, "train": 10.0}),
        event("start", 10, {"setup": 1.0}, time=20.0),
        event("log", 18, {"setup": 1.0, "train": 8.0}),
        event("start", 5, {"setup": 1.0}, time=40.0),  # both newer checkpoints were broken
        event("log", 6, {"setup": 1.0, "train": 1.0}),
    ]
    split = goodput(read_run(write_run(tmp_path, events=events)))
    assert split is not None
    assert [lost.windows for lost in split.lost] == [5, 13, 0]
    assert (split.seconds["step"], split.seconds["again"]) == (6.0, 13.0)
    assert not split.divided


def test_throughput_is_known_without_its_callback(tmp_path: Path) -> None:
    events = [
        event("start", 0, {"setup": 1.0}, time=0.0),
        event("log", 10, {"setup": 1.0, "train": 5.0}),
        event("log", 20, {"setup": 1.0, "train": 25.0, "evaluate": 9.0}),
        event("start", 10, {"setup": 1.0}, time=60.0),
        event("log", 20, {"setup": 1.0, "train": 4.0}),
    ]
    run = read_run(write_run(tmp_path, events=events))
    assert throughput(run) == [(10, 8.0), (20, 10.0)]


def test_without_events_nothing_is_claimed(tmp_path: Path) -> None:
    assert goodput(read_run(write_run(tmp_path, [{"step": 1, "loss": 1.0}]))) is None


KILLED = """
import os, signal, sys
from pathlib import Path
from tests.helpers.toys import fit, make_trainer
from trainkit import Callback
from trainkit.callbacks import Checkpoint, JSONLLogger

class Kill(Callback):
    def on_step_start(self, run):
        if run.state.step == 7 and run.checkpoints.resumed_from is None:
            os.kill(os.getpid(), signal.SIGKILL)

callbacks = [JSONLLogger(), Checkpoint(every_n_steps=3), Kill()]
folder = Path(sys.argv[1])
fit(make_trainer(callbacks=callbacks, output_dir=folder, log_every_n_steps=1), resume="auto")
"""


@pytest.mark.e2e
@pytest.mark.usefixtures("warm_programs")
def test_a_run_that_was_killed_and_resumed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", KILLED, str(tmp_path)]
    codes = [subprocess.run(command, cwd=ROOT, check=False).returncode for _ in range(2)]
    assert codes == [-signal.SIGKILL, os.EX_OK]
    run = read_run(tmp_path)
    split = goodput(run)
    assert split is not None
    assert run.resumes == [6]
    assert [session.ending for session in run.sessions] == ["under way or killed", "max_epochs"]
    assert [lost.windows for lost in split.lost] == [1, 0]
    assert split.seconds["again"] > 0
    assert split.seconds["down"] > 0
    assert [step for step, _ in run.curves["loss"]] == list(range(1, 9))  # each step once
