"""The pretended accelerator `fake`: what torch asks of the Python side of a device.

torch imports this file itself, in every process that has its folder on `PYTHONPATH`, by the entry
point `torch.backends`, as it does with the back ends of real devices; see `build.py`.

Environment variables: `FAKE_DEVICES`, how many there are (2 by default); `FAKE_LACKS`, words of
"float64", "pinned", "streams", "scaler", "collectives", "checkpointing": what this device, or torch
with it, cannot do.
"""

import contextlib
import importlib
import os
import sys
import types
from typing import Any

import torch

_c: Any = importlib.import_module("fake_device_c")
_torch: Any = torch  # not all of its names are declared
_utils: Any = torch.utils

NAME = "fake"
LACKS = set(os.environ.get("FAKE_LACKS", "").split())

waits, calls, reset, pending = _c.waits, _c.calls, _c.reset, _c.pending
set_count, raise_on_wait, set_limit, late_everywhere = (
    _c.set_count,
    _c.raise_on_wait,
    _c.set_limit,
    _c.strict,
)


def _index(device: Any = None) -> int:
    if isinstance(device, int):
        return device
    index = None if device is None else torch.device(device).index
    return _c.current() if index is None else index


@contextlib.contextmanager
def _device(device: Any) -> Any:
    old = _c.exchange(_index(device))
    try:
        yield
    finally:
        _c.exchange(old)


looks = 0  # how often was asked whether there are devices, as CUDA, once asked, forbids to fork


def _is_available() -> bool:
    global looks
    looks += os.environ.get("PYTORCH_NVML_BASED_CUDA_CHECK") != "1"
    return bool(_c.count() > 0)


def _generator(device: Any = None) -> Any:
    return _c.generator(_index(device))


class _Stream(torch.Stream):
    def __new__(cls, device: Any = None, priority: int = 0, **_: Any) -> Any:
        return torch.Stream.__new__(cls, torch.device(NAME, _index(device)), priority=priority)


class _Event(torch.Event):
    def __new__(cls, enable_timing: bool = False, **_: Any) -> Any:
        return torch.Event.__new__(cls, NAME, enable_timing=enable_timing)


def _module() -> types.ModuleType:
    """Return `torch.fake`, with the names that modules of devices have."""
    module: Any = types.ModuleType(f"torch.{NAME}")
    module.is_available = _is_available
    module.is_initialized = _c.is_used
    module._is_in_bad_fork = lambda: False
    module._lazy_init = module.init = lambda: None
    module.device_count = _c.count
    module.current_device = _c.current
    module.set_device = lambda device: _c.exchange(_index(device)) and None
    module.device = module._device = _device
    module._exchange_device = _c.exchange
    module._maybe_exchange_device = lambda i: _c.exchange(i) if i >= 0 else -1
    module.synchronize = lambda device=None: torch.accelerator.synchronize(_index(device))
    module.Stream, module.Event = _Stream, _Event
    module.stream = lambda stream: stream or contextlib.nullcontext()
    module.current_stream = lambda device=None: torch.accelerator.current_stream(_index(device))
    module.default_stream, module.set_stream = module.current_stream, torch.accelerator.set_stream
    module.is_current_stream_capturing = lambda: False
    module.manual_seed = lambda seed: _generator().manual_seed(seed)
    module.manual_seed_all = lambda seed: [
        _generator(i).manual_seed(seed) for i in range(_c.count())
    ]
    module.initial_seed = lambda: _generator().initial_seed()
    module.get_rng_state = lambda device=None: _generator(device).get_state()
    module.set_rng_state = lambda state, device=None: _generator(device).set_state(state)
    module.get_rng_state_all = lambda: [module.get_rng_state(i) for i in range(_c.count())]
    module.set_rng_state_all = lambda states: [
        module.set_rng_state(state, i) for i, state in enumerate(states)
    ]
    module.get_amp_supported_dtype = lambda: [torch.float16, torch.bfloat16]
    module.is_bf16_supported = lambda *_: True
    module.get_device_name = lambda device=None: "Pretended device"
    module.get_device_capability = lambda device=None: (9, 0)
    for name in ("memory_allocated", "max_memory_allocated", "reset_peak_memory_stats"):
        figure = getattr(torch.accelerator, name)
        setattr(module, name, lambda device=None, figure=figure: figure(_index(device)))
    module.memory_reserved = module.memory_allocated
    module.max_memory_reserved = module.max_memory_allocated
    module.mem_get_info = lambda device=None: torch.accelerator.get_memory_info(_index(device))
    module.empty_cache = lambda: None
    return module  # type: ignore[no-any-return]


def _group(store: Any, rank: int, size: int, timeout: Any) -> Any:
    from torch._C._distributed_c10d import ProcessGroupGloo

    return _c.group(ProcessGroupGloo(store, rank, size, timeout=timeout))


def register() -> None:
    """Make the device known to torch; torch calls it when it is imported."""
    import torch.distributed as dist

    _c.set_count(int(os.environ.get("FAKE_DEVICES", "2")))
    for what in LACKS - {"checkpointing"}:
        _c.lack(what)
    _utils.rename_privateuse1_backend(NAME)
    module = _module()
    if "checkpointing" not in LACKS:  # by this torch knows that the device may have drawn numbers
        vars(module)["_initialized"] = True
    sys.modules[f"torch.{NAME}"] = module
    _torch._register_device_module(NAME, module)
    _utils.generate_methods_for_privateuse1_backend(for_storage=True)
    if "collectives" not in LACKS:
        dist.Backend.register_backend("fakeccl", _group, devices=[NAME])
