"""What the metrics that trainkit computes itself have in common."""

import inspect
from abc import abstractmethod
from typing import Any, ClassVar, Self

from torch import Tensor
from typing_extensions import override

from trainkit.errors import ConfigError, DataError
from trainkit.metrics.metric import Metric, flatten
from trainkit.metrics.samples import matching_length, real_numbers

Values = dict[str, float | list[float]]


class LocalMetric(Metric):
    """A metric that keeps sums of what it sees, and can be used like a module of `evaluate`.

    It takes tensors of any device, NumPy arrays and lists. As a module of `evaluate`:

        >>> from trainkit.metrics import F1
        >>> F1().compute(predictions=[0, 1], references=[0, 1], average="macro")
        {'f1': 1.0}

    A subclass keeps everything that it adds up in `_sums`, and its settings in `_options`.
    """

    evaluate_dtype: ClassVar[str] = "float64"
    """What `evaluate` holds predictions and references as: of classes, "int64"."""

    def __init__(self, **options: Any) -> None:
        self._options = options
        self.reset()

    @override
    def reset(self) -> None:
        self._samples = 0
        self._is_batched = False
        self._sums = self._zero()

    @override
    def update(self, predictions: Any, references: Any, sample_weight: Any = None) -> None:
        """Add a chunk with one entry per sample in each argument.

        Args:
            predictions: What the model says.
            references: What is true.
            sample_weight: How much each sample counts; 1 where not given.

        Raises:
            DataError: The lengths differ, or an argument is not of the right form.
        """
        samples = matching_length(self.name, predictions, references)
        if samples == 0:
            return
        weights = None
        if sample_weight is not None:
            weights = real_numbers(self.name, "sample_weight", sample_weight)
            if len(weights) != samples:
                raise DataError(
                    f"The metric `{self.name}` got {samples} predictions, but {len(weights)} "
                    "entries in `sample_weight`. Give one weight per sample."
                )
        self._add(predictions, references, weights)
        self._samples += samples

    def add_batch(self, *, predictions: Any, references: Any) -> None:
        """Add a chunk, as in `evaluate`: the next `compute` returns its values and resets."""
        self.update(predictions, references)
        self._is_batched = True

    @override
    def compute(
        self,
        *,
        predictions: Any = None,
        references: Any = None,
        sample_weight: Any = None,
        **options: Any,
    ) -> dict[str, Any]:
        """Return the values: flat without arguments, else in the form of `evaluate`.

        Args:
            predictions: If given, only these and `references` are looked at; nothing is kept.
            references: The true values that belong to `predictions`.
            sample_weight: How much each of `predictions` counts.
            options: Take the place of those of the constructor, this time only.

        Returns:
            Values by name. In the form of `evaluate`, several values under one name are a
            NumPy array; without arguments each has a name of its own, such as `f1/0`.

        Raises:
            DataError: The data are not of the right form.
            ConfigError: An option cannot work.
        """
        has_data = not (predictions is None and references is None and sample_weight is None)
        if has_data or options:
            metric = self.of({**self._options, **options})
            if has_data:
                metric.update(predictions, references, sample_weight)
            else:
                metric._sums, metric._samples = self._sums, self._samples
            result: dict[str, Any] = {**metric._result()}
            for key in [key for key, value in result.items() if isinstance(value, list)]:
                import numpy  # single numbers need none of it

                result[key] = numpy.array(result[key])
        else:
            result = {**self._flat(self._result())}
        if self._is_batched and not has_data:
            self.reset()
        return result

    @classmethod
    def of(cls, options: dict[str, Any]) -> Self:
        """Return a metric with these options; raise ConfigError where it has no such one."""
        known = list(inspect.signature(cls).parameters)
        unknown = sorted(set(options) - set(known))
        if unknown:
            raise ConfigError(f"The metric `{cls.name}` has no option {unknown}. It has {known}.")
        return cls(**options)

    def _result(self) -> Values:
        return self._values() if self._samples else {}

    def _flat(self, values: Values) -> dict[str, float]:
        return flatten(self.name, values)

    def _zero(self) -> Any:
        """Return the sums over nothing: of values and of their weights, unless overridden."""
        return 0, 0  # no floats: whole sums of a device stay whole

    @abstractmethod
    def _add(self, predictions: Any, references: Any, weights: Tensor | None) -> None:
        """Add a chunk of at least one sample to `_sums`; `weights` is float64 or None for ones."""

    @abstractmethod
    def _values(self) -> Values:
        """Return the values over at least one sample."""
