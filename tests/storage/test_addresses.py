"""Commands, models and states at addresses of a storage."""

import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.helpers.ranks import run_ranks
from tests.helpers.s3 import S3
from tests.storage.toys import STEPS, At, start, train
from trainkit import Accelerator, ProjectConfiguration
from trainkit.cli.main import main
from trainkit.export import save_model


def _command(rank: int, *arguments: str) -> int:
    return main(arguments)


@pytest.fixture
def run(s3: S3, tmp_path: Path, request: pytest.FixtureRequest) -> str:
    """The address of a run with two checkpoints, of which this machine has nothing."""
    address = f"s3://bucket/{request.node.name}"
    run_ranks(1, train, address, tmp_path / "other", keep_last=2)
    return address


def test_checkpoints_are_listed_without_their_contents(
    run: str, s3: S3, capfd: pytest.CaptureFixture[str]
) -> None:
    s3.requests()
    assert run_ranks(1, _command, "checkpoint", "ls", run) == [0]
    assert not [each for each in s3.requests() if "safetensors" in each]
    shown = capfd.readouterr().out
    assert f"step-{STEPS:08d}" in shown
    assert f"step-{STEPS - 2:08d}" in shown
    assert "BROKEN" not in shown


@pytest.mark.e2e
def test_checkpoints_are_verified(run: str, s3: S3, capfd: pytest.CaptureFixture[str]) -> None:
    assert run_ranks(1, _command, "checkpoint", "verify", run) == [0]
    name = f"{run.removeprefix('s3://bucket/')}/checkpoints/step-{STEPS:08d}"
    one = f"s3://bucket/{name}"
    assert run_ranks(1, _command, "checkpoint", "verify", one) == [0]
    content = s3.read(f"{name}/model.safetensors")
    s3.write(f"{name}/model.safetensors", content[:-1] + bytes([content[-1] ^ 1]))
    assert run_ranks(1, _command, "checkpoint", "verify", run) == [1]
    assert f"BROKEN step-{STEPS:08d}" in capfd.readouterr().out


@pytest.mark.e2e
def test_a_checkpoint_is_exported_from_storage(run: str, tmp_path: Path) -> None:
    assert run_ranks(1, _command, "checkpoint", "export", run, str(tmp_path / "model")) == [0]
    assert (tmp_path / "model/model.safetensors").is_file()


@pytest.mark.e2e
def test_commands_fetch_the_checkpoint_that_they_read_and_no_other(
    run: str, s3: S3, tmp_path: Path
) -> None:
    newest = f"{run.removeprefix('s3://bucket/')}/checkpoints/step-{STEPS:08d}/"
    for command in ("show", run), ("diff", run, run), ("export", run, str(tmp_path / "model")):
        s3.requests()
        assert run_ranks(1, _command, "checkpoint", *command) == [0]
        fetched = [each for each in s3.requests() if each.startswith("GET") and each != "GET "]
        assert {each for each in fetched if newest not in each} == {
            f"GET {newest.replace(f'{STEPS:08d}', f'{STEPS - 2:08d}')}manifest.json"
        }
        assert f"GET {newest}model.safetensors" in fetched


def test_storage_is_thinned_out_by_manifests_alone(
    run: str, s3: S3, capfd: pytest.CaptureFixture[str]
) -> None:
    name = run.removeprefix("s3://bucket/")
    before = s3.names(name)
    s3.requests()
    thin_out = "checkpoint", "prune", run, "--keep-last", "1"
    assert run_ranks(1, _command, *thin_out, "--dry-run") == [0]
    assert f"would remove step-{STEPS - 2:08d}" in capfd.readouterr().out
    assert s3.names(name) == before
    assert not [each for each in s3.requests() if each.startswith(("PUT", "DELETE"))]
    assert run_ranks(1, _command, *thin_out) == [0]
    left = {each.split("/")[2] for each in s3.names(f"{name}/checkpoints/")}
    assert left == {f"step-{STEPS:08d}"}
    assert f"removed step-{STEPS - 2:08d}" in capfd.readouterr().out
    asked = s3.requests()
    fetched = {each.rpartition("/")[2] for each in asked if each.startswith("GET")}
    assert fetched <= {"GET ", "manifest.json", ".trainkit-lock"}
    removed = [each for each in asked if each.startswith(f"DELETE {name}/checkpoints")]
    assert removed[0].endswith("/manifest.json")
    lock = [i for i, each in enumerate(asked) if "trainkit-lock" in each]
    assert lock[0] < asked.index(removed[0]) <= asked.index(removed[-1]) < lock[-1]


@pytest.mark.e2e
@pytest.mark.parametrize(("machine", "part"), [("a", ""), ("b", ""), ("b", "/checkpoints")])
def test_a_run_under_way_is_not_thinned_out(
    s3: S3, tmp_path: Path, machine: str, part: str, capfd: pytest.CaptureFixture[str]
) -> None:
    name = f"alive-{machine}{part.strip('/')}"
    waits = At(STEPS - 1, partial(time.sleep, 600))
    process, gate = start(
        f"s3://bucket/{name}", tmp_path / "a", waits, keep_last=2, prints=tmp_path / "log"
    )
    try:
        gate.set()
        place = f"{name}/checkpoints/"
        while "".join(before := s3.names(place)).count("manifest.json") < 2:
            assert process.is_alive(), (tmp_path / "log").read_text()
            time.sleep(0.1)
        holder = json.loads(s3.read(f"{name}/.trainkit-lock"))["token"]
        thin_out = "checkpoint", "prune", f"s3://bucket/{name}{part}", "--keep-last", "1"
        assert _on(tmp_path / machine, lambda: main(thin_out)) == 1
        said = capfd.readouterr().err
        assert f"written to by process {process.pid}" in said or "locked by process" in said
        assert s3.names(place) == before
        assert json.loads(s3.read(f"{name}/.trainkit-lock"))["token"] == holder
    finally:
        process.kill()
        process.join()


def test_runs_and_reports_are_read_from_storage(
    run: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run_ranks(1, _command, "runs", "ls", run) == [0]
    assert "finished" in capfd.readouterr().out
    page = tmp_path / "page.html"
    assert run_ranks(1, _command, "report", run, "-o", str(page)) == [0]
    assert page.is_file()
    assert run_ranks(1, _command, "diff", run, run) == [0]
    assert "Bit-equal over" in capfd.readouterr().out


def test_an_address_that_holds_nothing_is_told(s3: S3, capfd: pytest.CaptureFixture[str]) -> None:
    assert run_ranks(1, _command, "checkpoint", "ls", "s3://bucket/nothing") == [1]
    assert "`s3://bucket/nothing` holds nothing" in capfd.readouterr().err


def _on(machine: Path, action: Callable[[], Any]) -> Any:
    """Do something on a machine."""

    def there(rank: int) -> Any:
        import os

        os.environ["TRAINKIT_STORAGE_DIR"] = str(machine)
        return action()

    return run_ranks(1, there)[0]


@pytest.mark.e2e
def test_states_of_an_own_loop_go_on_elsewhere(s3: S3, tmp_path: Path) -> None:
    def prepared() -> tuple[Accelerator, nn.Linear]:
        project = ProjectConfiguration(
            project_dir="s3://bucket/project", automatic_checkpoint_naming=True, total_limit=2
        )
        accelerator = Accelerator(cpu=True, project_config=project)
        torch.manual_seed(0)
        model: nn.Linear = accelerator.prepare(nn.Linear(2, 2))
        return accelerator, model

    def save() -> None:
        accelerator, model = prepared()
        for number in range(3):
            nn.init.constant_(model.weight, number)
            accelerator.save_state()

    def load() -> float:
        accelerator, model = prepared()
        accelerator.load_state()
        return float(model.weight[0, 0].item())

    _on(tmp_path / "a", save)
    names = s3.names("project/checkpoints/")
    assert {name.split("/")[2] for name in names} == {"checkpoint_1", "checkpoint_2"}
    assert _on(tmp_path / "b", load) == 2.0


def test_a_state_at_an_address_replaces_the_one_before(s3: S3, tmp_path: Path) -> None:
    def save_and_load() -> float:
        accelerator = Accelerator(cpu=True)
        model = accelerator.prepare(nn.Linear(2, 2))
        for number in range(2):
            nn.init.constant_(model.weight, number)
            accelerator.save_state("s3://bucket/state")
        return float(model.weight[0, 0].item())

    def load() -> float:
        accelerator = Accelerator(cpu=True)
        model = accelerator.prepare(nn.Linear(2, 2))
        accelerator.load_state("s3://bucket/state")
        return float(model.weight[0, 0].item())

    _on(tmp_path / "a", save_and_load)
    assert {name.split("/")[1] for name in s3.names("state/")} == {"step-00000001"}
    assert _on(tmp_path / "b", load) == 1.0


@pytest.mark.e2e
def test_a_model_is_written_to_an_address(s3: S3, tmp_path: Path) -> None:
    large = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(2)))
    _on(tmp_path, lambda: save_model(large, "s3://bucket/model", "17000B"))
    names = s3.names("model/")
    assert len([name for name in names if "-of-" in name]) == 2
    _on(tmp_path, lambda: save_model(nn.Linear(2, 2), "s3://bucket/model"))
    assert s3.names("model/") == ["model/model.safetensors"]
