"""One, two and three processes are the same training at the same global batch (rule 14)."""

from functools import partial

import torch
from torch import nn
from torch.optim import AdamW
from torch.utils.data import DataLoader, TensorDataset

from tests.helpers.ranks import run_ranks
from trainkit import Callback, Run, Trainer

LIMIT = 1e-12


class Losses(Callback):
    """Keeps the logged training loss of each step."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def on_log(self, run: Run, values: dict[str, float]) -> None:
        self.values.append(values["loss"])


def fit_losses(rank: int, size: int) -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 3)).double()
    data = TensorDataset(torch.randn(64, 6).double(), torch.randint(0, 3, (64,)))
    losses = Losses()
    Trainer(max_steps=50, callbacks=[losses], log_every_n_steps=1, max_grad_norm=0.5).fit(
        model,
        DataLoader(data, batch_size=6 // size, shuffle=True),
        optimizer=partial(AdamW, lr=1e-2),
        loss_fn=nn.functional.cross_entropy,
    )
    return losses.values


def test_loss_curves_are_equal_on_one_two_and_three_processes() -> None:
    curves = [run_ranks(size, fit_losses, size)[0] for size in (1, 2, 3)]
    assert len(curves[0]) == 50
    for curve in curves[1:]:
        assert max(abs(a - b) / abs(a) for a, b in zip(curves[0], curve, strict=True)) <= LIMIT
