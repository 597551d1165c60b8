"""How callbacks write numbers for people."""

from collections.abc import Mapping

__all__ = ["duration", "figures"]


def duration(seconds: float) -> str:
    """Return seconds as `mm:ss` or `h:mm:ss`."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes:02}:{rest:02}"


def figures(values: Mapping[str, float]) -> str:
    """Return figures by name on one line, with four digits each; NaN is written `nan`."""
    return ", ".join(f"{name} {value:.4g}" for name, value in values.items())
