"""Tests of logging the learning rate."""

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from tests.helpers.callbacks import Logged
from tests.helpers.toys import fit, make_trainer, toy_model
from trainkit.callbacks import LRMonitor


def _logged(**arguments: Any) -> dict[int, dict[str, float]]:
    logs = Logged("lr")
    trainer = make_trainer(max_steps=5, callbacks=[LRMonitor(), logs], log_every_n_steps=2)
    fit(trainer, **arguments)
    return logs.seen


def test_the_rate_is_the_one_that_the_step_used() -> None:
    schedule = partial(LambdaLR, lr_lambda=lambda step: float(step + 1))
    optimizer = partial(torch.optim.SGD, lr=1.0)
    expected = {2: {"lr": 2.0}, 4: {"lr": 4.0}, 5: {"lr": 5.0}}
    assert _logged(optimizer=optimizer, lr_scheduler=schedule) == expected


def test_a_rate_that_is_a_tensor_is_not_overtaken_by_its_scheduler() -> None:
    schedule = partial(LambdaLR, lr_lambda=lambda step: float(step + 1))
    optimizer = partial(torch.optim.Adam, lr=torch.tensor(1.0))
    assert _logged(optimizer=optimizer, lr_scheduler=schedule)[4] == {"lr": 4.0}


def test_groups_go_by_name_or_number() -> None:
    model = toy_model()
    assert isinstance(model, nn.Sequential)
    groups = [
        {"params": model[0].parameters(), "lr": 0.5, "name": "body"},
        {"params": model[2].parameters(), "lr": 0.25},
    ]
    optimizer = torch.optim.SGD(groups, lr=1.0)
    assert _logged(model=model, optimizer=optimizer)[2] == {"lr/body": 0.5, "lr/1": 0.25}
