"""What the hot path costs (rule 36)."""

import gc
import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, default_collate
from typing_extensions import override

from tests.data.toys import Numbers, loader_of, prepare
from trainkit import Callback, StepResult, Trainer
from trainkit.training.run import Run


def _calls_of_a_window(loader: Any, accumulation: int) -> list[str]:
    """Return the names of the Python and C functions called for the second window."""
    windows = loader.windows(0, accumulation=accumulation)
    list(next(windows))
    calls: list[str] = []

    def record(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            calls.append(frame.f_code.co_name)
        elif event == "c_call":
            calls.append(argument.__name__)

    gc.disable()  # what it frees calls back
    sys.setprofile(record)
    for window in windows:
        for _ in window:
            pass
        break
    sys.setprofile(None)
    gc.enable()
    return calls[:-1]  # but for `setprofile` itself


def test_a_micro_batch_of_tensors_takes_few_calls() -> None:
    rows = TensorDataset(torch.zeros(64, 2), torch.zeros(64))
    loader = prepare(loader_of(rows, batch_size=4, shuffle=True))
    one, four = (_calls_of_a_window(loader, accumulation) for accumulation in (1, 4))
    assert len(one) <= 13, one
    assert len(four) - len(one) <= 3 * 9, four


def test_a_sample_takes_one_call_beside_the_data_sets_own() -> None:
    small, large = (
        _calls_of_a_window(
            prepare(loader_of(Numbers(200), batch_size=size), sample_seeding=False), 1
        )
        for size in (10, 30)
    )
    own = 3  # `__getitem__`, and `append` and `tensor` inside of it
    assert len(large) - len(small) <= 20 * (own + 1)


class _Counts(Callback):
    """Counts the calls that lines of trainkit make or are, between two updates."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.calls: Counter[str] = Counter()

    @override
    def on_step_end(self, run: Run, result: StepResult) -> None:
        sys.setprofile(self._record if run.state.step == self.step else None)

    def _record(self, frame: FrameType, event: str, argument: Any) -> None:
        if event.endswith("call") and "trainkit" in Path(frame.f_code.co_filename).parts:
            self.calls[frame.f_code.co_qualname] += 1


def _collate(samples: list[Any]) -> Any:
    return default_collate(samples)


@pytest.mark.parametrize(
    ("collate", "step", "limit"),
    [
        (None, 4, 53),
        (None, 8, 152),  # the last of an epoch
        (default_collate, 4, 57),
        (default_collate, 8, 156),
        (_collate, 4, 101),  # it may draw random numbers, and leave samples out
    ],
)
def test_a_step_takes_few_calls(collate: Any, step: int, limit: int) -> None:
    data: Any = TensorDataset(torch.randn(64, 4), torch.randn(64, 1))
    if collate is not None:
        data = [data[index] for index in range(64)]
    counts, model = _Counts(step), nn.Linear(4, 1)
    Trainer(max_epochs=2, callbacks=[counts]).fit(
        model,
        DataLoader(data, batch_size=8, collate_fn=collate),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        loss_fn=nn.functional.mse_loss,
    )
    assert counts.calls.total() <= limit, counts.calls
