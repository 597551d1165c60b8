"""Callbacks for tests: one thing that happens at one moment of a run, or is noted there."""

from collections.abc import Callable, Mapping
from typing import Any

from trainkit import Callback, Run, StepResult


class Action:
    """Calls a function of a test, whose records are of the whole test: no resume looks into it."""

    __slots__ = ("call",)

    def __init__(self, call: Callable[..., Any]) -> None:
        self.call = call

    def __call__(self, *given: Any) -> Any:
        return self.call(*given)


class OfOneRun(Callback):
    """Begins anew at a resume: what it keeps is of the run that it sees."""

    def state_dict(self) -> dict[str, Any]:
        return {}


class On(Callback):
    """Calls `action` whenever `hook` comes, with what the hook gets after the run.

    Args:
        hook: A method of `Callback`, such as `Callback.on_step_end`.
        action: Gets what the hook gets: first the run.
    """

    def __init__(self, hook: Callable[..., None], action: Callable[..., Any]) -> None:
        setattr(self, hook.__name__, Action(action))


class At(Callback):
    """Calls `action` with the run once this many steps are done."""

    def __init__(self, step: int | None, action: Callable[[Run], Any]) -> None:
        self.step, self.action = step, Action(action)

    def on_step_end(self, run: Run, result: StepResult) -> None:
        if run.state.step == self.step:
            self.action(run)


class StopsAt(At):
    """Asks the run to stop once this many steps are done."""

    def __init__(self, step: int | None) -> None:
        super().__init__(step, lambda run: run.request_stop("enough for today", agreed=True))


class FailsAt(At):
    """Raises `error` once this many steps are done."""

    def __init__(self, step: int | None, error: BaseException | None = None) -> None:
        self.error = error or ValueError("enough")
        super().__init__(step, self._fail)

    def _fail(self, run: Run) -> None:
        raise self.error


class Skips(Callback):
    """Asks to skip windows, which count from 0."""

    def __init__(self, *attempts: int) -> None:
        self.attempts = attempts

    def on_gradients(self, run: Run) -> None:
        if run.state.attempts in self.attempts:
            run.request_skip("a wish")


class Counts(Callback):
    """Counts the steps of a fit."""

    steps = 0

    def on_step_end(self, run: Run, result: StepResult) -> None:
        self.steps += 1


class Counting(Counts):
    """Counts on after a resume: the number is its state."""

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.steps = state["steps"]


class Logged(OfOneRun):
    """Keeps what is logged under names that begin so, by the step."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self.seen: dict[int, dict[str, float]] = {}

    def on_log(self, run: Run, values: dict[str, float]) -> None:
        self.seen[run.state.step] = {n: v for n, v in values.items() if n.startswith(self.prefix)}


class Rates(OfOneRun):
    """Keeps the learning rate of every step."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_gradients(self, run: Run) -> None:
        self.seen.append(float(run.optimizer.param_groups[0]["lr"]))
