"""How callbacks write numbers for people."""

from collections.abc import Iterable, Mapping

__all__ = ["duration", "figures", "figures_by_loader"]


def duration(seconds: float) -> str:
    """Return seconds as `mm:ss` or `h:mm:ss`."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes:02}:{rest:02}"


def figures(values: Mapping[str, float]) -> str:
    """Return figures by name on one line, with four digits each; NaN is written `nan`."""
    return ", ".join(f"{name} {value:.4g}" for name, value in values.items())


def figures_by_loader(values: Mapping[str, float], loaders: Iterable[str]) -> list[str]:
    """Return figures of an evaluation, in a line for each loader that has a name."""
    lines, rest = [], dict(values)
    for prefix in (f"eval/{loader}/" for loader in loaders if loader):
        names = [name for name in values if name.startswith(prefix)]
        own = {name.removeprefix(prefix): rest.pop(name) for name in names}
        if own:
            lines.append(f"{prefix.removesuffix('/')}: {figures(own)}")
    return [*lines, figures(rest)] if rest else lines
