"""Take off what was put around a model."""

from typing import Any

from torch import Tensor, nn

from trainkit.accelerator.autocasting import run_plainly
from trainkit.checkpoint.resharding.sharding_spec import is_sharded
from trainkit.distributed import Processes, check_called_by_all
from trainkit.export.state import unwrapped, whole

__all__ = ["unwrap", "whole_state"]


def unwrap(
    model: nn.Module, *, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True
) -> nn.Module:
    """Return the module inside of data parallelism.

    Args:
        keep_fp32_wrapper: Whether its forward still runs under autocast.
        keep_torch_compile: Whether a model that `torch.compile` returned stays compiled.
    """
    model = unwrapped(model, keep_torch_compile=keep_torch_compile)
    if not keep_fp32_wrapper:
        run_plainly(model)
    return model


def whole_state(model: nn.Module, processes: Processes) -> dict[str, Any]:
    """Return the state of a model; where it is sharded every process must ask for it."""
    state = model.state_dict()
    if any(map(is_sharded, state.values())):
        check_called_by_all(processes, "get_state_dict")
    return {name: whole(v) if isinstance(v, Tensor) else v for name, v in state.items()}
