"""Count the floating-point operations of what runs."""

from typing import Any

from torch import nn

from trainkit.basics.torch_internals import attention_on_cpu
from trainkit.callbacks._support.model_table import is_compiled
from trainkit.errors import ConfigError

__all__ = ["FlopCounter"]


class FlopCounter:
    """Counts the operations of matrix products, convolutions and attention while it is started.

    What runs gives the same bits as without it, a little slower. Each multiplication and each
    addition is one operation.

    Args:
        module: What will run.

    Raises:
        ConfigError: The model is compiled; then torch shows no operations.
    """

    def __init__(self, module: nn.Module) -> None:
        if is_compiled(module):
            raise ConfigError(
                '`flops="auto"` counts the operations as torch runs them, but the model is '
                "compiled. Pass the number, which the same model tells without `compile`."
            )
        self._counted = 0  # until the latest stop
        self._mode: Any = None

    @property
    def flops(self) -> int:
        """Operations so far."""
        return self._counted + (0 if self._mode is None else self._mode.get_total_flops())

    def start(self) -> None:
        """Count from now on."""
        from torch.utils import flop_counter

        known: Any = flop_counter
        forward, backward = attention_on_cpu()  # which torch leaves out
        formulas = {
            forward: (lambda q, k, v, *_, **__: known.sdpa_flop_count(q, k, v)),
            backward: (
                lambda grad, q, k, v, *_, **__: known.sdpa_backward_flop_count(grad, q, k, v)
            ),
        }
        self._mode = known.FlopCounterMode(display=False, custom_mapping=formulas)
        self._mode.__enter__()

    def stop(self) -> None:
        """Count no more, until the next start."""
        if self._mode is not None:
            self._counted, mode, self._mode = self.flops, self._mode, None
            mode.__exit__(None, None, None)
