"""Count the floating-point operations of what runs."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from trainkit.callbacks._support.compilation import is_compiled
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
        self._mode = _Counting()
        self._running = False

    @property
    def flops(self) -> int:
        """Operations so far."""
        return self._mode.flops

    def start(self) -> None:
        """Count from now on."""
        self._mode.__enter__()  # type: ignore[no-untyped-call]
        self._running = True

    def stop(self) -> None:
        """Count no more, until the next start."""
        if self._running:
            self._running = False
            self._mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]


class _Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = 0
        self._formulas = _formulas()

    @override
    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        formula = self._formulas.get(getattr(func, "_overloadpacket", func))
        if formula is not None:
            self.flops += formula(*args, **kwargs, out_val=output)
        return output


def _formulas() -> dict[Any, Callable[..., int]]:
    """Return what torch knows, and attention on the CPU, which it leaves out."""
    from torch.utils import flop_counter

    known: Any = flop_counter

    def forward(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> int:
        return int(known.sdpa_flop_count(query.shape, key.shape, value.shape))

    def backward(grad: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> int:
        shapes = [tensor.shape for tensor in (grad, query, key, value)]
        return int(known.sdpa_backward_flop_count(*shapes))

    aten = torch.ops.aten
    return {
        aten._scaled_dot_product_flash_attention_for_cpu: forward,
        aten._scaled_dot_product_flash_attention_for_cpu_backward: backward,
        **known.flop_registry,
    }
