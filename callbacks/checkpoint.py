"""Save checkpoints: when, and what stays."""

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

from typing_extensions import override

from trainkit.basics.config import check_whole, checked
from trainkit.basics.packages import require
from trainkit.callbacks._support.formatting import every
from trainkit.callbacks.journal import Journal
from trainkit.checkpoint import CheckpointStore, KeepPolicy
from trainkit.checkpoint.format.names import CHECKPOINTS
from trainkit.checkpoint.retention import Best
from trainkit.checkpoint.saver import NonFinite, check_unused
from trainkit.errors import ConfigError
from trainkit.training.callback import Callback
from trainkit.training.run import Run
from trainkit.types import Scalars, StepResult

__all__ = ["Checkpoint"]


class Checkpoint(Callback):
    """Saves checkpoints under `<output_dir>/checkpoints`, and the last step in any case.

    Without any `every_...`, each epoch. A fit resumes from them by `fit(..., resume="auto")`.
    Beside them a `Journal` is written, from which `trainkit replay` opens a step.

    Args:
        every_n_steps: Updates between two saves.
        every_n_epochs: Epochs between two saves.
        every_minutes: Minutes between two saves, on the clock of process 0.
        keep_last: How many of the newest stay; None: all.
        keep_best: A metric of the evaluation, "min" or "max", and how many, 1 if left out: the
            checkpoints with the best values of it stay too. Each evaluation is then followed by a
            save. NaN is never best; of equals the older stays.
        weights_only: Of the best the weights alone are kept, in `<output_dir>/weights`; nothing is
            resumed from them. All else is saved as often as `every_...` says.
        keep_every: Checkpoints of steps that are multiples of this stay too.
        background: Write while training goes on; training waits for a copy in memory only.
        non_finite: What is done where parameters, or the loss of the last step, are not finite.
            "mark": it is saved and marked, never counts as the best, and the newest one without
            the mark stays too, from which a fit resumes. "raise": nothing is saved, and the run
            ends. "allow": it is like any other, and may replace the last good one.
        frozen: What becomes of parameters that neither train nor are held by the optimizer, such
            as the base of an adapter. "save": they are saved. "reference": they are left out; the
            checkpoint has their digests, and where they came from, and a resume needs the same.
    """

    # The clock of process 0 counts the minutes.
    alike = (
        "every_n_steps",
        "every_n_epochs",
        "policy",
        "weights_only",
        "background",
        "non_finite",
        "frozen",
    )

    @checked
    def __init__(
        self,
        *,
        every_n_steps: int | None = None,
        every_n_epochs: int | None = None,
        every_minutes: float | None = None,
        keep_last: int | None = 1,
        keep_best: tuple[str, Literal["min", "max"]] | Best | None = None,
        weights_only: bool = False,
        keep_every: int | None = None,
        background: bool = False,
        non_finite: NonFinite = "mark",
        frozen: Literal["save", "reference"] = "save",
    ) -> None:
        require("xxhash", "`Checkpoint`")
        for name, value in (("every_n_steps", every_n_steps), ("every_n_epochs", every_n_epochs)):
            if value is not None:
                check_whole(name, value)
        if every_minutes is not None and not every_minutes > 0:
            raise ConfigError(f"`every_minutes` must be positive, but is {every_minutes!r}.")
        best: Any = keep_best
        if type(best) is tuple and len(best) == 2:
            best = (*best, 1)
        if weights_only and best is None:
            raise ConfigError(
                "`weights_only=True` keeps the weights of the best alone, but nothing says which "
                'those are. Pass `keep_best=("eval/loss", "min")` too.'
            )
        if every_n_steps is None and every_n_epochs is None and every_minutes is None:
            every_n_epochs = 1
        self.every_n_steps, self.every_n_epochs = every_n_steps, every_n_epochs
        self.every_minutes = every_minutes
        self.policy = KeepPolicy(keep_last=keep_last, keep_best=best, keep_every=keep_every)
        self.weights_only = weights_only
        self.background = background
        self.non_finite: NonFinite = non_finite
        self.frozen = frozen
        self._due = 0.0  # on the clock of time.monotonic

    @override
    def explain(self) -> str:
        steps, epochs, best = self.every_n_steps, self.every_n_epochs, self.policy.keep_best
        times = [
            *([every(steps, "step")] if steps else []),
            *([every(epochs, "epoch")] if epochs else []),
            *([f"every {self.every_minutes:g} minutes"] if self.every_minutes else []),
            *(["after each evaluation"] if best is not None and not self.weights_only else []),
            "at the last step",
        ]
        policy, count = self.policy, self.policy.keep_last
        kept = ["all" if count is None else "the newest" if count == 1 else f"the newest {count}"]
        if best is not None:
            number = f" {best[2]}" if best[2] > 1 else ""
            alone = ", weights alone" if self.weights_only else ""
            kept.append(f"the best{number} by {best[0]} ({best[1]}{alone})")
        if policy.keep_every is not None:
            kept.append(f"steps that are multiples of {policy.keep_every:,}")
        waits = "training goes on meanwhile" if self.background else "training waits meanwhile"
        saves = f"{', '.join(times[:-1])} and {times[-1]}"
        frozen = "" if self.frozen == "save" else "; what is frozen is referred to, not saved"
        return f"Saves {saves}; keeps {', '.join(kept)}; {waits}{frozen}."

    @override
    def brings(self) -> Sequence[Callback]:
        return [Journal()]

    @override
    def check_output(self, run: Run) -> None:
        if run.output_dir is None:
            raise ConfigError(
                "`Checkpoint` saves under the output directory, but the trainer has none. Pass "
                "`Trainer(output_dir=...)`."
            )
        if run.processes.is_local_main_process:  # every machine writes its part
            CheckpointStore(run.output_dir / CHECKPOINTS).probe()
        if run.is_main_process and run.checkpoints.resumed_from is None:
            check_unused(run.output_dir)  # before a logger begins its files anew

    @override
    def on_fit_start(self, run: Run) -> None:
        run.checkpoints.base = None
        if self.frozen == "reference":
            from trainkit.training.resume.reference import base_of  # most runs need none of it

            run.checkpoints.base = base_of(run)
        run.save_checkpoints(
            replace(self.policy, keep_best=None) if self.weights_only else self.policy,
            background=self.background,
            non_finite=self.non_finite,
            keep_best=self.policy.keep_best,
            weights_only=self.weights_only,
        )
        if self.policy.keep_best is not None:
            metric, mode, _ = self.policy.keep_best
            run.evaluation.watch("`Checkpoint` keeps the best by", metric, mode)
        self._wait_again()

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
        if self.policy.keep_best is not None and not self.weights_only:
            # Only a save of this step can be the best.
            run.request_checkpoint(agreed=True)

    @override
    def on_epoch_end(self, run: Run) -> None:
        if self.every_n_epochs is not None and run.state.epoch % self.every_n_epochs == 0:
            run.request_checkpoint(agreed=True)

    def _wait_again(self) -> None:
        if self.every_minutes is not None:
            self._due = time.monotonic() + 60 * self.every_minutes
