"""Models that come parallel train as they do on one process, whatever their mesh."""

import math
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils.data import DataLoader, Dataset, TensorDataset
from typing_extensions import override

from tests.helpers.ranks import RanksError, in_turn, run_ranks
from tests.strategies.toys import Figures, full
from trainkit import Callback, ConfigError, Run, StepResult, Trainer
from trainkit.callbacks import Checkpoint
from trainkit.checkpoint.format.tensor_location import check_tiling
from trainkit.checkpoint.resharding.sharding_spec import ShardingSpec

# Said of modules whose output nobody changes in place.
pytestmark = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor")

SAMPLES, BATCH = 43, 16  # the last global batch of an epoch has 11


class Net(nn.Module):
    """Has parts that are cut by columns and rows, along the sequence, and left as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 8)
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)
        self.norm = nn.LayerNorm(8)
        self.mix = nn.Linear(8, 8)
        self.head = nn.Linear(16, 3)

    @override
    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs.view(-1, 2, 3))
        hidden = self.norm(self.down(nn.functional.gelu(self.up(hidden))))
        logits: Tensor = self.head(self.mix(hidden).flatten(1))
        return logits


def net(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(3)
    return Net().to(dtype)


def cut(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Cut a model over the dimension `tp` of a mesh."""
    plan: dict[str, Any] = {
        "up": ColwiseParallel(),
        "down": RowwiseParallel(output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "mix": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    parallelize_module(model, mesh["tp"], plan)
    return model


def plain(model: nn.Module, sizes: tuple[int, int]) -> nn.Module:
    return model


def tensor(model: nn.Module, sizes: tuple[int, int]) -> nn.Module:
    return cut(model, init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "tp")))


def sharded(model: nn.Module, sizes: tuple[int, int]) -> nn.Module:
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "tp"))
    cut(model, mesh)
    fully_shard(model.get_submodule("up"), mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    return model


@dataclass
class Case:
    make: Callable[[nn.Module, tuple[int, int]], nn.Module] = plain
    sizes: tuple[int, int] = (1, 1)
    dtype: torch.dtype = torch.float32
    accumulation: int = 1
    steps: int = 6
    options: dict[str, Any] = field(default_factory=dict)


@dataclass
class Outcome:
    losses: list[float]
    norms: list[float]
    metrics: dict[str, float]
    rows: list[int]
    weights: dict[str, Tensor]


def data(dtype: torch.dtype, samples: int = SAMPLES) -> TensorDataset:
    generator = torch.Generator().manual_seed(7)
    features = torch.randn(samples, 6, generator=generator).to(dtype)
    return TensorDataset(features, torch.randint(0, 3, (samples,), generator=generator))


def train(rank: int, case: Case) -> Outcome:
    groups = case.sizes[0]
    figures = Figures()
    trainer = Trainer(
        max_steps=case.steps,
        strategy="single" if case.make is plain else "model_parallel",
        gradient_accumulation_steps=case.accumulation,
        callbacks=[figures],
        log_every_n_steps=1,
        **{"max_grad_norm": 0.5, **case.options},
    )
    model = case.make(net(case.dtype), case.sizes)  # the processes have met by now
    trainer.register_for_checkpointing(also=model)  # what holds `DTensor`s may be registered
    source = data(case.dtype)
    trainer.fit(
        model,
        (
            DataLoader(source, batch_size=BATCH // groups // case.accumulation, shuffle=True),
            DataLoader(source, batch_size=5),  # which leaves the parameters sharded
        ),
        optimizer=partial(torch.optim.AdamW, lr=1e-2),
        loss_fn=nn.functional.cross_entropy,
    )
    metrics = trainer.evaluate(model, DataLoader(source, batch_size=5), metrics=["accuracy"])
    classes = trainer.predict(model, DataLoader(source, batch_size=4), outputs="classes")
    weights = {name: full(p) for name, p in model.named_parameters()}
    return Outcome(figures.losses, figures.norms, metrics, classes.tolist(), weights)


def difference(one: Outcome, other: Outcome) -> dict[str, float]:
    """Return the largest differences of two trainings."""
    assert one.rows == other.rows
    assert one.metrics.keys() == other.metrics.keys()
    assert one.weights.keys() == other.weights.keys()

    def most(a: Any, b: Any) -> float:
        return max((abs(x - y) for x, y in zip(a, b, strict=True)), default=0.0)

    weights = (one.weights[n] - other.weights[n] for n in one.weights)
    return {
        "loss": most(one.losses, other.losses),
        "norm": most(one.norms, other.norms),
        "metric": most(one.metrics.values(), other.metrics.values()),
        "weight": max(float(each.abs().max()) for each in weights),
    }


def compare(size: int, cases: list[Case]) -> None:
    alone = [replace(case, make=plain, sizes=(1, 1)) for case in cases]
    expected = run_ranks(1, in_turn, train, [(case,) for case in alone])[0]
    found = run_ranks(size, in_turn, train, [(case,) for case in cases])
    for number, case in enumerate(cases):
        for of_rank in found:
            differences = difference(expected[number], of_rank[number])
            print(case.make.__name__, case.sizes, case.accumulation, case.dtype, differences)
            limit = 1e-5 if case.dtype == torch.float32 else 1e-12
            assert max(differences.values()) <= limit, (case, differences)
            assert of_rank[number].norms == found[0][number].norms


@pytest.mark.e2e
def test_two_processes_that_hold_a_model_together_train_as_one() -> None:
    compare(2, [Case(tensor, (1, 2)), Case(tensor, (1, 2), torch.float64, accumulation=2)])


@pytest.mark.e2e
def test_groups_of_such_processes_share_the_samples() -> None:
    values = {"max_grad_norm": None, "max_grad_value": 0.01}
    compare(
        4,
        [
            Case(tensor, (2, 2), torch.float64, accumulation=2),
            Case(sharded, (2, 2), torch.float64, accumulation=2),
            Case(tensor, (2, 2), options=values),
        ],
    )


@pytest.mark.slow
def test_twenty_steps_are_those_of_one_process() -> None:
    layouts = [(tensor, (2, 2)), (sharded, (2, 2)), (sharded, (4, 1))]
    cases = [Case(*one, accumulation=n, steps=20) for one in layouts for n in (1, 2)]
    compare(4, cases)


class Odd(Dataset[Any]):
    """Gives each process other samples."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.full((6,), float(index + self.rank)), 0


class Partly(nn.Module):
    """Has a bias, or statistics, of what is cut over the processes, and knows of no cut."""

    def __init__(self, mesh: DeviceMesh, *, normalizes: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Linear(6, 4)
        self.down = nn.Linear(4, 3)
        parallelize_module(self, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
        self.norm = nn.BatchNorm1d(2, affine=False) if normalizes else nn.Identity()
        self.shift = nn.Parameter(torch.zeros(2), requires_grad=not normalizes)

    @override
    def forward(self, inputs: Tensor) -> Tensor:
        logits: Tensor = self.down(torch.tanh(self.norm(self.up(inputs)) + self.shift))
        return logits


class Adapted(Partly):
    """Has an adapter that sees a part of what it works on, of which one half begins as 0."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__(mesh)
        self.mesh, self.shift = mesh, None  # type: ignore[assignment]
        self.first = nn.Parameter(torch.ones(2))
        self.second = nn.Parameter(torch.zeros(3))

    @override
    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.tanh(self.up(inputs))
        own = DTensor.from_local(hidden * self.first, self.mesh, [Partial()])
        logits: Tensor = self.down(hidden) + own.full_tensor().sum(1, keepdim=True) * self.second
        return logits


class Tied(nn.Module):
    """Gives out what comes in, by one weight that stands in two modules, each sharded by itself."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False)
        for module in (self.up, self.down, self):
            fully_shard(module, mesh=mesh)
        self.down.weight = self.up.weight

    @override
    def forward(self, inputs: Tensor) -> Tensor:
        logits: Tensor = self.down(torch.tanh(self.up(inputs)))
        return logits


def refused(rank: int) -> dict[str, str]:
    """Return what is said of models, precisions and data that do not fit."""

    def said(
        model: nn.Module, samples: Any = None, optimizer: Any = torch.optim.SGD, **options: Any
    ) -> str:
        trainer = Trainer(max_steps=3, callbacks=[], strategy="model_parallel", **options)
        with pytest.raises(ConfigError) as caught:
            trainer.fit(
                model,
                DataLoader(data(torch.float32) if samples is None else samples, batch_size=4),
                optimizer=partial(optimizer, lr=0.1),
                loss_fn=nn.functional.cross_entropy,
            )
        return str(caught.value)

    found = {"whole": said(net())}
    half = DeviceMesh("cpu", [0])
    found["half"] = said(parallelize_module(net(), half, {"up": ColwiseParallel()}))
    found["fp16"] = said(tensor(net(), (1, 2)), precision="fp16")
    torch.manual_seed(rank)
    found["seeds"] = said(tensor(Net(), (1, 2)))
    mesh = init_device_mesh("cpu", (2,))
    found["partial"] = said(Partly(mesh))
    found["adapter"] = said(Adapted(mesh))
    found["tied"] = said(Tied(mesh))
    found["statistics"] = said(Partly(mesh, normalizes=True))
    found["closure"] = said(tensor(net(), (1, 2)), optimizer=torch.optim.LBFGS)
    found["data"] = said(tensor(net(), (1, 2)), Odd(rank))
    return found


@pytest.mark.e2e
def test_what_does_not_fit_is_refused_in_a_sentence() -> None:
    found = run_ranks(2, refused)[0]
    print(*found.values(), sep="\n")
    assert "whole on every process" in found["whole"]
    assert "do not divide the 2 of this job" in found["half"]
    assert "no scale for parameters on several meshes" in found["fp16"]
    assert "differ between them (`first.weight`" in found["seeds"]
    assert "have other gradients or values on each after a step" in found["partial"]
    assert "(`shift`)" in found["partial"]
    assert "gradients or values on each after a step (`first`)" in found["adapter"]
    assert "`up.weight` of `Tied` is tied" in found["tied"]
    assert "(`norm.running_mean`, `norm.running_var`)" in found["statistics"]
    assert "`LBFGS` joins all parameters" in found["closure"]
    assert "the same batch" in found["data"]


class Moment(Callback):
    """Keeps what a run holds when it begins and when it ends, put together."""

    def __init__(self) -> None:
        self.held: list[dict[str, Tensor]] = []

    def _keep(self, run: Run) -> None:
        found = {name: full(p) for name, p in run.module.named_parameters()}
        names = {id(p): name for name, p in run.module.named_parameters()}
        for p, state in run.optimizer.state.items():
            found |= {f"{names[id(p)]}.{key}": full(value) for key, value in state.items()}
        self.held.append(found)

    on_fit_start = on_fit_end = _keep


def resumed(
    rank: int, case: Case, folder: Path, steps: int, resume: Any, *others: Callback
) -> list[dict[str, Tensor]]:
    """Train up to a step, perhaps from a checkpoint; return what was held before and after."""
    moment = Moment()
    trainer = Trainer(
        max_steps=steps,
        strategy="fsdp" if case.make is plain else "model_parallel",
        callbacks=[Checkpoint(every_n_steps=3), moment, *others],
        output_dir=folder,
    )
    model = case.make(net(case.dtype), case.sizes)
    loader = DataLoader(data(case.dtype), batch_size=BATCH // case.sizes[0], shuffle=True)
    trainer.fit(
        model,
        loader,
        optimizer=partial(torch.optim.AdamW, lr=1e-2),
        loss_fn=nn.functional.cross_entropy,
        resume=resume,
        schedule=resume and "keep",
    )
    return moment.held


def pieces(rank: int) -> None:
    Trainer(max_steps=1, callbacks=[], strategy="ddp")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    cases: list[tuple[Any, tuple[Any, ...], tuple[int, ...]]] = [
        (mesh, (_StridedShard(0, split_factor=2), Shard(0)), (8, 3)),
        (mesh, (_StridedShard(0, split_factor=2), Shard(0)), (11, 3)),
        (mesh, (Replicate(), _StridedShard(1, split_factor=2)), (3, 8)),
        (mesh, (Shard(0), _StridedShard(0, split_factor=2)), (17, 2)),
        (mesh["tp"], (_StridedShard(1, split_factor=3),), (2, 13)),
        (mesh["dp"], (Shard(0),), (5, 2)),
    ]
    for of, placements, shape in cases:
        whole = torch.arange(math.prod(shape)).view(shape)
        tensor = distribute_tensor(whole, of, placements, src_data_rank=None)
        spec = ShardingSpec.of(tensor)
        for region, place in spec.pieces():
            assert torch.equal(tensor.to_local()[place], whole[region.index]), (placements, shape)
        assert torch.equal(spec.cut(whole).to_local(), tensor.to_local())
        check_tiling(shape, tuple(region for _, _, region in spec.owners()))


def between_layouts(rank: int, folder: Path) -> dict[str, list[dict[str, Tensor]]]:
    """Save on one layout, and resume on others of the same processes."""
    pieces(rank)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = cut(net(), mesh)
    parallelize_module(model, mesh["dp"], {"first": ColwiseParallel()})
    with pytest.raises(ConfigError, match="meshes that do not fit together"):
        resumed(rank, Case(lambda *_: model, (2, 2)), folder / "none", 1, None)
    cases = {
        "tensor": Case(tensor, (2, 2), torch.float64),
        "sharded": Case(sharded, (2, 2), torch.float64),
        "shards": Case(sharded, (4, 1), torch.float64),
        "fsdp": Case(plain, (4, 1), torch.float64),
    }
    found = {"never stopped": resumed(rank, cases["tensor"], folder / "whole", 5, None)}
    for first, second in (("tensor", "sharded"), ("sharded", "fsdp"), ("shards", "tensor")):
        place = folder / first
        found[f"{first} saved"] = resumed(rank, cases[first], place, 3, None)
        found[f"{first} on {second}"] = resumed(rank, cases[second], place, 5, "must")
    return found


@pytest.mark.e2e
def test_a_checkpoint_is_that_of_any_layout(tmp_path: Path) -> None:
    found = run_ranks(4, between_layouts, tmp_path)[0]
    expected = found["never stopped"][-1]
    for name, (before, after) in found.items():
        if " on " in name:
            saved = found[f"{name.split()[0]} saved"][-1]
            weights = before.keys() & saved.keys()
            assert len(weights) > 30
            assert all(torch.equal(before[key], saved[key]) for key in weights), name
            apart = [float((after[key] - expected[key]).abs().max()) for key in expected]
            print(name, max(apart))
            assert max(apart) < 1e-12, name


class Killed(Callback):
    """Kills process 1 after 5 steps."""

    @override
    def on_step_end(self, run: Run, result: StepResult) -> None:
        if run.state.step == 5 and run.processes.process_index == 1:
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
def test_a_job_that_was_killed_goes_on_with_another_layout(tmp_path: Path) -> None:
    of_two, of_four = Case(tensor, (1, 2), torch.float64), Case(sharded, (2, 2), torch.float64)
    expected = run_ranks(2, resumed, of_two, tmp_path / "whole", 9, None)[0][-1]
    with pytest.raises(RanksError):
        run_ranks(4, resumed, of_four, tmp_path / "killed", 9, None, Killed())
    found = run_ranks(2, resumed, of_two, tmp_path / "killed", 9, "must")[0][-1]
    apart = [float((found[key] - expected[key]).abs().max()) for key in expected]
    assert max(apart) < 1e-12
