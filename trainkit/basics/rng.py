"""Keyed random streams: every random number of a run is a function of its seed and a key.

A stream is named by a key and never by what was drawn before it, so it is the same after a
resume, with other workers and on another number of processes (rule 12):

- `init` (equal on all processes) for parameters,
- `order(epoch)` (equal on all processes) for samplers,
- `sample(epoch, index)` for whatever is random inside a data set,
- `device(rank)` for dropout and the like.

A run's draws come from the global generators, because models and data sets draw from nothing else.
They are lent to it: its caller's come back at its end.
"""

import ctypes
import hashlib
import random
import struct
import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from trainkit.basics.device import get_rng_state, set_rng_state, siblings

_MASK = 2**64 - 1
_modules: dict[str, Any] = sys.modules  # whoever does not use NumPy does not pay for it
_python: Any = random.seed.__self__  # type: ignore[attr-defined]  # the global generator
_python_seed = super(random.Random, _python).seed
_runs = 0  # under way in this program

_BYTES = 625 * 4  # of NumPy's MT19937: 624 words and the position in them
_STATE = ctypes.c_char * _BYTES
_POSITION = struct.Struct("i")
_HEAD = object.__basicsize__  # of every object, with the count of its references
_known: tuple[Any, bytes] | None = None  # NumPy's state saved or put back last, and its memory

HostState = tuple[Any, Any, torch.Tensor]
"""The states of the generators of Python, NumPy (None if never imported) and torch."""


def derive(seed: int, *key: int | str) -> int:
    """Return the seed of the stream that `key` names under `seed`, in [0, 2**63)."""
    digest = hashlib.blake2b(repr((seed, *key)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def order_seed(seed: int, epoch: int) -> int:
    """Return the seed under which samplers run in `epoch`, equal on all processes."""
    return derive(seed, "order", epoch)


def sample_stream(seed: int, epoch: int) -> int:
    """Return the key of the samples of `epoch`, which `in_stream` mixes with an index."""
    return derive(seed, "sample", epoch)


def in_stream(stream: int, index: int | str) -> int:
    """Return the seed of `index` in a stream, in [0, 2**63).

    For integers this is the mixing function of SplitMix64 (Steele, Lea and Flood, "Fast
    splittable pseudorandom number generators", 2014): no call for each sample but this one.
    """
    if type(index) is str:
        return derive(stream, index)
    z = (stream + (index + 1) * 0x9E3779B97F4A7C15) & _MASK  # type: ignore[operator]
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return (z ^ (z >> 31)) >> 1


def sample_seed(seed: int, epoch: int, index: int | str) -> int:
    """Return the seed under which sample `index` is fetched in `epoch`."""
    return in_stream(sample_stream(seed, epoch), index)


def device_seed(seed: int, rank: int, step: int = 0) -> int:
    """Return the seed of dropout and the like on process `rank`, from `step` on."""
    return derive(seed, "device", rank, step)


def seed_host(value: int) -> None:
    """Seed the global generators of Python, NumPy (if imported) and torch on the CPU."""
    # What `random.seed` does for an integer, without its checks of other types.
    _python_seed(value)
    _python.gauss_next = None
    if "numpy" in _modules:
        _modules["numpy"].random.seed(value & 0xFFFFFFFF)
    # 30 times cheaper than torch.manual_seed, which also looks after every accelerator.
    torch.default_generator.manual_seed(value)


def seed_all(value: int, device: torch.device) -> None:
    """Seed the generators of `seed_host`, and those of all accelerators of the type of `device`."""
    seed_host(value)
    if device.type != "cpu":  # else nobody uses them, and torch would seed them when they are
        torch.manual_seed(value)


def save_host() -> HostState:
    """Return the states of the global generators of Python, NumPy and torch on the CPU.

    `get_state` and `set_state` of NumPy make an object of each of 624 words, 110 us for a batch.
    So its state is kept beside the memory that holds it, and while that is the same, so is the
    state. Where the memory is not what it is taken for, which a state shows, they are called.
    """
    global _known
    if "numpy" not in _modules:
        return random.getstate(), None, torch.default_generator.get_state()
    numpy, memory = _modules["numpy"].random, b""
    is_new = "get_bit_generator" in numpy.__dict__  # since NumPy 1.24
    if is_new and type(generator := numpy.get_bit_generator()) is numpy.MT19937:
        owner = numpy.get_state.__self__  # holds half of a normal pair that waits
        around = ctypes.c_char * (type(owner).__basicsize__ - _HEAD)
        memory = _STATE.from_address(generator.ctypes.state_address).raw
        memory += around.from_address(id(owner) + _HEAD).raw
    if not memory or _known is None or _known[1] != memory:
        state = numpy.get_state()
        if not memory or memory[:_BYTES] != state[1].tobytes() + _POSITION.pack(state[2]):
            return random.getstate(), state, torch.default_generator.get_state()
        _known = state, memory
    return random.getstate(), _known[0], torch.default_generator.get_state()


def restore_host(state: HostState) -> None:
    """Put back what `save_host` returned."""
    python_state, numpy_state, torch_state = state
    random.setstate(python_state)
    numpy = _modules["numpy"].random if "numpy" in _modules else None
    if numpy_state is None and numpy is not None:
        numpy.seed()  # as it is after its import
    elif numpy is not None:
        known = _known[1] if _known is not None and numpy_state is _known[0] else b""
        generator: Any = numpy.get_bit_generator() if known else None
        if type(generator) is numpy.MT19937 and not numpy_state[3]:
            numpy.seed(0)  # half of a normal pair waits no more
            ctypes.memmove(generator.ctypes.state_address, known, _BYTES)
        else:
            numpy.set_state(numpy_state)
    torch.default_generator.set_state(torch_state)


def state_dict(device: torch.device) -> dict[str, Any]:
    """Return the states of all global generators, and that of a device; None for the CPU."""
    python_state, numpy_state, torch_state = save_host()
    states = {"python": python_state, "numpy": numpy_state, "torch": torch_state}
    return states | {"device": None if device.type == "cpu" else get_rng_state(device)}


def load_state_dict(state: Mapping[str, Any], device: torch.device) -> None:
    """Put back what `state_dict` returned; that of a device only where both are of one.

    Further keys of `state` are left alone.
    """
    restore_host((state["python"], state["numpy"], state["torch"]))
    if state["device"] is not None and device.type != "cpu":
        set_rng_state(state["device"], device)


@contextmanager
def preserved(*devices: torch.device) -> Iterator[None]:
    """Put the global generators back at the end, and those of `devices` that are accelerators."""
    host = save_host()
    states = [(each, get_rng_state(each)) for each in devices if each.type != "cpu"]
    try:
        yield
    finally:
        restore_host(host)
        for device, state in states:
            set_rng_state(state, device)


@contextmanager
def lent(device: torch.device) -> Iterator[None]:
    """Let the global generators, and those of all such devices, be a run's; then put them back."""
    global _runs
    with preserved(*siblings(device)):
        _runs += 1
        try:
            yield
        finally:
            _runs -= 1


def undisturbed(device: torch.device) -> AbstractContextManager[None]:
    """Return what keeps the streams of a run as they are while a user's code draws inside.

    Outside of a run it does nothing: what that code draws moves the generators, as in any loop.
    """
    return preserved(device) if _runs else nullcontext()


@contextmanager
def determinism(enabled: bool) -> Iterator[None]:
    """Let torch use deterministic algorithms only, inside the context and where wanted."""
    if not enabled:
        yield
        return
    before = torch.are_deterministic_algorithms_enabled()
    only_warned = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=only_warned)


# Generators beside the global ones, of Python, NumPy and torch.


def is_generator(value: object) -> bool:
    """Return whether `value` draws on the CPU from a state that it can tell."""
    if isinstance(value, torch.Generator):
        return value.device.type == "cpu"
    if isinstance(value, random.Random):
        return not isinstance(value, random.SystemRandom)
    numpy = _modules.get("numpy")
    kinds = () if numpy is None else (numpy.random.Generator, numpy.random.RandomState)
    return isinstance(value, kinds)


def seed_generator(generator: Any, seed: int) -> None:
    """Seed a generator with a number in [0, 2**63)."""
    if isinstance(generator, torch.Generator):
        generator.manual_seed(seed)
    elif isinstance(generator, random.Random):
        generator.seed(seed)
    elif hasattr(generator, "bit_generator"):
        generator.bit_generator.state = type(generator.bit_generator)(seed).state
    else:
        generator.seed(seed & 0xFFFFFFFF)


def state_of(generator: Any) -> Any:
    """Return the state of a generator."""
    if isinstance(generator, random.Random):
        return generator.getstate()
    if hasattr(generator, "bit_generator"):
        return generator.bit_generator.state
    return generator.get_state()


def set_state(generator: Any, state: Any) -> None:
    """Put back what `state_of` returned."""
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif hasattr(generator, "bit_generator"):
        generator.bit_generator.state = state
    else:
        generator.set_state(state)


def new_like(generator: Any) -> Any:
    """Return another generator of the same kind."""
    if hasattr(generator, "bit_generator"):
        return type(generator)(type(generator.bit_generator)())
    return type(generator)()
