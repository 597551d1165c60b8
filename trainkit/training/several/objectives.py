"""Several optimizers of one training, and which of them a window is for (rule 9a)."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from typing_extensions import override

from trainkit.basics.torch_internals import compiled_call
from trainkit.data import MicroBatch, Window
from trainkit.distributed.collectives import require_equal
from trainkit.errors import ConfigError, by_process, quoted
from trainkit.strategies import Strategy
from trainkit.training.objectives import Losses, Objective, Objectives, TrainingStep
from trainkit.training.run_parts import TrainState
from trainkit.training.weighting import parse
from trainkit.types import NOTHING, StepOutput, StepResult

Weight: TypeAlias = Tensor | float | None
"""How much a loss counts; None: the samples of its micro-batch."""


@dataclass(kw_only=True, eq=False)
class NamedObjective(Objective):
    """That of one of several optimizers: its gradients reach its own parameters alone."""

    parameter_names: frozenset[str]
    """Of what it updates, in the model."""
    training_step: TrainingStep | None = None
    """Its own, where optimizers take turns; the parameters of others are frozen in all of it."""
    is_checked: bool = False
    """Whether a window of the fit had all its gradients."""
    steps: int = 0
    """Updates that its optimizer has applied."""
    skipped_steps: int = 0
    """Windows for it that ended without its update."""
    consecutive_skips: int = 0
    """Skipped windows since its last update."""

    def alone(self) -> AbstractContextManager[object]:
        """Return a context in which gradients reach its parameters alone."""
        if self.training_step is not None:
            return NOTHING
        return only(self.weighting.module, self.parameter_names)

    def begin(self, window: Window) -> None:
        self.weighting.begin(window)
        if len(set(self.parameters)) != len(self.parameter_names):
            raise ConfigError(
                f"The optimizer `{self.name}` has other parameters than when the fit began. "
                "Give each of several optimizers all that it will train from the start, and "
                "freeze by `FreezeUntil` what it is to train later."
            )

    @override
    def backward(self, loss: Tensor, *, is_last: bool, retain_graph: bool) -> None:
        def run_backward(loss: Tensor, **options: Any) -> None:
            # Entered for each backward: before it, sharded parameters are whole, or they are not.
            with self.alone():
                self.precision.backward(loss, **options)

        if is_last and self.weighting.strategy.processes.size > 1:
            with self.alone():
                self.weighting.strategy.begin_reduction(self.model)
        with NOTHING if is_last else self.weighting.strategy.no_sync(self.model):
            self.weighting.backward(loss, run_backward, retain_graph=retain_graph)

    @override
    def finish(self, state: TrainState) -> bool:
        if self.steps + self.skipped_steps == 0 and self.weighting.has_own_samples:
            trained = [p for p in self.parameters if p.requires_grad]
            if trained and all(p.grad is None for p in trained):
                raise ConfigError(
                    f"The loss of the optimizer `{self.name}` reaches none of its parameters: its "
                    "update would change nothing. Compute it from what they compute, not "
                    "detached, or give it to the optimizer that is meant."
                )
        with self.alone():
            if not self.is_checked:  # before the first reduction, which it begins with
                self.weighting.strategy.check_gradients(self.weighting.module)
                self.is_checked = True
            return super().finish(state)

    def count(self, result: StepResult) -> None:
        """Count a window that was for it."""
        self.steps += not result.skipped
        self.skipped_steps += result.skipped
        self.consecutive_skips = self.consecutive_skips + 1 if result.skipped else 0

    def state_dict(self) -> dict[str, Any]:
        """Return what must survive a restart, but for the state of the optimizer itself."""
        counters = {name: getattr(self, name) for name in COUNTERS}
        return counters | {"precision": self.precision.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name in COUNTERS:
            setattr(self, name, state[name])
        self.precision.load_state_dict(state["precision"])


COUNTERS = ("steps", "skipped_steps", "consecutive_skips")


class OneLoss(Objectives):
    """Several optimizers with one loss, of which each updates its part of the gradients.

    Args:
        of_all: With all optimizers as one.
        by_name: Each by itself, in the order in which they are updated.
    """

    is_shared: bool | None = True
    """Whether one loss is that of all; None: the first step will tell."""

    def __init__(self, of_all: Objective, by_name: Mapping[str, NamedObjective]) -> None:
        super().__init__(of_all)
        self.by_name, self._log = by_name, of_all.weighting.log

    @override
    def put_together(self, results: Mapping[str, StepResult]) -> StepResult:
        shared = results.get("")
        for name, each in self.by_name.items():
            if (own := shared or results.get(name)) is not None:
                each.count(own)
        if shared is not None:
            return shared
        first, *others = [results[each.name] for each in self.active]
        loss = first.loss
        for own in others:
            loss = loss + own.loss
        is_skipped = all(own.skipped for own in results.values())
        result = StepResult(loss, skipped=is_skipped, optimizers=results, weight=first.weight)
        if result.skipped:
            result.reason = " and ".join(dict.fromkeys(str(r.reason) for r in results.values()))
        elif self._log.is_read:
            self._log.sums.add("loss", loss, result.weight)
        return result

    @override
    def optimize(self, name: object, loss: object, weight: Weight, loader: str) -> None:
        classes = ", ".join(f"{n}: {type(o.optimizer).__name__}" for n, o in self.by_name.items())
        raise ConfigError(
            f"`run.optimize` was called by a step that returns the loss: {classes}. {_EITHER}"
        )

    @override
    def state_dict(self) -> dict[str, Any]:
        by_name = {name: each.state_dict() for name, each in self.by_name.items()}
        return {"together": self.is_shared, "by_name": by_name}

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.is_shared = state["together"]
        for name, each in self.by_name.items():
            each.load_state_dict(state["by_name"][name])


_EITHER = "A step either returns the loss, or gives one to `run.optimize` for each optimizer."


class Turns(OneLoss):
    """Optimizers that take turns, so many windows in a row each."""

    is_shared = False

    def __init__(
        self, of_all: Objective, by_name: Mapping[str, NamedObjective], windows: Mapping[str, int]
    ) -> None:
        super().__init__(of_all, by_name)
        _drop_wrapper(of_all)
        self._turns = [name for name, count in windows.items() for _ in range(count)]

    @override
    def planned(self, name: str, windows: int | None) -> int | None:
        if windows is None:
            return None
        rounds, rest = divmod(windows, len(self._turns))
        return rounds * self._turns.count(name) + self._turns[:rest].count(name)

    @override
    def begin(self, window: Window, state: TrainState) -> AbstractContextManager[object]:
        turn = self.by_name[self._turns[state.attempts % len(self._turns)]]
        module = turn.weighting.module
        turn.weighting.strategy.share_buffers(module)  # for all forwards of the window
        turn.begin(window)
        self.active, self._turn = [turn], turn
        return only(module, turn.parameter_names)

    @override
    def losses(self, step: TrainingStep, micro_batch: MicroBatch) -> Losses:
        turn = self._turn
        assert turn.training_step is not None
        output = turn.training_step(turn.weighting.module, micro_batch.data)
        return ((turn, turn.weighting.weigh(output, micro_batch), False),)


class ByName(OneLoss):
    """Optimizers to which the training step gives losses, to some or all in each window.

    A step that returns a loss makes that of all; which it is, the first one tells.

    Args:
        one_backward: Whether a forward allows no other backward than one, by the settings.
    """

    is_shared = None

    def __init__(
        self, of_all: Objective, by_name: Mapping[str, NamedObjective], *, one_backward: bool
    ) -> None:
        super().__init__(of_all, by_name)
        self._one_backward = one_backward
        self._given: dict[str, dict[str, StepOutput]] | None = None
        """The losses of the micro-batch under way, by optimizer, and by loader or term, "" where
        that was left out; None outside of a step."""

    @override
    def begin(self, window: Window, state: TrainState) -> AbstractContextManager[object]:
        if self.is_shared:
            return super().begin(window, state)
        self._of_all.weighting.strategy.share_buffers(self._of_all.weighting.module)
        self._window, self.active = window, []
        return NOTHING

    @override
    def losses(self, step: TrainingStep, micro_batch: MicroBatch) -> Losses:
        if self.is_shared:
            return super().losses(step, micro_batch)
        outputs = self._outputs(step, micro_batch)
        if not self.active:
            self._choose([*outputs])
        if outputs.keys() != {each.name for each in self.active}:
            raise ConfigError(
                f"`run.optimize` was called for {_listed(outputs)} in one micro-batch and for "
                f"{_listed([each.name for each in self.active])} in another one of the same "
                "window. Give losses to the same optimizers in all micro-batches of a window, of "
                "weight 0 where there is nothing to learn."
            )
        losses = [each.weighting.weigh(outputs.pop(each.name), micro_batch) for each in self.active]
        return self._one_by_one(losses)

    def _one_by_one(self, losses: list[Tensor]) -> Losses:
        """Yield losses, and hold none whose backward is over: with it goes its own graph."""
        for each in self.active:
            yield each, losses.pop(0), bool(losses)

    def _outputs(self, step: TrainingStep, micro_batch: MicroBatch) -> dict[str, Any]:
        """Return the losses that the step gave, by optimizer; under "" one for all of them."""
        self._given = {}
        try:
            output = step(self._of_all.weighting.module, micro_batch.data)
        finally:
            given, self._given = self._given, None
        if not given:
            if output is None or self.is_shared is False:
                raise ConfigError(
                    f"`training_step` optimized nothing: it returned {type(output).__name__!r} and "
                    "called no `run.optimize`"
                    + ("" if output is None else ", as it did before")
                    + ". Give it the loss of each optimizer in every window of at least one, or "
                    "always return one loss for all."
                )
            return {"": output}
        if isinstance(output, Mapping) and "loss" not in output:
            self._log.add(output, None, "mean")
        elif output is not None:
            raise ConfigError(
                f"`training_step` called `run.optimize` and returned {type(output).__name__!r} "
                "too. Return nothing, or a mapping of values to log, in which `loss` is none."
            )
        chosen = {name: given[name] for name in self.by_name if name in given}
        return {name: own.get("", own) for name, own in chosen.items()}  # one, or those by loader

    def _choose(self, names: list[str]) -> None:
        """Let the window be for some optimizers, once all processes have said the same."""
        of_all = self._of_all
        trained = [[p.requires_grad for p in self.by_name[n].parameters] for n in names if n]
        require_equal(of_all.weighting.strategy.processes, (names, trained), _differ)
        self.is_shared = names == [""]
        if self.is_shared:
            of_all.weighting.begin(self._window)
            self.active = [of_all]
            return
        parts = of_all.weighting.module.modules()
        if self._one_backward or any(compiled_call(part) is not None for part in parts):
            raise ConfigError(
                "`run.optimize` makes a backward for each optimizer, with the parameters of the "
                "others frozen. Neither a compiled model nor activation checkpointing allows that. "
                "Let the optimizers take turns by `Alternating`, which freezes them in the forward "
                "too, or leave `compile` and the checkpointing out."
            )
        _drop_wrapper(of_all)
        chosen = [self.by_name[name] for name in names]
        for each in chosen:
            each.begin(self._window)
        self.active = [*chosen]

    @override
    def loss_in(self, output: object) -> Tensor:
        if not self._given:
            return super().loss_in(output)
        return torch.stack([g.loss for own in self._given.values() for g in own.values()]).sum()

    @override
    def optimize(self, name: object, loss: object, weight: Weight, loader: str) -> None:
        if self._given is None:
            if self.is_shared:
                super().optimize(name, loss, weight, loader)
            raise ConfigError(f"`run.optimize` is for a `training_step`, while it runs. {_EITHER}")
        if name not in self.by_name:
            raise ConfigError(
                f"`run.optimize` was given the name {name!r}, but the optimizers are "
                f"{quoted([*self.by_name])}."
            )
        if isinstance(loss, Mapping) and "loss" not in loss and weight is None and not loader:
            for term, each in loss.items():  # as under the names of loaders
                self.optimize(name, *parse(each), term)
            return
        if not isinstance(loss, Tensor) or not loss.requires_grad or loss.numel() != 1:
            raise ConfigError(
                f"`run.optimize({name!r}, loss)` needs a tensor of one element with a graph, but "
                f"was given {_described(loss)}. Pass the mean loss itself, not `loss.item()`."
            )
        own = self._given.setdefault(str(name), {})
        before = own.get(loader)
        if before is not None and weight is not None:
            raise ConfigError(
                f"`run.optimize({name!r}, ...)` was given a weight with a second loss of the same "
                "micro-batch. Losses of one optimizer are added there, and the sum has the weight "
                "that was given with the first."
            )
        if own and ("" in own) == bool(loader):
            raise ConfigError(
                f"`run.optimize({name!r}, ...)` was given a loss with a name, of a loader or of a "
                'term, and one without. Name each, as in `loader="a"`, or none.'
            )
        loss = loss.reshape(())
        if before is None:
            own[loader] = StepOutput(loss, weight)
        else:
            own[loader] = StepOutput(before.loss + loss, before.weight)


def _drop_wrapper(of_all: Objective) -> None:
    """Give up what reduces the gradients of all optimizers: each reduces its own."""
    strategy, is_wrapped = of_all.weighting.strategy, of_all.model is not of_all.weighting.module
    if is_wrapped and type(strategy).finish_reduction is Strategy.finish_reduction:
        raise ConfigError(
            f"`{type(strategy).__name__}` does not say how gradients are reduced where the "
            "module that it puts around the user's is not called. Override `finish_reduction`."
        )
    of_all.model = of_all.weighting.module


@contextmanager
def only(module: nn.Module, names: Collection[str]) -> Iterator[None]:
    """Let gradients reach the named parameters alone, also those of forwards made before.

    What was frozen stays so. Where a sharded parameter is whole at the moment, it is that one
    which autograd knows, and which is registered in the module.
    """
    others = [p for name, p in module.named_parameters() if p.requires_grad and name not in names]
    try:
        for parameter in others:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter in others:
            parameter.requires_grad_(True)


def _differ(of_all: Sequence[tuple[list[str], list[list[bool]]]]) -> ConfigError:
    named = [names for names, _ in of_all]
    if any(names != named[0] for names in named):
        return ConfigError(
            "The processes differ in the optimizers that a step gave losses to: "
            f"{by_process([_listed(names) for names in named])}. All must call `run.optimize` for "
            "the same ones."
        )
    of_one = zip(named[0], zip(*(trained for _, trained in of_all), strict=True), strict=True)
    name, trained = next((name, own) for name, own in of_one if any(t != own[0] for t in own))
    frozen = [f"{own.count(False)} of {len(own)}" for own in trained]
    return ConfigError(
        f"The processes differ in which parameters of the optimizer `{name}` are frozen: "
        f"{by_process(frozen)}. Freeze and thaw the same ones on all."
    )


def _listed(names: Collection[str]) -> str:
    return ", ".join(f"`{name}`" for name in names) if any(names) else "none, but returned a loss"


def _described(loss: object) -> str:
    if not isinstance(loss, Tensor):
        return f"a {type(loss).__name__!r}"
    return f"one of the shape {tuple(loss.shape)}{'' if loss.requires_grad else ' without a graph'}"
