"""Run a callback, or one of its hooks, on the main process only."""

from collections.abc import Callable, Mapping
from functools import wraps
from types import MethodType
from typing import Any, ParamSpec

from typing_extensions import override

from trainkit.distributed import collective_guard
from trainkit.errors import ConfigError
from trainkit.training.callback import HOOKS, Callback
from trainkit.training.run import Run

__all__ = ["MainProcess", "main_process_only"]

P = ParamSpec("P")


class MainProcess(Callback):
    """Runs the hooks of another callback on the main process only.

    A collective inside them raises `DistributedError`, also on one process, because the others
    would never come to it. Requests to stop or to evaluate must be left without `agreed=True`,
    and `run.request_skip` cannot be used: the other processes do not see them.

    Args:
        callback: Keeps its name and its state.
    """

    per_process = False  # those of the others have seen nothing

    def __init__(self, callback: Callback) -> None:
        if not isinstance(callback, Callback):
            raise ConfigError(
                f"`callback` must be an instance of `trainkit.Callback`, but is {callback!r}."
            )
        if callback.schedules_evaluation:
            raise ConfigError(
                f"`{callback.name}` decides when to evaluate, which every process must do alike. "
                "Use it without `MainProcess`."
            )
        self.callback = callback
        self.name = callback.name
        for hook in HOOKS:
            inner = getattr(callback, hook)
            # Only these, so that hooks which nobody overrides still cost nothing.
            if getattr(inner, "__func__", inner) is not getattr(Callback, hook):
                setattr(self, hook, MethodType(_forwarding(hook), self))

    @override
    def explain(self) -> str:
        return f"{self.callback.explain()} On the main process only."

    @override
    def check_output(self, run: Run) -> None:
        if run.is_main_process:
            self.callback.check_output(run)

    @override
    def state_dict(self) -> dict[str, Any]:
        return self.callback.state_dict()

    @override
    def check_state_dict(self, run: Run, state: Mapping[str, Any]) -> None:
        self.callback.check_state_dict(run, state)

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.callback.load_state_dict(state)


def main_process_only(function: Callable[P, None]) -> Callable[P, None]:
    """Make a hook, or a function whose first or second argument is a run, do nothing elsewhere.

    A collective inside it raises `DistributedError`, also on one process.
    """

    @wraps(function)
    def on_main(*args: P.args, **kwargs: P.kwargs) -> None:
        run = next((value for value in args[:2] if isinstance(value, Run)), kwargs.get("run"))
        if not isinstance(run, Run):
            raise ConfigError(
                f"`{function.__qualname__}` is decorated with `main_process_only`, so its first "
                "or second argument must be a `Run`. Pass the run."
            )
        if run.is_main_process:
            with collective_guard.only(function.__qualname__):
                function(*args, **kwargs)

    return on_main


def _forwarding(hook: str) -> Callable[..., None]:
    """Return a method that calls `hook` of the callback inside on the main process."""

    def forward(self: MainProcess, run: Run, *args: Any) -> None:
        if run.is_main_process:
            with collective_guard.only(f"{self.name}.{hook}"):
                getattr(self.callback, hook)(run, *args)

    return forward
