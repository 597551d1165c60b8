"""Find the largest micro-batch that fits into the memory, and keep the maths."""

from bisect import bisect_left
from collections.abc import Generator
from contextlib import closing
from functools import partial
from itertools import chain
from typing import ClassVar

from typing_extensions import override

from trainkit.callbacks._support.kept import Keeps
from trainkit.callbacks._support.memory_trial import MemoryTrial
from trainkit.data import MicroBatch, Window
from trainkit.data.split import split_windows
from trainkit.errors import ConfigError
from trainkit.training.run import Run
from trainkit.training.several.optimizers import refuse_several

__all__ = ["BatchSizeFinder"]

Windows = Generator[Window, None, None]


class BatchSizeFinder(Keeps):
    """Cuts micro-batches that do not fit into the memory, without a change of what is trained.

    Before the first step, the first micro-batch is tried: forward, backward, and the state that
    the optimizer will have. Where the device runs out of memory, the batch is cut into two, four
    and so on, and the largest pieces that fit on every process are used for the whole run. The
    global batch, the order of the samples, the steps and the gradients stay what they were, to
    rounding (rule 6): each micro-batch of the loader becomes several. The search is for equal
    pieces, so a batch of 32 that fits with 20 samples runs in two pieces of 16.

    A trial leaves no trace: weights, buffers, the optimizer, random streams and the position in
    the data are as before; `run.zero_weight` is true in it. The size is part of the checkpoint,
    and a resume uses the same without a trial.

    The first micro-batch stands for all: where samples differ in length, sort out the longest by
    hand. So does its memory: parameters that thaw later need more. Evaluation keeps the batch
    size of its loader. Dropout and batch statistics see smaller batches, as with any
    accumulation. On several processes `training_step` may make no collective, for one process
    alone may run out of memory; under FSDP it cannot be without, and the callback is refused.

    Attributes:
        size: Samples of one process in a micro-batch, at most; None while it is not known, and
            where the batches of the loader fit.

    Raises:
        ConfigError: At the start of `fit`: under FSDP on several processes. Before the first
            step: not even one sample fits, or a batch cannot be cut.
    """

    _kept: ClassVar = {"size": int | None, "_tried": bool}

    alike = ()

    def __init__(self) -> None:
        self.size: int | None = None
        self._tried = False

    @override
    def on_fit_start(self, run: Run) -> None:
        refuse_several(run.optimizer, "`BatchSizeFinder`")
        if run.strategy.sharded and run.processes.num_processes > 1:
            raise ConfigError(
                "`BatchSizeFinder` does not work with sharded parameters: a process that runs out "
                "of memory would leave the others waiting for its part of them. Choose a batch "
                "size that fits, and set `gradient_accumulation_steps`."
            )
        if run.train_loader.parts:
            raise ConfigError(
                "`BatchSizeFinder` cuts the batches of one training loader, but there are "
                f"{len(run.train_loader.parts)}. Choose their batch sizes by hand."
            )
        if run.internals.recut is not None:
            raise ConfigError("There are two `BatchSizeFinder`s in this run. Leave one out.")
        if run.checkpoints.resumed_from is None:
            self.size, self._tried = None, False
        run.internals.recut = partial(self._recut, run)

    def _recut(self, run: Run, windows: Windows) -> Windows:
        """Return the windows of an epoch with micro-batches that fit."""
        if not self._tried:
            window = next(windows)
            parts = iter(window)
            first = next(parts)
            self.size, self._tried = _find(run, first), True
            windows = _after(Window(chain([first], parts), window.total, window.size), windows)
        return windows if self.size is None else split_windows(windows, run.train_loader, self.size)


def _after(first: Window, windows: Windows) -> Windows:
    with closing(windows):
        yield first
        yield from windows


def _find(run: Run, micro_batch: MicroBatch) -> int | None:
    """Return the size of the largest pieces that fit everywhere; None where no cut is needed."""
    largest = max(micro_batch.counts)
    with MemoryTrial(run, micro_batch) as trial:
        if trial.fits(largest):
            return None
        fails, works = 1, min(2, largest)  # numbers of pieces
        while largest == 1 or not trial.fits(-(-largest // works)):
            if works == largest:
                raise ConfigError(
                    "The training step runs out of memory even with one sample. Use a smaller "
                    'model, `precision="bf16"`, activation checkpointing or FSDP.'
                ) from trial.error
            fails, works = works, min(2 * works, largest)
        between = range(fails + 1, works)
        works = fails + 1 + bisect_left(between, True, key=lambda n: trial.fits(-(-largest // n)))
    size = -(-largest // works)
    run.print(
        f"trainkit: a micro-batch of {largest} samples does not fit into the memory. Each runs in "
        f"pieces of at most {size}; the global batch is the same."
    )
    return size
