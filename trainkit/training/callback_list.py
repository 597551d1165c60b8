"""The callbacks of a run, and how they are called."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Concatenate, ParamSpec

from trainkit.distributed import collective_guard
from trainkit.errors import ConfigError
from trainkit.training.callback import HOOKS, PARTIAL_HOOKS, Callback

P = ParamSpec("P")


class CallbackList:
    """The callbacks of a run; for each hook it holds only those that override it."""

    def __init__(self, callbacks: Iterable[Callback]) -> None:
        given = tuple(callbacks)
        _check(given)
        self.callbacks = tuple(_with_others(given))
        self.writers = tuple(each for each in self.callbacks if _overrides(each, "check_output"))
        self._listeners: dict[Callable[..., None], list[tuple[Callback, Callable[..., None]]]] = {
            getattr(Callback, hook): [
                (each, _listener(each, hook)) for each in self.callbacks if _overrides(each, hook)
            ]
            for hook in HOOKS
        }

    def emit(
        self, hook: Callable[Concatenate[Any, P], None], *args: P.args, **kwargs: P.kwargs
    ) -> None:
        """Call `hook`, a method of `Callback`, on every callback that overrides it."""
        for callback, listener in self._listeners[hook]:
            try:
                listener(*args, **kwargs)
            except BaseException as error:
                error.add_note(f"In the hook `{hook.__name__}` of the callback `{callback.name}`.")
                raise

    def emit_past_errors(
        self,
        hook: Callable[Concatenate[Any, P], None],
        failure: BaseException | None,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> None:
        """Call `hook` on every callback, then raise what they raised; `failure` is on its way."""
        first = failure
        for callback, listener in self._listeners[hook]:
            try:
                listener(*args, **kwargs)
            except BaseException as error:
                where = f"the hook `{hook.__name__}` of the callback `{callback.name}`"
                if first is None:
                    first = error
                    error.add_note(f"In {where}.")
                else:
                    first.add_note(f"After it {where} raised {error!r}.")
        if first is not None and failure is None:
            raise first

    def listens(self, hook: Callable[..., None]) -> bool:
        """Whether any callback overrides `hook`."""
        return bool(self._listeners[hook])

    @property
    def logs(self) -> bool:
        """Whether any callback takes what is logged."""
        return self.listens(Callback.on_log) or self.listens(Callback.on_late_log)

    @property
    def alike(self) -> dict[str, dict[str, Any]]:
        """What all processes must have alike: settings by the name of the callback, or its kind."""
        by_key = {}
        for each in self.callbacks:
            if each.alike is not None:
                # A process may do more with one, in a class of its own.
                kind = next(kind.__name__ for kind in type(each).mro() if "alike" in vars(kind))
                by_key[each._name or kind] = {name: getattr(each, name) for name in each.alike}
        return by_key

    def names(self, hook: str) -> list[str]:
        """Return the names of the callbacks that override `hook`, in the order they run in."""
        return [callback.name for callback in self.callbacks if _overrides(callback, hook)]

    @property
    def schedule_evaluation(self) -> bool:
        """Whether any callback decides when to evaluate."""
        return any(callback.schedules_evaluation for callback in self.callbacks)


def _with_others(given: tuple[Callback, ...]) -> Iterator[Callback]:
    """Yield the callbacks and what they bring, one of each class."""
    kinds = {type(callback) for callback in given}
    for callback in given:
        yield callback
        for other in callback.brings():
            if type(other) not in kinds:
                kinds.add(type(other))
                yield other


def _overrides(callback: Callback, hook: str) -> bool:
    own = getattr(callback, hook)
    return getattr(own, "__func__", own) is not getattr(Callback, hook)


def _listener(callback: Callback, hook: str) -> Callable[..., None]:
    """Return what to call for a hook; a collective in one that not all processes run raises."""
    own: Callable[..., None] = getattr(callback, hook)
    if hook not in PARTIAL_HOOKS:
        return own

    def guarded(*args: Any, **kwargs: Any) -> None:
        with collective_guard.only(hook):
            own(*args, **kwargs)

    return guarded


def _check(callbacks: tuple[Callback, ...]) -> None:
    names: set[str] = set()
    for callback in callbacks:
        if isinstance(callback, type):
            raise ConfigError(
                f"`callbacks` must hold instances, but holds the class `{callback.__name__}`. "
                f"Write `{callback.__name__}(...)`."
            )
        if not isinstance(callback, Callback):
            raise ConfigError(
                f"`callbacks` must hold instances of `trainkit.Callback`, but holds "
                f"{type(callback).__name__!r}. Inherit from `Callback`."
            )
        if callback.name in names:
            raise ConfigError(
                f"Two callbacks are called {callback.name!r}; their states could not be told "
                "apart. Set `name` of one of them, for example `callback.name = "
                f'"{callback.name}-2"`.'
            )
        names.add(callback.name)
        for name in dir(type(callback)):
            if name.startswith("on_") and name not in HOOKS:
                from trainkit.basics.parsing import nearest  # only errors need it

                raise ConfigError(
                    f"`{type(callback).__name__}.{name}` is no hook and would never be called."
                    f"{nearest(name, HOOKS)} The docstring of `Callback` lists all hooks. Give the "
                    "method a name without `on_` if it is not meant as one."
                )
