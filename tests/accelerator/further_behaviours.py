"""More rows of `behaviours`: what fewer scripts do, and what is not of Accelerate's first day."""

import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from tests.accelerator.behaviours import behaviour, numbers, values
from tests.accelerator.toys import Stream

# Data


@behaviour(
    *[
        {"length": length, "split": split, "drop_last": drop_last, "lines": lines}
        for length in (0, 1, 2, 5, 6, 11, 12, 13)
        for split in (False, True)
        for drop_last in (False, True)
        for lines in (False, True)
    ]
)
def dispatched(api: Any, length: int, split: bool, drop_last: bool, lines: bool) -> Any:
    """What each process gets of data that process 0 reads, and what is gathered of it."""
    config = api.DataLoaderConfiguration(split_batches=split, dispatch_batches=True)
    accelerator = api.Accelerator(cpu=True, dataloader_config=config)
    data: Any = Stream(length) if lines else numbers(length)
    loader = DataLoader(data, 6 if split else 2, drop_last=drop_last)
    loader = accelerator.prepare(loader)
    found = []
    for _ in range(2):
        for batch in loader:
            own = batch[0] if isinstance(batch, list) else batch.flatten()
            end = accelerator.gradient_state.end_of_dataloader
            found.append((own.tolist(), accelerator.gather_for_metrics(own).tolist(), end))
    return found, None if lines else len(loader)


@behaviour({"split": False}, {"split": True})
def dispatched_and_shuffled(api: Any, split: bool) -> Any:
    api.set_seed(3)
    config = api.DataLoaderConfiguration(split_batches=split, dispatch_batches=True)
    accelerator = api.Accelerator(cpu=True, dataloader_config=config)
    loader = accelerator.prepare(DataLoader(numbers(13), 6, shuffle=True))
    epochs = [[values(batch) for batch in loader] for _ in range(3)]
    return epochs, torch.rand(1).item()


@behaviour(*[{"dispatch": d, "workers": w} for d in (None, False, True) for w in (0, 1)])
def drawn_after_lines(api: Any, dispatch: bool | None, workers: int) -> Any:
    """What a loop draws beside data whose length is not known."""
    config = api.DataLoaderConfiguration(dispatch_batches=dispatch)
    accelerator = api.Accelerator(cpu=True, dataloader_config=config)
    loader = accelerator.prepare(DataLoader(Stream(8), 2, num_workers=workers))
    return [torch.rand(1).item() for _ in range(2) for _ in loader]


@behaviour()
def drawn_without_batch_sizes(api: Any) -> Any:
    accelerator = api.Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(numbers(4), batch_size=None))
    return [torch.rand(1).item() for _ in range(2) for _ in loader]


@behaviour()
def shuffled_without_a_batch_size(api: Any) -> Any:
    accelerator = api.Accelerator(cpu=True)
    loader = DataLoader(numbers(8), batch_size=None, shuffle=True)
    return [batch[0].item() for batch in accelerator.prepare(loader)]


@behaviour()
def divided_by_the_accelerator(api: Any) -> Any:
    """`split_batches` as an argument of `Accelerator` itself."""
    accelerator = api.Accelerator(cpu=True, split_batches=True)
    loader = accelerator.prepare(DataLoader(numbers(13), 6))
    return [values(batch) for batch in loader]


@behaviour(*[{"length": length} for length in (3, 8, 9, 17)])
def gathered_repeats(api: Any, length: int) -> Any:
    """A mean of each batch, repeated by the size of a full one."""
    accelerator = api.Accelerator(cpu=True)
    found = []
    for (batch,) in accelerator.prepare(DataLoader(numbers(length), 4)):
        found += accelerator.gather_for_metrics(batch.mean().repeat(4)).tolist()
    return found


@behaviour({"padding": False}, {"padding": True})
def split_of_a_dataset(api: Any, padding: bool) -> Any:
    from datasets import Dataset

    accelerator = api.Accelerator(cpu=True)
    data = Dataset.from_dict({"number": list(range(5))})
    with accelerator.split_between_processes(data, apply_padding=padding) as part:
        return list(part["number"])


@behaviour({"within": False}, {"within": True})
def backward_after_a_short_window(api: Any, within: bool) -> Any:
    """What a loss counts in a loop without `accumulate`, after one whose last window was short."""
    accelerator = api.Accelerator(cpu=True, gradient_accumulation_steps=4)
    model = accelerator.prepare(nn.Linear(1, 1, bias=False))
    loader = accelerator.prepare(DataLoader(numbers(accelerator.num_processes * 5), 1))
    for (batch,) in loader if within else ():
        with accelerator.accumulate(model):
            accelerator.backward(model(batch.unsqueeze(1)).mean())
    model.zero_grad()
    accelerator.backward(model(torch.ones(1, 1)).mean())
    return next(model.parameters()).grad.item()


@behaviour()
def helpers_with_accelerators_of_their_own(api: Any) -> Any:
    """A loader and a metric of functions that make an `Accelerator` each, inside of a loop."""

    def prepared(samples: int) -> Any:
        return api.Accelerator(cpu=True).prepare(DataLoader(numbers(samples), 4))

    def gathered(value: Any) -> Any:
        return api.Accelerator(cpu=True).gather_for_metrics(value).flatten().tolist()

    loader = prepared(11)
    accelerator = api.Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, found = nn.Linear(1, 1), []
    model = accelerator.prepare(model)
    for (batch,) in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(batch.unsqueeze(1)).mean())
            found.append(accelerator.sync_gradients)
    for (batch,) in loader:
        found += [gathered(batch), accelerator.gradient_state.end_of_dataloader]
        found.append([own.tolist() for (own,) in prepared(3)])
    return found


# Steps


@behaviour()
def greatest(api: Any) -> Any:
    accelerator = api.Accelerator(cpu=True)
    own = torch.tensor([1.0, -1.0]) * (accelerator.process_index + 1)
    return accelerator.reduce({"x": own}, "max")["x"].tolist()


def trained(api: Any, accelerator: Any, wrap: Any = None, steps: int = 6) -> list[list[float]]:
    """Train a small model on noise of this process; return its weights."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer = accelerator.prepare(model, optimizer)
    torch.manual_seed(accelerator.process_index)
    batches = torch.randn(steps, 5, 4)
    if wrap is not None:
        wrap(model, optimizer, batches)
    else:
        for batch in batches:
            accelerator.backward(model(batch).square().mean())
            optimizer.step()
            optimizer.zero_grad()
    return [value.detach().flatten().tolist() for value in model.parameters()]


@behaviour({"every": 2}, {"every": 4}, {"every": None})
def local_sgd(api: Any, every: int | None) -> Any:
    accelerator = api.Accelerator(cpu=True, gradient_accumulation_steps=2)

    def loop(model: Any, optimizer: Any, batches: Any) -> None:
        with api.LocalSGD(
            accelerator=accelerator, model=model, local_sgd_steps=every, enabled=every is not None
        ) as local:
            for batch in batches:
                with accelerator.accumulate(model):
                    accelerator.backward(model(batch).square().mean())
                    optimizer.step()
                    optimizer.zero_grad()
                    local.step()

    return trained(api, accelerator, loop)


@behaviour(
    {"hook": "fp16", "wrapper": "no"},
    {"hook": "power_sgd", "wrapper": "no"},
    {"hook": "power_sgd", "wrapper": "fp16"},
)
def communication_hooks(api: Any, hook: str, wrapper: str) -> Any:
    kinds = api.DDPCommunicationHookType
    options = {"start_powerSGD_iter": 3, "matrix_approximation_rank": 1}
    settings = api.DistributedDataParallelKwargs(
        comm_hook=kinds(hook),
        comm_wrapper=kinds(wrapper),
        comm_state_option=options if "power" in hook else {},
    )
    accelerator = api.Accelerator(cpu=True, kwargs_handlers=[settings])
    weights = trained(api, accelerator, steps=8)
    # Torch lays its buckets out anew after the first step, which rounds otherwise in fp32.
    return [[round(value, 5) for value in each] for each in weights]


@behaviour()
def reduced_in_the_last_backward(api: Any) -> Any:
    accelerator = api.Accelerator(cpu=True)
    found = []

    def loop(model: Any, optimizer: Any, batches: Any) -> None:
        with accelerator.no_sync(model):
            losses = [model(batch).square().mean() for batch in batches]
        for loss in losses[:-1]:
            accelerator.backward(loss)
        found.append(accelerator.gather(accelerator.unwrap_model(model)[0].bias.grad).tolist())
        with accelerator.trigger_sync_in_backward(model):
            accelerator.backward(losses[-1])
        optimizer.step()

    return trained(api, accelerator, loop), found


@behaviour()
def batch_sizes_of_any_name(api: Any) -> Any:
    sizes = []

    def fit(rows: int, word: str) -> str:
        sizes.append(rows)
        if rows > 3:
            raise RuntimeError("CUDA out of memory. Tried")
        return word

    run = api.find_executable_batch_size(fit, starting_batch_size=5)
    return run("one"), run("two"), sizes


@behaviour()
def compiled(api: Any) -> Any:
    plugin = api.TorchDynamoPlugin(backend="eager", dynamic=False)
    return trained(api, api.Accelerator(cpu=True, dynamo_plugin=plugin), steps=2)


# Files


@behaviour()
def profiled(api: Any) -> Any:
    folder = tempfile.mkdtemp()
    settings = api.ProfileKwargs(activities=["cpu"], output_trace_dir=folder)
    accelerator = api.Accelerator(cpu=True, kwargs_handlers=[settings])
    with accelerator.profile() as recorded:
        torch.ones(4, 4) @ torch.ones(4, 4)
    ready: list[int] = []
    later = api.ProfileKwargs(
        activities=["cpu"],
        schedule_option={"wait": 1, "warmup": 1, "active": 1, "repeat": 1},
        on_trace_ready=lambda profiler: ready.append(profiler.step_num),
    )
    with warnings.catch_warnings(), accelerator.profile(later) as steps:
        warnings.simplefilter("ignore")
        for _ in range(4):
            torch.ones(1)
            steps.step()
    names = {event.key for event in recorded.key_averages()}
    return "aten::mm" in names, sorted(path.name for path in Path(folder).iterdir()), ready


@behaviour({"strict": True}, {"strict": False})
def loaded_into_another_model(api: Any, strict: bool) -> Any:
    """A state whose hook has left a weight out, as adapters do."""
    accelerator = api.Accelerator(cpu=True)
    model: Any = accelerator.prepare(nn.Linear(2, 1))
    own = accelerator.unwrap_model(model)
    with torch.no_grad():
        own.weight.fill_(1.0)
        own.bias.fill_(2.0)

    def drop(models: Any, weights: Any, folder: str) -> None:
        for each in weights:
            for name in [name for name in each if name.endswith("weight")]:
                del each[name]

    accelerator.register_save_state_pre_hook(drop)
    shared = [tempfile.mkdtemp()]
    if accelerator.num_processes > 1:
        torch.distributed.broadcast_object_list(shared, 0)
    accelerator.save_state(shared[0])
    accelerator.wait_for_everyone()
    with torch.no_grad():
        own.weight.fill_(3.0)
        own.bias.fill_(4.0)
    try:
        accelerator.load_state(shared[0], strict=strict)
    except Exception:
        return "refused"
    return own.weight.tolist(), own.bias.tolist()


@behaviour({})
def prepared_stateful(api: Any) -> Any:
    """Whether two loaders that keep their place leave the global generator alone until a pass."""
    api.set_seed(5)
    before = torch.get_rng_state()
    config = api.DataLoaderConfiguration(use_stateful_dataloader=True)
    accelerator = api.Accelerator(cpu=True, dataloader_config=config)
    data = numbers(12)
    accelerator.prepare(DataLoader(data, 4, shuffle=True), DataLoader(data, 4))
    return torch.equal(before, torch.get_rng_state())
