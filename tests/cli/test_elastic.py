"""Machines that come and go; `python -m benchmarks.elastic` loses many of them."""

import signal
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from torch._C._distributed_c10d import TCPStore
from torch.distributed.elastic.rendezvous import dynamic_rendezvous
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _NodeDesc, _RendezvousState

from benchmarks.elastic import Job, judge, prepare
from tests.cli.launcher import Launcher, free_port
from tests.cli.test_launch import alone, output, shown
from trainkit.basics.torch_internals import meet_without_pickles
from trainkit.errors import ConfigError
from trainkit.launch import config_file
from trainkit.launch.elastic import rendezvous
from trainkit.launch.settings import JobSettings

assert alone is not None  # a fixture: an empty folder, no settings from outside


def test_torchruns_way_of_writing_is_read(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = shown(capsys, "--num_machines", "1:4")
    assert (rows["num_machines"][0], rows["min_machines"][0]) == ("4", "1")
    monkeypatch.setenv("PET_NNODES", "2:3")
    rows = shown(capsys)
    assert (rows["num_machines"][0], rows["min_machines"][0]) == ("3", "2")
    assert rows["min_machines"][1] == "environment (PET_NNODES)"


def test_machines_that_come_and_go_meet_by_c10d() -> None:
    job = JobSettings(
        num_machines=4, min_machines=1, main_process_ip="a", rdzv_conf="keep_alive_interval=2"
    )
    told = rendezvous(job, "b")
    assert (told.backend, told.endpoint, told.local_addr) == ("c10d", "a:29500", "b")
    assert (told.min_nodes, told.max_nodes) == (1, 4)
    assert told.config == {"last_call_timeout": "10", "keep_alive_interval": "2"}


def test_what_cannot_be_is_refused(alone: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = output(capsys, "--dry-run", "--num_machines", "4:2", "script.py", code=1)
    assert "`min_machines` is 4, but must be at most `num_machines`" in text
    (alone / "job.yaml").write_text("num_machines: 1:4\n")  # 64 for YAML 1.1
    with pytest.raises(ConfigError, match="but is '1:4'"):
        config_file.read(alone / "job.yaml")


def test_the_state_of_the_rendezvous_travels_as_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dynamic_rendezvous, "pickle", None)  # put back at the end
    meet_without_pickles()
    json: Any = vars(dynamic_rendezvous)["pickle"]
    state, now = _RendezvousState(), datetime.now(UTC)
    first, second = _NodeDesc("10.0.0.1", 7, 0), _NodeDesc("10.0.0.2", 9, 1)
    state.round, state.complete, state.deadline = 3, True, now
    state.participants, state.last_heartbeats = {first: 0}, {first: now, second: now}
    state.wait_list, state.redundancy_list = {second}, {first, second}
    text = json.dumps(state)
    assert vars(json.loads(text)) == vars(state)
    assert vars(json.loads(json.dumps(_RendezvousState()))) == vars(_RendezvousState())
    for broken in (b"", b"[]", b"{}", b"cos\nsystem\n", text.replace(b"10.0.0.1", b"") + b"x"):
        with pytest.raises(json.PickleError):
            json.loads(broken)


@pytest.mark.e2e
@pytest.mark.parametrize("is_asked", [False, True])
def test_the_rest_goes_on_when_a_machine_is_lost(is_asked: bool, tmp_path: Path) -> None:
    prepare(tmp_path)
    (tmp_path / "wait-for-others").touch()  # on a busy machine the second one can be late
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    # A machine may be silent for as long as by default: a busy one gives late signs of life.
    settings = "is_host=false,last_call_timeout=1"
    job = Job(tmp_path, 2, store.port, epochs=4, pause=0.1, rendezvous=settings)
    for _ in range(2):
        job.add()
    try:
        job.wait(0.0, 2, times=6)  # updates, of which five are saved
        (tmp_path / "wait-for-others").unlink()
        if is_asked:  # as before a preemption
            lost, leaving = time.time(), job.machines.pop().launcher
            leaving.send(signal.SIGTERM)
            assert leaving.wait() == 143, leaving.output
        else:
            lost = job.lose(1)
        job.wait(lost, 1)
        assert job.machines[0].launcher.wait() == 0, job.machines[0].launcher.output
    finally:
        job.end()
    assert judge(tmp_path, epochs=4, codes=[]) == []


@pytest.mark.e2e
def test_machines_agree_on_settings_and_keep_to_their_ports(tmp_path: Path) -> None:
    text = (
        "import os, time\nprint('store', os.environ['MASTER_PORT'], flush=True)\ntime.sleep(60)\n"
    )
    (tmp_path / "script.py").write_text(text)
    first = free_port()
    command = ["launch", "--cpu", "--num_machines", "1:2", "--num_processes", 2]
    command += ["--main_process_ip", "127.0.0.1", "--ports", f"{first}-{first + 20}"]
    command += ["--rdzv_conf", "last_call_timeout=1"]
    one = Launcher([*command, "script.py"], tmp_path, output="one")
    try:
        one.wait_for("store")
        port = int(one.output.partition("store ")[2].split()[0])
        assert first < port <= first + 20
        other = [*command, "--mixed_precision", "bf16", "script.py"]
        two = Launcher(other, tmp_path, output="two")
        assert two.wait() == 1
        assert "was told other things than those of the job" in two.output
        assert "TRAINKIT_MIXED_PRECISION: no (the job), bf16 (this machine)" in two.output
    finally:
        one.send(signal.SIGTERM)
        one.wait()
    assert one.output.count("store") == 1  # it was not disturbed
