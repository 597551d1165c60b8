"""The weights to be evaluated, where an optimizer trains on others."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

_KEY = "training_weights"


class EvaluationWeights:
    """Switches the parameters of an optimizer that has `train()` and `eval()`, to the last bit.

    Schedule-free optimizers train on other weights than those that are good to evaluate, and go
    from the ones to the others and back only up to rounding. So those of training are kept while
    the parameters hold those of evaluation. With an optimizer that has no such methods nothing is
    ever done.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        methods = (getattr(optimizer, name, None) for name in ("train", "eval"))
        self._optimizer: Any = optimizer if all(map(callable, methods)) else None
        self._training: list[Tensor] | None = None  # while the parameters hold others

    def train(self) -> None:
        """Let the parameters hold the weights of training."""
        if self._optimizer is None:
            return
        self._optimizer.train()
        if self._training is not None:
            with torch.no_grad():
                for parameter, weights in zip(self._parameters(), self._training, strict=True):
                    parameter.copy_(weights)
            self._training = None

    def evaluate(self) -> None:
        """Let the parameters hold the weights of evaluation."""
        if self._optimizer is not None and self._training is None:
            self._training = [parameter.detach().clone() for parameter in self._parameters()]
            self._optimizer.eval()

    @contextmanager
    def held(self, *, error_is_last: bool = False) -> Iterator[None]:
        """Let the parameters hold the weights of evaluation inside.

        Args:
            error_is_last: After an error they stay, as the training ends with it; callbacks that
                exchange weights too then find theirs.
        """
        if self._training is not None:
            yield
            return
        self.evaluate()
        try:
            yield
        except BaseException:
            if not error_is_last:
                self.train()
            raise
        self.train()

    def state_dict(self, module: nn.Module) -> dict[str, Any]:
        """Return the weights of training by name, while the parameters hold others."""
        if self._training is None:
            return {}
        names = {id(parameter): name for name, parameter in module.named_parameters()}
        weights = zip(self._parameters(), self._training, strict=True)
        return {_KEY: {names[id(parameter)]: kept for parameter, kept in weights}}

    def load_state_dict(self, state: Mapping[str, Any], module: nn.Module) -> None:
        """Take the weights of training from a state that holds them; `train` puts them back."""
        if self._optimizer is not None and _KEY in state:
            names = {id(parameter): name for name, parameter in module.named_parameters()}
            self._training = [state[_KEY][names[id(p)]] for p in self._parameters()]

    def _parameters(self) -> list[Tensor]:
        return [p for group in self._optimizer.param_groups for p in group["params"]]
