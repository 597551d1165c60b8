"""Modules without values."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)


def init_empty_weights(include_buffers: bool = False) -> AbstractContextManager[None]:
    """Let modules that are made inside have their parameters on the device `meta`, without memory.

    Ties between parameters are kept. Fill such a model by `load_checkpoint_in_model`.

    Args:
        include_buffers: Also make the buffers there. Those that are not saved with a model then
            have to be filled by hand.
    """
    return init_on_device("meta", include_buffers)


@contextmanager
def init_on_device(
    device: torch.device | str | int, include_buffers: bool = False
) -> Iterator[None]:
    """Let modules that are made inside have their parameters on a device; ties are kept.

    Args:
        device: Where they are.
        include_buffers: Also make the buffers there, and other tensors that are made inside.
    """
    place = torch.device(device)
    with ExitStack() as stack:
        # Torch's types say that the hooks return nothing; its documentation says what they return.
        on_parameter: Callable[..., Any] = partial(_moved_parameter, place)
        on_buffer: Callable[..., Any] = partial(_moved_buffer, place)
        hooks = [register_module_parameter_registration_hook(on_parameter)]
        if include_buffers:
            hooks.append(register_module_buffer_registration_hook(on_buffer))
            stack.enter_context(place)
        for hook in hooks:
            stack.callback(hook.remove)
        yield


def _moved_parameter(
    place: torch.device, module: nn.Module, name: str, parameter: nn.Parameter | None
) -> nn.Parameter | None:
    if parameter is None or parameter.device == place:
        return parameter  # the same object, so that ties are kept
    moved = nn.Parameter(parameter.detach().to(place), requires_grad=parameter.requires_grad)
    vars(moved).update(vars(parameter))
    return moved


def _moved_buffer(
    place: torch.device, module: nn.Module, name: str, buffer: Tensor | None
) -> Tensor | None:
    return buffer if buffer is None else buffer.to(place)
