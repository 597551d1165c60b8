"""What is installed and what this machine has: `is_cuda_available`, `is_wandb_available`, ..."""

from collections.abc import Callable
from functools import partial
from importlib import metadata
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed

from trainkit.basics.device import accelerator_kind, lacks_bf16
from trainkit.errors import ConfigError

_COMPARE = {
    "<": "__lt__", "<=": "__le__", "==": "__eq__", "!=": "__ne__", ">=": "__ge__", ">": "__gt__"
}  # fmt: skip
_CALLED_OTHERWISE = {
    "4bit_bnb": "bitsandbytes", "8bit_bnb": "bitsandbytes", "bnb": "bitsandbytes",
    "bitsandbytes_multi_backend": "bitsandbytes",
    "fp8": "torchao", "lomo": "lomo_optim", "megatron_lm": "megatron",
    "torchdata_stateful_dataloader": "torchdata",
}  # fmt: skip
_DEVICES = ("cuda", "hpu", "mlu", "mps", "musa", "neuron", "npu", "sdaa", "xpu")
_ANSWERS: dict[str, Callable[[], bool]] = {
    "bf16": lambda: not lacks_bf16(torch.device(accelerator_kind() or "cpu")),
    "fp16": lambda: True,
    "rocm": lambda: torch.version.hip is not None and torch.cuda.is_available(),
    "weights_only": lambda: True,
    "xccl": torch.distributed.is_xccl_available,
}
# What trainkit does not drive is not available to it, installed or not.
_NEVER = ("pippy", "torch_xla", "transformer_engine_mxfp8")


def compare_versions(library_or_version: Any, operation: str, requirement_version: str) -> bool:
    """Return whether a version, or that of a package, is `operation` (<, <=, ...) another."""
    from packaging.version import Version  # which transformers brings

    if operation not in _COMPARE:
        known = ", ".join(_COMPARE)
        raise ConfigError(f"`operation` must be one of {known}, but is {operation!r}.")
    given = library_or_version
    version = Version(metadata.version(given)) if isinstance(given, str) else given
    return bool(getattr(version, _COMPARE[operation])(Version(requirement_version)))


def is_torch_version(operation: str, version: str) -> bool:
    """Return whether the version of torch is `operation` (<, <=, ...) another."""
    return compare_versions("torch", operation, version)


def is_available(what: str, *args: Any, **kwargs: Any) -> bool:
    """Return whether a package is installed, or whether torch has a device here."""
    if what in _NEVER:
        return False
    if what in _DEVICES:
        return accelerator_kind() == what
    if what in _ANSWERS:
        return _ANSWERS[what]()
    spec = find_spec(_CALLED_OTHERWISE.get(what, what))
    return spec is not None and spec.origin is not None  # a folder `wandb/` is no package


def __getattr__(name: str) -> Callable[..., bool]:
    """Return what answers for `is_..._available`."""
    return partial(is_available, name.removeprefix("is_").removesuffix("_available"))
