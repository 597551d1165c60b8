"""Collect garbage at the same steps on all processes."""

import gc

from typing_extensions import override

from trainkit.basics.config import check_whole
from trainkit.training.callback import Callback
from trainkit.training.run import Run
from trainkit.types import StepResult

__all__ = ["GarbageCollection"]


class GarbageCollection(Callback):
    """Collects Python's garbage every so many steps, and at no other time while a fit runs.

    Python collects when it has made many objects, which is at another moment on each process; in
    a step that all take together, every such pause is waited for by all. So pauses come at the
    same steps here. Whether Python collects by itself is put back at the end.

    Args:
        every_n_steps: Updates between two collections. Objects in reference cycles, and the
            memory of the device that they hold, stay until then.
    """

    def __init__(self, every_n_steps: int = 500) -> None:
        check_whole("every_n_steps", every_n_steps)
        self.every_n_steps = every_n_steps
        self._was_enabled: bool | None = None  # None: nothing was changed

    @override
    def on_fit_start(self, run: Run) -> None:
        self._was_enabled = gc.isenabled()
        gc.disable()
        gc.collect()

    @override
    def on_step_end(self, run: Run, result: StepResult) -> None:
        if run.state.step % self.every_n_steps == 0:
            gc.collect()

    @override
    def on_fit_end(self, run: Run) -> None:
        if self._was_enabled:
            gc.enable()
        self._was_enabled = None
