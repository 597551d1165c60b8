"""Runs of all kinds, drawn at random, go on bit by bit after a resume (rule 30)."""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset

from tests.helpers.ranks import run_ranks
from trainkit import Accelerator, Trainer
from trainkit.callbacks import EMA, Checkpoint
from trainkit.precision import FP16

SAMPLES, WIDTH = 12, 48

FLAGS: dict[str, dict[str, list[Any]]] = {
    "ASGD": {"lambd": [1e-4], "t0": [2.0], "weight_decay": [0.0, 0.1], "maximize": [False, True]},
    "Adadelta": {"rho": [0.9], "weight_decay": [0.0, 0.1], "maximize": [False, True]},
    "Adafactor": {"weight_decay": [0.0, 0.1], "maximize": [False, True]},
    "Adagrad": {"lr_decay": [0.0, 0.1], "initial_accumulator_value": [0.0, 0.5]},
    "Adam": {"amsgrad": [False, True], "maximize": [False, True], "weight_decay": [0.0, 0.1]},
    "AdamW": {"amsgrad": [False, True], "maximize": [False, True], "betas": [(0.5, 0.9)]},
    "Adamax": {"weight_decay": [0.0, 0.1], "maximize": [False, True]},
    "LBFGS": {"max_iter": [2], "history_size": [3], "line_search_fn": [None, "strong_wolfe"]},
    "Muon": {"nesterov": [False, True], "weight_decay": [0.0, 0.1], "momentum": [0.9]},
    "NAdam": {"decoupled_weight_decay": [False, True], "weight_decay": [0.0, 0.1]},
    "RAdam": {"decoupled_weight_decay": [False, True], "weight_decay": [0.0, 0.1]},
    "RMSprop": {"centered": [False, True], "momentum": [0.0, 0.9], "maximize": [False, True]},
    "Rprop": {"etas": [(0.5, 1.2)], "maximize": [False, True]},
    "SGD": {"momentum": [0.0, 0.9, 0.9], "maximize": [False, True]},
    "SparseAdam": {"maximize": [False, True]},
}
if not hasattr(torch.optim, "Muon"):  # before torch 2.9
    del FLAGS["Muon"]
"""By optimizer: what its settings are drawn from."""

FUSED = ("Adagrad", "Adam", "AdamW", "SGD")
ONE_LOOP = ("LBFGS", "Muon", "SparseAdam")  # no choice of `foreach`
NO_SHARDS = ("Adafactor", "LBFGS", "Muon", "Rprop", "SparseAdam")  # do not run on `DTensor`s
LAYOUTS = ("row by row", "channels_last", "turned", "permuted")


@dataclass(frozen=True, slots=True)
class Case:
    """One training, as it was drawn."""

    optimizer: str
    options: dict[str, Any]
    module: str
    layout: str
    dtype: torch.dtype
    precision: str
    strategy: str  # or "accelerator"
    background: bool
    accumulation: int
    groups: int
    schedule: bool
    ema: bool
    clip: bool
    stop: int  # a step; in a loop of one's own a micro-batch


def draw(seed: int, strategies: tuple[str, ...]) -> Case:
    """Return the case of a seed."""
    chance = random.Random(seed)
    pick: Callable[..., Any] = chance.choice
    strategy = pick(strategies)
    known = [n for n in FLAGS if strategy != "fsdp" or n not in NO_SHARDS]
    name = pick([*known, *FUSED] if strategy != "ddp" else [*known[:-1], *FUSED])
    options = {key: pick(values) for key, values in FLAGS[name].items()}
    if name == "SGD" and options["momentum"]:
        options["nesterov"] = pick([False, True])
    loop = pick(["fused", "fused", "foreach", "one by one", "as torch likes"])
    fused = ("Adam", "AdamW") if strategy == "fsdp" else FUSED  # of torch, on `DTensor`s
    if name in fused and loop == "fused":
        options["fused"] = True
    elif name not in ONE_LOOP and loop in ("foreach", "one by one"):
        options["foreach"] = loop == "foreach"
    modules = {"Muon": ["linear", "tied"], "SparseAdam": ["sparse"]}.get(name)
    modules = modules or [kind for kind in MODULES if kind != "sparse"]
    precision = pick(["fp32", "fp32", "bf16", "fp16"]) if name != "LBFGS" else "fp32"
    sharded = strategy == "fsdp"
    row_by_row = sharded or name == "LBFGS"  # both refuse others
    if precision == "fp16":
        modules = [kind for kind in modules if kind != "lstm"]  # oneDNN has none
    if sharded and precision != "fp32":  # torch computes no batch statistics in mixed dtypes
        modules = [kind for kind in modules if kind not in ("conv1d", "conv2d", "conv3d")]
    plain = precision == "fp32" and not sharded and name not in ("Muon", "SparseAdam")
    return Case(
        optimizer=name,
        options=options,
        module=pick([m for m in modules if m != "scalars"] if sharded else modules),
        layout="row by row" if row_by_row else pick(LAYOUTS),
        dtype=pick([torch.float32, torch.float32, torch.bfloat16, torch.float64])
        if plain
        else torch.float32,
        precision=precision,
        strategy=strategy,
        background=pick([False, True]),
        accumulation=1
        if name == "SparseAdam" or (name, strategy) == ("LBFGS", "accelerator")
        else pick([1, 2]),
        groups=1 if name in ("LBFGS", "Muon", "SparseAdam") else pick([1, 2]),
        schedule=pick([False, True]),
        ema=pick([False, True]),
        clip=name != "SparseAdam" and pick([False, True]),
        stop=pick([1, 2]) if strategy != "accelerator" else pick([1, 2, 3, 4]),
    )


class Tied(nn.Module):
    """An embedding whose weight is also that of the last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 5)
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, inputs: Tensor) -> Tensor:
        hidden: Tensor = self.embed(_tokens(inputs))
        return nn.functional.linear(hidden, self.head.weight)


class Recurrent(nn.Module):
    """An LSTM of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 5, 2, batch_first=True)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.lstm(inputs.view(-1, 12, 4))[0]
        return outputs


class Scalars(nn.Module):
    """Parameters without dimensions, with dimensions of size 1, in a list; a frozen one."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.parts = nn.ParameterList(
            [torch.randn(1, WIDTH), torch.randn(3, 1), torch.randn(1, 1, 1)]
        )
        self.frozen = nn.Parameter(torch.randn(3, 2, 1), requires_grad=False)
        self.register_buffer("mean", torch.zeros(3, 1))

    def forward(self, inputs: Tensor) -> Tensor:
        row, column, single = self.parts
        outputs: Tensor = self.scale * (inputs * row)[:, None] * column + single
        outputs = outputs * self.frozen.sum(1)
        self.mean = 0.9 * self.mean + 0.1 * outputs.detach().mean((0, 2))[:, None].to(self.mean)
        return outputs


class Reshaped(nn.Module):
    """Layers whose inputs have another shape than the data."""

    def __init__(self, shape: tuple[int, ...], *layers: nn.Module) -> None:
        super().__init__()
        self.shape = shape
        self.layers = nn.Sequential(*layers)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.layers(inputs.view(-1, *self.shape))
        return outputs


class Tokens(nn.Module):
    """An embedding, and a frozen layer after it."""

    def __init__(self, *, sparse: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4, sparse=sparse)
        self.head = nn.Linear(4, 3).requires_grad_(not sparse)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.head(self.embed(_tokens(inputs)))
        return outputs


def _tokens(inputs: Tensor) -> Tensor:
    return inputs[:, :6].mul(3).long().abs().clamp(max=6)


MODULES: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Sequential(nn.Linear(WIDTH, 6), nn.Tanh(), nn.Linear(6, 3)),
    "conv1d": lambda: Reshaped((4, 12), nn.Conv1d(4, 6, 3), nn.BatchNorm1d(6), nn.Conv1d(6, 2, 1)),
    "conv2d": lambda: Reshaped(
        (3, 4, 4), nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 1)
    ),
    "conv3d": lambda: Reshaped((2, 2, 3, 4), nn.Conv3d(2, 4, 2), nn.BatchNorm3d(4)),
    "turned conv": lambda: Reshaped(
        (3, 4, 4), nn.ConvTranspose2d(3, 4, 3), nn.ReLU(), nn.ConvTranspose2d(4, 2, 2)
    ),
    "turned conv3d": lambda: Reshaped((2, 2, 3, 4), nn.ConvTranspose3d(2, 3, 2)),
    "groups": lambda: Reshaped((3, 4, 4), nn.Conv2d(3, 6, 3, groups=3), nn.GroupNorm(2, 6)),
    "tokens": lambda: Tokens(sparse=False),
    "sparse": lambda: Tokens(sparse=True),
    "lstm": Recurrent,
    "tied": Tied,
    "scalars": Scalars,
    "ones": lambda: Reshaped((1, 6, 8), nn.Conv2d(1, 4, 3), nn.Conv2d(4, 1, 1), nn.Linear(6, 1)),
}


def make_model(case: Case) -> nn.Module:
    torch.manual_seed(0)
    model = MODULES[case.module]().to(case.dtype)
    chance = random.Random(1)
    for parameter in model.parameters():
        parameter.data = laid_out(parameter.data, case.layout, chance)
    return model


def laid_out(value: Tensor, layout: str, chance: random.Random) -> Tensor:
    """Return a tensor in another order in memory, where there is such an order."""
    if layout == "channels_last" and value.ndim in (4, 5):
        kind: Any = torch.channels_last if value.ndim == 4 else torch.channels_last_3d
        return value.to(memory_format=kind)
    if layout == "turned" and value.ndim > 1:
        return value.transpose(0, 1).contiguous().transpose(0, 1)
    if layout == "permuted" and value.ndim > 1:
        order = chance.sample(range(value.ndim), value.ndim)
        back = [order.index(dim) for dim in range(value.ndim)]
        wide = value.permute(order)[None].expand(2, *(value.shape[dim] for dim in order)).clone()
        return wide[0].contiguous().permute(back)
    return value


def make_optimizer(case: Case, trained: list[nn.Parameter]) -> Optimizer:
    if case.optimizer == "Muon":
        trained = [p for p in trained if p.ndim == 2]
    cut = len(trained) // 2 if case.groups == 2 else 0
    groups: list[Any] = [{"params": trained[cut:]}]
    if cut:
        groups.append({"params": trained[:cut], "lr": 0.003})
    kind: Any = getattr(torch.optim, case.optimizer)
    optimizer: Optimizer = kind(groups, lr=0.01, **case.options)
    return optimizer


def make_data(size: int) -> DataLoader[Any]:
    inputs = torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(inputs), size, shuffle=True)


def make_schedule(optimizer: Optimizer) -> LambdaLR:
    return LambdaLR(optimizer, lambda step: 1 / (1 + 0.3 * step))


def loss_of(model: nn.Module, batch: Any, dtype: torch.dtype) -> Tensor:
    outputs: Tensor = model(batch[0].to(dtype))
    return (outputs.float() - 0.3).pow(2).mean()


class Task(Trainer):
    """Pulls all outputs to one number."""

    dtype = torch.float32

    def training_step(self, model: nn.Module, batch: Any) -> Tensor:
        return loss_of(model, batch, self.dtype)


def fit(case: Case, folder: Path, resume: Path | None) -> dict[str, Any]:
    """Train with the Trainer; return all that is left."""
    model = make_model(case)
    precision: Any = FP16(init_scale=64.0) if case.precision == "fp16" else case.precision
    strategy: Any = case.strategy
    ema = EMA(average_buffers=case.strategy in ALONE)
    trainer = Task(
        max_epochs=1,
        precision=precision,
        strategy=strategy,
        gradient_accumulation_steps=case.accumulation,
        max_grad_norm=0.5 if case.clip else None,
        callbacks=[
            Checkpoint(every_n_steps=case.stop, background=case.background, keep_last=None),
            *([ema] if case.ema else []),
        ],
        output_dir=folder,
    )
    trainer.dtype = case.dtype
    trainer.fit(
        model,
        make_data(2 if case.strategy == "single" else 1),
        optimizer=partial(make_optimizer, case),
        lr_scheduler=make_schedule if case.schedule else None,
        resume=resume,
    )
    assert trainer.run is not None
    assert (trainer.run.checkpoints.resumed_from is None) == (resume is None)
    return everything(model, trainer.run.optimizer, ema._average)


def loop(case: Case, folder: Path, resume: Path | None) -> dict[str, Any]:
    """Train in a loop of one's own; return all that is left."""
    torch.manual_seed(3)
    accelerator = Accelerator(
        cpu=True,
        mixed_precision={"fp32": "no"}.get(case.precision, case.precision),
        gradient_accumulation_steps=case.accumulation,
    )
    bare = make_model(case)
    inner = make_optimizer(case, [p for p in bare.parameters() if p.requires_grad])
    model, optimizer, loader = accelerator.prepare(bare, inner, make_data(2))
    schedule = accelerator.prepare(make_schedule(inner)) if case.schedule else None
    batches, done = loader, 0
    if resume is not None:
        accelerator.load_state(resume)
        batches, done = accelerator.skip_first_batches(loader, case.stop), case.stop
    for batch in batches:
        with accelerator.accumulate(model):
            if case.optimizer == "LBFGS":
                optimizer.step(partial(_closure, accelerator, optimizer, model, batch, case.dtype))
            else:
                accelerator.backward(loss_of(model, batch, case.dtype))
                if case.clip and accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
            if schedule is not None:
                schedule.step()
            optimizer.zero_grad()
        done += 1
        if done == case.stop:
            accelerator.save_state(folder / "checkpoints" / "state")
    return everything(accelerator.unwrap_model(model), inner, [])


def _closure(
    accelerator: Accelerator, optimizer: Any, model: nn.Module, batch: Any, dtype: torch.dtype
) -> Tensor:
    optimizer.zero_grad()
    loss = loss_of(model, batch, dtype)
    accelerator.backward(loss)
    return loss.detach()


def everything(model: nn.Module, optimizer: Optimizer, average: list[Tensor]) -> dict[str, Any]:
    """Return parameters, buffers and the optimizer's state and settings, by a path."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    state = {names[id(p)]: values for p, values in optimizer.state.items()}
    groups = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    found = {**model.state_dict(), "state": state, "groups": groups, "average": average}
    return dict(leaves(found, ""))


def leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict | list | tuple):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        yield path, type(value).__name__
        for key, item in items:
            yield from leaves(item, f"{path}.{key}")
    elif isinstance(value, Tensor):
        local = value.to_local() if isinstance(value, DTensor) else value
        steps = [s for s, size in zip(local.stride(), local.shape, strict=True) if size > 1]
        content = local.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
        yield path, (str(value.dtype), tuple(value.shape), steps, content)
    else:
        yield path, repr(value)


def check(case: Case, folder: Path) -> None:
    """Raise where a run that resumes is not the run that was never stopped."""
    run = loop if case.strategy == "accelerator" else fit
    whole = run(case, folder, None)
    kept = sorted((folder / "checkpoints").glob("st*"))
    resumed = run(case, folder / "resumed", kept[0])
    different = [name for name in whole if resumed.get(name) != whole[name]]
    assert not different, (case, different)
    assert whole.keys() == resumed.keys(), case
    numbers = [v for v in whole.values() if type(v) is tuple]
    assert numbers, case


def check_seeds(rank: int, seeds: list[int], strategies: tuple[str, ...], folder: Path) -> None:
    for seed in seeds:
        case = draw(seed, strategies)
        try:
            check(case, folder / str(seed))
        except Exception as error:
            error.add_note(f"seed {seed}: {case}")
            raise


ALONE = ("single", "accelerator")
SHARED = ("ddp", "fsdp")
FEW, MANY = 12, 400
FEW_SHARED, MANY_SHARED = 2, 100

# Of what some of the modules return, nothing is changed in place.
VIEWS = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")


@pytest.mark.parametrize("first", range(0, FEW, 6))
def test_a_resumed_run_is_the_same_run(first: int, tmp_path: Path) -> None:
    check_seeds(0, list(range(first, first + 6)), ALONE, tmp_path)


@VIEWS
def test_a_resumed_run_of_two_processes_is_the_same_run(tmp_path: Path) -> None:
    run_ranks(2, check_seeds, list(range(FEW_SHARED)), SHARED, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(FEW, MANY, 25))
def test_many_resumed_runs_are_the_same_runs(first: int, tmp_path: Path) -> None:
    check_seeds(0, list(range(first, min(first + 25, MANY))), ALONE, tmp_path)


@pytest.mark.slow
@VIEWS
@pytest.mark.parametrize("first", range(0, MANY_SHARED, 25))
def test_many_resumed_runs_of_two_processes_are_the_same_runs(first: int, tmp_path: Path) -> None:
    seeds = list(range(first, first + 25))
    run_ranks(2, check_seeds, seeds, SHARED, tmp_path, timeout=600)


def test_every_optimizer_of_torch_is_drawn() -> None:
    base = torch.optim.Optimizer
    kinds = [k for k in vars(torch.optim).values() if isinstance(k, type) and issubclass(k, base)]
    assert {kind.__name__ for kind in kinds if kind is not base} == set(FLAGS)
    cases = [draw(seed, ALONE) for seed in range(MANY)]
    assert {case.optimizer for case in cases} == set(FLAGS)
    assert {case.module for case in cases} == set(MODULES)
