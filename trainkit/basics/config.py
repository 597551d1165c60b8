"""The numbers of a run, in frozen dataclasses that check themselves, and checks of arguments."""

import inspect
import math
import numbers
import os
from collections.abc import Callable
from dataclasses import dataclass, fields
from datetime import timedelta
from functools import wraps
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, cast, get_args, get_origin

from trainkit.errors import ConfigError
from trainkit.lazy import ask

T = TypeVar("T", bound=Callable[..., Any])

# What is said of a choice where choices are listed.
_MEANINGS = {"min": " (lower is better)", "max": " (higher is better)"}
# What an annotation accepts, and how it is called; other classes accept their own.
_PLAIN: dict[type, tuple[tuple[type, ...], str]] = {
    bool: ((bool,), "True or False"),
    int: ((numbers.Integral,), "a whole number"),
    float: ((numbers.Real,), "a number"),
    str: ((str,), "text"),
    Path: ((str, os.PathLike), "a path"),
    NoneType: ((NoneType,), "None"),
}


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)


_COUNTS = (
    "max_epochs",
    "max_steps",
    "gradient_accumulation_steps",
    "log_every_n_steps",
    "max_consecutive_skips",
    "dry_run",
)
_SWITCHES = (
    "deterministic",
    "drop_last_window",
    "split_batches",
    "sample_seeding",
)
_RULES: tuple[tuple[tuple[str, ...], str, Callable[[Any], bool]], ...] = (
    (_COUNTS, "a whole number of at least 1", lambda value: _is_int(value) and value >= 1),
    (
        ("limit_train_batches", "limit_eval_batches", "overfit_batches"),
        "a whole number of batches of at least 1, a fraction of them such as 0.1, or None",
        lambda value: value >= 1 if _is_int(value) else _is_number(value) and 0 < value <= 1,
    ),
    (("seed",), "a whole number of at least 0", lambda value: _is_int(value) and value >= 0),
    (
        ("max_grad_norm", "max_grad_value"),
        "a positive number or None",
        lambda value: _is_number(value) and 0 < value < math.inf,
    ),
    (_SWITCHES, "True or False", lambda value: isinstance(value, bool)),
    (
        ("gradient_checkpointing",),
        'True, False, "selective" or "offload"',
        lambda value: isinstance(value, bool) or value in ("selective", "offload"),
    ),
)
"""What the settings of `TrainConfig` must be; None is allowed where it is the default."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """The numbers of a run. All problems are reported in one error, before anything starts.

    Args:
        max_epochs: Passes over the training data. Give this or `max_steps`, not both.
        max_steps: Updates to apply.
        gradient_accumulation_steps: Micro-batches of one process in a window (rule 1).
        max_grad_norm: L2 norm to which gradients are clipped; None: not clipped (rule 8).
        max_grad_value: Absolute value to which each gradient element is clipped; None: not.
        seed: The one seed from which every random stream is derived (rule 12).
        deterministic: Ask torch for deterministic algorithms while fit runs (rule 30).
        log_every_n_steps: Updates between two calls of `on_log` (rule 35).
        max_consecutive_skips: Skipped windows in a row after which the run gives up (rule 2).
        drop_last_window: Drop the smaller last window of an epoch instead of applying it (rule 7).
        split_batches: The training loader's batch size is that of all processes together (rule 14).
        sample_seeding: Seed the global generators while samples are fetched (rule 13).
        gradient_checkpointing: Compute activations again in backward, all or some of them.
        limit_train_batches: Micro-batches of one process in an epoch, or a fraction of them.
        limit_eval_batches: The same of each evaluation during training.
        overfit_batches: Both, with the same training batches in every epoch (rule 14).
        dry_run: Updates after which a try ends, and batches of each evaluation.
    """

    max_epochs: int | None = None
    max_steps: int | None = None
    gradient_accumulation_steps: int = 1
    max_grad_norm: float | None = None
    max_grad_value: float | None = None
    seed: int = 0
    deterministic: bool = False
    log_every_n_steps: int = 50
    max_consecutive_skips: int = 64
    drop_last_window: bool = False
    split_batches: bool = False
    sample_seeding: bool = True
    gradient_checkpointing: bool | str = False
    limit_train_batches: float | None = None
    limit_eval_batches: float | None = None
    overfit_batches: float | None = None
    dry_run: int | None = None

    def __post_init__(self) -> None:
        problems = []
        if self.max_epochs is None and self.max_steps is None:
            problems.append("Neither `max_epochs` nor `max_steps` was given: give one of them.")
        if self.max_epochs is not None and self.max_steps is not None:
            problems.append(
                f"Both `max_epochs` ({self.max_epochs}) and `max_steps` ({self.max_steps}) were "
                "given: give only one of them, so that it is clear when training ends."
            )
        optional = {each.name for each in fields(self) if each.default is None}
        for names, expected, fits in _RULES:
            for name in names:
                value = getattr(self, name)
                if not fits(value) and not (value is None and name in optional):
                    problems.append(f"`{name}` must be {expected}, but is {value!r}.")
        if self.overfit_batches and (self.limit_train_batches or self.limit_eval_batches):
            problems.append(
                "`overfit_batches` limits training and evaluation: leave `limit_train_batches` and "
                "`limit_eval_batches` out."
            )
        if problems:
            raise ConfigError(" ".join(problems))

    @property
    def limits(self) -> tuple[float | None, float | None]:
        """Micro-batches of one process that an epoch and an evaluation have at most."""
        evaluated = self.dry_run or self.overfit_batches or self.limit_eval_batches
        return self.overfit_batches or self.limit_train_batches, evaluated


@dataclass(frozen=True, kw_only=True, slots=True)
class Watchdog:
    """Seconds in which a process of several must show progress, by what the run is doing.

    Progress is a new micro-batch, a new step or a new phase: a long evaluation is no reason to
    raise a limit, one batch or metric that takes long is. When a process stands still for longer,
    all processes write where they are, and the job ends. `math.inf` switches a limit off. One
    process alone is not watched.

    Raises:
        ConfigError: A limit is not a positive number, or the time-out is none.
    """

    setup: float = 3600.0
    """From the call of `fit` to the first step: data preparation, resume, rehearsal."""
    first_step: float = 3600.0
    """Until the first update of a fit, which may compile the model."""
    step: float = 900.0
    """Between two micro-batches or steps of training."""
    evaluation: float = 3600.0
    """Between two batches of an evaluation, and for its metrics."""
    save: float = 3600.0
    """For one checkpoint."""
    end: float = 3600.0
    """From the last step to the return of `fit`."""
    process_group_timeout: timedelta | float | None = None
    """How long a collective may wait before it raises, in every process group: a `timedelta` or
    seconds. None: half an hour, which torch has for the CPU; in groups that were there, theirs."""

    def __post_init__(self) -> None:
        self.group_timeout()
        for field in fields(self)[:-1]:
            value = getattr(self, field.name)
            if not _is_number(value) or value <= 0:
                raise ConfigError(
                    f"`Watchdog({field.name}=...)` must be a positive number of seconds, but is "
                    f"{value!r}. Use `math.inf` for no limit."
                )

    def group_timeout(self) -> timedelta | None:
        """Return `process_group_timeout` as torch takes it."""
        timeout = self.process_group_timeout
        if timeout is None:
            return None
        return as_timeout(timeout, "Watchdog(process_group_timeout=...)")

    def limit(self, phase: str, *, first: bool) -> float:
        """Return the seconds of a phase; `first` says that no step was made yet."""
        if phase == "train":
            return max(self.step, self.first_step) if first else self.step
        limit: float = getattr(self, "evaluation" if phase == "evaluate" else phase, math.inf)
        return limit


def as_timeout(value: Any, name: str) -> timedelta:
    """Return a setting that is a `timedelta` or a number of seconds."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    # A thousandth of a second is the smallest that torch counts.
    if number and 1e-3 <= value <= 1e9:
        return timedelta(seconds=value)
    if isinstance(value, timedelta) and value >= timedelta(milliseconds=1):
        return value
    raise ConfigError(
        f"`{name}` must be a positive `datetime.timedelta` or number of seconds, but is {value!r}."
    )


def checked(target: T) -> T:
    """Make a constructor, or that of a class, refuse arguments of a wrong type.

    What is annotated by more than classes or a `Literal`, such as a callable or a list of
    something, is not looked at.
    """
    if isinstance(target, type):
        made: Any = target
        made.__init__ = checked(made.__init__)
        return target
    signature = inspect.signature(target)

    @wraps(target)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            given = signature.bind(*args, **kwargs).arguments
        except TypeError:
            ask("refuse_unknown")(target, kwargs)
            given = {}  # Python says better what is missing or too many
        parameters = signature.parameters
        problems = []
        for name, value in given.items():
            parameter = parameters[name]
            is_one = parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
            if is_one and parameter.annotation is not parameter.empty:
                problems.append(_wrong(name, value, parameter.annotation))
        if any(problems):
            raise ConfigError(" ".join(filter(None, problems)))
        return target(*args, **kwargs)

    return cast(T, call)


def names_checked(target: T) -> T:
    """Make a function say what it calls an argument that it does not have, or where that goes.

    Raises:
        ConfigError: When it is called with an unknown name.
    """

    @wraps(target)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return target(*args, **kwargs)
        except TypeError:
            ask("refuse_unknown")(target, kwargs)
            raise

    return cast(T, call)


def check_argument(name: str, value: object, annotation: Any) -> None:
    """Raise where an argument is not of a type.

    Args:
        annotation: What it must be, such as `str | Path | None`.
    """
    problem = _wrong(name, value, annotation)
    if problem:
        raise ConfigError(problem)


def check_whole(name: str, value: object, least: int = 1) -> None:
    """Raise ConfigError where the argument `name` is not a whole number from `least` on."""
    if not _is_int(value) or value < least:  # type: ignore[operator]
        raise ConfigError(f"`{name}` must be a whole number from {least} on, but is {value!r}.")


def _wrong(name: str, value: object, annotation: Any) -> str | None:
    if get_origin(annotation) is Literal:
        known = get_args(annotation)
        wanted = " or ".join(f'"{choice}"{_MEANINGS.get(choice, "")}' for choice in known)
        return None if value in known else f"`{name}` must be {wanted}, but is {value!r}."
    alone = NoneType if annotation is None else annotation
    kinds = get_args(annotation) if isinstance(annotation, UnionType) else (alone,)
    if not all(isinstance(kind, type) and kind is not Any for kind in kinds):
        return None
    if any(_is_of(value, kind) for kind in kinds):
        return None
    named = [kind for kind in kinds if kind is not str or Path not in kinds]
    words = [_PLAIN[kind][1] if kind in _PLAIN else f"a `{kind.__name__}`" for kind in named]
    quotes = " Leave out the quotes." if isinstance(value, str) and float in kinds else ""
    listed = " or ".join(words)
    if listed.count(" or ") > 1:
        listed = f"{', '.join(listed.split(' or ')[:-1])} or {words[-1]}"
    return f"`{name}` must be {listed}, but is {value!r}.{quotes}"


def _is_of(value: object, kind: type) -> bool:
    if kind not in _PLAIN:
        return isinstance(value, kind)
    if isinstance(value, bool) != (kind is bool):
        return False
    if kind is float and isinstance(value, float) and math.isnan(value):
        return False
    return isinstance(value, _PLAIN[kind][0])
