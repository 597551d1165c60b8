"""Every optimizer of torch, with its settings."""

import random
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from tests.right_programs.program import Program

__all__ = ["make_optimizer", "options_of"]

_FLAGS: dict[str, dict[str, list[Any]]] = {
    "ASGD": {"lambd": [1e-4], "t0": [2.0], "weight_decay": [0.0, 0.1]},
    "Adadelta": {"rho": [0.9], "weight_decay": [0.0, 0.1]},
    "Adafactor": {"weight_decay": [0.0, 0.1]},
    "Adagrad": {"lr_decay": [0.0, 0.1], "initial_accumulator_value": [0.0, 0.5]},
    "Adam": {"amsgrad": [False, True], "weight_decay": [0.0, 0.1], "fused": [None, True]},
    "AdamW": {"maximize": [False, False, True], "betas": [(0.5, 0.9)], "fused": [None, True]},
    "Adamax": {"weight_decay": [0.0, 0.1]},
    "Muon": {"nesterov": [False, True], "weight_decay": [0.0, 0.1]},
    "LBFGS": {"max_iter": [2], "history_size": [3], "line_search_fn": [None, "strong_wolfe"]},
    "NAdam": {"decoupled_weight_decay": [False, True], "weight_decay": [0.0, 0.1]},
    "RAdam": {"decoupled_weight_decay": [False, True], "weight_decay": [0.0, 0.1]},
    "RMSprop": {"centered": [False, True], "momentum": [0.0, 0.9]},
    "Rprop": {"etas": [(0.5, 1.2)]},
    "SGD": {"momentum": [0.0, 0.9], "weight_decay": [0.0, 0.1]},
    "SparseAdam": {"maximize": [False]},
}
"""By optimizer: what its settings are drawn from."""


def options_of(program: Program) -> dict[str, Any]:
    """Return the settings of the optimizer of a program."""
    chance, name = random.Random(program.flags), program.optimizer
    options = {key: chance.choice(values) for key, values in _FLAGS[name].items()}
    if program.model == "sparse embedding":  # neither decay nor momentum is for sparse gradients
        options = {"momentum": 0.0} if name == "SGD" else {}
    if name not in ("LBFGS", "Muon", "SparseAdam") and not options.get("fused"):
        options["foreach"] = chance.choice([None, False, True])
    return {"lr": chance.choice([0.01, 0.03])} | options


def make_optimizer(
    program: Program, parameters: Iterable[nn.Parameter], lr: float | None = None
) -> Optimizer:
    """Return the optimizer of what it can train, in groups where no rate is given."""
    trained: list[Any] = [p for p in parameters if p.requires_grad]
    if program.optimizer == "Muon":
        trained = [p for p in trained if p.ndim == 2]
    if program.optimizer == "SparseAdam":
        trained = trained[:1]  # the embedding
    kind: Any = getattr(torch.optim, program.optimizer)
    make = partial(kind, **options_of(program) | ({} if lr is None else {"lr": lr}))
    if program.groups == 2 and len(trained) > 1 and lr is None:
        trained = [{"params": trained[1:]}, {"params": trained[:1], "lr": 0.003}]
    made: Optimizer = make(trained)
    return made
