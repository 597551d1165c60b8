"""Save checkpoints: when, and what stays."""

import time
from typing import Literal, get_args

from typing_extensions import override

from trainkit.callbacks._support.formatting import every
from trainkit.checkpoint import CheckpointStore, KeepPolicy
from trainkit.checkpoint.saver import NonFinite
from trainkit.config import check_whole, checked
from trainkit.errors import ConfigError
from trainkit.packages import require
from trainkit.training.callback import Callback
from trainkit.training.run import Run
from trainkit.types import Scalars, StepResult

__all__ = ["Checkpoint"]


class Checkpoint(Callback):
    """Saves checkpoints under `<output_dir>/checkpoints`, and the last step in any case.

    Without any `every_...`, each epoch. A fit resumes from them by `fit(..., resume="auto")`.

    Args:
        every_n_steps: Updates between two saves.
        every_n_epochs: Epochs between two saves.
        every_minutes: Minutes between two saves, on the clock of process 0.
        keep_last: How many of the newest stay; None: all.
        keep_best: A metric of the evaluation and "min" or "max": its best checkpoint stays too.
            Each evaluation is then followed by a save.
        keep_every: Checkpoints of steps that are multiples of this stay too.
        background: Write while training goes on; training waits for a copy in memory only.
        non_finite: What is done where parameters, or the loss of the last step, are not finite.
            "mark": it is saved and marked, never counts as the best, and the newest one without
            the mark stays too, from which a fit resumes. "raise": nothing is saved, and the run
            ends. "allow": it is like any other, and may replace the last good one.
    """

    @checked
    def __init__(
        self,
        *,
        every_n_steps: int | None = None,
        every_n_epochs: int | None = None,
        every_minutes: float | None = None,
        keep_last: int | None = 1,
        keep_best: tuple[str, Literal["min", "max"]] | None = None,
        keep_every: int | None = None,
        background: bool = False,
        non_finite: NonFinite = "mark",
    ) -> None:
        require("xxhash", "`Checkpoint`")
        for name, value in (("every_n_steps", every_n_steps), ("every_n_epochs", every_n_epochs)):
            if value is not None:
                check_whole(name, value)
        if every_minutes is not None and not every_minutes > 0:
            raise ConfigError(f"`every_minutes` must be positive, but is {every_minutes!r}.")
        if keep_best is not None and (type(keep_best) is not tuple or len(keep_best) != 2):
            raise ConfigError(
                '`keep_best` must be a metric and its good end, such as `("eval/loss", "min")`, '
                f"but is {keep_best!r}."
            )
        if non_finite not in get_args(NonFinite):
            raise ConfigError(
                f"`non_finite` must be one of {get_args(NonFinite)}, but is {non_finite!r}."
            )
        if every_n_steps is None and every_n_epochs is None and every_minutes is None:
            every_n_epochs = 1
        self.every_n_steps = every_n_steps
        self.every_n_epochs = every_n_epochs
        self.every_minutes = every_minutes
        self.policy = KeepPolicy(
            keep_last=keep_last,
            keep_best=None if keep_best is None else (*keep_best, 1),
            keep_every=keep_every,
        )
        self.background = background
        self.non_finite: NonFinite = non_finite
        self._due = 0.0  # on the clock of time.monotonic

    @override
    def explain(self) -> str:
        steps, epochs = self.every_n_steps, self.every_n_epochs
        times = [
            *([every(steps, "step")] if steps else []),
            *([every(epochs, "epoch")] if epochs else []),
            *([f"every {self.every_minutes:g} minutes"] if self.every_minutes else []),
            *(["after each evaluation"] if self.policy.keep_best is not None else []),
            "at the last step",
        ]
        policy, count = self.policy, self.policy.keep_last
        kept = ["all" if count is None else "the newest" if count == 1 else f"the newest {count}"]
        if policy.keep_best is not None:
            kept.append(f"the best by {policy.keep_best[0]} ({policy.keep_best[1]})")
        if policy.keep_every is not None:
            kept.append(f"steps that are multiples of {policy.keep_every:,}")
        waits = "training goes on meanwhile" if self.background else "training waits meanwhile"
        saves = f"{', '.join(times[:-1])} and {times[-1]}"
        return f"Saves {saves}; keeps {', '.join(kept)}; {waits}."

    @override
    def check_output(self, run: Run) -> None:
        if run.output_dir is None:
            raise ConfigError(
                "`Checkpoint` saves under the output directory, but the trainer has none. Pass "
                "`Trainer(output_dir=...)`."
            )
        if run.processes.is_local_main_process:  # every machine writes its part
            CheckpointStore(run.output_dir / "checkpoints").probe()

    @override
    def on_fit_start(self, run: Run) -> None:
        run.save_checkpoints(self.policy, background=self.background, non_finite=self.non_finite)
        self._wait_again()

    @override
    def on_epoch_start(self, run: Run) -> None:
        best = self.policy.keep_best
        known = run.evaluation.expected
        if best is not None and known is not None and best[0] not in known:
            raise ConfigError(
                f"`Checkpoint` keeps the best by {best[0]!r}, but "
                + (
                    f"the evaluation gives only {sorted(known)}. Use one of these."
                    if known
                    else "there is no evaluation. Pass loaders as (train, eval)."
                )
            )

    @override
    def on_step_end(self, run: Run, result: StepResult) -> None:
        if self.every_n_steps is not None and run.state.step % self.every_n_steps == 0:
            run.request_checkpoint(agreed=True)
        if self.every_minutes is not None and time.monotonic() >= self._due:
            self._wait_again()
            if run.is_main_process:
                run.request_checkpoint()

    @override
    def on_evaluation_end(self, run: Run, metrics: Scalars) -> None:
        if self.policy.keep_best is not None:  # only a save of this step can be the best
            run.request_checkpoint(agreed=True)

    @override
    def on_epoch_end(self, run: Run) -> None:
        if self.every_n_epochs is not None and run.state.epoch % self.every_n_epochs == 0:
            run.request_checkpoint(agreed=True)

    def _wait_again(self) -> None:
        if self.every_minutes is not None:
            self._due = time.monotonic() + 60 * self.every_minutes
