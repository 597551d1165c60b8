"""What a loss depends on is trained and saved, or refused before the first update."""

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import AdamW, Optimizer
from torch.utils.data import DataLoader, TensorDataset

from tests.helpers.ranks import run_ranks
from tests.helpers.tiers import with_few
from trainkit import Run, Trainer
from trainkit.callbacks import Checkpoint
from trainkit.checkpoint import CheckpointStore
from trainkit.errors import ConfigError
from trainkit.strategies import DDP, FSDP, Strategy

SAMPLES, WIDTH, CLASSES, WINDOW, LIMIT = 28, 4, 3, 12, 1e-12


class Angles(nn.Module):
    """Compares embeddings with one direction for each class, which it learns."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.weight = nn.Parameter(torch.randn(CLASSES, WIDTH, dtype=torch.float64))

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(F.normalize(outputs) @ F.normalize(self.weight).T * 4, targets)


class Embedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2)).double()

    def forward(self, inputs: Tensor) -> Tensor:
        for block in self.blocks:
            inputs = torch.tanh(block(inputs))
        return inputs


class WithLoss(Embedding):
    """The loss is a part of the model, which is called beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.loss_fn = Angles()


def make_data() -> TensorDataset:
    generator = torch.Generator().manual_seed(2)
    inputs = torch.randn(SAMPLES, WIDTH, dtype=torch.float64, generator=generator)
    return TensorDataset(inputs, torch.randint(0, CLASSES, (SAMPLES,), generator=generator))


def adamw(parameters: Any) -> Optimizer:
    return AdamW(parameters, lr=0.05)


def optimizer_for(kind: str, model: WithLoss) -> Any:
    if kind == "own":
        return adamw([*model.blocks.parameters(), *model.loss_fn.parameters()])
    return {"blocks": adamw, "loss_fn": adamw} if kind == "several" else adamw


def fit(
    kind: str,
    strategy: Strategy,
    batch: int,
    accumulation: int,
    folder: Path | None = None,
    **options: Any,
) -> tuple[list[Tensor], float]:
    model = WithLoss()
    trainer = Trainer(
        max_epochs=2,
        gradient_accumulation_steps=accumulation,
        strategy=strategy,
        callbacks=[] if folder is None else [Checkpoint(every_n_steps=2, keep_last=None)],
        output_dir=folder,
    )
    loader = DataLoader(make_data(), batch)
    optimizer = optimizer_for(kind, model)
    trainer.fit(model, loader, optimizer=optimizer, loss_fn=model.loss_fn, **options)
    loss = trainer.evaluate(model, loader)["eval/loss"]
    found: list[Any] = [*model.parameters()]
    whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in found]
    trainer.close()
    return [p.detach().cpu().clone() for p in whole], loss


STRATEGIES: dict[str, Callable[[], Strategy]] = {
    "ddp": DDP,
    "unused": lambda: DDP(find_unused_parameters=True),
    "fsdp": FSDP,
}


def fit_all(rank: int, size: int) -> dict[Any, Any]:
    return {
        (kind, strategy): fit(kind, make(), WINDOW // size // 2, 2)
        for kind in ("callable", "own", "several")
        for strategy, make in list(STRATEGIES.items())[: size + 1]  # FSDP has nothing to do alone
    }


@pytest.mark.parametrize("size", with_few([1], [1, 3]))
def test_a_loss_that_is_a_part_of_the_model_is_trained(size: int) -> None:
    results = run_ranks(size, fit_all, size)
    model, (inputs, targets) = WithLoss(), make_data().tensors
    optimizer = adamw(model.parameters())
    for first in (*range(0, SAMPLES, WINDOW), *range(0, SAMPLES, WINDOW)):
        optimizer.zero_grad()
        part = slice(first, first + WINDOW)
        model.loss_fn(model(inputs[part]), targets[part]).backward()
        optimizer.step()
    loss = model.loss_fn(model(inputs), targets).item()
    for found in results:
        for case, (parameters, mean) in found.items():
            assert mean == pytest.approx(loss, rel=1e-9), case
            for ours, theirs in zip(parameters, model.parameters(), strict=True):
                torch.testing.assert_close(ours, theirs.detach(), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", ["callable", "several"])
def test_a_loss_that_learns_is_saved_and_comes_back(kind: str, tmp_path: Path) -> None:
    whole = fit(kind, DDP(), 4, 1, tmp_path)
    store = CheckpointStore(tmp_path / "checkpoints")
    checkpoint = store.open(store.checkpoints()[0].path)
    assert "loss_fn.weight" in checkpoint.read("model")
    resumed = fit(kind, DDP(), 4, 1, resume=checkpoint.path)
    assert whole[1] == resumed[1]
    assert all(map(torch.equal, whole[0], resumed[0]))


# What is not in the model.


class Holding(Trainer):
    """Has a module of its own, or makes one in the first step."""

    where = ""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        if self.where == "trainer":
            self.head = nn.Linear(WIDTH, CLASSES).double().to(self.strategy.device)

    def training_step(self, model: nn.Module, batch: Any) -> Any:
        assert isinstance(self.run, Run)
        holder: Any = self if self.where == "trainer" else self.run.module
        if not hasattr(holder, "head"):
            holder.head = nn.Linear(WIDTH, CLASSES).double().to(batch[0].device)
        return F.cross_entropy(holder.head(model(batch[0])), batch[1])


class OfTrainer(Holding):
    where = "trainer"


class OfStep(Holding):
    where = "step"


class Late(Embedding):
    """Makes a module in its first forward."""

    def forward(self, inputs: Tensor) -> Tensor:
        if not hasattr(self, "late"):
            self.late = nn.Linear(WIDTH, CLASSES).double().to(inputs.device)
        found: Tensor = self.late(super().forward(inputs))
        return found


def scaled(outputs: Tensor, targets: Tensor, *, weight: Tensor) -> Tensor:
    return F.cross_entropy(outputs[:, :CLASSES] * weight, targets)


angles = Angles()


def by_angles(outputs: Tensor, targets: Tensor) -> Any:
    return angles.to(outputs.device)(outputs, targets)


STRAYS: dict[str, tuple[type[Trainer], type[nn.Module], Any, str]] = {
    "module": (Trainer, Embedding, Angles(), r"1 parameters .*`loss_fn.weight`"),
    "function": (Trainer, Embedding, by_angles, r"`one of the shape \(3, 4\)`"),
    "bound": (
        Trainer,
        Embedding,
        partial(scaled, weight=nn.Parameter(torch.ones(CLASSES).double())),
        r"`one of the shape \(3,\)`",
    ),
    "trainer": (OfTrainer, Embedding, None, "2 parameters .*`head.bias`, `head.weight`"),
    "step": (OfStep, Embedding, None, "2 parameters .*`head.bias`, `head.weight`"),
    "forward": (Trainer, Late, nn.CrossEntropyLoss(), "`late.bias`, `late.weight`"),
}


def stray(rank: int, name: str, strategy: str, batch: int, accumulation: int) -> None:
    kind, model, loss_fn, _ = STRAYS[name]
    trainer = kind(
        max_epochs=1,
        callbacks=[],
        gradient_accumulation_steps=accumulation,
        strategy=STRATEGIES[strategy](),
    )
    trainer.fit(model(), DataLoader(make_data(), batch), optimizer=adamw, loss_fn=loss_fn)


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("name", STRAYS)
def test_parameters_that_nothing_trains_are_refused(name: str, accumulation: int) -> None:
    with pytest.raises(ConfigError, match=STRAYS[name][-1] + r"[\s\S]*requires_grad_\(False\)"):
        stray(0, name, "ddp", 4, accumulation)


def all_strays(rank: int, strategy: str) -> dict[str, str]:
    told = {}
    for name in STRAYS:
        with pytest.raises(ConfigError) as caught:
            stray(rank, name, strategy, 3, 2)
        told[name] = str(caught.value)
    return told


@pytest.mark.parametrize("strategy", with_few(["fsdp"], STRATEGIES))
def test_they_are_refused_on_all_processes(strategy: str) -> None:
    for told in run_ranks(2, all_strays, strategy):
        for name, (*_, words) in STRAYS.items():
            assert re.search(words, told[name]), told[name]


def test_what_is_not_to_learn_is_no_stray() -> None:
    loss_fn = Angles().requires_grad_(False)
    before = loss_fn.weight.clone()
    trainer = Trainer(max_epochs=1, callbacks=[])
    loader = DataLoader(make_data(), 4)
    trainer.fit(Embedding(), loader, optimizer=adamw, loss_fn=loss_fn)
    assert torch.equal(loss_fn.weight, before)


def test_an_optimizer_of_a_loss_outside_of_the_model_says_where_it_belongs() -> None:
    model, loss_fn = Embedding(), Angles()
    optimizer = adamw([*model.parameters(), *loss_fn.parameters()])
    trainer = Trainer(max_epochs=1, callbacks=[])
    with pytest.raises(ConfigError, match=r"a loss that learns a part of it: `self\.loss_fn"):
        trainer.fit(model, DataLoader(make_data(), 4), optimizer=optimizer, loss_fn=loss_fn)


class WithOwnOptimizer(Trainer):
    """Updates a critic by hand, beside what the trainer trains."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.critic = nn.Linear(WIDTH, 1).double().to(self.strategy.device)
        self.by_hand = adamw(self.critic.parameters())

    def training_step(self, model: nn.Module, batch: Any) -> Any:
        self.by_hand.zero_grad()
        embedded = model(batch[0])
        self.critic(embedded.detach()).mean().backward()
        self.by_hand.step()
        return -self.critic(embedded).mean()


def test_what_an_optimizer_of_the_users_own_holds_is_no_stray() -> None:
    trainer = WithOwnOptimizer(max_epochs=1, callbacks=[])
    result = trainer.fit(Embedding(), DataLoader(make_data(), 4), optimizer=adamw)
    assert result.step == SAMPLES // 4


class Growing(Embedding):
    """Thaws a block in the second epoch, or makes a layer there."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.windows = kind, 0
        self.late: nn.Module | None = None
        self.blocks[0].requires_grad_(kind == "makes")

    def forward(self, inputs: Tensor) -> Tensor:
        self.windows += self.training
        if self.windows > 4:
            self.blocks[0].requires_grad_(True)
            if self.kind == "makes" and self.late is None:
                self.late = nn.Linear(WIDTH, WIDTH).double()
        outputs = super().forward(inputs)
        return outputs if self.late is None else outputs + self.late(inputs)


@pytest.mark.parametrize("kind", ["thaws", "makes"])
@pytest.mark.parametrize("ends", [{"max_epochs": 3}, {"max_steps": 6}], ids=["epochs", "steps"])
def test_what_begins_to_train_and_no_optimizer_holds_is_named_once(
    kind: str, ends: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    def fit(optimizer: Any, model: Growing) -> str:
        loader = DataLoader(make_data(), batch_size=7)
        trainer = Trainer(callbacks=[], **ends)
        trainer.fit(model, loader, optimizer=optimizer, loss_fn=nn.CrossEntropyLoss())
        return "".join(capsys.readouterr())

    said = fit(adamw, Growing(kind))
    layer = "blocks.0" if kind == "thaws" else "late"
    assert said.count("but stay as they are") == 1
    assert f"`{layer}.bias`, `{layer}.weight`. They were frozen or missing" in said
    model = Growing("thaws")
    assert "stay as they are" not in fit(adamw(model.parameters()), model)  # holds the frozen block


def test_what_was_left_out_of_the_optimizer_from_the_start_is_not_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    model, loader = Embedding(), DataLoader(make_data(), batch_size=7)
    trainer = Trainer(max_epochs=2, callbacks=[])
    optimizer = adamw(model.blocks[1].parameters())
    trainer.fit(model, loader, optimizer=optimizer, loss_fn=nn.CrossEntropyLoss())
    assert "stay as they are" not in "".join(capsys.readouterr())
