"""Calls under `if accelerator.is_main_process:`: they work, or raise, and none hangs."""

import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.accelerator.toys import bits, prepared
from tests.helpers.ranks import run_ranks
from tests.resume.test_forged import packed
from trainkit import (
    Accelerator,
    ConfigError,
    DistributedError,
    InitProcessGroupKwargs,
    ProjectConfiguration,
    Trainer,
    set_seed,
)
from trainkit.accelerator.settings import DataLoaderConfiguration
from trainkit.checkpoint import CheckpointStore
from trainkit.distributed import Processes
from trainkit.strategies import FSDP


def _step(accelerator: Accelerator, model: Any, optimizer: Any, batch: Any) -> None:
    with accelerator.accumulate(model):
        accelerator.backward(model(batch[0]).pow(2).mean())
        optimizer.step()
        optimizer.zero_grad()


def _loop(rank: int, folder: Path, saves: dict[int, list[int]], resume: int = 0) -> Any:
    """Train on 22 numbers; save after the batches of `saves`, on the processes that it names."""
    accelerator = Accelerator(
        cpu=True, dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=True)
    )
    model, optimizer, _, loader = prepared(accelerator)
    if resume:
        accelerator.load_state(folder / str(resume))
    seen, told = [], []
    for number, batch in enumerate(loader, start=resume + 1):
        _step(accelerator, model, optimizer, batch)
        seen.append(batch[0].flatten().tolist())
        if rank in saves.get(number, ()):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                accelerator.save_state(folder / str(number))
            told += [str(warning.message) for warning in caught]
    accelerator.end_training()
    return seen, bits(accelerator.unwrap_model(model)), told


def _parts(folder: Path) -> list[str]:
    (entry,) = CheckpointStore(folder).checkpoints()
    return sorted(entry.manifest.files)


def test_process_0_saves_alone_and_the_training_goes_on(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    plain = run_ranks(2, _loop, tmp_path, {})
    (seen, weights, told), other = run_ranks(2, _loop, tmp_path, {2: [0], 3: [0], 4: [0, 1]})
    assert [(seen, weights), other[:2]] == [ranks[:2] for ranks in plain]  # nothing is disturbed
    assert "outside of `if accelerator.is_main_process:`" in told[0]
    assert (len(told), other[2]) == (1, [])
    assert "process-00001.json" not in _parts(tmp_path / "2")
    assert "process-00001.json" in _parts(tmp_path / "4")
    capfd.readouterr()
    resumed = run_ranks(2, _loop, tmp_path, {}, 3)
    text = capfd.readouterr().out
    assert text.count("was saved by process 0 alone") == 1
    for rank in range(2):  # every sample that was not yet used, once
        assert resumed[rank][0] == plain[rank][0][3:]
    assert resumed[0][1] == resumed[1][1]


@pytest.mark.e2e
def test_a_save_by_all_is_the_same_save_whoever_comes_late(tmp_path: Path) -> None:
    for late in (None, 0, 1):
        run_ranks(2, _late, tmp_path / str(late), late)
    files = [_contents(tmp_path / str(late)) for late in (None, 0, 1)]
    assert files[0] == files[1] == files[2]
    assert "process-00001.safetensors" in files[0]


def _late(rank: int, folder: Path, late: int | None) -> None:
    set_seed(4)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    model, optimizer, _, loader = prepared(accelerator)
    for number, batch in enumerate(loader, start=1):
        _step(accelerator, model, optimizer, batch)
        if number == 3:  # inside a window
            if rank == late:
                time.sleep(0.7)
            accelerator.save_state(folder)


def _dropped_and_open_windows(rank: int, folder: Path, strategy: Any, savers: list[int]) -> Any:
    """Return what is said at saves inside windows that the loop counts, every other one dropped."""
    accelerator, told = Accelerator(cpu=True, strategy=strategy), []
    model, optimizer, _, loader = prepared(accelerator)
    warnings.simplefilter("ignore")
    for number, batch in zip(range(4), loader):  # noqa: B905
        with accelerator.no_sync(model) if number == 3 else nullcontext():
            accelerator.backward(model(batch[0]).pow(2).mean())
        if number in (0, 2):
            model.zero_grad()
        if rank in savers:
            try:
                told.append(bool(accelerator.save_state(folder / f"{strategy}-{number}")))
            except ConfigError as error:
                told.append("inside a window" not in str(error))
    optimizer.step()
    accelerator.end_training()
    return told


@pytest.mark.e2e
@pytest.mark.parametrize(("strategy", "savers"), [(None, [0]), (FSDP(device="cpu"), [0, 1])])
def test_a_window_that_was_dropped_is_not_open(tmp_path: Path, strategy: Any, savers: Any) -> None:
    told = run_ranks(2, _dropped_and_open_windows, tmp_path, strategy, savers)
    assert [told[rank] for rank in savers] == [[True, False, True, False]] * len(savers)


def _contents(folder: Path) -> dict[str, bytes]:
    (entry,) = CheckpointStore(folder).checkpoints()
    files = {file.name: file.read_bytes() for file in entry.path.iterdir()} | packed(entry.path)
    return {name: files[name] for name in entry.manifest.files}


@pytest.mark.e2e
def test_samples_and_streams_come_back_where_process_0_saved_alone(tmp_path: Path) -> None:
    run_ranks(2, _loop, tmp_path, {2: [0]})
    first = run_ranks(2, _draw, tmp_path / "2")
    assert first == run_ranks(2, _draw, tmp_path / "2")  # a function of the state
    assert first[0] != first[1]
    assert len(run_ranks(3, _draw, tmp_path / "2")) == 3
    assert len(run_ranks(1, _draw, tmp_path / "2")) == 1


def _draw(rank: int, folder: Path) -> Any:
    torch.manual_seed(rank + 10 * torch.seed() % 7)
    accelerator = Accelerator(cpu=True)
    prepared(accelerator)
    accelerator.load_state(folder)
    return torch.rand(3).tolist()


@pytest.mark.e2e
def test_some_of_three_processes_may_call_beside_process_0(tmp_path: Path) -> None:
    results = run_ranks(3, _loop, tmp_path, {1: [0, 2], 2: [0, 1]})
    assert results[0][1] == results[1][1] == results[2][1]
    assert "process-00002.json" not in _parts(tmp_path / "1")


def _only_another(rank: int, folder: Path) -> None:
    accelerator = Accelerator(cpu=True)
    model, optimizer, _, loader = prepared(accelerator)
    batches = iter(loader)
    _step(accelerator, model, optimizer, next(batches))
    if rank == 1:
        with pytest.raises(DistributedError, match="Process 1 called `save_state`, but process 0"):
            accelerator.save_state(folder)
    _step(accelerator, model, optimizer, next(batches))


def test_another_process_alone_gets_an_error(tmp_path: Path) -> None:
    run_ranks(2, _only_another, tmp_path / "state")
    assert not (tmp_path / "state").exists()


def _sharded(rank: int, folder: Path) -> None:
    accelerator = Accelerator(strategy=FSDP(device="cpu"))
    net = nn.Linear(4, 4)
    model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    _step(accelerator, model, optimizer, [torch.ones(2, 4)])
    calls: dict[str, Callable[[], object]] = {
        "save_state": lambda: accelerator.save_state(folder),
        "save_model": lambda: accelerator.save_model(model, folder),
        "get_state_dict": lambda: accelerator.get_state_dict(model),
        "load_state": lambda: accelerator.load_state(folder),
    }
    for name, call in calls.items():
        if accelerator.is_main_process:
            with pytest.raises(DistributedError, match=f"`{name}` was called by process 0, but"):
                call()
        _step(accelerator, model, optimizer, [torch.ones(2, 4)])


def test_a_call_that_needs_all_raises_on_process_0_with_its_name(tmp_path: Path) -> None:
    run_ranks(2, _sharded, tmp_path)
    run_ranks(2, _loads_alone, tmp_path / "none")


def _loads_alone(rank: int, folder: Path) -> None:
    accelerator = Accelerator(cpu=True)
    if rank == 0:
        with pytest.raises(DistributedError, match="`load_state` was called by process 0, but not"):
            accelerator.load_state(folder)
    accelerator.wait_for_everyone()


def _inside_a_window(rank: int, folder: Path) -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3)
    model, optimizer, _, loader = prepared(accelerator)
    for number, batch in enumerate(loader, start=1):
        _step(accelerator, model, optimizer, batch)
        if number == 2 and rank == 0:
            with pytest.raises(ConfigError, match=r"`if accelerator.sync_gradients:`"):
                accelerator.save_state(folder)
        if number == 3:
            break
    accelerator.wait_for_everyone()


@pytest.mark.e2e
def test_gradients_of_others_are_never_left_out(tmp_path: Path) -> None:
    run_ranks(2, _inside_a_window, tmp_path / "state")
    assert not (tmp_path / "state").exists()


def _one_after_the_other(rank: int, folder: Path) -> None:
    accelerator = Accelerator(cpu=True)
    prepared(accelerator)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if rank == 0:
            accelerator.save_state(folder / "best")
        accelerator.save_state(folder / "last")

        @accelerator.on_main_process
        def save() -> None:
            accelerator.save_state(folder / "decorated")

        save()  # and no process comes to any collective
    Processes.start().close()


@pytest.mark.e2e
def test_calls_without_a_collective_between_them_are_told_apart(tmp_path: Path) -> None:
    run_ranks(2, _one_after_the_other, tmp_path)
    assert "process-00001.json" not in _parts(tmp_path / "best")
    assert "process-00001.json" in _parts(tmp_path / "last")
    assert "process-00001.json" not in _parts(tmp_path / "decorated")


def _numbered(rank: int, folder: Path) -> Any:
    project = ProjectConfiguration(folder, automatic_checkpoint_naming=True, total_limit=2)
    accelerator = Accelerator(cpu=True, project_config=project)
    prepared(accelerator)
    names = []
    for everybody in (False, False, True, True):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if everybody or rank == 0:
                names.append(Path(accelerator.save_state()).name)
        accelerator.wait_for_everyone()
    accelerator.load_state()
    return names, accelerator.save_iteration


@pytest.mark.e2e
def test_all_agree_on_the_number_after_a_save_of_process_0_alone(tmp_path: Path) -> None:
    names = [f"checkpoint_{number}" for number in range(4)]
    assert run_ranks(2, _numbered, tmp_path) == [(names, 4), (names[2:], 4)]
    assert len(list((tmp_path / "checkpoints").iterdir())) == 2


def _hooked(rank: int, folder: Path) -> None:
    accelerator = Accelerator(cpu=True)
    prepared(accelerator)
    called = []

    def hook(models: Any, weights: Any, output_dir: str) -> None:
        called.append(len(models))
        Path(output_dir, "mine").write_text("")
        weights.pop()

    handle = accelerator.register_save_state_pre_hook(hook)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if rank == 0:
            accelerator.save_state(folder / "one")
    assert called == [1] * (rank == 0)
    accelerator.wait_for_everyone()
    handle.remove()
    accelerator.register_save_state_pre_hook(lambda *_: accelerator.gather(torch.ones(1)))
    if rank == 0:
        with pytest.raises(DistributedError, match="`gather` was called inside `save_state`"):
            accelerator.save_state(folder / "two")
    accelerator.wait_for_everyone()
    accelerator.save_state(folder / "three")


@pytest.mark.e2e
def test_hooks_run_where_process_0_saves_alone(tmp_path: Path) -> None:
    run_ranks(2, _hooked, tmp_path)
    assert (tmp_path / "one" / "mine").exists()
    assert "model.safetensors" not in _parts(tmp_path / "one")


def _exports(rank: int, folder: Path) -> None:
    accelerator = Accelerator(cpu=True)
    model, *_ = prepared(accelerator)
    if accelerator.is_main_process:
        accelerator.save_model(model, folder / "model")
        accelerator.save(accelerator.get_state_dict(model), folder / "torch.bin")
        accelerator.save(
            accelerator.unwrap_model(model).state_dict(), folder / "x", safe_serialization=True
        )
        accelerator.print("saved")
    accelerator.save_model(model, folder / "all")
    if accelerator.is_main_process:
        accelerator.end_training()
    Processes.start().close()


@pytest.mark.e2e
def test_a_whole_model_is_written_by_process_0_alone(tmp_path: Path) -> None:
    run_ranks(2, _exports, tmp_path)
    assert load_file(tmp_path / "model" / "model.safetensors").keys() == (
        load_file(tmp_path / "x").keys()
    )


def _raw(rank: int, folder: Path) -> None:
    accelerator = Accelerator(cpu=True)
    prepared(accelerator)
    if rank == 0:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            accelerator.save_state(folder)
    torch.distributed.barrier()


@pytest.mark.e2e
def test_collectives_of_the_users_own_count(tmp_path: Path) -> None:
    run_ranks(2, _raw, tmp_path / "state")
    assert (tmp_path / "state").exists()


def _elsewhere(rank: int, folder: Path) -> None:
    limit = InitProcessGroupKwargs(timeout=timedelta(seconds=2))
    accelerator = Accelerator(cpu=True, kwargs_handlers=[limit])
    prepared(accelerator)
    accelerator.wait_for_everyone()
    if rank == 0:
        with pytest.raises(DistributedError, match=r"could not be told .* in `_elsewhere`: "):
            accelerator.save_state(folder)
        (folder / "over").write_text("")
    else:
        while not (folder / "over").exists():
            time.sleep(0.01)


@pytest.mark.e2e
def test_what_cannot_be_told_is_an_error_after_the_time_out(tmp_path: Path) -> None:
    run_ranks(2, _elsewhere, tmp_path)


def _of_trainer(rank: int, folder: Path) -> Any:
    data = TensorDataset(torch.randn(8, 4), torch.randn(8, 1))
    trainer = Trainer(max_steps=2, strategy="ddp", output_dir=folder, callbacks=[])
    model = nn.Linear(4, 1)
    sgd = partial(torch.optim.SGD, lr=0.1)
    trainer.fit(model, DataLoader(data, 2), optimizer=sgd, loss_fn=nn.MSELoss())
    if rank == 0:
        trainer.save_model(folder / "model")
        with pytest.raises(DistributedError, match="`save_checkpoint` was called by process 0"):
            trainer.save_checkpoint()
    trainer.processes.wait_for_everyone()
    return trainer.save_checkpoint().name


def test_calls_of_a_trainer_do_not_hang_either(tmp_path: Path) -> None:
    assert len(set(run_ranks(2, _of_trainer, tmp_path))) == 1
    assert (tmp_path / "model" / "model.safetensors").exists()
