"""Try whether a training step fits into the memory, and leave no trace of trials."""

import copy
from contextlib import nullcontext
from typing import Any, Self

import torch
from torch import Tensor

from trainkit.basics.memory import is_out_of_memory, release_memory
from trainkit.containers.tree import count_samples, map_leaves
from trainkit.data import MicroBatch
from trainkit.data.split import slice_samples
from trainkit.distributed import collective_guard
from trainkit.distributed.collectives import first_with
from trainkit.training.run import Run
from trainkit.training.weighting import loss_of


class MemoryTrial:
    """Runs the training step on parts of one micro-batch; on leaving, all is as it was before.

    An optimizer without state makes an update with gradients of zero, so that the memory of its
    state counts; the weights are kept in main memory meanwhile.

    Args:
        run: Before its first step.
        micro_batch: What is tried; it is not changed.

    Attributes:
        error: That of the latest trial that did not fit here.
    """

    def __init__(self, run: Run, micro_batch: MicroBatch) -> None:
        self.error: Exception | None = None
        self._run = run
        self._data = micro_batch.data
        self._count = micro_batch.count or count_samples(micro_batch.data)
        self._largest = max(micro_batch.counts)
        self._before: TrainedState | None = None  # the update; None: there was none

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._run.optimizer.zero_grad(set_to_none=True)
        if self._before is not None:
            self._before.put_back()
        self.error = None
        release_memory()

    def fits(self, size: int) -> bool:
        """Return whether micro-batches of `size` samples fit, on every process."""
        # Their gradients add up where a window has several; else they are made anew each time.
        accumulation = self._run.config.gradient_accumulation_steps
        alone = size >= self._largest and accumulation == 1
        processes = self._run.strategy.processes
        fits = self._fits_here(min(size, self._count), alone)
        if not fits:  # outside of the handler, which held on to all that was computed
            release_memory()
        return first_with(processes, not fits) is None

    def _fits_here(self, size: int, alone: bool) -> bool:
        run = self._run
        is_alone = run.processes.num_processes == 1  # else one may leave it before the others
        guard = nullcontext() if is_alone else collective_guard.only("the trial of BatchSizeFinder")
        try:
            with run.as_zero_weight(gathers=True), guard:
                self._step(size)
                if not run.optimizer.state:  # it makes one by an update; gradients are zero here
                    self._before = self._before or TrainedState(run)
                    run.optimizer.step()
                if alone:
                    run.optimizer.zero_grad(set_to_none=True)
                self._step(size)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            self.error = error.with_traceback(None)  # its frames hold the activations
            if self._before is not None:
                run.optimizer.state.clear()  # perhaps half of it
            return False
        finally:
            run.optimizer.zero_grad(set_to_none=True)
        return True

    def _step(self, size: int) -> None:
        """Run forward and backward, without the strategy: no process waits for another."""
        run = self._run
        piece = map_leaves(slice_samples(self._data, 0, size, self._count), _clone)
        with run.precision.autocast():
            loss = loss_of(run.training_step(run.module, piece))
        run.precision.backward(loss)


class TrainedState:
    """Keeps weights and optimizer of a run as they are now, in main memory.

    Args:
        run: Between two windows.
    """

    def __init__(self, run: Run) -> None:
        weights = run.strategy.local_parts(run.parameters)
        self._run = run
        self._weights = [weight.detach().to("cpu", copy=True) for weight in weights]
        self._state = {p: copy.deepcopy(state) for p, state in run.optimizer.state.items()}
        self._settings = [
            {name: value for name, value in group.items() if name != "params"}
            for group in run.optimizer.param_groups
        ]

    def put_back(self) -> None:
        """Let the run hold them again, to the last bit."""
        optimizer = self._run.optimizer
        optimizer.state.clear()
        optimizer.state.update(self._state)
        for group, settings in zip(optimizer.param_groups, self._settings, strict=True):
            group.update(settings)
        with torch.no_grad():
            parts = self._run.strategy.local_parts(self._run.parameters)
            for part, weight in zip(parts, self._weights, strict=True):
                part.copy_(weight)


def _clone(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, Tensor) else leaf
