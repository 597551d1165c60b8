"""Modules without values."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)


@contextmanager
def init_empty_weights(include_buffers: bool = False) -> Iterator[None]:
    """Let modules that are made inside have their parameters on the device `meta`, without memory.

    Ties between parameters are kept. Fill such a model by `load_checkpoint_in_model`.

    Args:
        include_buffers: Also make the buffers there. Those that are not saved with a model then
            have to be filled by hand.
    """
    with ExitStack() as stack:
        # Torch's types say that the hooks return nothing; its documentation says what they return.
        on_parameter: Callable[..., Any] = _emptied_parameter
        on_buffer: Callable[..., Any] = _emptied_buffer
        hooks = [register_module_parameter_registration_hook(on_parameter)]
        if include_buffers:
            hooks.append(register_module_buffer_registration_hook(on_buffer))
            stack.enter_context(torch.device("meta"))
        for hook in hooks:
            stack.callback(hook.remove)
        yield


def _emptied_parameter(
    module: nn.Module, name: str, parameter: nn.Parameter | None
) -> nn.Parameter | None:
    if parameter is None or parameter.is_meta:
        return parameter  # the same object, so that ties are kept
    empty = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
    vars(empty).update(vars(parameter))
    return empty


def _emptied_buffer(module: nn.Module, name: str, buffer: Tensor | None) -> Tensor | None:
    return buffer if buffer is None else buffer.to("meta")
