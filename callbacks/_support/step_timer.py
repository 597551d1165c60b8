"""Wall time of training steps, and of the waiting for data inside them."""

from time import perf_counter

import torch

__all__ = ["StepTimer"]


class StepTimer:
    """Measures steps one after the other; what happens while it is paused counts nowhere.

    It starts paused. On an accelerator the host runs ahead of the device: single steps are those
    of the host, and the device is waited for only where the clock is read or paused, so that
    their sum is right.

    Args:
        device: What the steps run on.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = None if device.type == "cpu" else device
        self._paused = True
        self._start = 0.0  # of the step under way, on the clock of time.perf_counter
        self._idle_since = 0.0
        self._waited = 0.0
        self._steps: list[float] = []

    def resume(self) -> None:
        """Go on after a pause, waiting for data; nothing where there was none."""
        if self._paused:
            self._paused = False
            self._start = self._idle_since = perf_counter()

    def end_wait(self) -> None:
        """The data is there."""
        self._waited += perf_counter() - self._idle_since

    def begin_wait(self) -> None:
        """The next data is waited for."""
        self._idle_since = perf_counter()

    def end_step(self) -> None:
        """End a step, and begin the next one."""
        now = perf_counter()
        self._steps.append(now - self._start)
        self._start = self._idle_since = now

    def pause(self) -> None:
        """Stop until `resume`; what the device has still to do belongs to the last step."""
        if not self._paused:
            self._paused = True
            if self._steps:
                if self._device is not None:
                    torch.accelerator.synchronize(self._device)
                self._steps[-1] += perf_counter() - self._start

    def take(self) -> tuple[list[float], float]:
        """Pause; return the seconds of each step since the last `take`, and those waited."""
        self.pause()
        steps, waited = self._steps, self._waited
        self._steps, self._waited = [], 0.0
        return steps, waited
