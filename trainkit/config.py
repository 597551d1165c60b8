"""The numbers of a run: one frozen dataclass that checks itself."""

import math
from dataclasses import dataclass, fields

from trainkit.errors import ConfigError

__all__ = ["TrainConfig", "Watchdog"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """The numbers of a run. All problems are reported in one error, before anything starts.

    Args:
        max_epochs: Passes over the training data. Give this or `max_steps`, not both.
        max_steps: Updates to apply.
        gradient_accumulation_steps: Micro-batches of one process in a window.
        max_grad_norm: L2 norm to which gradients are clipped; None: not clipped.
        max_grad_value: Absolute value to which each gradient element is clipped; None: not.
        seed: The one seed from which every random stream is derived.
        deterministic: Ask torch for deterministic algorithms while fit runs.
        log_every_n_steps: Updates between two calls of `on_log`.
        max_consecutive_skips: Skipped windows in a row after which the run gives up.
        drop_last_window: Drop the smaller last window of an epoch instead of applying it.
        split_batches: The loader's batch size is that of all processes together.
        sample_seeding: Seed the global generators while samples are fetched (DESIGN 2.13).
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

    def __post_init__(self) -> None:
        problems = [
            *self._duration_problems(),
            *self._count_problems(),
            *self._limit_problems(),
            *self._switch_problems(),
        ]
        if problems:
            raise ConfigError(" ".join(problems))

    def _duration_problems(self) -> list[str]:
        if self.max_epochs is None and self.max_steps is None:
            return ["Neither `max_epochs` nor `max_steps` was given: give one of them."]
        if self.max_epochs is not None and self.max_steps is not None:
            return [
                f"Both `max_epochs` ({self.max_epochs}) and `max_steps` ({self.max_steps}) were "
                "given: give only one of them, so that it is clear when training ends."
            ]
        return []

    def _count_problems(self) -> list[str]:
        counts = {
            "max_epochs": self.max_epochs,
            "max_steps": self.max_steps,
            "gradient_accumulation_steps": self.gradient_accumulation_steps,
            "log_every_n_steps": self.log_every_n_steps,
            "max_consecutive_skips": self.max_consecutive_skips,
        }
        problems = [
            f"`{name}` must be a whole number of at least 1, but is {value!r}."
            for name, value in counts.items()
            if value is not None and not (_is_int(value) and value >= 1)
        ]
        if not (_is_int(self.seed) and self.seed >= 0):
            problems.append(f"`seed` must be a whole number of at least 0, but is {self.seed!r}.")
        return problems

    def _limit_problems(self) -> list[str]:
        limits = {"max_grad_norm": self.max_grad_norm, "max_grad_value": self.max_grad_value}
        return [
            f"`{name}` must be a positive number or None, but is {value!r}."
            for name, value in limits.items()
            if value is not None and not _is_positive_number(value)
        ]

    def _switch_problems(self) -> list[str]:
        names = ("deterministic", "drop_last_window", "split_batches", "sample_seeding")
        return [
            f"`{name}` must be True or False, but is {getattr(self, name)!r}."
            for name in names
            if not isinstance(getattr(self, name), bool)
        ]


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_positive_number(value: object) -> bool:
    return (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and math.isfinite(value)
        and value > 0
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Watchdog:
    """Seconds in which a process of several must show progress, by what the run is doing.

    Progress is a new micro-batch, a new step or a new phase: a long evaluation is no reason to
    raise a limit, one batch or metric that takes long is. When a process stands still for longer,
    all processes write where they are, and the job ends. `math.inf` switches a limit off. One
    process alone is not watched.

    Raises:
        ConfigError: A limit is not a positive number.
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

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not number or math.isnan(value) or value <= 0:
                raise ConfigError(
                    f"`Watchdog({field.name}=...)` must be a positive number of seconds, but is "
                    f"{value!r}. Use `math.inf` for no limit."
                )

    def limit(self, phase: str, *, first: bool) -> float:
        """Return the seconds of a phase; `first` says that no step was made yet."""
        if phase == "train":
            return max(self.step, self.first_step) if first else self.step
        by_phase = {
            "setup": self.setup,
            "evaluate": self.evaluation,
            "save": self.save,
            "end": self.end,
        }
        return by_phase.get(phase, math.inf)
