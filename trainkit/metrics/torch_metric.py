"""A metric of the `torchmetrics` library as a metric."""

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from trainkit.basics.config import checked
from trainkit.containers.tree import is_array
from trainkit.errors import ConfigError, DataError
from trainkit.metrics.metric import Metric, Uses, agreed, flatten, setting
from trainkit.metrics.model_outputs import form
from trainkit.metrics.samples import matching_length
from trainkit.types import IGNORED


class TorchMetric(Metric):
    """Feeds a torchmetrics `Metric` or `MetricCollection` chunk by chunk.

    It keeps the metric from gathering by itself, since every process already feeds it all
    samples. Tensors are moved to the metric's device. What the metric had seen before is lost.

    Metrics of clusters, and of segmentation with `input_format="index"`, get predictions, others
    scores. Those of classification take scores for logits where one lies outside [0, 1]: here
    that holds for all samples, and wherever they lie if the loss takes logits and the default
    step returned them; then classes are moved to dimension 1. References may be whole floats.

    Args:
        metric: The metric or collection.
        name: Key of the value where the metric returns a single number; the name of its class
            where not given.

    Raises:
        ConfigError: It takes more than predictions and references, or mixes such inputs.
    """

    @checked
    def __init__(self, metric: nn.Module, *, name: str | None = None) -> None:
        self.name = type(metric).__name__ if name is None else name
        self.metric: Any = metric
        self.higher_is_better = _direction(metric)
        self.uses, self._activation = agreed(self.name, map(_inputs, _fed(metric)))
        self._ignores = all(getattr(m, "ignore_index", IGNORED) == IGNORED for m in _fed(metric))
        self.reset()

    @override
    def reset(self) -> None:
        self.metric.reset()
        self._samples = 0
        self._are_logits: bool | None = None  # None: nothing was seen that says it

    @override
    def update(self, predictions: Any, references: Any) -> None:
        samples = matching_length(self.name, predictions, references)
        if samples == 0:
            return
        if self._samples == 0:
            self.reset()
        self._samples += samples
        predictions, references = self._placed(predictions), self._placed(references)
        if self._activation is not None:
            predictions, references = self._settled(predictions), _whole(references)
        try:
            if not self._ignores and (references == IGNORED).any():  # some count it as wrong
                raise ValueError(f"{IGNORED} is no class: `ignore_index={IGNORED}` leaves it out.")
            if self._activation == "sigmoid" and predictions.shape != references.shape:
                raise ValueError(
                    "They must have one shape; of two classes, `outputs.softmax(1)[:, 1]` has it."
                )
            with setting(self._parts(), "distributed_available_fn", _never):
                self.metric.update(predictions, references)
        except (AttributeError, IndexError, RuntimeError, TypeError, ValueError) as error:
            raise DataError(
                f"The metric `{self.name}` cannot take outputs {form(predictions)} with "
                f"references {form(references)}: {error} Return what it needs from "
                "`evaluation_step`, as `predictions` and `references`."
            ) from error

    @override
    def compute(self) -> dict[str, float]:
        if self._samples == 0:
            return {}
        with setting(self._parts(), "distributed_available_fn", _never):
            return flatten(self.name, self.metric.compute())

    def _parts(self) -> list[Any]:
        """Return every metric inside, such as those of a collection or a wrapper."""
        return [part for part in self.metric.modules() if hasattr(part, "distributed_available_fn")]

    def _placed(self, values: Any) -> Any:
        if not is_array(values):
            return values
        parts = self._parts()
        return torch.as_tensor(values, device=parts[0].device if parts else None).detach()

    def _settled(self, scores: Any) -> Any:
        """Return scores that torchmetrics reads as it read those before."""
        if not isinstance(scores, Tensor) or not scores.is_floating_point():
            return scores
        known = self.convention
        if known is not None and known.logits == self._activation:
            self._are_logits = True
            if known.axis == -1:
                scores = scores.movedim(-1, 1)
        if not bool(((scores >= 0) & (scores <= 1)).all()):
            if self._are_logits is False:
                raise DataError(
                    f"The metric `{self.name}` took the scores seen so far for probabilities, "
                    "since all were in [0, 1], but now there are others. Return `predictions` "
                    "that are probabilities from `evaluation_step`."
                )
            self._are_logits = True
        elif self._are_logits:
            return scores.softmax(1) if self._activation == "softmax" else scores.sigmoid()
        else:
            self._are_logits = False
        return scores


def _fed(metric: Any) -> list[Any]:
    """Return the metrics that get what is passed on: those inside a collection or a wrapper."""
    if hasattr(metric, "distributed_available_fn"):
        kinds = {p.kind for p in inspect.signature(metric.update).parameters.values()}
        if inspect.Parameter.VAR_POSITIONAL not in kinds:
            return [metric]
    return [part for child in metric.children() for part in _fed(child)]


def _inputs(metric: Any) -> tuple[Uses, str | None]:
    """Return what a metric uses, and how the library makes probabilities of logits for it."""
    signature = inspect.signature(metric.update)
    try:
        first = next(iter(signature.bind(None, None).arguments))
    except TypeError as error:
        raise ConfigError(
            f"`{type(metric).__name__}` takes `update{signature}`, but an evaluation has "
            "predictions and references. Write a `Metric` that calls it, and let "
            "`evaluation_step` return what it needs, for example as mappings."
        ) from error
    homes = (cls for cls in type(metric).__mro__ if cls.__module__.startswith("torchmetrics."))
    home = next(homes, type(metric))
    family = home.__module__.split(".")[1:2]
    if family == ["classification"]:
        return "values", "softmax" if home.__name__.startswith("Multiclass") else "sigmoid"
    wants_classes = (family == ["clustering"] and first == "preds") or (
        family == ["segmentation"] and getattr(metric, "input_format", "") == "index"
    )
    return "predictions" if wants_classes else "values", None


def _whole(references: Any) -> Any:
    if not isinstance(references, Tensor) or not references.is_floating_point():
        return references
    return references.long() if bool((references == references.round()).all()) else references


def _direction(metric: Any) -> bool | None:
    """Return `higher_is_better` of a metric, or of a collection whose metrics all say the same."""
    own = getattr(metric, "higher_is_better", None)
    values = getattr(metric, "values", None)
    if own is not None or values is None:
        return own
    said = {_direction(part) for part in values()}
    return said.pop() if len(said) == 1 else None


def _never() -> bool:
    return False
