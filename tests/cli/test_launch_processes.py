"""`trainkit launch` with real processes: they train, fail, start again, and are all gone."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cli.launcher import TIME_LIMIT, Launcher, free_port, lives, run
from tests.cli.test_config_file import ACCELERATE
from trainkit.launch.workers import Attempt, Workers

TWO = ("launch", "--cpu", "--num_processes", 2)

ACTS = """
import os, signal, sys, time
rank, attempt = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
print(f"pid={os.getpid()} secret={os.environ.get('TRAINKIT_SECRET')}", flush=True)
action = sys.argv[1]

def leave(signum, frame):
    print(f"saved {rank}", flush=True)
    time.sleep(0.1)
    sys.exit({signal.SIGUSR1: 75}.get(signum, 128 + signum))

if action == "code" and rank == "1":
    sys.exit(7)
if action == "killed" and rank == "1":
    os.kill(os.getpid(), signal.SIGKILL)
if action == "once" and attempt == "0":
    while rank == "1" and not os.path.exists("begun"):  # else process 0 may say nothing
        time.sleep(0.01)
    if rank == "1":
        sys.exit(3)
    open("begun", "w").close()
if action == "stays" and rank == "1":
    while not os.path.exists("begun"):
        time.sleep(0.01)
    sys.exit(7)
if action == "later":
    sys.exit(75)
for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
    if action == "saves":
        signal.signal(signum, leave)
    if action in ("ignores", "stays"):
        signal.signal(signum, signal.SIG_IGN)
if action == "breaks" and rank == "1":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(9))
print(f"ready {rank}", flush=True)
open("begun", "w").close()
time.sleep(0 if action in ("once", "ends") else 60)
"""

TELLS = """
import json, os, sys
PREFIXES = ("TRAINKIT_", "MASTER_", "OMP_", "CUDA_", "RANK", "LOCAL_", "WORLD_", "GROUP_")
found = {k: v for k, v in os.environ.items() if k.startswith(PREFIXES)}
with open(f"{sys.argv[1]} {os.environ['RANK']}", "w") as file:
    json.dump(found, file)
"""
WAYS = ("by hand", "launched")
# Of a launcher that lives: who watches, where reports go, and which try of which machine it is.
BY_THE_LAUNCHER = {
    *("GROUP_RANK", "GROUP_WORLD_SIZE"),
    *("TRAINKIT_ADDRESS", "TRAINKIT_REPORT_DIR", "TRAINKIT_SECRET"),
}

TRAINS = """
import sys
from functools import partial
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from trainkit import Trainer
from trainkit.callbacks import Checkpoint

class Mine(Trainer):
    def training_step(self, model, batch):
        if self.run.state.step == 2:
            print("trains", flush=True)
            if sys.argv[1] == "fails" and self.processes.process_index == 1:
                raise ValueError("boom")
        return super().training_step(model, batch)

torch.manual_seed(0)
data = TensorDataset(torch.randn(48, 4), torch.randint(0, 2, (48,)))
model = nn.Linear(4, 2)
endless = sys.argv[1] == "endless"
trainer = Mine(
    max_epochs=10**6 if endless else 1,
    callbacks=[Checkpoint(every_n_steps=10**9)] if endless else [],
    output_dir="runs" if endless else None,
)
trainer.fit(
    model, DataLoader(data, 4, shuffle=True), optimizer=partial(torch.optim.SGD, lr=0.1),
    loss_fn=nn.CrossEntropyLoss(),
)
if trainer.processes.is_main_process:
    print(f"{type(trainer.precision).__name__} on {trainer.processes.num_processes}", flush=True)
    torch.save(model.state_dict(), sys.argv[1])
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "acts.py").write_text(ACTS)
    (tmp_path / "trains.py").write_text(TRAINS)
    (tmp_path / "reports").mkdir()
    return tmp_path


def nobody_is_left(output: str) -> bool:
    return not [pid for pid in re.findall(r"pid=(\d+)", output) if lives(int(pid))]


@pytest.mark.e2e
def test_a_file_of_accelerate_runs_on_the_cpu(folder: Path) -> None:
    (folder / "job.yaml").write_text(ACCELERATE)
    output = run("launch", "--config_file", "job.yaml", "--cpu", "trains.py", "w.pt", folder=folder)
    assert "FP16 on 2" in output


def test_a_file_for_gpus_is_refused_where_there_are_none(folder: Path) -> None:
    (folder / "job.yaml").write_text(ACCELERATE.replace("gpu_ids: all", "gpu_ids: 96,97"))
    output = run("launch", "--config_file", "job.yaml", "acts.py", "ends", folder=folder, code=1)
    assert "needs a GPU of its own, but torch sees none" in output
    assert "--cpu" in output
    assert "ready" not in output


@pytest.mark.e2e
def test_the_command_of_a_dry_run_does_the_same(folder: Path) -> None:
    (folder / "tells.py").write_text(TELLS)
    place = (*TWO, "--main_process_port", free_port())
    command = run(*place, "--dry-run", "tells.py", "by hand", folder=folder)
    own = [f"RANK={rank} LOCAL_RANK={rank} {command}" for rank in range(2)]
    processes = [subprocess.Popen(each, shell=True, cwd=folder) for each in own]
    assert [process.wait(TIME_LIMIT) for process in processes] == [0, 0]
    run(*place, "tells.py", "launched", folder=folder)
    for rank in range(2):
        ours, theirs = (json.loads((folder / f"{way} {rank}").read_text()) for way in WAYS)
        assert theirs.keys() - ours.keys() == BY_THE_LAUNCHER
        assert ours.items() <= theirs.items()
        assert (ours["WORLD_SIZE"], ours["MASTER_ADDR"]) == ("2", "127.0.0.1")


@pytest.mark.parametrize(
    ("action", "code", "words"),
    [
        ("code", 7, "process 1 ended with code 7"),
        ("killed", 128 + signal.SIGKILL, "process 1 was killed by SIGKILL"),
    ],
)
def test_the_code_of_a_failed_process_is_passed_on(
    action: str, code: int, words: str, folder: Path
) -> None:
    output = run(*TWO, "acts.py", action, folder=folder, code=code)
    assert words in output
    assert "Traceback" not in output
    assert nobody_is_left(output)


def test_a_process_that_the_launcher_kills_is_no_failure(folder: Path) -> None:
    output = run(*TWO, "--shutdown_timeout", 1, "acts.py", "stays", folder=folder, code=7)
    assert "process 1 ended with code 7" in output
    assert "SIGKILL" not in output
    assert nobody_is_left(output)


def test_processes_are_started_again_after_a_failure(folder: Path) -> None:
    output = run(*TWO, "--max_restarts", 2, "acts.py", "once", folder=folder)
    assert "restart 1 of at most 2" in output
    assert "restart 2" not in output


def test_processes_that_ended_on_request_are_not_started_again(folder: Path) -> None:
    output = run(*TWO, "--max_restarts", 2, "acts.py", "later", folder=folder, code=75)
    assert "restart" not in output


def test_a_signal_that_comes_while_processes_are_started_reaches_them(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(self: Workers, place: Attempt) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        before(self, place)

    before = Workers.start
    monkeypatch.setattr(Workers, "start", start)
    launcher = Launcher([*TWO, "acts.py", "saves"], folder, forked=True)
    assert launcher.wait() == 128 + signal.SIGTERM, launcher.output


@pytest.mark.parametrize(
    ("signum", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGUSR1, 75)]
)
def test_a_signal_reaches_the_processes_and_their_code_comes_back(
    signum: int, code: int, folder: Path
) -> None:
    launcher = Launcher([*TWO, "acts.py", "saves"], folder)
    launcher.wait_for("ready", 2)
    launcher.send(signum)
    assert launcher.wait() == code
    assert launcher.output.count("saved") == 2
    assert "300 s to save" in launcher.output
    assert nobody_is_left(launcher.output)


@pytest.mark.e2e
def test_a_process_that_fails_while_it_saves_is_not_hidden_by_the_signal(folder: Path) -> None:
    launcher = Launcher([*TWO, "acts.py", "breaks"], folder)
    launcher.wait_for("ready", 2)
    launcher.send(signal.SIGTERM)
    assert launcher.wait() == 9
    assert "process 1 ended with code 9" in launcher.output


def test_processes_that_do_not_end_in_time_are_killed(folder: Path) -> None:
    launcher = Launcher([*TWO, "--shutdown_timeout", 1, "acts.py", "ignores"], folder)
    launcher.wait_for("ready", 2)
    launcher.send(signal.SIGTERM)
    assert launcher.wait() == 128 + signal.SIGKILL
    assert "when the time was up" in launcher.output
    assert nobody_is_left(launcher.output)


@pytest.mark.e2e
def test_a_third_signal_leaves_nobody(folder: Path) -> None:
    launcher = Launcher([*TWO, "acts.py", "ignores"], folder)
    launcher.wait_for("ready", 2)
    launcher.send(signal.SIGTERM)
    launcher.wait_for("300 s to save")
    launcher.send(signal.SIGINT)
    launcher.send(signal.SIGTERM)
    assert launcher.wait() == 128 + signal.SIGKILL
    assert nobody_is_left(launcher.output)


def test_processes_save_and_end_when_the_launcher_is_killed(folder: Path) -> None:
    launcher = Launcher([*TWO, "acts.py", "saves"], folder)
    launcher.wait_for("ready", 2)
    launcher.send(signal.SIGKILL)
    assert launcher.wait() == -signal.SIGKILL
    launcher.wait_for("saved", 2)
    end = time.monotonic() + TIME_LIMIT
    while not nobody_is_left(launcher.output):
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.e2e
def test_a_training_saves_when_the_launcher_is_asked_to_end(folder: Path) -> None:
    launcher = Launcher([*TWO, "trains.py", "endless"], folder)
    launcher.wait_for("trains", 2)
    launcher.send(signal.SIGTERM)
    assert launcher.wait() == 143, launcher.output
    assert len(list((folder / "runs" / "checkpoints").glob("step-*/manifest.json"))) == 1


@pytest.mark.e2e
def test_the_first_report_is_shown_and_kept(folder: Path) -> None:
    output = run(*TWO, "--report_dir", "reports", "trains.py", "fails", folder=folder, code=1)
    reports = [json.loads(path.read_text()) for path in folder.glob("reports/*/attempt-0/*.json")]
    (first,) = [report for report in reports if not report["secondary"]]
    assert (first["process"], first["error"]["message"]) == (1, "boom")
    shown = output[output.rindex("trainkit: process 1 of 2 (pid") :]
    assert "after step 2" in shown.splitlines()[0]
    assert "raise ValueError" in shown


def test_an_error_before_trainkit_is_imported_is_told(folder: Path) -> None:
    (folder / "wrong.py").write_text("import os\n\nimport nothing_there\n")
    output = run(*TWO, "wrong.py", folder=folder, code=1)
    told = "ModuleNotFoundError: No module named 'nothing_there' (wrong.py, line 3)\nTraceback"
    assert told in output.rpartition("trainkit: ")[2], output
    assert "hint" not in output


SHOWS = """
import os, sitecustomize, sys
print("path:", os.environ.get("PYTHONPATH"))
print("startup:", [path for path in [*sys.path, sitecustomize.__file__] if "startup" in path])
if os.fork() == 0:
    raise ValueError("of a fork")
os.wait()
sys.exit(3)
"""


def test_a_script_finds_its_environment_as_it_was(folder: Path) -> None:
    (folder / "shows.py").write_text(SHOWS)
    (folder / "own").mkdir()
    (folder / "own" / "sitecustomize.py").write_text("print('of the user')")
    path = os.pathsep.join([str(folder / "own"), str(Path(__file__).resolve().parents[2])])
    command = ["launch", "--cpu", "--num_processes", "1", "shows.py"]
    launcher = Launcher(command, folder, environment={"PYTHONPATH": path}, forked=True)
    assert launcher.wait() == 3, launcher.output
    assert launcher.output.count("of the user") == 1
    assert re.search(rf"path: (\S+:)?{re.escape(path)}\nstartup: \[\]\n", launcher.output)
    assert not list(folder.rglob("*-error-*.json"))


def test_reports_of_a_success_are_removed(folder: Path) -> None:
    run(*TWO, "--report_dir", "reports", "acts.py", "ends", folder=folder)
    assert not list((folder / "reports").iterdir())


@pytest.mark.e2e
def test_a_program_can_be_started(folder: Path) -> None:
    output = run(
        *TWO, "--no_python", sys.executable, "-c", "import os; print('I am', os.environ['RANK'])",
        folder=folder,
    )  # fmt: skip
    assert sorted(re.findall(r"I am \d", output)) == ["I am 0", "I am 1"]
    output = run(*TWO, "-m", "acts", "ends", folder=folder)
    assert output.count("ready") == 2


@pytest.mark.e2e
@pytest.mark.usefixtures("warm_programs")
def test_one_script_alone_is_one_process(folder: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    result = subprocess.run(
        [sys.executable, "trains.py", "w.pt"],
        cwd=folder, env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert "FP32 on 1" in result.stdout


def test_a_job_goes_on_without_its_orphan_killer(folder: Path) -> None:
    launcher = Launcher([*TWO, "acts.py", "saves"], folder, forked=True)
    launcher.wait_for("ready", 2)
    children = subprocess.run(
        ["ps", "-o", "pid=,args=", "--ppid", str(launcher.pid)], capture_output=True, text=True
    )
    (killer,) = [line for line in children.stdout.splitlines() if "acts.py" not in line]
    os.kill(int(killer.split()[0]), signal.SIGKILL)
    launcher.send(signal.SIGTERM)
    assert launcher.wait() == 143
