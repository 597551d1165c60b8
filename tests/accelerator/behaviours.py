"""Loops that run under Accelerate and under trainkit, word for word the same.

Each function takes the names of one of the two and returns what happened on this process, in
built-in types.
"""

import importlib
import os
import random
import tempfile
import warnings
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy
import torch
import torch.distributed
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    SequentialSampler,
    TensorDataset,
)

NAMES = (
    "Accelerator",
    "DDPCommunicationHookType",
    "DistributedDataParallelKwargs",
    "LocalSGD",
    "ProfileKwargs",
    "TorchDynamoPlugin",
    "DataLoaderConfiguration",
    "GradScalerKwargs",
    "GradientAccumulationPlugin",
    "set_seed",
    "skip_first_batches",
    "find_executable_batch_size",
    "pad_across_processes",
    "concatenate",
)
SIDES = ("accelerate", "trainkit")
Behaviour = Callable[..., Any]
BEHAVIOURS: dict[str, Behaviour] = {}


def names_of(side: str) -> SimpleNamespace:
    """Return what a script would import."""
    places = [side] if side == "trainkit" else [side, f"{side}.utils", f"{side}.local_sgd"]
    modules = [importlib.import_module(place) for place in places]
    found = {n: getattr(m, n) for n in NAMES for m in reversed(modules) if hasattr(m, n)}
    return SimpleNamespace(side=side, **found)


def forget(side: str) -> None:
    """Let the next `Accelerator` of Accelerate be the first one; trainkit has no such state."""
    if side == "accelerate":
        from accelerate.state import AcceleratorState, GradientState, PartialState

        AcceleratorState._reset_state()
        GradientState._reset_state()
        PartialState._reset_state()


def start_apart(rank: int) -> None:
    """Join the other processes, by one group for both sides; alone, forget that there are any."""
    os.environ["ACCELERATE_USE_CPU"] = "true"
    size = int(os.environ["WORLD_SIZE"])
    if size > 1:
        method = os.environ["TRAINKIT_INIT_METHOD"]
        torch.distributed.init_process_group("gloo", method, rank=rank, world_size=size)
    else:
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
            del os.environ[name]  # Accelerate would look for others


def run_all(rank: int, side: str, names: list[str]) -> dict[str, Any]:
    """Return what each behaviour does on this process; an error counts by its kind."""
    warnings.simplefilter("ignore")
    start_apart(rank)
    results = {}
    api = names_of(side)
    for name in names:
        forget(side)
        torch.manual_seed(0)
        try:
            results[name] = BEHAVIOURS[name](api)
        except Exception as error:
            results[name] = f"raises {type(error).__name__}: {error}"[:300]
    return results


def behaviour(*options: dict[str, Any]) -> Callable[[Behaviour], Behaviour]:
    """Add a function to the table, once for each set of options."""

    def add(function: Behaviour) -> Behaviour:
        for chosen in options or ({},):
            text = ", ".join(f"{key}={value}" for key, value in chosen.items())
            BEHAVIOURS[f"{function.__name__}({text})"] = partial(function, **chosen)
        return function

    return add


def numbers(length: int) -> TensorDataset:
    return TensorDataset(torch.arange(length, dtype=torch.float32))


def values(batch: Any) -> list[float]:
    found: list[float] = batch[0].flatten().tolist()
    return found


def linear() -> nn.Linear:
    """Return a model whose one weight is 1 on every process."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    return model


# Data


@behaviour(
    *[
        {"length": length, "split": split, "even": even, "drop_last": drop_last}
        for length in (0, 1, 2, 5, 6, 11, 12, 13)
        for split in (False, True)
        for even in (True, False)
        for drop_last in (False, True)
    ]
)
def order(api: Any, length: int, split: bool, even: bool, drop_last: bool) -> Any:
    config = api.DataLoaderConfiguration(split_batches=split, even_batches=even)
    accelerator = api.Accelerator(cpu=True, dataloader_config=config)
    loader = DataLoader(numbers(length), 6 if split else 2, drop_last=drop_last)
    loader = accelerator.prepare(loader)
    return [[values(batch) for batch in loader] for _ in range(2)], len(loader)


@behaviour({"batch_size": 4}, {"batch_size": 3})
def order_of_a_batch_sampler(api: Any, batch_size: int) -> Any:
    accelerator = api.Accelerator(cpu=True)
    data = numbers(10)

    class Own(BatchSampler):
        pass

    loader = DataLoader(data, batch_sampler=Own(SequentialSampler(data), batch_size, False))
    return [values(batch) for batch in accelerator.prepare(loader)]


@behaviour({"split": False}, {"split": True})
def shuffled(api: Any, split: bool) -> Any:
    api.set_seed(3)
    config = api.DataLoaderConfiguration(split_batches=split)
    accelerator = api.Accelerator(cpu=True, dataloader_config=config)
    loader = accelerator.prepare(DataLoader(numbers(13), 6, shuffle=True))
    epochs = [[values(batch) for batch in loader] for _ in range(3)]
    return epochs, torch.rand(1).item()


@behaviour({"data_seed": None}, {"data_seed": 7})
def shuffled_by_seed(api: Any, data_seed: int | None) -> Any:
    api.set_seed(3)
    config = api.DataLoaderConfiguration(use_seedable_sampler=True, data_seed=data_seed)
    accelerator = api.Accelerator(cpu=True, dataloader_config=config)
    loader = accelerator.prepare(DataLoader(numbers(13), 2, shuffle=True))
    epochs = []
    for epoch in (0, 1, 2, 7):
        loader.set_epoch(epoch)
        epochs.append([values(batch) for batch in loader])
    return epochs


@behaviour()
def shuffled_by_a_generator(api: Any) -> Any:
    accelerator = api.Accelerator(cpu=True)
    generator = torch.Generator().manual_seed(accelerator.process_index)
    loader = DataLoader(numbers(9), 2, shuffle=True, generator=generator)
    loader = accelerator.prepare(loader)
    return [[values(batch) for batch in loader] for _ in range(2)]


@behaviour()
def skipped(api: Any) -> Any:
    accelerator = api.Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(numbers(13), 2))
    fewer = accelerator.skip_first_batches(loader, 1)
    plain = api.skip_first_batches(DataLoader(numbers(6), 2), 2)
    return (
        [values(batch) for batch in fewer],
        [values(batch) for batch in loader],
        [values(batch) for batch in plain],
        len(fewer),
    )


@behaviour({"split": False}, {"split": True})
def facts(api: Any, split: bool) -> Any:
    config = api.DataLoaderConfiguration(split_batches=split)
    accelerator = api.Accelerator(cpu=True, dataloader_config=config)
    loader = accelerator.prepare(DataLoader(numbers(13), 6))
    ends = []
    for _ in loader:
        state = accelerator.gradient_state
        ends.append((state.end_of_dataloader, state.in_dataloader))
    state = accelerator.gradient_state
    return (
        ends,
        (state.end_of_dataloader, state.in_dataloader),
        len(loader.dataset),
        (accelerator.split_batches, accelerator.even_batches),
        (str(accelerator.distributed_type.value), accelerator.mixed_precision),
    )


@behaviour(*[{"seed": seed} for seed in range(40)])
def random_loop(api: Any, seed: int) -> Any:
    """Three passes with accumulation, the second one perhaps left early."""
    accelerator = api.Accelerator(cpu=True)
    size = accelerator.num_processes
    forget(api.side)
    draw = random.Random(seed)
    even = draw.random() < 0.7
    config = api.DataLoaderConfiguration(split_batches=draw.random() < 0.4, even_batches=even)
    accelerator = api.Accelerator(
        cpu=True, dataloader_config=config, gradient_accumulation_steps=draw.choice([1, 2, 3])
    )
    api.set_seed(draw.randrange(99))
    loader = DataLoader(
        numbers(draw.choice([1, 2, 3, 5, 7, 8, 9, 12, 17, 20])),
        size * draw.choice([1, 2, 3]),
        shuffle=draw.random() < 0.6,
        drop_last=draw.random() < 0.3,
    )
    loader = accelerator.prepare(loader)
    leaves_at = draw.choice([None, 0, 1])
    found = []
    for epoch in range(3):
        for index, (batch,) in enumerate(loader):
            with accelerator.accumulate():
                end = accelerator.gradient_state.end_of_dataloader
                found.append((batch.tolist(), accelerator.sync_gradients, end))
            if even:
                found.append(accelerator.gather_for_metrics(batch).tolist())
            if epoch == 1 and leaves_at == index:
                break
    return found, torch.rand(1).item()


class Augmented(Dataset[Any]):
    """Adds noise from the global generators."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        return torch.rand(()), random.random(), float(numpy.random.rand())


@behaviour()
def augmentation(api: Any) -> Any:
    api.set_seed(0)
    accelerator = api.Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(Augmented(), 1))
    return [[round(float(value), 6) for value in batch] for batch in loader]


class Drawing(IterableDataset[Any]):
    """Draws from the global generators."""

    def __iter__(self) -> Any:
        return (Augmented()[number] for number in range(6))


@behaviour(
    *[{"stream": stream, "workers": workers} for stream, workers in ((0, 0), (0, 2), (1, 0))]
)
def unkeyed(api: Any, stream: int, workers: int) -> Any:
    """What a data set and the loop draw in turn, with the switch for Accelerate's streams."""
    os.environ["TRAINKIT_SAMPLE_SEEDING"] = "false"
    try:
        config = api.DataLoaderConfiguration(dispatch_batches=False)
    finally:
        del os.environ["TRAINKIT_SAMPLE_SEEDING"]
    api.set_seed(0)
    accelerator = api.Accelerator(cpu=True, dataloader_config=config)
    data: Any = Drawing() if stream else Augmented()
    loader = DataLoader(data, 1, shuffle=None if stream else True, num_workers=workers)
    loader = accelerator.prepare(loader)
    found = []
    for _ in range(2):
        for batch in loader:
            drawn = (*batch, torch.rand(()), random.random())
            found.append([float(value) for value in drawn])
    return found


@behaviour({"config": "plain"}, {"config": "seedable"})
def resumed_in_an_epoch(api: Any, config: str) -> Any:
    """Return the batches of a training that was stopped, and those of one that was not."""
    options = {"use_seedable_sampler": True} if config == "seedable" else {}

    def start() -> tuple[Any, Any]:
        forget(api.side)
        api.set_seed(1)
        settings = api.DataLoaderConfiguration(**options)
        accelerator = api.Accelerator(cpu=True, dataloader_config=settings)
        model = linear()
        loader = DataLoader(numbers(10), 2, shuffle=True)
        model, loader, _ = accelerator.prepare(
            model, loader, torch.optim.SGD(model.parameters(), lr=0.1)
        )
        return accelerator, loader

    _, loader = start()
    whole = [values(batch) for _ in range(2) for batch in loader]
    accelerator, loader = start()
    folder = os.environ.get("TRAINKIT_INIT_METHOD", tempfile.mkdtemp()).removeprefix("file://")
    first = []
    for batch in loader:
        first.append(values(batch))
        accelerator.save_state(f"{folder}-{api.side}-{config}")
        break
    accelerator, loader = start()
    accelerator.load_state(f"{folder}-{api.side}-{config}")
    rest = [values(batch) for batch in accelerator.skip_first_batches(loader, 1)]
    rest += [values(batch) for batch in loader]
    return first + rest == whole


# Windows


def train(
    api: Any,
    accelerator: Any,
    length: int,
    *,
    epochs: int = 2,
    leave_at: int | None = None,
    inside: Callable[[int], None] | None = None,
    scheduler: Callable[[Any], Any] | None = None,
) -> dict[str, Any]:
    """Train a weight by hand, and note what happens to it."""
    model: Any = linear()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=1.0)
    schedule: Any = None if scheduler is None else scheduler(optimizer)
    loader: Any = DataLoader(TensorDataset(torch.ones(length, 1)), 1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    schedule = None if schedule is None else accelerator.prepare(schedule)
    syncs, gradients, rates = [], [], []
    for _ in range(epochs):
        for index, (batch,) in enumerate(loader):
            with accelerator.accumulate(model):
                accelerator.backward(model(batch).sum())
                syncs.append(accelerator.sync_gradients)
                if accelerator.sync_gradients:
                    gradients.append(round(float(accelerator.unwrap_model(model).weight.grad), 6))
                optimizer.step()
                if schedule is not None:
                    schedule.step()
                    rates.append(round(schedule.get_last_lr()[0], 8))
                optimizer.zero_grad()
            if inside is not None:
                inside(index)
            if leave_at == index:
                break
    return {"syncs": syncs, "gradients": gradients, "rates": rates}


@behaviour(
    *[
        {"length": length, "steps": steps}
        for length in (1, 5, 6, 7, 12, 18)
        for steps in (1, 2, 3, 4)
    ]
)
def windows(api: Any, length: int, steps: int) -> Any:
    accelerator = api.Accelerator(cpu=True, gradient_accumulation_steps=steps)
    return train(api, accelerator, length)["syncs"]


@behaviour({"length": 12}, {"length": 18})
def last_window(api: Any, length: int) -> Any:
    """6 or more micro-batches on each process; windows of 4."""
    accelerator = api.Accelerator(cpu=True, gradient_accumulation_steps=4)
    return train(api, accelerator, length, epochs=1)["gradients"]


@behaviour({"leave_at": 0}, {"leave_at": 2})
def windows_after_an_early_leave(api: Any, leave_at: int) -> Any:
    accelerator = api.Accelerator(cpu=True, gradient_accumulation_steps=2)
    return train(api, accelerator, 18, epochs=3, leave_at=leave_at)["syncs"]


@behaviour({"sync_each_batch": False}, {"sync_each_batch": True})
def windows_across_epochs(api: Any, sync_each_batch: bool) -> Any:
    plugin = api.GradientAccumulationPlugin(
        num_steps=4, sync_with_dataloader=False, sync_each_batch=sync_each_batch
    )
    accelerator = api.Accelerator(cpu=True, gradient_accumulation_plugin=plugin)
    return train(api, accelerator, 18)["syncs"]


@behaviour({"leaves": False}, {"leaves": True})
def windows_around_an_evaluation(api: Any, leaves: bool) -> Any:
    accelerator = api.Accelerator(cpu=True, gradient_accumulation_steps=4)
    evaluation = accelerator.prepare(DataLoader(numbers(12), 1))

    def evaluate(index: int) -> None:
        if index == 2:
            for _ in evaluation:
                if leaves:
                    break

    return train(api, accelerator, 18, epochs=1, inside=evaluate)["syncs"]


@behaviour({"steps": 1, "split": False}, {"steps": 2, "split": False}, {"steps": 2, "split": True})
def learning_rates(api: Any, steps: int, split: bool) -> Any:
    config = api.DataLoaderConfiguration(split_batches=split)
    plugin = api.GradientAccumulationPlugin(num_steps=steps)
    accelerator = api.Accelerator(
        cpu=True, dataloader_config=config, gradient_accumulation_plugin=plugin
    )
    model: Any = linear()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=1.0)
    schedule: Any = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    loader: Any = DataLoader(TensorDataset(torch.ones(18, 1)), 6 if split else 2)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    rates = []
    for (batch,) in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).sum())
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        rates.append((round(schedule.get_last_lr()[0], 8), schedule.scheduler._step_count))
    return rates


@behaviour({"with_optimizer": True}, {"with_optimizer": False})
def one_cycle(api: Any, with_optimizer: bool) -> Any:
    accelerator = api.Accelerator(
        cpu=True, gradient_accumulation_steps=2, step_scheduler_with_optimizer=with_optimizer
    )
    make = torch.optim.lr_scheduler.OneCycleLR
    total = 60 if not with_optimizer else 19
    schedule = partial(make, max_lr=1.0, total_steps=total)
    return train(api, accelerator, 18, scheduler=schedule)["rates"]


@behaviour()
def clipped(api: Any) -> Any:
    accelerator = api.Accelerator(cpu=True)
    model: Any = linear()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=1.0)
    model, optimizer = accelerator.prepare(model, optimizer)
    found = []
    for _ in range(2):
        accelerator.backward(3 * model(torch.ones(2, 1)).sum())
        norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
        found += [norm.item(), accelerator.unwrap_model(model).weight.grad.item()]
        accelerator.clip_grad_value_(model.parameters(), 0.25)
        found.append(accelerator.unwrap_model(model).weight.grad.item())
        optimizer.step()
        optimizer.zero_grad()
    return [round(value, 5) for value in found], accelerator.optimizer_step_was_skipped


@behaviour({"fused": False}, {"fused": True})
def overflow(api: Any, fused: bool) -> Any:
    """An infinite gradient in the second of three steps under fp16."""
    settings = api.GradScalerKwargs(init_scale=2.0**10)
    accelerator = api.Accelerator(cpu=True, mixed_precision="fp16", kwargs_handlers=[settings])
    if api.side == "accelerate":  # which makes one on GPUs only
        accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    model: Any = linear()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
    schedule: Any = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    found = []
    for step in range(3):
        loss = model(torch.ones(1, 1)).sum()
        accelerator.backward(loss * float("inf") if step == 1 else loss)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        found.append(accelerator.optimizer_step_was_skipped)
    weight = accelerator.unwrap_model(model).weight.item()
    return found, weight < 1, schedule.scheduler.last_epoch, accelerator.scaler.get_scale()


# Collectives


@behaviour(
    *[
        {"length": length, "drop_last": drop_last, "split": split}
        for length in (1, 2, 5, 6, 11, 12, 13)
        for drop_last in (False, True)
        for split in (False, True)
    ]
)
def gathered_for_metrics(api: Any, length: int, drop_last: bool, split: bool) -> Any:
    config = api.DataLoaderConfiguration(split_batches=split)
    accelerator = api.Accelerator(cpu=True, dataloader_config=config)
    loader = DataLoader(numbers(length), 6 if split else 2, drop_last=drop_last)
    found = []
    for (batch,) in accelerator.prepare(loader):
        pair = accelerator.gather_for_metrics((batch, batch * 2))
        found.append([pair[0].tolist(), pair[1].tolist()])
    return found


@behaviour({"what": "objects"}, {"what": "dict of lists"}, {"what": "mean"}, {"what": "uneven"})
def gathered_other_things(api: Any, what: str) -> Any:
    config = api.DataLoaderConfiguration(even_batches=what != "uneven")
    accelerator = api.Accelerator(cpu=True, dataloader_config=config)
    found: list[Any] = []
    size = accelerator.num_processes
    length = 4 * size + (size if what == "uneven" else 1)
    for (batch,) in accelerator.prepare(DataLoader(numbers(length), 4)):
        if what == "objects":
            texts = [str(int(value)) for value in batch]
            found += accelerator.gather_for_metrics(texts, use_gather_object=True)
        elif what == "dict of lists":
            gathered = accelerator.gather_for_metrics({"text": [str(int(v)) for v in batch]})
            found.append(gathered)
        elif what == "mean":
            found.append(accelerator.gather_for_metrics(batch.mean()).tolist())
        elif what == "uneven" and len(found) == 0:
            found.append(accelerator.gather_for_metrics(batch).tolist())
    return found


@behaviour()
def verbs(api: Any) -> Any:
    accelerator = api.Accelerator(cpu=True)
    rank, size = accelerator.process_index, accelerator.num_processes
    tensor = torch.arange(2.0) + rank
    nested = {"a": [tensor], "b": (tensor.clone(),)}
    gathered = accelerator.gather(nested)
    padded = accelerator.pad_across_processes(torch.ones(rank + 1, 2), dim=0, pad_index=-1)
    before = accelerator.pad_across_processes(torch.ones(1, rank + 1), dim=1, pad_first=True)
    function = api.pad_across_processes(torch.ones(rank + 1))
    total = accelerator.reduce(tensor.clone(), "sum")
    mean = accelerator.reduce({"x": tensor.clone()}, "mean")
    joined = api.concatenate([{"x": tensor}, {"x": tensor}])
    return {
        "gather": [gathered["a"][0].tolist(), gathered["b"][0].tolist()],
        "padded": padded.tolist(),
        "before": before.tolist(),
        "function": function.tolist(),
        "sum": total.tolist(),
        "mean": mean["x"].tolist(),
        "joined": joined["x"].tolist(),
        "who": (rank, size, accelerator.is_main_process, accelerator.is_last_process),
    }


@behaviour()
def gathered_scalar(api: Any) -> Any:
    return api.Accelerator(cpu=True).gather(torch.tensor(3)).tolist()


@behaviour()
def scaled_mean(api: Any) -> Any:
    return api.Accelerator(cpu=True).reduce(torch.ones(1), "mean", scale=2.0).tolist()


@behaviour({"padding": False}, {"padding": True})
def split_between_processes(api: Any, padding: bool) -> Any:
    accelerator = api.Accelerator(cpu=True)
    found = []
    for inputs in (list(range(5)), torch.arange(4), {"a": [1, 2, 3], "b": ["x", "y", "z"]}):
        with accelerator.split_between_processes(inputs, apply_padding=padding) as part:
            found.append(part.tolist() if isinstance(part, torch.Tensor) else part)
    return found


@behaviour()
def triggers(api: Any) -> Any:
    accelerator = api.Accelerator(cpu=True)
    found = [accelerator.check_trigger()]
    if accelerator.is_last_process:
        accelerator.set_trigger()
    return [*found, accelerator.check_trigger(), accelerator.check_trigger()]


# Seeds and memory


@behaviour({"device_specific": False}, {"device_specific": True})
def seeds(api: Any, device_specific: bool) -> Any:
    accelerator = api.Accelerator(cpu=True)
    assert accelerator.num_processes
    api.set_seed(11, device_specific=device_specific)
    return torch.rand(2).tolist(), random.random(), float(numpy.random.rand())


@behaviour({"reduce": False}, {"reduce": True})
def batch_sizes(api: Any, reduce: bool) -> Any:
    sizes: list[int] = []

    def smaller() -> int:
        return sizes[-1] // 2

    options: dict[str, Any] = {"reduce_batch_size_fn": smaller} if reduce else {}

    def fit(batch_size: int, word: str) -> str:
        sizes.append(batch_size)
        if batch_size > 3:
            raise RuntimeError("CUDA out of memory.")
        return word

    run = api.find_executable_batch_size(fit, starting_batch_size=6, **options)
    return run("done"), sizes
