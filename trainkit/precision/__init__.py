"""Precision plugins: the number format of forward, backward and update."""

from typing import TYPE_CHECKING

from trainkit.lazy import lazy_exports

if TYPE_CHECKING:
    from trainkit.precision.fp8 import FP8 as FP8
    from trainkit.precision.fp16 import FP16 as FP16
    from trainkit.precision.precision import BF16 as BF16, FP32 as FP32, Precision as Precision

__all__, __getattr__, __dir__ = lazy_exports(__name__)
