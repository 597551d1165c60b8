"""How callbacks write numbers for people."""

from collections.abc import Iterable, Mapping

from trainkit.formatting import count

__all__ = ["every", "values_by_loader", "values_line"]


def every(number: int, noun: str) -> str:
    """Return how often something comes, such as `every step` or `every 2 steps`."""
    return f"every {noun if number == 1 else count(number, noun)}"


def values_line(values: Mapping[str, float]) -> str:
    """Return values by name on one line, with four digits each; NaN is written `nan`."""
    return ", ".join(f"{name} {value:.4g}" for name, value in values.items())


def values_by_loader(values: Mapping[str, float], loaders: Iterable[str]) -> list[str]:
    """Return the metrics of an evaluation, in a line for each loader that has a name."""
    lines, rest = [], dict(values)
    for prefix in (f"eval/{loader}/" for loader in loaders if loader):
        names = [name for name in values if name.startswith(prefix)]
        own = {name.removeprefix(prefix): rest.pop(name) for name in names}
        if own:
            lines.append(f"{prefix.removesuffix('/')}: {values_line(own)}")
    return [*lines, values_line(rest)] if rest else lines
