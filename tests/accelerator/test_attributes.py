"""What scripts read and set of an `Accelerator`, its states and its loaders."""

import importlib
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.helpers.ranks import run_ranks
from trainkit import (
    Accelerator,
    AutocastKwargs,
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    PartialState,
)
from trainkit.trackers.tracker import GeneralTracker

_SETTABLE = """
    even_batches sync_gradients dataloader_config scaler trackers step device_placement log_with
    rng_types step_scheduler_with_optimizer native_amp autocast_handler profile_handler
    scaler_handler ddp_handler init_handler gradient_accumulation_steps
    _models _optimizers _schedulers _dataloaders _custom_objects
"""
_READ = "multi_device is_fsdp2 mixed_precision distributed_type split_batches save_iteration"


def test_what_is_an_attribute_in_accelerate_is_one_here() -> None:
    theirs = importlib.import_module("accelerate").Accelerator(cpu=True)
    ours = Accelerator(cpu=True)
    for name in _SETTABLE.split():
        setattr(theirs, name, getattr(theirs, name))
        setattr(ours, name, getattr(ours, name))
    for name in ("multi_device", "is_fsdp2", "device_placement", "split_batches", "step"):
        assert getattr(ours, name) == getattr(theirs, name), name
    assert all(hasattr(theirs, name) and hasattr(ours, name) for name in _READ.split())
    for name in ("initialized", "is_xla_gradients_synced", "in_dataloader", "num_steps"):
        assert getattr(ours.gradient_state, name) == getattr(theirs.gradient_state, name), name
    state = PartialState(cpu=True)
    assert state.default_device == torch.device("cpu")
    assert state.debug is theirs.state.debug is False
    assert state.set_device() is None  # type: ignore[func-returns-value]
    nested = nn.Sequential(nn.Linear(1, 1))
    with ours.maybe_context_parallel(buffers=[torch.ones(1)], buffer_seq_dims=[0]):
        assert not ours.verify_device_map(nested)
    setattr(nested[0], "hf_device_map", {"a": 0, "b": "cpu"})  # noqa: B010  mypy knows modules
    assert ours.verify_device_map(nested)
    assert theirs.verify_device_map(nested)


def _loader(size: int = 5) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.arange(size)), batch_size=2)


def _evenness(rank: int) -> list[list[int]]:
    accelerator = Accelerator(cpu=True)
    early = accelerator.prepare(_loader(9))
    accelerator.even_batches = False
    late = accelerator.prepare(_loader(9))
    accelerator.dataloader_config = DataLoaderConfiguration(split_batches=True)
    split = accelerator.prepare(_loader(4))
    assert (early.total_batch_size, split.total_batch_size) == (4, 2)
    return [[len(x) for (x,) in loader] for loader in (early, late, split)]


def test_what_is_set_of_loading_acts_on_later_loaders() -> None:
    first, second = run_ranks(2, _evenness)
    assert first == [[2, 2, 2], [2, 2, 1], [1, 1]]
    assert second == [[2, 2, 2], [2, 2], [1, 1]]


def test_a_window_may_be_ended_by_hand() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    model, optimizer = nn.Linear(1, 1, bias=False), None
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    before = model.weight.item()
    with accelerator.accumulate(model):
        accelerator.backward(model(torch.ones(1, 1)).sum())
        assert not accelerator.sync_gradients
        accelerator.sync_gradients = True
        optimizer.step()
    assert before - model.weight.item() == pytest.approx(0.25)
    accelerator.gradient_state._set_sync_gradients(False)
    accelerator.step = 3
    assert not accelerator.sync_gradients
    with accelerator.accumulate(model):
        assert accelerator.sync_gradients


@pytest.mark.parametrize("through", ["accelerator", "optimizer"])
def test_another_scaler_may_be_set(through: str) -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="fp16")
    model = nn.Linear(1, 1, bias=False)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    owner = accelerator if through == "accelerator" else optimizer
    mine = torch.amp.GradScaler("cpu", init_scale=8.0)
    owner.scaler = mine
    assert accelerator.scaler is optimizer.scaler is mine
    accelerator.backward(model(torch.ones(1, 1)).sum())
    assert model.weight.grad.item() == 8.0
    optimizer.step()
    assert mine.get_scale() == 8.0
    for none in (None, torch.amp.GradScaler("cpu", enabled=False)):
        owner.scaler = none
        optimizer.zero_grad()
        accelerator.backward(model(torch.ones(1, 1)).sum())
        assert model.weight.grad.item() == 1.0
        optimizer.step()
    assert not optimizer.step_was_skipped


def test_handlers_may_be_set_before_a_model_is_prepared() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    accelerator.autocast_handler = AutocastKwargs(enabled=False)
    model, x = accelerator.prepare(nn.Linear(2, 2)), torch.rand(3, 2)
    assert torch.equal(model(x), nn.functional.linear(x, model.weight, model.bias))


def _wrapped(rank: int) -> tuple[Any, ...]:
    accelerator = Accelerator(cpu=True)
    accelerator.ddp_handler = DistributedDataParallelKwargs(find_unused_parameters=True)
    accelerator.ddp_handler.broadcast_buffers = False
    model = accelerator.prepare(nn.Linear(2, 2))
    return model.find_unused_parameters, model.broadcast_buffers


def test_so_may_the_settings_of_ddp() -> None:
    assert run_ranks(2, _wrapped) == [(True, False)] * 2


def test_trackers_may_be_set() -> None:
    class Mine(GeneralTracker):
        name, requires_logging_directory, tracker = "mine", False, None

        def __init__(self) -> None:
            super().__init__()
            self.values: list[Any] = []

        def log(self, values: Any, step: int | None = None, **kwargs: Any) -> None:
            self.values.append((values, step))

    accelerator, first, second = Accelerator(cpu=True), Mine(), Mine()
    accelerator.trackers = [first]
    accelerator.log({"loss": 1.0}, step=3)
    accelerator.log_with = [second]
    accelerator.init_trackers("run")
    accelerator.log({"loss": 2.0}, step=4)
    assert (first.values, second.values) == ([({"loss": 1.0}, 3)], [({"loss": 2.0}, 4)])


def test_loaders_say_where_they_are() -> None:
    accelerator, given = Accelerator(cpu=True), _loader()
    loader = accelerator.prepare(given)
    assert (loader.iteration, loader.skip_batches) == (0, 0)
    assert loader.base_dataloader is given
    assert loader.device == torch.device("cpu")
    list(loader)
    assert loader.iteration == 1
    loader.iteration = 7
    assert loader.epoch == 7
    assert accelerator.skip_first_batches(loader, 2).skip_batches == 2
