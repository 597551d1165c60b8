"""Machines that share no folder: process 0 uploads for all, and each fetches what it lacks."""

import os
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.helpers.ranks import RanksError, run_ranks
from tests.helpers.s3 import S3
from tests.storage.toys import STEPS, At, train
from trainkit import Accelerator, Callback, ProjectConfiguration, Trainer
from trainkit.callbacks import Checkpoint
from trainkit.checkpoint.format.names import owner_of
from trainkit.storage import machines
from trainkit.storage.objects import Objects
from trainkit.strategies import FSDP


def _apart(rank: int, folder: Path) -> None:
    """Let this process be on a machine of its own, with a folder of its own."""
    os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    os.environ["TRAINKIT_STORAGE_DIR"] = str(_machine(folder, rank))
    machines._PIECE = 1000  # bytes: several of a file


def _machine(folder: Path, rank: int) -> Path:
    return folder.with_name(f"{folder.name}{rank}")


def _train(rank: int, address: str, folder: Path, *callbacks: Callback, **options: Any) -> Any:
    _apart(rank, folder)
    return train(rank, address, _machine(folder, rank), *callbacks, **options)


def _stop() -> None:
    raise KeyError("stopped")


@pytest.mark.e2e
def test_machines_without_a_shared_folder_go_on_elsewhere_bit_equal(s3: S3, tmp_path: Path) -> None:
    address = "s3://bucket/apart"
    with pytest.raises(RanksError, match="stopped"):
        run_ranks(2, _train, address, tmp_path / "a", At(3, _stop), strategy="fsdp")
    found = run_ranks(2, _train, address, tmp_path / "b", strategy="fsdp")
    assert [came_from for came_from, _ in found] == [2, 2]
    whole = run_ranks(2, train, str(tmp_path / "plain"), tmp_path, strategy="fsdp")
    for (_, ours), (_, theirs) in zip(found, whole, strict=True):
        assert all(map(torch.equal, ours, theirs))
    name = f"checkpoints/step-{STEPS:08d}"
    parts = {path.name for path in (tmp_path / "plain" / name).iterdir()}
    assert {each.rpartition("/")[2] for each in s3.names(f"apart/{name}/")} == parts
    assert {path.name for path in (tmp_path / "b0/s3/bucket/apart" / name).iterdir()} == parts
    assert not [path for path in (tmp_path / "b1").rglob("*") if path.is_file()]  # nothing stays


def _fetched(rank: int, address: str, folder: Path, **options: Any) -> tuple[Any, set[str]]:
    """Train on as many machines as processes; return what it gave, and which files were fetched."""
    found, fetch = set[str](), Objects.fetch

    def noted(self: Objects, name: str, path: Path) -> None:
        found.add(name.rpartition("/")[2])
        fetch(self, name, path)

    Objects.fetch = noted  # type: ignore[method-assign]
    return _train(rank, address, folder, **options), found


def _names(s3: S3, prefix: str) -> set[str]:
    return {name.rpartition("/")[2] for name in s3.names(prefix)} - {"manifest.json"}


@pytest.mark.e2e
@pytest.mark.parametrize(("strategy", "lacks"), [("fsdp", True), ("auto", False)])
def test_a_machine_fetches_the_shards_of_its_own_processes(
    s3: S3, tmp_path: Path, strategy: Any, lacks: bool
) -> None:
    address = f"s3://bucket/parts-{strategy}"
    with pytest.raises(RanksError, match="stopped"):
        run_ranks(2, _train, address, tmp_path / "a", At(3, _stop), strategy="fsdp")
    every = _names(s3, f"parts-{strategy}/checkpoints/")
    others = {name for name in every if "shard-00000" in name}
    assert len(others) == 2  # of the model, and of the optimizer
    found = run_ranks(2, _fetched, address, tmp_path / "b", strategy=strategy)
    assert [came_from for (came_from, _), _ in found] == [2, 2]
    assert every - found[1][1] == (others if lacks else set())


@pytest.mark.e2e
def test_what_no_name_tells_is_fetched_when_it_is_read(
    s3: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = "s3://bucket/asked"
    with pytest.raises(RanksError, match="stopped"):
        run_ranks(2, _train, address, tmp_path / "a", At(3, _stop), strategy="fsdp")

    def other(name: str) -> int | None:
        return None if (owner := owner_of(name)) is None else 1 - owner

    monkeypatch.setattr(machines, "owner_of", other)
    found = run_ranks(2, _train, address, tmp_path / "b", strategy="fsdp")
    assert [came_from for came_from, _ in found] == [2, 2]
    whole = run_ranks(2, train, str(tmp_path / "plain"), tmp_path, strategy="fsdp")
    for (_, ours), (_, theirs) in zip(found, whole, strict=True):
        assert all(map(torch.equal, ours, theirs))


@pytest.mark.e2e
def test_a_shard_that_is_broken_there_is_told(s3: S3, tmp_path: Path) -> None:
    address = "s3://bucket/broken"
    with pytest.raises(RanksError, match="stopped"):
        run_ranks(2, _train, address, tmp_path / "a", At(3, _stop), strategy="fsdp")
    (name,) = (n for n in s3.names("broken/checkpoints/") if "model-shard-00001" in n)
    content = s3.read(name)
    s3.write(name, content[:-1] + bytes([content[-1] ^ 1]))
    # Process 0 has the good one of the first training.
    folders = {0: tmp_path / "a", 1: tmp_path / "b"}
    with pytest.raises(RanksError, match=r"`s3://bucket/broken/.*` is broken: .*model-shard-00001"):
        run_ranks(2, lambda rank: _train(rank, address, folders[rank], strategy="fsdp"))


def _own_loop(rank: int, folder: Path, strategy: Any, saves: int) -> list[torch.Tensor]:
    """Save or load the states of an own loop; return what is to come back with them."""
    _apart(rank, folder)
    project = ProjectConfiguration(
        project_dir=f"s3://bucket/loop-{strategy is None}",
        automatic_checkpoint_naming=True,
        total_limit=2,
    )
    accelerator = Accelerator(cpu=True, project_config=project, strategy=strategy)
    torch.manual_seed(rank)
    module = nn.Linear(4, 8)
    model, optimizer = accelerator.prepare(module, torch.optim.AdamW(module.parameters(), lr=0.1))
    for _ in range(saves):
        accelerator.backward(model(torch.randn(2, 4)).square().sum())
        optimizer.step()
        optimizer.zero_grad()
        accelerator.save_state()
    if not saves:
        accelerator.load_state()
    accelerator.backward(model(torch.randn(2, 4)).square().sum())
    optimizer.step()
    state = accelerator.get_state_dict(model)
    accelerator.end_training()
    return [*state.values(), torch.rand(2)]


@pytest.mark.parametrize("strategy", [None, pytest.param(FSDP(), marks=pytest.mark.e2e)])
def test_states_of_an_own_loop_need_no_shared_folder(s3: S3, tmp_path: Path, strategy: Any) -> None:
    before = run_ranks(2, _own_loop, tmp_path / "a", strategy, 3)
    states = {name.split("/")[2] for name in s3.names(f"loop-{strategy is None}/checkpoints/")}
    assert states == {"checkpoint_1", "checkpoint_2"}
    after = run_ranks(2, _own_loop, tmp_path / "b", strategy, 0)
    for ours, theirs in zip(after, before, strict=True):
        assert all(map(torch.equal, ours, theirs))
    assert not torch.equal(before[0][-1], before[1][-1])  # random streams, each its own


def _dry_run(rank: int, folder: Path) -> tuple[int, float | None, float]:
    _apart(rank, folder)
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(32, 4), torch.randn(32, 1))
    model, loader = nn.Linear(4, 1), DataLoader(data, batch_size=4)
    trainer = Trainer(
        max_epochs=3,
        dry_run=4,
        output_dir="s3://bucket/dry",
        strategy="fsdp",
        callbacks=[Checkpoint(every_n_steps=2, keep_best=("eval/loss", "min"))],
    )
    result = trainer.fit(
        model,
        (loader, loader),
        optimizer=partial(torch.optim.SGD, lr=0.1),
        loss_fn=nn.MSELoss(),
        restore_best=True,
    )
    return result.step, result.best_value, trainer.evaluate(model, loader)["eval/loss"]


@pytest.mark.e2e
def test_a_dry_run_needs_no_shared_folder(s3: S3, tmp_path: Path) -> None:
    one, other = run_ranks(2, _dry_run, tmp_path / "a")
    assert one == other
    assert one[0] == 4
    assert one[1] == one[2]  # of weights of which process 0 had sent the other its own, and back
    assert not s3.names("dry/")
    assert not [path for path in (tmp_path / "a1").rglob("*") if path.is_file()]


def _train_until_it_dies(rank: int, address: str, folder: Path) -> None:
    """Train on two machines, of which one is killed in the second save, between two pieces."""
    saves, pieces = [], machines._pieces

    def die(contents: Any, size: int) -> Iterator[tuple[str, bytes]]:
        saves.append(rank)
        for number, piece in enumerate(pieces(contents, size)):
            if number == 1 and saves == [1, 1]:
                os.kill(os.getpid(), signal.SIGKILL)
            yield piece

    machines._pieces = die
    _train(rank, address, folder, strategy="fsdp")


@pytest.mark.e2e
def test_a_machine_that_dies_while_it_sends_leaves_nothing_half(s3: S3, tmp_path: Path) -> None:
    address = "s3://bucket/died"
    with pytest.raises(RanksError, match="exit code -9"):
        run_ranks(2, _train_until_it_dies, address, tmp_path / "a")
    steps = {name.split("/")[2] for name in s3.names("died/checkpoints/")}
    assert steps <= {"step-00000002"}
    found = run_ranks(2, _train, address, tmp_path / "a", strategy="fsdp")  # the same machines
    assert [came_from for came_from, _ in found] == [2, 2]
    steps = {name.split("/")[2] for name in s3.names("died/checkpoints/")}
    assert steps == {f"step-{STEPS:08d}"}


def _train_best(rank: int, folder: Path) -> tuple[int | None, float | None, float, float]:
    """Train so that all becomes worse; return step and loss of the best, and losses of theirs."""
    _apart(rank, folder)
    torch.manual_seed(0)
    inputs = torch.randn(32, 4)
    data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    model, loader = nn.Linear(4, 1), DataLoader(data, batch_size=8)
    trainer = Trainer(
        max_epochs=3,
        output_dir="s3://bucket/best",
        callbacks=[Checkpoint(every_n_epochs=1, keep_best=("eval/loss", "min"))],
    )
    result = trainer.fit(
        model,
        (loader, loader),
        optimizer=partial(torch.optim.SGD, lr=3.0),
        loss_fn=nn.MSELoss(),
        restore_best=True,
    )
    restored = trainer.evaluate(model, loader)["eval/loss"]
    nn.init.zeros_(model.weight)
    again = trainer.evaluate(model, loader, checkpoint="best")["eval/loss"]
    return result.best_step, result.best_value, restored, again


@pytest.mark.e2e
def test_the_best_weights_come_to_machines_that_have_not_saved_them(s3: S3, tmp_path: Path) -> None:
    one, other = run_ranks(2, _train_best, tmp_path / "a")
    assert one == other
    assert one[0] == 2
    assert one[1] == one[2] == one[3]


@pytest.mark.e2e
def test_each_machine_has_the_run_of_process_0_under_its_own_folder(s3: S3, tmp_path: Path) -> None:
    address = "s3://bucket/runs"
    first = run_ranks(2, _train, address, tmp_path / "a", new_run=True, resume=None)
    again = run_ranks(2, _train, address, tmp_path / "b", new_run=True, resume="must")
    assert [came_from for came_from, _ in first + again] == [None, None, STEPS, STEPS]
