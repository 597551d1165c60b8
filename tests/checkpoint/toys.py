"""Small checkpoints, and processes played by threads."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from trainkit.checkpoint import CheckpointStore

RUN = "run-1"


def alone(value: Any) -> list[Any]:
    """Gather on one process."""
    return [value]


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
    return store.save(step, parts, metadata=metadata, gather=alone, rank=0)


class Together:
    """Threads that play the processes of a job."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._slots: list[Any] = [None] * size
        self._barrier = threading.Barrier(size, timeout=240)

    def run(self, function: Callable[[int, Callable[[Any], list[Any]]], Any]) -> list[Any]:
        """Return what `function(rank, gather)` returned or raised for each rank."""

        def one(rank: int) -> Any:
            try:
                return function(rank, lambda value: self._gather(rank, value))
            except Exception as error:
                return error

        if self.size == 1:
            return [one(0)]
        with ThreadPoolExecutor(self.size) as pool:
            return list(pool.map(one, range(self.size)))

    def save(self, stores: list[CheckpointStore], step: int) -> list[Any]:
        """Save toy parts on all; return the paths or errors."""
        return self.run(
            lambda rank, gather: stores[rank].save(
                step, parts_of(step, rank), metadata={"run_id": RUN}, gather=gather, rank=rank
            )
        )

    def _gather(self, rank: int, value: Any) -> list[Any]:
        self._slots[rank] = value
        self._barrier.wait()
        result = list(self._slots)
        self._barrier.wait()
        return result
