"""How many next words a language model is torn between."""

import math
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from trainkit.errors import ConfigError
from trainkit.metrics.local_metric import LocalMetric, Values
from trainkit.metrics.samples import real_numbers


class Perplexity(LocalMetric):
    """`exp(sum(loss * weight) / sum(weight))`: of mean losses, and the tokens each averages.

    `update` takes the mean losses (in nats) and the numbers of tokens. A loss of no tokens is not
    looked at, even where it is NaN.
    """

    name = "perplexity"
    uses = "loss"
    keys = ("perplexity",)
    higher_is_better = False
    _sums: tuple[Any, Any]  # weighted losses, weights; on the device of the data

    def __init__(self) -> None:
        super().__init__()

    @override
    def _add(self, predictions: Any, references: Any, weights: Tensor | None) -> None:
        if weights is not None:
            raise ConfigError(
                "`sample_weight` was given to `perplexity`, but its weights are the second "
                "argument. Multiply them in there."
            )
        losses = real_numbers(self.name, "predictions", predictions)
        tokens = real_numbers(self.name, "references", references).to(losses.device)
        weighted, total = self._sums
        counted = torch.where(tokens == 0, 0.0, losses * tokens)
        self._sums = weighted + counted.sum(), total + tokens.sum()

    @override
    def _values(self) -> Values:
        weighted, total = (float(value) for value in self._sums)
        if total == 0:
            return {}
        try:
            return {"perplexity": math.exp(weighted / total)}
        except OverflowError:
            return {"perplexity": math.inf}
