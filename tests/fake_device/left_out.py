"""What the pretended device cannot show, by the reason."""

__all__ = ["LEFT_OUT"]

LEFT_OUT: dict[str, tuple[str, ...]] = {}
