"""Sharded checkpoints: written by each process, read by any strategy on any number (2.31)."""

import shutil
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Dataset

from tests.helpers.callbacks import OfOneRun
from tests.helpers.ranks import RanksError, run_ranks
from tests.helpers.tiers import with_few
from trainkit import Callback, CheckpointError, Run, Trainer
from trainkit.callbacks import Checkpoint
from trainkit.checkpoint import CheckpointStore

GLOBAL_BATCH = 12
SAVED, STEPS = 4, 14


class Rows(Dataset[tuple[Tensor, Tensor]]):
    """Sums of random numbers."""

    def __len__(self) -> int:
        return 10 * GLOBAL_BATCH

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        inputs = torch.randn(5, generator=torch.Generator().manual_seed(index))
        return inputs, inputs.sum().reshape(1)


class Net(nn.Module):
    """Blocks whose rows no number of processes divides, tied weights, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(5, 7)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(7, 7), nn.Tanh(), nn.LayerNorm(7)) for _ in range(2)
        )
        self.tied = nn.Linear(7, 7)
        self.tied.weight = self.first_square = nn.Parameter(torch.randn(7, 7) / 3)
        self.last = nn.Linear(7, 1)
        self.register_buffer("scale", torch.tensor([0.5]))

    def forward(self, inputs: Tensor) -> Tensor:
        hidden: Tensor = self.first(inputs)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        output: Tensor = self.scale * self.last(self.tied(torch.tanh(hidden @ self.first_square)))
        return output


class Average:
    """An average of the weights, wherever they lie."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.values: dict[str, Tensor] = {}

    def update(self) -> None:
        self.values = self._now()
        with torch.no_grad():
            for name, parameter in self.module.named_parameters():
                self.values[name].lerp_(parameter, 0.5)

    def state_dict(self) -> dict[str, Any]:
        return {"values": self._now()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        places = {name: p.device for name, p in self.module.named_parameters()}
        self.values = {name: value.to(places[name]) for name, value in state["values"].items()}

    def _now(self) -> dict[str, Tensor]:
        return self.values or {n: p.detach().clone() for n, p in self.module.named_parameters()}


class Losses(OfOneRun):
    """Keeps the losses, and the whole state as it is at a step."""

    def __init__(self, average: Average) -> None:
        self.average = average
        self.losses: list[float] = []
        self.loaded: dict[str, Tensor] = {}

    def on_checkpoint_loaded(self, run: Run, path: Path) -> None:
        self.loaded = whole_state(run, self.average)

    def on_step_end(self, run: Run, result: Any) -> None:
        self.losses.append(
            run.strategy.processes.all_reduce(result.loss.detach().double(), "mean").item()
        )
        self.average.update()


def whole(tensor: Tensor) -> Tensor:
    """Return all of a tensor."""
    full = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return full.detach().clone()


def whole_state(run: Run, average: Average) -> dict[str, Tensor]:
    """Return the full tensors of model, optimizer and average; a collective."""
    names = {id(p): name for name, p in run.module.named_parameters()}
    found = {f"model.{name}": whole(t) for name, t in run.module.state_dict().items()}
    for parameter, values in run.optimizer.state.items():
        found |= {f"optimizer.{names[id(parameter)]}.{k}": whole(v) for k, v in values.items()}
    return found | {
        f"average.{name}": whole(t) for name, t in average.state_dict()["values"].items()
    }


class Squares(Trainer):
    def training_step(self, model: nn.Module, batch: Any) -> Tensor:
        return nn.functional.mse_loss(model(batch[0]), batch[1])


def fit(
    rank: int, folder: Path, strategy: str, size: int, resume: str | None, steps: int, **save: Any
) -> dict[str, Any]:
    model = Net()
    average = Average(model)
    losses = Losses(average)
    trainer = Squares(
        max_steps=steps,
        strategy=strategy,  # type: ignore[arg-type]
        callbacks=[losses, Checkpoint(every_n_steps=steps, **save)],
        output_dir=folder,
        max_grad_norm=1.0,
    )
    trainer.register_for_checkpointing(average=average)
    trainer.fit(
        model,
        DataLoader(Rows(), GLOBAL_BATCH // size, shuffle=True),
        optimizer=partial(AdamW, lr=1e-2),
        lr_scheduler=lambda o: LambdaLR(o, lambda step: 1 / (1 + 0.1 * step)),
        resume=resume,
        schedule="keep" if resume else None,
    )
    assert trainer.run is not None
    state = whole_state(trainer.run, average)
    trainer.close()
    return {"losses": losses.losses, "loaded": losses.loaded, "state": state}


def start(
    folder: Path, strategy: str, size: int, resume: str | None, steps: int, **save: Any
) -> Any:
    return run_ranks(size, fit, folder, strategy, size, resume, steps, **save)


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert not [name for name in found if not torch.equal(found[name], expected[name])]


PAIRS = [
    (("fsdp", 2), ("fsdp", 1)),
    (("fsdp", 2), ("fsdp", 2)),
    (("fsdp", 2), ("fsdp", 3)),
    (("fsdp", 2), ("fsdp", 4)),
    (("fsdp", 2), ("ddp", 2)),
    (("fsdp", 2), ("single", 1)),
    (("ddp", 2), ("fsdp", 2)),
    (("single", 1), ("fsdp", 3)),
]


Saved = Callable[[str, int], tuple[Path, Any]]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """Return what makes a run that stops early, once for each strategy and size."""

    @cache
    def save(strategy: str, size: int) -> tuple[Path, Any]:
        folder = tmp_path_factory.mktemp(f"{strategy}-{size}")
        return folder, start(folder, strategy, size, None, SAVED)[0]

    return save


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    folder = tmp_path_factory.mktemp("whole")
    losses: list[float] = start(folder, "single", 1, None, STEPS)[0]["losses"]
    return losses


@pytest.mark.filterwarnings("ignore:FSDP gains nothing")
@pytest.mark.parametrize(("saver", "loader"), with_few([PAIRS[5]], PAIRS))
def test_any_strategy_loads_what_any_has_saved(
    saver: tuple[str, int],
    loader: tuple[str, int],
    saved: Saved,
    undisturbed: list[float],
    tmp_path: Path,
) -> None:
    folder, before = saved(*saver)
    (path,) = (entry.path for entry in CheckpointStore(folder / "checkpoints").checkpoints())
    for of_rank in start(tmp_path, *loader, str(path), STEPS):
        assert_equal(of_rank["loaded"], before["state"])
        assert of_rank["losses"] == pytest.approx(undisturbed[SAVED:], abs=1e-6)


def resume_damaged(rank: int, folder: Path) -> str:
    before = Net().state_dict()
    model = Net()
    trainer = Squares(max_steps=9, strategy="fsdp", callbacks=[Checkpoint()], output_dir=folder)
    trainer.register_for_checkpointing(average=Average(model))
    with pytest.raises(CheckpointError) as caught:
        trainer.fit(
            model,
            DataLoader(Rows(), GLOBAL_BATCH // 2, shuffle=True),
            optimizer=partial(AdamW, lr=1e-2),
            lr_scheduler=lambda o: LambdaLR(o, lambda step: 1.0),
            resume=str(folder / "checkpoints" / f"step-{SAVED:08d}"),
            schedule="keep",
        )
    found = {name: whole(tensor) for name, tensor in model.state_dict().items()}
    assert_equal(found, before)
    return str(caught.value)


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("file", "damage", "message"),
    [
        ("optimizer-shard-00001.safetensors", None, "is missing"),
        ("model-shard-00000.safetensors", b"?", "its content has changed"),
        ("trainer-shard-00001.safetensors", b"longer", "bytes, but"),
    ],
)
def test_a_damaged_shard_is_named_before_anything_is_applied(
    file: str,
    damage: bytes | None,
    message: str,
    saved: Saved,
    tmp_path: Path,
) -> None:
    shutil.copytree(saved("fsdp", 2)[0], tmp_path, dirs_exist_ok=True)
    path = tmp_path / "checkpoints" / f"step-{SAVED:08d}" / file
    content = path.read_bytes()
    path.unlink()
    if damage is not None:
        path.write_bytes(content[:-1] + damage)
    for text in run_ranks(2, resume_damaged, tmp_path):
        assert f"`{file}`" in text
        assert message in text


class Odd(Callback):
    """Has a sharded tensor on process 0 alone."""

    def on_fit_start(self, run: Run) -> None:
        self.run = run

    def state_dict(self) -> dict[str, Any]:
        if not hasattr(self, "run"):
            return {}
        value = next(self.run.module.parameters()).detach()
        return {"value": value} if self.run.is_main_process else {}


def save_oddly(rank: int, folder: Path) -> None:
    trainer = Squares(
        max_steps=1, strategy="fsdp", callbacks=[Odd(), Checkpoint()], output_dir=folder
    )
    trainer.fit(Net(), DataLoader(Rows(), 2), optimizer=partial(AdamW, lr=1e-2))


@pytest.mark.e2e
def test_sharded_tensors_that_only_some_processes_have_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RanksError, match="other sharded tensors on other processes") as caught:
        run_ranks(2, save_oddly, tmp_path)
    assert len(caught.value.failures) == 2
    assert not list(tmp_path.glob("checkpoints/step-*"))
