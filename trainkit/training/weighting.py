"""Rule 6: the applied gradient is that of the whole window, however it is split.

    sum over the terms of the loss:  sum(w * gradient of l) / T,  where  T = sum(w)

`l` is the mean loss of a micro-batch, `w` the number of items that it averages; the sums run over
the micro-batches of a window on all W processes. The strategy takes the mean over processes, so
what is run backward is `l * w * W / T`.

T is known ahead where items are the samples of a map-style data set. Elsewhere T0 takes its place,
which is T as the first micro-batch lets one expect it (so that fp16 sees factors near 1), and what
was accumulated is multiplied by T0 / T: where all terms share one T, the reduced gradients at the
end of the window (`correction`); else each T has gradients of its own until the last micro-batch,
whose forward tells what each of them is (`backward`). No weight is read on the host.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Real
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from typing_extensions import override

from trainkit.basics.device import wide_dtype
from trainkit.data import MicroBatch, Window
from trainkit.distributed.collectives import require_equal
from trainkit.distributed.processes import Pending
from trainkit.errors import ConfigError, DataError, by_process, quoted
from trainkit.strategies import Strategy
from trainkit.strategies.strategy import leaves_behind
from trainkit.training.logging import Log
from trainkit.types import StepOutput

Weight: TypeAlias = Tensor | float
"""A number on the host, or one on the device where only the step knows it."""


class Term(NamedTuple):
    """A mean loss over items of a micro-batch, of one of the terms that a step returned.

    Args:
        name: "" where the step returned one loss without a name.
        weight: How many items it averages. None: the samples of `batch`.
        batch: Whose items they are.
        loader: Of several training loaders the one that `batch` is from.
    """

    name: str
    loss: Tensor
    weight: Tensor | float | None
    batch: MicroBatch
    loader: str = ""


class _BySample:
    """The losses of a window, on this process, that count by samples and share one T.

    Attributes:
        total: T, or T0 until it is known.
        weight: The weights so far.
        gradients: What they accumulated, by parameter, where that is kept apart.
    """

    def __init__(self, total: Any) -> None:
        self.total = total
        self.weight: Any = 0
        self.gradients: list[Tensor | None] = []
        self.losses: list[tuple[Tensor, Any]] = []

    def weigh(self, loss: Tensor, weight: Any, size: int) -> Tensor:
        """Take in a loss, and return what is to be run backward of it."""
        self.losses.append((loss.detach(), weight))
        self.weight += weight
        share = weight * size / self.total
        return loss if share == 1 else loss * share

    def of_losses(self) -> Tensor:
        """Return the sum of `w * l`."""
        counted = [loss * w if w else torch.zeros_like(loss) for loss, w in self.losses]
        return torch.stack(counted).sum()

    def mean(self) -> Tensor:
        """Return the mean of the losses; the latest where none counts."""
        return torch.div(self.of_losses(), self.weight) if self.weight else self.losses[-1][0]


class _ByWeight(_BySample):
    """The same for losses with a weight that the step tells: it stays on the device.

    A mean over no items is NaN, which must not reach a sum.

    Args:
        is_all: Whether the window is one micro-batch on one process, whose share is 1.
    """

    def __init__(self, total: Tensor, *, is_all: bool) -> None:
        super().__init__(total)
        self.is_all = is_all

    @override
    def weigh(self, loss: Tensor, weight: Tensor, size: int) -> Tensor:
        self.losses.append((loss.detach(), weight))
        self.weight = self.weight + weight if self.losses[1:] else weight
        weighed = loss
        if not self.is_all:
            weighed = loss * (weight * size / self.total).to(loss.dtype)
        return torch.where(weight > 0, weighed, torch.zeros_like(loss))

    @override
    def of_losses(self) -> Tensor:
        counted = [torch.where(w > 0, loss * w, torch.zeros_like(loss)) for loss, w in self.losses]
        return torch.stack(counted).sum()

    @override
    def mean(self) -> Tensor:
        return torch.div(self.of_losses(), self.weight)


class Weighting:
    """Weighs the losses of a window.

    Args:
        log: Gets the mean of each term that has a name.
        nominal: Samples of a full window, where known; T0 of streams.
        accumulation: Micro-batches of one process in a full window.
        rows_vary: Whether a batch may have other rows than samples were asked for. Those count,
            and what other processes have is known at the end of the window.
        of: Which of several optimizers it is for.

    Attributes:
        samples: Real samples of the window so far, over all processes.
        parameters: Those of the module, before its first forward.
        reached: The leaves behind losses of a form that no window before had; None: no such.
    """

    def __init__(
        self,
        strategy: Strategy,
        module: nn.Module,
        log: Log,
        *,
        nominal: int | None,
        accumulation: int,
        rows_vary: bool = False,
        of: str = "",
    ) -> None:
        self.samples = 0
        self.strategy, self.module, self.log, self._of = strategy, module, log, of
        self._processes = strategy.data_processes
        # Between forward and backward a sharded module has others.
        self.parameters = [*module.parameters()]
        self.reached: set[Tensor] | None = None
        self._nominal, self._accumulation = nominal, accumulation
        self._rows_vary = rows_vary
        self._forms: dict[tuple[str, ...], list[tuple[str, bool]]] = {}  # of what steps return
        self._is_plain = False  # whether steps return one loss, which counts by samples
        self._sums: dict[str, _BySample] = {}

    @property
    def has_own_samples(self) -> bool:
        """Whether this process has real samples in the window so far."""
        return self._own_samples > 0

    def begin(self, window: Window) -> None:
        self._window = window
        self._sums = {}
        self._apart: list[tuple[_BySample, Tensor]] = []  # of this micro-batch, for `backward`
        self._all_apart = False  # whether it has no other loss beside them
        self._scales: dict[str, Tensor] = {}  # T0 / T of each sum, once they are known
        self._own_samples = self.samples = 0
        self._is_whole = False  # whether the window is one micro-batch
        self._rows: Pending | None = None  # those of the window over all processes

    def weigh(self, output: object, micro_batch: MicroBatch) -> Tensor:
        """Return the loss to run `backward` on, for what the training step returned."""
        self.samples += micro_batch.total
        self._own_samples += micro_batch.counts[self._processes.rank]
        size = self._processes.size
        if self._is_plain:
            if isinstance(output, StepOutput):
                loss, weight = output.loss, output.weight
            else:
                loss, weight = parse(output)
            if weight is None:
                loss = _scalar(loss) if loss.ndim else loss
                if not self._sums:
                    self._is_whole = micro_batch.last
                    known = None if self._rows_vary else self._window.total
                    self._sums[""] = _BySample(known or self._guessed(micro_batch))
                loss = self._sums[""].weigh(loss, micro_batch.count, size)
                if self._rows_vary and micro_batch.last:
                    self._rows = self._begin_rows(self._sums[""])  # while the backward runs
                return loss
        terms = self._terms(output, micro_batch)
        self._check(terms, tuple(micro_batch.by_loader))
        by_weight = any(term.weight is not None for term in terms)
        losses: dict[str, Tensor] = {}  # by sum
        weights: dict[str, Weight] = {}
        for name, loss, weight, batch, loader in terms:
            loss, key = _scalar(loss), loader if weight is None else name
            losses[key] = losses[key] + loss if key in losses else loss
            if weight is None and (not by_weight or self._known_total(loader) is not None):
                weights[key] = batch.count
            else:
                given = _on_device(batch.count if weight is None else weight, loss)
                weights[key] = given if batch.count else torch.zeros_like(given)
        if not self._sums:
            self._expect(weights, micro_batch)
        open_sums = {key: w for key, w in weights.items() if isinstance(w, Tensor)}
        is_split = bool(open_sums) and len(losses) > 1 and not self._is_whole
        if is_split and micro_batch.last:
            own = {key: self._sums[key].weight + weight for key, weight in open_sums.items()}
            for key, total in self._over_processes(own).items():  # T takes the place of T0
                self._scales[key] = _ratio(self._sums[key].total, total)
                self._sums[key].total = _positive(total)
        weighed = {k: self._sums[k].weigh(loss, weights[k], size) for k, loss in losses.items()}
        if is_split and not micro_batch.last:
            self._apart = [(self._sums[key], weighed.pop(key)) for key in open_sums]
            self._all_apart = not weighed
        parts = [*weighed.values()] or [self._apart[-1][1]]
        return parts[0] if len(parts) == 1 else torch.stack(parts).sum()

    def backward(
        self, loss: Tensor, run_backward: Callable[..., None], *, retain_graph: bool = False
    ) -> None:
        """Run the backward of what `weigh` returned, and of what it keeps apart.

        Args:
            retain_graph: Whether another backward goes through the same graph afterwards.
        """
        options: Any = {"retain_graph": True} if retain_graph else {}  # else it is not said
        if not self._apart:
            if self._scales:
                self._put_together()
            run_backward(loss, **options)
            return
        apart, self._apart = self._apart, []
        with self.strategy.gradients_apart(self.module):
            for number, (each, own) in enumerate(apart, 1):
                is_last = self._all_apart and number == len(apart)
                with self._gradients_of(each):
                    run_backward(own, **(options if is_last else {"retain_graph": True}))
            if not self._all_apart:
                run_backward(loss, **options)

    def correction(self) -> Weight | None:
        """Return what the reduced gradients must be multiplied by, None for nothing.

        Every process must call it once a window: it sums the weights that steps returned.
        """
        if (self._is_whole and not self._rows_vary) or len(self._sums) > 1:
            return None
        ((key, only),) = self._sums.items()
        if isinstance(only, _ByWeight):
            if self._is_whole:
                return None
            return _ratio(only.total, self._processes.all_reduce(only.weight.clone()))
        total = self.samples
        if self._rows_vary:
            total = int((self._rows or self._begin_rows(only)).wait())
        elif self._known_total(key) is not None:
            total = only.total
        return None if total in (0, only.total) else only.total / total

    def result(self) -> tuple[Tensor, Weight]:
        """Return this process's mean loss over the window, on the device, and its weight.

        The mean over the processes, by these weights, is the loss of the window.
        """
        first, *others = self._sums.values()
        if others:
            shares = [_ratio(each.of_losses(), each.total) for each in (first, *others)]
            loss, own = torch.stack(shares).sum(), self._own_samples
            return loss * (self.samples / own if own else 1), own
        return first.mean() if first.losses[1:] else first.losses[0][0], first.weight

    def is_finite(self) -> bool:
        """Return whether the latest loss of this process is finite; reads the device."""
        if not self._sums:
            return True  # no window yet
        loss, weight = self.result()
        return bool(torch.isfinite(loss)) or float(weight) == 0

    def _begin_rows(self, only: _BySample) -> Pending:
        return self._processes.all_reduce_async(torch.tensor(only.weight))

    def _terms(self, output: object, micro_batch: MicroBatch) -> list[Term]:
        """Return the terms of what the training step returned."""
        return terms_of(output, micro_batch)

    def _known_total(self, loader: str) -> int | None:
        """Return the samples of the window over all processes, where they are known ahead."""
        return None if self._rows_vary else self._window.total

    def _check(self, terms: list[Term], loaders: tuple[str, ...]) -> None:
        """Raise, on all processes, where the losses are none, or others than before."""
        form = [(term.name, term.weight is not None) for term in terms]
        if loaders not in self._forms:
            for term in terms:
                _check_term(term)
            self.reached = leaves_behind(term.loss for term in terms) | (self.reached or set())
            require_equal(self._processes, form, _differ)
            self._forms[loaders] = form
            self._is_plain = form == [("", False)] and not loaders
        elif form != self._forms[loaders]:
            of = f" of {quoted(loaders)}" if loaders else " of the run"
            raise DataError(
                f"`training_step` returned {_described(form)}, after it had returned "
                f"{_described(self._forms[loaders])} for the first micro-batch{of}. Return the "
                "same always, and a weight with the same ones."
            )
        if self.log.is_read:
            for name, loss, weight, batch, _ in terms:
                if name and batch.count:
                    key = f"loss/{self._of}/{name}" if self._of else f"loss/{name}"
                    self.log.add({key: loss}, batch.count if weight is None else weight, "mean")

    def _expect(self, weights: Mapping[str, Weight], micro_batch: MicroBatch) -> None:
        """Begin the sums of a window, by its first micro-batch: T where known, else T0."""
        self._is_whole = micro_batch.last
        many = 1 if self._is_whole else self._window.size or self._accumulation
        open_sums = {key: w for key, w in weights.items() if isinstance(w, Tensor)}
        totals = self._over_processes(open_sums)
        for key in weights:
            if key not in totals:
                self._sums[key] = _BySample(self._known_total(key) or self._guessed(micro_batch))
            elif self._is_whole and self._processes.size == 1:
                self._sums[key] = _ByWeight(totals[key], is_all=True)
            else:
                self._sums[key] = _ByWeight(_positive(totals[key] * many), is_all=False)

    def _guessed(self, micro_batch: MicroBatch) -> int:
        """Return the samples of a window, as its first micro-batch lets one expect them."""
        if self._is_whole:
            return (micro_batch.count or 1) if self._processes.size == 1 else micro_batch.total
        return self._window.total or self._nominal or micro_batch.total * self._accumulation

    def _over_processes(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        if self._processes.size == 1 or not weights:
            return dict(weights)
        sums = self._processes.all_reduce(torch.stack([*weights.values()]))
        return dict(zip(weights, sums, strict=True))

    def _put_together(self) -> None:
        """Add to `.grad` what was accumulated apart, divided by T instead of T0."""
        parameters = self.parameters
        scales, self._scales = self._scales, {}
        for key, scale in scales.items():
            with self._gradients_of(self._sums[key]):
                self.strategy.scale_gradients(parameters, scale)
            for parameter, gradient in zip(parameters, self._sums[key].gradients, strict=True):
                if parameter.grad is None:
                    parameter.grad = gradient
                elif gradient is not None:
                    parameter.grad += gradient

    @contextmanager
    def _gradients_of(self, losses: _BySample) -> Iterator[None]:
        """Let `.grad` be what one sum has accumulated."""
        others = [parameter.grad for parameter in self.parameters]
        given = losses.gradients or [None] * len(others)
        for parameter, gradient in zip(self.parameters, given, strict=True):
            parameter.grad = gradient
        try:
            yield
        finally:
            losses.gradients = [parameter.grad for parameter in self.parameters]
            for parameter, gradient in zip(self.parameters, others, strict=True):
                parameter.grad = gradient


def terms_of(output: object, batch: MicroBatch, name: str = "", loader: str = "") -> list[Term]:
    """Return the terms of what a training step returned, which is about one micro-batch."""
    if isinstance(output, Mapping) and output and "loss" not in output:
        prefix = f"{name}/" if name else ""
        return [Term(f"{prefix}{n}", *parse(each), batch, loader) for n, each in output.items()]
    return [Term(name, *parse(output), batch, loader)]


def loss_of(output: object) -> Tensor:
    """Return the loss in what a training step returned; of several terms or loaders their sum."""
    if isinstance(output, Mapping) and output and "loss" not in output:
        return torch.stack([loss_of(each).reshape(()) for each in output.values()]).sum()
    return parse(output)[0]


def parse(output: object) -> tuple[Tensor, Tensor | float | None]:
    """Take apart one loss."""
    if isinstance(output, StepOutput):
        return output.loss, output.weight
    if isinstance(output, Tensor):
        return output, None
    if isinstance(output, Mapping):
        loss = output.get("loss")
        if isinstance(loss, Tensor):
            return loss, output.get("weight")
    what = f"a {type(output).__name__!r}"
    if isinstance(output, Mapping):
        what = f"a mapping with the keys {sorted(map(str, output))}"
    raise ConfigError(
        "`training_step` must return the loss as a tensor, a mapping with the tensor `loss`, "
        "`StepOutput(loss, weight)`, or a mapping from the names of several terms to one of these "
        f"each, but returned {what}. For a model that computes no loss by itself, pass `loss_fn` "
        "to `fit` or override `training_step`."
    )


def _check_term(term: Term) -> None:
    """Raise where a training step must not return a loss, or its weight; reads the device."""
    loss, weight = term.loss, term.weight
    called = f"loss `{term.name}`" if term.name else "loss"
    if not isinstance(loss, Tensor):
        raise ConfigError(
            f"The {called} must be a tensor with a graph, but is {type(loss).__name__!r}. Return "
            "what the loss function gives, not `loss.item()`."
        )
    _scalar(loss, called)
    if not loss.requires_grad:
        raise ConfigError(
            f"The {called} has no graph: nothing that it was computed from requires a gradient. "
            "Return the loss itself, not `loss.detach()` or `loss.item()`, and compute it "
            "outside `torch.no_grad()`; in a turn of an optimizer, from its own parameters. What "
            "is only to be looked at goes to `run.log`."
        )
    if weight is None:
        return
    if not isinstance(weight, Tensor | Real):
        raise DataError(
            f"`weight` must be a number or a tensor of one, but is {type(weight).__name__!r}. It "
            "is the number of items that the loss averages."
        )
    value = float(_on_device(weight, loss))
    if not (math.isfinite(value) and value >= 0):
        raise DataError(
            f"`weight` must be a finite number of at least 0, but `training_step` returned "
            f"{value}. It is the number of items that the loss averages."
        )


def _scalar(loss: Tensor, called: str = "loss") -> Tensor:
    """Return a loss of one element without dimensions."""
    if loss.numel() != 1:
        named = " Each entry of a mapping without `loss` is a loss." * (called != "loss")
        raise ConfigError(
            f"The {called} must be a scalar, but `training_step` returned the shape "
            f"{tuple(loss.shape)}. Return its mean, for example `loss.mean()`.{named}"
        )
    return loss.reshape(()) if loss.ndim else loss


def _on_device(weight: Tensor | float, loss: Tensor) -> Tensor:
    """Return a weight as a scalar of wide type beside the loss, without a copy from the host."""
    dtype = wide_dtype(loss.device.type)
    if isinstance(weight, Tensor) and weight.numel() != 1:
        raise DataError(
            "`weight` must be one number, the items that the loss averages, but `training_step` "
            f"returned the shape {tuple(weight.shape)}. Return its sum, with the loss as the mean "
            "weighted by it."
        )
    if isinstance(weight, Tensor) and weight.device == loss.device:
        return weight.detach().to(dtype).reshape(())
    return torch.full((), float(weight), dtype=dtype, device=loss.device)


def _differ(of_all: Sequence[list[tuple[str, bool]]]) -> DataError:
    return DataError(
        "The processes differ in the losses that a step gave: "
        f"{by_process([_described(form) for form in of_all])}. Give the same on all, with a weight "
        "on all or on none."
    )


def _described(form: list[tuple[str, bool]]) -> str:
    """Return in words what a step returned, by names and whether they have a weight."""
    return ", ".join(
        f"{f'`{name}`' if name else 'one loss'}{' with a weight' * weighted}"
        for name, weighted in form
    )


def _positive(total: Tensor) -> Tensor:
    return torch.where(total > 0, total, torch.ones_like(total))


def _ratio(value: Tensor, total: Weight) -> Tensor:
    """Return `value / total`, and 0 where nothing had a weight."""
    ratio = value / total
    return torch.where(total > 0, ratio, 0) if isinstance(total, Tensor) else ratio
