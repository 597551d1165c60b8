"""Whether a model runs compiled: what watches its inside then sees nothing, or breaks it."""

from torch import nn

__all__ = ["is_compiled"]


def is_compiled(module: nn.Module) -> bool:
    """Return whether any part of a model goes through `torch.compile`."""
    return any(
        part._compiled_call_impl is not None or hasattr(part, "_orig_mod")
        for part in module.modules()
    )
