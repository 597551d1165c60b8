"""Full precision: nothing is converted, nothing is scaled."""

from contextlib import AbstractContextManager, nullcontext

from typing_extensions import override

from trainkit.precision.precision import Precision

__all__ = ["FP32"]

_NOTHING: AbstractContextManager[object] = nullcontext()


class FP32(Precision):
    """Runs the model in the dtype of its parameters."""

    name = "fp32"

    @override
    def autocast(self) -> AbstractContextManager[object]:
        return _NOTHING
