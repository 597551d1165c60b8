"""The parts of a loop of the user's own: prepare, windows, precision, trackers, and the rest."""

import copy
import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    SequentialSampler,
    TensorDataset,
)

from tests.accelerator.toys import Stream, bits, numbers, prepared, small
from tests.helpers.ranks import run_ranks
from trainkit import (
    Accelerator,
    AutocastKwargs,
    CheckpointError,
    ConfigError,
    DataError,
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    GeneralTracker,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    NonFiniteError,
    PartialState,
    TorchDynamoPlugin,
    Trainer,
    broadcast_object_list,
    extract_model_from_parallel,
    find_executable_batch_size,
    get_logger,
    release_memory,
    send_to_device,
    set_seed,
    skip_first_batches,
)
from trainkit.strategies import FSDP


def test_prepare_returns_what_it_gets_in_any_order() -> None:
    accelerator = Accelerator(cpu=True)
    model, loader = small(), DataLoader(numbers(4), 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer)
    found = accelerator.prepare(schedule, None, loader, optimizer, model)
    assert found[0].scheduler is schedule
    assert found[1] is None
    assert found[2].source is loader
    assert found[3].optimizer is optimizer
    assert found[4] is model
    assert found[3].scaler is None
    assert accelerator.prepare(*found) == found  # once is enough
    assert isinstance(found[3], torch.optim.Optimizer)
    batches = iter(loader)  # which nothing can be said of
    assert accelerator.prepare(batches) is batches
    with pytest.raises(ConfigError, match="for each of the 2 objects, but has 1 entries"):
        accelerator.prepare(model, loader, device_placement=[True])
    with pytest.raises(ConfigError, match="has a `DistributedSampler`"):
        accelerator.prepare(DataLoader(numbers(4), sampler=DistributedSampler(numbers(4), 1, 0)))


def test_settings_that_cannot_work_are_said_at_once() -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"mixed_precision": "int8"}, "`mixed_precision` must be one of no, fp16, bf16, fp8"),
        ({"gradient_accumulation_steps": 0}, "must be a whole number from 1 on, but is 0"),
        ({"rng_types": ["xla"]}, "`rng_types` must be one of generator, torch, cuda"),
        ({"kwargs_handlers": [object()]}, "has a `object`"),
        ({"fsdp_plugin": object()}, r"pass `strategy=trainkit\.strategies\.FSDP"),
        ({"strategy": "auto"}, "`strategy` is a `str`"),
        ({"dynamo_backend": "eager", "dynamo_plugin": TorchDynamoPlugin()}, "not both"),
        (
            {
                "gradient_accumulation_steps": 2,
                "gradient_accumulation_plugin": GradientAccumulationPlugin(),
            },
            "not both",
        ),
    ]
    for settings, message in cases:
        with pytest.raises(ConfigError, match=message):
            Accelerator(cpu=True, **settings)


def test_the_environment_fills_in_what_is_not_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "3")
    accelerator = Accelerator(cpu=True)
    assert accelerator.mixed_precision == "bf16"
    assert accelerator.gradient_accumulation_steps == 3
    assert Accelerator(cpu=True, mixed_precision="no").mixed_precision == "no"
    monkeypatch.setenv("TRAINKIT_MIXED_PRECISION", "no")
    assert Accelerator(cpu=True).mixed_precision == "no"
    monkeypatch.setenv("TRAINKIT_USE_CPU", "perhaps")
    with pytest.raises(ConfigError, match="`TRAINKIT_USE_CPU` must be true or false"):
        Accelerator()


def _launched(rank: int) -> Any:
    import os

    os.environ.update(TRAINKIT_STRATEGY="fsdp", FSDP_TRANSFORMER_CLS_TO_WRAP="Linear")
    os.environ.update(FSDP_RESHARD_AFTER_FORWARD="false", TRAINKIT_USE_CPU="true")
    accelerator = Accelerator()
    strategy = accelerator._strategy
    assert isinstance(strategy, FSDP)
    model = accelerator.prepare(small())
    blocks = [type(m).__name__ for m in model.modules() if type(m).__name__.startswith("FSDP")]
    return blocks, strategy.reshard_after_forward


@pytest.mark.e2e
@pytest.mark.filterwarnings("ignore")
def test_the_launcher_may_ask_for_sharding() -> None:
    blocks = ["FSDPSequential", "FSDPLinear", "FSDPLinear"]
    assert run_ranks(2, _launched) == [(blocks, False)] * 2


def test_a_trainer_has_the_processes_and_no_loop_of_the_users_own() -> None:
    processes = Trainer(max_steps=1, callbacks=[]).processes
    assert processes.num_processes == 1
    assert not hasattr(processes, "prepare")


def test_backward_wants_a_scalar() -> None:
    accelerator = Accelerator(cpu=True)
    value = torch.ones(2, requires_grad=True)
    with pytest.raises(ConfigError, match=r"must be a scalar, but has the shape \[2\]"):
        accelerator.backward(value * 2)
    with pytest.raises(ConfigError, match="must be a scalar tensor, but is a float"):
        accelerator.backward(1.0)  # type: ignore[arg-type]
    accelerator.backward(value * 2, gradient=torch.ones(2))
    assert value.grad is not None
    assert value.grad.tolist() == [2.0, 2.0]


def test_a_loader_of_unknown_length_has_a_whole_last_update() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    model: Any = nn.Linear(1, 1, bias=False)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.0)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(Stream(6), 1))
    norms = []
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.ones_like(batch)).sum())
            if accelerator.sync_gradients:
                norms.append(accelerator.clip_grad_norm_(model.parameters(), 100.0).item())
            optimizer.step()
            optimizer.zero_grad()
    assert norms == [1.0, 1.0]


def test_windows_may_change_their_size() -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.gradient_accumulation_steps = 2
    model = accelerator.prepare(small())
    syncs = []
    for _ in range(4):
        with accelerator.accumulate(model):
            syncs.append(accelerator.sync_gradients)
    assert syncs == [False, True, False, True]


def test_models_run_in_bf16_and_return_fp32() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    model = accelerator.prepare(nn.Linear(2, 2))
    seen: list[torch.dtype] = []
    model.register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    inner = nn.Linear(2, 2)
    whole = accelerator.prepare(nn.Sequential(inner))
    inner.register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    assert whole(torch.ones(1, 2)).dtype == torch.float32
    assert seen == [torch.bfloat16]
    with accelerator.autocast():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16
    with accelerator.autocast(AutocastKwargs(enabled=False)):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.weight.zero_()
    assert not torch.equal(twin(torch.ones(1, 2)), model(torch.ones(1, 2)))
    plain = accelerator.unwrap_model(model, keep_fp32_wrapper=False)
    assert "forward" not in plain.__dict__


def test_two_optimizers_share_a_scale_and_each_sees_its_own_overflow() -> None:
    handler = GradScalerKwargs(init_scale=1024.0)
    accelerator = Accelerator(cpu=True, mixed_precision="fp16", kwargs_handlers=[handler])
    models = [nn.Linear(1, 1, bias=False) for _ in range(2)]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.5) for m in models]
    *models, first, second = accelerator.prepare(*models, *optimizers)
    for model in models:
        nn.init.ones_(model.weight)
    ones = torch.ones(1, 1)
    accelerator.backward(models[0](ones).sum() * float("inf") + models[1](ones).sum())
    for optimizer in (first, second):
        optimizer.step()
        optimizer.zero_grad()
    assert (first.step_was_skipped, second.step_was_skipped) == (True, False)
    assert accelerator.optimizer_step_was_skipped
    assert [model.weight.item() for model in models] == [1.0, 0.5]
    assert accelerator.scaler is not None
    assert first.scaler is second.scaler is accelerator.scaler
    assert accelerator.scaler.get_scale() == 512.0


def _overflowing_loop(rank: int) -> tuple[int, str | None, str]:
    accelerator = Accelerator(cpu=True, mixed_precision="fp16")
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    skips = 0
    try:
        for _ in range(200):
            accelerator.backward(model(torch.ones(1, 2)).sum().float() * 1e18)
            optimizer.step()
            optimizer.zero_grad()
            skips += accelerator.optimizer_step_was_skipped
    except NonFiniteError as error:
        return skips, error.parameter, str(error)
    return skips, "none", "200 steps"


@pytest.mark.e2e
@pytest.mark.parametrize("size", [1, 2])
def test_a_scale_that_cannot_fall_further_ends_the_loop(size: int) -> None:
    for skips, parameter, message in run_ranks(size, _overflowing_loop):
        assert (skips, parameter) == (30, "0.0.weight")
        assert "the loss of process 0" in message


def test_scaled_gradients_are_not_clipped_inside_a_window() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="fp16", gradient_accumulation_steps=2)
    model, _, _, loader = prepared(accelerator)
    with accelerator.accumulate(model):
        accelerator.backward(model(next(iter(loader))[0]).sum())
        with pytest.raises(ConfigError, match="not complete before the last micro-batch"):
            accelerator.clip_grad_norm_(model.parameters(), 1.0)


def test_a_closure_works_but_not_with_fp16() -> None:
    for precision in ("no", "fp16"):
        accelerator = Accelerator(cpu=True, mixed_precision=precision)
        model = nn.Linear(1, 1)
        model, optimizer = accelerator.prepare(model, torch.optim.LBFGS(model.parameters()))

        def closure(model: Any = model, accelerator: Any = accelerator) -> Any:
            model.zero_grad()
            loss = model(torch.ones(4, 1)).pow(2).mean()
            accelerator.backward(loss)
            return loss

        if precision == "no":
            assert optimizer.step(closure) > closure()
        else:
            closure()
            with pytest.raises(ConfigError, match="which fp16 cannot"):
                optimizer.step(closure)


def _uneven(rank: int) -> Any:
    config = DataLoaderConfiguration(even_batches=False)
    accelerator = Accelerator(cpu=True, dataloader_config=config)
    model, optimizer, _, loader = prepared(accelerator, numbers(5))
    message = ""
    with accelerator.join_uneven_inputs([model]):
        for (batch,) in loader:
            accelerator.backward(model(batch).sum())
            optimizer.step()
            optimizer.zero_grad()
            try:
                if accelerator.gradient_state.is_unpaired:
                    accelerator.gather_for_metrics(batch)
            except DataError as error:
                message = str(error)
    with accelerator.join_uneven_inputs([model], even_batches=True):
        even = len([model(batch).sum().backward() for (batch,) in loader])
    return len(loader), even, message, bits(accelerator.unwrap_model(model))


def test_processes_with_fewer_batches_wait_for_the_others() -> None:
    first, second = run_ranks(2, _uneven)
    assert (first[0], second[0]) == (2, 1)
    assert first[1] == second[1] == 2
    assert first[2].startswith("Not every process has a batch in this global batch")
    assert second[2] == ""
    assert first[3] == second[3]


def _split_unevenly(rank: int) -> list[tuple[Any, Any]]:
    class Odd(BatchSampler):
        def __iter__(self) -> Any:
            yield from ([0, 1, 2, 3], [4], [5, 6, 7])

    config = DataLoaderConfiguration(split_batches=True, even_batches=False)
    accelerator = Accelerator(cpu=True, dataloader_config=config)
    sampler = Odd(SequentialSampler(range(8)), 4, False)
    loader = accelerator.prepare(DataLoader(numbers(8), batch_sampler=sampler))
    active: Any = accelerator._preparer.sharing.active
    return [(active.current().counts, len(batch)) for (batch,) in loader]


@pytest.mark.e2e
def test_a_process_that_skips_a_small_batch_knows_the_counts_of_the_next() -> None:
    first, second = run_ranks(2, _split_unevenly)
    assert first == [((2, 2), 2), ((1, 0), 1), ((2, 1), 2)]
    assert second == [((2, 2), 2), ((2, 1), 1)]


def _variable(rank: int) -> Any:
    class Growing(BatchSampler):
        def __iter__(self) -> Any:
            yield from ([0], [1, 2], [3, 4, 5])

        def __len__(self) -> int:
            return 3

    accelerator = Accelerator(cpu=True)
    sampler = Growing(SequentialSampler(numbers(6)), 99, False)
    del sampler.batch_size
    loader = accelerator.prepare(DataLoader(numbers(6), batch_sampler=sampler))
    found = [accelerator.gather_for_metrics(batch).flatten().tolist() for (batch,) in loader]
    return found, len(loader), len(found)


def test_batches_of_any_size_are_gathered_once() -> None:
    expected = ([[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]], 2, 2)
    assert run_ranks(2, _variable) == [expected] * 2


def _settings_of_ddp(rank: int) -> Any:
    import datetime

    handlers: list[Any] = [
        DistributedDataParallelKwargs(find_unused_parameters=True, broadcast_buffers=False),
        InitProcessGroupKwargs(timeout=datetime.timedelta(seconds=30)),
    ]
    import os

    handlers[1].init_method = os.environ["TRAINKIT_INIT_METHOD"]
    accelerator = Accelerator(cpu=True, kwargs_handlers=handlers)
    model = nn.ModuleList([nn.BatchNorm1d(1), nn.Linear(1, 1)])
    wrapped = accelerator.prepare(model)
    only_read = accelerator.prepare_model(small(), evaluation_mode=True)
    frozen = accelerator.prepare(small().requires_grad_(False))
    return (
        wrapped.find_unused_parameters,
        wrapped.broadcast_buffers,
        accelerator.unwrap_model(wrapped) is model is extract_model_from_parallel(wrapped),
        type(only_read) is type(frozen) is nn.Sequential,
        broadcast_object_list([rank, {"a": rank}], from_process=1),
    )


def test_the_settings_of_ddp_arrive() -> None:
    expected = (True, False, True, True, [1, {"a": 1}])
    assert run_ranks(2, _settings_of_ddp) == [expected] * 2


def _sharded(rank: int, folder: Path) -> Any:
    accelerator = Accelerator(cpu=True, strategy=FSDP(device="cpu"))
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(3)])
    with torch.no_grad():
        for index, parameter in enumerate(model.parameters()):
            parameter.copy_(torch.linspace(-1, 1, parameter.numel()).reshape(parameter.shape))
            parameter.mul_(1 + index)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)

    def step() -> float:
        accelerator.backward(model(torch.ones(2, 4) * (rank + 1)).pow(2).mean())
        norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)

    step()
    accelerator.save_state(folder / "state")
    norm = step()
    accelerator.load_state(folder / "state")
    again = step()
    state = accelerator.get_state_dict(model)
    accelerator.save_model(model, folder / "model")
    kind = accelerator.distributed_type.value
    return norm == again, kind, {name: list(value.shape) for name, value in state.items()}


@pytest.mark.e2e
@pytest.mark.filterwarnings("ignore")
def test_a_sharded_model_is_saved_and_loaded(tmp_path: Path) -> None:
    for same, kind, shapes in run_ranks(2, _sharded, tmp_path):
        assert same
        assert kind == "FSDP"
        assert shapes["0.weight"] == [4, 4]
    assert (tmp_path / "model" / "model.safetensors").exists()
    assert list((tmp_path / "state").rglob("model-shard-00001.safetensors"))


class _List(GeneralTracker):
    """A tracker of the user's own."""

    name = "list"

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[Any] = []

    @property
    def tracker(self) -> Any:
        return self.lines

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        self.lines.append((values, step, kwargs))


def test_figures_reach_every_tracker(tmp_path: Path) -> None:
    own = _List()
    accelerator = Accelerator(cpu=True, log_with=["jsonl", own], project_dir=tmp_path)
    accelerator.init_trackers("run", config={"lr": 0.1})
    accelerator.log({"loss": torch.tensor(1.5), "bad": float("nan")}, step=3)
    accelerator.log({"loss": 1.0}, step=4, log_kwargs={"list": {"extra": 1}})
    assert accelerator.get_tracker("list", unwrap=True) == own.lines
    assert own.lines[1] == ({"loss": 1.0}, 4, {"extra": 1})
    with pytest.raises(ConfigError, match="There is no tracker 'wandb', but jsonl, list"):
        accelerator.get_tracker("wandb")
    accelerator.end_training()
    assert accelerator.trackers == []
    first, second = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert json.loads(first)["bad"] == "NaN"
    assert json.loads(second)["step"] == 4
    assert json.loads((tmp_path / "run" / "metrics.hparams.json").read_text()) == {"lr": 0.1}


def test_tensorboard_leaves_out_what_is_no_figure(tmp_path: Path) -> None:
    reading = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    accelerator = Accelerator(cpu=True, log_with="tensorboard", project_dir=tmp_path)
    accelerator.init_trackers("run")
    with pytest.warns(UserWarning, match="left out 'rates', a `list`: it takes numbers") as told:
        accelerator.log({"loss": torch.ones(1), "decay": None, "rates": [1.0, 2.0]}, step=1)
    assert len(told) == 1
    accelerator.end_training()
    events = reading.EventAccumulator(str(tmp_path / "run")).Reload()
    assert events.Tags()["scalars"] == ["loss"]


def test_unknown_trackers_and_folders_are_named() -> None:
    names = "csv, jsonl, mlflow, tensorboard, trackio, wandb, all"
    with pytest.raises(ConfigError, match=f"be one of {names}, "):
        Accelerator(cpu=True, log_with=["jsonl", "aim"])
    with pytest.raises(ConfigError, match="`tensorboard` requires a `logging_dir`"):
        Accelerator(cpu=True, log_with="all").init_trackers("run")
    Accelerator(cpu=True).init_trackers("run")  # none asked for


def test_save_writes_what_torch_and_safetensors_read(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(small())
    accelerator.save(model.state_dict(), tmp_path / "a.pt")
    assert list(torch.load(tmp_path / "a.pt", weights_only=True)) == list(model.state_dict())
    accelerator.save(model.state_dict(), tmp_path / "a.safetensors", safe_serialization=True)
    from safetensors.torch import load_file

    assert set(load_file(tmp_path / "a.safetensors")) == set(model.state_dict())
    with pytest.raises(ConfigError, match="needs a dict of tensors"):
        accelerator.save([1], tmp_path / "b", safe_serialization=True)


def test_memory_is_let_go(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    model, optimizer, schedule, loader = prepared(accelerator)
    accelerator.save_state(tmp_path / "state")
    assert accelerator.free_memory(model, optimizer, schedule, loader) == [None] * 4
    with pytest.raises(CheckpointError, match="does not fit"):
        accelerator.load_state(tmp_path / "state")
    assert release_memory(1, 2) == [None, None]


def test_a_batch_size_that_never_fits_is_an_error() -> None:
    def never(batch_size: int) -> None:
        raise torch.OutOfMemoryError("no")

    with pytest.raises(RuntimeError, match="not even with a batch of one"):
        find_executable_batch_size(never, starting_batch_size=4)()
    with pytest.raises(ConfigError, match="has no first parameter"):
        find_executable_batch_size(lambda: None)
    with pytest.raises(ConfigError, match="gets its `rows` from"):
        find_executable_batch_size(lambda rows: None)(rows=3)
    with pytest.raises(ConfigError, match="Call it without"):
        find_executable_batch_size(never)(8)
    with pytest.raises(ZeroDivisionError):
        find_executable_batch_size(lambda batch_size: 1 / 0)()


def test_small_helpers() -> None:
    state = PartialState(cpu=True)
    assert (state.num_processes, state.is_main_process) == (1, True)
    moved = send_to_device({"a": [torch.ones(1), "x"]}, "meta")
    assert moved["a"][0].is_meta
    set_seed(1)
    drawn = torch.rand(1)
    set_seed(1, deterministic=True)
    assert torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(False)
    assert torch.equal(torch.rand(1), drawn)
    with pytest.raises(ConfigError, match="`num_batches` must be at least 0"):
        skip_first_batches([], -1)
    assert list(skip_first_batches(skip_first_batches([1, 2, 3, 4], 1), 1)) == [3, 4]


def _log_lines(rank: int, file: Path) -> None:
    Accelerator(cpu=True)
    logger = get_logger("trainkit.test", log_level="INFO")
    logging.getLogger("trainkit.test").addHandler(logging.FileHandler(file))
    logger.info("main")
    logger.info("everyone %d", rank, main_process_only=False, in_order=True)


@pytest.mark.e2e
def test_loggers_speak_once(tmp_path: Path) -> None:
    run_ranks(2, _log_lines, tmp_path / "log")
    assert (tmp_path / "log").read_text().splitlines() == ["main", "everyone 0", "everyone 1"]


def test_records_name_who_spoke(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    logger = get_logger("trainkit.test")

    def speak() -> None:
        logger.info("said")
        logger.log(logging.INFO, "said")
        logger.info("said", main_process_only=False, in_order=True)
        logger.info("said", stacklevel=3)  # who called this function

    speak()
    found = [(record.filename, record.funcName) for record in caplog.records]
    here = "test_own_loop.py"
    assert found == [(here, "speak")] * 3 + [(here, "test_records_name_who_spoke")]


def _trained(rank: int, compiled: bool) -> list[int]:
    accelerator = Accelerator(cpu=True, dynamo_backend="eager" if compiled else None)
    model, optimizer, schedule, loader = prepared(accelerator)
    model.train(False)
    for (batch,) in loader:
        accelerator.backward(model(batch).pow(2).mean())
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return bits(accelerator.unwrap_model(model, keep_torch_compile=False))


@pytest.mark.e2e
@pytest.mark.filterwarnings("ignore")
def test_a_compiled_model_trains_to_the_same_weights() -> None:
    assert run_ranks(1, _trained, False) == run_ranks(1, _trained, True)


def prepare_apart(rank: int) -> str:
    accelerator = Accelerator(cpu=True)
    data = TensorDataset(torch.ones(64 if rank else 56, 2))
    try:
        accelerator.prepare(nn.Linear(2, 1), DataLoader(data, batch_size=4))
    except ConfigError as error:
        return str(error)
    return ""


def test_processes_with_other_data_are_told_before_the_first_step() -> None:
    for text in run_ranks(2, prepare_apart):
        assert "the loader at position 1 of `prepare`" in text
        assert "process 0: 56 samples, batch size 4, code of" in text
        assert "process 1: 64 samples, batch size 4, code of" in text


@pytest.mark.e2e
@pytest.mark.usefixtures("warm_programs")
def test_workers_that_nobody_refers_to_any_more_end_at_once(tmp_path: Path) -> None:
    script = tmp_path / "sweep.py"
    script.write_text(
        "import torch\n"
        "from torch.utils.data import DataLoader\n"
        "from trainkit import Accelerator\n"
        "for _ in range(8):\n"
        "    loader = DataLoader(torch.arange(37), 6, num_workers=2, persistent_workers=True)\n"
        "    for index, batch in enumerate(Accelerator(cpu=True).prepare(loader)):\n"
        "        if index == 3:\n"
        "            break\n"
        "print('end')\n"
    )
    ended = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=300, check=True
    )
    assert ended.stdout == "end\n"
    assert "Error" not in ended.stderr


def _rates_of_a_falling_loss(_: int) -> list[float]:
    accelerator = Accelerator(cpu=True)
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.5)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    optimizer, scheduler = accelerator.prepare(optimizer, scheduler)
    rates = []
    for loss in (4.0, 3.0, 2.0, 1.0):
        scheduler.step(loss)
        rates.append(optimizer.param_groups[0]["lr"])
    return rates


@pytest.mark.e2e
@pytest.mark.parametrize("size", [1, 2])
def test_a_plateau_counts_each_figure_once(size: int) -> None:
    assert run_ranks(size, _rates_of_a_falling_loss) == [[0.5] * 4] * size


def _evaluated(rank: int, strategy: str) -> list[float]:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    accelerator = Accelerator(cpu=True, strategy=FSDP(device="cpu") if strategy == "fsdp" else None)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(3):
        inputs = torch.randn(6, 4, generator=torch.Generator().manual_seed(10 * step + rank))
        accelerator.backward(model(inputs).pow(2).mean())
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        outputs: list[float] = model(torch.ones(2, 4)).flatten().tolist()
    return outputs


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_an_evaluation_of_an_own_loop_is_of_one_model(strategy: str) -> None:
    first, second = run_ranks(2, _evaluated, strategy)
    assert first == second
