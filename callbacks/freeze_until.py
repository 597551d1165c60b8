"""Keep parameters as they are until a step or an epoch."""

import difflib
from collections.abc import Collection, Mapping
from fnmatch import fnmatchcase
from typing import Any

from torch import nn
from typing_extensions import override

from trainkit.basics.config import check_whole
from trainkit.errors import ConfigError
from trainkit.training.callback import Callback
from trainkit.training.run import Run
from trainkit.types import StepResult

__all__ = ["FreezeUntil"]

SHOWN_NAMES = 5


class FreezeUntil(Callback):
    """Freezes parameters at the start, and thaws each when its step or epoch comes.

    `FreezeUntil(epoch={"encoder": 1})` trains everything but the encoder in the first epoch. For
    layer-wise thawing, name several: `step={"encoder.layers.1": 500, "encoder.layers.0": 1000}`.
    (Howard and Ruder, "Universal language model fine-tuning for text classification", 2018, call
    it gradual unfreezing.)

    A frozen parameter gets no gradient: neither update nor weight decay nor momentum touches it,
    and it counts for nothing in `grad_norm` and clipping. The optimizer holds it from the start,
    and makes its state when it first has a gradient, so an AdamW corrects its bias from there.
    Learning rates follow the schedule of all. Modules stay in training mode: dropout draws, and
    the statistics of batch normalisation move. What the user froze before `fit` stays frozen, and
    what is frozen at the end of `fit` is handed back trainable.

    What is frozen follows from the counters alone, so nothing is saved, and a resume is exact.

    Args:
        step: Updates to be made before a parameter is trained, by the full name of a module or
            parameter; `*`, `?` and `[...]` stand for any text, as in file names. What several
            match waits for the last.
        epoch: The same in epochs completed.

    Raises:
        ConfigError: Nothing was named, or a number is not a whole one from 1 on. At the start of
            `fit`: a name matches no parameter that is trained, or nothing is left to train.
    """

    alike = ("step", "epoch")

    def __init__(
        self, *, step: Mapping[str, int] | None = None, epoch: Mapping[str, int] | None = None
    ) -> None:
        self.step = _checked("step", step)
        self.epoch = _checked("epoch", epoch)
        if not self.step and not self.epoch:
            raise ConfigError(
                "`FreezeUntil` was given nothing to freeze. Name modules or parameters, for "
                'example `FreezeUntil(epoch={"encoder": 1})`.'
            )
        self._frozen: dict[str, nn.Parameter] = {}  # those that this callback froze

    @override
    def on_fit_start(self, run: Run) -> None:
        held = {id(p) for p in run.parameters}
        self._frozen = {}
        trained = {
            name: p
            for name, p in run.module.named_parameters()
            if id(p) in held and p.requires_grad
        }
        for pattern in (*self.step, *self.epoch):
            if not any(_matches(name, pattern) for name in trained):
                raise _unmatched(pattern, run.module, trained)
        self._frozen = {name: p for name, p in trained.items() if self._waits(name, run)}
        if len(self._frozen) == len(trained):
            raise ConfigError(
                f"`FreezeUntil` freezes all {len(trained)} parameters that are trained, so the "
                "first step would change nothing. Leave at least one out."
            )
        for p in self._frozen.values():
            p.requires_grad_(False)

    @override
    def on_step_end(self, run: Run, result: StepResult) -> None:
        if self._frozen:
            self._thaw(run)

    @override
    def on_epoch_end(self, run: Run) -> None:
        if self._frozen:
            self._thaw(run)

    @override
    def on_fit_end(self, run: Run) -> None:
        for p in self._frozen.values():
            p.requires_grad_(True)
        self._frozen = {}

    def _thaw(self, run: Run) -> None:
        """Thaw what is not to wait any longer."""
        for name in [name for name in self._frozen if not self._waits(name, run)]:
            self._frozen.pop(name).requires_grad_(True)

    def _waits(self, name: str, run: Run) -> bool:
        """Return whether the time of a parameter has not come."""
        steps = (until for pattern, until in self.step.items() if _matches(name, pattern))
        epochs = (until for pattern, until in self.epoch.items() if _matches(name, pattern))
        state = run.state
        return state.step < max(steps, default=0) or state.epoch < max(epochs, default=0)


def _checked(argument: str, given: Any) -> dict[str, int]:
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise ConfigError(
            f"`{argument}` must be a mapping from names to whole numbers, such as "
            f'`{{"encoder": 1}}`, but is {given!r}.'
        )
    for name, until in given.items():
        if not isinstance(name, str) or not name:
            raise ConfigError(f"`{argument}` must name modules or parameters, but has {name!r}.")
        check_whole(f"{argument}[{name!r}]", until)
    return dict(given)


def _matches(name: str, pattern: str) -> bool:
    """Return whether a pattern matches the name of a parameter, or of a module around it."""
    parts = name.split(".")
    return any(fnmatchcase(".".join(parts[:count]), pattern) for count in range(1, len(parts) + 1))


def _unmatched(pattern: str, module: nn.Module, trained: Collection[str]) -> ConfigError:
    """Return what to raise for a pattern that matches nothing that is trained."""
    names = [name for name, _ in module.named_parameters()]
    if any(_matches(name, pattern) for name in names):
        return ConfigError(
            f"`FreezeUntil` is to thaw {pattern!r}, but what it matches is not trained at all: it "
            "is frozen already, or the optimizer does not hold it. Leave it out, or set "
            "`requires_grad` and give it to the optimizer."
        )
    known = [*(name for name, _ in module.named_modules() if name), *trained]
    near = difflib.get_close_matches(pattern, known, n=SHOWN_NAMES, cutoff=0.0)
    return ConfigError(
        f"`FreezeUntil` finds no module or parameter {pattern!r}. The nearest names are {near}."
    )
