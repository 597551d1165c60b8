"""One run writes to a directory; its death, however it comes, frees it."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, ClassVar

import pytest

from tests.checkpoint.toys import save_alone
from trainkit.basics.lock import RunLock
from trainkit.checkpoint import CheckpointStore
from trainkit.errors import CheckpointError

HOLD = """
import os, sys, time
from pathlib import Path
from trainkit.basics.lock import RunLock
lock = RunLock(Path(sys.argv[1]))
try:
    lock.acquire()
except Exception as error:
    print("refused", flush=True)
    sys.exit()
if "fork" in sys.argv:
    if os.fork() == 0:  # a worker that outlives the run
        print("held", os.getpid(), flush=True)
        sys.stdin.read()
        os._exit(0)
else:
    print("held", os.getpid(), flush=True)
sys.stdin.read()
"""


def hold(directory: Path, *options: str) -> "subprocess.Popen[str]":
    """Start a process that takes the lock and keeps it until its input ends."""
    command = [sys.executable, "-c", HOLD, str(directory), *options]
    root = Path(__file__).resolve().parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment)


def test_a_second_run_is_told_who_holds_the_directory(tmp_path: Path) -> None:
    with hold(tmp_path / "run") as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("held")
        expected = (
            rf"locked by process {process.pid} on host .+ since 20.+ UTC, which writes there\."
        )
        with pytest.raises(CheckpointError, match=expected):
            RunLock(tmp_path / "run").acquire()
        process.kill()
    with RunLock(tmp_path / "run"):
        pass


@pytest.mark.e2e
def test_a_worker_that_outlives_its_run_does_not_keep_the_lock(tmp_path: Path) -> None:
    with hold(tmp_path, "fork") as process:
        assert process.stdout is not None
        worker = int(process.stdout.readline().split()[1])
        process.kill()
        process.wait()
        os.kill(worker, 0)  # still there
        with RunLock(tmp_path):
            os.kill(worker, signal.SIGKILL)


@pytest.mark.e2e
def test_of_many_runs_that_start_at_once_one_gets_the_lock(tmp_path: Path) -> None:
    processes = [hold(tmp_path / "new" / "run") for _ in range(6)]
    words = []
    for process in processes:
        assert process.stdout is not None
        words.append(process.stdout.readline().split()[0])
    for process in processes:
        process.communicate("")
    assert sorted(words) == ["held"] + ["refused"] * 5


class Moving(type(Path())):  # type: ignore[misc]
    """The path of a folder that others move right after it was looked at, or as it is made."""

    moves: ClassVar[list[tuple[str, Path, Path]]] = []  # when, from where, to where

    def _move(self, moment: str) -> None:
        for each in [each for each in self.moves if each[0] == moment]:
            self.moves.remove(each)
            each[1].rename(each[2])

    def stat(self, **options: Any) -> os.stat_result:
        found: os.stat_result = super().stat(**options)
        self._move("looked at")
        return found

    def mkdir(self, *arguments: Any, **options: Any) -> None:
        self._move("made")
        super().mkdir(*arguments, **options)


def test_a_folder_that_moves_while_it_is_looked_at_is_told(tmp_path: Path) -> None:
    run, other = tmp_path / "run", tmp_path / "other"
    with RunLock(Moving(run)) as lock:
        Moving.moves.append(("looked at", run, tmp_path / "away"))
        lock.check()
        assert not run.exists()
        other.mkdir()
        Moving.moves.append(("made", other, run))
        with pytest.raises(CheckpointError, match="is another folder than the one that this run"):
            lock.check()
        assert not any(run.iterdir())


def test_reading_needs_no_lock(tmp_path: Path) -> None:
    path = save_alone(CheckpointStore(tmp_path / "checkpoints"), 1)
    with RunLock(tmp_path):
        assert CheckpointStore(tmp_path / "checkpoints").open(path).step == 1


def test_the_lock_is_given_back_and_can_be_taken_again(tmp_path: Path) -> None:
    lock = RunLock(tmp_path)
    for _ in range(2):
        with lock, pytest.raises(CheckpointError, match=f"process {os.getpid()}"):
            RunLock(tmp_path).acquire()


@pytest.mark.e2e
def test_a_program_that_ends_with_a_lock_prints_nothing(tmp_path: Path) -> None:
    program = (
        "import torch; from trainkit import Accelerator\n"
        "from trainkit.accelerate_compat import ProjectConfiguration as Project\n"
        f"project = Project(project_dir={str(tmp_path)!r}, automatic_checkpoint_naming=True)\n"
        "accelerator = Accelerator(cpu=True, project_config=project)\n"
        "model = accelerator.prepare(torch.nn.Linear(1, 1))\n"
        "accelerator.save_state()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_link_in_the_place_of_the_lock_is_not_followed(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_text("precious")
    (tmp_path / ".lock").symlink_to(target)
    with pytest.raises(CheckpointError, match="cannot be written to"):
        RunLock(tmp_path).acquire()
    assert target.read_text() == "precious"


def test_a_file_in_the_place_of_the_directory_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "run").touch()
    with pytest.raises(CheckpointError, match=r"run` cannot be written to: .* Choose another"):
        RunLock(tmp_path / "run").acquire()
