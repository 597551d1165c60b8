"""Say where the time of a fit went."""

import time

from typing_extensions import override

from trainkit.basics.formatting import count, duration
from trainkit.training.callback import Callback
from trainkit.training.run import Run
from trainkit.types import Scalars

__all__ = ["Timer"]

ROWS = {
    "setup": "set-up",
    "train": "training",
    "evaluate": "evaluation",
    "save": "saving",
    "end": "closing",
}
MOST_SHOWN = 5


class Timer(Callback):
    """Prints at the end how long the fit, its epochs, evaluations and checkpoints took.

    Set-up is what comes before the first step, closing what comes after the last one, such as
    waiting for a checkpoint that is written in the background. The time of an epoch holds the
    evaluations and checkpoints inside it. The clock is that of the main process and of this fit;
    what a fit took before it was interrupted and resumed is not in it.

    Attributes:
        seconds: The seconds of the latest fit by what it did: "setup", "train", "evaluate",
            "save", "end".
        epochs: The seconds of each epoch that it completed.
        evaluations: The seconds of each evaluation.
        checkpoints: How many checkpoints were begun.
    """

    def __init__(self) -> None:
        self.seconds: Scalars = {}
        self.epochs: list[float] = []
        self.evaluations: list[float] = []
        self.checkpoints = 0
        self._epoch_start = self._evaluation_start = 0.0

    @override
    def on_fit_start(self, run: Run) -> None:
        self.seconds, self.epochs, self.evaluations, self.checkpoints = {}, [], [], 0
        self._epoch_start = time.monotonic()

    @override
    def on_epoch_start(self, run: Run) -> None:
        self._epoch_start = time.monotonic()

    @override
    def on_evaluation_start(self, run: Run) -> None:
        self._evaluation_start = time.monotonic()

    @override
    def on_evaluation_end(self, run: Run, metrics: Scalars) -> None:
        self.evaluations.append(time.monotonic() - self._evaluation_start)

    @override
    def on_checkpoint_start(self, run: Run) -> None:
        self.checkpoints += 1

    @override
    def on_epoch_end(self, run: Run) -> None:
        self.epochs.append(time.monotonic() - self._epoch_start)

    @override
    def on_fit_end(self, run: Run) -> None:
        self.seconds = run.clock.seconds()
        run.print(self._table())

    def _table(self) -> str:
        total = sum(self.seconds.values())
        notes = {
            "train": _times("epoch", self.epochs),
            "evaluate": _times("evaluation", self.evaluations),
            "save": count(self.checkpoints, "checkpoint") if self.checkpoints else "",
        }
        lines = [f"trainkit: time of the fit {duration(total)}"]
        for phase, title in ROWS.items():
            if phase in self.seconds:
                spent = self.seconds[phase]
                share = f"{spent / total:.1%}" if total else ""
                note = notes.get(phase, "")
                lines.append(f"  {title:<11} {duration(spent):>11} {share:>7}  {note}".rstrip())
        return "\n".join(lines)


def _times(noun: str, seconds: list[float]) -> str:
    """Return how long each of something was; of many, the mean and the longest."""
    if len(seconds) > MOST_SHOWN:
        mean = sum(seconds) / len(seconds)
        times = f"mean {duration(mean)}, longest {duration(max(seconds))}"
    else:
        times = ", ".join(map(duration, seconds))
    return f"{count(len(seconds), noun)}: {times}" if seconds else ""
