"""Precision plugins: the number format of forward, backward and update."""

from typing import TYPE_CHECKING

from trainkit.lazy import lazy_exports

if TYPE_CHECKING:
    from trainkit.precision.bf16 import BF16 as BF16
    from trainkit.precision.fp16 import FP16 as FP16
    from trainkit.precision.fp32 import FP32 as FP32
    from trainkit.precision.precision import Precision as Precision

__all__, __getattr__, __dir__ = lazy_exports(
    __name__, {"bf16": "BF16", "fp16": "FP16", "fp32": "FP32", "precision": "Precision"}
)
