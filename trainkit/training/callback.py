"""Callbacks: what users hang on a training, and how it is called."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec

from typing_extensions import override

from trainkit.basics.config import names_checked
from trainkit.errors import ConfigError

if TYPE_CHECKING:
    from trainkit.training.run import Run
    from trainkit.types import Batch, Scalars, StepResult

P = ParamSpec("P")


class Callback:
    """Watches a training and leaves requests on its `Run`; override the hooks you need.

    The hooks run in this order. Indented ones repeat; `?` marks those that may not come::

        on_fit_start
            on_checkpoint_loaded ?
            on_epoch_start
                on_step_start
                    on_microbatch_start
                    on_microbatch_end
                on_gradients ?
                on_step_end | on_step_skipped
                on_log ?
                on_evaluation_start ?
                    on_evaluation_batch_end
                on_evaluation_end ?
                on_checkpoint_start ?
                on_checkpoint_saved ?
            on_epoch_end
        on_late_log ?
        on_exception ?
        on_fit_end

    After the last step of an epoch, `on_epoch_end` comes before logging, evaluation and saving,
    which then happen once for both (rule 5). A hook runs on every process, in the order of the
    list of callbacks; one that nobody overrides is never called. Counters are equal on all
    processes at every hook. A callback reads the run and asks it (`run.log`, `run.request_stop`,
    `run.request_evaluation`, `run.request_checkpoint`, `run.request_skip`); it never steps by
    itself.
    """

    _name: str | None = None

    @override
    def __init_subclass__(cls, **options: Any) -> None:
        """Let the constructor say what it calls an argument that it does not have."""
        super().__init_subclass__(**options)
        made: Any = cls
        if "__init__" in vars(cls):
            made.__init__ = names_checked(made.__init__)

    @property
    def name(self) -> str:
        """What this callback is called, unique in a run; its class's name unless set."""
        return type(self).__name__ if self._name is None else self._name

    @name.setter
    def name(self, name: str) -> None:
        self._name = name

    def on_fit_start(self, run: Run) -> None:
        """All parts are made, a resume has brought back its state, nothing has been trained."""

    def on_epoch_start(self, run: Run) -> None:
        """An epoch begins. Not repeated where a run resumes inside an epoch."""

    def on_step_start(self, run: Run) -> None:
        """A window begins."""

    def on_microbatch_start(self, run: Run, batch: Batch) -> None:
        """The forward of `batch`, on the device, comes next. Not for zero-weight repeats."""

    def on_microbatch_end(self, run: Run, batch: Batch) -> None:
        """The backward of `batch` is done."""

    def on_gradients(self, run: Run) -> None:
        """Gradients are accumulated, reduced, normalised and unscaled, not yet clipped.

        Not called after an overflow (of several optimizers, of all of them). The last place for
        `run.request_skip`.
        """

    def on_step_end(self, run: Run, result: StepResult) -> None:
        """The update was applied; `run.state.step` counts it already."""

    def on_step_skipped(self, run: Run, result: StepResult) -> None:
        """The window ended without an update: an overflow, or a request to skip."""

    def on_log(self, run: Run, values: Scalars) -> None:
        """`values` are those since the last log, over all processes; `loss` is among them."""

    def on_late_log(self, run: Run, values: Scalars) -> None:
        """`values` came after the last step's `on_log`, as from `on_evaluation_end`: no `loss`.

        At the end of a training, where no record of a step follows; for loggers.
        """

    def on_evaluation_start(self, run: Run) -> None:
        """An evaluation begins."""

    def on_evaluation_batch_end(self, run: Run) -> None:
        """One batch of an evaluation is done on every process."""

    def on_evaluation_end(self, run: Run, metrics: Scalars) -> None:
        """`metrics` are those of all loaders, over all processes."""

    def on_checkpoint_loaded(self, run: Run, path: Path) -> None:
        """The run goes on from the checkpoint in the folder `path`."""

    def on_checkpoint_start(self, run: Run) -> None:
        """The state is about to be taken for a checkpoint; the last place to refuse it."""

    def on_checkpoint_saved(self, run: Run, path: Path) -> None:
        """A checkpoint is committed in the folder `path`: it survives whatever comes.

        One that is written in the background may be that of an earlier step.
        """

    def on_epoch_end(self, run: Run) -> None:
        """An epoch is complete; `run.state.epoch` counts it already."""

    def on_exception(self, run: Run, error: BaseException) -> None:
        """`error` ends the training on this process. No collective may be called here."""

    def on_fit_end(self, run: Run) -> None:
        """The training is over, well or not."""

    def explain(self) -> str:
        """Return what this callback will do, for `Trainer.explain`; the class's own first words."""
        return (type(self).__doc__ or "").strip().partition("\n")[0]

    def state_dict(self) -> dict[str, Any]:
        """Return what must survive a restart.

        Without it attributes come back by themselves.
        """
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` returned; its tensors are on the CPU."""
        if state:
            raise ConfigError(
                f"The callback `{self.name}` keeps no state, but was given {sorted(state)}. "
                "Override `load_state_dict` along with `state_dict`."
            )

    # The rest is for callbacks that save, evaluate, write or act on all processes at once.

    schedules_evaluation = False
    """True in a callback that decides when to evaluate; then epochs no longer end with one."""
    per_process: bool | None = None
    """Whether the state differs by process. None: the processes compare theirs at each save.

    What differs, or is True, is saved by each process and comes back to it on as many processes;
    on another number `merge_state_dicts(states)` is asked for one state, given those of all
    processes in their order, and without such a method the resume is refused. False: the state of
    process 0 speaks for all, and nothing is compared.
    """

    alike: Sequence[str] | None = None
    """Of a callback that acts on all processes at once (it makes collectives, asks `agreed=True`,
    or changes what is trained or evaluated): the attributes which must be equal on all of them, and
    so must be its place among the others of its kind. None: a process may have its own."""
    evaluated_weights: str | None = None
    """In a callback that puts other weights into the model for an evaluation: the key of its
    state under which they are, tensors by name. Whoever loads the best weights takes these."""

    def check_output(self, run: Run) -> None:
        """Raise ConfigError where what this callback writes could not be written.

        Called by `fit` before `on_fit_start`, on every process; what one raises is raised by all.
        No collectives. Where nothing is written there is nothing to override.
        """

    def brings(self) -> Sequence[Callback]:
        """Return what is to run right after this one, where the list has none of its class."""
        return ()

    def state_template(self, run: Run) -> dict[str, Any]:
        """Return the structure of the state, with a `DTensor` where a process wants its shard only.

        A resume of a sharded run asks for it before `load_state_dict`, which then gets such tensors
        in the same form. What has no `DTensor` here is read whole.
        """
        return self.state_dict()

    def check_state_dict(self, run: Run, state: Mapping[str, Any]) -> None:
        """Raise where `load_state_dict` could not take a state.

        A resume asks all callbacks before anything of the checkpoint is applied; what only
        `load_state_dict` finds out leaves a run that cannot be used. Registered objects may have
        `check_state_dict(state)`.
        """


PARTIAL_HOOKS = ("on_microbatch_start", "on_microbatch_end")
"""Hooks that a process with nothing but a zero-weight repeat does not run (rule 16)."""

HOOKS: tuple[str, ...] = tuple(name for name in vars(Callback) if name.startswith("on_"))
