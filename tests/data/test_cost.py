"""What the hot path costs (rule 36)."""

import sys
from types import FrameType
from typing import Any

import torch
from torch.utils.data import TensorDataset

from tests.data.toys import Numbers, loader_of, prepare


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

    sys.setprofile(record)
    for window in windows:
        for _ in window:
            pass
        break
    sys.setprofile(None)
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
