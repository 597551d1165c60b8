"""A user's module, with state of its own."""

calls = 0
known = 1.0


class State:
    """Attributes of a class, as some write settings."""

    number = 0


def factor() -> float:
    """Return another number at each call."""
    global known
    known *= 1.01
    State.number += 1
    return known
