"""Small checkpoints, and processes played by threads."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from trainkit.checkpoint import CheckpointStore
from trainkit.checkpoint.commit import Agree
from trainkit.checkpoint.format.names import process_part

RUN = "run-1"


def parts_of(step: int, rank: int = 0) -> dict[str, Any]:
    """Return what process `rank` writes at `step`; every value depends on both."""
    random = {"state": [step, rank, float("nan")]}
    if rank > 0:
        return {f"random-{rank}": random}
    model = {"weight": torch.full((3, 2), float(step)), "bias": torch.arange(step, step + 3)}
    return {"model": model, "counters": {"step": step}, "random-0": random}


def save_alone(
    store: CheckpointStore, step: int, parts: dict[str, Any] | None = None, **metadata: Any
) -> Path:
    """Save toy parts on one process."""
    metadata.setdefault("run_id", RUN)
    parts = parts_of(step) if parts is None else parts
    return store.save(step, parts, metadata=metadata)


class Together:
    """Threads that play the processes of a job."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._slots: list[Any] = [None] * size
        self._result: Any = None
        self._barrier = threading.Barrier(size, timeout=240)

    def run(self, function: Callable[[int, Agree], Any]) -> list[Any]:
        """Return what `function(rank, agree)` returned or raised for each rank."""

        def one(rank: int) -> Any:
            try:
                return function(rank, lambda value, action: self._agree(rank, value, action))
            except Exception as error:
                return error

        if self.size == 1:
            return [one(0)]
        with ThreadPoolExecutor(self.size) as pool:
            return list(pool.map(one, range(self.size)))

    def save(self, stores: list[CheckpointStore], step: int) -> list[Any]:
        """Save toy parts on all; return the paths or errors."""
        return self.run(
            lambda rank, agree: stores[rank].save(
                step,
                parts_of(step, rank) | {process_part(rank): {"rank": rank, "draws": torch.ones(2)}},
                metadata={"run_id": RUN},
                agree=agree,
            )
        )

    def _agree(self, rank: int, value: Any, action: Callable[[list[Any]], Any]) -> Any:
        self._slots[rank] = value
        self._barrier.wait()
        if rank == 0:
            self._result = action(list(self._slots))
        self._barrier.wait()
        result = self._result
        self._barrier.wait()
        return result
