"""Tests of parameters that stay as they are until a step or an epoch."""

from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW

from tests.helpers.callbacks import FailsAt
from tests.helpers.ranks import run_ranks
from tests.helpers.tiers import with_few
from tests.helpers.toys import fit, make_trainer, toy_model
from trainkit import Callback, ConfigError, Run
from trainkit.callbacks import Checkpoint, FreezeUntil
from trainkit.strategies import FSDP

FIRST = ("0.weight", "0.bias")


class Trail(Callback):
    """Keeps, for each step, the parameters that had a gradient, and all values."""

    def __init__(self) -> None:
        self.trained: list[set[str]] = []
        self.values: list[dict[str, Tensor]] = []
        self.norms: list[Tensor] = []

    def on_gradients(self, run: Run) -> None:
        named = run.module.named_parameters()
        self.trained.append({name for name, p in named if p.grad is not None})

    def on_step_end(self, run: Run, result: Any) -> None:
        self.values.append(whole(run.module))
        self.norms.append(result.grad_norm)


def whole(model: nn.Module) -> dict[str, Tensor]:
    return {
        name: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone()
        for name, p in model.named_parameters()
    }


def train(freeze: FreezeUntil, **settings: Any) -> tuple[Trail, Run]:
    trail, stop = Trail(), FailsAt(settings.pop("stop_at", None), KeyboardInterrupt())
    resume = settings.pop("resume", None)
    precision = settings.pop("precision", "fp32")
    more = settings.pop("more", [])
    trainer = make_trainer(
        callbacks=[freeze, trail, stop, *more], max_grad_norm=0.5, precision=precision, **settings
    )
    with suppress(KeyboardInterrupt):
        fit(trainer, optimizer=partial(AdamW, lr=0.05, weight_decay=0.1), resume=resume)
    run = trainer.run
    assert run is not None
    trainer.close()
    return trail, run


def test_a_frozen_module_does_not_move_before_its_step() -> None:
    start = whole(toy_model())
    trail, run = train(FreezeUntil(step={"0": 3}))
    assert [names.isdisjoint(FIRST) for names in trail.trained] == [True] * 3 + [False] * 5
    for step, values in enumerate(trail.values, 1):
        same = all(torch.equal(values[name], start[name]) for name in FIRST)
        assert same == (step <= 3)  # no weight decay either
    ages = {id(p): int(state["step"]) for p, state in run.optimizer.state.items()}
    named = run.module.named_parameters()
    assert {name: ages[id(p)] for name, p in named} == {
        "0.weight": 5, "0.bias": 5, "2.weight": 8, "2.bias": 8,
    }  # fmt: skip
    assert all(p.requires_grad for p in run.module.parameters())


def test_epochs_and_layers_thaw_one_after_the_other() -> None:
    trail, _ = train(FreezeUntil(epoch={"0": 1}, step={"0.weight": 10, "*.bias": 2}), max_epochs=2)
    weight = [step for step, names in enumerate(trail.trained) if "0.weight" in names]
    bias = [step for step, names in enumerate(trail.trained) if "0.bias" in names]
    last = [step for step, names in enumerate(trail.trained) if "2.bias" in names]
    assert (weight[0], bias[0], last[0], len(trail.trained)) == (10, 8, 2, 16)


def test_what_ends_frozen_is_handed_back_trainable() -> None:
    _, run = train(FreezeUntil(epoch={"0": 9}))
    assert all(p.requires_grad for p in run.module.parameters())


def test_what_the_user_froze_stays_so() -> None:
    model = toy_model()
    model[0].bias.requires_grad_(False)  # type: ignore[index]
    trainer = make_trainer(callbacks=[FreezeUntil(step={"0": 2})])
    fit(trainer, model=model, optimizer=partial(AdamW, lr=0.05))
    assert not model[0].bias.requires_grad  # type: ignore[index]
    assert torch.equal(model[0].bias, toy_model()[0].bias)  # type: ignore[index]


def train_rank(rank: int, strategy: str, precision: str, **settings: Any) -> Any:
    if strategy == "fsdp":
        settings["strategy"] = FSDP(wrap_policy=[nn.Linear])
    freeze = FreezeUntil(step={"0": 3}, epoch={"2.bias": 1})
    trail, _ = train(
        freeze,
        precision=precision,
        max_epochs=2,
        # One micro-batch: torch then reduces in the dtype that it found at the first forward.
        gradient_accumulation_steps=1 if precision == "bf16" else 2,
        **{"split_batches": True, **settings},
    )
    return trail.trained, trail.values, trail.norms


@pytest.mark.parametrize(
    ("strategy", "precision", "size"),
    with_few(
        [("ddp", "fp16", 2)],
        [("ddp", "fp32", 2), ("ddp", "fp16", 2), ("fsdp", "fp32", 2), ("fsdp", "bf16", 2)],
    ),
)
def test_several_processes_train_the_same(strategy: str, precision: str, size: int) -> None:
    alone = run_ranks(1, train_rank, "single", precision)[0]
    results = run_ranks(size, train_rank, strategy, precision)
    for trained, values, norms in results:
        assert trained == alone[0]
        tolerance: dict[str, Any] = {} if precision == "fp32" else {"rtol": 0.05, "atol": 0.02}
        for mine, expected in zip(values, alone[1], strict=True):
            torch.testing.assert_close(mine, expected, **tolerance)
        assert [float(norm) for norm in norms] == pytest.approx(
            [float(norm) for norm in alone[2]], rel=1e-4 if precision == "fp32" else 0.1
        )


def resumed(rank: int, folder: Path, stop_at: int | None, resume: Any, strategy: str) -> Any:
    callbacks = [Checkpoint(every_n_steps=1)]
    return train_rank(
        rank,
        strategy,
        "fp32",
        more=callbacks,
        output_dir=folder,
        stop_at=stop_at,
        resume=resume,
        split_batches=False,
    )


WAYS = [("single", 1), ("ddp", 3), ("fsdp", 2)]


@pytest.mark.parametrize(("strategy", "size"), with_few([WAYS[0]], WAYS))
@pytest.mark.parametrize("stop_at", with_few([2], [2, 4]))
def test_a_resume_is_exact(strategy: str, size: int, stop_at: int, tmp_path: Path) -> None:
    expected = run_ranks(size, resumed, tmp_path / "whole", None, None, strategy)
    run_ranks(size, resumed, tmp_path / "cut", stop_at, None, strategy)
    found = run_ranks(size, resumed, tmp_path / "cut", None, "must", strategy)
    for mine, whole_run in zip(found, expected, strict=True):
        assert mine[0] == whole_run[0][-len(mine[0]) :]
        for name, value in whole_run[1][-1].items():
            assert torch.equal(mine[1][-1][name], value), name


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "nothing to freeze"),
        ({"step": {}}, "nothing to freeze"),
        ({"step": "encoder"}, "`step` must be a mapping"),
        ({"epoch": {"encoder": 0}}, r"`epoch\['encoder'\]` must be a whole number from 1 on"),
        ({"epoch": {"encoder": 1.5}}, "must be a whole number"),
        ({"epoch": {"": 1}}, "must name modules or parameters"),
    ],
)
def test_bad_arguments_are_refused(arguments: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        FreezeUntil(**arguments)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("0.wieght", r"no module or parameter '0.wieght'. The nearest names are \['0.weight'"),
        ("*", "freezes all 4 parameters"),
    ],
)
def test_names_that_cannot_work_are_refused_before_the_first_step(name: str, message: str) -> None:
    trainer = make_trainer(callbacks=[FreezeUntil(step={name: 1})])
    with pytest.raises(ConfigError, match=message):
        fit(trainer)
    assert trainer.run is not None
    assert trainer.run.state.step == 0
    assert all(p.requires_grad for p in trainer.run.module.parameters())


def test_a_name_that_is_not_trained_is_refused() -> None:
    model = toy_model()
    model[0].requires_grad_(False)  # type: ignore[index]
    with pytest.raises(ConfigError, match="'0', but what it matches is not trained at all"):
        fit(make_trainer(callbacks=[FreezeUntil(step={"0": 1})]), model=model)
