"""DDP reduces as torch does, and a resume adds up in the same order (rule 30)."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.utils.data import DataLoader, TensorDataset
from typing_extensions import override

from tests.helpers.ranks import in_turn, run_ranks
from tests.helpers.tiers import with_few
from trainkit import Accelerator, DistributedDataParallelKwargs, Trainer
from trainkit.callbacks import Checkpoint, FreezeUntil
from trainkit.strategies import DDP

STEPS, STOP = 6, 3
FEATURES, HIDDEN = 65, 129
MIB = 0.05  # of a bucket, so that a small model has several


class Crossed(nn.Module):
    """Layers that are registered in another order than they are used in."""

    def __init__(self, *, idle: str = "", sparse: bool = False, hidden: int = HIDDEN) -> None:
        super().__init__()
        self.last = nn.Linear(hidden, 33)
        self.first = nn.Linear(FEATURES, hidden)
        self.left, self.right = nn.Linear(hidden, hidden), nn.Linear(hidden, hidden)
        self.idle = nn.Linear(9, hidden) if idle else None
        self.never = idle == "always"
        self.words = nn.Embedding(50, hidden, sparse=True) if sparse else None

    @override
    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs).tanh()
        if self.words is not None:
            hidden = hidden + self.words(inputs[:, 0].abs().mul(9).long().clamp(max=49))
        if self.idle is not None and not self.never and inputs[0, 0] > 0:
            hidden = hidden + self.idle(inputs[:, :9])
        outputs: Tensor = self.last((self.left(hidden) + self.right(hidden)).tanh())
        return outputs


def samples(number: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(
        torch.randn(number, FEATURES, generator=generator),
        torch.randn(number, 33, generator=generator),
    )


def everything(module: nn.Module, optimizer: Optimizer) -> list[Tensor]:
    states = [v for state in optimizer.state.values() for v in state.values()]
    return [*module.state_dict().values(), *(v for v in states if isinstance(v, Tensor))]


def fit(folder: Path, resume: Path | None, case: dict[str, Any]) -> list[Tensor]:
    """Train by a `Trainer`, on several buckets of gradients."""
    options: dict[str, Any] = {
        "accumulation": 1,
        "precision": "fp32",
        "model": {},
        "strategy": {},
    } | case
    ddp = DDP(**{"device": "cpu", "bucket_cap_mb": MIB} | options["strategy"])
    torch.manual_seed(0)
    model = Crossed(**options["model"])
    trainer = Trainer(
        max_steps=STEPS,
        gradient_accumulation_steps=options["accumulation"],
        precision=options["precision"],
        strategy=ddp,
        callbacks=[
            Checkpoint(every_n_steps=STOP, keep_last=STEPS),
            *([FreezeUntil(**case["freeze"])] if "freeze" in case else []),
        ],
        output_dir=folder,
    )
    trainer.fit(
        model,
        DataLoader(samples(600), 5, shuffle=True),
        optimizer=partial(SGD if "sparse" in options["model"] else AdamW, lr=1e-2),
        loss_fn=nn.functional.mse_loss,
        resume=resume,
    )
    assert trainer.run is not None
    return everything(model, trainer.run.optimizer)


def both(rank: int, folder: Path, case: dict[str, Any]) -> bool:
    whole = fit(folder / "whole", None, case)
    (saved,) = (folder / "whole" / "checkpoints").glob(f"*{STOP}")
    resumed = fit(folder / "resumed", saved, case)
    return all(torch.equal(a, b) for a, b in zip(whole, resumed, strict=True))


CASES: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"precision": "bf16"},
    "fp16": {"precision": "fp16", "accumulation": 2},
    "accumulation": {"accumulation": 3},
    "unused": {
        "model": {"idle": "at times"},
        "strategy": {"find_unused_parameters": True},
    },
    "thawed before": {"freeze": {"step": {"first": 2}}},
    "thawed after": {"freeze": {"step": {"last": STOP + 1, "left": STOP + 2}}},
    "sparse": {"model": {"sparse": True}},
    "4 M parameters": {"model": {"hidden": 1400}, "strategy": {"bucket_cap_mb": None}},
}


FEW = ("fp32", "thawed after")
JOBS = [(3, FEW), (3, tuple(name for name in CASES if name not in FEW)), (4, FEW)]


@pytest.mark.parametrize(("processes", "names"), with_few(JOBS[:1], JOBS))
def test_a_resumed_run_adds_up_as_the_whole_one(
    processes: int, names: tuple[str, ...], tmp_path: Path
) -> None:
    cases = [(tmp_path / name, CASES[name]) for name in names]
    assert run_ranks(processes, in_turn, both, cases) == [[True] * len(names)] * processes


def loop(rank: int, folder: Path, settings: dict[str, Any]) -> list[bool]:
    """Train in an own loop; go on from its state in a new wrapper, and in the old one."""

    def prepared() -> tuple[Accelerator, nn.Module, Optimizer]:
        kwargs = DistributedDataParallelKwargs(**settings)
        accelerator = Accelerator(cpu=True, kwargs_handlers=[kwargs])
        torch.manual_seed(0)
        model = Crossed(idle="always" if settings.get("find_unused_parameters") else "", hidden=400)
        return accelerator, *accelerator.prepare(model, AdamW(model.parameters(), lr=1e-2))

    def steps(accelerator: Accelerator, model: nn.Module, optimizer: Optimizer, first: int) -> Any:
        for step in range(first, STEPS):
            if step == STOP and first == 0:
                accelerator.save_state(str(folder / "state"))
            generator = torch.Generator().manual_seed(10 * step + rank)
            inputs = torch.randn(7, FEATURES, generator=generator)
            accelerator.backward(model(inputs).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        module = accelerator.unwrap_model(model)
        return [v.clone() for v in everything(module, optimizer.optimizer)]  # type: ignore[attr-defined]

    old = prepared()
    results = [steps(*old, 0)]
    for again in (prepared(), old):
        again[0].load_state(str(folder / "state"))
        results.append(steps(*again, STOP))
    return [all(map(torch.equal, results[0], result)) for result in results[1:]]


OWN = {
    "plain": {"bucket_cap_mb": 1},
    "static graph": {"bucket_cap_mb": 1, "static_graph": True},
    "static and unused": {"static_graph": True, "find_unused_parameters": True},
    "unused": {"bucket_cap_mb": 1, "find_unused_parameters": True},
}


@pytest.mark.e2e
def test_an_own_loop_adds_up_as_before_after_a_resume(tmp_path: Path) -> None:
    cases = [(tmp_path / name, settings) for name, settings in OWN.items()]
    assert run_ranks(3, in_turn, loop, cases) == [[[True, True]] * len(OWN)] * 3
