"""Compare what the processes hold of the model."""

from typing_extensions import override

from trainkit.basics.config import check_whole, checked
from trainkit.training.callback import Callback
from trainkit.training.resume.replicas import check_replicas
from trainkit.training.run import Run
from trainkit.types import StepResult

__all__ = ["ReplicaCheck"]


class ReplicaCheck(Callback):
    """Ends the run where processes that should hold the same model hold another (rule 22).

    Parameters and optimizer state are compared to the bit, by digests that are computed where they
    lie; `DistributedError` names what differs, where, and after which step. Every save does so by
    itself, and every evaluation: this finds the step that a difference began with, or switches it
    off. Where each holds a part of its own, as with FSDP without `replicas`, the settings of groups
    and what is whole on each are compared alone. It must be in the list of callbacks on every
    process.

    Args:
        every_n_steps: Updates between two looks; the last planned step is looked at too.
        at_checkpoints: Whether each save and evaluation looks, and the end of a fit. False: what
            process 0 holds is saved.
    """

    alike = ("every_n_steps", "at_checkpoints")

    @checked
    def __init__(self, *, every_n_steps: int | None = None, at_checkpoints: bool = True) -> None:
        if every_n_steps is not None:
            check_whole("every_n_steps", every_n_steps)
        self.every_n_steps = every_n_steps
        self.at_checkpoints = at_checkpoints

    @override
    def on_step_end(self, run: Run, result: StepResult) -> None:
        step, every = run.state.step, self.every_n_steps
        if every is not None and (step % every == 0 or step == run.planned_steps):
            parameters = dict(run.module.named_parameters())
            check_replicas(run.strategy, parameters, [run.optimizer], f"after step {step}")

    @override
    def on_fit_start(self, run: Run) -> None:
        run.evaluation.check_replicas = self.at_checkpoints

    @override
    def on_checkpoint_start(self, run: Run) -> None:
        assert run.checkpoints.saver is not None
        run.checkpoints.saver.check_replicas = self.at_checkpoints
