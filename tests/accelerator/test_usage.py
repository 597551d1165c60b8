"""What public scripts call of Accelerate, each of it done under Accelerate and under trainkit.

`USED` lists every name and keyword that 3 or more of 413 public files use, with how many do.
`DEMOS` does each of them, on both sides: the results are equal; or they differ, and the page says
so; or trainkit refuses, with a sentence.
"""

import importlib
import logging
import random
import tempfile
import warnings
from collections.abc import Callable
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.accelerator.behaviours import forget
from tests.accelerator.test_differences import DIFFERENCES
from tests.accelerator.test_test_utils import write_samples
from tests.helpers.needs import late
from trainkit.accelerator.state import AcceleratorState
from trainkit.errors import ConfigError

theirs = late("accelerate.utils")

SIDES = {"accelerate": "accelerate", "trainkit": "trainkit.accelerate_compat"}

USED = {
    "Accelerator": 234, "DataLoaderConfiguration": 5,
    "DataLoaderConfiguration(use_stateful_dataloader=)": 3, "DeepSpeedPlugin": 4,
    "DeepSpeedPlugin(zero_stage=)": 3, "DistributedDataParallelKwargs": 34,
    "DistributedDataParallelKwargs(find_unused_parameters=)": 39, "DistributedType": 35,
    "FullyShardedDataParallelPlugin": 4, "FullyShardedDataParallelPlugin(auto_wrap_policy=)": 3,
    "FullyShardedDataParallelPlugin(fsdp_version=)": 3,
    "FullyShardedDataParallelPlugin(transformer_cls_names_to_wrap=)": 3,
    "InitProcessGroupKwargs": 7, "InitProcessGroupKwargs(timeout=)": 12, "PartialState": 32,
    "__version__": 36, "init_empty_weights": 53, "init_empty_weights(include_buffers=)": 3,
    "load_checkpoint_and_dispatch": 20, "load_checkpoint_and_dispatch(device_map=)": 4,
    "prepare_pippy": 4, "logging.get_logger": 176, "logging.get_logger(log_level=)": 35,
    "state.AcceleratorState": 23, "state.AcceleratorState._reset_state": 11,
    "state.AcceleratorState.deepspeed_plugin": 9, "state.is_initialized": 5,
    "test_utils.torch_device": 3, "test_utils.training.mocked_dataloaders": 11,
    "utils.AORecipeKwargs": 5, "utils.DummyOptim": 3, "utils.DummyScheduler": 3,
    "utils.FP8RecipeKwargs": 6, "utils.ParallelismConfig": 3, "utils.ProjectConfiguration": 114,
    "utils.ProjectConfiguration(logging_dir=)": 111,
    "utils.ProjectConfiguration(project_dir=)": 111, "utils.ProjectConfiguration(total_limit=)": 16,
    "utils.broadcast_object_list": 6, "utils.broadcast_object_list(from_process=)": 6,
    "utils.extract_model_from_parallel": 3, "utils.gather_object": 15, "utils.is_peft_model": 21,
    "utils.set_module_tensor_to_device": 3, "utils.set_seed": 170,
    "utils.set_seed(device_specific=)": 6, "utils.tqdm": 4,
    "utils.transformer_engine.convert_model": 4, "utils.write_basic_config": 3,
    "Accelerator(**)": 25, "Accelerator(cpu=)": 18, "Accelerator(dataloader_config=)": 5,
    "Accelerator(deepspeed_plugin=)": 5, "Accelerator(fsdp_plugin=)": 6,
    "Accelerator(gradient_accumulation_steps=)": 142, "Accelerator(kwargs_handlers=)": 57,
    "Accelerator(log_with=)": 136, "Accelerator(mixed_precision=)": 155,
    "Accelerator(mixed_precision='fp8')": 11, "Accelerator(parallelism_config=)": 3,
    "Accelerator(project_config=)": 110, "Accelerator(project_dir=)": 24,
    "Accelerator(split_batches=)": 12, "accelerator.accumulate": 163, "accelerator.autocast": 40,
    "accelerator.backward": 216, "accelerator.clip_grad_norm_": 130, "accelerator.device": 220,
    "accelerator.distributed_type": 47, "accelerator.end_training": 172,
    "accelerator.free_memory": 4, "accelerator.gather": 62, "accelerator.gather_for_metrics": 58,
    "accelerator.get_state_dict": 24, "accelerator.get_tracker": 15,
    "accelerator.get_tracker(unwrap=)": 3, "accelerator.init_trackers": 163,
    "accelerator.init_trackers(config=)": 113, "accelerator.init_trackers(init_kwargs=)": 28,
    "accelerator.init_trackers(project_name=)": 10, "accelerator.is_local_main_process": 155,
    "accelerator.is_main_process": 208, "accelerator.load_state": 137,
    "accelerator.load_state(input_dir=)": 4, "accelerator.local_main_process_first": 3,
    "accelerator.local_process_index": 13, "accelerator.log": 165, "accelerator.log(step=)": 158,
    "accelerator.main_process_first": 99, "accelerator.mixed_precision": 126,
    "accelerator.native_amp": 69, "accelerator.num_processes": 185,
    "accelerator.optimizer_step_was_skipped": 4, "accelerator.pad_across_processes": 16,
    "accelerator.pad_across_processes(dim=)": 15,
    "accelerator.pad_across_processes(pad_index=)": 15, "accelerator.prepare": 243,
    "accelerator.prepare(device_placement=)": 9, "accelerator.prepare_model": 16,
    "accelerator.prepare_model(device_placement=)": 3,
    "accelerator.prepare_model(evaluation_mode=)": 13, "accelerator.print": 175,
    "accelerator.process_index": 22, "accelerator.reduce": 10, "accelerator.reduce(reduction=)": 8,
    "accelerator.register_for_checkpointing": 5, "accelerator.register_load_state_pre_hook": 76,
    "accelerator.register_save_state_pre_hook": 78, "accelerator.save": 26,
    "accelerator.save_state": 137, "accelerator.scaler": 7, "accelerator.skip_first_batches": 28,
    "accelerator.state": 142, "accelerator.state.deepspeed_plugin": 19,
    "accelerator.state.fsdp_plugin": 4, "accelerator.state.num_processes": 5,
    "accelerator.sync_gradients": 148, "accelerator.torch_device_mesh": 3,
    "accelerator.trackers": 106, "accelerator.unwrap_model": 193,
    "accelerator.unwrap_model(keep_fp32_wrapper=)": 10, "accelerator.wait_for_everyone": 195,
    "loader.dataset": 11, "loader.set_epoch": 3, "optimizer.load_state_dict": 10,
    "optimizer.param_groups": 26, "optimizer.state_dict": 12, "optimizer.step": 208,
    "optimizer.zero_grad": 211, "scheduler.get_last_lr": 121, "scheduler.step": 177,
    "tracker.name": 86, "tracker.writer": 80,
}  # fmt: skip
"""How many files use it. What belongs to objects of a script's own is not among it."""

Demo = Callable[[Any], Any]


class Job:
    """What a script has at hand.

    Args:
        lib: Accelerate, or what stands for it.
        folder: An empty one.
    """

    def __init__(self, lib: Any, folder: Path) -> None:
        self.lib, self.utils, self.folder = lib, lib.utils, folder

    def accelerator(self, **options: Any) -> Any:
        return self.lib.Accelerator(cpu=True, **options)

    def prepared(self, accelerator: Any) -> tuple[Any, ...]:
        torch.manual_seed(0)
        rows = torch.arange(36.0).view(18, 2) / 18
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        loader = DataLoader(TensorDataset(rows, rows.sum(1)), 4, shuffle=True)
        found: tuple[Any, ...] = accelerator.prepare(model, optimizer, schedule, loader)
        return found

    def trained(self, steps: int = 1, **options: Any) -> Any:
        """Return what a loop has come to: weights, rates, whether the gradients were in step."""
        accelerator = self.accelerator(gradient_accumulation_steps=steps, **options)
        model, optimizer, schedule, loader = self.prepared(accelerator)
        synced = []
        for epoch in range(2):
            loader.set_epoch(epoch)
            for x, y in loader:
                with accelerator.accumulate(model), accelerator.autocast():
                    loss = nn.functional.mse_loss(model(x)[:, 0], y)
                    accelerator.backward(loss)
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    schedule.step()
                    optimizer.zero_grad()
                    synced.append(accelerator.sync_gradients)
        weights = accelerator.unwrap_model(model, keep_fp32_wrapper=False).state_dict()
        return values(weights), schedule.get_last_lr(), optimizer.param_groups[0]["lr"], synced


def values(tree: Any) -> Any:
    """Return a nesting with lists for tensors, to be compared."""
    if isinstance(tree, torch.Tensor):
        return tree.tolist()
    if isinstance(tree, dict):
        return {name: values(value) for name, value in tree.items()}
    return [values(value) for value in tree] if isinstance(tree, list | tuple) else tree


def _attributes(*names: str, **options: Any) -> Demo:
    def read(job: Job) -> Any:
        accelerator = job.accelerator(**options)
        found = []
        for name in names:
            value = accelerator
            for part in name.split("."):
                value = getattr(value, part)
            found.append(str(value))
        return found

    return read


def _saved_and_loaded(job: Job) -> Any:
    accelerator = job.accelerator(project_dir=str(job.folder))
    model, _, schedule, loader = job.prepared(accelerator)
    heard = []
    accelerator.register_save_state_pre_hook(lambda models, w, place: heard.append(len(models)))
    accelerator.register_load_state_pre_hook(lambda models, place: heard.append(len(models)))
    own = torch.optim.swa_utils.AveragedModel(nn.Linear(1, 1))
    accelerator.register_for_checkpointing(own)
    accelerator.save_state(str(job.folder / "state"))
    before = values(model.state_dict())
    nn.init.zeros_(model.weight)
    accelerator.load_state(input_dir=str(job.folder / "state"))
    same = before == values(model.state_dict())
    return heard, same, [len(batch) for batch in loader], schedule.get_last_lr()


def _skipped(job: Job) -> Any:
    accelerator = job.accelerator()
    *_, loader = job.prepared(accelerator)
    return values(list(accelerator.skip_first_batches(loader, 2))), len(loader.dataset)


def _tracked(job: Job) -> Any:
    accelerator = job.accelerator(log_with="tensorboard", project_dir=str(job.folder))
    options: dict[str, Any] = {"tensorboard": {}}
    accelerator.init_trackers(project_name="run", config={"lr": 0.1}, init_kwargs=options)
    accelerator.log({"loss": 1.0}, step=1)
    (tracker,) = accelerator.trackers
    image = torch.zeros(1, 3, 2, 2)
    tracker.writer.add_images("images", image.numpy(), 0, dataformats="NCHW")
    found = tracker.name, accelerator.get_tracker("tensorboard").name
    unwrapped = accelerator.get_tracker("tensorboard", unwrap=True)
    accelerator.end_training()
    files = sorted(path.name.split(".")[0] for path in job.folder.rglob("events*"))
    return found, type(unwrapped).__name__, set(files)


def _gathered(job: Job) -> Any:
    accelerator = job.accelerator()
    *_, loader = job.prepared(accelerator)
    rows = [values(accelerator.gather_for_metrics((x, y))) for x, y in loader]
    pad = accelerator.pad_across_processes(torch.ones(2, 3), dim=1, pad_index=-100)
    reduced = accelerator.reduce(torch.ones(2), reduction="sum")
    accelerator.wait_for_everyone()
    with accelerator.main_process_first():
        first = [accelerator.is_main_process]
    with accelerator.local_main_process_first():
        first.append(accelerator.is_local_main_process)
    return rows, values([accelerator.gather(torch.ones(2)), pad, reduced]), first


def _objects(job: Job) -> Any:
    job.accelerator()
    held = ["a", 1]
    job.utils.broadcast_object_list(held, from_process=0)
    return held, job.utils.gather_object(["x"])


def _printed_and_saved(job: Job) -> Any:
    accelerator = job.accelerator()
    model, optimizer, *_ = job.prepared(accelerator)
    accelerator.print("said")
    accelerator.save({"a": torch.ones(1)}, job.folder / "it.pt")
    optimizer.load_state_dict(optimizer.state_dict())
    state = values(accelerator.get_state_dict(model))
    module = job.utils.extract_model_from_parallel(model)
    accelerator.free_memory()
    return state, type(module).__name__, values(torch.load(job.folder / "it.pt"))


def _models(job: Job) -> Any:
    accelerator = job.accelerator()
    model = accelerator.prepare_model(nn.Linear(1, 1), device_placement=False, evaluation_mode=True)
    other = accelerator.prepare(nn.Linear(1, 1), device_placement=[False])
    return type(model).__name__, type(other).__name__


def _empty(job: Job) -> Any:
    with job.lib.init_empty_weights(include_buffers=False):
        model = nn.BatchNorm1d(2)
    torch.save(nn.BatchNorm1d(2).state_dict(), job.folder / "pytorch_model.bin")
    places = [model.weight.device.type, model.running_mean.device.type]  # type: ignore[union-attr]
    loaded = job.lib.load_checkpoint_and_dispatch(
        model, str(job.folder / "pytorch_model.bin"), device_map={"": "cpu"}
    )
    return places, values(loaded.state_dict())


def _seeded(job: Job) -> Any:
    job.accelerator()
    job.utils.set_seed(3, device_specific=True)
    return torch.rand(1).item(), random.random()


def _logged(job: Job) -> Any:
    job.accelerator()
    logger = job.lib.logging.get_logger("usage", log_level="INFO")
    level = logger.logger.level
    logger.info("said", main_process_only=False)
    logging.getLogger().setLevel("WARNING")
    return level


def _states(job: Job) -> Any:
    state = importlib.import_module(f"{job.lib.__name__}.state")
    before = state.is_initialized()
    accelerator = job.accelerator(mixed_precision="bf16")
    found = state.AcceleratorState()
    texts = str(accelerator.state), str(state.PartialState()), str(accelerator.gradient_state)
    answers = before, state.is_initialized(), found.num_processes, found.deepspeed_plugin
    precision = found.mixed_precision
    found._reset_state()
    return *answers, state.is_initialized(), texts, precision


def _partial(job: Job) -> Any:
    state = job.lib.PartialState(cpu=True)
    with state.split_between_processes([1, 2, 3]) as part, state.main_process_first():
        pass
    state.wait_for_everyone()
    said = state.on_main_process(lambda: "main")()
    facts = state.num_processes, str(state.device), str(state.distributed_type), state.backend
    return part, said, facts, state.is_last_process, state.use_distributed, state.initialized


def _types(job: Job) -> Any:
    kinds = job.lib.DistributedType
    shown = [(kind.name, kind.value, str(kind), f"{kind}", kind == kind.value) for kind in kinds]
    return shown, issubclass(kinds, str)


def _projects(job: Job) -> Any:
    project = job.utils.ProjectConfiguration(
        project_dir=str(job.folder), logging_dir=str(job.folder / "logs"), total_limit=2
    )
    accelerator = job.accelerator(project_config=project)
    place = accelerator.project_dir == str(job.folder)
    return place, accelerator.logging_dir[-4:], project.total_limit


def _handled(job: Job) -> Any:
    handlers = [
        job.lib.DistributedDataParallelKwargs(find_unused_parameters=True),
        job.lib.InitProcessGroupKwargs(timeout=timedelta(seconds=99)),
    ]
    shown = [handler.to_kwargs() for handler in handlers]
    return job.trained(kwargs_handlers=handlers), str(shown)


def _moved(job: Job) -> Any:
    model: Any = nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1))
    weight = model[0].weight
    job.utils.set_module_tensor_to_device(model, "0.weight", "cpu")
    kept = model[0].weight is weight
    job.utils.set_module_tensor_to_device(model, "0.weight", "cpu", value=torch.ones(1, 1).half())
    job.utils.set_module_tensor_to_device(model, "1.running_mean", "cpu", value=torch.ones(1))
    job.utils.set_module_tensor_to_device(
        model, "0.bias", "cpu", value=torch.ones(1), dtype=torch.float16
    )
    job.utils.set_module_tensor_to_device(model, "1.weight", "meta")
    with pytest.raises(ValueError, match="meta"):
        job.utils.set_module_tensor_to_device(model, "1.weight", "cpu")
    own = [(n, str(p.dtype), str(p.device), p.requires_grad) for n, p in model.named_parameters()]
    return kept, own, values(model[1].running_mean), model[0].weight.item()


def _bars(job: Job) -> Any:
    return list(job.utils.tqdm(range(3), disable=True))


def _mocked(job: Job) -> Any:
    home = importlib.import_module(f"{job.lib.__name__}.test_utils.training")
    with pytest.MonkeyPatch.context() as monkeypatch:
        write_samples(job.folder, monkeypatch)
        return [len(loader) for loader in home.mocked_dataloaders(job.accelerator())]


def _placeholders(job: Job) -> Any:
    home = importlib.import_module(f"{job.lib.__name__}.utils.deepspeed")
    return [vars(home.DummyOptim([1], lr=0.5)), vars(home.DummyScheduler(None, warmup_num_steps=1))]


WORKS: dict[str, Demo] = {
    "Accelerator Accelerator(cpu=) Accelerator(gradient_accumulation_steps=) Accelerator(**) "
    "accelerator.accumulate accelerator.backward accelerator.clip_grad_norm_ accelerator.prepare "
    "accelerator.sync_gradients accelerator.autocast accelerator.unwrap_model "
    "optimizer.param_groups "
    "accelerator.unwrap_model(keep_fp32_wrapper=) loader.set_epoch scheduler.step optimizer.step "
    "optimizer.zero_grad scheduler.get_last_lr": lambda job: job.trained(5),
    "Accelerator(mixed_precision=)": lambda job: job.trained(1, mixed_precision="bf16"),
    "Accelerator(deepspeed_plugin=) Accelerator(parallelism_config=) Accelerator(fsdp_plugin=) "
    "Accelerator(split_batches=)": lambda job: job.trained(
        deepspeed_plugin=None, parallelism_config=None, fsdp_plugin=None, split_batches=True
    ),
    "DataLoaderConfiguration DataLoaderConfiguration(use_stateful_dataloader=) "
    "Accelerator(dataloader_config=)": lambda job: job.trained(
        1, dataloader_config=job.lib.DataLoaderConfiguration(use_stateful_dataloader=False)
    ),
    "DistributedDataParallelKwargs DistributedDataParallelKwargs(find_unused_parameters=) "
    "InitProcessGroupKwargs InitProcessGroupKwargs(timeout=) Accelerator(kwargs_handlers=)": (
        _handled
    ),
    "DistributedType": _types,
    "FullyShardedDataParallelPlugin FullyShardedDataParallelPlugin(fsdp_version=) "
    "FullyShardedDataParallelPlugin(auto_wrap_policy=) "
    "FullyShardedDataParallelPlugin(transformer_cls_names_to_wrap=)": lambda job: bool(
        job.lib.FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["Layer"])),
    "PartialState": _partial,
    "__version__": lambda job: (job.lib.__version__.split(".")[0], job.lib.__version__ >= "0.16.0"),
    "init_empty_weights init_empty_weights(include_buffers=) load_checkpoint_and_dispatch "
    "load_checkpoint_and_dispatch(device_map=)": _empty,
    "logging.get_logger logging.get_logger(log_level=)": _logged,
    "state.AcceleratorState state.AcceleratorState._reset_state state.is_initialized "
    "state.AcceleratorState.deepspeed_plugin": _states,
    "test_utils.torch_device": (
        lambda job: importlib.import_module(f"{job.lib.__name__}.test_utils").torch_device
    ),
    "utils.ProjectConfiguration utils.ProjectConfiguration(logging_dir=) "
    "Accelerator(project_config=) "
    "utils.ProjectConfiguration(project_dir=) utils.ProjectConfiguration(total_limit=)": _projects,
    "utils.broadcast_object_list utils.broadcast_object_list(from_process=) utils.gather_object": (
        _objects
    ),
    "utils.is_peft_model": lambda job: bool(job.utils.is_peft_model(nn.Linear(1, 1))),
    "utils.set_module_tensor_to_device": _moved,
    "utils.set_seed utils.set_seed(device_specific=)": _seeded,
    "test_utils.training.mocked_dataloaders": _mocked,
    "utils.DummyOptim utils.DummyScheduler": _placeholders,
    "utils.tqdm": _bars,
    "accelerator.device accelerator.distributed_type accelerator.is_main_process "
    "accelerator.scaler "
    "accelerator.is_local_main_process accelerator.local_process_index accelerator.num_processes "
    "accelerator.process_index accelerator.mixed_precision accelerator.state "
    "accelerator.native_amp "
    "accelerator.state.deepspeed_plugin accelerator.state.num_processes "
    "accelerator.optimizer_step_was_skipped accelerator.torch_device_mesh": _attributes(
        "device", "distributed_type", "is_main_process", "scaler", "is_local_main_process",
        "local_process_index", "num_processes", "process_index", "mixed_precision", "state",
        "native_amp", "state.deepspeed_plugin", "state.num_processes", "torch_device_mesh",
        "optimizer_step_was_skipped", "dataloader_config.split_batches", "use_distributed",
        mixed_precision="bf16",
    ),
    "accelerator.register_for_checkpointing accelerator.register_load_state_pre_hook "
    "accelerator.register_save_state_pre_hook accelerator.save_state accelerator.load_state "
    "accelerator.load_state(input_dir=) Accelerator(project_dir=)": _saved_and_loaded,
    "accelerator.skip_first_batches loader.dataset": _skipped,
    "accelerator.init_trackers accelerator.init_trackers(config=) accelerator.log(step=) "
    "accelerator.init_trackers(init_kwargs=) accelerator.init_trackers(project_name=) "
    "accelerator.log accelerator.trackers accelerator.get_tracker accelerator.get_tracker(unwrap=) "
    "accelerator.end_training Accelerator(log_with=) tracker.name tracker.writer": _tracked,
    "accelerator.gather accelerator.gather_for_metrics accelerator.pad_across_processes "
    "accelerator.pad_across_processes(dim=) accelerator.pad_across_processes(pad_index=) "
    "accelerator.reduce accelerator.reduce(reduction=) accelerator.wait_for_everyone "
    "accelerator.main_process_first accelerator.local_main_process_first": _gathered,
    "accelerator.print accelerator.save optimizer.state_dict optimizer.load_state_dict "
    "accelerator.get_state_dict accelerator.free_memory utils.extract_model_from_parallel": (
        _printed_and_saved
    ),
    "accelerator.prepare_model accelerator.prepare_model(device_placement=) "
    "accelerator.prepare_model(evaluation_mode=) accelerator.prepare(device_placement=)": _models,
}  # fmt: skip
"""What gives equal results."""


def _written(job: Job) -> Any:
    path = job.folder / "config.yaml"
    wrote = Path(job.utils.write_basic_config(mixed_precision="bf16", save_location=path))
    again = job.utils.write_basic_config(save_location=path)
    return wrote == path and again is False and "mixed_precision: bf16" in path.read_text()


def _in_float8(job: Job) -> bool:
    """Return whether a loop runs in float8; without torchao, whether that is said."""
    settings = {"mixed_precision": "fp8", "kwargs_handlers": [job.utils.AORecipeKwargs()]}
    if find_spec("torchao") is None:
        with pytest.raises(ConfigError, match="pip install torchao"):
            job.accelerator(**settings)
        return True
    accelerator = job.accelerator(**settings)
    return bool(accelerator.mixed_precision == "fp8")


DIFFERS: dict[str, tuple[str, Demo]] = {
    "accelerator.state.fsdp_plugin": (
        "fsdp-plugin", lambda job: job.accelerator().state.fsdp_plugin is None),
    "utils.write_basic_config": ("config-file", _written),
    "Accelerator(mixed_precision='fp8') utils.AORecipeKwargs": ("fp8", _in_float8),
}  # fmt: skip
"""What does something else: its id in the table of differences, and what holds under trainkit."""

REFUSES: dict[str, tuple[str, Demo]] = {
    "DeepSpeedPlugin DeepSpeedPlugin(zero_stage=)": (
        "strategies.FSDP", lambda job: job.lib.DeepSpeedPlugin(zero_stage=3)),
    "prepare_pippy": ("load_checkpoint", lambda job: job.lib.prepare_pippy(nn.Linear(1, 1))),
    "utils.FP8RecipeKwargs": ("torchao", lambda job: job.utils.FP8RecipeKwargs(backend="te")),
    "utils.ParallelismConfig": (
        "ModelParallel",
        lambda job: job.accelerator(parallelism_config=job.utils.ParallelismConfig(tp_size=2))),
    "utils.transformer_engine.convert_model": (
        "torchao", lambda job: job.utils.transformer_engine.convert_model(nn.Linear(1, 1))),
}  # fmt: skip
"""What is not there: words of the sentence, and what raises it."""


def _run(side: str, demo: Demo) -> Any:
    forget(side)
    AcceleratorState._reset_state()
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return demo(Job(importlib.import_module(SIDES[side]), Path(folder)))


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Both sides write to the environment."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    yield
    for side in SIDES:
        forget(side)


@pytest.mark.parametrize("demo", WORKS.values(), ids=[names.split()[0] for names in WORKS])
def test_what_works_does_the_same(demo: Demo) -> None:
    theirs = _run("accelerate", demo)
    assert theirs is not None
    assert _run("trainkit", demo) == theirs


@pytest.mark.parametrize("name", DIFFERS)
def test_what_differs_stands_on_the_page(name: str) -> None:
    key, demo = DIFFERS[name]
    assert key in {each["id"] for each in DIFFERENCES}
    assert _run("trainkit", demo) is True


@pytest.mark.parametrize("name", REFUSES)
def test_what_is_refused_says_what_to_do(name: str) -> None:
    words, demo = REFUSES[name]
    with pytest.raises(ConfigError, match=words):
        _run("trainkit", demo)


def test_each_call_of_the_list_works_or_differs_or_is_refused() -> None:
    shown = " ".join([*WORKS, *DIFFERS, *REFUSES]).split()
    assert len(shown) == len(set(shown)) > 100
    assert sorted(shown) == sorted(USED)
