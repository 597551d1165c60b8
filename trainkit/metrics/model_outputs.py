"""What a model's outputs say: classes and probabilities, by the convention of its loss."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from trainkit.errors import ConfigError, DataError
from trainkit.types import LossFn


@dataclass(frozen=True, slots=True)
class _Convention:
    axis: int | None = None  # dimension of the classes; None: each number stands alone
    threshold: float = 0.0  # a number that stands alone says class 1 above it
    activation: Callable[[Tensor], Tensor] | None = None  # makes probabilities; None: not known
    logits: Literal["softmax", "sigmoid"] | None = None  # what makes them of logits


_VALUES = _Convention()
_LOGS = _Convention()  # of values: those themselves are compared with nothing
_LOGITS = _Convention(1, activation=partial(torch.softmax, dim=1), logits="softmax")
_LOGITS_LAST = _Convention(-1, activation=partial(torch.softmax, dim=-1), logits="softmax")
_BINARY = _Convention(activation=torch.sigmoid, logits="sigmoid")

_LOSSES: tuple[tuple[_Convention, type[nn.Module], Callable[..., Tensor]], ...] = (
    (_LOGITS, nn.CrossEntropyLoss, functional.cross_entropy),
    (_Convention(axis=1, activation=torch.exp), nn.NLLLoss, functional.nll_loss),
    (_Convention(axis=1), nn.MultiMarginLoss, functional.multi_margin_loss),
    (_BINARY, nn.BCEWithLogitsLoss, functional.binary_cross_entropy_with_logits),
    (_BINARY, nn.MultiLabelSoftMarginLoss, functional.multilabel_soft_margin_loss),
    (_Convention(None, 0.5, torch.clone), nn.BCELoss, functional.binary_cross_entropy),
    (_VALUES, nn.MSELoss, functional.mse_loss),
    (_VALUES, nn.L1Loss, functional.l1_loss),
    (_VALUES, nn.SmoothL1Loss, functional.smooth_l1_loss),
    (_VALUES, nn.HuberLoss, functional.huber_loss),
)


class Reading:
    """How the outputs of a model are read.

    A loss of torch says it: those of classes have them in dimension 1, those of a number for each
    class say 1 above a threshold, those of regression take values. Models of transformers with a
    loss of their own have the classes last, and in dimension 1 for images. With any other loss
    the shape of whole-numbered references says it, and floating references are values, unless
    those of the first batch are all 0 or 1. What could be read in two ways is read as the first
    batch of any process tells.

    Args:
        loss_fn: Its loss; None: the model computes its own, or nobody knows.
        smallest: Returns the smallest of the numbers that the processes call it with.
    """

    def __init__(
        self,
        module: nn.Module,
        loss_fn: LossFn | None,
        smallest: Callable[[int], int] = lambda number: number,
    ) -> None:
        own_loss = loss_fn is None and hasattr(module, "loss_function")  # a model of transformers
        self._config = getattr(module, "config", None) if own_loss else None
        self._known = _of_loss(loss_fn)
        self._smallest = smallest
        self._first: _Convention | None = None  # what the first batch has told

    def __call__(self, what: str, scores: Any, references: Any = None) -> Any:
        """Return what `scores` say.

        Args:
            what: "classes" or "probabilities"; "values" are the scores, unless the loss takes
                logarithms of what is true; "predictions" are classes of the shape of
                `references`, or the scores as they are where those are values.
            references: Asked where the loss does not say where the classes are.

        Raises:
            DataError: It cannot be told; says the readings, and the lines for them.
        """
        if self._known is _LOGS:
            why = "they may be meant as rates, or as logarithms of rates, as they are"
            raise _undecided(scores, references, why, _RATES)
        if what == "values":
            return scores
        is_read = isinstance(scores, Tensor) and scores.is_floating_point()
        convention = self._convention(scores, references) if is_read else _VALUES
        if convention is _VALUES:
            is_whole = isinstance(scores, Tensor) and not is_read
            if what == "predictions" or (what == "classes" and is_whole):
                # One value for each reference; else `predictions - references` would broadcast.
                is_column = getattr(references, "shape", None) == getattr(scores, "shape", ())[:-1]
                return scores.squeeze(-1) if is_column and scores.shape[-1] == 1 else scores
            raise _undecided(scores, references, "they are values, not scores of classes")
        if what == "probabilities":
            if convention.activation is None:
                raise _undecided(scores, references, "they may be logits or probabilities")
            return convention.activation(scores.float() if scores.itemsize < 4 else scores)
        axis = convention.axis
        classes = (scores > convention.threshold).long() if axis is None else scores.argmax(axis)
        if what == "predictions" and getattr(references, "shape", classes.shape) != classes.shape:
            why = f"classes would have the shape {[*classes.shape]}"
            raise _undecided(scores, references, why, _SOFT)
        return classes

    def entry(self, outputs: Mapping[str, Any], uses: str) -> tuple[str, Any]:
        """Return what a metric uses, and its key: as the step returned it, or read from scores.

        A step that returns `predictions` alone has said what every metric gets.
        """
        if uses in outputs and uses != "values":
            return uses, outputs[uses]
        if "scores" not in outputs:
            return "predictions", self.require(outputs, "predictions")
        scores = outputs["scores"]
        values = self(uses, scores, outputs.get("references"))
        return ("scores" if values is scores else uses), values

    @staticmethod
    def require(outputs: Mapping[str, Any], name: str) -> Any:
        """Return what the step must have returned under a name."""
        if name in outputs:
            return outputs[name]
        raise DataError(
            f"`evaluation_step` returned no `{name}`, only {sorted(map(str, outputs))}, but a "
            "metric or `predict` needs it. Return it with one entry for each sample; `scores`, "
            "which is what the model returns, serve where classes can be read from them."
        )

    def check(self, asked: str) -> None:
        """Raise where `predict` is asked for what it does not return."""
        if asked not in _RETURNED:
            raise ConfigError(f"`outputs` must be one of {[*_RETURNED]}, but is {asked!r}.")

    def predicted(self, outputs: Mapping[str, Any], asked: str) -> Any:
        """Return what `predict` was asked for: as the step returned it, or read from scores."""
        own = _RETURNED[asked]
        if own not in outputs and "scores" in outputs:
            return self(asked, outputs["scores"], outputs.get("references"))
        values = self.require(outputs, own if own in outputs or asked != "raw" else "predictions")
        if asked == "classes" and isinstance(values, Tensor) and values.is_floating_point():
            raise DataError(
                f"`evaluation_step` returned `predictions` of {values.dtype}, which are no "
                "classes. Return classes, or what the model returns as `scores`; or ask for "
                '`outputs="raw"`.'
            )
        return values

    def known(self, scores: Tensor) -> _Convention | None:
        """Return how the loss takes scores; None where the loss does not say it."""
        return self._known if self._config is None else _of_transformers(self._config, scores)

    def _convention(self, scores: Tensor, references: Any) -> _Convention:
        convention = self.known(scores)
        if convention is None:
            if self._first is None:
                self._first = self._agreed(scores, references)
            convention = _of_shapes(scores, references, self._first)
        if convention.axis is not None and (scores.dim() < 2 or scores.shape[convention.axis] == 1):
            raise _undecided(scores, references, _ONE_NUMBER)
        return convention

    def _agreed(self, scores: Tensor, references: Any) -> _Convention:
        """Return what the first batch of each process tells; every process calls it."""
        error, index = None, len(_TOLD)
        try:
            told = _of_shapes(scores, references)
            if told is _VALUES and bool((references * (1 - references) == 0).all()):
                raise _undecided(scores, references, _ONE_NUMBER)
            index = _TOLD.index(told)
        except DataError as undecided:
            error = undecided
        index = self._smallest(index)
        if index < len(_TOLD):
            return _TOLD[index]
        assert error is not None
        raise error


_TOLD = (_VALUES, _Convention(-1), _Convention(1))
_RETURNED = {"raw": "scores", "classes": "predictions", "probabilities": "probabilities"}


def _of_loss(loss_fn: Any) -> _Convention | None:
    given: dict[str, Any] = {}
    while isinstance(loss_fn, partial):
        loss_fn, given = loss_fn.func, loss_fn.keywords | given
    forward = getattr(type(loss_fn), "forward", loss_fn)  # of a subclass it may be another
    if forward in (nn.PoissonNLLLoss.forward, functional.poisson_nll_loss):
        return _LOGS if given.get("log_input", getattr(loss_fn, "log_input", True)) else _VALUES
    conventions = (row[0] for row in _LOSSES if forward is row[1].forward or forward is row[2])
    return next(conventions, None)


def _of_transformers(config: Any, scores: Tensor) -> _Convention:
    problem = getattr(config, "problem_type", None)  # set at the latest by the first loss
    if problem == "regression" or (scores.dim() == 2 and scores.shape[-1] == 1):
        return _VALUES
    if problem == "multi_label_classification":
        return _BINARY
    return _LOGITS if scores.dim() == 4 else _LOGITS_LAST


def _of_shapes(scores: Tensor, references: Any, first: _Convention | None = None) -> _Convention:
    """Return what the shapes of a batch tell; where they tell two things, what the first did."""
    if not isinstance(references, Tensor):
        raise _undecided(scores, references, "the loss is none of torch's")
    if references.is_floating_point():
        return _VALUES
    if scores.shape == references.shape:
        raise _undecided(scores, references, _ONE_NUMBER)
    axes = (1, -1) if scores.dim() > 2 else (1,)
    shape = scores.shape
    fitting = [a for a in axes if shape[:a] + shape[a:][1:] == references.shape]
    if len(fitting) == 2:
        if first is not None and first.axis in fitting:
            return first
        raise _undecided(
            scores, references, "both `outputs.argmax(1)` and `outputs.argmax(-1)` fit"
        )
    if not fitting:
        raise _undecided(scores, references, "neither dimension 1 nor the last can be the classes")
    return _Convention(axis=fitting[0])


_ONE_NUMBER = (
    "one number may be a logit, `(outputs > 0).long()`, or a probability, `(outputs > 0.5).long()`"
)


_HOW = "Pass the loss of torch as `loss_fn`, or return `predictions` from `evaluation_step`"
_RATES = "Return `predictions`, such as `outputs.exp()`, from `evaluation_step`"
_SOFT = "Return `references.argmax(1)`, of probabilities, and `predictions` from `evaluation_step`"


def _undecided(scores: Any, references: Any, why: str, how: str = _HOW) -> DataError:
    others = "" if references is None else f" and references {form(references)}"
    return DataError(
        f"It cannot be told what the outputs {form(scores)}{others} stand for: {why}. "
        f"{how}; metrics that want the outputs themselves say so: `metrics.scores(function)`."
    )


def form(values: Any) -> str:
    """Return what a value is, in words, for messages."""
    if not isinstance(values, Tensor):
        return f"of type {type(values).__name__}"
    return f"of shape {[*values.shape]} ({str(values.dtype).removeprefix('torch.')})"
