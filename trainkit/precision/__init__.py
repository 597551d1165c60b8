"""Precision plugins: the number format of forward, backward and update."""

from trainkit.precision.bf16 import BF16
from trainkit.precision.fp16 import FP16
from trainkit.precision.fp32 import FP32
from trainkit.precision.precision import Precision

__all__ = ["BF16", "FP16", "FP32", "Precision"]
