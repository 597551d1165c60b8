"""NumPy's global generator, saved and put back in microseconds where nobody has drawn from it.

A batch is read under keys of its samples, and what the generator was comes back after it. NumPy's
`get_state` and `set_state` make an object of each of its 624 words, 110 us together. So what was
saved last is kept beside the memory that holds it: while that is the same, so is the state. That
the memory is what it is taken for is seen from the state that NumPy gives; where it is not, and
with another bit generator or NumPy before 1.24, NumPy's two functions are called.
"""

import ctypes
import struct
import sys
from typing import Any

_STATE = 625 * 4  # bytes of MT19937: 624 words and the position in them
_POSITION = struct.Struct("i")
_HEAD = object.__basicsize__  # of every object, with the count of its references

_known: tuple[Any, bytes] | None = None  # the state saved or put back last, and its memory


def save() -> Any:
    """Return the state, as `numpy.random.get_state` does."""
    global _known
    memory = _memory()
    if _known is None or _known[1] != memory:
        state = sys.modules["numpy"].random.get_state()
        if not memory or memory[:_STATE] != state[1].tobytes() + _POSITION.pack(state[2]):
            return state
        _known = state, memory
    return _known[0]


def restore(state: Any) -> None:
    """Put back what `save` returned."""
    global _known
    random: Any = sys.modules["numpy"].random
    if _known is None or state is not _known[0] or not _memory():
        random.set_state(state)
        return
    if state[3]:  # the second number of a pair from a normal distribution waits
        random.set_state(state)
    else:
        random.seed(0)  # none waits after this
        ctypes.memmove(random.get_bit_generator().ctypes.state_address, _known[1], _STATE)
    _known = state, _memory()


def _memory() -> bytes:
    """Return the memory of the bit generator, and of what holds it and a number that waits."""
    random: Any = sys.modules["numpy"].random
    generator = getattr(random, "get_bit_generator", lambda: None)()
    if not isinstance(generator, random.MT19937):
        return b""
    own = random.get_state.__self__
    around = ctypes.string_at(id(own) + _HEAD, type(own).__basicsize__ - _HEAD)
    return ctypes.string_at(generator.ctypes.state_address, _STATE) + around
