"""End a training in time, with a checkpoint."""

import time

from typing_extensions import override

from trainkit.basics.config import checked
from trainkit.basics.signals import LATER
from trainkit.errors import ConfigError
from trainkit.training.callback import Callback
from trainkit.training.run import Run
from trainkit.types import StepResult

__all__ = ["TimeLimit"]


class TimeLimit(Callback):
    """Ends the program after a checkpoint when the time is up, with exit code 75.

    The code means "try again later": a scheduler that starts the job anew with
    `resume="auto"` goes on from the checkpoint.

    Args:
        minutes: Time from the start of `fit`, on the clock of process 0.
    """

    @checked
    def __init__(self, minutes: float) -> None:
        if not minutes > 0:
            raise ConfigError(f"`minutes` must be positive, but is {minutes!r}.")
        self.minutes = minutes
        self._end = 0.0

    @override
    def on_fit_start(self, run: Run) -> None:
        self._end = time.monotonic() + 60 * self.minutes

    @override
    def on_step_end(self, run: Run, result: StepResult) -> None:
        if run.is_main_process and time.monotonic() >= self._end:
            run.internals.interrupts.ask(LATER)
